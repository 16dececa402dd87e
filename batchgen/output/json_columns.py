"""Columns of the properties of answers that are JSON objects."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from batchgen.core.text import repair_surrogates

_LEAST_INT64, _MOST_INT64 = -(2**63), 2**63 - 1
_PREFIX = "json_"


@dataclass(frozen=True)
class JsonColumns:
    """The columns of a job whose answers are JSON objects, one for each property.

    Attributes:
        properties: Name and Arrow type of each property.
    """

    properties: tuple[tuple[str, pa.DataType], ...]

    def types(self, taken: Collection[str]) -> dict[str, pa.DataType]:
        """The Arrow type of each column. A property with a name of another column has "json_" before its name.

        Args:
            taken: Names of the job's other columns.
        """
        types: dict[str, pa.DataType] = {}
        others = {name for name, _ in self.properties}
        for name, kind in self.properties:
            column = name
            while column in taken or (column != name and column in others):
                column = _PREFIX + column
            types[column] = kind
        return types

    def arrays(self, texts: pa.Array) -> list[pa.Array]:
        """The values of the columns: null where a text is no complete JSON object, or lacks the property.

        Args:
            texts: The answers, null for failed rows; or a list of answers for each row, whose columns are lists too.
        """
        if pa.types.is_list(texts.type):
            lengths = [len(of_row or ()) for of_row in texts.to_pylist()]
            ends = pa.array(np.cumsum([0, *lengths]), pa.int32())
            return [pa.ListArray.from_arrays(ends, values) for values in self.arrays(texts.flatten())]
        objects = [_object(text) for text in texts.to_pylist()]
        return [_array([_fit(each.get(name), kind) for each in objects], kind) for name, kind in self.properties]


def _object(text: str | None) -> dict[str, Any]:
    """The object that a text is, without properties where the text is none."""
    try:
        value = json.loads(text or "")
    except (ValueError, RecursionError):  # it was cut at max_tokens, or by a stop string
        return {}
    return value if isinstance(value, dict) else {}


def _fit(value: Any, kind: pa.DataType) -> Any:
    """A JSON value as a type holds it; None where the type holds no such value.

    A type of texts holds texts as they are, and all other values as JSON.
    """
    if value is None:
        return None
    if pa.types.is_string(kind):
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if pa.types.is_struct(kind):
        return {f.name: _fit(value.get(f.name), f.type) for f in kind} if isinstance(value, dict) else None
    if pa.types.is_list(kind):
        return [_fit(item, kind.value_type) for item in value] if isinstance(value, list) else None
    if pa.types.is_boolean(kind):
        return value if isinstance(value, bool) else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return _number(value, whole=pa.types.is_integer(kind))


def _number(value: int | float, *, whole: bool) -> int | float | None:
    """A number of 64 bits; None where it has more, or is to be whole and is not."""
    try:
        if not whole:
            return float(value)
        number = int(value)
    except (OverflowError, ValueError):  # infinity, NaN and what is beyond them
        return None
    return number if number == value and _LEAST_INT64 <= number <= _MOST_INT64 else None


def _array(values: list[Any], kind: pa.DataType) -> pa.Array:
    try:
        return pa.array(values, kind)
    except UnicodeEncodeError:  # a lone surrogate, as JSON's "\ud800" gives, has no UTF-8 form
        return pa.array(repair_surrogates(values), kind)
