"""Tokens of unfinished rows in a run directory: saved while a job runs, read by the next run, and never in its way."""

import errno
import time

import pytest
from fake_rows import FakeDataset, result_of
from partial_rows import assert_equal, partial_of

from batchgen.core.kernel_choice import KernelChoice
from batchgen.output import partials as module
from batchgen.output.partials import DamagedPartials, PartialSaver, read_partials, write_partials
from batchgen.output.run_directory import open_run

ORIGIN = {"fingerprint": "a", "kernels": {"default": "avx2"}}
JOB = {"job": "partials"}


def test_what_is_written_is_read(tmp_path):
    path = tmp_path / "partials.parquet"
    many = [
        partial_of(7),
        partial_of(3, tokens=0, samples=2, logprobs=2),
        partial_of(9, samples=3, logprobs=0),
        partial_of(2**40, logprobs=4),
        partial_of(1, tokens=0),
    ]
    write_partials(path, many, ORIGIN)
    found = read_partials(path, ORIGIN)
    assert sorted(found) == sorted(partial.row for partial in many)
    for partial in many:
        assert_equal(found[partial.row], partial)
    assert read_partials(path, {**ORIGIN, "kernels": {"default": "avx512"}}) == {}
    assert read_partials(tmp_path / "none", ORIGIN) == {}


def test_damage_anywhere_is_noticed(tmp_path):
    path = tmp_path / "partials.parquet"
    write_partials(path, [partial_of(row, logprobs=1) for row in range(20)], ORIGIN)
    intact = path.read_bytes()
    wanted = read_partials(path, ORIGIN)
    for position in range(0, len(intact), 7):
        damaged = bytearray(intact)
        damaged[position] ^= 0x10
        path.write_bytes(damaged)
        try:
            found = read_partials(path, ORIGIN)
        except DamagedPartials:
            continue
        for row, partial in found.items():  # a byte that says nothing about the rows
            assert_equal(partial, wanted[row])
    for size in (0, 1, len(intact) // 2, len(intact) - 1):
        path.write_bytes(intact[:size])
        with pytest.raises(DamagedPartials):
            read_partials(path, ORIGIN)


def test_the_file_is_bounded(tmp_path, monkeypatch):
    path = tmp_path / "partials.parquet"
    one = partial_of(0, tokens=1000).num_bytes
    monkeypatch.setattr(module, "_MOST_BYTES", 10 * one)
    write_partials(path, [partial_of(row, tokens=1000) for row in range(50)], ORIGIN)
    assert sorted(read_partials(path, ORIGIN)) == list(range(10))


def saved_by(saver_of, rounds):
    """Contents that a saver writes, until there are so many."""
    contents = []
    with saver_of(contents.append):
        deadline_s = time.monotonic() + 60
        while len(contents) < rounds and time.monotonic() < deadline_s:
            time.sleep(0.002)
    return contents


def test_a_row_keeps_its_tokens_until_it_is_on_disk():
    earlier, now = {1: partial_of(1, 9), 2: partial_of(2, 9), 3: partial_of(3, 9)}, [partial_of(2, 30)]
    contents = saved_by(lambda write: PartialSaver(earlier, lambda: now, lambda row: row != 3, write, 0.001), 3)
    assert [(row, partial.num_tokens) for row, partial in contents[-1].items()] == [(1, 9), (2, 30)]


def test_a_full_disk_is_said_once_and_ends_nothing(logged):
    tries = []

    def write(partials):
        tries.append(partials)
        raise OSError(errno.ENOSPC, "No space left on device")

    saver = PartialSaver({}, lambda: [partial_of(1)], lambda row: True, write, 0.001)
    while len(tries) < 3:
        time.sleep(0.002)
    saver.stop()
    saver.stop()
    assert len(logged) == 1 and "No space left on device" in logged[0]


def open_job(tmp_path, **options):
    return open_run(tmp_path / "out.parquet", JOB, **options)


def begin(tmp_path, finished=range(3), begun=range(3, 6), kernels=None, weight_format="bfloat16"):
    """A run that has finished and begun some rows."""
    with open_job(tmp_path) as run:
        run.record_kernels(kernels or KernelChoice(default="avx2"))
        run.record_weight_format(weight_format)
        with run.saver(lambda: [partial_of(row) for row in begun], 60.0), run.writer() as writer:
            for row in finished:
                writer.add(row, result_of(row))
    return tmp_path / "out.parquet.batchgen" / "partials.parquet"


def test_the_next_run_has_the_tokens_of_rows_that_are_left(tmp_path):
    begin(tmp_path, finished=range(3), begun=range(1, 6))
    with open_job(tmp_path) as run:
        assert sorted(run.partials) == [3, 4, 5] and run.has_begun
        assert_equal(run.partial(4), partial_of(4))
        assert run.partial(0) is None
        run.record_kernels(KernelChoice(default="avx2"))
        run.record_weight_format("bfloat16")
        assert sorted(run.partials) == [3, 4, 5]


def test_tokens_are_not_mixed_with_those_of_other_kernels_or_weights(tmp_path, logged):
    for change in (
        lambda run: run.record_kernels(KernelChoice(default="avx512")),
        lambda run: run.record_weight_format("int4"),
    ):
        begin(tmp_path)
        with open_job(tmp_path) as run:
            change(run)
            assert not run.partials
        with open_job(tmp_path) as run:
            assert not run.partials, "the file tells of its kernels and weights"
    assert len(logged) == 2 and "start again" in logged[0]


def test_overwriting_discards_tokens(tmp_path):
    path = begin(tmp_path)
    with open_job(tmp_path, overwrite=True) as run:
        assert not run.partials and not path.exists()


def test_a_run_that_shall_not_resume_has_no_tokens(tmp_path):
    begin(tmp_path, finished=())
    with open_job(tmp_path, resume=False) as run:
        assert not run.partials and not run.has_begun


def test_another_job_has_no_tokens(tmp_path):
    begin(tmp_path, finished=())
    with open_run(tmp_path / "out.parquet", {"job": "another"}) as run:
        assert not run.partials


def test_rows_that_failed_are_tried_again_from_their_beginning(tmp_path):
    with open_job(tmp_path) as run, run.saver(list, 60.0), run.writer() as writer:
        for row in range(6):
            writer.add(row, result_of(row, fail_every=3))
    with open_job(tmp_path, retry_failed=True) as run:
        assert [row for row in range(6) if row not in run.done_rows] == [2, 5]
        assert run.partial(2) is None


def test_damaged_tokens_are_said_and_cost_no_row(tmp_path):
    path = begin(tmp_path)
    path.write_bytes(path.read_bytes()[:-9])
    with open_job(tmp_path) as run:
        assert len(run.done_rows) == 3 and not run.partials
        assert len(run.notices) == 1 and "partials.parquet" in run.notices[0]


def test_a_complete_output_has_no_tokens(tmp_path):
    path = begin(tmp_path)
    assert path.exists()
    with open_job(tmp_path) as run:
        with run.saver(list, 60.0), run.writer() as writer:
            for row in range(3, 6):
                writer.add(row, result_of(row))
        assert not run.partials
        run.finish(FakeDataset(6))
    assert not path.exists()
