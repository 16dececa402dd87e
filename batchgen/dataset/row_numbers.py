"""Numbers of rows in an input of which a job has some, in a file of their own.

Random draws are keyed by a row's number, so a row is answered alike whichever rows are in its file.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

_COLUMN = pa.field("batchgen.row", pa.int64(), nullable=False)
ROW_NUMBERS = _COLUMN.name


def with_row_numbers(batch: pa.RecordBatch, numbers: npt.NDArray[np.int64]) -> pa.RecordBatch:
    """Add a column with the rows' numbers in another input, which prompts do not see."""
    columns = [*batch.columns, pa.array(numbers, _COLUMN.type)]
    return pa.RecordBatch.from_arrays(columns, schema=schema_with_row_numbers(batch.schema))


def schema_with_row_numbers(schema: pa.Schema) -> pa.Schema:
    return schema.append(_COLUMN)


def without_row_numbers(schema: pa.Schema) -> pa.Schema:
    """The schema of the columns that prompts may be made of."""
    return schema.remove(schema.get_field_index(ROW_NUMBERS)) if _has_row_numbers(schema) else schema


def row_numbers(batch: pa.RecordBatch, first_row: int) -> Sequence[int]:
    """The number of each row of a batch in the input that it was copied from, or in its own.

    Args:
        batch: The rows.
        first_row: Index of the batch's first row in its own input.
    """
    if _has_row_numbers(batch.schema):
        numbers: list[int] = batch.column(ROW_NUMBERS).to_pylist()
        return numbers
    return range(first_row, first_row + batch.num_rows)


def _has_row_numbers(schema: pa.Schema) -> bool:
    return any(field.name == ROW_NUMBERS and field.equals(_COLUMN) for field in schema)
