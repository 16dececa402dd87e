"""Rows of files between the jobs of one output: those that each job gets, and their merging in the input's order.

Files are streamed in the order of their rows. Memory holds a few batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from batchgen.core.atomic_file import written_atomically
from batchgen.dataset import Dataset
from batchgen.dataset.bad_lines import bad_lines, schema_with_bad_lines
from batchgen.dataset.row_numbers import schema_with_row_numbers, with_row_numbers
from batchgen.output.formats import FORMATS

Rows = npt.NDArray[np.int64]
_BATCH_ROWS = 4096


@dataclass(frozen=True)
class Part:
    """The results of a job that had some rows of the input.

    Attributes:
        rows: Numbers of the rows in the input, ascending.
        path: The Parquet file with the rows and their results, in this order.
    """

    rows: Rows
    path: Path


@dataclass(frozen=True)
class Merged:
    """Some rows in a row of the input, and the results of jobs that had some of them.

    Attributes:
        rows: The rows.
        at: Places of the rows with results, ascending.
        results: These rows with their results, in the same order; None: there are none.
    """

    rows: pa.Table
    at: Rows
    results: pa.Table | None


def tables(path: Path) -> Iterator[tuple[int, pa.Table]]:
    """Yield the rows of a Parquet file in order: the number of the first one, and a table of some."""
    first = 0
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(_BATCH_ROWS):
            yield first, pa.Table.from_batches([batch])
            first += batch.num_rows


def rows_at(path: Path, rows: Rows) -> Iterator[pa.Table]:
    """Yield tables with some rows of a Parquet file. rows: their numbers, ascending."""
    return rows_among(tables(path), rows)


def rows_among(numbered: Iterable[tuple[int, pa.Table]], rows: Rows) -> Iterator[pa.Table]:
    """Yield tables with some rows of others.

    Args:
        numbered: The other tables in order, each with the number of its first row.
        rows: Numbers of the rows, ascending.
    """
    for first, table in numbered:
        low, high = np.searchsorted(rows, [first, first + len(table)])
        if low < high:
            yield table.take(pa.array(rows[low:high] - first))


def bad_rows(dataset: Dataset) -> dict[int, str]:
    """The errors of an input's invalid lines, by the number of the line's row; the first row has the number 0."""
    errors: dict[int, str] = {}
    count = 0
    for first, batch in dataset.batches(0, _BATCH_ROWS):
        here = range(first, first + batch.num_rows)
        errors |= {row - first + count: error for row, error in bad_lines(batch).items() if row in here}
        count += batch.num_rows
    return errors


def errors_among(errors: Mapping[int, str], rows: Rows) -> dict[int, str]:
    """The errors of some rows, by their places among these. rows: their numbers, ascending."""
    places = {number: int(np.searchsorted(rows, number)) for number in errors}
    return {at: errors[number] for number, at in places.items() if at < len(rows) and rows[at] == number}


def first_row(dataset: Dataset) -> int:
    """The number of the first row of a dataset in the whole input: 0, but for a later part of `--shard`."""
    return next((first for first, _ in dataset.batches(0, 1)), 0)


def write_rows(
    target: Path, schema: pa.Schema, taken: Iterable[pa.Table], numbers: Rows, errors: Mapping[int, str]
) -> None:
    """Write some rows of an input into a Parquet file, atomically.

    Args:
        target: The file.
        schema: The columns to write.
        taken: Tables with the rows, which may have more columns.
        numbers: Numbers of the rows in the whole input.
        errors: The errors of invalid lines of the input, by the place of the line's row in the file.
    """
    schema = schema_with_bad_lines(schema, errors)

    def batches() -> Iterator[pa.RecordBatch]:
        written = 0
        for table in taken:
            for batch in table.select(schema.names).cast(schema).combine_chunks().to_batches():
                yield with_row_numbers(batch, numbers[written : written + batch.num_rows])
                written += batch.num_rows

    with written_atomically(target) as file:
        FORMATS[".parquet"](file, schema_with_row_numbers(schema), batches())


class _Reader:
    """A Parquet file that is read from its first row to its last."""

    def __init__(self, path: Path) -> None:
        self._tables = (table for _, table in tables(path))
        self._held: pa.Table | None = None

    def take(self, count: int) -> pa.Table:
        """The next rows."""
        taken = []
        while count > 0:
            table = self._held if self._held is not None and len(self._held) else next(self._tables)
            taken.append(table.slice(0, count))
            self._held = table.slice(count)
            count -= len(taken[-1])
        return pa.concat_tables(taken)


def merged(base: Iterable[tuple[int, pa.Table]], parts: Sequence[Part]) -> Iterator[Merged]:
    """Yield the rows of an input in order, with the results of jobs that had some of them.

    Args:
        base: All rows: (number of the first one, table of some), in order.
        parts: The results, each row in at most one of them.
    """
    readers = [(part.rows, _Reader(part.path)) for part in parts]
    for first, table in base:
        places: list[Rows] = []
        taken: list[pa.Table] = []
        for rows, reader in readers:
            low, high = np.searchsorted(rows, [first, first + len(table)])
            if low < high:
                places.append(rows[low:high] - first)
                taken.append(reader.take(int(high - low)))
        if not places:
            yield Merged(table, np.empty(0, np.int64), None)
            continue
        at = np.concatenate(places)
        order = np.argsort(at, kind="stable")
        results = pa.concat_tables(taken, promote_options="permissive").take(pa.array(order))
        yield Merged(table, at[order], results)


def column(table: pa.Table, name: str, kind: pa.DataType) -> pa.Array:
    """A column of a table as one array of a type, of nulls where the table has no such column."""
    if name not in table.schema.names:
        return pa.nulls(len(table), kind)
    chunks = table.column(name).cast(kind).chunks
    return pa.concat_arrays(chunks) if chunks else pa.nulls(0, kind)
