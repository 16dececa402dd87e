"""The states of a micro-batch's sequences: where each is before and after its tokens, and what moves. No tensors."""

from __future__ import annotations

from collections.abc import Sequence as List
from dataclasses import dataclass

import numpy as np

from batchgen.core.kv_placement import KVPlacement
from batchgen.schedule.scheduled_sequence import ScheduledSequence
from batchgen.schedule.sequence import Sequence
from batchgen.schedule.staging import Run
from batchgen.schedule.state_slots import NO_STATE, StateSlot


@dataclass(frozen=True)
class StateRows:
    """The state rows of the sequences of a segment, int32.

    Attributes:
        source: Row with each sequence's state before its tokens; NO_STATE: it begins.
        target: Row for its state after them.
        starts: First token of each sequence, counted from the segment's first, and then the number of all tokens.
    """

    source: np.ndarray
    target: np.ndarray
    starts: np.ndarray


@dataclass(frozen=True)
class StateStaging:
    """The states that pass through the staging buffer in a state layer: one row for each staged sequence.

    First come rows of sequences in the host's pool that have a state, then those that begin, then those on disk.

    Attributes:
        num_rows: Rows in use.
        host_sources: Slots of the host's pool to bring to rows 0, 1, ..., int64.
        host_targets: Slots that rows 0, 1, ... go to, int64.
        reads: Runs of slots on disk to read into rows.
        writes: Runs of slots on disk that rows go to.
    """

    num_rows: int
    host_sources: np.ndarray
    host_targets: np.ndarray
    reads: tuple[Run, ...]
    writes: tuple[Run, ...]

    @property
    def has_history(self) -> bool:
        """Tell whether any row has a state to bring."""
        return bool(len(self.host_sources) or self.reads)

    @property
    def disk_start(self) -> int:
        """The first row of sequences on disk."""
        return len(self.host_targets)


def state_slot(sequence: Sequence) -> StateSlot:
    """The state slots of a sequence in flight, of a model with state layers."""
    assert sequence.state is not None, "the sequence has no state"
    return sequence.state


def rows_in_pool(sequences: List[Sequence], starts: np.ndarray) -> StateRows | None:
    """The rows of sequences whose states are used where they lie; None: the model has no state layers.

    Args:
        sequences: Sequences of a segment.
        starts: First token of each, counted from the segment's first, and then the number of all tokens.
    """
    if not sequences or sequences[0].state is None:
        return None
    return _rows(starts, [state_slot(sequence) for sequence in sequences])


def stage_states(members: List[ScheduledSequence]) -> tuple[dict[Sequence, StateSlot], StateStaging | None]:
    """Give each staged sequence a row of the staging buffer: (its source and target there), and what moves.

    Args:
        members: Staged sequences of a micro-batch.
    """
    if not members or members[0].sequence.state is None:
        return {}, None
    slots = {s.sequence: state_slot(s.sequence) for s in members}
    begun: list[Sequence] = []
    new: list[Sequence] = []
    on_disk: list[Sequence] = []
    for sequence, slot in slots.items():
        where = begun if slot.source != NO_STATE else new
        (on_disk if sequence.kv_placement is KVPlacement.DISK else where).append(sequence)
    on_host = begun + new
    row_of = {sequence: row for row, sequence in enumerate(on_host + on_disk)}
    staging = StateStaging(
        num_rows=len(members),
        host_sources=np.array([slots[s].source for s in begun], dtype=np.int64),
        host_targets=np.array([slots[s].target for s in on_host], dtype=np.int64),
        reads=_runs([(slots[s].source, row_of[s]) for s in on_disk if slots[s].source != NO_STATE]),
        writes=_runs([(slots[s].target, row_of[s]) for s in on_disk]),
    )
    staged = {s: StateSlot(NO_STATE if slots[s].source == NO_STATE else row, row) for s, row in row_of.items()}
    return staged, staging


def rows_in_staging(
    sequences: List[Sequence], starts: np.ndarray, staged: dict[Sequence, StateSlot]
) -> StateRows | None:
    """The rows of staged sequences in the staging buffer.

    Args:
        sequences: Sequences of a segment.
        starts: First token of each, counted from the segment's first, and then the number of all tokens.
        staged: Result of `stage_states`.
    """
    return _rows(starts, [staged[sequence] for sequence in sequences]) if staged else None


def _rows(starts: np.ndarray, slots: List[StateSlot]) -> StateRows:
    pairs = np.array(slots, dtype=np.int32).reshape(-1, 2)
    source, target = np.ascontiguousarray(pairs[:, 0]), np.ascontiguousarray(pairs[:, 1])
    return StateRows(source, target, starts.astype(np.int32))


def _runs(rows: List[tuple[int, int]]) -> tuple[Run, ...]:
    """Runs of neighbouring (slot on disk, row), in the order of the rows."""
    runs: list[Run] = []
    for slot, row in rows:
        last = runs[-1] if runs else None
        if last is not None and (slot, row) == (last.block + last.count, last.staged + last.count):
            runs[-1] = Run(last.block, last.staged, last.count + 1)
        else:
            runs.append(Run(slot, row, 1))
    return tuple(runs)
