"""Numbers of tokens up to which sweeps read only the experts that they touch, and from which on they hide all reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from batchgen.planner.costs import layer_lanes, phase_matmul_as_stored_s, phase_matmul_s, slowest_s
from batchgen.planner.phases import Phase
from batchgen.planner.placement import Placement
from batchgen.planner.problem import CostInputs
from batchgen.planner.step_seconds import elementwise_s

_MOST_TOKENS = 1 << 20  # of a sweep that is looked at


def on_demand_tokens(s: CostInputs, at: Placement) -> int:
    """The most tokens of a decoding sweep for which it is faster to read only the experts on disk that it touches.

    Reading all of them goes on beside the matmuls of the layers before. Reading some waits for the layer's router, and
    its products wait for that; what all tokens need is still read ahead (`costs.layer_lanes`).
    """
    if s.on_gpu or not at.experts_disk:
        return 0
    context = s.workload.prompt_len.mean + s.workload.output_len.mean / 2
    whole, on_demand = replace(s, on_demand_tokens=0), replace(s, on_demand_tokens=_MOST_TOKENS)

    def is_sooner(tokens: int) -> bool:
        phase = Phase(1, 0, 0, tokens, context)
        some_s, all_s = (slowest_s(layer_lanes(inputs, phase, at)) for inputs in (on_demand, whole))
        return some_s < all_s

    return first_tokens(lambda tokens: not is_sooner(tokens)) - 1


def break_even_tokens(s: CostInputs, moved_s: float, streamed_frac: float = 1.0) -> int:
    """Tokens of a sweep from which on a layer's matmuls take as long as bringing its weights; 0: always, or never.

    Args:
        moved_s: seconds in which those weights of one layer come that are brought to the compute device in every sweep.
        streamed_frac: fraction of the layer's weights that they are.
    """

    def products_s(tokens: int) -> float:
        phase = Phase(1, 0, 0, tokens, 1)
        matmul_s = phase_matmul_s(s, phase) + streamed_frac * phase_matmul_as_stored_s(s, phase).total
        return matmul_s + elementwise_s(s, tokens)

    first = first_tokens(lambda tokens: products_s(tokens) >= moved_s)
    return first if 1 < first < _MOST_TOKENS else 0


def first_tokens(holds: Callable[[int], bool]) -> int:
    """The smallest number of tokens for which the predicate holds, as for all larger ones; at most `_MOST_TOKENS`."""
    low, high = 1, _MOST_TOKENS
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low
