"""A run directory: refuse, resume, retry, replace; and lose nothing, whatever interrupts it."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import resumable_job
from fake_rows import FakeDataset, expected_rows, result_of
from processes import start_in_process
from thorough import quick_or, rotating

from batchgen.core.errors import BatchgenError, InputError
from batchgen.core.kernel_choice import KernelChoice
from batchgen.output.parts import part_paths
from batchgen.output.row_result import RowResult
from batchgen.output.run_directory import check_output, errors_path, open_run

FINGERPRINT = {
    "input": {"path": "a.parquet"},
    "sampling": {"temperature": 0.0, "stop": ("a", "b")},
    "limit": None,
}
SUPPORT = Path(__file__).parents[1] / "support"
PYTHONPATH = {"PYTHONPATH": f"{SUPPORT}:{SUPPORT.parents[1]}"}


def work(output, rows=range(40), *, result=result_of, finish=True, dataset=None, fingerprint=FINGERPRINT, **flags):
    """Run the job as a caller would; returns (rows computed, the closed run)."""
    computed = []
    with open_run(output, fingerprint, **flags) as run:
        if not run.complete:
            with run.writer() as writer:
                for row in rows:
                    if row not in run.done_rows:
                        writer.add(row, result(row))
                        computed.append(row)
                        if len(computed) % 7 == 0:
                            writer.flush()
            if finish:
                run.finish(dataset or FakeDataset(40))
    return computed, run


def bad_every_5(row: int) -> RowResult:
    return result_of(row, fail_every=5)


def read(output: Path) -> list[dict]:
    return pq.read_table(output).to_pylist()


def manifest_of(output: Path) -> dict:
    return json.loads((output.parent / f"{output.name}.batchgen" / "manifest.json").read_text())


@pytest.fixture
def output(tmp_path) -> Path:
    return tmp_path / "out.parquet"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("undisturbed") / "out.parquet"
    work(path)
    return path.read_bytes()


# ---- from fresh to complete


def test_a_fresh_run_ends_complete_and_leaves_only_its_manifest(output):
    computed, run = work(output)
    assert computed == list(range(40)) and run.complete and run.rows_resumed == 0
    assert read(output) == expected_rows(FakeDataset(40))
    manifest = manifest_of(output)
    assert manifest["state"] == "complete" and manifest["totals"]["rows_ok"] == 40
    assert manifest["files"] == {"out.parquet": output.stat().st_size} and manifest["versions"]["batchgen"]
    assert sorted(p.name for p in run.directory.rglob("*")) == ["lock", "manifest.json", "parts"]
    note = json.loads(pq.read_schema(output).metadata[b"batchgen"])
    assert note["fingerprint"] == manifest["fingerprint"]

    computed, run = work(output)
    assert computed == [] and run.complete and run.totals["rows"] == 40 and len(run.done_rows) == 0


def test_unfinished_rows_are_resumed(output, undisturbed):
    computed, run = work(output, range(0, 40, 2), finish=False)
    assert not run.complete and len(computed) == 20 and not output.exists()
    assert manifest_of(output)["state"] == "running"
    (run.parts_dir / "part-000099.parquet.tmp").write_bytes(b"torn")
    (run.directory / "joined-0.tmp").write_bytes(b"torn")
    computed, run = work(output, finish=False)
    assert computed == list(range(1, 40, 2)) and run.rows_resumed == 20 and len(run.done_rows) == 40
    assert not list(run.directory.rglob("*.tmp"))
    computed, run = work(output)
    assert computed == [] and run.rows_resumed == 40
    assert output.read_bytes() == undisturbed


def test_finish_refuses_while_rows_are_missing(output):
    with pytest.raises(BatchgenError, match="1 rows from row 39 on have no result yet"):
        work(output, range(39))
    assert not output.exists()
    assert work(output)[0] == [39]


def test_damaged_parts_cost_only_their_rows(output, undisturbed):
    _, run = work(output, range(21), finish=False)
    parts = part_paths(run.parts_dir)
    assert len(parts) == 3
    parts[1].write_bytes(parts[1].read_bytes()[:-20])
    computed, run = work(output)
    assert computed == [*range(7, 14), *range(21, 40)]
    assert run.rows_resumed == 14 and "part-000001.parquet" in run.notices[0]
    assert output.read_bytes() == undisturbed


def test_interrupted_work_keeps_what_was_added(output):
    with pytest.raises(KeyboardInterrupt), open_run(output, FINGERPRINT) as run, run.writer() as writer:
        for row in range(10):
            writer.add(row, result_of(row))
        raise KeyboardInterrupt
    assert work(output)[0] == list(range(10, 40))


def test_output_in_other_formats(tmp_path):
    work(tmp_path / "out.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert rows == expected_rows(FakeDataset(40))
    work(tmp_path / "out.csv")
    assert (tmp_path / "out.csv").read_text().startswith('"id","value","text"')


def test_formatted_output_writes_an_errors_file_too(tmp_path):
    output = tmp_path / "out.jsonl"

    def format_row(row, result):
        return ("errors", result["error"]) if result["error"] else ("output", result["text"][0])

    with open_run(output, FINGERPRINT, errors_file=True) as run:
        with run.writer() as writer:
            for row in range(40):
                writer.add(row, bad_every_5(row))
        run.finish(FakeDataset(40), format_row=format_row)
    assert [json.loads(x) for x in output.read_text().splitlines()] == [
        result_of(r).text[0] for r in range(40) if r % 5 != 4
    ]
    assert len(errors_path(output).read_text().splitlines()) == 8
    with open_run(output, FINGERPRINT, errors_file=True) as run:
        assert run.complete
    errors_path(output).unlink()
    with open_run(output, FINGERPRINT, errors_file=True) as run:
        assert not run.complete and len(run.done_rows) == 40
        run.finish(FakeDataset(40), format_row=format_row)
    assert errors_path(output).exists()
    with pytest.raises(InputError, match=r"other.parquet must end in \.jsonl"):
        open_run(tmp_path / "other.parquet", FINGERPRINT, errors_file=True)
    errors_path(tmp_path / "new.jsonl").write_text("somebody's")
    with pytest.raises(InputError, match=r"new.errors.jsonl exists and is not the output of this job"):
        open_run(tmp_path / "new.jsonl", FINGERPRINT, errors_file=True)


# ---- another fingerprint, another wish


def test_a_changed_field_is_named_with_both_values(output):
    work(output, range(10), finish=False)
    new = {"input": {"path": "a.parquet", "rows": 5}, "sampling": {"temperature": 0.7, "stop": ["a", "b"]}}
    with pytest.raises(InputError) as raised:
        open_run(output, new)
    assert str(raised.value) == (
        f"{output}.batchgen has 10 rows made with other settings: input.rows was not set, now 5; "
        "limit was null, now not set; sampling.temperature was 0.0, now 0.7. "
        "Give another --output, or the old settings to go on, or --overwrite to start again"
    )
    assert len(work(output)[0]) == 30  # the refusal harmed nothing
    with pytest.raises(InputError, match=r"out\.parquet has 40 rows made with other settings: input"):
        open_run(output, new)


def test_long_values_are_cut_around_the_difference(output):
    text = "Is this the same restaurant? " * 50
    work(output, range(3), finish=False, fingerprint={"template": text + "A: {{a}}" + text})
    with pytest.raises(InputError) as raised:
        open_run(output, {"template": text + "B: {{a}}" + text})
    line = str(raised.value)
    assert "A: {{a}}" in line and "B: {{a}}" in line and len(line) < 400 + len(str(output))


def test_settings_may_change_while_there_is_nothing_to_lose(output):
    work(output, [], finish=False)
    computed, run = work(output, fingerprint={"other": 1})
    assert len(computed) == 40 and run.complete


def test_no_resume_refuses_while_there_are_rows(output):
    work(output, [], finish=False, resume=False)
    work(output, range(12), finish=False, resume=False)
    with pytest.raises(InputError, match=r"batchgen has 12 finished rows: leave out --no-resume .* --overwrite"):
        open_run(output, FINGERPRINT, resume=False)
    work(output)
    with pytest.raises(InputError, match=r"out\.parquet has 40 finished rows"):
        open_run(output, FINGERPRINT, resume=False)


def test_a_file_of_somebody_else_is_not_replaced(output):
    output.write_bytes(b"precious")
    for _ in range(2):
        with pytest.raises(InputError, match=r"exists and is not the output of this job.*--overwrite"):
            open_run(output, FINGERPRINT)
    assert not Path(f"{output}.batchgen").exists()
    output.unlink()
    work(output, range(5), finish=False)
    output.write_bytes(b"precious")  # appears while the job is unfinished
    with pytest.raises(InputError, match="exists and is not the output of this job"):
        open_run(output, FINGERPRINT)
    assert output.read_bytes() == b"precious"


def test_overwrite_keeps_the_old_output_until_the_end(output):
    work(output)
    old = output.read_bytes()
    other = {"other": 1}
    computed, run = work(output, range(25), fingerprint=other, result=bad_every_5, finish=False, overwrite=True)
    assert len(computed) == 25 and output.read_bytes() == old
    # The same settings go on without asking again.
    computed, run = work(output, fingerprint=other, result=bad_every_5)
    assert computed == list(range(25, 40)) and run.complete
    assert read(output) == expected_rows(FakeDataset(40), bad_every_5)


def test_overwrite_drops_old_progress(output):
    work(output, range(25), finish=False)
    computed, run = work(output, overwrite=True)
    assert computed == list(range(40)) and run.rows_resumed == 0
    Path(f"{output}.batchgen", "manifest.json").write_text("{ not json")
    with pytest.raises(InputError, match=r"manifest.json is damaged.*: start again with --overwrite"):
        open_run(output, FINGERPRINT)
    assert len(work(output, overwrite=True)[0]) == 40


@pytest.mark.parametrize("damage", [lambda path: path.write_text("{ not json"), Path.unlink])
def test_a_damaged_manifest_is_made_again_from_whole_parts(output, undisturbed, damage):
    work(output, range(25), finish=False)
    damage(Path(f"{output}.batchgen", "manifest.json"))
    for other in ({**FINGERPRINT, "limit": 3}, {"input": {}}):
        with pytest.raises(InputError, match="--overwrite"):
            open_run(output, other)
    computed, run = work(output)
    assert computed == list(range(25, 40)) and run.rows_resumed == 25
    (notice,) = run.notices
    assert "manifest.json" in notice and "\n" not in notice
    assert output.read_bytes() == undisturbed


def test_what_rows_are_made_with_is_in_the_parts_too_should_the_manifest_be_damaged(output):
    kernels = KernelChoice(default="avx2")
    with open_run(output, FINGERPRINT) as run:
        assert (run.kernels, run.weight_format) == (None, None)
        run.record_kernels(kernels)
        run.record_weight_format("q4_1")
        with run.writer() as writer:
            writer.add(0, result_of(0))
    Path(f"{output}.batchgen", "manifest.json").write_text("")
    with open_run(output, FINGERPRINT) as run:
        assert (run.kernels, run.weight_format) == (kernels, "q4_1") and len(run.done_rows) == 1


@pytest.mark.parametrize("number", [0, 1, 3])
def test_a_deleted_part_is_told(output, undisturbed, number):
    """The first, one between others, the last."""
    work(output, range(25), finish=False)
    parts = sorted(Path(f"{output}.batchgen", "parts").iterdir())
    assert len(parts) == 4
    parts[number].unlink()
    computed, run = work(output)
    (notice,) = run.notices
    assert parts[number].name in notice and "computed again" in notice and "\n" not in notice
    assert set(computed) > set(range(25, 40)) and output.read_bytes() == undisturbed
    assert not open_run(output, FINGERPRINT).notices


def test_a_manifest_of_a_later_format_is_refused(output):
    work(output)
    manifest = manifest_of(output) | {"format_version": 99, "versions": {"batchgen": "9.9"}}
    Path(f"{output}.batchgen", "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(InputError, match=r"written by batchgen 9\.9"):
        open_run(output, FINGERPRINT)


# ---- failed rows


def test_retry_failed_runs_just_those_rows(output):
    work(output, result=bad_every_5)
    assert manifest_of(output)["totals"]["rows_failed"] == 8
    assert work(output)[1].complete  # failed rows are done, unless asked for

    def second_try(row):
        return RowResult((), (), 0, (), error="again") if row == 9 else result_of(row)

    computed, run = work(output, retry_failed=True, result=second_try)
    assert computed == list(range(4, 40, 5)) and run.rows_resumed == 32
    assert read(output) == expected_rows(FakeDataset(40), second_try)
    assert run.totals["rows_failed"] == 1
    computed, run = work(output, retry_failed=True)
    assert computed == [9] and read(output) == expected_rows(FakeDataset(40))
    assert part_paths(run.parts_dir) == []
    computed, run = work(output, retry_failed=True)
    assert computed == [] and run.complete


def test_retry_failed_on_unfinished_work(output):
    work(output, range(20), result=bad_every_5, finish=False)
    assert work(output, retry_failed=True)[0] == [4, 9, 14, *range(19, 40)]
    assert read(output) == expected_rows(FakeDataset(40))


def test_a_retry_cut_short_keeps_the_old_errors(output):
    work(output, result=bad_every_5)
    work(output, range(10), retry_failed=True, finish=False)
    assert read(output) == expected_rows(FakeDataset(40), bad_every_5)
    computed, _ = work(output)
    assert computed == []
    assert read(output) == expected_rows(FakeDataset(40), lambda r: result_of(r) if r < 10 else bad_every_5(r))


# ---- a complete job whose output is not there any more


def test_an_output_that_was_changed_is_not_replaced(output):
    work(output)
    edited = output.read_bytes()[:100]
    output.write_bytes(edited)
    with pytest.raises(InputError, match=r"was changed since this job wrote it: .*--overwrite"):
        work(output)
    assert output.read_bytes() == edited
    work(output, overwrite=True)
    assert read(output) == expected_rows(FakeDataset(40))


def test_a_lost_output_is_made_again(output, undisturbed):
    for result, computed_rows in ((bad_every_5, 0), (result_of, 40)):
        work(output, result=result, overwrite=True)
        output.unlink()
        computed, run = work(output, result=result)
        # With failed rows the parts were kept, and joining them is enough.
        assert len(computed) == computed_rows
        assert "is gone since" in run.notices[0]
        assert read(output) == expected_rows(FakeDataset(40), result)
    assert output.read_bytes() == undisturbed


def test_lost_parts_are_computed_again_on_retry(output):
    _, run = work(output, result=bad_every_5)
    part_paths(run.parts_dir)[0].unlink()
    assert work(output, retry_failed=True)[0] == [*range(7), *range(9, 40, 5)]
    assert read(output) == expected_rows(FakeDataset(40))


# ---- a job that goes on from a smaller one's rows


def of_rows(number: int) -> dict:
    return {"input": {"rows": number}, "seed": 0}


def has_more(was: dict, now: dict) -> bool:
    return was["seed"] == now["seed"] and was["input"]["rows"] < now["input"]["rows"]


def grow(output, rows, **more):
    """The job of so many rows, which goes on from those of fewer."""
    fingerprint = of_rows(rows)
    return work(
        output,
        range(rows),
        fingerprint=fingerprint,
        dataset=FakeDataset(rows),
        extends=has_more,
        keep_parts=True,
        **more,
    )


@pytest.mark.parametrize("finished", [True, False])
def test_more_rows_keep_those_that_are_done(output, finished):
    first, _ = grow(output, 12, finish=finished)
    then, run = grow(output, 30)
    assert (first, then) == (list(range(12)), list(range(12, 30))) and run.rows_resumed == 12
    assert "goes on from the 12 rows" in run.notices[0] and len(run.notices) == 1
    computed, run = grow(output, 40)
    assert computed == list(range(30, 40)) and run.rows_resumed == 30
    assert read(output) == expected_rows(FakeDataset(40))
    assert grow(output, 40)[0] == []
    with pytest.raises(InputError, match=r"has 40 rows made of another input: input.rows was 40, now 12"):
        grow(output, 12)
    with pytest.raises(InputError, match=r"has 40 finished rows: leave out --no-resume"):
        grow(output, 50, resume=False)


def test_parts_are_kept_only_for_more_rows(output):
    assert part_paths(grow(output, 12)[1].parts_dir)
    _, run = work(output, fingerprint=of_rows(40), extends=has_more)
    assert run.rows_resumed == 12 and not part_paths(run.parts_dir)


def test_more_rows_are_refused_where_finished_ones_are_no_longer_there(output):
    _, run = grow(output, 12)
    part_paths(run.parts_dir)[0].unlink()
    with pytest.raises(
        InputError, match=r"has 12 rows of a smaller job, but only 5 of them are left.*move the output away"
    ):
        grow(output, 40)
    assert read(output) == expected_rows(FakeDataset(12))
    output.unlink()  # then what is left is all there is
    computed, run = grow(output, 40)
    assert computed == [*range(7), *range(12, 40)] and any("deleted" in notice for notice in run.notices)


def test_more_rows_and_failed_ones_again(output):
    grow(output, 20, result=bad_every_5)
    computed, _ = grow(output, 40, retry_failed=True)
    assert computed == [4, 9, 14, *range(19, 40)]
    assert read(output) == expected_rows(FakeDataset(40))


def test_more_rows_of_an_output_without_rows(output):
    grow(output, 0)
    assert grow(output, 40)[0] == list(range(40))


def test_a_damaged_manifest_of_a_job_that_went_on(output):
    grow(output, 12)
    grow(output, 40, finish=False)
    Path(f"{output}.batchgen", "manifest.json").write_text("{ not json")
    output.unlink()
    with pytest.raises(InputError, match="--overwrite"):
        grow(output, 50)
    computed, run = grow(output, 40)
    assert computed == [] and run.rows_resumed == 40


# ---- where it cannot be written


def test_paths_that_cannot_be_an_output(tmp_path):
    with pytest.raises(InputError, match=r"there is no directory .*/no for --output: make it first"):
        open_run(tmp_path / "no" / "out.parquet", FINGERPRINT)
    (tmp_path / "dir.parquet").mkdir()
    with pytest.raises(InputError, match="is a directory: give the name of a file in it"):
        open_run(tmp_path / "dir.parquet", FINGERPRINT)
    with pytest.raises(InputError, match=r"must end in .parquet, .jsonl, .csv"):
        open_run(tmp_path / "out.txt", FINGERPRINT)
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(InputError, match="not a regular file"):
        open_run(tmp_path / "pipe.jsonl", FINGERPRINT)
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match=r"cannot write .*: Not a directory"):
        open_run(tmp_path / "file" / "out.parquet", FINGERPRINT)
    with pytest.raises(InputError, match=r"cannot write .*: File name too long"):
        open_run(tmp_path / ("x" * 245 + ".parquet"), FINGERPRINT)


@pytest.mark.parametrize("inodes", range(1, 5))
def test_a_disk_without_room_for_a_run_directory_is_full(small_disk, inodes):
    """The directory, that of its parts, its lock and its manifest come one after the other."""
    disk = small_disk(f"size=1m,nr_inodes={inodes}")
    with pytest.raises(BatchgenError, match=r"No space left on device.*: free space and run the same command again$"):
        open_run(disk / "out.parquet", FINGERPRINT)
    small_disk("size=1m,nr_inodes=100")
    open_run(disk / "out.parquet", FINGERPRINT).close()


def test_an_unwritable_directory(tmp_path):
    with pytest.raises(InputError, match=r"cannot write /proc/out\.parquet\.batchgen: .*a directory you can write to"):
        open_run("/proc/out.parquet", FINGERPRINT)
    folder = tmp_path / "locked"
    folder.mkdir()
    folder.chmod(0o555)
    if not os.access(folder, os.W_OK):  # root may write anywhere
        with pytest.raises(InputError, match="Permission denied"):
            open_run(folder / "out.parquet", FINGERPRINT)


def test_a_disk_that_is_full_at_the_start(output, monkeypatch):
    work(output, range(10), finish=False)

    def fail(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        expected = r"cannot open .*: No space left on device: free space and run the same command again"
        with pytest.raises(BatchgenError, match=expected):
            open_run(output, FINGERPRINT)
    assert len(work(output)[0]) == 30


def test_a_link_is_kept_and_its_target_written(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link.parquet").symlink_to(tmp_path / "real" / "data.parquet")
    work(tmp_path / "link.parquet")
    assert (tmp_path / "link.parquet").is_symlink()
    assert read(tmp_path / "real" / "data.parquet") == expected_rows(FakeDataset(40))


def test_two_runs_at_once(output):
    script = (
        "import sys, time; from batchgen.output.run_directory import open_run\n"
        f"run = open_run(sys.argv[1], {FINGERPRINT!r}); print('open', flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", script, str(output)]
    holder = subprocess.Popen(command, env=PYTHONPATH, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "open\n"
        for flags in ({}, {"overwrite": True}):
            with pytest.raises(BatchgenError, match=rf"another batchgen .*\(process {holder.pid} on .*\): wait"):
                open_run(output, FINGERPRINT, **flags)
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()
    assert work(output)[1].complete
    with open_run(output, FINGERPRINT), pytest.raises(BatchgenError, match="another batchgen"):
        open_run(output, FINGERPRINT)


# ---- crashes


class Crash(BaseException):
    """The machine stops: from here on nothing that lasts can be done."""


class Crasher:
    """Lets `steps` lasting steps (sync, rename, delete) happen, then crashes at each further one."""

    def __init__(self, monkeypatch) -> None:
        self.steps: int | None = None
        self.count = 0
        monkeypatch.setattr(os, "fsync", self._counted(lambda descriptor: None))  # the machine does not stop
        monkeypatch.setattr(os, "replace", self._counted(os.replace))
        monkeypatch.setattr(os, "unlink", self._counted(os.unlink))

    def _counted(self, operation):
        def call(*args, **kwargs):
            self.count += 1
            if self.steps is not None and self.count > self.steps:
                raise Crash
            return operation(*args, **kwargs)

        return call

    def steps_of(self, action) -> int:
        self.steps, self.count = None, 0
        action()
        return self.count

    def crash_after(self, steps: int, action) -> None:
        self.steps, self.count = steps, 0
        with pytest.raises(Crash):
            action()
        self.steps = None


@pytest.fixture
def memory_path(tmp_path):
    """A folder in memory, where the system has one: the machine goes on, and renaming takes a disk milliseconds."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        yield Path(folder)


@pytest.mark.parametrize("fail", [False, True])
def test_a_crash_at_any_step_of_a_run(memory_path, undisturbed, monkeypatch, fail):
    result = bad_every_5 if fail else result_of
    crasher = Crasher(monkeypatch)
    steps = crasher.steps_of(lambda: work(memory_path / "whole.parquet", result=result))
    assert steps > 20
    for k in range(0, steps, quick_or(3, 1) if fail else 1):
        output = memory_path / f"{k}.parquet"
        crasher.crash_after(k, lambda output=output: work(output, result=result))
        computed, run = work(output, result=result)
        assert len(computed) + run.rows_resumed in (0, 40) or run.complete
        assert read(output) == expected_rows(FakeDataset(40), result), k
        assert not list(run.directory.rglob("*.tmp"))
        if not fail:
            assert output.read_bytes() == undisturbed
            assert part_paths(run.parts_dir) == []


@pytest.fixture
def finished(memory_path):
    """A function that gives the output of a job that has finished, by a copy with its run directory: name -> path."""
    folder = memory_path / "finished"
    folder.mkdir()
    work(folder / "out.parquet", result=bad_every_5)

    def copied(name: object) -> Path:
        return Path(shutil.copytree(folder, memory_path / str(name))) / "out.parquet"

    return copied


def test_a_crash_at_any_step_of_overwriting(finished, monkeypatch):
    crasher = Crasher(monkeypatch)
    other = {"other": 1}

    def overwrite(output):
        return work(output, fingerprint=other, overwrite=True)

    whole = finished("whole")
    old = whole.read_bytes()
    steps = crasher.steps_of(lambda: overwrite(whole))
    new = whole.read_bytes()
    assert steps > 20 and new != old
    for k in range(steps):
        output = finished(k)
        crasher.crash_after(k, lambda output=output: overwrite(output))
        assert output.read_bytes() in (old, new), k
        try:  # either job can be asked to go on, and what it gives is whole
            work(output, fingerprint=other)
            assert output.read_bytes() == new
        except InputError as error:
            assert "rows made with other settings" in str(error)
            work(output, result=bad_every_5)
            assert output.read_bytes() == old
        overwrite(output)
        assert output.read_bytes() == new


def test_a_crash_at_any_step_of_a_retry(finished, monkeypatch):
    crasher = Crasher(monkeypatch)
    steps = crasher.steps_of(lambda: work(finished("whole"), retry_failed=True))
    assert steps > 10
    for k in range(steps):
        output = finished(k)
        crasher.crash_after(k, lambda output=output: work(output, retry_failed=True))
        assert len(read(output)) == 40
        computed, _ = work(output, retry_failed=k % 2 == 0)
        assert set(computed) <= set(range(4, 40, 5))
        rows, first, second = (
            read(output),
            *(expected_rows(FakeDataset(40), r) for r in (bad_every_5, result_of)),
        )
        assert rows == second or (k % 2 and all(row in (a, b) for row, a, b in zip(rows, first, second, strict=True)))


@pytest.mark.parametrize("fail", [False, True])
def test_a_crash_at_any_step_of_going_on(memory_path, monkeypatch, fail):
    """From a complete job of 12 rows to one of 40.

    No finished row is run again, and the old output stays until the new one is whole.
    """
    result = bad_every_5 if fail else result_of
    crasher = Crasher(monkeypatch)

    def smaller(name):
        output = memory_path / name
        grow(output, 12, result=result)
        return output

    whole = smaller("whole.parquet")
    steps = crasher.steps_of(lambda: grow(whole, 40, result=result))
    assert steps > 10
    for k in range(0, steps, quick_or(3, 1) if fail else 1):
        output = smaller(f"{k}.parquet")
        crasher.crash_after(k, lambda output=output: grow(output, 40, result=result))
        assert read(output) in [expected_rows(FakeDataset(n), result) for n in (12, 40)]
        computed, run = grow(output, 40, result=result)
        assert (
            run.complete
            and (len(computed) + run.rows_resumed == 40 or not computed)
            and not set(computed) & set(range(12))
        )
        assert output.read_bytes() == whole.read_bytes(), k
        assert not list(run.directory.rglob("*.tmp"))


@pytest.mark.slow
def test_kill_9_at_random_moments(tmp_path):
    num_rows = quick_or(300, 600)
    rng = rotating("kill -9")
    output, log = tmp_path / "out.parquet", tmp_path / "log"

    def start(path: Path, seed: int):
        return start_in_process(resumable_job.main, [str(path), str(num_rows), str(seed), "0.03"], log)

    def said() -> str:
        return log.read_text() if log.exists() else ""

    def complete(path: Path, seed: int) -> bool:
        start(path, seed).join()
        return "complete" in said()

    def saved() -> int:
        return sum(
            pq.read_metadata(path).num_rows for path in (tmp_path / "out.parquet.batchgen" / "parts").glob("*.parquet")
        )

    killed, resumed = 0, []
    for seed in range(60):
        log.unlink(missing_ok=True)
        process = start(output, seed)
        while "\n" not in said():
            assert process.is_alive(), said()
            time.sleep(0.002)
        resumed.append(int(said().split()[1]))
        enough = resumed[-1] + rng.randrange(num_rows // 8)
        while process.is_alive() and saved() < enough:
            time.sleep(0.002)
        time.sleep(rng.uniform(0, 0.03))
        process.kill()
        process.join()
        finished = "complete" in said()
        killed += not finished
        if finished:
            break
    else:
        assert complete(output, 99)
    assert killed >= 5 and resumed == sorted(resumed) and len(set(resumed)) > 4
    assert complete(tmp_path / "whole.parquet", 0)

    def result(row):
        return result_of(row, fail_every=13)

    rows = pq.ParquetFile(output).read().to_pylist()
    assert rows == expected_rows(FakeDataset(num_rows), result)
    assert output.read_bytes() == (tmp_path / "whole.parquet").read_bytes()


# ---- a full disk


def bulky(row: int) -> RowResult:
    return result_of(row, words=100)  # about 2 kB that do not compress well


def test_a_disk_that_fills_up_while_rows_come_in(small_disk, memory_path):
    work(memory_path / "whole.parquet", range(300), result=bulky, dataset=FakeDataset(300))
    output = small_disk("size=256k") / "out.parquet"
    with pytest.raises(BatchgenError, match=r"No space left on device; .* free space and run the same command again"):
        work(output, range(300), result=bulky, dataset=FakeDataset(300))
    small_disk("size=256k")
    assert not list(output.parent.rglob("*.tmp"))
    with open_run(output, FINGERPRINT) as run:
        safe = run.rows_resumed
    assert 30 < safe < 300
    small_disk("size=16m")
    computed, _ = work(output, range(300), result=bulky, dataset=FakeDataset(300))
    assert len(computed) == 300 - safe
    assert output.read_bytes() == (memory_path / "whole.parquet").read_bytes()


def test_a_disk_that_is_too_full_for_the_final_file(small_disk, memory_path):
    work(memory_path / "whole.parquet", range(300), result=bulky, dataset=FakeDataset(300))
    needed_kib = (memory_path / "whole.parquet").stat().st_size // 1024
    output = small_disk("size=64m") / "out.parquet"
    work(output, range(300), result=bulky, finish=False)
    used = os.statvfs(output.parent)
    used_kib = (used.f_blocks - used.f_bfree) * used.f_frsize // 1024
    small_disk(f"size={used_kib + needed_kib // 2}k")
    with pytest.raises(BatchgenError, match=r"cannot write .*out\.parquet: No space left.*; 300 finished rows"):
        work(output, range(300), result=bulky, dataset=FakeDataset(300))
    assert not output.exists() and not list(output.parent.rglob("*.tmp"))
    small_disk("size=64m")
    computed, _ = work(output, range(300), result=bulky, dataset=FakeDataset(300))
    assert computed == []
    assert output.read_bytes() == (memory_path / "whole.parquet").read_bytes()


def test_a_read_only_disk(small_disk):
    output = small_disk("size=16m") / "out.parquet"
    work(output, range(10), finish=False)
    small_disk("ro")
    with pytest.raises(InputError, match="Read-only file system: give an --output in a directory"):
        open_run(output, FINGERPRINT)
    with pytest.raises(InputError, match="Read-only file system"):
        open_run(output.with_name("new.parquet"), FINGERPRINT)


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl", ".csv"])
def test_an_error_while_joining_keeps_everything(tmp_path, monkeypatch, suffix):
    output = tmp_path / f"out{suffix}"
    work(output, finish=False)
    with open_run(output, FINGERPRINT) as run:

        def fail(descriptor):
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fail)
            with pytest.raises(BatchgenError, match="No space left on device; 40 finished rows are safe on disk"):
                run.finish(FakeDataset(40))
        assert not output.exists() and not list(run.directory.rglob("*.tmp"))
        assert run.finish(FakeDataset(40))["rows"] == 40
    assert output.exists()


def test_damage_in_token_counts_costs_the_part(output, undisturbed):
    """They are read for the plan, before any row is run."""
    _, run = work(output, range(14), finish=False)
    damaged = part_paths(run.parts_dir)[0]
    metadata = pq.read_metadata(damaged).row_group(0)
    names = [metadata.column(i).path_in_schema for i in range(metadata.num_columns)]
    column = metadata.column(next(i for i, name in enumerate(names) if name.startswith("generated_tokens")))
    content = bytearray(damaged.read_bytes())
    content[column.data_page_offset + column.total_compressed_size // 2] ^= 0xFF
    damaged.write_bytes(content)
    with open_run(output, FINGERPRINT) as again:
        assert any("quarantined" in notice for notice in again.notices)
        assert again.rows_resumed == 7 and len(again.output_lens()) == 7
    work(output)
    assert output.read_bytes() == undisturbed


def test_a_lock_that_leads_elsewhere_is_refused_in_a_line(tmp_path):
    """Where others may write, it may lead to any file of the user's."""
    victim, output = tmp_path / "victim", tmp_path / "out.jsonl"
    victim.write_text("precious")
    (tmp_path / "out.jsonl.batchgen").mkdir()
    (tmp_path / "out.jsonl.batchgen" / "lock").symlink_to(victim)
    for start in (lambda: open_run(output, FINGERPRINT), lambda: check_output(output)):
        with pytest.raises(InputError, match=r"lock is no lock \(it is a link\): remove it, or give another --output$"):
            start()
    assert victim.read_text() == "precious"
