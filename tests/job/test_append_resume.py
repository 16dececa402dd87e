"""Whole jobs that go on from the rows of a smaller one."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from command_line import invoke

from batchgen.job import run as run_module
from batchgen.job.options import JobOptions
from batchgen.job.step_source import open_rows

ROWS = [{"prompt": f"The ferry to pier {i}", "pier": i} for i in range(9)]


@pytest.fixture(scope="module")
def job(tiny_models):
    """(input, output, options) -> (exit code, report, what was said)."""
    model = str(tiny_models("llama")[0])

    def run(source, output, *options):
        report = output.with_suffix(".report")
        report.unlink(missing_ok=True)
        code, _, said = invoke(
            "run", "-m", model, "-i", source, "-o", output, "--max-tokens", 3, "--dtype", "float32", "--temperature",
            0.8,
            "--progress", "plain", "--report", report, *options,
        )  # fmt: skip
        return code, json.loads(report.read_text()) if report.exists() else None, said

    return run


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_table(path, rows):
    pq.write_table(pa.Table.from_pylist(rows), path)


def counts(report):
    return report["rows_resumed"], report["rows"]


def test_a_limit_and_then_all_rows(job, tmp_path):
    source = tmp_path / "in.parquet"
    write_table(source, ROWS)
    output, whole = tmp_path / "out.parquet", tmp_path / "whole.parquet"
    assert counts(job(source, output, "--limit", 2)[1]) == (0, 2)
    assert counts(job(source, output, "--limit", 5)[1]) == (2, 5)
    code, report, said = job(source, output)
    assert code == 0, said
    assert counts(report) == (5, 9) and "goes on from the 5 rows" in said
    assert job(source, whole)[0] == 0 and output.read_bytes() == whole.read_bytes()
    code, report, said = job(source, output, "--limit", 5)
    assert code == 2 and "rows.limit was null, now 5" in said and "Traceback" not in said
    assert output.read_bytes() == whole.read_bytes()


def test_appended_lines(job, tmp_path):
    source, output = write_lines(tmp_path / "in.jsonl", []), tmp_path / "out.jsonl"
    expected = [(0, 0), (0, 4), (4, 9)]
    for rows, (resumed, total) in zip(([], ROWS[:4], ROWS), expected, strict=True):
        write_lines(source, rows)
        code, report, said = job(source, output)
        assert code == 0 and counts(report) == (resumed, total), said
    assert job(source, tmp_path / "whole.jsonl")[0] == 0
    assert output.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    write_lines(source, [*ROWS[:3], {**ROWS[3], "pier": 33}, *ROWS[4:]])
    code, _, said = job(source, output)
    assert code == 2 and f"rows made of another input: {source.name} has changed (" in said


def test_lines_after_none(job, tmp_path):
    source, output = write_lines(tmp_path / "in.jsonl", []), tmp_path / "out.jsonl"
    assert counts(job(source, output, "--sampling-column", "sampling")[1]) == (0, 0)
    write_lines(source, [{"prompt": "The ferry", "sampling": {"max_tokens": 2}}])
    assert counts(job(source, output, "--sampling-column", "sampling")[1]) == (0, 1)


@pytest.mark.parametrize(
    "options", [{"task": "score", "choices": (" yes", " no")}, {"sampling_column": "sampling"}, {}], ids=str
)
def test_requests_of_no_rows_are_those_of_rows(tmp_path, options):
    source = write_lines(tmp_path / "in.jsonl", [])
    opened = JobOptions("m", str(source), None, **options)
    before = open_rows(opened).identity
    write_lines(source, [{"prompt": "The ferry", "sampling": {"max_tokens": 2}}])
    assert open_rows(opened).identity == before


@pytest.mark.parametrize("name", ["in.jsonl", "in.csv"])
def test_lines_that_come_while_a_job_starts_are_for_the_next_one(job, tmp_path, monkeypatch, name):
    """Its rows have been counted when its input's contents are looked at."""
    source, output = tmp_path / name, tmp_path / "out.jsonl"
    as_text = (
        (lambda row: json.dumps(row) + "\n") if name == "in.jsonl" else (lambda row: f"{row['prompt']},{row['pier']}\n")
    )
    head = "" if name == "in.jsonl" else "prompt,pier\n"
    source.write_text(head + "".join(map(as_text, ROWS[:2])))
    resolve = run_module.resolve_model

    def while_starting(*args, **options):
        source.write_text(source.read_text() + as_text(ROWS[2]))
        return resolve(*args, **options)

    monkeypatch.setattr(run_module, "resolve_model", while_starting)
    assert counts(job(source, output)[1]) == (0, 2)
    monkeypatch.undo()
    assert counts(job(source, output)[1]) == (2, 3)


def test_another_seed_does_not_go_on(job, tmp_path):
    source = write_lines(tmp_path / "in.jsonl", ROWS)
    output = tmp_path / "out.jsonl"
    assert job(source, output, "--limit", 3)[0] == 0
    code, _, said = job(source, output, "--seed", 5)
    assert code == 2 and "sampling.seed was 0, now 5" in said


def test_appended_files_by_workers(job, tmp_path):
    folder, output = tmp_path / "in", tmp_path / "out.parquet"
    folder.mkdir()
    write_table(folder / "a.parquet", ROWS[:4])
    assert counts(job(folder, output)[1]) == (0, 4)
    write_table(folder / "b.parquet", ROWS[4:])
    code, report, said = job(folder, output, "--share")
    assert code == 0 and counts(report) == (4, 9), said
    write_table(folder / "c.parquet", ROWS[:2])
    assert counts(job(folder, output)[1]) == (9, 11)
    assert job(folder, tmp_path / "whole.parquet")[0] == 0
    assert output.read_bytes() == (tmp_path / "whole.parquet").read_bytes()


@pytest.mark.parametrize(
    ("template", "kept"),
    [("{{ prompt }}", True), ("{{ prompt }} {{ pier }}", False), ("{{ row | tojson }}", False)],
)
def test_columns_that_more_rows_change(job, tmp_path, template, kept):
    """A column of JSON's integers is one of floats where a later row has one: that matters to prompts that show it."""
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_lines(source, [*ROWS[:4], {"prompt": "The last", "pier": 2.5, "note": "new"}])
    assert job(source, output, "--limit", 4, "--prompt-template", template)[0] == 0
    code, report, said = job(source, output, "--prompt-template", template)
    if kept:
        assert code == 0 and counts(report) == (4, 5)
    else:
        assert code == 2 and 'input.columns.pier was "int64", now "double"' in said


@pytest.mark.parametrize("stopped", [True, False], ids=["of a job that was stopped", "of a complete job"])
def test_a_parquet_file_that_grew_is_told_in_words(job, tmp_path, stopped):
    source, output = tmp_path / "in.parquet", tmp_path / "out.parquet"
    write_table(source, ROWS[:6])
    if stopped:
        assert job(source, output, "--limit", 6)[0] == 0
        output.unlink()
    else:
        assert job(source, output)[0] == 0
    write_table(source, ROWS)
    code, _, said = job(source, output)
    assert code == 2 and "in.parquet has grown from 6 to 9 rows and begins with the same ones" in said
    assert "the new rows alone, in a file of their own" in said and "Give another --output" in said
    write_table(source, [*ROWS[5:], *ROWS[:5]])
    assert "in.parquet has 9 rows, 6 before, and begins with other ones" in job(source, output)[2]
    write_table(source, ROWS[:3])
    assert "in.parquet has 3 rows, 6 before" in job(source, output)[2]
    write_table(source, ROWS[3:])
    assert "in.parquet has other values in its 6 rows" in job(source, output)[2]
    code, _, said = job(source, output, "--seed", 5)
    assert "made with other settings: in.parquet has other values in its 6 rows; " in said
    assert "sampling.seed was 0, now 5" in said
