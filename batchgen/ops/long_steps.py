"""The operations of a GPU's Step that launches as many as its data need, and waits where too many are under way.

A stream holds about a thousand operations, and a launch into a full one blocks: perhaps what the stream waits for then
never comes. Kernels take a few launches a layer. Where torch computes in their place, it does so part by part, and
notes the operations of each part.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

# Operations after which a Step may wait for those before them, and the most that are noted at once.
_FEW, MOST_AT_ONCE = 64, 128
_of_thread = threading.local()


class LongStep:
    """Operations that one Step notes while it is launched."""

    def __init__(self, record: Callable[[], Any], synchronize: Callable[[Any], None]) -> None:
        """Begin a Step that has noted nothing yet.

        Args:
            record: Function that returns an event after all work that was launched on the Step's stream so far.
            synchronize: Function that waits for such an event, while other threads run.
        """
        self._record, self._synchronize = record, synchronize
        self._total = self._latest = 0
        self._earlier: Any = None

    def note(self, operations: int) -> None:
        """Note at most so many operations that were just launched; wait until few of the Step are under way."""
        assert operations <= MOST_AT_ONCE
        self._total += operations
        self._latest += operations
        if self._latest >= _FEW:
            event = self._record()
            if self._earlier is not None:
                self._synchronize(self._earlier)
            self._earlier, self._latest = event, 0

    @property
    def most_queued(self) -> int:
        """The most operations of those noted that may be in the stream's queue at once."""
        return min(self._total, 2 * (_FEW + MOST_AT_ONCE))


@contextlib.contextmanager
def noted_in(step: LongStep | None) -> Iterator[None]:
    """Within a `with` block, note this thread's operations in a Step; None: note none."""
    before = getattr(_of_thread, "step", None)
    _of_thread.step = step
    try:
        yield
    finally:
        _of_thread.step = before


def note(operations: int) -> None:
    """Note at most so many operations that this thread has just launched on a GPU. Without a Step, nothing is noted."""
    if (step := getattr(_of_thread, "step", None)) is not None:
        step.note(operations)
