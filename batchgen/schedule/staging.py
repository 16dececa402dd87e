"""The KV of a micro-batch that passes through a staging buffer: block tables there, and what moves. No tensors."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from collections.abc import Sequence as List
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType

import numpy as np

from batchgen.core.attention_budget import CHOSEN_PAGES
from batchgen.core.kv_placement import KVPlacement
from batchgen.schedule.extents import runs_of
from batchgen.schedule.scheduled_sequence import ScheduledSequence
from batchgen.schedule.sequence import Sequence
from batchgen.schedule.window_pool import NULL_BLOCK

# Block tables by sequence, of layers with a sliding window and of those without.
Tables = dict[bool, dict[Sequence, np.ndarray]]
# Pages that each of the sequences attends to which choose some, in the order of their table of chosen blocks.
Choosers = Mapping[Sequence, int]
NOBODY: Choosers = MappingProxyType({})


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
        host_blocks: blocks of the host's pool to bring to staging blocks 0, 1, ..., int64. -1 - i is number i of the
            table of chosen blocks.
        new_slots: slots in staging of new tokens whose KV goes to the host's pool, int64.
        host_slots: their slots there, int64.
        reads: runs of blocks on disk that hold KV of earlier sweeps.
        writes: runs of blocks with new tokens that go to disk.
        all_host_blocks: blocks of the host's pool that layers which reuse KV bring to staging blocks 0, 1, ..., int64:
            those with new tokens alone are among them.
        all_reads: runs of all blocks on disk, likewise.
        disk_start: first staging block of sequences whose KV is on disk.
        disk_stop: staging block after their last one.
        page_reads: (number in the table of chosen blocks, staging block) of each chosen block on disk that holds KV of
            earlier sweeps, int64 [n, 2].
        all_page_reads: pairs of all chosen blocks on disk, likewise.
    """

    num_blocks: int
    host_blocks: np.ndarray
    new_slots: np.ndarray
    host_slots: np.ndarray
    reads: tuple[Run, ...]
    writes: tuple[Run, ...]
    all_host_blocks: np.ndarray
    all_reads: tuple[Run, ...]
    disk_start: int
    disk_stop: int
    page_reads: np.ndarray
    all_page_reads: np.ndarray

    @property
    def reads_disk(self) -> bool:
        """Tell whether any KV of earlier sweeps comes from disk."""
        return bool(self.reads or len(self.page_reads))


@dataclass(frozen=True)
class Staged:
    """The staged sequences of a micro-batch.

    Attributes:
        tables: block tables in the staging buffer.
        by_window: KV that moves, by sliding window, the same object for windows with the same tables; None: none does.
        chosen_tables: block tables of layers that choose pages, in which sequences that choose have these pages alone;
            None: none chooses.
    """

    tables: Tables
    by_window: dict[int | None, Staging] | None
    chosen_tables: dict[Sequence, np.ndarray] | None = None


def stage(
    members: List[ScheduledSequence],
    windows: frozenset[int | None],
    kv_block_size: int,
    choosers: Choosers = NOBODY,
) -> Staged:
    """Give staged sequences blocks of the staging buffer, in the layers of each sliding window.

    Args:
        members: Staged sequences.
        windows: Sliding windows of the layers, None or CHOSEN_PAGES among them.
        kv_block_size: Tokens of a KV block.
        choosers: Staged sequences that choose pages, with their numbers of pages.
    """
    if not members:
        return Staged({}, None)
    tables, stagings = {}, {}
    tables[False], stagings[False] = _stage_layers(members, kv_block_size, windowed=False)
    if has_window_tables([one.sequence for one in members]):
        tables[True], stagings[True] = _stage_layers(members, kv_block_size, windowed=True)
    # Neither None nor CHOSEN_PAGES is a window.
    by_window = {w: stagings.get(bool(w), stagings[False]) for w in windows}
    if choosers:
        chosen = _stage_layers(members, kv_block_size, windowed=False, choosers=choosers)
        chosen_tables, by_window[CHOSEN_PAGES] = chosen
        return Staged(tables, by_window, chosen_tables)
    return Staged(tables, by_window)


def _stage_layers(
    members: List[ScheduledSequence], kv_block_size: int, *, windowed: bool, choosers: Choosers = NOBODY
) -> tuple[dict[Sequence, np.ndarray], Staging]:
    """Give each sequence's blocks a part of the staging buffer: block tables there, and what moves.

    A prefix block that several sequences share comes over once, but to those that choose pages, each of which has a
    part of its own. Freed blocks do not come.

    Args:
        members: Staged sequences.
        kv_block_size: Tokens of a KV block.
        windowed: Whether the layers are those with a sliding window.
        choosers: Sequences that choose pages in the layers.
    """
    on_host = [s for s in members if s.sequence.kv_placement is not KVPlacement.DISK]
    on_disk = [s for s in members if s.sequence.kv_placement is KVPlacement.DISK]
    places = _places_of(choosers)
    staged_of: dict[int, int] = {}  # host block with history -> staging block
    for s in on_host:
        if s.sequence in choosers:
            continue
        for block in s.sequence.table(windowed)[: -(-s.sequence.num_computed // kv_block_size)]:
            if block != NULL_BLOCK:
                staged_of.setdefault(block, len(staged_of))
    tables: dict[Sequence, np.ndarray] = {}
    new_slots, host_slots = [], []
    all_host_blocks = list(staged_of)
    first_page: dict[Sequence, int] = {}  # of those that choose, the staging block of their first page
    for s in on_host:
        if s.sequence in choosers:
            first_page[s.sequence] = len(all_host_blocks)
            all_host_blocks += (-1 - places[s.sequence][: _old_pages(s, choosers, kv_block_size)]).tolist()
    host_blocks = np.array(all_host_blocks, dtype=np.int64)
    num_blocks = len(host_blocks)
    for s in on_host:
        sequence = s.sequence
        used, old = -(-s.num_keys // kv_block_size), -(-sequence.num_computed // kv_block_size)
        own = sequence.table(windowed)
        if sequence in choosers:
            table = [first_page[sequence] + page for page in range(_old_pages(s, choosers, kv_block_size))]
        else:
            table = [staged_of.get(b, NULL_BLOCK) for b in own[:old]]
        table += range(num_blocks, num_blocks + used - old)
        num_blocks += used - old
        all_host_blocks += own[old:used]
        tables[sequence] = np.array(table, dtype=np.int32)
        for position in range(sequence.num_computed, s.num_keys):
            block, offset = divmod(position, kv_block_size)
            new_slots.append(table[block - used] * kv_block_size + offset)
            host_slots.append(own[block] * kv_block_size + offset)
    disk_start = num_blocks
    reads, all_reads, writes = [], [], []
    page_reads, all_page_reads = [], []
    staged_of_disk: dict[int, int] = {}  # block on disk -> staging block
    for s in on_disk:
        sequence = s.sequence
        used, old = -(-s.num_keys // kv_block_size), -(-sequence.num_computed // kv_block_size)
        own, dirty = sequence.block_table[:used], sequence.num_computed // kv_block_size
        if sequence in choosers:
            pages = np.arange(num_blocks, num_blocks + choosers[sequence])
            tables[sequence] = pages.astype(np.int32)
            all_page_reads.append(np.stack((places[sequence], pages), axis=1))
            page_reads.append(all_page_reads[-1][: _old_pages(s, choosers, kv_block_size)])
            writes += _runs(own[dirty:], int(pages[-1]))
            num_blocks += len(pages)
            continue
        first = num_shared(own, staged_of_disk)
        staged_of_disk |= zip(own[first:], range(num_blocks, num_blocks + used - first), strict=True)
        tables[sequence] = np.array([staged_of_disk[block] for block in own], dtype=np.int32)
        reads += _runs(own[first:old], num_blocks)
        all_reads += _runs(own[first:], num_blocks)
        writes += _runs(own[dirty:], num_blocks + dirty - first)
        num_blocks += used - first
    nothing = np.zeros((0, 2), np.int64)
    staging = Staging(
        num_blocks=num_blocks,
        host_blocks=host_blocks,
        new_slots=np.array(new_slots, dtype=np.int64),
        host_slots=np.array(host_slots, dtype=np.int64),
        reads=tuple(reads),
        writes=tuple(writes),
        all_host_blocks=np.array(all_host_blocks, dtype=np.int64),
        all_reads=tuple(all_reads),
        disk_start=disk_start,
        disk_stop=num_blocks,
        page_reads=np.concatenate([nothing, *page_reads]),
        all_page_reads=np.concatenate([nothing, *all_page_reads]),
    )
    return tables, staging


def _places_of(choosers: Choosers) -> dict[Sequence, np.ndarray]:
    """The numbers of each sequence's pages in the table of chosen blocks, which has as many columns as any needs."""
    width = max(choosers.values(), default=0)
    return {s: row * width + np.arange(pages, dtype=np.int64) for row, (s, pages) in enumerate(choosers.items())}


def _old_pages(scheduled: ScheduledSequence, choosers: Choosers, kv_block_size: int) -> int:
    """Pages with KV of earlier sweeps, of those that a sequence attends to: all, unless its token begins a page."""
    return choosers[scheduled.sequence] - (scheduled.sequence.num_computed % kv_block_size == 0)


def num_shared(table: List[int], others: Container[int]) -> int:
    """The number of first blocks of a table that sequences before it have too, as only prefixes are shared.

    Args:
        table: The block table.
        others: Blocks of the sequences before it.
    """
    return next((position for position, block in enumerate(table) if block not in others), len(table))


def _runs(blocks: List[int], staged: int) -> list[Run]:
    runs = []
    for first, count in runs_of(blocks):
        runs.append(Run(first, staged, count))
        staged += count
    return runs


def merged_runs(blocks: np.ndarray, staged: np.ndarray) -> tuple[Run, ...]:
    """Runs of blocks whose neighbours are neighbours in the staging buffer too.

    Args:
        blocks: Blocks, int64 [n].
        staged: Staging block of each, int64 [n].
    """
    begins = np.flatnonzero((np.diff(blocks, prepend=-2) != 1) | (np.diff(staged, prepend=-2) != 1))
    counts = np.diff(begins, append=len(blocks))
    columns = blocks[begins].tolist(), staged[begins].tolist(), counts.tolist()
    return tuple(Run(block, place, count) for block, place, count in zip(*columns, strict=True))


def swap_runs(
    of_placement: Mapping[KVPlacement, Iterable[ScheduledSequence]],
) -> tuple[tuple[Run, ...], tuple[Run, ...]]:
    """Runs of blocks that come from the host's pool to the device's, and of those that go from there to the host's.

    Of a run, `block` is the first block in the pool that it comes from, and `staged` that in the pool that it goes to.

    Args:
        of_placement: Scheduled sequences of a micro-batch by placement.
    """
    coming = _swap_runs(of_placement.get(KVPlacement.DEVICE, ()))
    others = (members for placement, members in of_placement.items() if placement is not KVPlacement.DEVICE)
    return coming, _swap_runs(chain.from_iterable(others))


def _swap_runs(members: Iterable[ScheduledSequence]) -> tuple[Run, ...]:
    """Runs of blocks that fill those of sequences that change their pool."""
    runs: list[Run] = []
    for sequence in [sequence for sequence, _ in members if sequence.swap_table]:  # looks at each of every sweep
        for source, target in zip(sequence.swap_table or (), sequence.block_table, strict=False):
            last = runs[-1] if runs else None
            if source == NULL_BLOCK:
                continue
            if last is not None and (source, target) == (last.block + last.count, last.staged + last.count):
                runs[-1] = Run(last.block, last.staged, last.count + 1)
            else:
                runs.append(Run(source, target, 1))
    return tuple(runs)


def has_window_tables(sequences: Iterable[Sequence]) -> bool:
    """Tell whether sequences have block tables of their own in layers with a sliding window."""
    return any([sequence.window_table is not None for sequence in sequences])
