"""`Dataset`: the rows of one input that a job runs, after `limit` and `shard`."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import pyarrow as pa

from batchgen.core.errors import InputError
from batchgen.dataset.identity import describe_files
from batchgen.dataset.source import Source


class Dataset:
    """The rows of one input that a job runs. `open_dataset` makes it.

    Row indices count from 0 over the whole input, also where `limit` or `shard` leaves rows out. The rows can be read
    any number of times.
    """

    def __init__(self, source: Source, limit: int | None, shard: tuple[int, int] | None) -> None:
        self._source, self._limit, self._shard = source, limit, shard
        self._total = source.total_rows  # rows after `limit`; None until counted
        if self._total is not None and limit is not None:
            self._total = min(self._total, limit)

    @property
    def format(self) -> str:
        """The input format: one of `FORMATS`, or "table"."""
        return self._source.format

    @property
    def notices(self) -> tuple[str, ...]:
        """Messages for the user about the way in which the input was read."""
        return self._source.notices

    @property
    def schema(self) -> pa.Schema:
        """The schema of all input columns."""
        return self._source.schema

    @property
    def duplicate_rows(self) -> frozenset[int]:
        """Indices of rows in OpenAI batch files whose custom_id an earlier row has; empty for other formats."""
        return self._source.duplicates

    @property
    def is_stream(self) -> bool:
        """True where rows come from elsewhere as they are read, and may have no end."""
        return self._source.is_stream

    @property
    def num_rows(self) -> int | None:
        """The number of rows after limit and shard; None where the input must be read to know it."""
        begin, stop = self._bounds()
        return None if self._total is None or stop is None else stop - begin

    def count_rows(self) -> int:
        """The number of rows after limit and shard; reads the whole input where that is needed."""
        if self._total is None:
            counts = (batch.num_rows for _, batch in self._clipped(0, self._limit, 1024, self.schema.names[:1]))
            self._total = sum(counts)
        num_rows = self.num_rows
        assert num_rows is not None  # they are counted
        return num_rows

    def batches(
        self, start_row: int = 0, batch_rows: int = 1024, columns: Collection[str] | None = None
    ) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Yield batches of rows in input order, each with the index of its first row.

        Args:
            start_row: Index of the first row to yield.
            batch_rows: The most rows of a batch. Batches may be smaller.
            columns: Names of the columns to read; names that the schema lacks are ignored. None: all columns. Where no
                column remains, the first column of the schema is read.

        Yields:
            Pairs (index of the first row, Arrow batch).

        Raises:
            InputError: A file is corrupt, or has changed since `identity` was called.
        """
        names = [name for name in self.schema.names if columns is None or name in columns] or self.schema.names[:1]
        if self._shard is not None:
            self.count_rows()
        begin, stop = self._bounds()
        return self._clipped(max(begin, start_row), stop, batch_rows, names)

    def identity(self) -> dict[str, Any]:
        """The JSON values that identify the input: names, sizes, hashes and columns of its files.

        All content of the files is hashed. Absolute paths and time stamps are left out, so that a copy has the same
        identity. Limit and shard are left out too, since they belong to the job.
        """
        columns = {field.name: str(field.type) for field in self.schema}
        return {"format": self.format, "columns": columns, **self._source.identity()}

    def check(self) -> None:
        """Raise InputError where a file of the input has changed since `identity` was called."""
        self._source.check()

    @property
    def may_grow(self) -> bool:
        """True where a later job's input may be these rows followed by more."""
        return self._shard is None and (self._limit is not None or self._source.begins_with is not None)

    def begins_with(self, was: dict[str, Any]) -> bool:
        """True where this input starts with all rows of an earlier input; its columns may differ.

        Args:
            was: The `identity` of the earlier input.
        """
        now = self.identity()
        if {**now, "columns": None} == {**was, "columns": None}:
            return True
        begins_with = self._source.begins_with
        return was["format"] == self.format and begins_with is not None and begins_with(now, was)

    def describe_files(self, was: dict[str, Any]) -> str:
        """The text on how the files of this input differ from those of an earlier input.

        Args:
            was: The `identity` of the earlier input.
        """
        return describe_files(was["files"], self.identity()["files"], self._source.begins_alike)

    def _bounds(self) -> tuple[int, int | None]:
        """The index of the first row, and the index after the last row, which is None for the end of the input."""
        if self._total is None:
            return 0, self._limit
        index, shards = self._shard or (0, 1)
        return index * self._total // shards, (index + 1) * self._total // shards

    def _clipped(
        self, begin: int, stop: int | None, batch_rows: int, columns: list[str]
    ) -> Iterator[tuple[int, pa.RecordBatch]]:
        if stop is not None and begin >= stop:
            return
        for first, batch in self._source.read(begin, batch_rows, columns):
            end = batch.num_rows if stop is None else min(batch.num_rows, stop - first)
            for offset in range(max(begin - first, 0), end, batch_rows):
                yield first + offset, batch.slice(offset, min(batch_rows, end - offset))
            if stop is not None and first + batch.num_rows >= stop:
                return
        if self._total is not None:
            raise InputError(f"the input ended before row {stop}: it changed while it was read, so start again")
