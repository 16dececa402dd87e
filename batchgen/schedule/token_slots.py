"""Slots of an engine's tables, one for each sequence in flight. No tensors."""

from __future__ import annotations


class TokenSlots:
    """Slots of an engine's table, distinct for all sequences in flight, whichever call of the engine they belong to."""

    def __init__(self, most: int | None = None) -> None:
        """Have all slots free.

        Args:
            most: Slots that there are; None: as many as are asked for.
        """
        self._free: list[int] = []
        self._count = 0
        self._most = most

    @property
    def is_full(self) -> bool:
        return not self._free and self._count == self._most

    def take(self) -> int:
        if self._free:
            return self._free.pop()
        self._count += 1
        return self._count - 1

    def free(self, slot: int) -> None:
        self._free.append(slot)
