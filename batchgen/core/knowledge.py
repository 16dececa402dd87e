"""Knowledge of a machine's rates: normally distributed logarithms of factors on the seconds of each kind of work.

A kind of work has a name: "few" and "many" are matrix products of few and of many tokens, "speed" is common to all that
the CPU computes. The *parts* of a time say which share of it each kind takes. A measurement of the time then says
something of each of its kinds, as much as the kind is uncertain and part of that time (a Kalman filter).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

Parts = Mapping[str, float]  # shares of a time by kind of work; "speed" has those of all others together

SPEED, FEW, MANY, PREFILL, DECODE, ELEMENTWISE, OVERHEADS, DISK = (
    "speed", "few", "many", "prefill attention", "decode attention", "element-wise", "overheads", "disk",
)  # fmt: skip
# Standard deviations before anything was measured: cores of one kind differ twofold, by clock and by what shares them.
# A name that begins with neither is that of a weight format or of a model.
_PRIOR = {
    SPEED: 0.4, FEW: 0.25, MANY: 0.1, PREFILL: 0.2, DECODE: 0.25, ELEMENTWISE: 0.25, OVERHEADS: 0.4, DISK: 0.7,
}  # fmt: skip
_PRIOR_OF_OTHERS = 0.1
# What remains uncertain in any case: a shared machine is faster at one moment than at another.
MOMENT = 0.08
# Products of at most one token are all "few", those of so many tokens all "many".
_MANY_TOKENS = 64
# The speed of a machine drifts from one job to the next.
_DRIFT = 0.04
# Standard deviation of the logarithm by which others slow a job down, as a part of it: they may come and go.
_BESIDE = 0.5
# A smaller slowdown by others is not said.
_WORTH_SAYING = 1.2
MEASURED = "measured"  # begins the name of a table of this machine's own rates
# 90 % of a normal distribution lie within so many standard deviations.
_WITHIN_90 = 1.645
# The latest weight formats and models are remembered.
_MOST_OTHERS = 32


@dataclass(frozen=True)
class Knowledge:
    """The knowledge of the factors on the seconds that a table of rates gives.

    Attributes:
        table: Name of the table; it begins with `MEASURED` if it has rates that were measured on this machine.
        jobs: Number of jobs on this machine that have been learned from.
        probe_s: Seconds of the probe that has been learned from; 0: none.
        means: Expected logarithm of the factor of each kind of work; others have 0.
        covariance: Covariance of these logarithms, by pairs of names; others have that of the prior.
        prior: Factor on the prior's standard deviations, smaller for a table that was measured on this machine.
        slowdown: Factor by which other work on the machine is expected to slow the job down, which `means` have.
    """

    table: str
    jobs: int = 0
    probe_s: float = 0.0
    means: Mapping[str, float] = field(default_factory=dict)
    covariance: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    prior: float = 1.0
    slowdown: float = 1.0

    @property
    def source(self) -> str:
        """The origin of the rates, as it follows "from" in a sentence."""
        base = "this machine's measured rates" if self.table.startswith(MEASURED) else "this machine's kind"
        if self.jobs:
            base += f" and {self.jobs} earlier job{'s' if self.jobs > 1 else ''}"
        elif self.probe_s:
            base += f" and a probe of {self.probe_s:.1f} s"
        return (
            base if self.slowdown < _WORTH_SAYING else f"{base}; other programs slow it down {self.slowdown:.1f} times"
        )

    def mean(self, parts: Parts) -> float:
        """Expected logarithm of the factor on a time with these parts."""
        return sum(share * self.means.get(name, 0.0) for name, share in parts.items())

    def deviation(self, parts: Parts) -> float:
        """Standard deviation of the logarithm of the factor on a time with these parts."""
        variance = sum(share * self._with(name, parts) for name, share in parts.items())
        return math.sqrt(max(0.0, variance) + MOMENT**2)

    def after(self, parts: Parts, logarithm: float, noise: float) -> Knowledge:
        """The knowledge after a measured time.

        Args:
            parts: Parts of the time.
            logarithm: Logarithm of the measured time over the time by the table.
            noise: Standard deviation of that logarithm.
        """
        others = dict.fromkeys(name for name in (*self.means, *parts) if name not in _PRIOR)
        names = [*_PRIOR, *list(others)[-_MOST_OTHERS:]]
        with_time = {name: self._with(name, parts) for name in names}
        variance = sum(share * with_time[name] for name, share in parts.items() if name in with_time) + noise**2
        surprise = logarithm - self.mean(parts)
        means = {name: self.means.get(name, 0.0) + with_time[name] / variance * surprise for name in names}
        covariance = {
            a: {b: self._covariance(a, b) - with_time[a] * with_time[b] / variance for b in names} for a in names
        }
        return replace(self, means=means, covariance=covariance)

    def slowed(self, slowdown: float, at_first: float = 1.0) -> Knowledge:
        """The knowledge for a job beside which others use the cores.

        Args:
            slowdown: Factor by which the job is expected to take longer.
            at_first: Factor by which it takes longer while all others run that run now; no more than `slowdown`: none
                is expected to end before the job.
        """
        longer = math.log(slowdown)
        variance = self._covariance(SPEED, SPEED) + (_BESIDE * math.log(max(slowdown, at_first))) ** 2
        return replace(
            self,
            means={**self.means, SPEED: self.means.get(SPEED, 0.0) + longer},
            covariance={**self.covariance, SPEED: {**self.covariance.get(SPEED, {}), SPEED: variance}},
            slowdown=slowdown,
        )

    def drifted(self) -> Knowledge:
        """The knowledge some time later, when the machine may be faster or slower."""
        variance = self._covariance(SPEED, SPEED) + _DRIFT**2
        covariance = {**self.covariance, SPEED: {**self.covariance.get(SPEED, {}), SPEED: variance}}
        return replace(self, means={SPEED: 0.0, **self.means}, covariance=covariance)

    def interval(self, parts: Parts) -> tuple[float, float]:
        """The factors on an expected time between which it lies in nine cases of ten."""
        wide = math.exp(_WITHIN_90 * self.deviation(parts))
        return 1 / wide, wide

    def _with(self, name: str, parts: Parts) -> float:
        """Covariance of a kind's logarithm with that of a time."""
        return sum(share * self._covariance(name, other) for other, share in parts.items())

    def _covariance(self, a: str, b: str) -> float:
        if a in self.covariance and b in self.covariance[a]:
            return self.covariance[a][b]
        return (self.prior * _PRIOR.get(a, _PRIOR_OF_OTHERS)) ** 2 if a == b else 0.0


def few_share(tokens: float) -> float:
    """The share of FEW in the time of products of so many tokens; the rest is of MANY."""
    return min(1.0, max(0.0, 1 - math.log(max(tokens, 1.0)) / math.log(_MANY_TOKENS)))


def weights_name(key: str) -> str:
    """The name of products with weights of one kind. key: a `dtypes.matmul_key`."""
    return f"weights {key}"


def model_name(hidden_size: int, num_layers: int) -> str:
    """The name of what is peculiar to models of one shape."""
    return f"model {hidden_size}x{num_layers}"
