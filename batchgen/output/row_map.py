"""Compact numbers and flags for each row of an input, in memory that does not grow with rows that are all alike."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

# Rows of a chunk. Rows are done in about the order of the input, so few chunks at a time have rows of both kinds.
_CHUNK_ROWS = 1 << 16


class RowMap:
    """A map from row indices to small numbers, 0 by default.

    Rows are held in chunks of neighbours. A chunk whose rows all have the same number is held as that number, so a map
    of rows that get theirs in about the order of the input takes the same memory for any number of rows. One thread may
    call `put` while others read.
    """

    def __init__(self, dtype: type[Any]) -> None:
        self._dtype = np.dtype(dtype)
        # Numbers of a chunk's rows, by the chunk's number. Where all are equal, a view of one number that is repeated.
        self._chunks: dict[int, np.ndarray[Any, Any]] = {}

    @property
    def held_bytes(self) -> int:
        """Bytes of the numbers that are held."""
        return sum(chunk.nbytes for chunk in list(self._chunks.values()) if chunk.flags.writeable)

    def put(self, rows: np.ndarray[Any, Any], values: np.ndarray[Any, Any] | int) -> None:
        """Set the numbers of some rows.

        Args:
            rows: Row indices, int64 [n].
            values: The numbers [n], or one number for all rows.
        """
        values = np.broadcast_to(values, len(rows))
        for number, inside in _by_chunk(rows):
            chunk = self._chunks.get(number)
            if chunk is None:
                chunk = np.zeros(_CHUNK_ROWS, self._dtype)
            elif not chunk.flags.writeable:
                chunk = chunk.copy()
            chunk[rows[inside] - number * _CHUNK_ROWS] = values[inside]
            self._chunks[number] = _compact(chunk)

    def at(self, rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """The numbers of some rows, [n]. rows: Row indices in any order, int64 [n]."""
        out = np.zeros(len(rows), self._dtype)
        for number, inside in _by_chunk(rows):
            if (chunk := self._chunks.get(number)) is not None:
                out[inside] = chunk[rows[inside] - number * _CHUNK_ROWS]
        return out

    def __getitem__(self, row: int) -> int:
        number, offset = divmod(row, _CHUNK_ROWS)
        chunk = self._chunks.get(number)
        return 0 if chunk is None else int(chunk[offset])

    def count(self, value: int, last_of: int = 1) -> int:
        """Count the rows with a number that is not 0.

        Args:
            value: The number.
            last_of: Only every so many-th row index counts, the last of each group from 0.
        """
        chunks = list(self._chunks.items())
        firsts = ((last_of - 1 - number * _CHUNK_ROWS) % last_of for number, _ in chunks)
        counted = (chunk[first::last_of] == value for first, (_, chunk) in zip(firsts, chunks, strict=True))
        return sum(int(np.count_nonzero(equal)) for equal in counted)

    def replace(self, old: int, new: int) -> None:
        for number, chunk in self._chunks.items():
            self._chunks[number] = _compact(np.where(chunk == old, self._dtype.type(new), chunk))

    def next_zero(self, row: int) -> int:
        """The first row index, from `row` on, whose number is 0."""
        while (chunk := self._chunks.get(row // _CHUNK_ROWS)) is not None:
            offset = row % _CHUNK_ROWS
            zeros = np.flatnonzero(chunk[offset:] == 0)[:1]
            if len(zeros):
                return row + int(zeros[0])
            row += _CHUNK_ROWS - offset
        return row


def _by_chunk(rows: np.ndarray[Any, Any]) -> Iterator[tuple[int, np.ndarray[Any, Any]]]:
    """Yield the number of each chunk that has some of the rows, and the mask of these, bool [n]."""
    numbers = rows // _CHUNK_ROWS
    for number in np.unique(numbers).tolist():
        yield number, numbers == number


def _compact(chunk: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A chunk as it is held."""
    return np.broadcast_to(chunk[:1].copy(), _CHUNK_ROWS) if (chunk == chunk[0]).all() else chunk


class DoneRows:
    """The set of results that need no more work, in one byte per result where neighbours differ (`RowMap`).

    It supports `number in done` for the number of a result, which is `row * results_per_row + step`. `len(done)`,
    `done.ok` and `done.failed` count rows: all, those without and those with an error. The last result of a row counts,
    as it has the error of any earlier one.
    """

    _OK, _FAILED = 1, 2

    def __init__(self, results_per_row: int = 1) -> None:
        self.results_per_row = results_per_row
        self._state = RowMap(np.uint8)

    @property
    def num_results(self) -> int:
        """Number of results, of which a row may have several."""
        return self._state.count(self._OK) + self._state.count(self._FAILED)

    def mark(self, rows: np.ndarray[Any, Any], failed: np.ndarray[Any, Any]) -> None:
        """Mark rows as done. Where a row is marked several times, the last mark counts.

        Args:
            rows: Row indices, int64 [n].
            failed: True for each row that failed, bool [n].
        """
        self._state.put(rows, np.where(failed, self._FAILED, self._OK).astype(np.uint8))

    def forget_failed(self) -> None:
        """Mark all failed rows as not done, so that they run again."""
        self._state.replace(self._FAILED, 0)

    def next_unfinished(self, row: int) -> int:
        """The first row index, from `row` on, that is not done."""
        return self._state.next_zero(row)

    def __contains__(self, row: int, /) -> bool:
        return bool(self._state[row] != 0)

    def __len__(self) -> int:
        return self.ok + self.failed

    @property
    def ok(self) -> int:
        return self._state.count(self._OK, self.results_per_row)

    @property
    def failed(self) -> int:
        return self._state.count(self._FAILED, self.results_per_row)
