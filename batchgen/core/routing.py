"""A statistical model of expert routing: how many experts the tokens of a sweep use, and how unevenly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

# Fewer sweeps of few tokens than this say little.
_FEWEST_SWEEPS = 16
# Calls in which tokens that draw by themselves would touch more than this part of the experts do not say how few
# others touch.
_NEARLY_ALL = 0.95


@dataclass(frozen=True)
class Routing:
    """A model of the number of experts that tokens are routed to, and of the busiest expert's share.

    By default every token chooses its experts independently, and all used experts have equally many tokens.

    Attributes:
        exponent: x: N tokens use as many experts as N^x tokens that choose independently. It is at most 1, since
            similar tokens prefer the same experts.
        imbalance: Tokens of the busiest expert, divided by the mean tokens of the used experts; 1 or more.
    """

    exponent: float = 1.0
    imbalance: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.exponent <= 1:
            raise ValueError(f"exponent must be 0 to 1, not {self.exponent}")
        if self.imbalance < 1:
            raise ValueError(f"imbalance must be 1 or more, not {self.imbalance}")

    def touched(self, num_experts: int, chosen: int, tokens: float) -> float:
        """The expected number of experts of a layer that a number of tokens uses: E (1 - (1 - k/E)^(N^x)).

        Args:
            num_experts: E, experts of a layer.
            chosen: k, experts of each token.
            tokens: N, tokens.
        """
        return _touched(num_experts, chosen, tokens**self.exponent if tokens > 1 else tokens)

    def read_ahead(self, num_experts: int, chosen: int, tokens: float) -> tuple[float, float]:
        """The expected number of experts that a sweep reads before its router has chosen, and their part of the needed.

        Those are read that nearly all sweeps need (runtime/memory/expert_forecast.py). Similar tokens are taken to
        choose independently among A of the E experts, as many as give the number touched. An expert of these is needed
        in touched / A of the sweeps; it counts as read ahead with a probability that rises from 0 at half of the sweeps
        to 1 at all of them, since shares of few sweeps scatter.

        Args:
            num_experts: E, experts of a layer.
            chosen: k, experts of each token.
            tokens: N, tokens.
        """
        touched = self.touched(num_experts, chosen, tokens)
        preferred = num_experts if self.exponent == 1 else _preferred(num_experts, chosen, tokens, touched)
        part = min(1.0, max(0.0, 2 * touched / preferred - 1))
        return part * preferred, part


INDEPENDENT = Routing()


def _touched(num_experts: float, chosen: int, draws: float) -> float:
    touched: float = num_experts * (1 - (1 - chosen / num_experts) ** draws)
    return touched


@lru_cache(maxsize=1024)
def _preferred(num_experts: int, chosen: int, tokens: float, touched: float) -> float:
    """The number of experts A of which tokens that choose independently touch so many: A (1 - (1 - k/A)^N)."""
    low, high = float(chosen), float(num_experts)
    for _ in range(30):  # more are touched of more
        middle = (low + high) / 2
        low, high = (middle, high) if _touched(middle, chosen, tokens) < touched else (low, middle)
    return high


@dataclass
class RoutingCounts:
    """Counts of the experts to which tokens were routed, over all layers and sweeps.

    Attributes:
        num_experts: Experts of a layer.
        chosen: Experts of each token.
        layers: Number of layers with experts.
    """

    num_experts: int
    chosen: int
    layers: int = 1
    # Tokens of a call -> calls, experts touched, tokens of the busiest expert, mean tokens of an expert touched; each
    # added up.
    _totals: dict[int, list[float]] = field(default_factory=dict)

    def add(self, tokens_of_each: Sequence[int]) -> None:
        """Add the counts of one layer in one sweep.

        Args:
            tokens_of_each: Number of tokens of each expert.
        """
        assigned = sum(tokens_of_each)
        if not assigned:
            return
        touched = sum(1 for count in tokens_of_each if count)
        totals = self._totals.setdefault(assigned // self.chosen, [0.0] * 4)
        for i, value in enumerate((1, touched, max(tokens_of_each), assigned / touched)):
            totals[i] += value

    def reset_counts(self) -> None:
        self._totals.clear()

    def fitted(self) -> Routing | None:
        """The `Routing` that fits the counts: it expects as many used experts; None where there are too few counts."""
        told = {n: totals for n, totals in self._totals.items() if n > 1 and self._touched(1.0, n) < _NEARLY_ALL}
        if not told or sum(calls for calls, *_ in told.values()) < _FEWEST_SWEEPS * self.layers:
            return None
        touched = sum(totals[1] for totals in told.values()) / self.num_experts
        low, high = 0.0, 1.0
        for _ in range(30):  # more are touched with a larger exponent
            middle = (low + high) / 2
            expected = sum(totals[0] * self._touched(middle, n) for n, totals in told.items())
            low, high = (middle, high) if expected < touched else (low, middle)
        busiest, mean = (sum(totals[i] for totals in self._totals.values()) for i in (2, 3))
        return Routing(round(high, 4), round(max(1.0, busiest / mean), 3))

    def _touched(self, exponent: float, tokens: int) -> float:
        return Routing(exponent).touched(self.num_experts, self.chosen, tokens) / self.num_experts
