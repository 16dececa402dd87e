"""Invalid lines of an input, which become rows that fail; the row's error has the fault and the line.

The errors are stored in the metadata of the record batch that has their rows, so memory does not grow with their
number. Where a job's rows are copied into a Parquet file for another job, its schema has them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

# What becomes of such lines: the job is refused, or goes on without them.
ON_BAD_LINE = ("fail", "skip")
_KEY = b"batchgen.bad_lines"


class BadLine(dict[str, Any]):
    """A placeholder for the row of an invalid line; it has no columns.

    Attributes:
        error: A text with the line's number, its fault, and the line itself.
    """

    def __init__(self, error: str) -> None:
        super().__init__()
        self.error = error


def with_bad_lines(batch: pa.RecordBatch, errors: Mapping[int, str]) -> pa.RecordBatch:
    """Add the errors of invalid lines to a batch's metadata.

    Args:
        batch: The rows, with a row for each invalid line.
        errors: Errors by the row's index in the input.
    """
    return batch.replace_schema_metadata(schema_with_bad_lines(batch.schema, errors).metadata) if errors else batch


def schema_with_bad_lines(schema: pa.Schema, errors: Mapping[int, str]) -> pa.Schema:
    """A schema whose metadata has the errors of invalid lines, as a Parquet file keeps it with its rows.

    Args:
        schema: The columns.
        errors: Errors by the row's index.
    """
    if not errors:
        return schema
    return schema.with_metadata({**(schema.metadata or {}), _KEY: json.dumps(errors).encode()})


def bad_lines(batch: pa.RecordBatch) -> dict[int, str]:
    """The errors of invalid lines by the row's index in the input, from a batch's metadata.

    A slice of a batch has the errors of the whole batch.
    """
    return bad_lines_of_schema(batch.schema)


def bad_lines_of_schema(schema: pa.Schema) -> dict[int, str]:
    """The errors of invalid lines by the row's index, from a schema's metadata."""
    text = (schema.metadata or {}).get(_KEY)
    return {} if text is None else {int(row): error for row, error in json.loads(text).items()}
