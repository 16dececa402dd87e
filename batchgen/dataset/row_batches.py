"""Rows as Python values into Arrow batches of a known schema."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa

from batchgen.core.errors import InputError, one_line
from batchgen.dataset.bad_lines import BadLine, with_bad_lines
from batchgen.dataset.source import ReadRows


def row_reader(
    rows_from: Callable[[int], Iterator[dict[str, Any]]], schema: pa.Schema, total_rows: int, name: str
) -> ReadRows:
    """A `Source.read` over rows as dicts; keys that a row does not have are null, and all of a `BadLine`.

    It stops after `total_rows`: the rows beyond may be anything, they were not seen by the first pass.
    """

    def read(start_row: int, batch_rows: int) -> Iterator[tuple[int, pa.RecordBatch]]:
        rows = itertools.islice(rows_from(start_row), total_rows - start_row)
        while chunk := list(itertools.islice(rows, batch_rows)):
            columns = ([row.get(field.name) for row in chunk] for field in schema)
            try:
                arrays = [_to_array(v, t) for v, t in zip(columns, schema.types, strict=True)]
            except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
                reason = one_line(error)
                raise InputError(f"{name} changed while it was being read ({reason}): start again") from error
            errors = {start_row + i: row.error for i, row in enumerate(chunk) if isinstance(row, BadLine)}
            yield start_row, with_bad_lines(pa.RecordBatch.from_arrays(arrays, schema=schema), errors)
            start_row += len(chunk)

    return read


def _to_array(values: list[Any], column_type: pa.DataType) -> pa.Array:
    if column_type == pa.string():  # strings as they are, anything else that shares their column as JSON
        values = [v if v is None or isinstance(v, str) else to_json(v) for v in values]
    return pa.array(values, column_type)


def to_json(value: Any) -> str:
    """Any value as JSON text; what JSON does not have as `str` shows it."""
    return json.dumps(value, ensure_ascii=False, default=str)
