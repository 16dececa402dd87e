"""Decode sweeps captured once and replayed (CUDA graphs): where weights and KV are in the device's memory, launching the layers'
kernels one by one takes longer than running them.

A captured sweep reads fixed memory, a Frame, which later sweeps of about its size are written into: tokens up to a round
number, and attention plans up to a capacity. What a frame has room for and a sweep does not fill is computed and not stored.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from batchgen.ops.attention_plan import AttentionPlan
from batchgen.ops.host_copy import upload
from batchgen.runtime.batch import PackedBatch

if TYPE_CHECKING:
    from batchgen.ops.dispatch import Capacity, CutPlan, DevicePlan

# Sweeps of one size that are launched as usual before it is captured: capturing takes as long as some sweeps.
_UNCAPTURED = 3
_MOST_FRAMES = 32
NOT_STORED = -1  # slot of a token whose KV goes nowhere

Replay = Callable[[], None]
Size = tuple[int, tuple[tuple[int | None, "Capacity"], ...]]  # tokens, and the capacity of each window's plan


@dataclass
class Frame:
    """What the layers of a captured sweep read and write. hidden: [tokens, hidden], the input, and then the result.
    positions, slots: int64 [tokens]. plans: by window. replay: runs the layers; None: not captured yet.
    """

    hidden: Tensor
    positions: Tensor
    slots: Tensor
    plans: Mapping[int | None, DevicePlan]
    replay: Replay | None = None


class DecodeGraphs:
    """Frames by size; of many, those unused for longest are given up. Invariant: a frame holds one sweep at a time."""

    def __init__(
        self,
        launch_layers: Callable[[Frame], None],
        capture: Callable[[Callable[[], None]], Replay],
        cut: Callable[[AttentionPlan], CutPlan],
        most_tokens: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """launch_layers: all layers over a frame. capture(work): what work() launches, to be run as often as called. cut: a plan
        for the device. most_tokens: larger sweeps are not captured.
        """
        self._launch_layers, self._capture, self._cut = launch_layers, capture, cut
        self._most_tokens, self._hidden_size, self._dtype, self._device = most_tokens, hidden_size, dtype, device
        self._frames: OrderedDict[Size, Frame] = OrderedDict()
        self._seen: Counter[Size] = Counter()

    def frame(self, packed: PackedBatch) -> Frame | None:
        """The frame for a batch, with all of it but the hidden states in place; None: the batch is not one to be captured, or
        not yet. To be called on the stream that computes.
        """
        if not is_decode(packed) or packed.num_tokens > self._most_tokens:
            return None
        (segment,) = packed.segments
        cuts = {window: self._cut(plan) for window, plan in segment.plans.items()}
        capacities = tuple((window, cut.capacity.rounded()) for window, cut in cuts.items())
        size = min(rounded_up(packed.num_tokens), self._most_tokens), capacities
        frame = self._frames.get(size)
        if frame is None:
            self._seen[size] += 1
            if self._seen[size] <= _UNCAPTURED:
                return None
            frame = self._frames[size] = self._new(*size, cuts)
            if len(self._frames) > _MOST_FRAMES:
                given_up, _ = self._frames.popitem(last=False)
                self._seen[given_up] = 0
        else:
            for window, cut in cuts.items():
                frame.plans[window].fill(cut)
        self._frames.move_to_end(size)
        count = packed.num_tokens
        frame.positions[:count].copy_(upload(packed.positions, self._device))
        frame.slots[:count].copy_(upload(segment.slots, self._device))
        frame.slots[count:].fill_(NOT_STORED)
        return frame

    def run(self, frame: Frame, hidden: Tensor) -> Tensor:
        """The layers over a frame, on the current stream. hidden: [tokens, hidden], what goes in; returns what comes out, valid
        until the frame is next used.
        """
        count = len(hidden)
        frame.hidden[:count].copy_(hidden)
        frame.hidden[count:].zero_()
        if frame.replay is not None:
            frame.replay()
        else:
            self._launch_layers(frame)  # this sweep; and kernels are loaded, and libraries have their work space
            frame.replay = self._capture(lambda: self._launch_layers(frame))
        return frame.hidden[:count]

    def _new(self, tokens: int, capacities: tuple, cuts: Mapping[int | None, CutPlan]) -> Frame:
        where = {"device": self._device}
        return Frame(
            hidden=torch.zeros(tokens, self._hidden_size, dtype=self._dtype, **where),
            positions=torch.zeros(tokens, dtype=torch.int64, **where),
            slots=torch.full((tokens,), NOT_STORED, dtype=torch.int64, **where),
            plans={window: cuts[window].prepare(self._device, capacity) for window, capacity in capacities},
        )


def is_decode(packed: PackedBatch) -> bool:
    """Whether every sequence has a single token, whose logits are asked for, and its KV in the device's own pool."""
    segments = packed.segments
    if len(segments) != 1 or segments[0].residency != "resident" or len(packed.logits_rows) < packed.num_tokens:
        return False
    return not any(plan.prefill for plan in segments[0].plans.values())


def rounded_up(tokens: int) -> int:
    """To a multiple of 8, and of an eighth of the power of two below: few sizes, none much too large."""
    step = max(8, 1 << max(0, tokens.bit_length() - 4))
    return -(-tokens // step) * step
