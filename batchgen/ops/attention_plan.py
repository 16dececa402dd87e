"""The plan of one sweep's attention, cut into products, as data: no tensors, no device.

The packed tokens of a sweep are ordered so that every item covers a contiguous range of them. A token's
keys are attended to in one part (its own item), or, where many sequences share a prompt prefix, in two:
the shared prefix once for all of them (`SharedItem`) and the rest in its own item; the two are merged by
their log-sum-exp.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

# A decode group's gathered K or V: enough work for an efficient product, little enough to stay in cache.
_GROUP_BYTES = 2 << 20
# A shared prefix is worth an item of its own from this many tokens and sequences on.
MIN_SHARED_TOKENS = 64
MIN_SHARED_SEQUENCES = 4


@dataclass(frozen=True)
class SequenceSlice:
    """One sequence's part in a sweep: `num_queries` new tokens after `num_cached` tokens already in the KV.

    blocks: its block table, int32 [num_blocks], long enough for all of them.
    """

    num_queries: int
    num_cached: int
    blocks: np.ndarray

    @property
    def num_keys(self) -> int:
        return self.num_cached + self.num_queries


@dataclass(frozen=True)
class DecodeGroup:
    """Sequences with one query token each, tokens [start, stop), of similar context length.

    blocks: int32 [sequences, blocks]; sequence i sees keys first_key[i] <= key < num_keys[i] of its blocks.
    """

    start: int
    stop: int
    blocks: np.ndarray
    num_keys: np.ndarray
    first_key: np.ndarray


@dataclass(frozen=True)
class PrefillItem:
    """Several query tokens [start, stop) of one sequence; query i stands at key query_offset + i of `blocks`."""

    start: int
    stop: int
    blocks: np.ndarray
    query_offset: int
    window: int | None = None


@dataclass(frozen=True)
class SharedItem:
    """Tokens [start, stop) of several sequences that all see every key of `blocks`."""

    start: int
    stop: int
    blocks: np.ndarray


@dataclass(frozen=True)
class AttentionPlan:
    """The work items of one attention call, by kind."""

    shared: tuple[SharedItem, ...]
    decode: tuple[DecodeGroup, ...]
    prefill: tuple[PrefillItem, ...]


@dataclass(frozen=True)
class SharedGroup:
    """Sequences (by index) whose block tables start with the same `num_blocks` blocks."""

    members: tuple[int, ...]
    num_blocks: int


def find_shared_groups(
    slices: Sequence[SequenceSlice], matched_blocks: Sequence[int], kv_block_size: int
) -> list[SharedGroup]:
    """Groups of sequences with a common prefix long enough to attend to once, the most saving one first.

    matched_blocks: per sequence, how many leading blocks it took from the prefix cache. A block belongs to one
    prefix only, so equal blocks at equal depth mean equal prefixes; where matches end is where groups can end.
    """
    ends = {
        (n, int(s.blocks[n - 1]))
        for s, n in zip(slices, matched_blocks, strict=True)
        if n * kv_block_size >= MIN_SHARED_TOKENS
    }
    if not ends:
        return []
    # Every query of a member must come after the shared keys.
    reach = np.array([min(len(s.blocks), s.num_cached // kv_block_size) for s in slices])
    members: dict[tuple[int, int], list[int]] = {}
    for depth in {n for n, _ in ends}:
        for i in np.flatnonzero(reach >= depth).tolist():
            end = depth, int(slices[i].blocks[depth - 1])
            if end in ends:
                members.setdefault(end, []).append(i)
    # The most saving one first; what others save only gets less as their members are taken.
    queue = [(-(len(m) - 1) * depth, depth, block) for (depth, block), m in members.items()]
    heapq.heapify(queue)
    left = set(range(len(slices)))
    groups = []
    while queue:
        promised, depth, block = heapq.heappop(queue)
        found = members[depth, block] = [i for i in members[depth, block] if i in left]
        if len(found) < MIN_SHARED_SEQUENCES:
            continue
        saved = -(len(found) - 1) * depth
        if saved > promised:
            heapq.heappush(queue, (saved, depth, block))
            continue
        groups.append(SharedGroup(tuple(found), depth))
        left -= set(found)
    return groups


def order_sequences(slices: Sequence[SequenceSlice], groups: Sequence[SharedGroup]) -> list[int]:
    """The packing order: by shared group, then decode before prefill, then by context length."""
    group_of = {i: g for g, group in enumerate(groups) for i in group.members}
    return sorted(
        range(len(slices)),
        key=lambda i: (group_of.get(i, len(groups)), slices[i].num_queries > 1, slices[i].num_keys),
    )


def plan_attention(
    slices: Sequence[SequenceSlice],
    groups: Sequence[SharedGroup],
    *,
    kv_block_size: int,
    key_bytes: int,
    window: int | None = None,
) -> AttentionPlan:
    """The items for sequences already in packing order.

    groups: shared groups over these indices; ignored under a sliding window, which ends before the prefix.
    key_bytes: bytes of one token's K in one layer.
    """
    starts = np.concatenate([[0], np.cumsum([s.num_queries for s in slices])]).tolist()
    skip = [0] * len(slices)  # leading blocks covered by a shared item
    shared = []
    for group in groups if window is None else ():
        first, last = group.members[0], group.members[-1]
        assert group.members == tuple(range(first, last + 1)), "members must be contiguous in packing order"
        for i in group.members:
            skip[i] = group.num_blocks
        shared.append(SharedItem(starts[first], starts[last + 1], slices[first].blocks[: group.num_blocks]))

    prefill, decode = [], []
    pending = _Pending()
    for i, s in enumerate(slices):
        used = -(-s.num_keys // kv_block_size)
        if s.num_queries > 1:
            low = skip[i] if window is None else max(0, s.num_cached - window + 1) // kv_block_size
            prefill.append(
                PrefillItem(starts[i], starts[i + 1], s.blocks[low:used], s.num_cached - low * kv_block_size, window)
            )
            continue
        low = skip[i] if window is None else max(0, s.num_keys - window) // kv_block_size
        if pending.members and not pending.takes(starts[i], used - low, kv_block_size * key_bytes):
            decode.append(_decode_group(pending, slices, kv_block_size, window))
            pending = _Pending()
        pending.add(starts[i], i, low, used)
    if pending.members:
        decode.append(_decode_group(pending, slices, kv_block_size, window))
    return AttentionPlan(tuple(shared), tuple(decode), tuple(prefill))


@dataclass
class _Pending:
    """A decode group in the making. members: (index of the sequence, its first and last block that are read)."""

    start: int = 0
    most: int = 0  # blocks of a member
    total: int = 0
    members: list[tuple[int, int, int]] = field(default_factory=list)

    def takes(self, start: int, blocks: int, block_bytes: int) -> bool:
        padded = max(self.most, blocks) * (len(self.members) + 1)
        full = padded * block_bytes > _GROUP_BYTES or padded > 1.25 * (self.total + blocks) + 4
        return start == self.start + len(self.members) and not full

    def add(self, start: int, index: int, low: int, used: int) -> None:
        if not self.members:
            self.start = start
        self.members.append((index, low, used))
        self.most, self.total = max(self.most, used - low), self.total + used - low


def _decode_group(
    pending: _Pending, slices: Sequence[SequenceSlice], kv_block_size: int, window: int | None
) -> DecodeGroup:
    count = len(pending.members)
    blocks = np.zeros((count, pending.most), dtype=np.int32)
    num_keys = np.empty(count, dtype=np.int64)
    first_key = np.zeros(count, dtype=np.int64)
    for row, (i, low, used) in enumerate(pending.members):
        blocks[row, : used - low] = slices[i].blocks[low:used]
        num_keys[row] = slices[i].num_keys - low * kv_block_size
        if window is not None:
            first_key[row] = max(0, slices[i].num_keys - window - low * kv_block_size)
    return DecodeGroup(pending.start, pending.start + count, blocks, num_keys, first_key)
