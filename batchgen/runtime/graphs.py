"""Decode sweeps captured once as CUDA graphs and replayed.

Where weights and KV are in the device's memory, launching the layers' kernels one by one takes longer than running
them.

A CUDA graph reads fixed memory, its static buffers, into which later sweeps of about its size are written: tokens up to
a round number, and attention plans up to a capacity. What a sweep does not fill of that capacity is computed and not
stored.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from batchgen.core.kv_placement import KVPlacement
from batchgen.ops.attention_plan import AttentionPlan
from batchgen.ops.host_copy import upload
from batchgen.schedule.packed_batch import PackedBatch

if TYPE_CHECKING:
    from batchgen.ops.dispatch import Capacity, CutPlan, DevicePlan

# Sweeps of one size that are launched as usual before it is captured: capturing takes as long as some sweeps.
_UNCAPTURED = 3
_MOST_GRAPHS = 32
NOT_STORED = -1  # slot of a token whose KV, or state, goes nowhere

Replay = Callable[[], None]
Size = tuple[int, tuple[tuple[int | None, "Capacity"], ...]]  # tokens, and the capacity of each window's plan


@dataclass
class StaticBuffers:
    """The static buffers that the layers of a CUDA graph read and write.

    Attributes:
        hidden: [tokens, hidden], the input, and then the result.
        positions: int64 [tokens].
        slots: int64 [tokens], by window.
        plans: by window.
        states: state slots of the tokens, source and target, int32 [tokens], and starts, int32 [tokens + 1]; None: the
            model has no state layers.
        replay: runs the layers; None: not captured yet.
    """

    hidden: Tensor
    positions: Tensor
    slots: Mapping[int | None, Tensor]
    plans: Mapping[int | None, DevicePlan]
    states: tuple[Tensor, Tensor, Tensor] | None = None
    replay: Replay | None = None


class DecodeGraphs:
    """CUDA graphs of decode sweeps with their static buffers, by the size of the sweep.

    A size is a number of tokens, rounded up, and the capacity of the attention plans. Where there are too many graphs,
    the least recently used one is dropped.

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
        self._seen: Counter[Size] = Counter()

    def buffers(self, packed: PackedBatch) -> StaticBuffers | None:
        """Return static buffers filled for a batch, but for the hidden states.

        None: the batch is not one to be captured, or not yet. To be called on the stream that computes.
        """
        if not is_decode(packed) or packed.num_tokens > self._most_tokens:
            return None
        (segment,) = packed.segments
        cuts = {window: self._cut(plan, window) for window, plan in segment.plans.items()}
        capacities = tuple((window, cut.capacity.rounded()) for window, cut in cuts.items())
        size = min(rounded_up(packed.num_tokens), self._most_tokens), capacities
        buffers = self._buffers.get(size)
        if buffers is None:
            self._seen[size] += 1
            if self._seen[size] <= _UNCAPTURED:
                return None
            buffers = self._buffers[size] = self._new(*size, cuts, segment.states is not None)
            if len(self._buffers) > _MOST_GRAPHS:
                given_up, _ = self._buffers.popitem(last=False)
                self._seen[given_up] = 0
        else:
            for window, cut in cuts.items():
                buffers.plans[window].fill(cut)
        self._buffers.move_to_end(size)
        count = packed.num_tokens
        buffers.positions[:count].copy_(upload(packed.positions, self._device))
        for window, slots in segment.slots.items():
            buffers.slots[window][:count].copy_(upload(slots, self._device))
            buffers.slots[window][count:].fill_(NOT_STORED)
        if buffers.states is not None and segment.states is not None:
            for rows, slots in zip(buffers.states, (segment.states.source, segment.states.target), strict=False):
                rows[:count].copy_(upload(slots, self._device))
                rows[count:].fill_(NOT_STORED)
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

    def _new(
        self, tokens: int, capacities: tuple, cuts: Mapping[int | None, CutPlan], has_states: bool
    ) -> StaticBuffers:
        where = {"device": self._device}
        source, target = (torch.full((tokens,), NOT_STORED, dtype=torch.int32, **where) for _ in range(2))
        starts = torch.arange(tokens + 1, dtype=torch.int32, **where)
        return StaticBuffers(
            hidden=torch.zeros(tokens, self._hidden_size, dtype=self._dtype, **where),
            positions=torch.zeros(tokens, dtype=torch.int64, **where),
            slots={w: torch.full((tokens,), NOT_STORED, dtype=torch.int64, **where) for w in cuts},
            plans={window: cuts[window].prepare(self._device, capacity) for window, capacity in capacities},
            states=(source, target, starts) if has_states else None,
        )


def is_decode(packed: PackedBatch) -> bool:
    """Tell whether each sequence has one token, whose logits are asked for, and its KV in the device's own pool."""
    segments = packed.segments
    if (
        len(segments) != 1
        or segments[0].placement is not KVPlacement.DEVICE
        or len(packed.logits_rows) < packed.num_tokens
    ):
        return False
    states = segments[0].states
    has_chunks = states is not None and len(states.source) < packed.num_tokens
    return not has_chunks and not any(plan.prefill for plan in segments[0].plans.values())


def rounded_up(tokens: int) -> int:
    """The tokens rounded up to a multiple of 8, and of an eighth of the power of two below.

    There are few such sizes, and none is much too large.
    """
    step = max(8, 1 << max(0, tokens.bit_length() - 4))
    return -(-tokens // step) * step
