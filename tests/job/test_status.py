"""`batchgen status`."""

import json
import re

import pytest
from fake_rows import FakeDataset, result_of

import batchgen.job.status as status_of_job
from batchgen.core.errors import InputError
from batchgen.job.snapshot import Publisher
from batchgen.job.status import describe_status, output_status
from batchgen.output.run_directory import open_run
from batchgen.share.run import open_shared_run


def add(run, rows):
    with run.writer(flush_interval_s=0.01) as writer:
        for row in rows:
            writer.add(row, result_of(row, fail_every=13))


def test_of_a_plain_run(tmp_path):
    output = tmp_path / "out.parquet"
    with pytest.raises(InputError, match="has no job: give the --output"):
        output_status(output)
    with open_run(output, {}) as run:
        add(run, range(20))
        found = output_status(output)
        assert found["state"] == "running" and "process" in describe_status(found)[0]
    lines = describe_status(output_status(output))
    assert lines[:2] == ["stopped: 19 rows ok, 1 failed", "the same command goes on from here"]
    with open_run(output, {}) as run:
        run.finish(FakeDataset(20))
    lines = describe_status(output_status(output))
    assert lines[0] == "complete: 19 rows ok, 1 failed" and lines[-1] == "--retry-failed runs the failed rows again"
    assert lines[1].startswith("1 failed: ") and len(lines) == 3


def published(run, **values):
    """A run directory with the state of a job of this process."""
    publisher = Publisher(run.output_path.name, None)
    publisher.write_into(run.directory)
    publisher.publish(**({"state": "running", "rows": 80} | values))


def test_of_a_running_job_has_total_per_cent_rate_and_time_left(tmp_path):
    with open_run(tmp_path / "out.parquet", {}) as run:
        add(run, range(20))
        published(run, rows_per_s=2.0, seconds_left=30.0)
        status = output_status(tmp_path / "out.parquet")
        assert (status["state"], status["rows"], status["rows_left"], status["percent"]) == ("running", 80, 60, 25.0)
        assert status["is_alive"] and status["rows_per_s"] == 2.0 and 28 < status["seconds_left"] <= 30
        assert json.loads(json.dumps(status)) == status
        line = describe_status(status)[0]
        assert re.fullmatch(
            r"running by process \d+ on \S+: 19 rows ok, 1 failed, 60 of 80 left \(25% done\), 2\.00 rows/s, "
            r"(29|30) s left, ends about (\w{3} )?\d\d:\d\d",
            line,
        )
        published(run, seconds_left=30.0, left_is_bound=True)
        assert "at most " in describe_status(output_status(tmp_path / "out.parquet"))[0]


@pytest.mark.parametrize(
    ("told", "state", "said"),
    [
        ("running", "killed", "has ended without a word; the same command goes on"),
        ("starting", "killed", "has ended without a word"),
        ("interrupted", "interrupted", "the same command goes on from here"),
        ("stopped", "stopped", "the same command goes on from here"),
        ("failed", "failed", "the disk is full"),
    ],
)
def test_of_a_job_whose_process_has_ended(tmp_path, told, state, said):
    with open_run(tmp_path / "out.parquet", {}) as run:
        add(run, range(20))
        published(run, state=told, seconds_left=30.0, message="the disk is full" if told == "failed" else None)
    status = output_status(tmp_path / "out.parquet")
    assert (status["state"], status["is_alive"], status["seconds_left"]) == (state, False, None)
    lines = describe_status(status)
    assert lines[0].startswith(f"{state}: 19 rows ok, 1 failed, 60 of 80 left") and any(said in line for line in lines)


def test_of_a_job_where_there_are_no_locks(tmp_path, monkeypatch):
    def no_locks(path, *, shared):
        raise OSError

    with open_run(tmp_path / "out.parquet", {}) as run:
        published(run)
        monkeypatch.setattr(status_of_job, "lock_file", no_locks)
        assert output_status(tmp_path / "out.parquet")["state"] == "running"
        published(run, process=2**22 + 1)  # no process has such an id
        assert output_status(tmp_path / "out.parquet")["state"] == "killed"
        published(run, host="elsewhere")
        assert output_status(tmp_path / "out.parquet")["state"] == "running"


@pytest.mark.parametrize("output", ["", ".", "/"])
def test_of_what_is_no_file(output):
    with pytest.raises(InputError, match="has no job"):
        output_status(output)


def test_of_workers(tmp_path):
    output = tmp_path / "out.parquet"

    def share():
        return open_shared_run(output, {}, rows=300, lease_s=60.0)

    with open_run(output, {}) as plain:
        add(plain, range(280, 300))
    left, silent, working = share(), share(), share()
    for run in (left, silent, working):
        add(run, next(run.claims(20, lambda: False))[:10])
        run.worker.tick()
    left.close()
    found = output_status(output, sleep=lambda s: working.worker.tick())
    states = {worker["name"]: worker for worker in found["workers"]}
    assert [states[run.worker.name]["state"] for run in (left, silent, working)] == ["left", "silent", "running"]
    assert found["rows_ok"] + found["rows_failed"] == 50 and found["rows_left"] == 250
    assert found["seconds_left"] > 0 and states[working.worker.name]["rows"] == 10
    lines = describe_status(found)
    assert lines[0].startswith("shared by 3 workers: ") and len(lines) == 4
    assert "250 of 300 left (17% done)" in lines[0] and found["rows"] == 300 and found["ends"]
    for run in (silent, working):
        run.close()


def test_of_a_job_that_is_completed_meanwhile(tmp_path):
    output = tmp_path / "out.parquet"
    run = open_shared_run(output, {}, rows=16, lease_s=60.0)

    def complete(seconds):
        with run.writer(flush_interval_s=0.01) as writer:
            for rows in run.claims(40, lambda: False):
                for row in rows or ():
                    writer.add(row, result_of(row, fail_every=13))
        run.finish(FakeDataset(16))

    assert describe_status(output_status(output, sleep=complete))[0] == "complete: 15 rows ok, 1 failed"
