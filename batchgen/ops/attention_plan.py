"""The plan of a sweep's attention: the sweep's tokens and their KV blocks, cut into work items. No torch here.

The packed tokens of a sweep are ordered so that every item has a contiguous range of them. A token's item has the keys
that it attends to. If many sequences share a prompt prefix, a `SharedItem` has the keys of the prefix, once for all of
them, and each token's own item has the remaining keys. The results of both items are merged by their log-sum-exp.
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
    """One sequence's part of a sweep.

    Attributes:
        num_queries: Number of the sequence's tokens in this sweep.
        num_cached: Number of earlier tokens, whose keys and values are in the KV.
        blocks: Block table of the sequence, int32 [num_blocks], with blocks for all these tokens.
    """

    num_queries: int
    num_cached: int
    blocks: np.ndarray

    @property
    def num_keys(self) -> int:
        return self.num_cached + self.num_queries


@dataclass(frozen=True)
class DecodeGroup:
    """Tokens [start, stop) of a sweep, each the only token of its sequence, with contexts of similar length.

    Attributes:
        start, stop: Range of the packed tokens.
        blocks: KV blocks of each sequence, int32 [sequences, blocks].
        num_keys, first_key: Sequence i attends to keys first_key[i] <= key < num_keys[i] of its blocks.
    """

    start: int
    stop: int
    blocks: np.ndarray
    num_keys: np.ndarray
    first_key: np.ndarray


@dataclass(frozen=True)
class PrefillItem:
    """Several tokens [start, stop) of one sequence.

    Attributes:
        start, stop: Range of the packed tokens.
        blocks: KV blocks of the sequence, int32 [blocks].
        query_offset: Key of the first token in `blocks`. Token i attends to keys up to query_offset + i.
        window: Sliding window: number of keys that a token attends to, its own included. None: all.
    """

    start: int
    stop: int
    blocks: np.ndarray
    query_offset: int
    window: int | None = None


@dataclass(frozen=True)
class SharedItem:
    """Tokens [start, stop) of several sequences with a shared prefix, which all attend to every key of `blocks`."""

    start: int
    stop: int
    blocks: np.ndarray


@dataclass(frozen=True)
class AttentionPlan:
    """The work items of a sweep's attention, by kind.

    Attributes:
        shared: Shared prefixes.
        decode: Groups of sequences with one token each.
        prefill: Sequences with several tokens.
    """

    shared: tuple[SharedItem, ...]
    decode: tuple[DecodeGroup, ...]
    prefill: tuple[PrefillItem, ...]


@dataclass(frozen=True)
class SharedGroup:
    """Sequences with a shared prefix.

    Attributes:
        members: Indices of the sequences.
        num_blocks: Number of KV blocks of the prefix; the block tables of all members begin with the same blocks.
    """

    members: tuple[int, ...]
    num_blocks: int


def find_shared_groups(
    slices: Sequence[SequenceSlice], matched_blocks: Sequence[int], kv_block_size: int
) -> list[SharedGroup]:
    """Find groups of sequences with a shared prefix that is long enough to be attended to once for all of them.

    A block belongs to one prefix. So sequences with the same block in the same place have the same prefix up to there.
    Prefixes are only compared at the ends of prefix cache matches.

    Args:
        slices: Sequences of the sweep.
        matched_blocks: For each sequence, the number of leading blocks that it took from the prefix cache.
        kv_block_size: Number of tokens in a KV block.

    Returns:
        Groups without common members. The group that saves the most reads of blocks is first.
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
    """The order in which the sequences of a sweep are packed, as indices.

    Members of a shared group are neighbours. Within a group, decode precedes prefill, and short contexts precede long
    ones.
    """
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
    """The attention plan of sequences that are in packing order (`order_sequences`).

    Args:
        slices: Sequences of the sweep, in packing order.
        groups: Shared groups, with indices in packing order. They are ignored if there is a sliding window.
        kv_block_size: Number of tokens in a KV block.
        key_bytes: Bytes of one token's keys in one layer.
        window: Sliding window, in tokens; None: all keys.
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
    """A decode group to which sequences are being added.

    Attributes:
        start: First packed token of the group.
        most: Largest number of blocks of a member.
        total: Number of blocks of all members.
        members: Members: index of the sequence, first block to read, and the block after the last one to read.
    """

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
