"""One micro-batch's packed input: token ids, positions, where its KV is and goes, and the attention plans, as arrays.

No torch.
"""

from __future__ import annotations

from collections.abc import Sequence as List
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from batchgen.core.kv_placement import KVPlacement
from batchgen.ops.attention_plan import (
    AttentionPlan,
    SequenceSlice,
    SharedGroup,
    find_shared_groups,
    order_sequences,
    plan_attention,
)
from batchgen.schedule.extents import runs_of
from batchgen.schedule.micro_batches import placement_in_sweep
from batchgen.schedule.scheduled_sequence import ScheduledSequence
from batchgen.schedule.sequence import PENDING, LogitsRow, Sequence, in_flight
from batchgen.schedule.step_graph import BatchFlow
from batchgen.schedule.window_pool import NULL_BLOCK

# The order of the segments of a batch.
SEGMENTS = (KVPlacement.DEVICE, KVPlacement.STREAMED, KVPlacement.CPU, KVPlacement.DEFERRED)


@dataclass(frozen=True)
class Segment:
    """Tokens [start, stop) of the batch, of sequences whose KV attention finds in the same memory.

    Attributes:
        placement: placement that attention sees (`KVPlacement.in_sweep`).
        start: its first token.
        stop: token after its last one.
        slots: slots of each token's new KV by sliding window (None: full attention), int64 [tokens]; a slot is
            block * kv_block_size + offset.
        plans: attention plan by sliding window, its tokens counted from `start`.
    """

    placement: KVPlacement
    start: int
    stop: int
    slots: dict[int | None, np.ndarray]
    plans: dict[int | None, AttentionPlan]


@dataclass(frozen=True)
class Run:
    """`count` neighbouring blocks: from `block` of the disk's pool, from `staged` of the staging buffer."""

    block: int
    staged: int
    count: int


@dataclass(frozen=True)
class Staging:
    """The KV that passes through the staging buffer in a layer. First blocks are those that come from the host's pool.

    Attributes:
        num_blocks: staging blocks in use.
        host_blocks: blocks of the host's pool to bring to staging blocks 0, 1, ..., int64.
        new_slots: slots in staging of new tokens whose KV goes to the host's pool, int64.
        host_slots: their slots there, int64.
        reads: runs of blocks on disk that hold KV of earlier sweeps.
        writes: runs of blocks with new tokens that go to disk.
        disk_start: first staging block of sequences whose KV is on disk.
        disk_stop: staging block after their last one.
    """

    num_blocks: int
    host_blocks: np.ndarray
    new_slots: np.ndarray
    host_slots: np.ndarray
    reads: tuple[Run, ...]
    writes: tuple[Run, ...]
    disk_start: int
    disk_stop: int


@dataclass(frozen=True)
class PackedBatch:
    """Tokens of all scheduled sequences, one after the other, without padding, by segment.

    Attributes:
        token_ids: int64 [tokens].
        positions: int64 [tokens].
        segments: its tokens by placement, in the order of `SEGMENTS`.
        staging: KV that passes, by sliding window; None: nothing passes.
        logits_rows: rows of logits that are made.
        logits_indices: token of each of them, int64.
        pending_rows: tokens that only the device knows, int64.
        pending_slots: place of each in the device's table of tokens, int64.
        deferred_rows: rows of logits that the tokens of the deferred segment are for; not made in this sweep.
        exchange_slots: place of each in the tables in which queries and attention are exchanged with the CPU, int64.
        in_place: streamed segment in layers whose KV of it lies on the device: slots and plans of its pool.
    """

    token_ids: np.ndarray
    positions: np.ndarray
    segments: tuple[Segment, ...]
    staging: dict[int | None, Staging] | None
    logits_rows: list[LogitsRow]
    logits_indices: np.ndarray
    pending_rows: np.ndarray
    pending_slots: np.ndarray
    deferred_rows: list[LogitsRow]
    exchange_slots: np.ndarray
    in_place: Segment | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def flow(self, hidden_on_host: bool = False) -> BatchFlow:
        """The kinds of data that the batch moves."""
        staging = list((self.staging or {}).values())
        return BatchFlow(
            placements=frozenset(s.placement for s in self.segments),
            history=any(len(s.host_blocks) or s.reads for s in staging),
            stored=any(len(s.new_slots) for s in staging),
            disk_read=any(s.reads for s in staging),
            disk_write=any(s.writes for s in staging),
            hidden_on_host=hidden_on_host,
            samples=bool(self.logits_rows),
        )


def pack(
    batch: List[ScheduledSequence],
    *,
    kv_block_size: int,
    key_bytes: int,
    windows: frozenset[int | None],
    compute_tier: str = "cpu",
    in_place: bool = False,
) -> PackedBatch:
    """Packs one micro-batch.

    key_bytes: bytes of one token's K in one layer. compute_tier: the tier that is the compute device's own memory.
    in_place: whether in some layers KV of staged sequences lies on the compute device.
    """
    by_placement: dict[KVPlacement, list[ScheduledSequence]] = {}
    for scheduled in batch:
        by_placement.setdefault(placement_in_sweep(scheduled, compute_tier), []).append(scheduled)
    staged = _stage_all(by_placement.get(KVPlacement.STREAMED, []), windows, kv_block_size)
    plans_of = partial(_plans, kv_block_size=kv_block_size, key_bytes=key_bytes)
    rows, segments = _Rows(), []
    on_device: Segment | None = None
    for placement in SEGMENTS:
        if placement not in by_placement:
            continue
        streamed = placement is KVPlacement.STREAMED
        members, tables = by_placement[placement], staged.tables if streamed else None
        slices = _slices(members, False, tables)
        groups = find_shared_groups(slices, [s.sequence.num_matched_blocks for s in members], kv_block_size)
        order = order_sequences(slices, groups)
        index_of = {i: index for index, i in enumerate(order)}
        members, slices = [members[i] for i in order], [slices[i] for i in order]
        groups = [SharedGroup(tuple(sorted(index_of[i] for i in g.members)), g.num_blocks) for g in groups]
        start = rows.count
        for scheduled in members:
            rows.add(scheduled)
        by_window = _by_window(members, slices, windows, tables)
        own = _slots(by_window, kv_block_size), plans_of(by_window, groups)
        segments.append(Segment(placement, start, rows.count, *own))
        if streamed and in_place:
            by_window = _by_window(members, _slices(members, False, None), windows, None)
            on_device = Segment(
                placement, start, rows.count, _slots(by_window, kv_block_size), plans_of(by_window, groups)
            )
    return replace(rows.packed(tuple(segments), staged.by_window), in_place=on_device)


Tables = dict[bool, dict[Sequence, np.ndarray]]  # of layers with a sliding window, or without -> block tables
ByWindow = dict[int | None, list[SequenceSlice]]  # equal values are one


def _slices(members: List[ScheduledSequence], windowed: bool, tables: Tables | None) -> list[SequenceSlice]:
    """tables: in the staging buffer; None: in their pool."""
    return [
        SequenceSlice(
            s.num_tokens,
            s.sequence.num_computed,
            np.array(s.sequence.table(windowed), dtype=np.int32) if tables is None else tables[windowed][s.sequence],
        )
        for s in members
    ]


def _by_window(
    members: List[ScheduledSequence], slices: list[SequenceSlice], windows: frozenset[int | None], tables: Tables | None
) -> ByWindow:
    """slices: in layers without a sliding window."""
    windowed = _slices(members, True, tables) if _gives_back(members) else slices
    return {window: slices if window is None else windowed for window in windows}


def _gives_back(members: List[ScheduledSequence]) -> bool:
    """Tell whether layers with a sliding window have blocks of their own."""
    return any(s.sequence.window_table is not None for s in members)


def _slots(by_window: ByWindow, kv_block_size: int) -> dict[int | None, np.ndarray]:
    """Slots that new KV goes to, by sliding window."""
    made = {id(slices): _slots_of(slices, kv_block_size) for slices in by_window.values()}
    return {window: made[id(slices)] for window, slices in by_window.items()}


def _slots_of(slices: List[SequenceSlice], kv_block_size: int) -> np.ndarray:
    slots: list[int] = []
    for part in slices:
        first = part.num_cached
        if part.num_queries == 1:  # most sequences decode: no small arrays for them
            slots.append(int(part.blocks[first // kv_block_size]) * kv_block_size + first % kv_block_size)
        else:
            span = np.arange(first, part.num_keys)
            slots += (
                part.blocks[span // kv_block_size].astype(np.int64) * kv_block_size + span % kv_block_size
            ).tolist()
    return np.array(slots, dtype=np.int64)


def _plans(
    by_window: ByWindow, groups: List[SharedGroup], *, kv_block_size: int, key_bytes: int
) -> dict[int | None, AttentionPlan]:
    return {
        window: plan_attention(slices, groups, kv_block_size=kv_block_size, key_bytes=key_bytes, window=window)
        for window, slices in by_window.items()
    }


def empty_batch() -> PackedBatch:
    """A micro-batch without tokens: of a sweep in which only sequences are computed whose attention was deferred."""
    return _Rows().packed((), None)


class _Rows:
    """The rows of a batch while it is packed: a token each."""

    def __init__(self) -> None:
        self._token_ids: list[int] = []
        self._positions: list[int] = []
        self._logits_rows: list[LogitsRow] = []
        self._logits_indices: list[int] = []
        self._pending_rows: list[int] = []
        self._pending_slots: list[int] = []
        self._deferred_rows: list[LogitsRow] = []
        self._exchange_slots: list[int] = []

    @property
    def count(self) -> int:
        return len(self._token_ids)

    def add(self, scheduled: ScheduledSequence) -> None:
        """The tokens of one sequence."""
        sequence, row = scheduled.sequence, self.count
        first, stop = sequence.num_computed, scheduled.num_keys
        self._token_ids.extend(sequence.tokens[first:stop])
        self._positions.extend(range(first, stop))
        if self._token_ids[-1] == PENDING:
            self._pending_rows.append(self.count - 1)
            self._pending_slots.append(in_flight(sequence.token_slot))
        if scheduled.defers:
            self._deferred_rows.append(LogitsRow(sequence, first))
            self._exchange_slots.append(in_flight(sequence.exchange_slot))
        for position in scheduled.logits_positions:
            self._logits_rows.append(LogitsRow(sequence, position))
            self._logits_indices.append(row + position - first)

    def packed(self, segments: tuple[Segment, ...], staging: dict[int | None, Staging] | None) -> PackedBatch:
        return PackedBatch(
            token_ids=np.array(self._token_ids, dtype=np.int64),
            positions=np.array(self._positions, dtype=np.int64),
            segments=segments,
            staging=staging,
            logits_rows=self._logits_rows,
            logits_indices=np.array(self._logits_indices, dtype=np.int64),
            pending_rows=np.array(self._pending_rows, dtype=np.int64),
            pending_slots=np.array(self._pending_slots, dtype=np.int64),
            deferred_rows=self._deferred_rows,
            exchange_slots=np.array(self._exchange_slots, dtype=np.int64),
        )


@dataclass(frozen=True)
class _Staged:
    """tables: in the staging buffer. by_window: what moves, for each sliding window; equal values are one."""

    tables: Tables
    by_window: dict[int | None, Staging] | None


def _stage_all(members: List[ScheduledSequence], windows: frozenset[int | None], kv_block_size: int) -> _Staged:
    if not members:
        return _Staged({}, None)
    tables, stagings = {}, {}
    tables[False], stagings[False] = _stage(members, kv_block_size, windowed=False)
    if _gives_back(members):
        tables[True], stagings[True] = _stage(members, kv_block_size, windowed=True)
    return _Staged(tables, {w: stagings.get(w is not None, stagings[False]) for w in windows})


def _stage(
    members: List[ScheduledSequence], kv_block_size: int, *, windowed: bool
) -> tuple[dict[Sequence, np.ndarray], Staging]:
    """Gives each sequence's blocks a part of the staging buffer: block tables there, and what moves.

    A prefix block that several sequences share comes over once. What has been given back does not come. windowed: in
    layers with a sliding window.
    """
    on_host = [s for s in members if s.sequence.kv_placement is not KVPlacement.DISK]
    on_disk = [s for s in members if s.sequence.kv_placement is KVPlacement.DISK]
    staged_of: dict[int, int] = {}  # host block with history -> staging block
    for s in on_host:
        for block in s.sequence.table(windowed)[: -(-s.sequence.num_computed // kv_block_size)]:
            if block != NULL_BLOCK:
                staged_of.setdefault(block, len(staged_of))
    tables: dict[Sequence, np.ndarray] = {}
    new_slots, host_slots = [], []
    num_blocks = len(staged_of)
    for s in on_host:
        sequence = s.sequence
        used, old = -(-s.num_keys // kv_block_size), -(-sequence.num_computed // kv_block_size)
        own = sequence.table(windowed)
        table = [staged_of.get(b, NULL_BLOCK) for b in own[:old]] + list(range(num_blocks, num_blocks + used - old))
        num_blocks += used - old
        tables[sequence] = np.array(table, dtype=np.int32)
        for position in range(sequence.num_computed, s.num_keys):
            block, offset = divmod(position, kv_block_size)
            new_slots.append(table[block] * kv_block_size + offset)
            host_slots.append(own[block] * kv_block_size + offset)
    disk_start = num_blocks
    reads, writes = [], []
    for s in on_disk:
        sequence = s.sequence
        used, old = -(-s.num_keys // kv_block_size), -(-sequence.num_computed // kv_block_size)
        tables[sequence] = np.arange(num_blocks, num_blocks + used, dtype=np.int32)
        reads += _runs(sequence.block_table[:old], num_blocks)
        dirty = sequence.num_computed // kv_block_size
        writes += _runs(sequence.block_table[dirty:used], num_blocks + dirty)
        num_blocks += used
    staging = Staging(
        num_blocks=num_blocks,
        host_blocks=np.fromiter(staged_of, dtype=np.int64, count=len(staged_of)),
        new_slots=np.array(new_slots, dtype=np.int64),
        host_slots=np.array(host_slots, dtype=np.int64),
        reads=tuple(reads),
        writes=tuple(writes),
        disk_start=disk_start,
        disk_stop=num_blocks,
    )
    return tables, staging


def _runs(blocks: List[int], staged: int) -> list[Run]:
    runs = []
    for first, count in runs_of(blocks):
        runs.append(Run(first, staged, count))
        staged += count
    return runs
