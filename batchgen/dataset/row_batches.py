"""Conversion of rows that are Python dicts to Arrow batches of a known schema."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa

from batchgen.core.errors import InputError, one_line
from batchgen.dataset.bad_lines import BadLine, with_bad_lines
from batchgen.dataset.json_types import MAX_DEPTH
from batchgen.dataset.source import BATCH_BYTES, ReadRows, schema_of

# About what a value of Python's takes beside the characters or items that it has.
_VALUE_BYTES = 8


def row_reader(
    rows_from: Callable[[int], Iterator[tuple[str, dict[str, Any]]]],
    schema: pa.Schema,
    total_rows: int,
    check: Callable[[str], None] = lambda path: None,
) -> ReadRows:
    """Make a `Source.read` function for rows that are dicts.

    Missing keys become null; a `BadLine` becomes a row of nulls. Rows after `total_rows` are not read, since the check
    of the input has not seen them.

    Args:
        rows_from: The function that yields (file, row) from a given row index on.
        schema: The columns.
        total_rows: Number of rows.
        check: The function that is called with a file's path after rows of the file were read and before they are
            yielded.
    """

    def read(start_row: int, batch_rows: int, columns: list[str]) -> Iterator[tuple[int, pa.RecordBatch]]:
        wanted = schema_of(schema, columns)
        rows = itertools.islice(rows_from(start_row), total_rows - start_row)
        while chunk := list(_chunk(rows, batch_rows, wanted.names)):
            for path in dict.fromkeys(path for path, _, _ in chunk):
                check(path)
            values = zip(*(row for _, row, _ in chunk), strict=True)
            try:
                arrays = [_to_array(list(v), t) for v, t in zip(values, wanted.types, strict=True)]
            except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
                reason = one_line(error)
                raise InputError(f"{chunk[0][0]} changed while it was being read ({reason}): start again") from error
            errors = {start_row + i: error for i, (_, _, error) in enumerate(chunk) if error is not None}
            yield start_row, with_bad_lines(pa.RecordBatch.from_arrays(arrays, schema=wanted), errors)
            start_row += len(chunk)

    return read


def _chunk(
    rows: Iterator[tuple[str, dict[str, Any]]], batch_rows: int, names: list[str]
) -> Iterator[tuple[str, list[Any], str | None]]:
    """Yield (file, values of the wanted columns, error of an invalid line or None) for the rows of one batch."""
    size_bytes = 0
    for path, row in itertools.islice(rows, batch_rows):
        values = [row.get(name) for name in names]
        yield path, values, row.error if isinstance(row, BadLine) else None
        size_bytes += sum(len(value) if type(value) is str else _size_bytes(value) for value in values)
        if size_bytes >= BATCH_BYTES:
            return


def _size_bytes(value: Any, depth: int = 0) -> int:
    """An estimate of the bytes that a value takes."""
    if isinstance(value, str | bytes):
        return _VALUE_BYTES + len(value)
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple) and depth < MAX_DEPTH:
        return _VALUE_BYTES + sum(_size_bytes(item, depth + 1) for item in value)
    return _VALUE_BYTES


def _to_array(values: list[Any], column_type: pa.DataType) -> pa.Array:
    if column_type == pa.string():  # strings as they are, anything else that shares their column as JSON
        values = [v if v is None or isinstance(v, str) else to_json(v) for v in values]
    return pa.array(values, column_type)


def to_json(value: Any) -> str:
    """A value as JSON text; objects that JSON cannot hold become the text of `str`."""
    return json.dumps(value, ensure_ascii=False, default=str)
