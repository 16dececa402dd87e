"""Invalid lines of an input, which become rows that fail; the row's error has the fault and the line.

The errors are stored in the metadata of the record batch that has their rows, so memory does not grow with their
number.
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
    if not errors:
        return batch
    metadata = {**(batch.schema.metadata or {}), _KEY: json.dumps(errors).encode()}
    return batch.replace_schema_metadata(metadata)


def bad_lines(batch: pa.RecordBatch) -> dict[int, str]:
    """The errors of invalid lines by the row's index in the input, from a batch's metadata.

    A slice of a batch has the errors of the whole batch.
    """
    text = (batch.schema.metadata or {}).get(_KEY)
    return {} if text is None else {int(row): error for row, error in json.loads(text).items()}
