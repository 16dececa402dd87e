"""Sweeps captured once as CUDA graphs and replayed.

Where weights and KV are in the device's memory, launching the layers' kernels one by one takes longer than running
them, unless a sweep has many tokens.

A CUDA graph reads fixed memory, its static buffer, into which later sweeps of about its size are copied at once: tokens
up to a round number, and attention plans up to a capacity. What a sweep does not fill of that capacity is computed and
not stored. Where all sequences take the token with the largest logit, the graph has the head too, and chooses them.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial, reduce
from itertools import accumulate
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch
from torch import Tensor

from batchgen.core.kv_placement import KVPlacement
from batchgen.ops.attention_plan import AttentionPlan
from batchgen.ops.host_copy import upload
from batchgen.runtime.token_table import places_of
from batchgen.schedule.packed_batch import PackedBatch, Segment
from batchgen.schedule.state_rows import StateRows

if TYPE_CHECKING:
    from batchgen.ops.dispatch import Capacity, CutPlan

# Sweeps that one graph could have served and that are launched as usual before it is captured: capturing takes as long
# as some sweeps.
_UNCAPTURED = 3
# Sweeps of a number of tokens that a graph for more tokens serves before they have one of their own.
_LOOSELY_SERVED = 31
_MOST_GRAPHS = 32
# A graph serves a sweep that needs these parts of its tokens and of its attention programs, or more: what has no work
# costs some time.
_LEAST_TOKENS, _LEAST_PROGRAMS = 3 / 4, 1 / 4
_FEW_PROGRAMS = 64  # so many without work cost nothing
_REMEMBERED = 256  # sizes of sweeps
_ALIGNED = 8  # kernels are compiled for rows of indices that begin at multiples of 16 bytes
NOT_STORED = -1  # slot of a token whose KV, or state, goes nowhere
# Rows of `StaticBuffers.indices`, before those of slots: of tokens, and of rows of logits (LOGITS, KEPT).
POSITIONS, TOKEN_IDS, TAKEN, LOGITS, KEPT, _SLOTS = range(6)
_FEW_ROWS = 64  # so many rows of logits that nobody takes cost nothing

Replay = Callable[[], None]
GraphResult: TypeAlias = Tensor | tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Size:
    """The numbers that the launches of a sweep depend on.

    Attributes:
        tokens: Number of tokens.
        sequences: Number of sequences in state layers; None: the model has none.
        plans: Capacity of the attention plan of each window.
        rows: Rows of logits, of which the largest are chosen; None: the graph ends before the head.
    """

    tokens: int
    sequences: int | None
    plans: tuple[tuple[int | None, Capacity], ...]
    rows: int | None = None

    def takes(self, other: Size) -> bool:
        """Tell whether a graph for so many tokens and sequences can run a sweep of the other size."""
        if self.sequences != other.sequences or (self.sequences is not None and self.tokens != other.tokens):
            return False
        if (self.rows is None) != (other.rows is None):
            return False
        return _LEAST_TOKENS * self.tokens <= other.tokens <= self.tokens

    def serves(self, other: Size) -> bool:
        """Tell whether a graph of this size can run a sweep of the other one, and not much of it has no work."""
        own_rows, rows = self.rows or 0, other.rows or 0
        holds_rows = rows <= own_rows and max(rows, _FEW_ROWS) >= _LEAST_TOKENS * own_rows
        return (
            self.takes(other)
            and holds_rows
            and all(
                own.holds(needed) and max(needed.programs, _FEW_PROGRAMS) >= _LEAST_PROGRAMS * own.programs
                for (_, own), (_, needed) in zip(self.plans, other.plans, strict=True)
            )
        )

    def enlarged(self, other: Size) -> Size:
        """The size for as many tokens that has capacity for the plans of another one too."""
        pairs = zip(self.plans, other.plans, strict=True)
        plans = tuple((window, own.enlarged(needed)) for (window, own), (_, needed) in pairs)
        rows = None if self.rows is None else max(self.rows, other.rows or 0)
        return Size(self.tokens, self.sequences, plans, rows)

    @property
    def columns(self) -> int:
        """Columns of `StaticBuffers.indices`."""
        return -(-self.tokens // _ALIGNED) * _ALIGNED

    @property
    def words(self) -> list[int]:
        """Numbers of int32 in the static buffer: of indices, each window's plan, and the slots of states."""
        states = 0 if self.sequences is None else 3 * self.sequences + 1
        return [2 * (_SLOTS + len(self.plans)) * self.columns, *(plan.words for _, plan in self.plans), states]


class StaticBuffers:
    """The static buffer that a CUDA graph reads, and what it makes.

    Attributes:
        size: The size of the graph's sweeps.
        indices: int64 [5 + windows, columns]: of each token its position, its id, and its place in the table of tokens
            where the host does not know it; of each row of logits its token, and the place in that table that its
            choice goes to; of each token the slots of new KV for each window.
        plans: Attention plans by window.
        states: State slots of the sequences, int32 [3 * sequences + 1]: sources, targets and starts; None: the model
            has no state layers.
        hidden: The layers' input, [tokens, hidden], where it does not come from the graph; None: it does.
        result: Results of the graph's last run: activations after the layers, [tokens, hidden], or (chosen tokens,
            these with NOT_FINITE), int64 [rows].
        replay: Runs the graph; None: not captured yet.
    """

    def __init__(self, size: Size, cuts: Mapping[int | None, CutPlan], device: torch.device) -> None:
        """Allocate the buffer. cuts: Plans that are cut for the same operands."""
        self.size = size
        self.memory = torch.zeros(sum(size.words), dtype=torch.int32, device=device)
        indices, *plans, states = self.memory.split(size.words)
        self.indices = indices.view(torch.int64).view(-1, size.columns)
        self.plans = {w: cuts[w].within(capacity, part) for (w, capacity), part in zip(size.plans, plans, strict=True)}
        self.states = None if size.sequences is None else states
        self.hidden: Tensor | None = None
        self.result: GraphResult | None = None
        self.replay: Replay | None = None

    def row(self, number: int) -> Tensor:
        """A row of indices. number: POSITIONS, TOKEN_IDS or TAKEN, [tokens]; LOGITS or KEPT, [rows]."""
        count = self.size.tokens if number < LOGITS else self.size.rows
        return self.indices[number, :count]

    @property
    def slots(self) -> dict[int | None, Tensor]:
        """Slots of the tokens' KV by window, int64 [tokens]."""
        return dict(zip(self.plans, self.indices[_SLOTS:, : self.size.tokens], strict=True))

    @property
    def state_slots(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """Source and target of each sequence's state, int32 [sequences], and starts, int32 [sequences + 1], or None."""
        if self.states is None:
            return None
        count = len(self.states) // 3
        source, target, starts = self.states.split((count, count, count + 1))
        return source, target, starts


@dataclass(frozen=True)
class GraphSweep:
    """A sweep that a CUDA graph runs.

    Attributes:
        packed: The sweep.
        size: The size of the graph.
        content: Content of the static buffer, int32.
        cuts: Attention plans of the sweep by window.
        places: Places of the table of tokens that it keeps tokens at, int64; those that it takes are there.
    """

    packed: PackedBatch
    size: Size
    content: np.ndarray
    cuts: Mapping[int | None, CutPlan]
    places: np.ndarray

    @property
    def chooses(self) -> bool:
        """Tell whether the graph chooses the tokens with the largest logits."""
        return self.size.rows is not None


class SweepGraphs:
    """CUDA graphs of sweeps with their static buffers, by the size of the sweep.

    Where there are too many graphs, the least recently used one is dropped.

    Invariant: the buffers of a graph hold one sweep at a time.
    """

    def __init__(
        self,
        launch: Callable[[StaticBuffers], GraphResult],
        capture: Callable[[Callable[[], None]], Replay],
        cut: Callable[[AttentionPlan, int | None], CutPlan],
        most_tokens: int,
        device: torch.device,
        *,
        embeds: bool,
        chooses: bool,
    ) -> None:
        """Start without any graph.

        Args:
            launch: launches a sweep over static buffers, and returns what it makes.
            capture: records what its argument launches; the result replays it as often as it is called.
            cut: an attention plan for the device, in layers of a sliding window.
            most_tokens: larger sweeps are not captured.
            device: the device that computes.
            embeds: Whether graphs look up embeddings; otherwise they are given.
            chooses: Whether graphs can choose the tokens with the largest logits.
        """
        self._launch, self._capture, self._cut = launch, capture, cut
        self._most_tokens, self._device = most_tokens, device
        self.embeds, self.chooses = embeds, chooses
        # None: not allocated yet.
        self._buffers: OrderedDict[Size, StaticBuffers | None] = OrderedDict()
        # Sizes of sweeps that no graph has served, and by tokens of those that a graph for more tokens has.
        self._unserved: deque[Size] = deque(maxlen=_REMEMBERED)
        self._loosely_served: dict[int, list[Size]] = {}

    def sweep(self, packed: PackedBatch, kept: np.ndarray | None = None) -> GraphSweep | None:
        """A batch as a graph is to run it; None: it is not one to be captured, or not yet. Nothing is launched.

        Args:
            packed: The batch.
            kept: Place in the table of tokens that the choice of each row of logits goes to, int64 [rows of logits];
                None: the graph chooses no tokens.
        """
        if packed.num_tokens > self._most_tokens or not stays_on_device(packed):
            return None
        (segment,) = packed.segments
        cuts = {window: self._cut(plan, window) for window, plan in segment.plans.items()}
        size = self._size(packed, cuts, None if kept is None else len(kept))
        serving = min((own for own in self._buffers if own.serves(size)), key=lambda own: own.tokens, default=None)
        if serving is None:
            due = self._due(size)
        else:
            due = None if serving.tokens == size.tokens else self._due_beside_a_larger(size)
        if due is not None:
            self._add(due)
            serving = due
        elif serving is None:
            return None
        self._buffers.move_to_end(serving)
        content = _content(packed, segment, serving, cuts, kept)
        return GraphSweep(packed, serving, content, cuts, np.zeros(0, np.int64) if kept is None else kept)

    def run(self, sweep: GraphSweep, hidden: Tensor) -> GraphResult:
        """Run a sweep's graph, on the current stream.

        Args:
            sweep: The sweep.
            hidden: Its embeddings, [tokens, hidden]; not used where graphs look them up.

        Returns:
            Activations after the layers, [tokens, hidden], or (chosen tokens, the same with NOT_FINITE), int64 [rows of
            logits]. They are valid until the graph next runs.
        """
        buffers = self._buffers[sweep.size]
        if buffers is None:
            buffers = self._buffers[sweep.size] = StaticBuffers(sweep.size, sweep.cuts, self._device)
        upload(sweep.content, self._device, buffers.memory)
        if not self.embeds:
            if buffers.hidden is None:
                buffers.hidden = hidden.new_empty(sweep.size.tokens, hidden.shape[1])
            buffers.hidden[: len(hidden)].copy_(hidden)
            buffers.hidden[len(hidden) :].zero_()
        if buffers.replay is not None:
            buffers.replay()
            result = buffers.result
        else:
            result = self._launch(buffers)  # this sweep; and kernels are loaded, and libraries have their work space
            buffers.replay = self._capture(partial(_launch_into, buffers, self._launch))
        assert result is not None, "the graph was not captured"
        if isinstance(result, Tensor):
            return result[: sweep.packed.num_tokens]
        rows = len(sweep.packed.logits_rows)
        return result[0][:rows], result[1][:rows]

    def forget(self) -> None:
        """Capture all graphs again, as memory that they use beside their buffers is elsewhere."""
        for buffers in filter(None, self._buffers.values()):
            buffers.replay = buffers.result = None

    def _size(self, packed: PackedBatch, cuts: Mapping[int | None, CutPlan], num_rows: int | None) -> Size:
        """The size of the smallest graph for a batch. num_rows: Rows of logits of which the largest are chosen."""
        tokens = min(rounded_up(packed.num_tokens), self._most_tokens)
        sequences, states = None, packed.segments[0].states
        if states is not None:  # tokens beyond those of the sweep are a sequence each, or together one more
            num_sequences = len(states.source)
            sequences = tokens if num_sequences == packed.num_tokens else rounded_up(num_sequences + 1)
        plans = tuple((window, cut.capacity.rounded()) for window, cut in cuts.items())
        return Size(tokens, sequences, plans, None if num_rows is None else min(rounded_up(num_rows), tokens))

    def _due(self, size: Size) -> Size | None:
        """Note a sweep that no graph serves; returns the size to be captured now, or None."""
        self._unserved.append(size)
        alike = [other for other in self._unserved if size.takes(other)]
        if len(alike) <= _UNCAPTURED:
            return None
        for other in alike:
            self._unserved.remove(other)
        return reduce(Size.enlarged, alike, size)

    def _due_beside_a_larger(self, size: Size) -> Size | None:
        """Note a sweep that a graph for more tokens serves; returns the size to be captured now, or None."""
        alike = self._loosely_served.setdefault(size.tokens, [])
        alike.append(size)
        if len(alike) <= _LOOSELY_SERVED:
            return None
        return reduce(Size.enlarged, self._loosely_served.pop(size.tokens))

    def _add(self, size: Size) -> None:
        """Have a graph of a size, in place of smaller ones for as many tokens."""
        for smaller in [own for own in self._buffers if own.tokens == size.tokens and size.serves(own)]:
            del self._buffers[smaller]
        if len(self._buffers) >= _MOST_GRAPHS:
            self._buffers.popitem(last=False)
        self._buffers[size] = None


def _launch_into(buffers: StaticBuffers, launch: Callable[[StaticBuffers], GraphResult]) -> None:
    buffers.result = launch(buffers)


def stays_on_device(packed: PackedBatch) -> bool:
    """Tell whether all sequences have their KV in the device's own pool."""
    return [segment.placement for segment in packed.segments] == [KVPlacement.DEVICE]


def _content(
    packed: PackedBatch,
    segment: Segment,
    size: Size,
    cuts: Mapping[int | None, CutPlan],
    kept: np.ndarray | None,
) -> np.ndarray:
    """The content of the static buffer of a size for a batch. KV of tokens beyond those of the sweep is not stored."""
    content = np.zeros(sum(size.words), np.int32)
    starts = [0, *accumulate(size.words)]
    indices = content[: starts[1]].view(np.int64).reshape(-1, size.columns)
    indices[POSITIONS, : packed.num_tokens] = packed.positions
    indices[TOKEN_IDS, : packed.num_tokens] = packed.token_ids
    indices[TAKEN, packed.pending_rows] = places_of(packed.pending_slots)
    if kept is not None:
        indices[LOGITS, : len(kept)], indices[KEPT, : len(kept)] = packed.logits_indices, kept
    indices[_SLOTS:, packed.num_tokens :] = NOT_STORED
    for row, slots in zip(indices[_SLOTS:], segment.slots.values(), strict=True):
        row[: packed.num_tokens] = slots
    for (window, capacity), start in zip(size.plans, starts[1:], strict=False):
        cuts[window].write(content[start : start + capacity.words], capacity)
    if size.sequences is not None:
        assert segment.states is not None, "the sweep has no states"
        content[starts[-2] :] = _state_slots(segment.states, size.tokens, size.sequences)
    return content


def _state_slots(states: StateRows, tokens: int, sequences: int) -> np.ndarray:
    """`StaticBuffers.states` for a batch. Tokens beyond those of the sweep begin states that are not kept."""
    count = len(states.source)
    slots = np.full(3 * sequences + 1, NOT_STORED, np.int32)
    slots[:count], slots[sequences : sequences + count] = states.source, states.target
    starts = slots[2 * sequences :]
    starts[: count + 1], starts[count + 1 :] = states.starts, tokens
    if count == states.starts[-1]:  # each token is a sequence
        starts[:] = np.arange(sequences + 1)
    return slots


def rounded_up(tokens: int) -> int:
    """The tokens rounded up to a multiple of 8, and of an eighth of the power of two below.

    There are few such sizes, and none is much too large.
    """
    step = max(8, 1 << max(0, tokens.bit_length() - 4))
    return -(-tokens // step) * step
