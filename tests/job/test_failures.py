"""Jobs whose rows fail: which of them end with exit code 4, and what they say."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

import batchgen
from batchgen.cli import commands
from batchgen.core.errors import InputError, TooManyFailed
from batchgen.core.request import Request
from batchgen.job.failures import FailedRows, FailureLimit
from batchgen.output.error_kinds import error_kinds


@pytest.fixture
def job(tiny_models, tmp_path):
    """Runs rows, of which None and "" fail, in one output: its report."""

    def job(rows, **options):
        pq.write_table(pa.table({"prompt": pa.array(rows, pa.string())}), tmp_path / "in.parquet")
        given = {"dtype": "float32", "max_tokens": 1, "cpu_memory": "4GiB", "ignore_eos": True}
        return batchgen.run(
            str(tiny_models("llama")[0]), tmp_path / "in.parquet", tmp_path / "out.parquet", **{**given, **options}
        )

    return job


@pytest.mark.parametrize(
    "limit, failed, total, ends",
    [
        (None, 5, 6, False), (None, 6, 6, True), (None, 0, 0, False), (None, 1, 1, True), (None, 3, None, False),
        ("0", 0, 9, False), ("0", 1, 9, True), (2, 2, 9, False), ("2", 3, None, True),
        ("10%", 1, 10, False), ("10%", 2, 10, True), ("10 %", 2, 19, True), ("100%", 10, 10, False),
        ("0%", 1, 10, True),
        ("50%", 7, None, False),
    ],
)  # fmt: skip
def test_how_many_may_fail(limit, failed, total, ends):
    reason = FailureLimit.parse(limit).exceeded(failed, total)
    assert (reason is not None) == ends


@pytest.mark.parametrize("value", ["", "-1", "many", "101%", "-3%", "nan%", "1.5", "%"])
def test_what_is_no_limit_is_refused(value):
    with pytest.raises(InputError, match="--max-failed"):
        FailureLimit.parse(value)


def requests(rows):
    return (Request("x", row=row) for row in rows)


def test_the_first_hundred_rows_are_those_of_the_input():
    rows = FailedRows(FailureLimit(), 0, None)
    taken = rows.watch(requests(range(7, 300)))
    sent = [next(taken).row for _ in range(150)]
    # Rows that are sent later may fail earlier, and by themselves stop nothing.
    assert [rows.add(row, "too long") for row in sent[40:]] == [None] * 110
    assert [rows.add(row, "too long") for row in sent[:39]] == [None] * 39
    assert "first 100" in rows.add(sent[39], "too long")


@pytest.mark.parametrize(
    "limit, ok", [(FailureLimit(), 5), (FailureLimit(share=1.0), None), (FailureLimit(rows=500), None)]
)
def test_what_lets_the_job_go_on(limit, ok):
    rows = FailedRows(limit, 0, 300)
    answers = [rows.add(r.row, None if r.row == ok else "null") for r in rows.watch(requests(range(300)))]
    assert answers == [None] * 300 and rows.failed == 300 - (ok is not None)


def test_a_job_whose_rows_all_fail(job, tmp_path):
    with pytest.raises(TooManyFailed, match=r"all rows failed.*null") as caught:
        job([None, None, ""])
    report = caught.value.report
    assert (report["state"], report["rows_ok"], report["rows_failed"]) == ("complete", 0, 3)
    assert [kind["rows"] for kind in report["errors"]] == [2, 1] and "null" in report["errors"][0]["error"]
    assert all(pq.read_table(tmp_path / "out.parquet")["error"].to_pylist())
    with pytest.raises(TooManyFailed) as again:  # and at each later look
        job([None, None, ""])
    assert again.value.report["state"] == "already complete" and again.value.report["errors"] == report["errors"]
    assert job([None, None, ""], max_failed="100%")["state"] == "already complete"


def test_it_stops_at_the_limit_and_goes_on_with_a_higher_one(job):
    rows = [None] * 10 + ["a"] * 70
    with pytest.raises(TooManyFailed, match=r"more than --max-failed 5: .*kept") as caught:
        job(rows, max_failed=5)
    assert caught.value.report["state"] == "stopped" and caught.value.report["rows_failed"] == 6
    with pytest.raises(TooManyFailed) as again:  # those of before count: one more is too many
        job(rows, max_failed=5)
    assert again.value.report["rows_failed"] == caught.value.report["rows_failed"] + 1
    done = job(rows, max_failed="50%")
    assert (done["state"], done["rows_ok"], done["rows_failed"]) == ("complete", 70, 10)


def test_the_first_rows_of_a_long_job(job):
    with pytest.raises(TooManyFailed, match="first 100 rows all failed") as caught:
        job([None] * 400 + ["fine"] * 3000)
    assert caught.value.report["state"] == "stopped" and caught.value.report["rows_left"] > 2000


def test_code_and_lines_of_the_command(tiny_models, tmp_path):
    lines = [json.dumps({"prompt": text}) for text in ["one", "two " * 3000, "", "three " * 4000]]
    Path(tmp_path, "in.jsonl").write_text("\n".join(lines))
    command = ["run", "-m", tiny_models("llama")[0], "-i", tmp_path / "in.jsonl", "-o", tmp_path / "out.jsonl"]
    command += ["--max-tokens", "1", "--cpu-memory", "4GiB", "--progress", "plain", "--max-failed", "50%"]
    result = CliRunner().invoke(commands.cli, [str(part) for part in command])
    assert isinstance(result.exception, TooManyFailed) and result.exception.exit_code == 4
    assert "row 1 failed" in result.stderr and result.stderr.count(" failed: ") == 1
    assert "2 failed: the prompt" in result.stdout and "1 failed: " in result.stdout


def test_kinds_of_errors_count_the_newest_results(tmp_path):
    from batchgen.output.parts import part_paths, write_part
    from batchgen.output.row_result import RowResult

    def failed(error):
        return RowResult.from_completion(batchgen.Completion(0, 0, 0, error=error))

    write_part(tmp_path, 0, {0: failed("12 tokens"), 1: failed("1,300 tokens"), 5: failed("null")})
    write_part(tmp_path, 1, {1: failed("null"), 9: failed("13.5 tokens")})
    kinds = error_kinds(part_paths(tmp_path))
    assert sorted((kind.rows, kind.error) for kind in kinds) == [(2, "12 tokens"), (2, "null")]
