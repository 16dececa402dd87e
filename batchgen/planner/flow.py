"""How a job flows through the sweeps: how many rows are prefilled and how many decode, from first to last.

A fluid model of the scheduler: rows enter as soon as the block and a sweep's token budget allow, stay for as many
sweeps as their outputs have tokens, and the last ones leave a block half empty. Lengths are a distribution, not
one number. The result is a handful of phases, each a number of like sweeps.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from batchgen.core.workload import Workload
from batchgen.planner.fluid import Setting, flow_through


@dataclass(frozen=True)
class Phase:
    """`sweeps` sweeps that are alike.

    Attributes:
        prefill_tokens, prefill_seqs: prompt tokens computed per sweep, and prompts completed per sweep.
        decode_seqs: sequences that gain a token from decoding, per sweep.
        context: tokens each of them attends to.
        logits_rows_per_prompt: rows of logits computed for a prompt.
    """

    sweeps: float
    prefill_tokens: float
    prefill_seqs: float
    decode_seqs: float
    context: float
    logits_rows_per_prompt: float = 1.0

    @property
    def tokens(self) -> float:
        """Tokens per sweep that go through the layers."""
        return self.prefill_tokens + self.decode_seqs

    @property
    def sampled(self) -> float:
        """Tokens generated per sweep; where prompts are scored, prompts that are done."""
        return self.prefill_seqs + self.decode_seqs

    @property
    def logits_rows(self) -> float:
        """Rows of logits per sweep."""
        return self.prefill_seqs * self.logits_rows_per_prompt + self.decode_seqs


@lru_cache(maxsize=4096)
def phases_of(workload: Workload, admission: str, block_size: int, max_num_batched_tokens: float) -> tuple[Phase, ...]:
    """The phases of a whole job with at most `block_size` sequences in flight.

    Args:
        admission: "continuous" refills the block at once, "static" when the whole block has ended.
    """
    return phases_of_each(workload, ((admission, block_size, max_num_batched_tokens),))[0]


@lru_cache(maxsize=16)
def phases_of_each(workload: Workload, settings: tuple[tuple[str, int, float], ...]) -> tuple[tuple[Phase, ...], ...]:
    """The phases of a whole job for each setting: admission, block size and token budget, as in `phases_of`."""
    within = [Setting(admission, min(size, workload.num_seqs), budget) for admission, size, budget in settings]
    logits_rows = workload.scored_len or 1.0
    return tuple(
        tuple(Phase(*group, logits_rows_per_prompt=logits_rows) for group in groups)
        for groups in flow_through(workload, within)
    )
