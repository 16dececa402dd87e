"""Whole jobs over inputs that a scheduler may meet: empty ones, and lines that are no rows."""

import json

import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest
from command_line import invoke

GENERATED = ["text", "finish_reason", "prompt_tokens", "generated_tokens", "error"]


@pytest.fixture(scope="module")
def model(tiny_models):
    return str(tiny_models("llama")[0])


def run(model, source, output, *args):
    return invoke("run", "-m", model, "-i", source, "-o", output, "--max-tokens", 3, "--progress", "none", *args)


def write_empty(path):
    if path.suffix == ".parquet":
        pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), path)
    else:
        path.write_text("prompt\n" if path.suffix == ".csv" else "")
    return path


def columns_of(path):
    if path.suffix == ".parquet":
        return pq.read_schema(path).names
    if path.suffix == ".arrow":
        return pa.ipc.open_stream(path).read_all().column_names
    if path.suffix == ".csv":
        return pa_csv.read_csv(path).column_names
    assert path.read_bytes() == b""
    return None


@pytest.mark.parametrize("given", [".parquet", ".csv", ".jsonl"])
def test_an_input_without_rows_gives_an_output_without_rows(model, tmp_path, given):
    source = write_empty(tmp_path / f"in{given}")
    own = [] if given == ".jsonl" else ["prompt"]
    for wanted in (".parquet", ".csv", ".jsonl", ".arrow"):
        output = tmp_path / f"out{wanted}"
        for _ in range(2):
            code, stdout, stderr = run(model, source, output)
            assert (code, stderr) == (0, ""), stderr
            assert "0 rows ok, 0 failed" in stdout
        assert columns_of(output) in (None, own + GENERATED)
    score = tmp_path / "score.parquet"
    assert invoke("run", "-m", model, "-i", source, "-o", score, "--task", "score", "--progress", "none")[0] == 0
    assert columns_of(score) == [*own, "logprob", "num_tokens", "perplexity", "prompt_tokens", "error"]
    assert run(model, source, tmp_path / "dry.jsonl", "--dry-run", "--shard", "1/2")[0] == 0
    code, _, stderr = invoke("plan", "-m", model, "-i", source)
    assert code == 2 and "has no rows" in stderr and "\n" not in stderr


def test_bad_lines_come_out_as_failed_rows(model, tmp_path):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "The ferry"}\n{"prompt": \n{"prompt": "left"}\n')
    code, _, stderr = run(model, source, output)
    assert code == 2 and "line 2" in stderr and "\n" not in stderr and not output.exists()
    assert run(model, source, output, "--on-bad-line", "skip")[0] == 0
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["error"] is None for row in rows] == [True, False, True]
    assert "line 2" in rows[1]["error"] and rows[1]["error"].endswith('{"prompt":') and rows[1]["prompt"] is None
    code, _, stderr = run(model, source, tmp_path / "b.jsonl", "--on-bad-line", "skip", "--on-error", "fail")
    assert code == 1 and "line 2" in stderr


def test_bad_lines_of_a_batch_go_to_its_errors(model, tmp_path):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    body = {"model": "m", "prompt": "The ferry", "max_tokens": 3}
    line = json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body})
    source.write_text(f"{line}\nnot JSON\n")
    assert run(model, source, output)[0] == 2
    assert run(model, source, output, "--on-bad-line", "skip")[0] == 0
    assert [json.loads(text)["custom_id"] for text in output.read_text().splitlines()] == ["a"]
    (error,) = map(json.loads, (tmp_path / "out.errors.jsonl").read_text().splitlines())
    assert error["custom_id"] is None and "line 2" in error["error"]["message"]
    assert "not JSON" in error["error"]["message"]
