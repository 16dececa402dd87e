"""A sweep cut into micro-batches: the parts that go through a layer one after the other. No tensors.

While one batch computes, the KV of the next is loaded and that of the one before is stored (FlexGen). Two batches
of which one has most of the decode attention that the CPU does, and the other everything else, keep both processors at
work (NEO's asymmetric pipelining).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from operator import attrgetter, itemgetter
from typing import NamedTuple

from batchgen.core.kv_placement import KVPlacement
from batchgen.core.plan import first_batch_cpu_share
from batchgen.schedule.scheduled_sequence import ScheduledSequence

ORDERS = ("even", "mixed", "neo")


def placement_in_sweep(scheduled: ScheduledSequence, compute_tier: str) -> KVPlacement:
    """The placement of a scheduled sequence's KV that the sweep's attention sees (`KVPlacement.in_sweep`)."""
    placement = scheduled.sequence.kv_placement
    decodes = scheduled.defers if placement is KVPlacement.DEFERRED else scheduled.decodes
    return placement.in_sweep(compute_tier, decodes)


def placements_in_sweep(sweep: Sequence[ScheduledSequence], compute_tier: str) -> list[KVPlacement]:
    """`placement_in_sweep` of each scheduled sequence; without a call for those whose tokens do not matter."""
    fixed = {
        placement: placement.in_sweep(compute_tier, False)
        for placement in _placements(sweep)
        if placement.in_sweep(compute_tier, False) is placement.in_sweep(compute_tier, True)
    }
    return [
        fixed.get(scheduled.sequence.kv_placement) or placement_in_sweep(scheduled, compute_tier) for scheduled in sweep
    ]


def _placements(sweep: Sequence[ScheduledSequence]) -> set[KVPlacement]:
    """The placements of the sequences of a sweep."""
    return set(map(attrgetter("kv_placement"), map(itemgetter(0), sweep)))


def by_placement(sweep: Sequence[ScheduledSequence], compute_tier: str) -> dict[KVPlacement, list[ScheduledSequence]]:
    """Scheduled sequences by the placement of their KV that the sweep's attention sees, in their order."""
    placements = _placements(sweep)
    if all(placement.tier == compute_tier for placement in placements):
        return {KVPlacement.DEVICE: list(sweep)} if placements else {}
    members: dict[KVPlacement, list[ScheduledSequence]] = {}
    for scheduled, placement in zip(sweep, placements_in_sweep(sweep, compute_tier), strict=True):
        members.setdefault(placement, []).append(scheduled)
    return members


def staged_blocks(scheduled: ScheduledSequence, kv_block_size: int) -> int:
    """Blocks of the staging buffer that a staged sequence takes: all its keys, those of this sweep included."""
    return -(-scheduled.num_keys // kv_block_size)


def split_batches(
    sweep: list[ScheduledSequence],
    *,
    num_gpu_batches: int,
    order: str,
    max_tokens: int,
    max_seqs: int,
    max_staged_blocks: int,
    kv_block_size: int,
    compute_tier: str,
    max_staged_seqs: int | None = None,
    balance_tokens: int | None = None,
    pipelines: bool = False,
    mixes: bool = False,
) -> list[list[ScheduledSequence]]:
    """Cut a sweep into micro-batches, none of them empty but the last one of a pipelined sweep.

    Within a placement the sweep's order is kept, so a sequence that takes over KV which another one of the sweep writes
    comes in the same batch or a later one.

    Args:
        sweep: Scheduled sequences.
        num_gpu_batches: Number of micro-batches; what exceeds the limits is cut further, so there may be more.
        order: "even": parts of about equal tokens, fewer where there are fewer sequences, in the order of the sweep, in
            which one placement comes after the other. "mixed": parts of about equal tokens, each with its part of every
            placement. "neo": with two batches, the second has the sequences that the CPU attends to and the first all
            others; where one of them would be empty, and with any other number of batches, parts as with "even".
        max_tokens: Most tokens of a batch; a sequence with more is a batch of its own.
        max_seqs: Most sequences of a batch.
        max_staged_blocks: Most blocks that a batch stages; the caller must not let in a sequence with more.
        kv_block_size: Tokens of a KV block.
        compute_tier: Tier of the compute device's own memory.
        max_staged_seqs: Most sequences that a batch stages; None: no limit.
        balance_tokens: Tokens that matmuls take regardless of their number, for two batches in order "neo": the first
            then has a part of what the CPU attends to, and all of a sweep in which it attends to nothing
            (`first_batch_cpu_share`);
            None: the second has all of these.
        pipelines: Whether the sweep is pipelined: the last micro-batch has the sequences whose deferred token begins,
            if there are any, and others no such sequence.
        mixes: Whether order "even" is "mixed" in this sweep: of the sequences that the CPU attends to some are left
            out, and the others may lie close together.
    """
    assert order in ORDERS, order
    order = "mixed" if mixes and order == "even" else order
    all_here = all(placement.tier == compute_tier for placement in _placements(sweep))
    as_one = all_here and (num_gpu_batches == 1 or balance_tokens is not None) and len(sweep) <= max_seqs
    if as_one and not pipelines and sum(map(itemgetter(1), sweep)) <= max_tokens:
        return [sweep] if sweep else []
    parts: list[_Part] = []
    if all_here:
        parts = [_Part(scheduled, KVPlacement.DEVICE, (scheduled.num_tokens, 1, 0, 0)) for scheduled in sweep]
    placed = () if all_here else zip(sweep, placements_in_sweep(sweep, compute_tier), strict=True)
    for scheduled, placement in placed:
        staged = placement is KVPlacement.STREAMED
        blocks = staged_blocks(scheduled, kv_block_size) if staged else 0
        assert blocks <= max_staged_blocks, (
            f"{blocks} blocks to stage for one sequence, capacity for {max_staged_blocks}"
        )
        parts.append(_Part(scheduled, placement, (scheduled.num_tokens, 1, blocks, int(staged))))
    deferring = [p.scheduled for p in parts if pipelines and p.placement is KVPlacement.DEFERRED]
    parts = [p for p in parts if not pipelines or p.placement is not KVPlacement.DEFERRED]
    delegated = [p for p in parts if p.placement is KVPlacement.CPU]
    others = [p for p in parts if p.placement is not KVPlacement.CPU]
    if balance_tokens is not None:
        batches = _balanced(others, delegated, balance_tokens)
    elif order == "neo" and num_gpu_batches == 2 and delegated and others:
        batches = [others, delegated]
    else:
        batches = _cut(_mixed(parts) if order == "mixed" else parts, num_gpu_batches, _TOKENS)
    limits = (max_tokens, max_seqs, max_staged_blocks, len(sweep) if max_staged_seqs is None else max_staged_seqs)
    kept = [[p.scheduled for p in part] for batch in batches for part in _within(batch, limits)]
    return [*kept, deferring] if pipelines else kept


class _Part(NamedTuple):  # one for each sequence of a sweep
    """A scheduled sequence with its load.

    Attributes:
        scheduled: The sequence.
        placement: Placement that attention sees.
        load: Tokens, sequences, and blocks and sequences to stage.
    """

    scheduled: ScheduledSequence
    placement: KVPlacement
    load: tuple[int, int, int, int]


_TOKENS = 0  # in a load


def _mixed(parts: list[_Part]) -> list[_Part]:
    """Parts in an order in which those of each placement lie evenly among the others, by tokens.

    Within a placement they keep their order.
    """
    by_placement: dict[KVPlacement, list[_Part]] = {}
    for part in parts:
        by_placement.setdefault(part.placement, []).append(part)
    placed: list[tuple[float, _Part]] = []
    for members in by_placement.values():
        total, before = sum(p.load[_TOKENS] for p in members), 0
        for part in members:
            placed.append(((before + part.load[_TOKENS] / 2) / total, part))
            before += part.load[_TOKENS]
    return [part for _, part in sorted(placed, key=lambda entry: entry[0])]


def _balanced(others: list[_Part], delegated: list[_Part], balance_tokens: int) -> list[list[_Part]]:
    """One batch or two, the CPU's attention in each as long as the matmuls of the other, by keys (NEO section 3.2).

    Of the sequences that the CPU attends to, the first go to the first batch.
    """
    tokens = sum(p.load[_TOKENS] for p in (*others, *delegated))
    keys = list(accumulate((p.scheduled.num_keys for p in delegated), initial=0))
    wanted = keys[-1] * first_batch_cpu_share(tokens, len(delegated), balance_tokens)
    count = min(range(len(keys)), key=lambda n: abs(keys[n] - wanted))
    return [batch for batch in ([*others, *delegated[:count]], delegated[count:]) if batch]


def _within(batch: list[_Part], limits: tuple[int, int, int, int]) -> Iterator[list[_Part]]:
    """Yield parts of the batch, cut until each of more than one sequence keeps all limits."""
    totals = [sum(loads) for loads in zip(*(p.load for p in batch), strict=True)]
    excess = [total / max(1, limit) for total, limit in zip(totals, limits, strict=True)]
    if len(batch) == 1 or max(excess) <= 1:
        yield batch
        return
    # By what it exceeds the most; the parts may still exceed another limit, or this one a little.
    kind = excess.index(max(excess))
    for part in _cut(batch, -(-totals[kind] // limits[kind]), kind):
        yield from _within(part, limits)


def _cut(parts: list[_Part], num_batches: int, kind: int) -> list[list[_Part]]:
    """Consecutive batches of about equal load: `num_batches`, or one per part where there are fewer parts."""
    batches = []
    left = sum(p.load[kind] for p in parts)
    start = 0
    for batches_left in range(min(num_batches, len(parts)), 0, -1):
        last = len(parts) - (batches_left - 1)  # each later batch needs a part too
        load, stop = parts[start].load[kind], start + 1
        # A part belongs to this batch if at least half of it lies within the batch's even part of what is left.
        while stop < last and (2 * load + parts[stop].load[kind]) * batches_left <= 2 * left:
            load += parts[stop].load[kind]
            stop += 1
        batches.append(parts[start:stop])
        left -= load
        start = stop
    return batches
