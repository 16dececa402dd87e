"""The number of tokens up to which a GPU runs sweeps as CUDA graphs: larger ones hide their launches."""

from __future__ import annotations

from batchgen.planner.experts import first_tokens
from batchgen.planner.problem import CostInputs
from batchgen.planner.step_seconds import elementwise_s, matmul_s, multiplies_packed

# Launches of larger sweeps take little for each of their tokens, and a graph takes memory for all of them.
_MOST_TOKENS = 4096
# Layers that compute so many times as long as they are launched hide that, and the rest of the host's work with it.
HIDDEN_FROM = 2


def captured_tokens(s: CostInputs) -> int:
    """The most tokens of a sweep whose layers compute too shortly to hide that the host launches them one by one.

    Attention, which depends on the sweep, counts as nothing. 0 where the profile has no time of launches.
    """
    if not s.rates.launch_overhead_s:
        return 0

    def hides_launches(tokens: int) -> bool:
        layer_s = matmul_s(s, tokens, packed=multiplies_packed(s, tokens)).total + elementwise_s(s, tokens)
        return layer_s >= HIDDEN_FROM * s.rates.launch_overhead_s

    return min(_MOST_TOKENS, first_tokens(hides_launches) - 1)
