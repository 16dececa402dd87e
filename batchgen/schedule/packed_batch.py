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
from batchgen.schedule.micro_batches import placement_in_sweep
from batchgen.schedule.scheduled_sequence import ScheduledSequence
from batchgen.schedule.sequence import PENDING, LogitsRow, in_flight
from batchgen.schedule.staging import Staging, Tables, has_window_tables, stage
from batchgen.schedule.state_rows import StateRows, StateStaging, rows_in_pool, rows_in_staging, stage_states
from batchgen.schedule.step_graph import BatchFlow

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
        states: state rows of its sequences, in the order of the tokens; None: the model has no state layers.
    """

    placement: KVPlacement
    start: int
    stop: int
    slots: dict[int | None, np.ndarray]
    plans: dict[int | None, AttentionPlan]
    states: StateRows | None = None


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
        state_staging: states that pass; None: none does.
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
    state_staging: StateStaging | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def flow(self, hidden_on_host: bool = False) -> BatchFlow:
        """The kinds of data that the batch moves."""
        staging, states = list((self.staging or {}).values()), self.state_staging
        return BatchFlow(
            placements=frozenset(s.placement for s in self.segments),
            history=any(len(s.host_blocks) or s.reads for s in staging) or bool(states and states.has_history),
            stored=any(len(s.new_slots) for s in staging) or bool(states and len(states.host_targets)),
            disk_read=any(s.reads for s in staging) or bool(states and states.reads),
            disk_write=any(s.writes for s in staging) or bool(states and states.writes),
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
    """Pack one micro-batch.

    Args:
        batch: Its scheduled sequences.
        kv_block_size: Tokens of a KV block.
        key_bytes: Bytes of one token's K in one layer.
        windows: Sliding windows of the model's layers; None: full attention.
        compute_tier: Tier that is the compute device's own memory.
        in_place: Whether in some layers KV of staged sequences lies on the compute device.
    """
    by_placement: dict[KVPlacement, list[ScheduledSequence]] = {}
    for scheduled in batch:
        by_placement.setdefault(placement_in_sweep(scheduled, compute_tier), []).append(scheduled)
    passing = by_placement.get(KVPlacement.STREAMED, [])
    staged, (staged_states, state_staging) = stage(passing, windows, kv_block_size), stage_states(passing)
    plans_of = partial(_plans, kv_block_size=kv_block_size, key_bytes=key_bytes)
    rows, segments = _Rows(), []
    on_device: Segment | None = None
    for placement in SEGMENTS:
        if placement not in by_placement:
            continue
        tables = staged.tables if placement is KVPlacement.STREAMED else None
        members, slices, groups = _in_order(by_placement[placement], tables, kv_block_size)
        start = rows.count
        for scheduled in members:
            rows.add(scheduled)
        by_window = _by_window(members, slices, windows, tables)
        slots = _slots(by_window, kv_block_size)
        is_staged = placement is KVPlacement.STREAMED
        states = rows_in_staging(members, staged_states) if is_staged else rows_in_pool(members)
        segments.append(Segment(placement, start, rows.count, slots, plans_of(by_window, groups), states))
        if in_place and is_staged:
            by_window = _by_window(members, _slices(members, False, None), windows, None)
            slots = _slots(by_window, kv_block_size)
            plans = plans_of(by_window, groups)
            on_device = Segment(placement, start, rows.count, slots, plans, rows_in_pool(members))
    packed = rows.packed(tuple(segments), staged.by_window)
    return replace(packed, in_place=on_device, state_staging=state_staging)


def _in_order(
    members: List[ScheduledSequence], tables: Tables | None, kv_block_size: int
) -> tuple[list[ScheduledSequence], list[SequenceSlice], list[SharedGroup]]:
    """(sequences, slices, groups with a shared prefix) of a segment, in the order that attention takes them."""
    slices = _slices(members, False, tables)
    groups = find_shared_groups(slices, [s.sequence.num_matched_blocks for s in members], kv_block_size)
    order = order_sequences(slices, groups)
    index_of = {i: index for index, i in enumerate(order)}
    groups = [SharedGroup(tuple(sorted(index_of[i] for i in g.members)), g.num_blocks) for g in groups]
    return [members[i] for i in order], [slices[i] for i in order], groups


# Slices of sequences by sliding window, the same list for windows whose layers have the same block tables.
ByWindow = dict[int | None, list[SequenceSlice]]


def _slices(members: List[ScheduledSequence], windowed: bool, tables: Tables | None) -> list[SequenceSlice]:
    """The scheduled tokens of each sequence, with its block table, in some layers.

    Args:
        members: Scheduled sequences.
        windowed: Whether the layers are those with a sliding window.
        tables: Block tables in the staging buffer; None: KV is in its pool.
    """
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
    """The slices of sequences in the layers of each sliding window. slices: those in layers without one."""
    windowed = _slices(members, True, tables) if has_window_tables(members) else slices
    return {window: slices if window is None else windowed for window in windows}


def _slots(by_window: ByWindow, kv_block_size: int) -> dict[int | None, np.ndarray]:
    """Slots that new KV goes to, by sliding window, int64 [tokens]."""
    by_slices = {id(slices): _slots_of(slices, kv_block_size) for slices in by_window.values()}
    return {window: by_slices[id(slices)] for window, slices in by_window.items()}


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
    """A micro-batch without tokens, for a sweep that computes deferred batches alone."""
    return _Rows().packed((), None)


class _Rows:
    """The rows of a batch, a token each, while it is packed."""

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
        """Add the scheduled tokens of one sequence."""
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
