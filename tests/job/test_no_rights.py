"""Files and folders that this user may not read or write: a line names them before any work; no rows are left out."""

import contextlib
import os
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fake_rows import result_of

from batchgen.core.errors import BatchgenError, InputError
from batchgen.dataset import open_dataset
from batchgen.job.checks import check_job
from batchgen.job.destination import make_output_folder
from batchgen.job.files import write_text
from batchgen.job.options import JobOptions
from batchgen.output.run_directory import check_output, open_run

NOBODY = 65534


@pytest.fixture
def folder():
    """A folder that other users may look into, unlike those of pytest."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield Path(name)


@contextlib.contextmanager
def without_rights():
    """Be a user who is not root; who is none has no more rights than that."""
    if os.geteuid() != 0:
        yield
        return
    os.setresuid(NOBODY, NOBODY, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)


def line_of(act, kind=BatchgenError):
    with without_rights(), pytest.raises(kind) as raised:
        act()
    assert "Permission denied" in str(raised.value) and "\n" not in str(raised.value)
    return str(raised.value)


def read(source):
    dataset = open_dataset(source)
    dataset.identity()
    return sum(batch.num_rows for _, batch in dataset.batches())


def write(path, mode=0o644):
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.table({"prompt": ["a"]}), path)
    else:
        path.write_text("[]" if path.suffix == ".json" else '{"prompt": "a"}\n')
    path.chmod(mode)
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.parquet", "a.jsonl.gz"])
def test_an_input_file_that_may_not_be_read_is_named(folder, name):
    path = write(folder / name, 0)
    assert str(path) in line_of(lambda: read(path), InputError)


@pytest.mark.parametrize("mode", [0o000, 0o400, 0o100])
@pytest.mark.parametrize("source", ["in", "in/a.jsonl", "in/*.jsonl", "*/a.jsonl", "**/a.jsonl"])
def test_a_folder_that_may_not_be_read_is_named_however_its_files_are(folder, source, mode):
    write(folder / "in" / "a.jsonl")
    (folder / "in").chmod(mode)
    if os.geteuid() == 0 or (mode, source) != (0o100, "in/a.jsonl"):
        assert str(folder / "in") in line_of(lambda: read(str(folder / source)), InputError)
    (folder / "in").chmod(0o755)


@pytest.mark.parametrize("source", ["in", "in/**/*.jsonl", "in/day=*/a.jsonl"])
@pytest.mark.parametrize("closed", ["day=2", "day=2/a.jsonl"])
def test_rows_that_may_not_be_read_are_not_left_out(folder, source, closed):
    for day in (1, 2, 3):
        write(folder / "in" / f"day={day}" / "a.jsonl")
    assert read(str(folder / source)) == 3
    (folder / "in" / closed).chmod(0)
    assert "day=2" in line_of(lambda: read(str(folder / source)), InputError)
    (folder / "in" / closed).chmod(0o755)


def test_a_link_to_nothing_in_a_folder_is_no_input_that_may_be_missed(folder):
    write(folder / "in" / "a.jsonl")
    (folder / "in" / "b.jsonl").symlink_to(folder / "gone.jsonl")
    for source in ("in", "in/*.jsonl"):
        with pytest.raises(InputError, match=r"b\.jsonl"):
            read(str(folder / source))


@pytest.mark.parametrize("output", ["out/a.parquet", "out/deep/a.parquet"])
@pytest.mark.parametrize("mode", [0o000, 0o500])
def test_a_folder_that_may_not_be_written_is_named_before_any_work(folder, output, mode):
    (folder / "out" / "deep").mkdir(parents=True)
    (folder / "out" / "deep").chmod(0o555)
    (folder / "out").chmod(mode + (mode >> 6))
    job = JobOptions("demo", str(write(folder / "in.jsonl")), str(folder / output))
    for act in (lambda: check_output(folder / output), lambda: open_run(folder / output, {}), lambda: check_job(job)):
        assert str(folder / "out") in line_of(act)
    (folder / "out").chmod(0o755)
    (folder / "out" / "deep").chmod(0o755)


@pytest.mark.parametrize("closed", [".", "lock", "manifest.json", "parts", "parts/part-000000.parquet"])
def test_a_run_directory_of_somebody_else_is_named(folder, closed):
    folder.chmod(0o777)
    output = folder / "out.parquet"
    with open_run(output, {}) as run, run.writer() as writer:
        writer.add(0, result_of(0))
    for path in (run.directory, *run.directory.rglob("*")):
        path.chmod(0o777)
    (run.directory / closed).chmod(0)
    assert str(run.directory) in line_of(lambda: open_run(output, {}))
    if closed in (".", "lock"):
        assert str(run.directory) in line_of(lambda: check_output(output))
    (run.directory / closed).chmod(0o755)


@pytest.mark.parametrize("option", ["report", "report_html", "trace"])
def test_a_report_that_may_not_be_written_is_refused_before_any_work(folder, option):
    (folder / "closed").mkdir(mode=0)
    source, target = write(folder / "in.jsonl"), str(folder / "closed" / "x.out")
    folder.chmod(0o777)
    job = JobOptions("demo", str(source), str(folder / "out.jsonl"), **{option: target})
    with without_rights(), pytest.raises(InputError, match=rf"--{option.replace('_', '-')} .* cannot be written"):
        check_job(job)
    line_of(lambda: write_text("x", target, "--report"))
    (folder / "closed").chmod(0o755)


def test_a_cache_directory_that_may_not_be_written_is_named(folder):
    line = line_of(lambda: make_output_folder(folder / "outputs" / "x"))
    assert "BATCHGEN_CACHE" in line
