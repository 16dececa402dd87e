"""What a micro-batch has come to on its way through the layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from torch import Tensor

from batchgen.core.kv_placement import KVPlacement
from batchgen.models.experts import Routes
from batchgen.ops import dispatch as ops
from batchgen.runtime.deferred import DeferredBatchState
from batchgen.runtime.graphs import StaticBuffers
from batchgen.runtime.memory.kv_cache import Moves
from batchgen.schedule.packed_batch import PackedBatch

Plans = Mapping[int | None, ops.PreparedAttention]  # by sliding window
A, B = TypeVar("A"), TypeVar("B")


def for_each(by_window: Mapping[int | None, A], make: Callable[[A], B]) -> dict[int | None, B]:
    """The same of each value; once where several windows have the same one."""
    made: dict[int, B] = {}
    for value in by_window.values():
        if id(value) not in made:
            made[id(value)] = make(value)
    return {window: made[id(value)] for window, value in by_window.items()}


@dataclass(frozen=True)
class BatchPart:
    """A segment of a batch, ready for attention: by sliding window, as of `batch.Segment`."""

    tokens: slice
    slots: Mapping[int | None, Tensor]
    rows: Mapping[int | None, tuple[Tensor, Tensor]] | None  # of K and of V, where they go to host memory by themselves
    plans: Plans


@dataclass
class BatchState:
    """What a micro-batch has come to on its way through the layers.

    hidden: on the compute device, or between layers in host memory. for_cpu, from_cpu: by layer, in host memory,
    queries of delegated sequences and memory for what comes of them; used up by CPU attention, which may be layers
    behind, and by what is launched after it. logits_indices: None: all of them. buffers: of a sweep that is a CUDA graph.
    begins: its last tokens, which leave it in the first layer. joined: deferred batches that are with it. in_place: its staged part, in
    layers in which that is not staged. moves: by sliding window. routes: of a layer whose experts are read on demand, where its tokens go, by chunk.
    """

    packed: PackedBatch | None
    host_positions: Tensor | None
    positions: Tensor
    logits_indices: Tensor | None
    parts: Mapping[KVPlacement, BatchPart]
    moves: Mapping[int | None, Moves] | None
    on_host: bool
    hidden: Tensor | None = None
    qkv: Tensor | None = None
    for_cpu: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    from_cpu: dict[int, Tensor] = field(default_factory=dict)
    attended: dict[KVPlacement, Tensor] = field(default_factory=dict)
    logits: Tensor | None = None
    buffers: StaticBuffers | None = None
    begins: DeferredBatchState | None = None
    joined: list[DeferredBatchState] = field(default_factory=list)
    in_place: BatchPart | None = None
    routes: list[Routes] | None = None

    @property
    def experts(self) -> list[int]:
        """Those that any of its tokens goes through."""
        return sorted({expert for _, chosen in self.routes for expert in chosen.flatten().tolist()})

    def positions_of(self, tokens: slice) -> Tensor:
        return self.positions if tokens.stop - tokens.start == len(self.positions) else self.positions[tokens]
