"""Lines of the input that are no rows: they are kept as rows that fail, with the fault and the line itself.

The texts travel in the metadata of the record batch that has their rows, so that memory does not grow with them.
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
    """A row without columns, in the place of a line that is none.

    Attributes:
        error: The line's number, its fault, and the line.
    """

    def __init__(self, error: str) -> None:
        super().__init__()
        self.error = error


def with_bad_lines(batch: pa.RecordBatch, errors: Mapping[int, str]) -> pa.RecordBatch:
    """A batch with the errors of some of its rows. errors: by the row's number in the input."""
    if not errors:
        return batch
    metadata = {**(batch.schema.metadata or {}), _KEY: json.dumps(errors).encode()}
    return batch.replace_schema_metadata(metadata)


def bad_lines(batch: pa.RecordBatch) -> dict[int, str]:
    """The errors that `with_bad_lines` was given; a slice of a batch has those of the whole batch."""
    text = (batch.schema.metadata or {}).get(_KEY)
    return {} if text is None else {int(row): error for row, error in json.loads(text).items()}
