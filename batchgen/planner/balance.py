"""NEO's way of two micro-batches of unequal size: how the CPU's attention is shared out between them."""

from __future__ import annotations

from dataclasses import replace

from batchgen.planner.costs import products_s
from batchgen.planner.phases import Phase
from batchgen.planner.problem import Balance, CostInputs

# Products that take no longer for more tokens: both batches have half of the CPU's attention.
_MOST_TOKENS = 1 << 20


def balanced(s: CostInputs, cpu_seqs: float) -> CostInputs:
    """The inputs with two unequal micro-batches.

    Args:
        s: Of two equal ones.
        cpu_seqs: Sequences of the block that the CPU attends to, about.
    """
    smallest = max(1.0, cpu_seqs / 2)
    return replace(
        s, batch_order="neo", balance=Balance(_balance_tokens(s, smallest), min(1.0, cpu_seqs / s.swept_seqs))
    )


def _balance_tokens(s: CostInputs, smallest: float) -> int:
    """What products take whatever their tokens, in tokens: from the line through those of the smallest micro-batch and of a whole sweep."""
    largest = max(s.max_num_batched_tokens, 2 * smallest)
    low_s, high_s = (products_s(s.one_batch, Phase(1, tokens, 0, 0, 0)) for tokens in (smallest, largest))
    token_s = (high_s - low_s) / (largest - smallest)
    fixed_s = low_s - token_s * smallest
    return min(_MOST_TOKENS, max(0, round(fixed_s / token_s))) if token_s > 0 else _MOST_TOKENS
