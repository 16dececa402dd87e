"""Seconds of a sweep by its tokens and its rows of logits, learned from the sweeps that ran. No tensors."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations

import numpy as np

_KEPT = 0.97  # of what is known, after each sweep
_WAITED = 0.03  # part of a sweep from which compute counts as waiting
_DOUBT = 0.01  # weight of the thought that nothing of a sweep is the same for any number of tokens
_FITTED_EVERY = 4  # sweeps
# Which of the seconds of each sweep, of each token and of each row of logits are above zero.
_POSITIVE = [list(chosen) for size in (3, 2, 1) for chosen in combinations(range(3), size)]


class SweepFit:
    """Seconds of a sweep: those of computation, or of what it waits for if they are more.

    Computation is fitted by least squares, of which the latest sweeps count most, as seconds of each sweep, of each
    token and of each row of logits, none negative. Where sweeps do not differ enough to tell, tokens and rows have all
    seconds: what more of them costs is rather overestimated.

    Attributes:
        is_known: Whether a sweep has been measured.
        compute_s: Seconds of computation of each sweep, of each token, and of each row of logits.
        moved_s: Seconds of what computation waits for.
        moved_token_s: Seconds by which that is more for each token more.
    """

    def __init__(self, *, reads_grow: bool = False) -> None:
        """Know nothing.

        Args:
            reads_grow: Whether sweeps with more tokens read more, as experts are read on demand.
        """
        self.is_known, self._reads_grow = False, reads_grow
        self.moved_token_s = 0.0
        self._reads = np.zeros(5)  # weight of sweeps, tokens, their squares, seconds of reading, these times tokens
        self.compute_s = (0.0, 0.0, 0.0)
        self.moved_s = 0.0
        self._squares, self._products = np.zeros((3, 3)), np.zeros(3)
        self._num_sweeps = 0

    def add(
        self,
        num_tokens: int,
        num_logits: int,
        seconds: float,
        busy_s: Mapping[str, float],
        stalled_s: Mapping[str, float],
    ) -> None:
        """Learn from a sweep.

        Args:
            num_tokens: Tokens that went through its layers.
            num_logits: Rows of logits.
            seconds: Wall time.
            busy_s: Seconds in which each lane was busy.
            stalled_s: Seconds in which compute stood still, by the lane it waited for.
        """
        waited = min(seconds, sum(stalled_s.values()))
        moved = max((busy for lane, busy in busy_s.items() if lane != "compute"), default=0.0)
        bound = seconds if waited > _WAITED * seconds else min(seconds, moved)
        self.moved_s = bound if not self.is_known else self.moved_s + (1 - _KEPT) * 4 * (bound - self.moved_s)
        self.is_known = True
        if self._reads_grow:
            self._reads = _KEPT * self._reads + np.array([1, num_tokens, num_tokens**2, bound, bound * num_tokens])
            self.moved_token_s = self._read_slope()
        has = np.array([1.0, num_tokens, num_logits])
        # Relative errors: a sweep of a prompt is no more certain than one of single tokens.
        weight = 1 / max(seconds - waited, 1e-9) ** 2
        self._squares = _KEPT * self._squares + weight * np.outer(has, has)
        self._products = _KEPT * self._products + weight * (seconds - waited) * has
        if self._num_sweeps % _FITTED_EVERY == 0:
            self.compute_s = self._fitted()
        self._num_sweeps += 1

    def _read_slope(self) -> float:
        """Seconds of reading for a token more; where sweeps have about equally many, what reads are divided by them."""
        weight, tokens, squares, seconds, products = self._reads.tolist()
        mean, mean_s = tokens / weight, seconds / weight
        spread = squares / weight - mean**2
        doubt = _DOUBT * mean**2
        slope: float = (products / weight - mean * mean_s + doubt * mean_s / mean) / (spread + doubt)
        return max(0.0, slope)

    def _fitted(self) -> tuple[float, float, float]:
        """The best fit without negative seconds."""
        squares = self._squares.copy()
        squares[0, 0] *= 1 + _DOUBT
        scale = 1 / np.sqrt(np.maximum(np.diag(squares), 1e-300))
        squares, products = squares * np.outer(scale, scale), self._products * scale
        best, most = (0.0, 0.0, 0.0), 0.0
        for chosen in _POSITIVE:
            of_chosen = squares[np.ix_(chosen, chosen)] + 1e-6 * np.eye(len(chosen))
            values = np.linalg.solve(of_chosen, products[chosen])
            explained = float(values @ products[chosen])
            if (values >= 0).all() and explained > most * (1 + 1e-9):
                full = np.zeros(3)
                full[chosen] = values * scale[chosen]
                best, most = (float(full[0]), float(full[1]), float(full[2])), explained
        return best
