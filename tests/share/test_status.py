"""`batchgen status`."""

import pytest
from fake_rows import FakeDataset, result_of

from batchgen.core.errors import InputError
from batchgen.output.run_directory import open_run
from batchgen.share.run import open_shared_run
from batchgen.share.status import describe_status, output_status


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
    assert describe_status(output_status(output)) == ["stopped: 19 rows ok, 1 failed"]
    with open_run(output, {}) as run:
        run.finish(FakeDataset(20))
    assert describe_status(output_status(output)) == ["complete: 19 rows ok, 1 failed"]


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

    assert describe_status(output_status(output, sleep=complete)) == ["complete: 15 rows ok, 1 failed"]
