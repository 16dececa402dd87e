"""Files whose columns have types of one kind: one input, with every value as it was."""

import datetime
import decimal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchgen.core.errors import InputError
from batchgen.dataset import open_dataset

TEXT = ["Zürich", None, "東京"]
WORDS = [["a", "b"], [], ["c"]]
OBJECTS = [{"x": "a", "y": 1}, {"x": None, "y": 2}, {"x": "b", "y": None}]


def dictionary(kind=None, index=None):
    return pa.dictionary(index or pa.int32(), kind or pa.string())


def array(values, kind):
    """Values in a type, of dictionaries too."""
    if pa.types.is_dictionary(kind):
        return pa.array(values, kind.value_type).cast(kind)
    if pa.types.is_list(kind) and pa.types.is_dictionary(kind.value_type):
        plain = pa.array(values, pa.list_(kind.value_type.value_type))
        return pa.ListArray.from_arrays(plain.offsets, plain.values.cast(kind.value_type))
    return pa.array(values, kind)


GO_TOGETHER = [
    (TEXT, [pa.string(), pa.large_string(), dictionary(), pa.string_view(), dictionary(pa.large_string(), pa.int8())]),
    ([None] * 3, [pa.null(), pa.string(), dictionary(), pa.list_(pa.string()), pa.null()][:2]),
    ([1, None, 100], [pa.int32(), pa.int64(), pa.int8(), pa.uint8(), pa.uint32()]),
    ([1, 2, 3], [pa.uint8(), pa.uint64()]),
    ([0.5, 2.0, None], [pa.float32(), pa.float64()]),
    (
        WORDS,
        [pa.list_(pa.string()), pa.large_list(pa.large_string()), pa.list_(dictionary()), pa.list_(pa.string_view())],
    ),
    ([[1, 2]] * 3, [pa.list_(pa.int64(), 2), pa.list_(pa.int32()), pa.large_list(pa.int64())]),
    (
        OBJECTS,
        [pa.struct([("x", pa.string()), ("y", pa.int64())]), pa.struct([("y", pa.int32()), ("x", pa.large_string())])],
    ),
    ([datetime.datetime(2024, 1, 2)] * 3, [pa.timestamp("ms"), pa.timestamp("us")]),
    (
        [decimal.Decimal("1.50"), None, decimal.Decimal("-7.25")],
        [pa.decimal128(5, 2), pa.decimal256(40, 2), pa.decimal128(9, 2)],
    ),
    ([b"a", None, b"b"], [pa.binary(), pa.large_binary(), pa.binary_view()]),
]


@pytest.mark.parametrize(("values", "kinds"), GO_TOGETHER, ids=lambda v: str(v[0]) if isinstance(v, list) else None)
def test_types_of_one_kind_go_together(tmp_path, values, kinds):
    expected = []
    for i, kind in enumerate([*kinds, *reversed(kinds)]):
        pq.write_table(pa.table({"id": [i] * 3, "a": array(values, kind)}), tmp_path / f"{i:02}.parquet")
        expected += values
    dataset = open_dataset(tmp_path)
    rows = [row for _, batch in dataset.batches() for row in batch.to_pylist()]
    assert [row["a"] for row in rows] == expected
    assert all(batch.schema.equals(dataset.schema) for _, batch in dataset.batches())


def test_a_column_that_may_be_null_in_one_file_may_be_in_all(tmp_path):
    for name, kind, nullable in (("a", pa.string(), False), ("b", pa.large_string(), True), ("c", pa.string(), False)):
        table = pa.table(
            {"a": pa.array(["x", None if nullable else "y"], kind)}, pa.schema([pa.field("a", kind, nullable)])
        )
        pq.write_table(table, tmp_path / f"{name}.parquet")
    dataset = open_dataset(tmp_path)
    assert dataset.schema.field("a").nullable
    assert [r["a"] for _, b in dataset.batches() for r in b.to_pylist()] == ["x", "y", "x", None, "x", "y"]


def test_texts_and_bytes_are_bytes(tmp_path):
    pq.write_table(pa.table({"a": ["x"]}), tmp_path / "1.parquet")
    pq.write_table(pa.table({"a": pa.array([b"\xff"])}), tmp_path / "2.parquet")
    assert [r["a"] for _, b in open_dataset(tmp_path).batches() for r in b.to_pylist()] == [b"x", b"\xff"]


@pytest.mark.parametrize(
    "kinds",
    [
        (pa.int64(), pa.float64()),  # 1 would be written 1.0
        (pa.int64(), pa.uint64()),
        (pa.string(), pa.int64()),
        (pa.bool_(), pa.int8()),
        (pa.list_(pa.int64()), pa.list_(pa.float64())),
        (pa.struct([("x", pa.int64())]), pa.struct([("x", pa.float64())])),
        (pa.list_(pa.string()), pa.string()),
        (pa.decimal128(5, 2), pa.decimal128(7, 4)),  # 1.50 would be written 1.5000
        (pa.list_(pa.decimal128(5, 2)), pa.list_(pa.float64())),  # or 1.5
    ],
    ids=str,
)
def test_types_that_hold_other_values_do_not_go_together(tmp_path, kinds):
    for i, kind in enumerate(kinds):
        pq.write_table(pa.table({"a": pa.nulls(2, kind)}), tmp_path / f"{i}.parquet")
    with pytest.raises(InputError, match=r"1.parquet and .*0.parquet differ in a column's type .*cast it"):
        open_dataset(tmp_path)


def test_a_value_that_the_common_type_does_not_hold_is_told_as_such(tmp_path):
    """A time of the year 9999 has no nanoseconds."""
    late = datetime.datetime(9999, 12, 31)
    for name, kind, value in (("1", "us", late), ("2", "ns", late.replace(year=2024))):
        pq.write_table(pa.table({"a": pa.array([value], pa.timestamp(kind))}), tmp_path / f"{name}.parquet")
    with pytest.raises(InputError, match=r"1.parquet has a value .*timestamp\[ns\].*cast it"):
        list(open_dataset(tmp_path).batches())
