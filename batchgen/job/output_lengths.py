"""The distribution of output lengths, learned from the sequences that have ended and from those that still run.

The lengths of running sequences are censored: they are only known to be longer than what is there. The Kaplan-Meier
estimator counts them as such. Beyond the lengths seen so far outputs go on to end at the rate of the latest of these:
a fit by the first that end, which are the shortest, would take all others for short too.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

_ENOUGH_ENDED = 5  # sequences that must have ended by themselves before anything is concluded from it
_ENOUGH_AT_RISK = 5


class OutputLengths:
    """Counts of output lengths, and draws from their distribution."""

    def __init__(self) -> None:
        self._ended = np.zeros(64, np.int64)  # by length: sequences that ended by themselves
        self._cut = np.zeros(64, np.int64)  # by length: sequences that were cut at their limit

    def add(self, tokens: int, *, cut: bool) -> None:
        """Count a sequence that has ended.

        Args:
            tokens: Number of its generated tokens.
            cut: True where it reached its limit of tokens, and might have gone on.
        """
        if tokens >= len(self._ended):
            more = max(tokens + 1 - len(self._ended), len(self._ended))
            self._ended, self._cut = (np.pad(counts, (0, more)) for counts in (self._ended, self._cut))
        (self._cut if cut else self._ended)[tokens] += 1

    @property
    def known(self) -> bool:
        """True where enough sequences have ended to say how long others will be."""
        return bool(self._ended.sum() + self._cut.sum() >= _ENOUGH_ENDED)

    def draw(self, generated: Array, limits: Array, running: Array) -> Array:
        """Likely final lengths of sequences, spread evenly over the distribution; the same for equal counts.

        Args:
            generated: Tokens that each sequence has generated, [n].
            limits: The most tokens that each may generate, [n].
            running: Tokens that each sequence in flight has generated, [m], which are censored lengths.

        Returns:
            Final lengths in tokens [n], above `generated` and at most `limits`.
        """
        if not len(generated):
            return generated
        if self._ended.sum() < _ENOUGH_ENDED:
            longest: Array = np.maximum(limits, generated + 1)
            return longest
        survival = self._survival(int(limits.max()), running)
        shares = (self._draws_of(len(generated)) + 0.5) / len(generated)
        targets = shares * survival[np.minimum(generated, len(survival) - 1)]
        lengths = np.searchsorted(-survival, -targets, side="left")
        final: Array = np.maximum(np.minimum(lengths, limits), generated + 1)
        return final

    def _draws_of(self, count: int) -> Array:
        """A permutation of 0 to count - 1 that is the same each time."""
        numbers: Array = np.random.default_rng(count).permutation(count)
        return numbers

    def _survival(self, most: int, running: Array) -> Array:
        """Probability that an output has more than g tokens, for g from 0 to `most`."""
        size = max(most + 1, len(self._ended))
        ended, cut = (np.pad(counts, (0, size - len(counts))) for counts in (self._ended, self._cut))
        censored = cut + np.bincount(np.minimum(running, size - 1), minlength=size)
        at_risk = np.cumsum((ended + censored)[::-1])[::-1]
        survival = np.cumprod(1.0 - ended / np.maximum(at_risk, 1))
        seen = int(np.flatnonzero(at_risk >= _ENOUGH_AT_RISK)[-1]) if at_risk[0] >= _ENOUGH_AT_RISK else 0
        if seen + 1 < size:
            late = slice(seen // 2 + 1, seen + 1)
            hazard = ended[late].sum() / max(1, at_risk[late].sum())
            survival[seen:] = survival[seen] * (1.0 - hazard) ** np.arange(size - seen)
        return survival[: most + 1]
