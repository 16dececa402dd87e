"""What a model thinks before it answers: in every output, and in jobs that go on."""

import asyncio
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import batchgen
from batchgen.core.errors import InputError
from batchgen.engine import generation
from batchgen.hf_datasets import MapFunction
from batchgen.ray.generate import Generate

PROMPTS = [f"The ferry to pier {i}" for i in range(6)]
OPTIONS = {"chat": False, "max_tokens": 3, "dtype": "float32", "cpu_memory": "4GiB"}


class TwoChannels:
    """Reads an answer and a thought from tokens that were drawn at random; of every second row no channel is named."""

    def read(self, token_ids):
        return None if token_ids[0] % 2 else (f"answer {token_ids[0]}", f"thought {token_ids[0]}")


@pytest.fixture(autouse=True)
def channels(monkeypatch):
    monkeypatch.setattr(generation.Harmony, "of", lambda tokenizer: TwoChannels())


@pytest.fixture(scope="module")
def model(tiny_models):
    return str(tiny_models("gpt_oss")[0])


@pytest.fixture
def table(tmp_path):
    table = pa.table({"prompt": PROMPTS})
    pq.write_table(table, tmp_path / "in.parquet")
    return table


def run(model, source, output, **options):
    return batchgen.run(model, source, output, offload_dir=output.parent, **{**OPTIONS, **options})


def check(rows):
    """rows: with "text" and "reasoning"."""
    thought = [row["reasoning"] for row in rows]
    assert None in thought and any(thought), "some rows name a channel, and some do not"
    assert all(t is None or row["text"] == t.replace("thought", "answer") for row, t in zip(rows, thought, strict=True))


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_the_column_of_a_job_that_goes_on(model, table, tmp_path, suffix):
    source, output, whole = tmp_path / "in.parquet", tmp_path / f"out{suffix}", tmp_path / f"whole{suffix}"
    run(model, source, output, limit=2)
    run(model, source, output)
    run(model, source, whole, share=True)
    assert output.read_bytes() == whole.read_bytes()
    if suffix == ".parquet":
        rows = pq.read_table(output).to_pylist()
    else:
        rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert list(rows[0])[:4] == ["prompt", "text", "reasoning", "finish_reason"]
    check(rows)


def test_samples_of_a_row(model, table, tmp_path):
    run(model, tmp_path / "in.parquet", tmp_path / "out.parquet", n=2, temperature=1.0)
    rows = pq.read_table(tmp_path / "out.parquet").to_pylist()
    check([{"text": t, "reasoning": r} for row in rows if row["reasoning"] for t,
    r in zip(row["text"], row["reasoning"], strict=True)])  # fmt: skip


def test_an_openai_batch(model, tmp_path):
    lines = [
        {"custom_id": str(i), "method": "POST", "url": "/v1/chat/completions",
         "body": {"model": "m", "max_tokens": 3, "messages": [{"role": "user", "content": prompt}]}}
        for i, prompt in enumerate(PROMPTS)
    ]  # fmt: skip
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run(model, source, output, chat=None)
    answers = [
        json.loads(line)["response"]["body"]["choices"][0]["message"] for line in output.read_text().splitlines()
    ]
    assert all("reasoning_content" not in m or m["reasoning_content"] for m in answers)
    check([{"text": m["content"], "reasoning": m.get("reasoning_content")} for m in answers])


def test_maps(model, table, tmp_path):
    run(model, tmp_path / "in.parquet", tmp_path / "out.parquet")
    expected = pq.read_table(tmp_path / "out.parquet").replace_schema_metadata(None)
    generate = Generate(model, **OPTIONS)
    try:
        assert asyncio.run(generate(table)).equals(expected)
    finally:
        generate.close()
    with MapFunction(model, **OPTIONS) as function:
        found = function(table)
    assert found["text"] == expected.column("text").to_pylist()
    assert found["reasoning"] == [text or "" for text in expected.column("reasoning").to_pylist()]


def test_a_column_of_the_input_named_reasoning_is_kept_beside_the_reasoning_of_the_model(model, tmp_path):
    pq.write_table(pa.table({"prompt": PROMPTS, "reasoning": PROMPTS, "x_reasoning": PROMPTS}), tmp_path / "in.parquet")
    report = run(model, tmp_path / "in.parquet", tmp_path / "out.parquet")
    assert "gen_reasoning" in report["output_columns"]
    out = pq.read_table(tmp_path / "out.parquet")
    assert out.column("reasoning").to_pylist() == PROMPTS and "gen_reasoning" in out.column_names
    with pytest.raises(InputError, match="a column named x_reasoning already: give --output-prefix gen_"):
        run(model, tmp_path / "in.parquet", tmp_path / "other.parquet", output_prefix="x_")
