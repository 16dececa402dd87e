"""The file of what is known of a machine."""

import json
import multiprocessing
from dataclasses import replace
from pathlib import Path

import pytest

from batchgen.core.knowledge import MANY, SPEED, Knowledge
from batchgen.profiler.machine_record import MachineRecord, read_record, record_path, update_record
from batchgen.profiler.transfer import DiskRates

PARTS = {SPEED: 1.0, MANY: 1.0}


@pytest.fixture
def path(tmp_path):
    return record_path(tmp_path, {"cpu": "a", "torch": "2"})


def add_a_job(record):
    known = record.knowledge.get("t") or Knowledge("t")
    return record.with_knowledge(replace(known.after(PARTS, 0.1, 0.1), jobs=known.jobs + 1))


def test_what_is_written_is_read(path):
    assert read_record(path) == MachineRecord()
    update_record(path, add_a_job)
    update_record(path, lambda record: record.with_disk(Path("/d"), DiskRates(1e9, 5e8, 1e-5, 2e-5, 3e-5, 4e-4)))
    record = read_record(path)
    assert record.knowledge["t"].jobs == 1 and record.disks["/d"].write_bytes_per_s == 5e8
    assert path.stat().st_mode & 0o777 == 0o600


def test_each_machine_has_its_own(tmp_path):
    paths = {record_path(tmp_path, {"cpu": cpu, "torch": torch}) for cpu in "ab" for torch in "12"}
    assert len(paths) == 4


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"version": 99}', '{"knowledge": {"t": {"means": 3}}}', "\x00"])
def test_a_file_that_cannot_be_read_counts_as_none_and_is_replaced(path, content):
    path.parent.mkdir(parents=True)
    path.write_text(content)
    assert read_record(path) == MachineRecord()
    update_record(path, add_a_job)
    assert read_record(path).knowledge["t"].jobs == 1


def test_a_file_of_another_version_is_not_used(path):
    update_record(path, add_a_job)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": 0}))
    assert read_record(path) == MachineRecord()


def test_a_file_with_a_disk_of_no_speed_is_not_used(path):
    update_record(path, lambda record: record.with_disk(Path("/d"), DiskRates(0.0, 5e8, 1e-5, 2e-5, 3e-5, 4e-4)))
    assert read_record(path) == MachineRecord()


def test_a_file_that_others_may_write_is_not_used(path):
    update_record(path, add_a_job)
    path.chmod(0o666)
    assert read_record(path) == MachineRecord()


def test_jobs_at_the_same_time_lose_nothing(path):
    def add_jobs():
        for _ in range(5):
            update_record(path, add_a_job)

    fork = multiprocessing.get_context("fork")
    writers = [fork.Process(target=add_jobs) for _ in range(3)]
    for process in writers:
        process.start()
    for process in writers:
        process.join()
    assert 10 <= read_record(path).knowledge["t"].jobs <= 15, "a job waits for others only so long"


def test_an_unwritable_cache_is_no_obstacle(tmp_path):
    (tmp_path / "file").touch()
    update_record(record_path(tmp_path / "file", {}), add_a_job)


def test_it_stays_small(path):
    def add_tables(record):
        for i in range(100):
            record = record.with_knowledge(Knowledge(f"t{i}").after(PARTS, 0.1, 0.1))
        return record

    update_record(path, add_tables)
    assert len(read_record(path).knowledge) == 16 and "t99" in read_record(path).knowledge
