"""Seconds of a sweep by its number of tokens, learned from the sweeps that ran. No tensors."""

from __future__ import annotations

from collections.abc import Mapping

_KEPT = 0.97  # of what is known, after each sweep
_VARIED = 0.05  # standard deviation of tokens, over their mean, from which a line has a slope
_WAITED = 0.03  # part of a sweep from which compute counts as waiting


class _Line:
    """A straight line through points, of which the latest count most."""

    def __init__(self) -> None:
        self._sums = [0.0] * 5  # weights, x, y, x², x y

    def add(self, x: float, y: float) -> None:
        added = (1.0, x, y, x * x, x * y)
        self._sums = [_KEPT * total + value for total, value in zip(self._sums, added, strict=True)]

    def coefficients(self, flat: bool) -> tuple[float, float]:
        """(y at 0, slope), neither negative. flat: Whether points of one x have no slope, or go through the origin."""
        weights, x, y, xx, xy = self._sums
        if not weights:
            return 0.0, 0.0
        mean_x, mean_y = x / weights, y / weights
        variance = xx / weights - mean_x**2
        if variance < (_VARIED * mean_x) ** 2:
            return (mean_y, 0.0) if flat else (0.0, mean_y / max(1.0, mean_x))
        slope = max(0.0, (xy / weights - mean_x * mean_y) / variance)
        if mean_y < slope * mean_x:
            return 0.0, mean_y / mean_x
        return mean_y - slope * mean_x, slope


class SweepLine:
    """Seconds of a sweep by its number of tokens: those of computation, or of what it waits for if they are more.

    Where all sweeps had about as many tokens, computation counts as proportional to them: a draft then costs what a
    token costs on average.

    Attributes:
        is_known: Whether a sweep has been measured.
    """

    def __init__(self) -> None:
        self.is_known = False
        self._compute, self._moved = _Line(), _Line()

    def add(self, num_tokens: int, seconds: float, busy_s: Mapping[str, float], stalled_s: Mapping[str, float]) -> None:
        """Learn from a sweep.

        Args:
            num_tokens: Tokens that went through its layers.
            seconds: Wall time.
            busy_s: Seconds in which each lane was busy.
            stalled_s: Seconds in which compute stood still, by the lane it waited for.
        """
        waited = min(seconds, sum(stalled_s.values()))
        moved = max((busy for lane, busy in busy_s.items() if lane != "compute"), default=0.0)
        self.is_known = True
        self._compute.add(num_tokens, seconds - waited)
        self._moved.add(num_tokens, seconds if waited > _WAITED * seconds else min(seconds, moved))

    def seconds(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """Lines of computation and of what it waits for, each (seconds at 0 tokens, seconds for each token)."""
        return self._compute.coefficients(flat=False), self._moved.coefficients(flat=True)
