"""Finished rows reach the disk in time, survive what goes wrong there, and are found again."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import threading
import time

import numpy as np
import pyarrow as pa
import pytest
from fake_rows import result_of
from hypothesis import given
from hypothesis import strategies as st
from thorough import quick_or, some_of

from batchgen.core.errors import BatchgenError
from batchgen.core.request import Completion, Sample
from batchgen.output.part_writer import PartWriter
from batchgen.output.parts import DamagedPart, PartIndex, part_paths, scan_part, write_part
from batchgen.output.row_map import DoneRows, RowMap
from batchgen.output.row_result import RowResult


def rows_on_disk(parts_dir) -> list[int]:
    return [row for path in part_paths(parts_dir) for group in scan_part(path) for row in group.rows.tolist()]


def wait_until(condition, timeout_s: float = 300.0) -> None:
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, "did not happen in time"
        time.sleep(0.005)


# ---- results


def test_completion_becomes_a_row_result():
    samples = (Sample("a", (1, 2), "stop"), Sample("b", (3,), "length"))
    result = RowResult.from_completion(Completion(0, "x", 7, samples))
    assert result == RowResult(("a", "b"), ("stop", "length"), 7, (2, 1))
    failed = RowResult.from_completion(Completion(0, "x", 0, error="too long"))
    assert failed == RowResult((), (), 0, (), error="too long")
    with pytest.raises(ValueError, match="samples or an error"):
        RowResult((), (), 0, ())


# ---- row maps


@given(st.lists(st.tuples(st.integers(0, 300), st.booleans()), max_size=60), st.integers(0, 10**8), st.data())
def test_done_rows_match_a_dict(marks, base, data):
    done, model = DoneRows(), {}
    while marks:
        size = data.draw(st.integers(1, 20))
        batch, marks = dict(marks[:size]), marks[size:]
        rows = np.array([base + r for r in batch], np.int64)
        done.mark(rows, np.array(list(batch.values())))
        model |= {base + r: failed for r, failed in batch.items()}
    if data.draw(st.booleans()):
        done.forget_failed()
        model = {r: failed for r, failed in model.items() if not failed}
    assert (len(done), done.failed) == (len(model), sum(model.values()))
    for row in range(max(0, base - 3), base + 305):
        assert (row in done) == (row in model)
    start = base + data.draw(st.integers(0, 310))
    assert done.next_unfinished(start) == next(r for r in range(start, start + 400) if r not in model)


def test_row_map_of_a_late_shard_is_small():
    held = RowMap(np.uint8)
    for first in range(10**9, 10**9 + 10**6, 50_000):
        held.put(np.arange(first, first + 50_000), 1)
    assert held.count(1) == 10**6
    assert held.held_bytes < 2 * 10**5
    assert held.at(np.arange(10**9 - 2, 10**9 + 2)).tolist() == [0, 0, 1, 1]


# ---- the writer


def test_rows_reach_the_disk_within_the_interval(tmp_path):
    done = DoneRows()
    with PartWriter(tmp_path, done, flush_interval_s=0.1) as writer:
        for row in (5, 3, 4):
            writer.add(row, result_of(row, fail_every=5))
        assert len(done) == 0
        wait_until(lambda: len(done) == 3)
        assert rows_on_disk(tmp_path) == [3, 4, 5] and done.failed == 1
        writer.add(9, result_of(9))
    assert sorted(rows_on_disk(tmp_path)) == [3, 4, 5, 9] and 9 in done
    assert [p.name for p in part_paths(tmp_path)] == ["part-000000.parquet", "part-000001.parquet"]


def test_a_part_ends_at_its_limits_and_flush_ends_it_at_once(tmp_path):
    with PartWriter(tmp_path, DoneRows(), flush_rows=10, flush_interval_s=60) as writer:
        for row in range(25):
            writer.add(row, result_of(row))
        writer.flush()
        assert [len(g.rows) for p in part_paths(tmp_path) for g in scan_part(p)] == [10, 10, 5]
        writer.flush()
        assert len(part_paths(tmp_path)) == 3
    with PartWriter(tmp_path, DoneRows(), flush_bytes=10_000, flush_interval_s=60) as writer:
        writer.add(99, RowResult(("x" * 10_000,), ("stop",), 1, (1,)))
        wait_until(lambda: len(part_paths(tmp_path)) == 4)
    with pytest.raises(ValueError, match="closed"):
        writer.add(1, result_of(1))
    with pytest.raises(ValueError, match="closed"):
        writer.flush()
    writer.close()


def test_a_slow_disk_holds_the_caller_back(tmp_path, monkeypatch):
    go = threading.Event()
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (go.wait(), fsync(fd)))
    added = 0

    def add_all() -> None:
        nonlocal added
        for row in range(100):
            writer.add(row, RowResult(("x" * 5_000,), ("stop",), 1, (1,)))
            added += 1

    with PartWriter(tmp_path, DoneRows(), flush_bytes=20_000) as writer:
        thread = threading.Thread(target=add_all)
        thread.start()
        time.sleep(0.3)
        held_back_at = added
        go.set()
        thread.join()
    assert held_back_at < 10
    assert sorted(rows_on_disk(tmp_path)) == list(range(100))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EACCES])
def test_a_failing_disk_surfaces_at_the_next_call(tmp_path, monkeypatch, code):
    done = DoneRows()
    writer = PartWriter(tmp_path, done, flush_interval_s=0.01)
    writer.add(0, result_of(0))
    writer.flush()

    def fail(descriptor):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fail)
    writer.add(1, result_of(1))
    expected = f"{os.strerror(code)}; 1 finished rows are safe on disk: .* and run the same command again"
    with pytest.raises(BatchgenError, match=expected) as raised:
        writer.flush()
    assert "\n" not in str(raised.value)
    assert ("free space" in str(raised.value)) == (code in (errno.ENOSPC, errno.EDQUOT))
    with pytest.raises(BatchgenError):
        writer.add(2, result_of(2))
    monkeypatch.undo()
    writer.close()  # told twice already
    assert rows_on_disk(tmp_path) == [0] and 1 not in done
    assert not list(tmp_path.glob("*.tmp"))


def test_a_failure_that_nobody_saw_is_raised_by_close(tmp_path, monkeypatch):
    def fail(source, target):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(BatchgenError, match="free space"), PartWriter(tmp_path, DoneRows()) as writer:
        writer.add(0, result_of(0))


def test_a_bug_in_the_writing_surfaces_too(tmp_path):
    with pytest.raises(pa.ArrowInvalid), PartWriter(tmp_path, DoneRows()) as writer:
        writer.add(0, RowResult(("x",), ("stop",), 2**40, (1,)))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_interrupts_at_any_moment_lose_no_row_that_was_added(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # for speed

    interrupted = False

    def interrupt(*_):
        nonlocal interrupted
        interrupted = True
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGVTALRM, interrupt)
    try:
        for attempt in range(60):
            folder = tmp_path / str(attempt)
            folder.mkdir()
            writer = PartWriter(folder, DoneRows(), flush_rows=50, flush_interval_s=0.002)
            added, interrupted = 0, False
            try:
                signal.setitimer(signal.ITIMER_VIRTUAL, 0.0005 + 0.00023 * attempt)
                while not interrupted:  # Python drops an exception that falls into a finalizer
                    writer.add(added, result_of(added))
                    added += 1
                    if added % 20 == 0:
                        writer.flush()
            except KeyboardInterrupt:
                pass
            writer.close()
            # The interrupt may fall between the adding of a row and the counting of it.
            assert sorted(rows_on_disk(folder)) in (list(range(added)), list(range(added + 1)))
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


# ---- damage


@pytest.mark.parametrize("how", ["cut", "empty", "junk"])
def test_a_damaged_part_is_recognised(tmp_path, how):
    write_part(tmp_path, 0, {r: result_of(r) for r in range(50)})
    (path,) = part_paths(tmp_path)
    content = path.read_bytes()
    path.write_bytes({"cut": content[: len(content) // 2], "empty": b"", "junk": b"x" * 500}[how])
    with pytest.raises(DamagedPart, match=r"part-000000\.parquet"):
        list(scan_part(path))


def test_no_flipped_byte_changes_a_result(tmp_path):
    results = {r: result_of(r, fail_every=3) for r in range(4)}
    write_part(tmp_path, 0, results)
    (path,) = part_paths(tmp_path)
    content = path.read_bytes()
    whole = PartIndex(tmp_path).read(0, 4)
    footer_bytes = int.from_bytes(content[-8:-4], "little") + 8
    found = 0
    positions = range(4, len(content) - footer_bytes)
    for position in (*some_of(positions[:-1], 300, "flipped"), positions[-1]):
        path.write_bytes(content[:position] + bytes([content[position] ^ 0x11]) + content[position + 1 :])
        try:
            assert PartIndex(tmp_path).read(0, 4).equals(whole), position
        except BatchgenError as error:
            assert "part-000000.parquet" in str(error) and "run the same command again" in str(error)
            assert part_paths(tmp_path) == [] and (tmp_path / "part-000000.parquet.damaged").exists()
            found += 1
    assert found > quick_or(50, 200)
    with PartWriter(tmp_path, DoneRows()) as writer:
        for row, result in results.items():
            writer.add(row, result)
    assert part_paths(tmp_path)[-1].name == "part-000001.parquet"
    path.unlink(missing_ok=True)
    assert PartIndex(tmp_path).read(0, 4).equals(whole)


def test_trouble_in_reading_is_not_taken_for_damage(tmp_path):
    write_part(tmp_path, 0, {0: result_of(0)})
    index = PartIndex(tmp_path)
    part_paths(tmp_path)[0].unlink()
    with pytest.raises(FileNotFoundError):
        index.read(0, 1)


def test_rows_are_not_called_safe_whose_directory_was_removed(tmp_path):
    (tmp_path / "parts").mkdir()
    writer = PartWriter(tmp_path / "parts", DoneRows(), flush_interval_s=0.01)
    writer.add(0, result_of(0))
    writer.flush()
    shutil.rmtree(tmp_path / "parts")
    writer.add(1, result_of(1))
    with pytest.raises(BatchgenError, match="somebody removed it") as raised:
        writer.flush()
    assert "finished rows" not in str(raised.value) and "\n" not in str(raised.value)
    writer.close()
