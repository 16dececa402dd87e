"""Sweeps captured once as CUDA graphs and replayed.

Where weights and KV are in the device's memory, launching the layers' kernels one by one takes longer than running
them, unless a sweep has many tokens.

A CUDA graph reads fixed memory, its static buffers, into which later sweeps of about its size are written: tokens up to
a round number, and attention plans up to a capacity. What a sweep does not fill of that capacity is computed and not
stored.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from batchgen.core.kv_placement import KVPlacement
from batchgen.ops.attention_plan import AttentionPlan
from batchgen.ops.host_copy import upload
from batchgen.schedule.packed_batch import PackedBatch, Segment
from batchgen.schedule.state_rows import StateRows

if TYPE_CHECKING:
    from batchgen.ops.dispatch import Capacity, CutPlan, DevicePlan

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
# Rows of `StaticBuffers.indices` beside that of positions, which is the first.
TOKEN_IDS, LOGITS, PENDING_ROWS, PENDING_SLOTS, _SLOTS = range(1, 6)

Replay = Callable[[], None]


@dataclass(frozen=True)
class Size:
    """The numbers that the launches of a sweep depend on.

    Attributes:
        tokens: Number of tokens.
        sequences: Number of sequences in state layers; None: the model has none.
        plans: Capacity of the attention plan of each window.
    """

    tokens: int
    sequences: int | None
    plans: tuple[tuple[int | None, Capacity], ...]

    def takes(self, other: Size) -> bool:
        """Tell whether a graph for so many tokens and sequences can run a sweep of the other size."""
        if self.sequences != other.sequences or (self.sequences is not None and self.tokens != other.tokens):
            return False
        return _LEAST_TOKENS * self.tokens <= other.tokens <= self.tokens

    def serves(self, other: Size) -> bool:
        """Tell whether a graph of this size can run a sweep of the other one, and not much of it has no work."""
        return self.takes(other) and all(
            own.holds(needed) and max(needed.programs, _FEW_PROGRAMS) >= _LEAST_PROGRAMS * own.programs
            for (_, own), (_, needed) in zip(self.plans, other.plans, strict=True)
        )

    def enlarged(self, other: Size) -> Size:
        """The size for as many tokens that has capacity for the plans of another one too."""
        pairs = zip(self.plans, other.plans, strict=True)
        plans = tuple((window, own.enlarged(needed)) for (window, own), (_, needed) in pairs)
        return Size(self.tokens, self.sequences, plans)


@dataclass
class StaticBuffers:
    """The static buffers that the layers of a CUDA graph read and write.

    Attributes:
        hidden: [tokens, hidden], the input, and then the result.
        indices: int64 [5 + windows, tokens or a few more]: positions, token ids, tokens whose logits are made, tokens
            that only the device knows and their slots in its table, then slots of new KV for each window.
        windows: Sliding windows of the rows of slots.
        plans: by window.
        states: state slots of the sequences, int32 [3 * sequences + 1]: sources, targets and starts; None: the model
            has no state layers.
        replay: runs the layers; None: not captured yet.
    """

    hidden: Tensor
    indices: Tensor
    windows: tuple[int | None, ...]
    plans: Mapping[int | None, DevicePlan]
    states: Tensor | None = None
    replay: Replay | None = None

    @property
    def positions(self) -> Tensor:
        """Positions of the tokens, int64 [tokens]."""
        return self.indices[0, : len(self.hidden)]

    @property
    def slots(self) -> dict[int | None, Tensor]:
        """Slots of the tokens' KV by window, int64 [tokens]."""
        return dict(zip(self.windows, self.indices[_SLOTS:, : len(self.hidden)], strict=True))

    def row(self, number: int, count: int) -> Tensor:
        """The first numbers of a row of indices.

        Args:
            number: `TOKEN_IDS`, `LOGITS`, `PENDING_ROWS` or `PENDING_SLOTS`.
            count: Number of them in the sweep.
        """
        return self.indices[number, :count]

    @property
    def state_slots(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """Source and target of each sequence's state, int32 [sequences], and starts, int32 [sequences + 1], or None."""
        if self.states is None:
            return None
        count = len(self.states) // 3
        source, target, starts = self.states.split((count, count, count + 1))
        return source, target, starts


class SweepGraphs:
    """CUDA graphs of sweeps with their static buffers, by the size of the sweep.

    Where there are too many graphs, the least recently used one is dropped.

    Invariant: the buffers of a graph hold one sweep at a time.
    """

    def __init__(
        self,
        launch_layers: Callable[[StaticBuffers], None],
        capture: Callable[[Callable[[], None]], Replay],
        cut: Callable[[AttentionPlan, int | None], CutPlan],
        most_tokens: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Start without any graph.

        Args:
            launch_layers: launches all layers over static buffers.
            capture: records what its argument launches; the result replays it as often as it is called.
            cut: an attention plan for the device, in layers of a sliding window.
            most_tokens: larger sweeps are not captured.
        """
        self._launch_layers, self._capture, self._cut = launch_layers, capture, cut
        self._most_tokens, self._hidden_size, self._dtype, self._device = most_tokens, hidden_size, dtype, device
        self._buffers: OrderedDict[Size, StaticBuffers] = OrderedDict()
        # Sizes of sweeps that no graph has served, and by tokens of those that a graph for more tokens has.
        self._unserved: deque[Size] = deque(maxlen=_REMEMBERED)
        self._loosely_served: dict[int, list[Size]] = {}

    def buffers(self, packed: PackedBatch) -> StaticBuffers | None:
        """Return static buffers filled for a batch, but for the hidden states.

        None: the batch is not one to be captured, or not yet. To be called on the stream that computes.
        """
        if packed.num_tokens > self._most_tokens or not stays_on_device(packed):
            return None
        (segment,) = packed.segments
        cuts = {window: self._cut(plan, window) for window, plan in segment.plans.items()}
        size = self._size(packed, cuts)
        kept = min((kept for kept in self._buffers if kept.serves(size)), key=lambda kept: kept.tokens, default=None)
        if kept is None:
            due = self._due(size)
        else:
            due = None if kept.tokens == size.tokens else self._due_beside_a_larger(size)
        if due is not None:
            kept, buffers = due, self._add(due, cuts)
        elif kept is not None:
            buffers = self._buffers[kept]
            for window, cut in cuts.items():
                buffers.plans[window].fill(cut)
        else:
            return None
        self._buffers.move_to_end(kept)
        upload(_indices(packed, segment, buffers.indices.shape[1]), self._device, buffers.indices)
        if buffers.states is not None and segment.states is not None:
            assert kept.sequences is not None, "the graph has no capacity for states"
            upload(_state_slots(segment.states, kept.tokens, kept.sequences), self._device, buffers.states)
        return buffers

    def run(self, buffers: StaticBuffers, hidden: Tensor) -> Tensor:
        """Run the layers over static buffers, on the current stream.

        Args:
            hidden: [tokens, hidden], the input.

        Returns:
            The result, of the same shape, valid until the buffers are next used.
        """
        count = len(hidden)
        buffers.hidden[:count].copy_(hidden)
        buffers.hidden[count:].zero_()
        if buffers.replay is not None:
            buffers.replay()
        else:
            self._launch_layers(buffers)  # this sweep; and kernels are loaded, and libraries have their work space
            buffers.replay = self._capture(lambda: self._launch_layers(buffers))
        return buffers.hidden[:count]

    def _size(self, packed: PackedBatch, cuts: Mapping[int | None, CutPlan]) -> Size:
        """The size of the smallest graph for a batch."""
        tokens = min(rounded_up(packed.num_tokens), self._most_tokens)
        sequences, states = None, packed.segments[0].states
        if states is not None:  # tokens beyond those of the sweep are a sequence each, or together one more
            num_sequences = len(states.source)
            sequences = tokens if num_sequences == packed.num_tokens else rounded_up(num_sequences + 1)
        return Size(tokens, sequences, tuple((window, cut.capacity.rounded()) for window, cut in cuts.items()))

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

    def _add(self, size: Size, cuts: Mapping[int | None, CutPlan]) -> StaticBuffers:
        """New static buffers of a size, with these plans, in place of smaller ones for as many tokens."""
        for smaller in [kept for kept in self._buffers if kept.tokens == size.tokens and size.serves(kept)]:
            del self._buffers[smaller]
        if len(self._buffers) >= _MOST_GRAPHS:
            self._buffers.popitem(last=False)
        where = {"device": self._device}
        states = None if size.sequences is None else torch.empty(3 * size.sequences + 1, dtype=torch.int32, **where)
        aligned = -(-size.tokens // _ALIGNED) * _ALIGNED
        buffers = self._buffers[size] = StaticBuffers(
            hidden=torch.zeros(size.tokens, self._hidden_size, dtype=self._dtype, **where),
            indices=torch.zeros(_SLOTS + len(cuts), aligned, dtype=torch.int64, **where),
            windows=tuple(cuts),
            plans={window: cuts[window].prepare(self._device, capacity) for window, capacity in size.plans},
            states=states,
        )
        return buffers


def stays_on_device(packed: PackedBatch) -> bool:
    """Tell whether all sequences have their KV in the device's own pool."""
    return [segment.placement for segment in packed.segments] == [KVPlacement.DEVICE]


def _indices(packed: PackedBatch, segment: Segment, columns: int) -> np.ndarray:
    """`StaticBuffers.indices` of a batch. KV of tokens beyond those of the sweep is not stored."""
    of_tokens = packed.positions, packed.token_ids, packed.logits_indices, packed.pending_rows, packed.pending_slots
    indices = np.zeros((_SLOTS + len(segment.slots), columns), np.int64)
    indices[_SLOTS:, packed.num_tokens :] = NOT_STORED
    for row, values in zip(indices, (*of_tokens, *segment.slots.values()), strict=True):
        row[: len(values)] = values
    return indices


def _state_slots(states: StateRows, tokens: int, sequences: int) -> np.ndarray:
    """`StaticBuffers.states` of a batch. Tokens beyond those of the sweep begin states that are not kept."""
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
