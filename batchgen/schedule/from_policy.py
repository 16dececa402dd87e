"""A policy and its memory plan as the scheduler's parts: pools, limits, and the cutting of a sweep.

The engine and the simulation both start from here. No torch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from batchgen.core.kv_placement import KVPlacement
from batchgen.core.plan import MemoryPlan, Policy, window_blocks
from batchgen.schedule.block_manager import BlockManager
from batchgen.schedule.extents import ExtentManager
from batchgen.schedule.micro_batches import split_batches
from batchgen.schedule.scheduled_sequence import ScheduledSequence
from batchgen.schedule.scheduler_limits import SchedulerLimits
from batchgen.schedule.state_slots import StateSlots
from batchgen.schedule.window_pool import WindowPool


def kv_pools(policy: Policy, memory: MemoryPlan) -> dict[str, BlockManager]:
    """Empty pools of KV blocks, and of state slots, by tier."""
    return {
        tier: ExtentManager(count, policy.kv_block_size, policy.share_prefixes, _state_slots(tier, memory))
        if tier == "disk"
        else BlockManager(
            count,
            policy.kv_block_size,
            policy.share_prefixes,
            _window_pool(tier, policy, memory),
            _state_slots(tier, memory),
            memory.expansion if tier == KVPlacement.STREAMED.tier else None,
        )
        for tier, count in memory.kv_blocks.items()
    }


def _state_slots(tier: str, memory: MemoryPlan) -> StateSlots | None:
    return StateSlots(memory.state_slots[tier]) if memory.state_slots else None


def _window_pool(tier: str, policy: Policy, memory: MemoryPlan) -> WindowPool | None:
    if memory.window is None:
        return None
    return WindowPool(memory.window_blocks[tier], policy.kv_block_size, memory.window)


def scheduler_limits(
    policy: Policy, memory: MemoryPlan, compute_tier: str, sweeps_in_flight: int = 1
) -> SchedulerLimits:
    """The quotas and limits of a policy.

    Where the CPU computes, nothing is deferred: it attends to all of its own KV.
    """
    kv_seqs = {KVPlacement(name): count for name, count in policy.kv_seqs.items()}
    if compute_tier == "cpu" and KVPlacement.DEFERRED in kv_seqs:
        kv_seqs[KVPlacement.CPU] = kv_seqs.get(KVPlacement.CPU, 0) + kv_seqs.pop(KVPlacement.DEFERRED)
    return SchedulerLimits(
        policy.max_num_seqs,
        policy.max_num_batched_tokens,
        policy.admission,
        kv_seqs=kv_seqs,
        max_chunk_tokens=memory.batch_tokens,
        compute_tier=compute_tier,
        deferred_rows=policy.deferred_rows,
        most_staged_tokens=policy.kv_block_size * max(1, memory.staging_blocks),
        max_logit_rows=memory.held_logit_rows,
        sweeps_in_flight=sweeps_in_flight,
    )


def longest_sequence(policy: Policy, memory: MemoryPlan, compute_tier: str) -> int:
    """The most tokens of KV that one sequence can have: those of the largest pool that fit in a staging buffer."""

    def blocks(tier: str, count: int) -> int:
        own = memory.window_blocks.get(tier)
        if memory.window is not None and own is not None and own < window_blocks(memory.window, policy.kv_block_size):
            count = min(count, own)
        return count if tier == compute_tier else min(count, memory.staging_blocks)

    return policy.kv_block_size * max(blocks(tier, count) for tier, count in memory.kv_blocks.items())


def splitter(policy: Policy, memory: MemoryPlan, compute_tier: str) -> Callable[..., list[list[ScheduledSequence]]]:
    """A function that cuts a sweep's sequences into micro-batches, within the limits of the policy and its memory.

    It is `split_batches` with all arguments but the sweep, `pipelines` and `mixes` filled in.

    Args:
        policy: The policy.
        memory: Its memory plan.
        compute_tier: The tier of the compute device's memory.
    """
    return partial(
        split_batches,
        num_gpu_batches=policy.num_gpu_batches,
        order=policy.batch_order,
        max_tokens=memory.batch_tokens,
        max_seqs=policy.batch_seqs,
        max_staged_blocks=max(1, memory.staging_blocks),
        kv_block_size=policy.kv_block_size,
        compute_tier=compute_tier,
        max_staged_seqs=max(1, memory.staging_states) if memory.state_slots else None,
        balance_tokens=policy.balance_tokens,
    )
