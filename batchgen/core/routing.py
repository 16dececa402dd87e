"""How a mixture's routers spread tokens over experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

# Fewer sweeps of few tokens than this say little.
_FEWEST_SWEEPS = 16
# Calls in which tokens that draw by themselves would touch more than this part of the experts do not say how few others touch.
_NEARLY_ALL = 0.95


@dataclass(frozen=True)
class Routing:
    """How many experts tokens touch, and how unevenly. As it is: every token draws its experts by itself, and experts that are touched have equally many tokens.

    Attributes:
        exponent: N tokens touch as many experts as N^exponent tokens that draw by themselves; 1 or less, as alike tokens have
            the same favourites.
        imbalance: tokens of the expert that has the most, over the mean of those that have any; 1 or more.
    """

    exponent: float = 1.0
    imbalance: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.exponent <= 1:
            raise ValueError(f"exponent must be 0 to 1, not {self.exponent}")
        if self.imbalance < 1:
            raise ValueError(f"imbalance must be 1 or more, not {self.imbalance}")

    def touched(self, num_experts: int, chosen: int, tokens: float) -> float:
        """Experts of a layer that so many tokens go through: E (1 - (1 - k/E)^(N^x)), of E experts with k for each token."""
        draws = tokens**self.exponent if tokens > 1 else tokens
        touched: float = num_experts * (1 - (1 - chosen / num_experts) ** draws)
        return touched


INDEPENDENT = Routing()


@dataclass
class RoutingCounts:
    """Experts that tokens were routed to, as counted in the layers of sweeps.

    Attributes:
        num_experts: Of a layer.
        chosen: Experts of each token.
        layers: With experts; each is a call in every sweep.
    """

    num_experts: int
    chosen: int
    layers: int = 1
    # Tokens of a call -> calls, experts touched, tokens of the busiest expert, mean tokens of an expert touched; each added up.
    _totals: dict[int, list[float]] = field(default_factory=dict)

    def add(self, tokens_of_each: Sequence[int]) -> None:
        """Count one call of a layer's experts: how many tokens each of them has."""
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
        """The routing with which these calls are expected to touch as many experts as they did; None where they say too little."""
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
