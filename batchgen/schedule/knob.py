"""A number that a running job turns up and down to see what helps. No tensors.

A turn that helped is followed by one twice as large. A turn that did not help is taken back; the next one is half as
large, and comes after a pause if it is in the same direction. Pauses grow with each failure. A turn in the other
direction counts as a failure of the one before, so a knob does not go up and down between the same two numbers.
"""

from __future__ import annotations

from typing import Literal

Direction = Literal["up", "down"]

# The first turn, the smallest and the largest one, as parts of the whole range.
_FIRST_STEP, _SMALLEST_STEP, _LARGEST_STEP = 1 / 8, 1 / 64, 1 / 2
# Windows of sweeps from a failure to the next turn in its direction: first and at most.
_FIRST_PAUSE, _LONGEST_PAUSE = 16, 256


class Knob:
    """The turns of one knob so far, and when and how far it may be turned again."""

    def __init__(self, turned: Direction | None = None) -> None:
        """Start at the plan. turned: the direction in which the plan has turned the knob already; None: in neither."""
        self._step = _FIRST_STEP
        self._last: Direction | None = turned
        self._pauses: dict[Direction, int] = {"up": _FIRST_PAUSE, "down": _FIRST_PAUSE}
        self._not_before: dict[Direction, int] = {"up": 0, "down": 0}

    def may_turn(self, direction: Direction, window: int) -> bool:
        """Tell whether the knob may be turned in a direction at the end of a window of this number."""
        return window >= self._not_before[direction]

    def turn(self, direction: Direction, window: int) -> None:
        """Note that the knob is turned by `next_step`."""
        if self._last == direction:
            self._step = self.next_step(direction)
            self._pauses[direction] = _FIRST_PAUSE
        elif self._last is not None:
            self._fail(self._last, window)
        self._last = direction

    def next_step(self, direction: Direction) -> float:
        """The part of the whole range by which the knob may be turned in a direction."""
        return min(2 * self._step, _LARGEST_STEP) if self._last == direction else self._step

    def take_back(self, window: int) -> None:
        """Note that the last turn did not help and is taken back."""
        assert self._last is not None, "the knob has not been turned"
        self._fail(self._last, window)
        self._last = None

    def _fail(self, direction: Direction, window: int) -> None:
        self._not_before[direction] = window + self._pauses[direction]
        self._pauses[direction] = min(2 * self._pauses[direction], _LONGEST_PAUSE)
        self._step = max(self._step / 2, _SMALLEST_STEP)
