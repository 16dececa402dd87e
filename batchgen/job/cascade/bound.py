"""The threshold of a cascade on the small model's confidence, with a bound that holds for any number of rows.

The large model answers a random sample of the rows. Rows are drawn with replacement, and more often where the small
model is less sure (importance sampling, as in LOTUS, VLDB 2025, and SUPG, VLDB 2020). For a threshold, the loss of a
draw is the row's weight if the small model's answer would be kept and differs from the large one's, and else 0. Its
mean is the share of all rows whose kept answer differs: a number from 0 to the largest weight.

That mean is bounded by betting (Waudby-Smith and Ramdas, "Estimating means of bounded random variables by betting",
2023): if it were above the allowed share, the capital of somebody who bets on less would be expected not to grow, so by
Ville's inequality it would reach 1 / (1 - confidence) with a probability of at most 1 - confidence. No assumption is
made on the confidences, which may mean anything, or on the number of draws.

Thresholds are tried from the highest to the lowest until the first that fails. Losses only grow on the way, so the
promise is broken only where the first threshold with too large a mean is accepted: one test, not as many as there are
thresholds (fixed-sequence testing; Bates et al., "Distribution-free, risk-controlling prediction sets", 2021, section
2.2).

A promise about one choice is one about two shares, recall and precision (the targets of LOTUS): of the rows that have
this choice by the large model, and of the rows that have it in the output, those whose answer is the large model's.
The loss of a draw of such a group is its weight, less the allowed share of it where the answer is kept right; outside
of the group it is the allowed mean. These losses only grow on the way, too, so both tests are made at each threshold
without a correction: to break the promise, the first threshold at which one of the two shares is too small has to pass
the test of this share.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

_UNIFORM_SHARE = 0.5  # of the draws; no weight is above its inverse
_BETS = 24  # constant bets, each with an equal part of the capital at the start
_THRESHOLDS = 200  # that are tried
# Draws for one error in so many allowed: four times what the strictest threshold needs that keeps no wrong answer.
_DRAWS_PER_TEST = 4.0
_MOST_TIMES = 8  # as many draws where they are few of all rows
_FEW = 0.05
_DRAWS_AT_ONCE = 1 << 16


@dataclass(frozen=True)
class Target:
    """The promise of a cascade.

    Attributes:
        agree: Least share of all rows whose answer is the large model's, below 1.
        confidence: Least probability, over the draw of the sample, that the promise is kept; below 1.
    """

    agree: float
    confidence: float

    def default_draws(self, rows: int, share: float = 1.0) -> int:
        """Number of draws where none is given.

        Args:
            rows: Number of all rows.
            share: Share of the rows that the promise is about.
        """
        of_all = 1.0 / max(share, 1.0 / _MOST_TIMES)
        least = math.ceil(of_all * _DRAWS_PER_TEST * math.log(1.0 / (1.0 - self.confidence)) / (1.0 - self.agree))
        return max(least, min(_MOST_TIMES * least, int(_FEW * rows)))


@dataclass(frozen=True)
class Draws:
    """A random sample of rows, drawn with replacement.

    Attributes:
        rows: Number of the row of each draw, int64 [draws].
        weights: 1 / (rows * probability) of each draw's row, float64 [draws].
        most_weight: Largest weight of any row, drawn or not.
    """

    rows: npt.NDArray[np.int64]
    weights: Floats
    most_weight: float


def draw_rows(confidences: Floats, draws: int, seed: int, chosen: Bools | None = None) -> Draws:
    """Draw rows for the large model until all are drawn: then further draws would pass none on, and keep none.

    Stopping there breaks no promise, as the test of a mean by betting holds whenever one stops.

    Args:
        confidences: The small model's confidence in each row, 0 to 1; below 0 where it has no answer. [rows]
        draws: The most draws.
        seed: Seed of the draw.
        chosen: True for each row to which the small model gives the choice that the promise is about; None: the promise
            is about all rows. [rows]
    """
    rows = len(confidences)
    certain = np.clip(confidences, 0.0, 1.0)
    doubt = np.sqrt(1.0 - certain if chosen is None else np.where(chosen, certain, 1.0 - certain))
    doubt[confidences < 0.0] = 0.0  # these go to the large model in any case
    shares = doubt / doubt.sum() if doubt.sum() > 0.0 else np.full(rows, 1.0 / rows)
    chances = _UNIFORM_SHARE / rows + (1.0 - _UNIFORM_SHARE) * shares
    weights = 1.0 / (rows * chances)
    drawn = _draw_until_all(np.random.default_rng(seed), chances / chances.sum(), draws)
    return Draws(drawn, weights[drawn], float(weights.max()))


def _draw_until_all(generator: np.random.Generator, chances: Floats, draws: int) -> npt.NDArray[np.int64]:
    """Draw rows with replacement until all are drawn, or as often as it is asked for.

    Args:
        generator: Generator of random numbers. However many draws are asked for, they begin with the same ones.
        chances: Probability of each row. [rows]
        draws: The most draws.
    """
    seen, pieces = np.zeros(len(chances), bool), []
    most = max(len(chances), _DRAWS_AT_ONCE)  # at once: each time costs a pass over the rows
    while draws > 0 and not seen.all():
        pieces.append(generator.choice(len(chances), min(draws, most), p=chances).astype(np.int64))
        draws -= len(pieces[-1])
        seen[pieces[-1]] = True
    drawn = np.concatenate(pieces)
    if seen.all():
        _, first = np.unique(drawn, return_index=True)
        drawn = drawn[: first.max() + 1]
    return drawn


@dataclass(frozen=True)
class OneChoice:
    """The draws whose answer is the choice that a promise is about.

    Attributes:
        small: True where it is the small model's answer. [draws]
        large: True where it is the large model's answer. [draws]
    """

    small: Bools
    large: Bools

    def groups(self, kept: Bools) -> tuple[Bools, Bools]:
        """The draws that have the choice by the large model, and those that have it in the output.

        Args:
            kept: True where the small model's answer is kept. [draws]
        """
        return self.large, np.where(kept, self.small, self.large)


@dataclass(frozen=True)
class Threshold:
    """The confidence from which on the small model's answers are kept, and what the sample says about them.

    Attributes:
        least_confidence: Least confidence of a kept answer; infinity: none is kept.
        kept_share: Share of all rows that reach it.
        agree_estimate: Estimated share of all rows whose answer is the large model's.
        recall_estimate: That share of the rows that have the promise's choice by the large model; None: the promise is
            about all rows.
        precision_estimate: That share of the rows that have the promise's choice in the output.
    """

    least_confidence: float
    kept_share: float
    agree_estimate: float
    recall_estimate: float | None = None
    precision_estimate: float | None = None


def choose_threshold(
    confidences: Floats, draws: Draws, differs: Bools, target: Target, choice: OneChoice | None = None
) -> Threshold:
    """The lowest threshold that keeps the promise.

    Args:
        confidences: The small model's confidence in each row; below 0 where it has no answer. [rows]
        draws: The sample.
        differs: For each draw, True where the two models' answers differ. [draws]
        target: The promise.
        choice: The draws of the choice that the promise is about; None: it is about all rows.
    """
    of_draws, thresholds = confidences[draws.rows], _thresholds(confidences)
    allowed, error, most = 1.0 - target.agree, 1.0 - target.confidence, draws.most_weight

    def passes(threshold: float) -> bool:
        kept = of_draws >= threshold
        if choice is None:
            return is_below(np.where(kept & differs, draws.weights, 0.0), allowed, error, most)
        lost = np.where(kept & differs, 1.0 - allowed, -allowed) * draws.weights
        of_groups = (np.where(group, lost, 0.0) + most * allowed for group in choice.groups(kept))
        return all(is_below(losses, most * allowed, error, most) for losses in of_groups)

    # With each further row that is kept losses grow, and no bet gains: all thresholds before the first that fails pass.
    failing = bisect_left(thresholds, True, key=lambda threshold: not passes(threshold))
    lowest = float(thresholds[failing - 1]) if failing else math.inf
    kept = of_draws >= lowest
    kept_share, wrong = float(np.mean(confidences >= lowest)), np.where(kept & differs, draws.weights, 0.0)
    shares = () if choice is None else (_right_share(wrong, draws.weights, group) for group in choice.groups(kept))
    return Threshold(lowest, kept_share, 1.0 - float(wrong.mean()), *shares)


def _right_share(wrong: Floats, weights: Floats, group: Bools) -> float:
    """The estimated share of a group whose answers are the large model's; 1 where no draw is of the group.

    Args:
        wrong: The weight of each draw whose answer is not; 0 of others. [draws]
        weights: The weights of all draws. [draws]
        group: True for the draws of the group. [draws]
    """
    of_group = float(weights[group].sum())
    return 1.0 - float(wrong[group].sum()) / of_group if of_group else 1.0


def _thresholds(confidences: Floats) -> list[float]:
    """Confidences to try as thresholds, the highest first; each keeps more rows than the one before."""
    answered = confidences[confidences >= 0.0]
    if not len(answered):
        return []
    shares = np.linspace(1.0 - 1.0 / _THRESHOLDS, 0.0, _THRESHOLDS)
    return [float(value) for value in np.unique(np.quantile(answered, shares, method="higher"))[::-1]]


def is_below(losses: Floats, mean: float, error: float, most: float) -> bool:
    """Test that the mean of a bounded random number is at most a given one.

    Args:
        losses: Independent draws of the number, from 0 to `most`.
        mean: The given mean.
        error: Most probability of true where the mean is larger.
        most: The largest value that the number can have.

    Returns:
        True where the draws prove it.
    """
    if mean >= most:
        return True
    bets = np.linspace(1.0 / (_BETS + 1), _BETS / (_BETS + 1), _BETS) / (most - mean)
    before, enough = np.zeros(_BETS), -math.log(error)
    for start in range(0, len(losses), _DRAWS_AT_ONCE):
        gains = np.log1p(bets[:, None] * (mean - losses[None, start : start + _DRAWS_AT_ONCE]))
        gains[:, 0] += before
        capitals = np.cumsum(gains, axis=1)
        before = capitals[:, -1]
        # The mean of all bets' capital is at most that of the best one.
        near = capitals[:, capitals.max(axis=0) >= enough]
        if near.size and (np.logaddexp.reduce(near, axis=0) - math.log(_BETS)).max() >= enough:
            return True
    return False
