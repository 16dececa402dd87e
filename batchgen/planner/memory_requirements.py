"""Memory requirements of a plan's job: the longest sequence, tokens of KV, and the process itself."""

from __future__ import annotations

from batchgen.core.plan import DEFAULT_KV_BLOCK_SIZE, Plan
from batchgen.core.workload import Workload

# KV pools against the longest sequences they are for.
_KV_HEADROOM = 1.25


def most_kv_tokens(plan: Plan) -> int:
    """Tokens of KV a job makes use of.

    They are those of every sequence in flight at the longest length seen, and some for prefixes that later rows may
    share. Memory beyond that would only be touched for the first time, which is slow.
    """
    return kv_tokens_used(plan.workload, plan.policy.max_num_seqs)


def kv_tokens_used(workload: Workload, max_num_seqs: int) -> int:
    """Tokens of KV that a workload makes use of with so many sequences in flight."""
    blocks = -(-workload.max_seq_len // DEFAULT_KV_BLOCK_SIZE)
    return int(_KV_HEADROOM * max_num_seqs * blocks * DEFAULT_KV_BLOCK_SIZE)


def process_share(plan: Plan) -> int:
    """Bytes of the host's memory that the plan leaves to the process for itself."""
    return int(plan.prediction.memory_bytes.get("cpu", {}).get("process", 0))
