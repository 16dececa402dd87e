"""The columns of a job that have tokens: log-probabilities of the prompt, and the ids of prompt and text."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoTokenizer

import batchgen
from batchgen.core.errors import InputError

TEXTS = ["The ferry left the harbour.", "The ferry left late.", "", "Two and two"]
OPTIONS = {"dtype": "float32", "max_tokens": 4, "ignore_eos": True, "chat": False}


@pytest.fixture(scope="module")
def model(tiny_models):
    return tiny_models("llama")


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokens") / "in.parquet"
    pq.write_table(pa.table({"prompt": TEXTS}), path)
    return path


def check_prompt(model, text, positions):
    path, reference = model
    ids = AutoTokenizer.from_pretrained(path).encode(text)
    with torch.inference_mode():
        logprobs = reference(torch.tensor([ids])).logits[0].log_softmax(-1)
    assert [position["token_id"] for position in positions] == ids
    assert positions[0]["logprob"] is None and not positions[0]["top"]
    for i, position in enumerate(positions[1:]):
        assert position["logprob"] == pytest.approx(logprobs[i, ids[i + 1]].item(), abs=1e-4)
        assert [token["logprob"] for token in position["top"]] == pytest.approx(
            logprobs[i].topk(2).values.tolist(), abs=1e-4
        )


def read(path):
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines()]
    return pq.read_table(path).to_pylist()


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_log_probabilities_of_prompts_are_a_column(model, table, tmp_path, suffix):
    """One list for a row, whatever the number of samples; null for a row that failed."""
    for n in (1, 2):
        output = tmp_path / f"{n}{suffix}"
        more = {"n": n, "temperature": 1.0} if n > 1 else {}
        batchgen.run(str(model[0]), table, output, prompt_logprobs=2, **OPTIONS, **more)
        rows = read(output)
        assert rows[2]["error"] and rows[2]["prompt_logprobs"] is None
        for row in (rows[0], rows[1], rows[3]):
            check_prompt(model, row["prompt"], row["prompt_logprobs"])


def test_token_ids_of_prompts_and_texts_are_columns(model, table, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(model[0])
    batchgen.run(str(model[0]), table, tmp_path / "one.parquet", token_ids=True, **OPTIONS)
    batchgen.run(str(model[0]), table, tmp_path / "two.parquet", token_ids=True, n=2, temperature=1.0, **OPTIONS)
    schema = pq.read_schema(tmp_path / "one.parquet")
    assert schema.field("token_ids").type == schema.field("prompt_token_ids").type == pa.list_(pa.int32())
    assert pq.read_schema(tmp_path / "two.parquet").field("token_ids").type == pa.list_(pa.list_(pa.int32()))
    for name in ("one", "two"):
        rows = read(tmp_path / f"{name}.parquet")
        assert rows[2]["prompt_token_ids"] is None and not rows[2]["token_ids"]
        for row in (rows[0], rows[1], rows[3]):
            assert row["prompt_token_ids"] == tokenizer.encode(row["prompt"])
            texts, ids = ([row["text"]], [row["token_ids"]]) if name == "one" else (row["text"], row["token_ids"])
            assert [tokenizer.decode(one, skip_special_tokens=True) for one in ids] == texts
            assert [len(one) for one in ids] == [4] * len(texts)


def test_a_job_that_goes_on_has_the_columns_of_all_its_rows(model, table, tmp_path):
    """Part files of rows that failed have none of these columns, and with other columns the job is another one."""
    whole, output = tmp_path / "whole.parquet", tmp_path / "out.parquet"
    options = OPTIONS | {"token_ids": True, "prompt_logprobs": 0}
    batchgen.run(str(model[0]), table, whole, **options)
    table_of_one = tmp_path / "in.parquet"
    pq.write_table(pa.table({"prompt": TEXTS[2:3]}), table_of_one)
    batchgen.run(str(model[0]), table_of_one, tmp_path / "failed.parquet", max_failed="100%", **options)
    assert read(tmp_path / "failed.parquet")[0]["token_ids"] is None
    for limit in (1, 3, None):
        batchgen.run(str(model[0]), table, output, limit=limit, **options)
    assert pq.read_table(output).equals(pq.read_table(whole))
    with pytest.raises(InputError, match="token_ids"):
        batchgen.run(str(model[0]), table, output, **(options | {"token_ids": False}))


def test_a_row_asks_for_log_probabilities_where_the_job_does(model, tmp_path):
    own = [None, {"prompt_logprobs": 2}, {"temperature": 0.0}]
    rows = pa.table({"prompt": TEXTS[:2] + TEXTS[3:], "own": [o and json.dumps(o) for o in own]})
    pq.write_table(rows, tmp_path / "in.parquet")
    options = OPTIONS | {"sampling_column": "own"}
    batchgen.run(str(model[0]), tmp_path / "in.parquet", tmp_path / "a.parquet", prompt_logprobs=0, **options)
    tops = [[len(p["top"]) for p in row["prompt_logprobs"]][1:] for row in read(tmp_path / "a.parquet")]
    assert [set(top) for top in tops] == [{0}, {2}, {0}]
    batchgen.run(str(model[0]), tmp_path / "in.parquet", tmp_path / "b.parquet", **options)
    assert "--prompt-logprobs" in read(tmp_path / "b.parquet")[1]["error"]


def test_maps_have_the_same_columns(model, table):
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"prompt": [TEXTS[0], TEXTS[3]]})
    function = batchgen.MapFunction(str(model[0]), token_ids=True, prompt_logprobs=2, cpu_memory="3GiB", **OPTIONS)
    with function:
        mapped = rows.map(function, batched=True, features=function.features(rows.features))
    for row in mapped:
        check_prompt(model, row["prompt"], row["prompt_logprobs"])
        assert row["prompt_token_ids"] == [position["token_id"] for position in row["prompt_logprobs"]]
        assert len(row["token_ids"]) == 4


def test_lines_of_an_openai_batch_ask_for_their_own(model, tmp_path):
    def line(name, url="/v1/completions", **body):
        return json.dumps({"custom_id": name, "method": "POST", "url": url, "body": {"max_tokens": 3, **body}}) + "\n"

    lines = [
        line("plain", prompt=TEXTS[0]),
        line("echo", prompt=[TEXTS[0], TEXTS[3]], echo=True, logprobs=2, temperature=0),
        line("prompt", prompt=TEXTS[0], prompt_logprobs=2),
        line("scored", prompt=TEXTS[0], echo=True, logprobs=0, max_tokens=0),
        line("chat", "/v1/chat/completions", messages=[{"role": "user", "content": "Hi"}], prompt_logprobs=1),
    ]
    (tmp_path / "in.jsonl").write_text("".join(lines))
    batchgen.run(str(model[0]), tmp_path / "in.jsonl", tmp_path / "out.jsonl", dtype="float32", token_ids=True)
    answers = {a["custom_id"]: a["response"]["body"] for a in map(json.loads, (tmp_path / "out.jsonl").open())}
    assert "prompt_logprobs" not in answers["plain"]["choices"][0] and answers["plain"]["choices"][0]["token_ids"]
    tokenizer = AutoTokenizer.from_pretrained(model[0])
    for choice, text in zip(answers["echo"]["choices"], (TEXTS[0], TEXTS[3]), strict=True):
        ids = tokenizer.encode(text)
        assert choice["text"].startswith(text) and choice["prompt_token_ids"] == ids
        with torch.inference_mode():
            logprobs = model[1](torch.tensor([ids])).logits[0].log_softmax(-1)
        scored = choice["logprobs"]["token_logprobs"]
        assert scored[0] is None and len(scored) == len(ids) + len(choice["token_ids"])
        expected = [logprobs[i, token].item() for i, token in enumerate(ids[1:])]
        assert scored[1 : len(ids)] == pytest.approx(expected, abs=1e-4)
    positions = answers["prompt"]["choices"][0]["prompt_logprobs"]
    assert positions[0] is None and all(2 <= len(position) <= 3 for position in positions[1:])
    assert answers["scored"]["choices"][0]["text"] == TEXTS[0] and answers["scored"]["usage"]["completion_tokens"] == 0
    assert len(answers["chat"]["prompt_logprobs"]) == answers["chat"]["usage"]["prompt_tokens"]
