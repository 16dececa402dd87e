"""The output that a job without --output gets: beside its input, in the input's format, and never anybody's file."""

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchgen.core.errors import InputError
from batchgen.dataset import open_dataset
from batchgen.dataset.files import find_files
from batchgen.job.default_output import default_output
from batchgen.job.files import check_files
from batchgen.job.options import JobOptions


def write(path, rows=({"prompt": "a"},)):
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(list(rows)), path)
    elif path.suffix == ".gz":
        path.write_bytes(gzip.compress(lines.encode()))
    else:
        path.write_text(lines)
    return path


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize(
    ("files", "given", "options", "output"),
    [
        (["data.parquet"], "data.parquet", {}, "data.out.parquet"),
        (["in/data.pq"], "in/data.pq", {}, "in/data.out.parquet"),
        (["data.jsonl"], "data.jsonl", {}, "data.out.jsonl"),
        (["data.json"], "data.json", {}, "data.out.jsonl"),
        (["data.tsv"], "data.tsv", {}, "data.out.csv"),
        (["a.b.csv.gz"], "a.b.csv.gz", {}, "a.b.out.csv"),
        (["rows.txt"], "rows.txt", {"input_format": "csv"}, "rows.txt.out.csv"),
        (["data.jsonl"], "data.jsonl", {"input_format": "openai"}, "data.out.jsonl"),
        (["data.parquet"], "data.parquet", {"shard": "1/4"}, "data.shard-1-of-4.out.parquet"),
        (["in/a.jsonl", "in/b.jsonl"], "in/*.jsonl", {}, "in.out.jsonl"),
        (["in/a.jsonl", "in/b.jsonl"], "in", {}, "in.out.jsonl"),
        (["in/a.jsonl"], "in/", {}, "in.out.jsonl"),
        (["in/x/a.csv"], "in/**/*.csv", {}, "in.out.csv"),
        (["a.parquet"], "*.parquet", {}, "work.out.parquet"),
        (["a.parquet"], ".", {}, "work.out.parquet"),
        (["in/state.json", "in/data-0.arrow"], "in", {}, "in.out.parquet"),
        ([], "org/name", {"split": "train"}, "name.train.out.parquet"),
        ([], "s3://key:secret@bucket/in/data.jsonl.gz?token=x", {"input_format": "jsonl"}, "data.out.jsonl"),
        ([], "missing/data.csv", {}, "data.out.parquet"),
        ([], "-", {}, "-"),
    ],
)
def test_an_output_lies_beside_its_input(files, given, options, output):
    for file in files:
        write(file)
    assert default_output(JobOptions("m", given, **options)) == output


def test_an_absolute_input_gives_an_absolute_output(here):
    write("in/a.parquet")
    assert default_output(JobOptions("m", f"{here}/in/*.parquet")) == f"{here}/in.out.parquet"
    assert default_output(JobOptions("m", f"{here}/in/a.parquet")) == f"{here}/in/a.out.parquet"


def test_a_second_night_reads_no_output_of_the_first_one():
    for name in ("in/a.jsonl", "in/b.jsonl"):
        write(name)
    outputs = [
        "in/a.out.jsonl",
        "in/b.out.errors.jsonl",
        "in/b.out.jsonl",
        "in/b.out.jsonl.batchgen/parts/part-0.jsonl",
    ]
    for name in outputs:
        write(name, [{"other": 1}])
    for given in ("in", "in/*.jsonl", "in/**/*.jsonl"):
        assert find_files(given, None).paths == ["in/a.jsonl", "in/b.jsonl"]
        (said,) = open_dataset(given).notices
        assert said.startswith("left out: in/a.out.jsonl and ") and "outputs of earlier jobs" in said
    assert find_files("in/*.out.jsonl", None).paths == ["in/a.out.jsonl", "in/b.out.jsonl"]  # the user asks for them
    assert find_files("in/a.out.jsonl", None).paths == ["in/a.out.jsonl"]


@pytest.mark.parametrize("given", ["in", "in/*.jsonl"])
def test_an_input_of_nothing_but_outputs_is_told(given):
    write("in/a.out.jsonl")
    with pytest.raises(InputError, match=r"nothing but outputs of earlier jobs, such as in/a\.out\.jsonl: name one"):
        open_dataset(given)


@pytest.mark.parametrize("given", [".", "*.jsonl", "**/*.parquet"])
def test_an_output_that_a_glob_or_directory_leaves_out_may_lie_in_it(given):
    write("a.jsonl")
    write("a.parquet")
    check_files(JobOptions("m", given, "work.out.parquet"))
    with pytest.raises(InputError, match=r"matches the input|lies in the input"):
        check_files(JobOptions("m", given, "b.parquet" if "parquet" in given else "b.jsonl"))
