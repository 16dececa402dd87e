"""Binary columns of Parquet and Arrow files that are used as text: their values are decoded from UTF-8."""

from __future__ import annotations

import functools
from typing import Any

import pyarrow as pa

from batchgen.core.errors import RowError
from batchgen.core.text import NotText


def is_binary(kind: pa.DataType) -> bool:
    """True where an Arrow type is binary (bytes)."""
    tests = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary, pa.types.is_binary_view)
    return any(test(kind) for test in tests)


@functools.lru_cache(maxsize=1024)
def has_binary(kind: pa.DataType) -> bool:
    """True where an Arrow type is binary, or contains a binary type at any depth."""
    if pa.types.is_dictionary(kind):
        return has_binary(kind.value_type)
    return is_binary(kind) or any(has_binary(kind.field(i).type) for i in range(kind.num_fields))


def checked_text(value: Any, column: str) -> Any:
    """A value with its bytes decoded from UTF-8. Raises RowError where they are not valid UTF-8.

    Args:
        value: A value of a column.
        column: Name of the column, for the error message.
    """
    if isinstance(value, NotText):
        raise RowError(f"column {column!r} has bytes that are not UTF-8 text")
    return value


def decoded(value: Any) -> Any:
    """A value with its bytes decoded from UTF-8 at any depth; bytes that are not valid UTF-8 become `NotText`."""
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return NotText(value)
    if isinstance(value, list | tuple):
        return [decoded(item) for item in value]
    if isinstance(value, dict):
        return {name: decoded(item) for name, item in value.items()}
    return value
