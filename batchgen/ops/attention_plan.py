"""The plan of a sweep's attention: the sweep's tokens and their KV blocks, cut into work items. No torch here.

The packed tokens of a sweep are ordered so that every item has a contiguous range of them. A token's item has the keys
that it attends to. If many sequences share a prompt prefix, a `SharedItem` has the keys of the prefix, once for all of
them, and each token's own item has the remaining keys. The results of both items are merged by their log-sum-exp.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

# A decode group's gathered K or V: enough work for an efficient product, little enough to stay in cache.
_GROUP_BYTES = 2 << 20
ALL_KEYS = 1 << 30  # more keys than any token sees
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
class SweepTables:
    """The parts of all sequences in a sweep, as arrays: one `SequenceSlice` after the other.

    Attributes:
        num_queries: Number of each sequence's tokens in the sweep, int64 [n].
        num_cached: Number of earlier tokens of each sequence, int64 [n].
        num_blocks: Length of each sequence's block table, int64 [n].
        blocks: Block tables, one after the other, int32.
    """

    num_queries: np.ndarray
    num_cached: np.ndarray
    num_blocks: np.ndarray
    blocks: np.ndarray

    @classmethod
    def of(cls, slices: Sequence[SequenceSlice]) -> SweepTables:
        """The tables of sequences in their order."""
        return cls(
            np.array([s.num_queries for s in slices], np.int64),
            np.array([s.num_cached for s in slices], np.int64),
            np.array([len(s.blocks) for s in slices], np.int64),
            np.concatenate([np.zeros(0, np.int32), *(s.blocks.astype(np.int32, copy=False) for s in slices)]),
        )

    def __len__(self) -> int:
        return len(self.num_queries)

    @cached_property
    def num_keys(self) -> np.ndarray:
        """Number of tokens of each sequence after the sweep, int64 [n]."""
        return self.num_cached + self.num_queries

    @cached_property
    def starts(self) -> np.ndarray:
        """First packed token of each sequence, and then the number of all tokens, int64 [n + 1]."""
        return _starts(self.num_queries)

    @cached_property
    def tables(self) -> np.ndarray:
        """Place in `blocks` at which each sequence's block table begins, and then their length, int64 [n + 1]."""
        return _starts(self.num_blocks)

    @cached_property
    def positions(self) -> np.ndarray:
        """Position of each packed token in its sequence, int64 [tokens]."""
        first = self.num_cached - self.starts[:-1]
        return np.arange(self.starts[-1]) + first.repeat(self.num_queries)

    def slots(self, kv_block_size: int) -> np.ndarray:
        """Slot of each packed token's KV: block * kv_block_size + offset, int64 [tokens]."""
        block, offset = np.divmod(self.positions, kv_block_size)
        place = self.tables[:-1].repeat(self.num_queries) + block
        return self.blocks[place].astype(np.int64) * kv_block_size + offset

    def in_order(self, order: np.ndarray) -> SweepTables:
        """The tables of the same sequences in another order, given as indices."""
        num_blocks = self.num_blocks[order]
        starts = _starts(num_blocks)
        places = np.arange(starts[-1]) + np.repeat(self.tables[order] - starts[:-1], num_blocks)
        return SweepTables(self.num_queries[order], self.num_cached[order], num_blocks, self.blocks[places])


def _starts(counts: np.ndarray) -> np.ndarray:
    """The sums of the counts before each one, and then of all, int64 [n + 1]."""
    starts = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=starts[1:])
    return starts


@dataclass(frozen=True)
class DecodeGroup:
    """Tokens [start, stop) of a sweep, each the only token of its sequence.

    Attributes:
        start, stop: Range of the packed tokens.
        blocks: KV blocks of each sequence, int32 [sequences, blocks], of contexts of similar length.
        num_keys, first_key: Sequence i attends to keys first_key[i] <= key < num_keys[i] of its blocks.
    """

    start: int
    stop: int
    blocks: np.ndarray
    num_keys: np.ndarray
    first_key: np.ndarray


@dataclass(frozen=True)
class SequenceItems:
    """An item for each of several sequences, as arrays, whatever they have in common.

    Attributes:
        start: First packed token of each sequence, int64 [n].
        num_tokens: Number of its tokens, int64 [n].
        query_offset: Key of its first token, counted from its first block. Token i attends to keys up to query_offset +
            i + ahead. int64 [n].
        first_key: First key within the window of its first token, counted in the same way, int64 [n].
        places: Place of its first block in `blocks`, int64 [n].
        blocks: KV blocks, int32.
        window: Sliding window: number of keys up to its own that a token attends to. None: all.
        ahead: Number of keys after its own that a token attends to, as far as there are any; 0: attention is causal.
    """

    start: np.ndarray
    num_tokens: np.ndarray
    query_offset: np.ndarray
    first_key: np.ndarray
    places: np.ndarray
    blocks: np.ndarray
    window: int | None = None
    ahead: int = 0

    @classmethod
    def of_one(cls, start: int, num_tokens: int, blocks: np.ndarray, query_offset: int = 0) -> SequenceItems:
        """The item of one sequence in a layer without a sliding window, whose blocks are all of `blocks`."""
        first = np.zeros(1, np.int64)
        return cls(first + start, first + num_tokens, first + query_offset, first, first, blocks)


@dataclass(frozen=True)
class SharedItem:
    """Tokens [start, stop) of several sequences with a shared prefix, which all attend to every key of `blocks`."""

    start: int
    stop: int
    blocks: np.ndarray


@dataclass(frozen=True)
class PageChoice:
    """The sequences of a sweep that choose pages, and the pages that become complete in the sweep.

    Attributes:
        tokens: Packed token of each sequence that chooses, int64 [n].
        starts: First place of each sequence in `blocks`, and then their length, int64 [n + 1].
        blocks: All KV blocks of each sequence, one table after the other, int32.
        summaries: The number of each block's summary, int32.
        num_pages: Pages that each sequence attends to, fewer than it has, int64 [n].
        num_keys: Keys in these pages, int64 [n].
        complete_blocks: KV blocks that are complete after the sweep, and were not before, int64.
        complete_summaries: The numbers of their summaries, int64.
    """

    tokens: np.ndarray
    starts: np.ndarray
    blocks: np.ndarray
    summaries: np.ndarray
    num_pages: np.ndarray
    num_keys: np.ndarray
    complete_blocks: np.ndarray
    complete_summaries: np.ndarray

    @property
    def most_pages(self) -> int:
        """Pages of the sequence that attends to the most."""
        return int(self.num_pages.max(initial=1))


@dataclass(frozen=True)
class AttentionPlan:
    """The work items of a sweep's attention, by kind.

    Attributes:
        shared: Shared prefixes.
        decode: Groups of sequences with one token each.
        pages: Sequences with one token that attend to chosen pages, and are in no group or item; None: no layer that
            the plan is for chooses pages.
        sequences: All other sequences: for a CPU those with several tokens, for a GPU, in place of `decode`, those with
            one token too; None: there are none.
    """

    shared: tuple[SharedItem, ...]
    decode: tuple[DecodeGroup, ...] = ()
    pages: PageChoice | None = None
    sequences: SequenceItems | None = None


@dataclass(frozen=True)
class SharedGroup:
    """Sequences with a shared prefix.

    Attributes:
        members: Indices of the sequences.
        num_blocks: Number of KV blocks of the prefix; the block tables of all members begin with the same blocks.
    """

    members: tuple[int, ...]
    num_blocks: int


def find_shared_groups(tables: SweepTables, matched_blocks: np.ndarray, kv_block_size: int) -> list[SharedGroup]:
    """Find groups of sequences with a shared prefix that is long enough to be attended to once for all of them.

    A block belongs to one prefix. So sequences with the same block in the same place have the same prefix up to there.
    Prefixes are only compared at the ends of prefix cache matches.

    Args:
        tables: Sequences of the sweep.
        matched_blocks: For each sequence, the number of leading blocks that it took from the prefix cache, int64.
        kv_block_size: Number of tokens in a KV block.

    Returns:
        Groups without common members. The group that saves the most reads of blocks is first.
    """
    sharing = np.flatnonzero(matched_blocks * kv_block_size >= MIN_SHARED_TOKENS)
    if not len(sharing):
        return []
    last = tables.blocks[tables.tables[sharing] + matched_blocks[sharing] - 1]
    ends = set(zip(matched_blocks[sharing].tolist(), last.tolist(), strict=True))
    # Every query of a member must come after the shared keys.
    reach = np.minimum(tables.num_blocks, tables.num_cached // kv_block_size)
    members: dict[tuple[int, int], list[int]] = {}
    for depth in {n for n, _ in ends}:
        candidates = np.flatnonzero(reach >= depth)
        blocks = tables.blocks[tables.tables[candidates] + depth - 1]
        for i, block in zip(candidates.tolist(), blocks.tolist(), strict=True):
            if (depth, block) in ends:
                members.setdefault((depth, block), []).append(i)
    # The most saving one first; what others save only gets less as their members are taken.
    queue = [(-(len(m) - 1) * depth, depth, block) for (depth, block), m in members.items()]
    heapq.heapify(queue)
    free = set(range(len(tables)))
    groups = []
    while queue:
        promised, depth, block = heapq.heappop(queue)
        sharers = members[depth, block] = [i for i in members[depth, block] if i in free]
        if len(sharers) < MIN_SHARED_SEQUENCES:
            continue
        saved = -(len(sharers) - 1) * depth
        if saved > promised:
            heapq.heappush(queue, (saved, depth, block))
            continue
        groups.append(SharedGroup(tuple(sharers), depth))
        free -= set(sharers)
    return groups


def order_sequences(num_queries: np.ndarray, num_keys: np.ndarray, groups: Sequence[SharedGroup]) -> np.ndarray:
    """The order in which the sequences of a sweep are packed, as indices, int64 [n].

    Members of a shared group are neighbours. Within a group, decode precedes prefill, and short contexts precede long
    ones.

    Args:
        num_queries: Number of each sequence's tokens in the sweep, int64 [n].
        num_keys: Number of tokens of each sequence after the sweep, int64 [n].
        groups: Sequences with a shared prefix.
    """
    if not groups:
        by_kind_and_length: np.ndarray = num_keys + (num_queries > 1) * (num_keys.max(initial=0) + 1)
        return by_kind_and_length.argsort(kind="stable")
    group_of = np.full(len(num_keys), len(groups))
    for g, group in enumerate(groups):
        group_of[list(group.members)] = g
    return np.lexsort((num_keys, num_queries > 1, group_of))


def plan_attention(
    tables: SweepTables,
    groups: Sequence[SharedGroup],
    *,
    kv_block_size: int,
    key_bytes: int | None,
    window: int | None = None,
    left_out: np.ndarray | None = None,
    causal: bool = True,
) -> AttentionPlan:
    """The attention plan of sequences that are in packing order (`order_sequences`).

    Args:
        tables: Sequences of the sweep, in packing order.
        groups: Shared groups, with indices in packing order. They are ignored if there is a sliding window.
        kv_block_size: Number of tokens in a KV block.
        key_bytes: Bytes of one token's keys in one layer; None: a GPU attends (`AttentionPlan.sequences`).
        window: Sliding window, in tokens; None: all keys.
        left_out: For each sequence, whether it is left out of the plan, bool [n]; such a sequence has one token and is
            in no group. None: none is.
        causal: False where tokens attend to later ones too, as many as to earlier ones with a sliding window.
    """
    starts, num_keys, decodes = tables.starts, tables.num_keys, tables.num_queries == 1
    skipped = np.zeros(len(tables), np.int64)  # leading blocks that a shared item has, or no token sees
    shared = []
    for group in groups if window is None else ():
        first, last = group.members[0], group.members[-1]
        assert group.members == tuple(range(first, last + 1)), "members must be contiguous in packing order"
        skipped[first : last + 1] = group.num_blocks
        begin = tables.tables[first]
        prefix = tables.blocks[begin : begin + group.num_blocks]
        shared.append(SharedItem(int(starts[first]), int(starts[last + 1]), prefix))
    first_seen = np.zeros(len(tables), np.int64)
    if window is not None:
        first_seen = np.maximum(0, tables.num_cached - window + 1)
        skipped = first_seen // kv_block_size
    cut = _Cut(tables, skipped, -(-num_keys // kv_block_size), first_seen - skipped * kv_block_size, kv_block_size)
    ahead = 0 if causal else ALL_KEYS if window is None else window - 1
    if key_bytes is None:
        members = slice(None) if left_out is None else ~left_out
        return AttentionPlan(tuple(shared), sequences=cut.items(members, window, ahead))
    several = np.flatnonzero(~decodes)
    sequences = cut.items(several, window, ahead) if len(several) else None
    taken = decodes if left_out is None else decodes & ~left_out
    similar = _decode_ranges(starts[:-1], cut.num_used, taken, kv_block_size * key_bytes)
    decode = [cut.decode_group(members, window is not None) for members in similar]
    return AttentionPlan(tuple(shared), tuple(decode), sequences=sequences)


def _decode_ranges(
    starts: np.ndarray, num_used: np.ndarray, decodes: np.ndarray, block_bytes: int
) -> Iterator[np.ndarray]:
    """Cut the sequences with one token into groups of neighbours, whose padded block tables are not much too long.

    Args:
        starts: First packed token of each sequence.
        num_used: Number of blocks that each sequence reads.
        decodes: Whether each sequence has one token.
        block_bytes: Bytes of the keys of a block.

    Yields:
        The sequences of each group, as indices.
    """
    indices = np.flatnonzero(decodes)
    if not len(indices):
        return
    counts, tokens = num_used[indices].tolist(), starts[indices].tolist()
    begin, most, total = 0, counts[0], 0
    for place, (count, token) in enumerate(zip(counts, tokens, strict=True)):
        size = place - begin
        widest = count if count > most else most
        padded = widest * (size + 1)
        full = padded * block_bytes > _GROUP_BYTES or padded > 1.25 * (total + count) + 4
        if size and (full or token != tokens[begin] + size):
            yield indices[begin:place]
            begin, most, total = place, count, count
        else:
            most, total = widest, total + count
    yield indices[begin:]


@dataclass(frozen=True)
class _Cut:
    """The blocks that each sequence's own item reads.

    Attributes:
        tables: Sequences of the sweep.
        skipped: Leading blocks that it does not read.
        used: Block after the last one that it reads.
        first_key: First key that its first token sees, counted from the first block that it reads.
        kv_block_size: Number of tokens in a KV block.
    """

    tables: SweepTables
    skipped: np.ndarray
    used: np.ndarray
    first_key: np.ndarray
    kv_block_size: int

    @cached_property
    def num_used(self) -> np.ndarray:
        return self.used - self.skipped

    @property
    def query_offset(self) -> np.ndarray:
        """Key of each sequence's first token, counted from the first block that it reads."""
        return self.tables.num_cached - self.skipped * self.kv_block_size

    def items(self, members: slice | np.ndarray, window: int | None, ahead: int) -> SequenceItems:
        """The items of some sequences, given as a mask or as indices, or of all."""
        tables = self.tables
        return SequenceItems(
            start=tables.starts[:-1][members],
            num_tokens=tables.num_queries[members],
            query_offset=self.query_offset[members],
            first_key=self.first_key[members],
            places=(tables.tables[:-1] + self.skipped)[members],
            blocks=tables.blocks,
            window=window,
            ahead=ahead,
        )

    def decode_group(self, members: np.ndarray, windowed: bool) -> DecodeGroup:
        """The group of some sequences, given as indices of neighbours."""
        tables, skipped = self.tables, self.skipped[members]
        first = tables.tables[members] + skipped
        first_key = self.first_key[members] if windowed else np.zeros(len(members), np.int64)
        start = int(tables.starts[members[0]])
        num_keys = tables.num_keys[members] - skipped * self.kv_block_size
        counts = self.num_used[members]
        columns = np.arange(counts.max(initial=0))
        exists = columns < counts[:, None]
        blocks = np.where(exists, tables.blocks[np.where(exists, first[:, None] + columns, 0)], np.int32(0))
        return DecodeGroup(start, start + len(members), blocks, num_keys, first_key)
