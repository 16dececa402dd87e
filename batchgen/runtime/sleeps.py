"""Sleeps that last as long as they were asked to, on average."""

from __future__ import annotations

import time

# Sleeps last longer than they were asked to, some 0.1 ms. As much of that, at most, the next one is shorter by.
_MOST_LATE_S = 0.3e-3


class Sleeps:
    """The sleeps of one lane, or of one link, each shorter by what the one before lasted too long."""

    def __init__(self) -> None:
        self._late_s = 0.0

    def until(self, end_s: float) -> None:
        """Return at a time of time.perf_counter, or at once where it is over."""
        end_s -= self._late_s
        if (left_s := end_s - time.perf_counter()) > 0:
            time.sleep(left_s)
            self._late_s = min(_MOST_LATE_S, max(0.0, time.perf_counter() - end_s))
        else:
            self._late_s = 0.0
