"""Compact facts about rows, in arrays by row index."""

from __future__ import annotations

from typing import Any

import numpy as np


class RowMap:
    """A number for every row in one span of row indices, 0 where none was put: an array that grows both ways.

    One thread may put while others get.
    """

    def __init__(self, dtype: type[Any]) -> None:
        self._span = (0, np.zeros(0, dtype))  # first row, values; replaced as one

    def put(self, rows: np.ndarray[Any, Any], values: np.ndarray[Any, Any] | int) -> None:
        """Set rows (int64 [n]) to values ([n] or one for all)."""
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
        """The values of rows first_row to first_row + count - 1, [count]."""
        first, held = self._span
        low, end = max(first_row, first), min(first_row + count, first + len(held))
        out = np.zeros(count, held.dtype)
        if low < end:
            out[low - first_row : end - first_row] = held[low - first : end - first]
        return out

    def __getitem__(self, row: int) -> int:
        first, held = self._span
        return int(held[row - first]) if first <= row < first + len(held) else 0

    def count(self, value: int) -> int:
        return int(np.count_nonzero(self._span[1] == value))

    def replace(self, old: int, new: int) -> None:
        held = self._span[1]
        held[held == old] = new

    def next_zero(self, row: int) -> int:
        """The first row from `row` on that has no value."""
        first, held = self._span
        if not first <= row < first + len(held):
            return row
        zeros = np.flatnonzero(held[row - first :] == 0)[:1]
        return row + int(zeros[0]) if len(zeros) else first + len(held)


class DoneRows:
    """Rows that need no more work, a byte a row: `row in done`, `len(done)`, `done.ok`, `done.failed`."""

    _OK, _FAILED = 1, 2

    def __init__(self) -> None:
        self._state = RowMap(np.uint8)

    def mark(self, rows: np.ndarray[Any, Any], failed: np.ndarray[Any, Any]) -> None:
        """Mark rows (int64 [n]) as done, and as failed where `failed` (bool [n]) is true; the last mark counts."""
        self._state.put(rows, np.where(failed, self._FAILED, self._OK).astype(np.uint8))

    def forget_failed(self) -> None:
        """Count failed rows as not done, so that they are run again."""
        self._state.replace(self._FAILED, 0)

    def next_unfinished(self, row: int) -> int:
        """The first row from `row` on that is not done."""
        return self._state.next_zero(row)

    def __contains__(self, row: int, /) -> bool:
        return bool(self._state[row] != 0)

    def __len__(self) -> int:
        return self.ok + self.failed

    @property
    def ok(self) -> int:
        return self._state.count(self._OK)

    @property
    def failed(self) -> int:
        return self._state.count(self._FAILED)
