"""One micro-batch's packed input: token ids, positions, where its KV is and goes, and the attention plans, as arrays.

No torch.
"""

from __future__ import annotations

from collections.abc import Sequence as List
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from batchgen.core.attention_budget import ALL, CHOSEN_PAGES, AttentionBudget
from batchgen.core.kv_placement import KVPlacement
from batchgen.ops.attention_items import numbers_within
from batchgen.ops.attention_plan import (
    MIN_SHARED_TOKENS,
    AttentionPlan,
    PageChoice,
    SharedGroup,
    SweepTables,
    find_shared_groups,
    order_sequences,
    plan_attention,
)
from batchgen.ops.page_choice import PageTables, plan_chosen
from batchgen.schedule.micro_batches import by_placement
from batchgen.schedule.page_staging import ChosenStaging, choosers_of, summary_numbers
from batchgen.schedule.scheduled_sequence import ScheduledSequence
from batchgen.schedule.sequence import PENDING, LogitsRow, Sequence, after_drafts, in_flight
from batchgen.schedule.staging import Run, Staging, Tables, has_window_tables, stage, swap_runs
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
        swaps_in: KV blocks that come from the host's pool to the device's, for good.
        swaps_out: KV blocks that come from the device's pool to the host's, for good.
        staged_choice: sequences that choose which of their pages pass through the staging buffer, and the batch's token
            of each; None: none does.
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
    swaps_in: tuple[Run, ...] = ()
    swaps_out: tuple[Run, ...] = ()
    staged_choice: PageChoice | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def flow(self, hidden_on_host: bool = False) -> BatchFlow:
        """The kinds of data that the batch moves."""
        staging, states = list((self.staging or {}).values()), self.state_staging
        return BatchFlow(
            placements=frozenset(s.placement for s in self.segments),
            history=any(len(s.host_blocks) or s.reads_disk for s in staging) or bool(states and states.has_history),
            stored=any(len(s.new_slots) for s in staging) or bool(states and len(states.host_targets)),
            disk_read=any(s.reads_disk for s in staging) or bool(states and states.reads),
            disk_write=any(s.writes for s in staging) or bool(states and states.writes),
            hidden_on_host=hidden_on_host,
            samples=bool(self.logits_rows),
            swaps_in=bool(self.swaps_in),
            swaps_out=bool(self.swaps_out),
            chooses=self.staged_choice is not None,
        )


def pack(
    batch: List[ScheduledSequence],
    *,
    kv_block_size: int,
    key_bytes: int,
    windows: frozenset[int | None],
    compute_tier: str = "cpu",
    in_place: bool = False,
    on_card: bool = False,
    attention_budget: str = ALL,
    host_blocks: int = 0,
    causal: bool = True,
) -> PackedBatch:
    """Pack one micro-batch.

    Args:
        batch: Its scheduled sequences.
        kv_block_size: Tokens of a KV block.
        key_bytes: Bytes of one token's K in one layer.
        windows: Sliding windows of the model's layers; None: full attention; CHOSEN_PAGES: layers that choose pages.
        compute_tier: Tier that is the compute device's own memory.
        in_place: Whether in some layers KV of staged sequences lies on the compute device.
        on_card: Whether the compute device is a GPU, with attention plans of its own.
        attention_budget: Tokens that a decoding token attends to in layers that choose pages.
        host_blocks: Blocks of the host's pool, whose summaries come before those of blocks on disk.
        causal: Whether tokens attend to earlier ones alone.
    """
    budget = AttentionBudget.of(attention_budget) if CHOSEN_PAGES in windows else None
    of_placement = by_placement(batch, compute_tier)
    passing = of_placement.get(KVPlacement.STREAMED, [])
    choosers = choosers_of(passing, budget, kv_block_size)
    staged, (staged_states, state_staging) = stage(passing, windows, kv_block_size, choosers), stage_states(passing)
    staged_choice: PageChoice | None = None
    plans_on = partial(_plans, kv_block_size=kv_block_size, causal=causal)
    rows, segments = _Rows(), []
    on_device: Segment | None = None
    for placement in SEGMENTS:
        if placement not in of_placement:
            continue
        is_staged = placement is KVPlacement.STREAMED
        staging_tables = staged.tables if is_staged else None
        members, tables, groups = _in_order(_Members.of(of_placement[placement]), staging_tables, kv_block_size)
        sequences = members.sequences
        start = rows.count
        rows.add(sequences, tables, defers=placement is KVPlacement.DEFERRED)
        by_window = _by_window(members, tables, windows, staging_tables)
        slots = _slots(by_window, kv_block_size)
        staged_rows = rows_in_staging(sequences, tables.starts, staged_states) if is_staged else None
        states = staged_rows if is_staged else rows_in_pool(sequences, tables.starts)
        attended_on_card = on_card and placement in (KVPlacement.DEVICE, KVPlacement.STREAMED)
        plans_of = partial(plans_on, key_bytes=None if attended_on_card else key_bytes)
        if budget is not None:
            plans_of = partial(plans_of, pages=_page_tables(sequences, tables, budget, host_blocks))
        chooses = budget is not None and is_staged and staged.chosen_tables is not None
        plans = plans_of({w: t for w, t in by_window.items() if not chooses or w != CHOSEN_PAGES}, groups)
        if budget is not None and is_staged and staged.chosen_tables is not None:
            chosen = ChosenStaging(
                sequences, tables, staged.chosen_tables, choosers, budget, kv_block_size, host_blocks
            )
            slots[CHOSEN_PAGES] = chosen.tables.slots(kv_block_size)
            plans[CHOSEN_PAGES] = chosen.plan(groups, None if attended_on_card else key_bytes)
            staged_choice = chosen.choice(start)
        segments.append(Segment(placement, start, rows.count, slots, plans, states))
        if in_place and is_staged:
            by_window = _by_window(members, _tables(members, False, None), windows, None)
            slots = _slots(by_window, kv_block_size)
            plans = plans_of(by_window, groups)
            states = rows_in_pool(sequences, tables.starts)
            on_device = Segment(placement, start, rows.count, slots, plans, states)
    packed = rows.packed(tuple(segments), staged.by_window)
    swaps_in, swaps_out = swap_runs(of_placement) if compute_tier == "gpu" else ((), ())
    return replace(
        packed,
        in_place=on_device,
        state_staging=state_staging,
        swaps_in=swaps_in,
        swaps_out=swaps_out,
        staged_choice=staged_choice,
    )


class _Members(NamedTuple):
    """The scheduled sequences of a segment, with what each sweep asks of every one of them.

    Attributes:
        sequences: The sequences.
        num_tokens: Tokens of each in the sweep, int64.
        num_computed: Tokens of each before, int64.
    """

    sequences: list[Sequence]
    num_tokens: np.ndarray
    num_computed: np.ndarray

    @classmethod
    def of(cls, members: List[ScheduledSequence]) -> _Members:
        sequences, num_tokens = zip(*members, strict=True)
        num_computed = [sequence.num_computed for sequence in sequences]
        return cls(list(sequences), np.array(num_tokens, np.int64), np.array(num_computed, np.int64))

    def in_order(self, order: np.ndarray) -> _Members:
        """These sequences in another order, given as indices."""
        sequences = self.sequences
        return _Members([sequences[i] for i in order.tolist()], self.num_tokens[order], self.num_computed[order])


def _in_order(
    members: _Members, staging_tables: Tables | None, kv_block_size: int
) -> tuple[_Members, SweepTables, list[SharedGroup]]:
    """(sequences, tables, groups with a shared prefix) of a segment, in the order that attention takes them."""
    matched = [sequence.num_matched_blocks for sequence in members.sequences]
    if max(matched, default=0) * kv_block_size < MIN_SHARED_TOKENS:  # so that tables are made in their order at once
        num_keys = members.num_computed + members.num_tokens
        members = members.in_order(order_sequences(members.num_tokens, num_keys, []))
        return members, _tables(members, False, staging_tables), []
    tables = _tables(members, False, staging_tables)
    groups = find_shared_groups(tables, np.array(matched, np.int64), kv_block_size)
    order = order_sequences(tables.num_queries, tables.num_keys, groups)
    index_of = {i: index for index, i in enumerate(order.tolist())}
    groups = [SharedGroup(tuple(sorted(index_of[i] for i in g.members)), g.num_blocks) for g in groups]
    return members.in_order(order), tables.in_order(order), groups


# Tables of sequences by sliding window, the same ones for windows whose layers have the same block tables.
ByWindow = dict[int | None, SweepTables]


def _tables(members: _Members, windowed: bool, staging_tables: Tables | None) -> SweepTables:
    """The scheduled tokens of each sequence, with its block table, in some layers.

    Args:
        members: Scheduled sequences.
        windowed: Whether the layers are those with a sliding window.
        staging_tables: Block tables in the staging buffer; None: KV is in its pool.
    """
    tables: List[Any]  # each with int32 numbers in its buffer
    if staging_tables is not None:
        tables = [staging_tables[windowed][sequence] for sequence in members.sequences]
    elif windowed:
        tables = [sequence.table(windowed) for sequence in members.sequences]
    else:
        tables = [sequence.block_table for sequence in members.sequences]
    num_blocks = np.fromiter(map(len, tables), np.int64, len(tables))
    blocks = np.frombuffer(bytearray().join(tables), np.int32)
    return SweepTables(members.num_tokens, members.num_computed, num_blocks, blocks)


def _by_window(
    members: _Members,
    tables: SweepTables,
    windows: frozenset[int | None],
    staging_tables: Tables | None,
) -> ByWindow:
    """The tables of sequences in the layers of each sliding window. tables: those in layers without one.

    Layers that choose pages have no window.
    """
    has_windows = any(windows) and has_window_tables(members.sequences)
    windowed = _tables(members, True, staging_tables) if has_windows else tables
    return {window: windowed if window else tables for window in windows}


def _slots(by_window: ByWindow, kv_block_size: int) -> dict[int | None, np.ndarray]:
    """Slots that new KV goes to, by sliding window, int64 [tokens]."""
    slots_of = {id(tables): tables.slots(kv_block_size) for tables in by_window.values()}
    return {window: slots_of[id(tables)] for window, tables in by_window.items()}


def _plans(
    by_window: ByWindow,
    groups: List[SharedGroup],
    *,
    kv_block_size: int,
    key_bytes: int | None,
    causal: bool,
    pages: PageTables | None = None,
) -> dict[int | None, AttentionPlan]:
    dense = partial(plan_attention, kv_block_size=kv_block_size, key_bytes=key_bytes, causal=causal)
    chosen = partial(plan_chosen, kv_block_size=kv_block_size, key_bytes=key_bytes)
    return {
        window: dense(tables, groups, window=window)
        if pages is None or window != CHOSEN_PAGES
        else chosen(tables, pages, groups)
        for window, tables in by_window.items()
    }


def _page_tables(
    sequences: List[Sequence], tables: SweepTables, budget: AttentionBudget, host_blocks: int
) -> PageTables:
    """The sequences as the choice of pages sees them: summaries are numbered as the blocks of pools are.

    Args:
        sequences: Sequences in packing order.
        tables: Their tables in layers without a sliding window, perhaps in a staging buffer.
        budget: Pages that a token attends to.
        host_blocks: Blocks of the host's pool, whose summaries come before those of blocks on disk.
    """
    decodes = np.array([sequence.num_computed >= sequence.num_prompt for sequence in sequences])
    counts = tables.num_blocks.tolist()
    numbers = [summary_numbers(s, host_blocks)[:count] for s, count in zip(sequences, counts, strict=True)]
    return PageTables(budget, decodes, np.concatenate([np.zeros(0, np.int32), *numbers]))


def empty_batch() -> PackedBatch:
    """A micro-batch without tokens, for a sweep that computes deferred batches alone."""
    return _Rows().packed((), None)


class _Rows:
    """The rows of a batch, a token each, while it is packed."""

    def __init__(self) -> None:
        self.count = 0
        self._token_ids: list[np.ndarray] = []
        self._positions: list[np.ndarray] = []
        self._logits_rows: list[LogitsRow] = []
        self._logits_indices: list[np.ndarray] = []
        self._pending_rows: list[np.ndarray] = []
        self._pending_slots: list[np.ndarray] = []
        self._deferred_rows: list[LogitsRow] = []
        self._exchange_slots: list[int] = []

    def add(self, sequences: List[Sequence], tables: SweepTables, *, defers: bool) -> None:
        """Add the scheduled tokens of some sequences.

        Args:
            sequences: The sequences.
            tables: Their tables.
            defers: Whether their tokens only begin in this sweep.
        """
        # Once for each sequence of every sweep: as little as may be.
        keys, starts = tables.num_keys, tables.starts
        texts = [s.tokens for s in sequences]
        lengths = np.fromiter(map(len, texts), np.int64, len(texts))
        has_drafts = bool((keys > lengths).any())
        if has_drafts:
            texts = [[*s.tokens, *s.drafts] for s in sequences]
        if (keys == lengths).all():  # as in most sweeps
            last = np.array([text[-1] for text in texts], np.int64)
        else:
            last = np.array([text[stop - 1] for text, stop in zip(texts, keys.tolist(), strict=True)], np.int64)
        token_ids = np.empty(starts[-1], np.int64)
        token_ids[starts[1:] - 1] = last
        several = (tables.num_queries > 1).nonzero()[0]
        if len(several):  # all at once: an assignment for each takes longer than its tokens
            counts, ranges = tables.num_queries[several], (tables.num_cached[several].tolist(), keys[several].tolist())
            parts = [texts[i][begin:stop] for i, begin, stop in zip(several.tolist(), *ranges, strict=True)]
            token_ids[numbers_within(counts) + starts[several].repeat(counts)] = list(chain.from_iterable(parts))
        pending = (last == PENDING).nonzero()[0]
        self._token_ids.append(token_ids)
        self._pending_rows.append(self.count + starts[1:][pending] - 1)
        self._pending_slots.append(np.array([sequences[i].token_slot for i in pending.tolist()], np.int64))
        if defers:
            self._deferred_rows += zip(sequences, tables.num_cached.tolist(), strict=True)
            self._exchange_slots += [in_flight(sequence.exchange_slot) for sequence in sequences]
        else:
            self._add_logits(sequences, tables, lengths, has_drafts=has_drafts)
        self.count += len(token_ids)
        self._positions.append(tables.positions)

    def _add_logits(
        self, sequences: List[Sequence], tables: SweepTables, lengths: np.ndarray, *, has_drafts: bool
    ) -> None:
        """Add the rows of logits of some sequences: those from `Sequence.next_logits_position` on.

        Rows of drafts belong to the sequence as it will be with the drafts (`after_drafts`).

        Args:
            sequences: The sequences.
            tables: Their tables.
            lengths: Number of tokens of each, without drafts, int64.
            has_drafts: Whether any of them has drafts.
        """
        if not has_drafts and not any([sequence.targets for sequence in sequences]):  # a row where all tokens are run
            owners = (tables.num_keys == lengths).nonzero()[0]
            positions = lengths[owners] - 1
            having = sequences if len(owners) == len(sequences) else [sequences[i] for i in owners.tolist()]
            self._logits_indices.append(self.count + tables.starts[1:][owners] - 1)
        else:
            next_positions = lengths - 1
            for i in [i for i, sequence in enumerate(sequences) if sequence.targets]:
                next_positions[i] = sequences[i].next_logits_position
            first = np.maximum(next_positions, tables.num_cached)
            counts = np.maximum(tables.num_keys - first, 0)
            owners = np.repeat(np.arange(len(counts)), counts)
            having = [sequences[i] for i in owners.tolist()]
            positions = numbers_within(counts) + np.repeat(first, counts)
            self._logits_indices.append(self.count + (tables.starts[:-1] - tables.num_cached)[owners] + positions)
        rows = list(zip(having, positions.tolist(), strict=True))
        if has_drafts:
            rows = [(after_drafts(s, max(0, p + 1 - len(s.tokens))), p) for s, p in rows]
        self._logits_rows += rows

    def packed(self, segments: tuple[Segment, ...], staging: dict[int | None, Staging] | None) -> PackedBatch:
        none = np.zeros(0, np.int64)
        return PackedBatch(
            token_ids=np.concatenate([none, *self._token_ids]),
            positions=np.concatenate([none, *self._positions]),
            segments=segments,
            staging=staging,
            logits_rows=self._logits_rows,
            logits_indices=np.concatenate([none, *self._logits_indices]),
            pending_rows=np.concatenate([none, *self._pending_rows]),
            pending_slots=np.concatenate([none, *self._pending_slots]),
            deferred_rows=self._deferred_rows,
            exchange_slots=np.array(self._exchange_slots, dtype=np.int64),
        )
