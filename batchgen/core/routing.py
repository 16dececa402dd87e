"""The way in which a mixture's routers spread tokens over experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

# Fewer sweeps of few tokens than this say little.
_FEWEST_SWEEPS = 16
# Calls in which tokens that draw by themselves would touch more than this part of the experts do not say how few
# others touch.
_NEARLY_ALL = 0.95


@dataclass(frozen=True)
class Routing:
    """The number of experts that tokens touch, and how unevenly the tokens are spread.

    With the defaults every token draws its experts independently, and touched experts have equally many tokens.

    Attributes:
        exponent: x, where N tokens touch as many experts as N^x independent ones; at most 1, as alike tokens have the
            same favourites.
        imbalance: Tokens of the busiest expert over the mean of the touched ones; 1 or more.
    """

    exponent: float = 1.0
    imbalance: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.exponent <= 1:
            raise ValueError(f"exponent must be 0 to 1, not {self.exponent}")
        if self.imbalance < 1:
            raise ValueError(f"imbalance must be 1 or more, not {self.imbalance}")

    def touched(self, num_experts: int, chosen: int, tokens: float) -> float:
        """Experts of a layer that a number of tokens goes through.

        They are E (1 - (1 - k/E)^(N^x)) for N tokens, E experts and k experts of each token.
        """
        draws = tokens**self.exponent if tokens > 1 else tokens
        touched: float = num_experts * (1 - (1 - chosen / num_experts) ** draws)
        return touched


INDEPENDENT = Routing()


@dataclass
class RoutingCounts:
    """Counts of the experts that tokens were routed to, in all layers of all sweeps.

    Attributes:
        num_experts: Experts of a layer.
        chosen: Experts of each token.
        layers: Layers with experts; each is one call in every sweep.
    """

    num_experts: int
    chosen: int
    layers: int = 1
    # Tokens of a call -> calls, experts touched, tokens of the busiest expert, mean tokens of an expert touched; each
    # added up.
    _totals: dict[int, list[float]] = field(default_factory=dict)

    def add(self, tokens_of_each: Sequence[int]) -> None:
        """Count one call of a layer's experts, given the number of tokens of each."""
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
        """The routing that is expected to touch as many experts as these calls did; None where they say too little."""
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
