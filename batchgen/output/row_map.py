"""Compact numbers and flags for each row of an input, in arrays over row indices."""

from __future__ import annotations

from typing import Any

import numpy as np


class RowMap:
    """A growing array that maps each row index to a number, 0 by default.

    The array covers one span of row indices and grows at both ends. One thread may call `put` while others call `get`.
    """

    def __init__(self, dtype: type[Any]) -> None:
        self._span = (0, np.zeros(0, dtype))  # first row, values; replaced as one

    def put(self, rows: np.ndarray[Any, Any], values: np.ndarray[Any, Any] | int) -> None:
        """Set the numbers of some rows.

        Args:
            rows: Row indices, int64 [n].
            values: The numbers [n], or one number for all rows.
        """
        if not len(rows):
            return
        first, held = self._span
        low, end = int(rows.min()), int(rows.max()) + 1
        if not len(held):
            first = low
        old_end = first + len(held)
        if low < first or end > old_end:
            new_first, new_end = min(low, first), max(end, old_end)
            room = len(held) // 2  # on the side that grows, where more is likely to come
            if low < first:
                new_first = max(0, min(new_first, first - room))
            if end > old_end:
                new_end = max(new_end, old_end + room)
            grown = np.zeros(new_end - new_first, held.dtype)
            grown[first - new_first : old_end - new_first] = held
            first, held = new_first, grown
        held[rows - first] = values
        self._span = (first, held)

    def get(self, first_row: int, count: int) -> np.ndarray[Any, Any]:
        """The numbers of consecutive rows, [count].

        Args:
            first_row: Index of the first row.
            count: Number of rows.
        """
        first, held = self._span
        low, end = max(first_row, first), min(first_row + count, first + len(held))
        out = np.zeros(count, held.dtype)
        if low < end:
            out[low - first_row : end - first_row] = held[low - first : end - first]
        return out

    def at(self, rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """The numbers of some rows, [n]. rows: Row indices in any order, int64 [n]."""
        first, held = self._span
        places = rows - first
        inside = (places >= 0) & (places < len(held))
        out = np.zeros(len(rows), held.dtype)
        out[inside] = held[places[inside]]
        return out

    def __getitem__(self, row: int) -> int:
        first, held = self._span
        return int(held[row - first]) if first <= row < first + len(held) else 0

    def count(self, value: int, last_of: int = 1) -> int:
        """Count the rows with a number.

        Args:
            value: The number.
            last_of: Only every so many-th row index counts, the last of each group from 0.
        """
        first, held = self._span
        return int(np.count_nonzero(held[(last_of - 1 - first) % last_of :: last_of] == value))

    def replace(self, old: int, new: int) -> None:
        held = self._span[1]
        held[held == old] = new

    def next_zero(self, row: int) -> int:
        """The first row index, from `row` on, whose number is 0."""
        first, held = self._span
        if not first <= row < first + len(held):
            return row
        zeros = np.flatnonzero(held[row - first :] == 0)[:1]
        return row + int(zeros[0]) if len(zeros) else first + len(held)


class DoneRows:
    """The set of results that need no more work, in one byte per result.

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
