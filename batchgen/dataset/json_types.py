"""Inference of one Arrow type per column from JSON rows without a schema."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import Any

import pyarrow as pa

from batchgen.core.errors import InputError

MAX_DEPTH = 50  # of nested types; deeper values become text
_MAX_FIELDS = 2000  # an object with more different keys than this is a map, not a record


class _Kind(Enum):
    """The type of a JSON scalar. FLOAT can hold every INT without loss, but not every LONG."""

    BOOL, INT, LONG, FLOAT, STRING, MIXED = range(6)  # MIXED: no single Arrow type holds the values


_SCALARS = {
    _Kind.BOOL: pa.bool_(),
    _Kind.INT: pa.int64(),
    _Kind.LONG: pa.int64(),
    _Kind.FLOAT: pa.float64(),
    _Kind.STRING: pa.string(),
    _Kind.MIXED: None,
}


def infer_schema(rows: Iterable[dict[str, Any]], name: str) -> tuple[pa.Schema, int]:
    """Infer a schema that fits all rows, and count the rows. A column with values of mixed types becomes text.

    Args:
        rows: Rows as {column: value}.
        name: Name of the input, for error messages.

    Returns:
        The schema, and the number of rows.
    """
    kinds: Any = {}
    total = 0
    for row in rows:
        kinds = _widen(kinds, row)
        if kinds is _Kind.MIXED:
            raise InputError(f"the rows of {name} have more than {_MAX_FIELDS} different keys: nest or rename them")
        total += 1
    types = {column: _arrow_type(kind) for column, kind in kinds.items()}
    return pa.schema([(c, pa.string() if t is None else t) for c, t in types.items()]), total


def _widen(kind: Any, value: Any, depth: int = 0) -> Any:
    """The narrowest kind that holds `value` and all values of `kind`.

    Args:
        kind: None (only nulls so far), a `_Kind`, another Arrow type, [kind] for lists, or {key: kind} for objects.
            Kinds of lists and objects are changed in place.
        value: A JSON value.
        depth: Depth of the value in nested lists and objects.
    """
    if value is None or kind is _Kind.MIXED:
        return kind
    if depth > MAX_DEPTH:
        return _Kind.MIXED
    if isinstance(value, dict):
        kind = {} if kind is None else kind
        if not isinstance(kind, dict):
            return _Kind.MIXED
        for key, item in value.items():
            kind[key] = _widen(kind.get(key), item, depth + 1)
        return kind if len(kind) <= _MAX_FIELDS else _Kind.MIXED
    if isinstance(value, list):
        kind = [None] if kind is None else kind
        if not isinstance(kind, list):
            return _Kind.MIXED
        for item in value:
            kind[0] = _widen(kind[0], item, depth + 1)
        return kind
    new = _scalar_kind(value)
    if kind is None or kind == new:
        return new
    for wide, narrow in ((_Kind.LONG, _Kind.INT), (_Kind.FLOAT, _Kind.INT)):
        if (kind, new) in ((wide, narrow), (narrow, wide)):
            return wide
    return _Kind.MIXED


def _scalar_kind(value: Any) -> Any:
    if isinstance(value, str):
        return _Kind.STRING
    if isinstance(value, bool):
        return _Kind.BOOL
    if isinstance(value, int):
        if abs(value) <= 2**53:
            return _Kind.INT
        return _Kind.LONG if -(2**63) <= value < 2**63 else _Kind.MIXED
    if isinstance(value, float):
        return _Kind.FLOAT
    try:  # dates, bytes, numpy arrays: never in JSON, but a `datasets` generator may yield them
        return pa.infer_type([value])
    except (pa.ArrowException, TypeError, ValueError):
        return _Kind.MIXED


def _arrow_type(kind: Any) -> pa.DataType | None:
    """The Arrow type of a kind; None where it contains mixed values, or an object without keys (Parquet has none)."""
    if kind is None:
        return pa.null()
    if isinstance(kind, list):
        item = _arrow_type(kind[0])
        return None if item is None else pa.list_(item)
    if isinstance(kind, dict):
        fields = {key: _arrow_type(item) for key, item in kind.items()}
        return None if not fields or None in fields.values() else pa.struct(list(fields.items()))
    return _SCALARS[kind] if isinstance(kind, _Kind) else kind
