"""Columns of the properties of JSON answers: their values, whatever the texts are."""

import json

import pyarrow as pa
import pytest

from batchgen.output.columns import SampleColumns
from batchgen.output.json_columns import JsonColumns
from batchgen.output.row_result import RowResult

COLUMNS = JsonColumns(
    (
        ("name", pa.string()),
        ("age", pa.int64()),
        ("weight", pa.float64()),
        ("open", pa.bool_()),
        ("tags", pa.list_(pa.string())),
        ("at", pa.struct([("x", pa.int64()), ("y", pa.list_(pa.float64()))])),
    )
)
NOTHING = dict.fromkeys(dict(COLUMNS.properties))


def values_of(*texts):
    columns = COLUMNS.arrays(pa.array(texts, pa.string()))
    return pa.RecordBatch.from_arrays(columns, names=list(COLUMNS.types(()))).to_pylist()


def test_a_complete_object_fills_its_columns():
    row = {"name": "Ann", "age": 3, "weight": 1.5, "open": True, "tags": ["a", "b"], "at": {"x": 1, "y": [0.5, 2.0]}}
    assert values_of(json.dumps(row), json.dumps(row | {"other": 1}), "{}") == [row, row, NOTHING]


@pytest.mark.parametrize(
    "text",
    [None, "", '{"name": "An', "[1]", "3", "null", '"name"', "{}{}", "NaN", "[" * 100_000, '{"age": 1' + "0" * 5000],
)
def test_what_is_no_complete_object_gives_nulls(text):
    assert values_of(text) == [NOTHING]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"name": 5}, {"name": "5"}),
        ({"name": ["ä", {"b": None}]}, {"name": '["ä", {"b": null}]'}),
        ({"name": "\ud800"}, {"name": "�"}),
        ({"age": 3.0}, {"age": 3}),
        ({"age": 3.5}, {}),
        ({"age": True}, {}),
        ({"age": "3"}, {}),
        ({"age": 2**63}, {}),
        ({"age": -(2**63)}, {"age": -(2**63)}),
        ({"weight": 3}, {"weight": 3.0}),
        ({"weight": 10**400}, {}),
        ({"open": 1}, {}),
        ({"tags": "a"}, {}),
        ({"tags": ["a", None, 1]}, {"tags": ["a", None, "1"]}),
        ({"at": []}, {}),
        ({"at": {"x": "1", "z": 2}}, {"at": {"x": None, "y": None}}),
    ],
    ids=str,
)
def test_a_value_of_another_type_is_null_or_text(given, expected):
    assert values_of(json.dumps(given)) == [NOTHING | expected]


def test_infinity_is_no_integer():
    assert values_of('{"age": 1e999, "weight": 1e999}') == [NOTHING | {"weight": float("inf")}]


def test_a_property_with_the_name_of_another_column_gets_a_prefix():
    one = JsonColumns((("error", pa.string()), ("name", pa.string())))
    assert list(SampleColumns(json=one).types()) == [
        "text", "json_error", "name", "finish_reason", "prompt_tokens", "generated_tokens", "error",
    ]  # fmt: skip
    both = JsonColumns((("text", pa.string()), ("json_text", pa.int64()), ("logprobs", pa.bool_())))
    names = both.types(("text", "logprobs"))
    assert names == {"json_json_text": pa.string(), "json_text": pa.int64(), "json_logprobs": pa.bool_()}


def test_samples_and_failed_rows():
    results = RowResult.to_batch(
        {
            0: RowResult(('{"age": 1}', '{"age": 2'), ("stop", "length"), 3, (4, 5)),
            1: RowResult((), (), 0, (), error="the prompt is empty"),
            2: RowResult(('{"age": 3}', '{"age": 4}'), ("stop", "stop"), 3, (4, 5)),
        }
    )
    rows = pa.record_batch({"prompt": ["a", "", "b"]})
    json_columns = JsonColumns((("age", pa.int64()),))

    def ages(columns):
        (array,) = [a for name, a in zip(columns.types(), columns.arrays(rows, results), strict=True) if name == "age"]
        assert array.type == columns.types()["age"]
        return array.to_pylist()

    assert ages(SampleColumns(json=json_columns)) == [1, None, 3]
    assert ages(SampleColumns(n=2, json=json_columns)) == [[1, None], [], [3, 4]]
