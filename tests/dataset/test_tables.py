"""Tables that a program has: what identifies their values, and what columns they get."""

import datetime
import os

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thorough import some_draws

from batchgen.core.errors import InputError
from batchgen.dataset import open_dataset
from batchgen.dataset.content_digest import content_digest

STRUCT = pa.struct([("a", pa.string()), ("b", pa.list_(pa.int8()))])
VALUES = {
    pa.null(): st.none(),
    pa.bool_(): st.booleans(),
    pa.int16(): st.integers(-9, 9),
    pa.float64(): st.floats(allow_nan=False, allow_infinity=False),
    pa.decimal128(9, 2): st.decimals("-99", "99", places=2),
    pa.timestamp("us"): st.datetimes(datetime.datetime(2000, 1, 1), datetime.datetime(2030, 1, 1)),
    pa.binary(2): st.binary(min_size=2, max_size=2),
    pa.string(): st.text(st.characters(exclude_categories=["Cs"]), max_size=4),
    pa.large_binary(): st.binary(max_size=4),
    pa.string_view(): st.text("ab", max_size=20),
    pa.dictionary(pa.int8(), pa.string()): st.sampled_from(["x", "yy", ""]),
    pa.list_(pa.string()): st.lists(st.none() | st.text("ab", max_size=2), max_size=3),
    pa.large_list(pa.list_(pa.bool_())): st.lists(st.lists(st.booleans(), max_size=2), max_size=2),
    pa.list_(pa.int32(), 2): st.lists(st.integers(0, 9), min_size=2, max_size=2),
    pa.map_(pa.string(), pa.int8()): st.lists(st.tuples(st.text("ab", max_size=2), st.integers(0, 3)), max_size=2),
    STRUCT: st.fixed_dictionaries(
        {"a": st.none() | st.text("ab", max_size=2), "b": st.none() | st.lists(st.integers(0, 9), max_size=2)}
    ),
}


@st.composite
def columns(draw):
    kind = draw(st.sampled_from(list(VALUES)))
    rows = draw(st.integers(0, 12))
    return kind, draw(st.lists(st.none() | VALUES[kind], min_size=rows, max_size=rows))


def table_of(kind, values, cuts=()):
    """The values in a table whose chunks begin at the cuts, each a slice of a longer array."""
    ends = [*sorted(min(cut, len(values)) for cut in cuts), len(values)]
    chunks = [
        pa.array([*values[:1], *values[first:end], *values[:2]], kind).slice(min(1, len(values)), end - first)
        for first, end in zip([0, *ends], ends, strict=False)
    ]
    return pa.table({"c": pa.chunked_array(chunks, kind)})


@settings(max_examples=some_draws(150), deadline=None)
@given(columns(), st.lists(st.integers(0, 12), max_size=3))
def test_the_same_values_have_one_digest_however_they_are_cut(column, cuts):
    kind, values = column
    cut = table_of(kind, values, cuts)
    assert cut["c"].to_pylist() == table_of(kind, values)["c"].to_pylist()
    assert content_digest(cut) == content_digest(table_of(kind, values)) == content_digest(cut.combine_chunks())


@settings(max_examples=some_draws(150), deadline=None)
@given(columns(), st.integers(0, 11), st.data())
def test_other_values_have_another_digest(column, row, data):
    kind, values = column
    digest = content_digest(table_of(kind, values))
    assert digest != content_digest(table_of(kind, [*values, None]))
    if row < len(values):
        other = data.draw(st.none() | VALUES[kind])
        changed = table_of(kind, [*values[:row], other, *values[row + 1 :]])
        is_same = changed["c"].to_pylist() == table_of(kind, values)["c"].to_pylist()
        assert (content_digest(changed) == digest) == is_same or str(other) in ("0.0", "-0.0")


def test_values_do_not_move_from_a_column_to_another_nor_from_a_text_to_the_next():
    digests = {
        content_digest(pa.table(columns))
        for columns in (
            {"a": ["x", "y"], "b": ["", ""]},
            {"a": ["", ""], "b": ["x", "y"]},
            {"a": ["xy", ""], "b": ["", ""]},
            {"a": ["", "xy"], "b": ["", ""]},
            {"a": ["x", None], "b": ["y", ""]},
        )
    }
    assert len(digests) == 5


def test_what_lies_behind_nulls_does_not_count():
    validity = pa.array([True, False, True]).buffers()[1]
    arrays = [
        pa.Array.from_buffers(pa.int32(), 3, [validity, pa.py_buffer(np.array([1, hidden, 3], np.int32))])
        for hidden in (2, 99)
    ]
    assert content_digest(pa.table({"c": arrays[0]})) == content_digest(pa.table({"c": arrays[1]}))


def test_names_and_types_identify_a_table_too():
    tables = [{"a": [1]}, {"b": [1]}, {"a": pa.array([1], pa.int8())}, {"a": ["1"]}]
    assert len({str(open_dataset(table).identity()) for table in tables}) == 4


def test_a_longer_table_begins_with_a_shorter_one():
    rows = [{"q": f"row {i}"} for i in range(10)]
    was = open_dataset(rows[:6]).identity()
    assert open_dataset(rows).begins_with(was) and open_dataset(rows, limit=7).begins_with(was)
    assert not open_dataset(rows[:5]).begins_with(was)
    assert not open_dataset([{"q": "row 1"}, *rows[1:]]).begins_with(was)


@pytest.mark.parametrize(
    ("rows", "types"),
    [
        ([{"a": 1}, {"b": "x"}], {"a": pa.int64(), "b": pa.string()}),
        ([{"a": 1}, {"a": 2.5}], {"a": pa.float64()}),
        ([{"a": 1}, {"a": "x"}], {"a": pa.string()}),
        (
            [{"a": [{"role": "user", "content": "x"}]}],
            {"a": pa.list_(pa.struct([("role", "str"), ("content", "str")]))},
        ),
        ([{"a": datetime.date(2020, 1, 1)}], {"a": pa.date32()}),
        ([{"a": np.float32(1)}], {"a": pa.float32()}),
        ([{"a": None}], {"a": pa.null()}),
    ],
    ids=str,
)
def test_rows_that_are_dicts_get_types_as_json_lines_do(rows, types):
    assert open_dataset(rows).schema == pa.schema(list(types.items()))


def test_a_list_of_files_is_no_list_of_prompts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).touch()
    with pytest.raises(InputError, match="names of files, and each would be a prompt"):
        open_dataset(["a.txt", "b.txt"])
    assert open_dataset(["a.txt", "What is this?"]).num_rows == 2


def test_a_lone_surrogate_is_replaced():
    for given_rows in (["\ud800"], [{"prompt": "\ud800"}], {"prompt": ["\ud800"]}):
        ((_, batch),) = open_dataset(given_rows).batches()
        assert batch["prompt"].to_pylist() == ["�"]


def test_a_stream_is_copied_to_a_file_that_nobody_sees(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    table = pa.table({"q": [f"row {i}" for i in range(1000)]})
    before = len(os.listdir("/proc/self/fd"))
    dataset = open_dataset(table.to_reader(max_chunksize=7))
    assert sum(batch.num_rows for _, batch in dataset.batches()) == 1000
    assert dataset.identity() == open_dataset(table).identity()
    assert list(tmp_path.iterdir()) == [] and len(os.listdir("/proc/self/fd")) <= before + 1
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(InputError, match=r"cannot be copied to .*: set TMPDIR"):
        open_dataset(table.to_reader())
