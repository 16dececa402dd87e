"""A micro-batch on its way through the layers."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from batchgen.core.kv_placement import KVPlacement
from batchgen.models.experts import Routes
from batchgen.ops.chosen_attention import PreparedPlan, StagedChoice
from batchgen.ops.state_slots import StateSlots
from batchgen.runtime.deferred import DeferredBatchState
from batchgen.runtime.graphs import GraphSweep
from batchgen.runtime.memory.kv_cache import Moves
from batchgen.runtime.memory.state_cache import StateMoves
from batchgen.schedule.packed_batch import PackedBatch

Plans = Mapping[int | None, PreparedPlan]  # by sliding window
A = TypeVar("A")
B = TypeVar("B")

# Activations that a micro-batch has not got yet, or needs no more.
RELEASED = torch.empty(0)


def for_each(
    by_window: Mapping[int | None, A],
    make: Callable[[A, int | None], B],
    kind: Callable[[int | None], Hashable] = lambda window: None,
) -> dict[int | None, B]:
    """Make something of the value of each sliding window; once for windows of one kind that have the same value.

    Args:
        by_window: Value of each window.
        make: Function of a value and its window.
        kind: Function that tells windows apart for which `make` makes different things of one value.
    """
    keys = {window: (id(value), kind(window)) for window, value in by_window.items()}
    made: dict[Hashable, B] = {}
    for window, value in by_window.items():
        if keys[window] not in made:
            made[keys[window]] = make(value, window)
    return {window: made[key] for window, key in keys.items()}


@dataclass(frozen=True)
class BatchPart:
    """A segment of a batch, ready for attention.

    Attributes:
        tokens: its tokens in the batch.
        slots: slots of new KV by sliding window, int64 [tokens], on the compute device.
        rows: rows of the host's pool that K and V go to by themselves, by sliding window; empty: they go to slots.
        plans: attention plans by sliding window.
        states: state rows of its sequences, on the device that updates them; None: the model has no state layers.
    """

    tokens: slice
    slots: Mapping[int | None, Tensor]
    rows: Mapping[int | None, tuple[Tensor, Tensor]]
    plans: Plans
    states: StateSlots | None = None


@dataclass
class BatchState:
    """A micro-batch on its way through the layers.

    Attributes:
        packed: its packed input.
        host_positions: positions of its tokens in host memory, int64 [tokens].
        positions: positions on the compute device.
        logits_indices: tokens whose logits are asked for, int64; None: all of them, in their order.
        parts: its segments by placement, but for the deferred one.
        moves: KV that passes through the staging buffer, by sliding window; empty: none does.
        first_token: number of tokens of the sweep's micro-batches before it.
        staged_choice: sequences that choose which pages pass through the staging buffer; None: none does.
        chosen_on_host: by layer, blocks of the host's pool to bring where pages are chosen, int64; used up by the copy.
        chosen_on_disk: by layer, table of chosen blocks in host memory, int64 [n, pages], filled when the Step that
            chose them has ended; used up by the read.
        state_moves: states that pass; None: none does.
        on_host: Whether its activations wait in host memory between layers.
        hidden: activations, [tokens, hidden], on the compute device, or between layers in host memory.
        qkv: queries, keys and values of the layer; of a state layer what its projections give.
        for_cpu: by layer, queries for CPU attention and memory for its results, in host memory; used up by CPU
            attention, which may be layers behind.
        from_cpu: by layer, results of CPU attention, in host memory.
        attended: results of attention by placement, on the compute device.
        logits: logits of its rows, while they come in vocabulary chunks.
        graph_sweep: the sweep as a CUDA graph runs it; None: it is launched.
        begins: deferred batch that begins a token with it, and leaves it in the first layer.
        joined: deferred batches that are with it.
        in_place: streamed part in layers in which its KV lies on the device.
        per_layer: inputs of all layers from per-layer embeddings, [layers, tokens, per_layer_size], where its
            activations are between layers; None: the model has none.
        routes: experts of each token, by chunk, in a layer whose experts are read on demand.
        token_ids: its tokens, int64 [tokens], where they are embedded.
        pending: tokens that only the device knows, and the place of each in `TokenTable`, int64, on the device;
            None: there are none.
    """

    packed: PackedBatch
    host_positions: Tensor
    positions: Tensor
    logits_indices: Tensor | None
    parts: Mapping[KVPlacement, BatchPart]
    moves: Mapping[int | None, Moves]
    on_host: bool
    hidden: Tensor = RELEASED
    qkv: Tensor = RELEASED
    for_cpu: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    from_cpu: dict[int, Tensor] = field(default_factory=dict)
    attended: dict[KVPlacement, Tensor] = field(default_factory=dict)
    logits: Tensor = RELEASED
    graph_sweep: GraphSweep | None = None
    begins: DeferredBatchState | None = None
    joined: list[DeferredBatchState] = field(default_factory=list)
    in_place: BatchPart | None = None
    per_layer: Tensor | None = None
    routes: list[Routes] | None = None
    state_moves: StateMoves | None = None
    first_token: int = 0
    token_ids: Tensor = RELEASED
    pending: tuple[Tensor, Tensor] | None = None
    staged_choice: StagedChoice | None = None
    chosen_on_host: dict[int, Tensor] = field(default_factory=dict)
    chosen_on_disk: dict[int, Tensor] = field(default_factory=dict)

    @property
    def experts(self) -> list[int]:
        """The experts that any of its tokens is routed to."""
        return sorted({expert for _, chosen in self.routes or () for expert in chosen.flatten().tolist()})

    @property
    def part_in_place(self) -> BatchPart:
        """The streamed part in a layer in which its KV lies on the device."""
        assert self.in_place is not None, "the batch has no KV that lies on the device in some layers"
        return self.in_place

    def positions_of(self, tokens: slice) -> Tensor:
        return self.positions if tokens.stop - tokens.start == len(self.positions) else self.positions[tokens]
