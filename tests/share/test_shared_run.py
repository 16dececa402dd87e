"""Workers on one output, with real files."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from fake_rows import FakeDataset, expected_rows, result_of
from partial_rows import assert_equal, partial_of

from batchgen.core.errors import BatchgenError, InputError
from batchgen.core.kernel_choice import KernelChoice
from batchgen.output.run_directory import check_output, open_run
from batchgen.share.files import DirectoryFiles
from batchgen.share.ranges import may_claim, row_ranges
from batchgen.share.run import open_shared_run

ROWS = 300


def fails(row):
    return result_of(row, fail_every=13)


def share(output, **more):
    return open_shared_run(output, {"job": "shared"}, rows=ROWS, **{"lease_s": 60.0, **more})


def add(run, rows):
    with run.writer(flush_interval_s=0.01) as writer:
        for row in rows:
            writer.add(row, fails(row))


def work(run, dataset):
    """All that a worker does."""
    with run, run.writer(flush_interval_s=0.01) as writer:
        for rows in run.claims(40, lambda: False):
            for row in rows or ():
                writer.add(row, fails(row))
        writer.close()
        run.finish(dataset)


def check(output, rows=ROWS):
    table = pq.read_table(output)
    assert table.to_pylist() == expected_rows(FakeDataset(rows), fails)
    assert not list(Path(f"{output}.batchgen").glob("share*"))


@pytest.mark.parametrize("rows", [1, 16, 17, 512, 513, 100_000])
def test_ranges_cover_all_rows_the_larger_ones_first(rows):
    ranges = row_ranges(rows)
    assert [row for r in ranges for row in r] == list(range(rows))
    sizes = [len(r) for r in ranges]
    assert sizes[:-1] == sorted(sizes[:-1], reverse=True) and len(ranges) < 400


def test_a_range_of_many_rows_fits_in_memory():
    ranges = row_ranges(100_000_000)
    assert max(map(len, ranges)) == 1 << 16 and sum(map(len, ranges)) == 100_000_000 and len(ranges) < 2000


def test_a_worker_takes_no_more_than_its_share_of_what_is_left():
    assert may_claim(outstanding=0, unclaimed=10, workers=50, ahead=320)
    assert may_claim(outstanding=100, unclaimed=1000, workers=2, ahead=320)
    assert not may_claim(outstanding=320, unclaimed=1000, workers=2, ahead=320)
    assert not may_claim(outstanding=200, unclaimed=100, workers=2, ahead=320)


def test_of_several_creators_one_gets_the_name(tmp_path):
    files = DirectoryFiles(tmp_path)
    files.make()
    assert files.create("leases/a", b"first") and not files.create("leases/a", b"second")
    assert files.read("leases/a") == b"first" and files.names("leases") == ["a"]
    assert files.read("leases/b") is None


def test_workers_in_threads_make_the_file_of_one(tmp_path):
    output, dataset = tmp_path / "out.parquet", FakeDataset(ROWS)
    runs = [share(output, lease_s=2.4) for _ in range(3)]
    threads = [threading.Thread(target=work, args=(run, dataset)) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    check(output)
    assert sum(run.rows_here for run in runs) == ROWS
    assert [run.totals["rows_failed"] for run in runs] == [ROWS // 13] * 3
    with share(output) as late:
        assert late.complete and late.rows_resumed == 0
    with open_run(output, {"job": "shared"}) as plain:
        assert plain.complete


def test_a_worker_that_leaves_gives_its_rows_to_the_others_at_once(tmp_path):
    output = tmp_path / "out.parquet"
    with share(output) as first:
        rows = next(first.claims(40, lambda: False))
        add(first, rows[:3])
    second = share(output)
    assert second.rows_resumed == 3
    work(second, FakeDataset(ROWS))
    assert second.rows_here == ROWS - 3
    check(output)


def test_rows_of_a_plain_run_are_kept_and_a_plain_run_keeps_out(tmp_path):
    output = tmp_path / "out.parquet"
    with open_run(output, {"job": "shared"}) as plain:
        add(plain, range(50))
        with pytest.raises(BatchgenError, match="another batchgen is writing"):
            check_output(output, shared=True)
    with share(output) as run:
        for refused in (lambda: check_output(output), lambda: open_run(output, {"job": "shared"})):
            with pytest.raises(InputError, match="add --share to this command"):
                refused()
        check_output(output, shared=True)
        work(run, FakeDataset(ROWS))
        assert run.rows_resumed == 50 and run.rows_here == ROWS - 50
    check(output)


def test_a_changed_input_is_described_to_a_worker(tmp_path):
    how = {"rows": ROWS, "lease_s": 60.0, "describe_files": lambda was: f"{was['files'][0]} has changed"}
    with (
        open_shared_run(tmp_path / "out.parquet", {"input": {"files": ["a", 5]}}, **how),
        pytest.raises(InputError, match="worked on with other settings: a has changed"),
    ):
        open_shared_run(tmp_path / "out.parquet", {"input": {"files": ["a", 6]}}, **how)


def test_another_job_is_refused_and_leaves_nothing(tmp_path):
    output = tmp_path / "out.parquet"
    with (
        share(output),
        pytest.raises(InputError, match=r'worked on with other settings: job was "shared", now "other"'),
    ):
        open_shared_run(output, {"job": "other"}, rows=ROWS, lease_s=60.0)
    other = tmp_path / "other.parquet"
    with open_run(other, {"job": "plain"}) as plain:
        add(plain, range(5))
    with pytest.raises(InputError, match="5 rows made with other settings"):
        share(other)
    with open_run(other, {"job": "plain"}) as plain:
        assert plain.rows_resumed == 5


def test_a_damaged_part_costs_its_range_alone(tmp_path):
    output = tmp_path / "out.parquet"
    run = share(output)
    with run.writer(flush_interval_s=0.01) as writer:
        for claimed in run.claims(40, lambda: False):
            for row in claimed or ():
                writer.add(row, fails(row))
    part = sorted(Path(f"{output}.batchgen/share/parts").rglob("part-*"))[0]
    part.write_bytes(b"PAR1" + b"?" * 40)
    with pytest.raises(BatchgenError, match="is damaged: run the same command again"):
        run.finish(FakeDataset(ROWS))
    run.close()
    again = share(output)
    assert 0 < ROWS - again.rows_resumed <= 16
    work(again, FakeDataset(ROWS))
    check(output)


def test_the_last_rows_are_saved_and_noticed_at_once(tmp_path):
    """Neither the interval of saves nor a poll is waited for once the engine has nothing more to do."""

    class UntilSet(threading.Event):
        def wait(self, timeout=None):
            assert super().wait(120), "nobody said that rows were saved"
            return True

    output = tmp_path / "out.parquet"
    with share(output) as run, run.writer(flush_interval_s=100_000) as writer:
        run._changed = UntilSet()
        for rows in run.claims(40, lambda: False):
            for row in rows or ():
                writer.add(row, fails(row))
        assert run.worker.all_done
        run.finish(FakeDataset(ROWS))
    check(output)


def test_kernels_and_weights_are_those_of_the_first_worker(tmp_path):
    with share(tmp_path / "out.parquet") as first, share(tmp_path / "out.parquet") as second:
        assert first.kernels is first.weight_format is None
        first.record_weight_format("q4_1")
        second.record_weight_format("bfloat16")
        assert first.weight_format == second.weight_format == "q4_1"
        first.record_kernels(KernelChoice(default="avx2"))
        second.record_kernels(KernelChoice(default="scalar"))
        assert first.kernels == second.kernels == KernelChoice(default="avx2")


def test_killed_and_suspended_workers(tmp_path):
    """Workers are killed, and suspended for longer than the lease, at random moments; late ones come instead."""
    output, rng = tmp_path / "out.parquet", random.Random(0)
    lease_s, rows = 0.6, 300
    count = 0

    def start():
        nonlocal count
        count += 1
        script = Path(__file__).parents[1] / "support" / "shared_worker.py"
        arguments = [output, rows, count, 0.01, lease_s]
        return subprocess.Popen([sys.executable, script, *map(str, arguments)], stdout=subprocess.DEVNULL)

    workers = [start() for _ in range(2)]
    for signum in (signal.SIGKILL, signal.SIGSTOP):
        folder = Path(f"{output}.batchgen/share/parts")
        before = len(list(folder.glob("*/*.parquet"))) if folder.exists() else 0
        while folder.exists() and len(list(folder.glob("*/*.parquet"))) < before + 4:
            time.sleep(0.01)
        victim = rng.choice(workers)
        if signum == signal.SIGKILL:
            victim.kill()
            workers.remove(victim)
        else:
            os.kill(victim.pid, signal.SIGSTOP)
            threading.Timer(2 * lease_s, os.kill, (victim.pid, signal.SIGCONT)).start()
        workers.append(start())
    for worker in workers:
        assert worker.wait(300) == 0
    check(output, rows)


def test_what_a_killed_worker_left_of_its_folder_is_taken_away(tmp_path):
    output = tmp_path / "out.parquet"
    work(share(output), FakeDataset(ROWS))
    left = Path(f"{output}.batchgen", "share.0123.tmp")
    left.mkdir()
    (left / "job.json").write_text("{}")
    with open_run(output, {"job": "shared"}) as plain:
        assert plain.complete
    assert not left.exists()


def test_a_worker_that_comes_to_run_when_all_is_done(tmp_path):
    output = tmp_path / "out.parquet"
    with share(output) as late:
        work(share(output), FakeDataset(ROWS))
        late.record_kernels(KernelChoice())
        assert late.complete
    check(output)


def test_rows_that_are_found_damaged_when_they_are_joined_are_not_waited_for(tmp_path):
    output = tmp_path / "out.parquet"
    with share(output) as run, run.writer(flush_interval_s=0.01) as writer:
        for rows in run.claims(40, lambda: False):
            for row in rows or ():
                writer.add(row, fails(row))
        writer.close()
        next(Path(f"{output}.batchgen", "share", "done").iterdir()).unlink()  # as the worker does that joins
        run.worker.table.refresh()
        with pytest.raises(BatchgenError, match="run the same command again"):
            run.finish(FakeDataset(ROWS))


def test_a_shared_disk_that_is_full_keeps_what_it_has(small_disk):
    """Each of the workers ends with the reason; with more space those that come later go on."""
    output, dataset = small_disk("size=160k") / "out.parquet", FakeDataset(ROWS)
    ended = []

    def until_full():
        try:
            work(share(output, lease_s=1.2), dataset)
        except BatchgenError as error:
            ended.append(str(error))

    threads = [threading.Thread(target=until_full) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(ended) == 2 and all("No space left" in message and "\n" not in message for message in ended), ended
    small_disk("size=8m")
    later = share(output, lease_s=1.2)
    work(later, dataset)
    assert 0 < later.rows_resumed < ROWS
    check(output)


@pytest.mark.parametrize("hours", [-1, 1])
def test_a_clock_that_is_wrong_takes_nothing_from_one_that_lives(tmp_path, monkeypatch, hours):
    output, now = tmp_path / "out.parquet", time.time
    with share(output) as living:
        held = next(living.claims(40, lambda: False))
        monkeypatch.setattr(time, "time", lambda: now() + 3600 * hours)
        with share(output) as other, other.writer(flush_interval_s=0.01) as writer:
            for rows in other.claims(40, lambda: other.worker.all_claimed):
                assert not set(rows or ()) & set(held)
                for row in rows or ():
                    writer.add(row, fails(row))
        assert other.rows_here == ROWS - len(held)
        add(living, held)
    work(share(output), FakeDataset(ROWS))
    check(output)


@pytest.mark.parametrize("hours", [-1, 1])
def test_a_clock_that_is_wrong_takes_over_from_one_that_is_dead(tmp_path, monkeypatch, hours):
    output, now = tmp_path / "out.parquet", time.time
    script = Path(__file__).parents[1] / "support" / "shared_worker.py"
    command = [sys.executable, script, output, ROWS, 0, 0.05, 0.6]
    dead = subprocess.Popen([str(part) for part in command], stdout=subprocess.DEVNULL)
    parts = Path(f"{output}.batchgen/share/parts")
    while not list(parts.glob("*/*.parquet")):
        time.sleep(0.01)
    dead.kill()
    dead.wait()
    monkeypatch.setattr(time, "time", lambda: now() + 3600 * hours)
    work(share(output), FakeDataset(ROWS))
    check(output)


def test_a_damaged_manifest_of_a_job_that_went_on_by_workers(tmp_path):
    output, smaller, now = tmp_path / "out.parquet", {"job": "shared", "rows": 12}, {"job": "shared", "rows": ROWS}
    with open_run(output, smaller, keep_parts=True) as plain:
        add(plain, range(12))
        plain.finish(FakeDataset(12))
    more = {"extends": lambda was, now: was["rows"] < now["rows"], "keep_parts": True}
    work(open_shared_run(output, now, rows=ROWS, lease_s=60, **more), FakeDataset(ROWS))
    check(output)
    Path(f"{output}.batchgen", "manifest.json").write_text("{ not json")
    output.unlink()
    with open_run(output, now) as again:
        assert again.rows_resumed == ROWS
        again.finish(FakeDataset(ROWS))
    check(output)


@pytest.mark.parametrize(
    "name", ["job.json", "kernels.json", "weights.json", "leases/000000.0000", "done/000000", "workers"]
)
def test_a_file_that_a_power_cut_left_empty_is_named(name, tmp_path):
    """A worker's own is written again; of the others one line says which it is."""
    output = tmp_path / "out.parquet"
    first = share(output)
    first.record_kernels(KernelChoice())
    first.record_weight_format("q4_1")
    add(first, next(first.claims(1, lambda: False)))
    first.close()
    folder = Path(f"{output}.batchgen") / "share"
    damaged = next((folder / name).iterdir()) if name == "workers" else folder / name
    damaged.write_bytes(b"")
    if name == "workers":
        with share(output, lease_s=0.1) as run:
            first.worker.table.lease_s = 0.1
            assert next(run.claims(1, lambda: False))
        return
    with pytest.raises(
        BatchgenError, match=f"^share/{name} in the run directory is damaged: stop all workers, remove it"
    ) as said:
        second = share(output)
        assert second.kernels is not None and second.weight_format is not None
    assert "\n" not in str(said.value)
    damaged.unlink()
    work(share(output), FakeDataset(ROWS))
    check(output)


def test_a_worker_goes_on_from_the_tokens_of_one_that_died(tmp_path):
    output = tmp_path / "out.parquet"
    first = share(output, lease_s=0.6)
    rows = next(first.claims(40, lambda: False))
    with first.saver(lambda: [partial_of(row) for row in rows[:4]], 60.0):
        pass
    first._ended.set()  # no more signs of it, as if it was killed
    with share(output) as second, second.saver(list, 60.0):
        for more in second.claims(10**6, lambda: False):
            if more and rows[0] in more:
                break
        assert [row for row in rows if second.partial(row) is not None] == rows[:4]
        assert_equal(second.partial(rows[1]), partial_of(rows[1]))


def test_workers_go_on_from_the_tokens_of_a_plain_run(tmp_path):
    output = tmp_path / "out.parquet"
    with open_run(output, {"job": "shared"}) as plain, plain.saver(lambda: [partial_of(5), partial_of(290)], 60.0):
        pass
    with share(output) as run, run.saver(list, 60.0):
        rows = next(run.claims(40, lambda: False))
        assert [row for row in rows if run.partial(row) is not None] == [5]


def test_damaged_tokens_of_a_worker_are_generated_again(tmp_path, logged):
    output = tmp_path / "out.parquet"
    first = share(output, lease_s=0.6)
    rows = next(first.claims(40, lambda: False))
    with first.saver(lambda: [partial_of(row) for row in rows], 60.0):
        pass
    (path,) = Path(f"{output}.batchgen", "share", "partials").iterdir()
    path.write_bytes(path.read_bytes()[:-5])
    first.close()
    with share(output) as second, second.saver(list, 60.0):
        assert next(second.claims(40, lambda: False)) == rows
        assert all(second.partial(row) is None for row in rows)
    assert any("damaged" in line for line in logged)
