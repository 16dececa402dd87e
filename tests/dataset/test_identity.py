"""The identity of an input is all of its bytes: before a job, between its runs and while it runs."""

import json
import os
import random

import datasets
import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from batchgen.core.errors import InputError
from batchgen.dataset import open_dataset
from batchgen.dataset.identity import InputFiles, describe_files

LARGE = 1000  # bytes, in these tests


@pytest.fixture(autouse=True)
def large_files_are_small(monkeypatch):
    monkeypatch.setattr("batchgen.dataset.identity._SHA256_BYTES", LARGE)


def write_lines(path, count, first=0):
    with open(path, "a") as file:
        file.writelines(json.dumps({"prompt": f"row {i} of many"}) + "\n" for i in range(first, first + count))
    return path


def edit_in_place(path, offset):
    """Change one byte of a text, and neither its size nor its times."""
    before = os.stat(path)
    with open(path, "r+b") as file:
        file.seek(offset)
        old = file.read(1)
        file.seek(offset)
        file.write(b"7" if old != b"7" else b"8")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_one_byte_anywhere_in_a_large_file_makes_it_another_input(tmp_path):
    path = write_lines(tmp_path / "in.jsonl", 3000)
    size = path.stat().st_size
    assert size > 60 * LARGE
    draw = random.Random(0)
    was = InputFiles([str(path)]).identity()
    for _ in range(20):
        held = path.read_bytes()
        edit_in_place(path, draw.randrange(size))
        assert InputFiles([str(path)]).identity() != was
        path.write_bytes(held)
    assert InputFiles([str(path)]).identity() == was


def test_large_files_may_be_appended_to_and_not_edited(tmp_path):
    path = write_lines(tmp_path / "in.jsonl", 100)
    was = open_dataset(path).identity()
    write_lines(path, 50, first=100)
    assert open_dataset(path).begins_with(was)
    edit_in_place(path, path.read_bytes().index(b"row 57") + 4)
    assert not open_dataset(path).begins_with(was)


def make(kind, path, prompts):
    """An input of some kind with a column of prompts, and the file whose bytes have them."""
    if kind == "datasets":
        datasets.Dataset.from_dict({"prompt": prompts}).save_to_disk(path)
        return path, next(path.glob("*.arrow"))
    file = path.with_suffix(f".{kind}")
    if kind == "parquet":
        table = pa.table({"prompt": prompts})
        pq.write_table(table, file, compression="none", use_dictionary=False, row_group_size=100)
    elif kind == "csv":
        file.write_text("prompt\n" + "".join(f"{prompt}\n" for prompt in prompts))
    else:
        lines = [json.dumps({"prompt": prompt}) for prompt in prompts]
        file.write_text("[" + ",\n".join(lines) + "]" if kind == "json" else "\n".join(lines))
    return file, file


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet", "datasets"])
def test_rows_that_are_edited_while_a_job_reads_them_are_never_handed_on(tmp_path, kind):
    prompts = [f"prompt {i:06} of a job" for i in range(3000)]
    source, file = make(kind, tmp_path / "in", prompts)
    dataset = open_dataset(source)
    dataset.identity()
    batches, seen = dataset.batches(batch_rows=100), []
    for _ in range(3):
        seen += next(batches)[1].column("prompt").to_pylist()
    edit_in_place(file, file.read_bytes().index(b"prompt 002900") + 10)
    with pytest.raises(InputError, match="changed while the job ran"):
        for _, batch in batches:
            seen += batch.column("prompt").to_pylist()
    assert seen == prompts[: len(seen)]
    with pytest.raises(InputError, match="changed while the job ran"):
        list(dataset.batches())  # nor is it forgotten


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_a_file_that_is_appended_to_or_touched_while_a_job_reads_it_is_read_on(tmp_path, kind):
    prompts = [f"prompt {i:06}" for i in range(500)]
    source, file = make(kind, tmp_path / "in", prompts)
    if kind == "jsonl":
        file.write_text(file.read_text() + "\n")
    dataset = open_dataset(source)
    was = dataset.identity()
    batches = dataset.batches(batch_rows=100)
    seen = next(batches)[1].column("prompt").to_pylist()
    file.write_text(file.read_text() + file.read_text().splitlines()[-1] + "\n")
    seen += next(batches)[1].column("prompt").to_pylist()
    file.touch()
    seen += [prompt for _, batch in batches for prompt in batch.column("prompt").to_pylist()]
    assert seen == prompts
    assert dataset.identity() == was


def test_a_file_that_did_not_change_is_read_once(tmp_path, monkeypatch):
    path = write_lines(tmp_path / "in.jsonl", 100)
    files = InputFiles([str(path)])
    was = files.identity()
    monkeypatch.setattr("batchgen.dataset.identity.open_raw", None)
    assert files.identity() == was
    files.check(str(path))


def test_a_file_that_is_edited_all_the_time_has_no_identity(tmp_path, monkeypatch):
    path = write_lines(tmp_path / "in.jsonl", 10)
    digest = InputFiles._digest

    def edit_meanwhile(self, file):
        found = digest(self, file)
        edit_in_place(path, 12)
        return found

    monkeypatch.setattr(InputFiles, "_digest", edit_meanwhile)
    with pytest.raises(InputError, match="written to while it is read"):
        InputFiles([str(path)]).identity()


def test_tables_mapped_from_files_are_told_by_the_files(tmp_path):
    source, file = make("datasets", tmp_path / "in", [f"prompt {i:06}" for i in range(100)])
    was = open_dataset(source).identity()
    assert open_dataset(datasets.load_from_disk(str(source))).identity() == was
    edit_in_place(file, file.read_bytes().index(b"prompt 000050") + 12)
    now = open_dataset(source).identity()
    assert now != was and now["fingerprint"] == was["fingerprint"]


class _TaggedFileSystem(MemoryFileSystem):
    """A file system that tells of each file a tag of its contents, as object stores do, and counts what it opens."""

    protocol = "tagged"
    store = {}
    pseudo_dirs = [""]
    opened = 0

    def info(self, path, **kwargs):
        found = super().info(path, **kwargs)
        if found["type"] == "file":
            found["ETag"] = f"tag of {hash(bytes(self.store[self._strip_protocol(path)].getbuffer()))}"
        return found

    def _open(self, path, mode="rb", **kwargs):
        type(self).opened += "r" in mode
        return super()._open(path, mode, **kwargs)

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.removeprefix("tagged://"))


def test_remote_files_are_told_by_the_tags_of_their_contents(tmp_path):
    fsspec.register_implementation("tagged", _TaggedFileSystem, clobber=True)
    source, _ = make("parquet", tmp_path / "in", [f"prompt {i:06}" for i in range(100)])
    system = fsspec.filesystem("tagged")
    system.pipe_file("/bucket/in.parquet", source.read_bytes())
    files = InputFiles(["tagged://bucket/in.parquet"])
    opened = _TaggedFileSystem.opened
    was = files.identity()
    assert "version" in was["files"][0] and _TaggedFileSystem.opened == opened, "it is not read for it"
    system.pipe_file("/bucket/in.parquet", source.read_bytes().replace(b"prompt 000050", b"prompt 000051"))
    assert files.identity() != was
    lines = write_lines(tmp_path / "in.jsonl", 100)  # text may be appended to, which no tag shows
    system.pipe_file("/bucket/in.jsonl", lines.read_bytes())
    was = open_dataset("tagged://bucket/in.jsonl").identity()
    assert "version" not in was["files"][0]
    system.pipe_file("/bucket/in.jsonl", write_lines(lines, 5).read_bytes())
    assert open_dataset("tagged://bucket/in.jsonl").begins_with(was)


def test_changes_of_files_are_told_in_words():
    def file(name, digest, size_bytes=2048, **more):
        return {"name": name, "size_bytes": size_bytes, "sha256": digest, **more}

    def told(was, now, alike=None):
        return describe_files(was, now, lambda _: alike)

    a, b = file("a.csv", "1"), file("b.csv", "2")
    assert told([a], [file("a.csv", "3", 4096)]) == "a.csv has changed (2.0 KiB before, 4.0 KiB now)"
    assert told([a, b], [b, file("c.csv", "3")]) == "c.csv is new; a.csv is gone"
    assert told([a, b], [b, a]) == "its files are read in another order"
    assert told([a, a], [a]) == "its 1 files are not the 2 files that they were"
    before = [file(f"{i}.csv", "1") for i in range(5)]
    after = [file(f"{i}.csv", "2") for i in range(5)]
    assert told(before, after).endswith("2.csv and 2 more files are changed")
    was, now = (
        file("a.parquet", "1", rows=1000, sample=["x", "y"]),
        file("a.parquet", "2", rows=1200, sample=["x", "z"]),
    )
    assert told([was], [now], True).startswith("a.parquet has grown from 1,000 to 1,200 rows and begins with the same")
    assert told([was], [now], None) == "a.parquet has 1,200 rows, 1,000 before"
    assert told([now], [was], True) == "a.parquet has 1,000 rows, 1,200 before"


def test_a_large_row_group_is_not_read_for_its_last_rows(tmp_path, monkeypatch):
    import pyarrow as pa
    import pyarrow.parquet as pq

    from batchgen.dataset import open_dataset

    path = tmp_path / "in.parquet"
    pq.write_table(pa.table({"prompt": [f"row {i}" for i in range(100)]}), path)
    first, last = open_dataset(path).identity()["files"][0]["sample"]
    monkeypatch.setattr("batchgen.dataset.readers.parquet._SAMPLED_BYTES", 10)
    assert open_dataset(path).identity()["files"][0]["sample"] == [first, None] and last
