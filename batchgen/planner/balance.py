"""Two micro-batches of unequal size (NEO section 3): how many tokens' time of the GPU does not depend on the tokens."""

from __future__ import annotations

from dataclasses import replace

from batchgen.planner.costs import batch_compute_s
from batchgen.planner.phases import Phase
from batchgen.planner.problem import Balance, CostInputs

# The tokens where computation takes no longer for more of them: both batches have half of the CPU's attention.
_MOST_TOKENS = 1 << 20


def with_unequal_batches(s: CostInputs, cpu_seqs: float) -> CostInputs:
    """The inputs with two unequal micro-batches.

    Args:
        s: Inputs with two equal micro-batches.
        cpu_seqs: Sequences of the block that the CPU attends to, about.
    """
    smallest = max(1.0, cpu_seqs / 2)
    balance = Balance(_balance_tokens(s, smallest), min(1.0, cpu_seqs / s.swept_seqs))
    return replace(s, batch_order="neo", balance=balance)


def _balance_tokens(s: CostInputs, smallest: float) -> int:
    """Fixed time of a layer in tokens."""
    fixed_s, token_s = products_line(s, smallest)
    return min(_MOST_TOKENS, max(0, round(fixed_s / token_s))) if token_s > 0 else _MOST_TOKENS


def products_line(s: CostInputs, smallest: float) -> tuple[float, float]:
    """Seconds of one layer's computation for a micro-batch and for each token, attention not included.

    They are a line through the times of the smallest micro-batch and a whole sweep.

    Args:
        s: Inputs of the cost model.
        smallest: Tokens of the smallest micro-batch.
    """
    largest = max(s.max_num_batched_tokens, 2 * smallest)
    low_s, high_s = (batch_compute_s(s.one_batch, Phase(1, tokens, 0, 0, 0)) for tokens in (smallest, largest))
    token_s = (high_s - low_s) / (largest - smallest)
    return low_s - token_s * smallest, token_s
