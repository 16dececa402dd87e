"""The load of a scheduled micro-batch: what it computes and moves in each layer of a sweep."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from batchgen.core.attention_budget import AttentionBudget
from batchgen.core.kv_placement import KVPlacement
from batchgen.ops.attention_plan import SequenceSlice, SweepTables, find_shared_groups
from batchgen.planner.layer_sizes import AttentionKind
from batchgen.schedule.micro_batches import by_placement
from batchgen.schedule.page_staging import choosers_of
from batchgen.schedule.scheduled_sequence import ScheduledSequence
from batchgen.schedule.staging import Choosers, num_shared, swap_runs
from batchgen.schedule.step_graph import BatchFlow
from batchgen.schedule.window_pool import NULL_BLOCK


@dataclass(frozen=True)
class Attended:
    """Attention of some sequences.

    Attributes:
        contexts: Keys that each sequence with a single new token sees, itself included.
        chunks: (new tokens, tokens before them) of each other sequence.
        shared: (new tokens, tokens of a prefix that all of these see); `contexts` and `chunks` do not count the prefix.
    """

    contexts: tuple[int, ...] = ()
    chunks: tuple[tuple[int, int], ...] = ()
    shared: tuple[tuple[int, int], ...] = ()


class StagedStates(NamedTuple):
    """Numbers of sequences whose states pass through the staging buffer of the compute device.

    Attributes:
        host_in: Sequences of the host's pool with a state to bring: all but those that begin.
        host_out: Sequences of the host's pool, whose new state goes back.
        disk_in: Sequences on disk with a state to bring.
        disk_out: Sequences on disk.
    """

    host_in: int = 0
    host_out: int = 0
    disk_in: int = 0
    disk_out: int = 0


_NO_STATES = StagedStates()


class ChosenLoad(NamedTuple):
    """KV that passes through the staging buffer where decoding tokens choose pages: amounts of each such layer.

    Attributes:
        host_blocks: KV blocks of earlier sweeps that are copied from the host's pool.
        disk_reads: (KV blocks, runs of neighbouring blocks) of earlier sweeps that are read from disk.
        all_disk: (KV blocks, runs of neighbouring blocks), old and new, of sequences on disk.
        pages: Pages whose summaries the choice reads.
    """

    host_blocks: int
    disk_reads: tuple[int, int]
    all_disk: tuple[int, int]
    pages: int


@dataclass(frozen=True)
class BatchLoad:
    """Amounts that one micro-batch of a sweep computes and moves.

    Amounts of KV are those of each layer.

    Attributes:
        tokens: Number of tokens. The token of a deferred sequence counts, though the sweep takes it no further than QKV
            of the first layer (`deferred`).
        sampled: Number of sequences whose last token is among these, so that a new one follows, in this sweep or, where
            they are deferred, in a later one.
        logits_rows: Number of rows of logits that are computed.
        attended: Attention by KV placement, in layers without a sliding window.
        windowed: Attention by KV placement, in layers with a sliding window; no prefix is shared there.
        host_blocks: Number of KV blocks that are copied from the host's pool, in layers without a sliding window.
        windowed_host_blocks: Number of KV blocks that are copied from the host's pool, in layers with a sliding window.
        new_tokens: Number of tokens whose KV is copied to the host's pool.
        disk_reads: (KV blocks, runs of neighbouring blocks) that are read from disk.
        disk_writes: (KV blocks, runs of neighbouring blocks) that are written to disk.
        new_host_blocks: Number of KV blocks with new tokens alone, of sequences of the host's pool. Layers that reuse
            KV take them from there.
        all_disk: (KV blocks, runs of neighbouring blocks), old and new, of sequences on disk, all of which pass through
            the staging buffer. Runs are counted where layers reuse KV.
        states: Sequences whose KV or state passes through the staging buffer.
        hidden_on_host: Whether activations wait in host memory between layers.
        swapped_in: (KV blocks, runs of neighbouring blocks) that come from the host's pool to the device's, for good.
        swapped_out: (KV blocks, runs of neighbouring blocks) that come from the device's pool to the host's, for good.
        chosen: KV that passes in layers where decoding tokens choose pages; None: as in other layers.
    """

    tokens: int
    sampled: int
    logits_rows: int
    attended: dict[KVPlacement, Attended]
    windowed: dict[KVPlacement, Attended]
    host_blocks: int = 0
    windowed_host_blocks: int = 0
    new_tokens: int = 0
    disk_reads: tuple[int, int] = (0, 0)
    disk_writes: tuple[int, int] = (0, 0)
    new_host_blocks: int = 0
    all_disk: tuple[int, int] = (0, 0)
    states: StagedStates = _NO_STATES
    hidden_on_host: bool = False
    swapped_in: tuple[int, int] = (0, 0)
    swapped_out: tuple[int, int] = (0, 0)
    chosen: ChosenLoad | None = None

    @property
    def flow(self) -> BatchFlow:
        """The flow that the Step graph takes; equal to `PackedBatch.flow`."""
        return BatchFlow(
            placements=frozenset(self.attended),
            history=self.host_blocks > 0 or self.disk_reads[0] > 0,
            stored=self.new_tokens > 0,
            disk_read=self.disk_reads[0] > 0,
            disk_write=self.disk_writes[0] > 0,
            hidden_on_host=self.hidden_on_host,
            samples=self.logits_rows > 0,
            swaps_in=self.swapped_in[0] > 0,
            swaps_out=self.swapped_out[0] > 0,
            chooses=self.chosen is not None,
        )

    @property
    def deferred(self) -> int:
        """Sequences that begin a token in the sweep, and leave it in the first layer."""
        return len(self.contexts_of(KVPlacement.DEFERRED))

    def attended_by(self, kind: AttentionKind | None) -> dict[KVPlacement, Attended]:
        """Attention of the sequences of each placement in a layer of a kind; None: in a state layer."""
        return self.attended if kind is None or not kind.windows[0][0] else self.windowed

    def contexts_of(self, placement: KVPlacement) -> tuple[int, ...]:
        """Keys that each sequence with a single new token and this placement sees."""
        return self.attended[placement].contexts if placement in self.attended else ()


def load_of(
    batch: Sequence[ScheduledSequence],
    *,
    kv_block_size: int,
    compute_tier: str,
    windows: bool = False,
    reuses_kv: bool = False,
    hidden_on_host: bool = False,
    budget: AttentionBudget | None = None,
) -> BatchLoad:
    """The load of a scheduled micro-batch, before its sweep is committed.

    Args:
        batch: The sequences of the micro-batch.
        kv_block_size: Tokens of a KV block.
        compute_tier: The tier of the compute device's memory.
        windows: Whether any layer has a sliding window.
        reuses_kv: Whether any layer attends to the KV of another.
        hidden_on_host: Whether activations wait in host memory between layers.
        budget: Pages that a decoding token attends to, where it chooses some; None: all.
    """
    of_placement = by_placement(batch, compute_tier)
    attended = {name: _attended(members, kv_block_size, sharing=True) for name, members in of_placement.items()}
    windowed = attended
    if windows:
        windowed = {name: _attended(members, kv_block_size, sharing=False) for name, members in of_placement.items()}
    staged = of_placement.get(KVPlacement.STREAMED, ())
    swaps_in, swaps_out = swap_runs(of_placement) if compute_tier == "gpu" else ((), ())
    on_disk = [s for s in staged if _on_disk(s)]
    on_host = [s for s in staged if not _on_disk(s)]
    host_blocks = _history_blocks(on_host, kv_block_size, windowed=False)
    windowed_host_blocks = _history_blocks(on_host, kv_block_size, windowed=True) if windows else host_blocks
    of_disk = _disk_load(on_disk, kv_block_size, all_runs=reuses_kv)
    written = [
        s.sequence.block_table[s.sequence.num_computed // kv_block_size : _blocks(s.num_keys, kv_block_size)]
        for s in on_disk
    ]
    return BatchLoad(
        tokens=sum([s.num_tokens for s in batch]),
        sampled=sum([s.num_keys >= len(s.sequence.tokens) for s in batch]),
        logits_rows=sum([s.num_logits for s in batch]),
        attended=attended,
        windowed=windowed,
        host_blocks=host_blocks,
        windowed_host_blocks=windowed_host_blocks,
        new_tokens=sum(s.num_tokens for s in on_host),
        new_host_blocks=sum(
            _blocks(s.num_keys, kv_block_size) - _blocks(s.sequence.num_computed, kv_block_size) for s in on_host
        ),
        disk_reads=of_disk.reads,
        disk_writes=blocks_and_runs(written),
        all_disk=of_disk.all_reads,
        states=StagedStates(_begun(on_host), len(on_host), _begun(on_disk), len(on_disk)),
        hidden_on_host=hidden_on_host,
        swapped_in=(sum(run.count for run in swaps_in), len(swaps_in)),
        swapped_out=(sum(run.count for run in swaps_out), len(swaps_out)),
        chosen=_chosen(on_host, on_disk, choosers_of(staged, budget, kv_block_size), kv_block_size),
    )


def _chosen(
    on_host: Sequence[ScheduledSequence],
    on_disk: Sequence[ScheduledSequence],
    choosers: Choosers,
    kv_block_size: int,
) -> ChosenLoad | None:
    """The KV that passes where pages are chosen; None: nobody chooses.

    Which pages are chosen is not known: those of a sequence are taken to lie as if they were drawn from all.

    Args:
        on_host, on_disk: Staged sequences.
        choosers: Pages that each sequence attends to which chooses.
        kv_block_size: Tokens of a page.
    """
    if not choosers:
        return None
    dense = _disk_load([s for s in on_disk if s.sequence not in choosers], kv_block_size, all_runs=True)
    host_blocks = _history_blocks([s for s in on_host if s.sequence not in choosers], kv_block_size, windowed=False)
    read, read_runs, used, used_runs, pages = *dense.reads, *dense.all_reads, 0
    for s in (*on_host, *on_disk):
        if (count := choosers.get(s.sequence)) is None:
            continue
        num_blocks = _blocks(s.num_keys, kv_block_size)
        old, pages = count - (s.sequence.num_computed % kv_block_size == 0), pages + num_blocks
        if not _on_disk(s):
            host_blocks += old
            continue
        runs = 1 + round(page_runs(count, num_blocks))
        read, read_runs, used, used_runs = read + old, read_runs + min(old, runs), used + count, used_runs + runs
    return ChosenLoad(host_blocks, (read, read_runs), (used, used_runs), pages)


def page_runs(pages: float, num_blocks: int) -> float:
    """Runs of neighbouring blocks beyond the first one, of pages that are drawn from a sequence's blocks."""
    return max(0.0, pages - 1) * (1 - pages / num_blocks)


class _DiskLoad(NamedTuple):
    """(KV blocks, runs of neighbouring blocks) that sequences have on disk: those of earlier sweeps, and all."""

    reads: tuple[int, int]
    all_reads: tuple[int, int]


def _disk_load(on_disk: Sequence[ScheduledSequence], kv_block_size: int, *, all_runs: bool) -> _DiskLoad:
    """The blocks of sequences on disk; a prefix that several share counts once.

    Args:
        on_disk: Sequences on disk.
        kv_block_size: Tokens of a KV block.
        all_runs: Whether runs of all blocks are counted too; they are 0 otherwise.
    """
    reads: list[array[int]] = []
    all_reads: list[array[int]] = []
    read: set[int] = set()
    shares = any(s.sequence.num_matched_blocks for s in on_disk)
    for s in on_disk:
        table = s.sequence.block_table[: _blocks(s.num_keys, kv_block_size)]
        old = _blocks(s.sequence.num_computed, kv_block_size)
        if shares:
            first = num_shared(table, read)
            table, old = table[first:], max(0, old - first)
            read.update(table)
        reads.append(table[:old])
        all_reads.append(table)
    num_blocks = sum(map(len, all_reads))
    return _DiskLoad(blocks_and_runs(reads), blocks_and_runs(all_reads) if all_runs else (num_blocks, 0))


def blocks_and_runs(tables: Sequence[array[int]]) -> tuple[int, int]:
    """The number of blocks of all these parts of block tables, and of the runs of neighbours that each has."""
    blocks = np.frombuffer(b"".join(tables), dtype=np.intc)
    if not len(blocks):
        return 0, 0
    begins = np.ones(len(blocks), dtype=bool)
    begins[1:] = np.diff(blocks) != 1
    ends = np.cumsum([len(table) for table in tables])
    begins[ends[ends < len(blocks)]] = True
    return len(blocks), int(begins.sum())


def _begun(members: Sequence[ScheduledSequence]) -> int:
    return sum(s.sequence.num_computed > 0 for s in members)


def _on_disk(scheduled: ScheduledSequence) -> bool:
    return scheduled.sequence.kv_placement is KVPlacement.DISK


def _blocks_of(scheduled: ScheduledSequence) -> np.ndarray:
    """The KV blocks of a sequence, int32. Those on disk have numbers that no block of host memory has."""
    table = np.array(scheduled.sequence.block_table, dtype=np.int32)
    return -1 - table if _on_disk(scheduled) else table


def _blocks(tokens: int, kv_block_size: int) -> int:
    return -(-tokens // kv_block_size)


def _history_blocks(members: Sequence[ScheduledSequence], kv_block_size: int, *, windowed: bool) -> int:
    """Distinct blocks that hold KV of earlier sweeps."""
    if not windowed and not any(s.sequence.num_matched_blocks for s in members):
        return sum(_blocks(s.sequence.num_computed, kv_block_size) for s in members)  # nobody shares any
    tables = (s.sequence.table(windowed)[: _blocks(s.sequence.num_computed, kv_block_size)] for s in members)
    return len({block for table in tables for block in table} - {NULL_BLOCK})


def _attended(members: Sequence[ScheduledSequence], kv_block_size: int, *, sharing: bool) -> Attended:
    shared_tokens = [0] * len(members)
    shared = []
    if sharing and any(s.sequence.num_matched_blocks for s in members):
        slices = [SequenceSlice(s.num_tokens, s.sequence.num_computed, _blocks_of(s)) for s in members]
        matched = np.array([s.sequence.num_matched_blocks for s in members])
        for group in find_shared_groups(SweepTables.of(slices), matched, kv_block_size):
            shared.append((sum(members[i].num_tokens for i in group.members), group.num_blocks * kv_block_size))
            for i in group.members:
                shared_tokens[i] = group.num_blocks * kv_block_size
    if not shared:  # looks at each sequence of a sweep, so without a call for each
        ends = [(s.num_tokens, s.sequence.num_computed) for s in members]
        return Attended(
            tuple([1 + computed for count, computed in ends if count == 1]),
            tuple([one for one in ends if one[0] > 1]),
        )
    unshared = list(zip(members, shared_tokens, strict=True))
    return Attended(
        tuple(s.num_keys - skip for s, skip in unshared if s.num_tokens == 1),
        tuple((s.num_tokens, s.sequence.num_computed - skip) for s, skip in unshared if s.num_tokens > 1),
        tuple(shared),
    )
