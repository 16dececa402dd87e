"""Columns that nobody asks for are not read, and batches are small however large rows are."""

import csv
import json

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchgen.core.errors import InputError
from batchgen.dataset import open_dataset
from batchgen.job.options import JobOptions
from batchgen.job.step_source import open_rows
from batchgen.output.row_map import DoneRows

BATCH_BYTES = 32 << 10
BIG_BYTES = 2 << 10
BIG_ROWS = 40


def damaged_image_column(path):
    """A Parquet file whose column of images cannot be read, beside one of prompts that can."""
    prompts = [f"prompt {i}" for i in range(100)]
    table = pa.table({"prompt": prompts, "image": [f"image {i}".encode() * 50 for i in range(100)]})
    pq.write_table(table, path, compression="none", use_dictionary=False, write_page_checksum=True)
    data = bytearray(path.read_bytes())
    at = data.index(b"image 50")
    data[at : at + 5] = b"IMAGE"
    path.write_bytes(data)
    return prompts


def test_parquet_columns_that_nobody_wants_are_not_decoded(tmp_path):
    path = tmp_path / "in.parquet"
    prompts = damaged_image_column(path)
    dataset = open_dataset(path)
    assert [p for _, b in dataset.batches(columns={"prompt"}) for p in b.column("prompt").to_pylist()] == prompts
    with pytest.raises(InputError, match="damaged"):
        list(dataset.batches())


@pytest.mark.parametrize(
    "options",
    [{}, {"prompt_template": "Say {{ prompt }}"}, {"id_column": "prompt"}, {"task": "score"}],
    ids=str,
)
def test_a_job_reads_the_columns_that_its_requests_are_made_of(tmp_path, options):
    path = tmp_path / "in.parquet"
    prompts = damaged_image_column(path)
    source = open_rows(JobOptions("demo", str(path), None, **options))
    assert len(list(source.requests(DoneRows()))) == len(prompts)


def test_images_of_the_datasets_library_are_not_decoded(tmp_path, monkeypatch):
    pixels = [{"bytes": b"no image at all", "path": None}] * 3
    features = datasets.Features({"image": datasets.Image(), "prompt": datasets.Value("string")})
    columns = {"image": pixels, "prompt": ["a", "b", "c"]}
    table = datasets.Dataset(pa.Table.from_pydict(columns, schema=features.arrow_schema))
    assert isinstance(table.features["image"], datasets.Image)

    def refuse(*args, **kwargs):
        raise AssertionError("an image is decoded")

    monkeypatch.setattr(datasets.Image, "decode_example", refuse)
    for source in (table, table.to_iterable_dataset()):
        dataset = open_dataset(source)
        for columns in ({"prompt"}, None):
            rows = [row for _, b in dataset.batches(columns=columns) for row in b.to_pylist()]
            assert [row["prompt"] for row in rows] == ["a", "b", "c"]
            assert ("image" in rows[0]) == (columns is None)


@pytest.fixture(scope="module")
def big_inputs(tmp_path_factory):
    """Inputs whose rows have a large column beside a short prompt."""
    folder = tmp_path_factory.mktemp("big")
    rows = [{"prompt": f"prompt {i}", "image": f"{i:03}" + "x" * BIG_BYTES} for i in range(BIG_ROWS)]
    table = pa.Table.from_pylist(rows)
    pq.write_table(table, folder / "in.parquet", compression="zstd", use_dictionary=False)
    with open(folder / "in.jsonl", "w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    (folder / "in.json").write_text(json.dumps(rows))
    with open(folder / "in.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, ["prompt", "image"])
        writer.writeheader()
        writer.writerows(rows)
    datasets.Dataset(table).save_to_disk(folder / "saved")
    return {name: folder / name for name in ("in.parquet", "in.jsonl", "in.json", "in.csv", "saved")}


@pytest.mark.parametrize("name", ["in.parquet", "in.jsonl", "in.json", "in.csv", "saved"])
def test_batches_are_bounded_by_bytes_and_only_wanted_columns_count(big_inputs, name, monkeypatch):
    for module in ("source", "row_batches"):
        monkeypatch.setattr(f"batchgen.dataset.{module}.BATCH_BYTES", BATCH_BYTES)
    dataset = open_dataset(big_inputs[name])
    sizes = [batch.nbytes for _, batch in dataset.batches()]
    assert len(sizes) > 1 and max(sizes) <= BATCH_BYTES + 2 * BIG_BYTES
    ((first, batch),) = dataset.batches(columns={"prompt"})
    assert (first, batch.num_rows, batch.schema.names) == (0, BIG_ROWS, ["prompt"])
    (row,) = next(dataset.batches(BIG_ROWS - 1, columns={"image"}))[1].to_pylist()[-1].values()
    assert row.startswith(f"{BIG_ROWS - 1:03}x")


def test_a_long_value_that_parquet_has_once_counts_in_every_row(tmp_path, monkeypatch):
    monkeypatch.setattr("batchgen.dataset.source.BATCH_BYTES", BATCH_BYTES)
    pq.write_table(pa.table({"prompt": ["x" * BIG_BYTES] * 1000}), tmp_path / "in.parquet")
    assert (tmp_path / "in.parquet").stat().st_size < 8 * BIG_BYTES
    sizes = [batch.nbytes for _, batch in open_dataset(tmp_path / "in.parquet").batches()]
    assert sum(sizes) >= 1000 * BIG_BYTES and max(sizes) <= BATCH_BYTES + BIG_BYTES


def test_columns_are_asked_for_by_name_and_nothing_else(tmp_path):
    """Names with dots, which Parquet writes for the inside of columns too, and columns of directories."""
    table = pa.table({"a": [{"b": 1, "c": 2}], "a.b": ["dotted"], "c": [3]})
    (tmp_path / "in" / "year=2024").mkdir(parents=True)
    pq.write_table(table, tmp_path / "in" / "year=2024" / "x.parquet")
    dataset = open_dataset(tmp_path / "in")
    for columns, expected in [
        ({"a.b"}, {"a.b": "dotted"}),
        ({"a"}, {"a": {"b": 1, "c": 2}}),
        ({"year"}, {"year": 2024}),
        ({"year", "c", "none"}, {"c": 3, "year": 2024}),
        ((), {"a": {"b": 1, "c": 2}}),
    ]:
        ((_, batch),) = dataset.batches(columns=columns)
        assert batch.to_pylist() == [expected]
