"""Jobs that are stopped before any row can end: they end all the same, with the file of an undisturbed job."""

import itertools
import json
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tiered import once_all_rows_are_there

import batchgen.job.run as run_module
from batchgen import run

ROWS = 12
MAX_TOKENS = 48
OPTIONS = {
    "greedy": {},
    "drawn": {"temperature": 0.8, "n": 3, "seed": 5, "stop": ["q"]},
    "logprobs": {"logprobs": 2},
    "structured": {"regex": "[a-f ]{30,60}", "temperature": 1.0},
}


@pytest.fixture(scope="module")
def job(tiny_models, tmp_path_factory):
    folder = tmp_path_factory.mktemp("stopped")
    shared = "every prompt of this file begins with the same words: "
    prompts = [shared * (i % 2 + 1) + " ".join(["quay"] * (i + 1)) for i in range(ROWS)]
    pq.write_table(pa.table({"prompt": prompts}), folder / "in.parquet")

    def go(output, **options):
        path, _ = tiny_models("llama")
        common = {"dtype": "float32", "cpu_memory": "4GiB", "max_num_seqs": 8, "max_tokens": MAX_TOKENS}
        given = common | {"ignore_eos": True, "offload_dir": folder} | options
        return run(path, folder / "in.parquet", output, **given)

    return go


@pytest.fixture
def clock(monkeypatch):
    """The job's clock goes on by a second whenever it is read, which it is before every sweep."""
    ticks = itertools.count()

    def monotonic():
        once_all_rows_are_there()  # or else it is read more often where the machine is busy
        return float(next(ticks))

    monkeypatch.setattr(run_module, "time", SimpleNamespace(monotonic=monotonic))


@pytest.fixture
def shared_clock(monkeypatch):
    """A clock for a worker of a shared job, a second later at each look. It waits for no rows: some never come."""
    ticks = itertools.count()
    monkeypatch.setattr(run_module, "time", SimpleNamespace(monotonic=lambda: float(next(ticks))))


@pytest.mark.parametrize("kind", OPTIONS)
def test_a_job_that_is_always_stopped_ends_with_the_file_of_an_undisturbed_one(kind, job, tmp_path, clock):
    if kind == "structured":
        pytest.importorskip("llguidance")
    alone, stopped = tmp_path / "alone.parquet", tmp_path / "stopped.parquet"
    job(alone, **OPTIONS[kind])
    stops, max_time = [], {"greedy": "5s", "drawn": "32s"}.get(kind, "16s")
    while (report := job(stopped, max_time=max_time, **OPTIONS[kind]))["state"] == "stopped":
        stops.append(report)
        assert len(stops) < 200
    assert len(stops) >= (20 if kind == "greedy" else 4)
    assert stops[0]["rows_ok"] == 0 and stops[0]["rows_begun"] > 0 and stops[0]["tokens_begun"] > 0
    assert report["state"] == "complete" and report["rows_begun"] == 0
    assert_same(pq.read_table(stopped).to_pylist(), pq.read_table(alone).to_pylist())
    generated = sum(r["generated_tokens"] for r in (*stops, report))
    per_row = [row["generated_tokens"] for row in pq.read_table(alone).to_pylist()]
    assert generated == sum(sum(n) if isinstance(n, list) else n for n in per_row), "no token was generated twice"


def assert_same(found, wanted):
    assert [_without_logprobs(row) for row in found] == [_without_logprobs(row) for row in wanted]
    for row, same in zip(found, wanted, strict=True):
        for position, other in zip(row.get("logprobs") or (), same.get("logprobs") or (), strict=True):
            assert position["logprob"] == pytest.approx(other["logprob"], abs=1e-4)


def _without_logprobs(row):
    return {name: value for name, value in row.items() if name != "logprobs"}


def test_a_shared_job_goes_on_from_the_tokens_of_workers_that_left(job, tmp_path, shared_clock):
    alone, shared = tmp_path / "alone.parquet", tmp_path / "shared.parquet"
    job(alone)
    stops = 0
    while job(shared, share=True, share_lease="0.3s", max_time="20s")["state"] == "stopped":
        stops += 1
        assert stops < 200
    assert stops >= 4
    assert_same(pq.read_table(shared).to_pylist(), pq.read_table(alone).to_pylist())


def test_damaged_tokens_are_generated_again(job, tmp_path, clock, capsys):
    alone, stopped = tmp_path / "alone.parquet", tmp_path / "stopped.parquet"
    job(alone)
    job(stopped, max_time="9s")
    path = tmp_path / "stopped.parquet.batchgen" / "partials.parquet"
    path.write_bytes(path.read_bytes()[:-20])
    job(stopped, progress="plain")
    assert "tokens of unfinished rows are damaged" in capsys.readouterr().err
    assert_same(pq.read_table(stopped).to_pylist(), pq.read_table(alone).to_pylist())


def test_rows_that_are_begun_are_said(job, tmp_path, clock, capsys):
    output = tmp_path / "out.parquet"
    first = job(output, max_time="9s")
    job(output, max_time="9s", progress="plain")
    tokens = first["tokens_begun"]
    assert f"resuming: 0 rows are done already, 8 are begun ({tokens:,} tokens)" in capsys.readouterr().err


def test_scored_rows_are_saved_whole(job, tmp_path):
    output = tmp_path / "out.jsonl"
    options = {"task": "score", "choices": ["yes", "no"], "max_tokens": 256, "ignore_eos": False}
    report = job(output, **options)
    assert report["rows_begun"] == 0 and len([json.loads(line) for line in output.read_text().splitlines()]) == ROWS
