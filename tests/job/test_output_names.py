"""An input may have columns of any names: none of them is lost, and no job is refused for them."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from command_line import invoke

import batchgen

TEXTS = ["The ferry left at six.", "Two plus two is four.", "Rain is due."]
TEMPLATE = ["--prompt-template", "Classify: {{ text }}", "--no-chat", "--max-tokens", "3", "--dtype", "float32"]


@pytest.fixture(scope="module")
def model(tiny_models):
    return str(tiny_models("llama")[0])


def answers_of(model):
    with batchgen.Engine(model, sampling=batchgen.SamplingParams(max_tokens=3), dtype="float32") as engine:
        completions = engine.generate([f"Classify: {text}" for text in TEXTS])
        return [completion.text for completion in sorted(completions, key=lambda completion: completion.index)]


def test_a_column_named_text_is_kept_and_the_answers_are_in_gen_text(model, tmp_path):
    pq.write_table(pa.table({"text": TEXTS, "label": [0, 1, 0]}), tmp_path / "data.parquet")
    output = tmp_path / "out.parquet"
    code, _, stderr = invoke("run", "-m", model, "-i", tmp_path / "data.parquet", "-o", output, *TEMPLATE)
    assert code == 0, stderr
    (said,) = [line for line in stderr.splitlines() if "gen_" in line]
    assert "the input has a column named text: the output keeps it, and what is new is in gen_text, " in said
    table = pq.read_table(output)
    assert table.column("text").to_pylist() == TEXTS and table.column("label").to_pylist() == [0, 1, 0]
    assert table.column("gen_text").to_pylist() == answers_of(model)


def test_the_output_of_a_job_is_the_input_of_the_next_one(model, tmp_path):
    source = tmp_path / "out0.parquet"
    pq.write_table(pa.table({"text": TEXTS}), source)
    for i in (1, 2):
        output = tmp_path / f"out{i}.parquet"
        report = batchgen.run(
            model, source, output, prompt_template="{{ text }}", max_tokens=2, report=str(tmp_path / "report.json")
        )
        names = pq.read_table(output).column_names
        assert report["output_columns"] == names[len(pq.read_table(source).column_names) :]
        assert json.loads((tmp_path / "report.json").read_text())["output_columns"] == report["output_columns"]
        assert len(set(names)) == len(names)
        source = output
    assert "gen2_text" in names and "gen_text" in names


def test_names_hold_over_a_resumed_job_and_rows_that_are_appended(model, tmp_path):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [json.dumps({"text": text}) + "\n" for text in TEXTS]
    source.write_text("".join(lines[:2]))
    for more in (["--limit", "1"], []):
        code, _, stderr = invoke("run", "-m", model, "-i", source, "-o", output, *TEMPLATE, *more)
        assert code == 0, stderr
    source.write_text("".join(lines))
    code, stdout, stderr = invoke("run", "-m", model, "-i", source, "-o", output, *TEMPLATE)
    assert code == 0 and "2 of them from before" in stdout, stderr
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["text"] for row in rows] == TEXTS
    assert [row["gen_text"] for row in rows] == answers_of(model)


def test_the_line_that_names_the_column_of_errors_names_the_one_that_is_there(model, tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "a", "error": "of the user"}\n{"prompt": "", "error": null}\n')
    code, stdout, stderr = invoke("run", "-m", model, "-i", source, "-o", tmp_path / "out.jsonl", "--max-tokens", "2")
    assert code == 0 and "the gen_error column tells why" in stdout, stderr
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["error"] for row in rows] == ["of the user", None] and rows[1]["gen_error"] == "the prompt is empty"


def test_map_keeps_a_column_named_text(model):
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"text": TEXTS})
    with batchgen.MapFunction(
        model, prompt_template="Classify: {{ text }}", chat=False, max_tokens=3, dtype="float32"
    ) as answer:
        mapped = rows.map(answer, batched=True)
    assert mapped["text"][:] == TEXTS and mapped["gen_text"][:] == answers_of(model)
