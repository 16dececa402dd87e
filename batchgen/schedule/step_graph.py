"""The vocabulary of sweeps: a Step, its kinds and lanes, and what a layer or a micro-batch moves. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from batchgen.core.kv_placement import KVPlacement

Lane = Literal["compute", "cpu_attention", "h2d", "d2h", "disk_read", "disk_write", "receive", "send"]
LANES: tuple[Lane, ...] = get_args(Lane)
StepKind = Literal[
    "read_weight", "read_dense", "read_experts", "load_weight", "expand_weight", "read_head", "load_head",
    "choose_pages", "read_cache", "load_cache", "store_cache", "write_cache", "swap_in", "swap_out",
    "embed", "receive", "load_hidden", "store_hidden", "send",
    "pre", "attention", "route", "post", "head", "layers",
    "send_qkv", "cpu_attention", "load_attention",
    "send_deferred", "attend_deferred", "join_deferred",
]  # fmt: skip
# The lane of each kind of Step; `batchgen.runtime.steps.handlers` has its work.
KINDS: dict[StepKind, Lane] = {
    "read_weight": "disk_read", "read_dense": "disk_read", "read_experts": "disk_read",
    "load_weight": "h2d", "expand_weight": "compute", "read_head": "disk_read", "load_head": "h2d",
    "choose_pages": "compute",  # of KV that passes through a staging buffer
    "read_cache": "disk_read", "load_cache": "h2d", "store_cache": "d2h", "write_cache": "disk_write",
    "swap_in": "h2d", "swap_out": "d2h",  # KV of sequences that move to the device's pool, or to the host's
    "embed": "compute", "load_hidden": "h2d", "store_hidden": "d2h",
    "receive": "receive", "send": "send",  # activations, between the stages of a pipeline
    "pre": "compute", "attention": "compute", "route": "compute", "post": "compute", "head": "compute",
    "layers": "compute",  # all of them, where nothing moves
    "send_qkv": "d2h", "cpu_attention": "cpu_attention", "load_attention": "compute",
    "send_deferred": "d2h", "attend_deferred": "cpu_attention", "join_deferred": "compute",
}  # fmt: skip
# Buffers for what is on its way: one in use, one being filled.
WEIGHT_SLOTS = KV_SLOTS = HIDDEN_SLOTS = HEAD_SLOTS = 2
# Micro-batches whose queries for CPU attention, and its results, are in host memory at once.
EXCHANGE_SLOTS = 2


class Step(NamedTuple):  # thousands are made in a second
    """One task of a sweep.

    Attributes:
        id: number of the Step, counting up over all sweeps.
        kind: kind of work.
        lane: lane that does it.
        sweep: number of the sweep.
        layer: number of the layer; of Steps of the head, the vocabulary chunk.
        batch: number of the micro-batch.
        weight_slot: buffer of the weights that the Step fills or reads; None: they are resident, or it reads none.
        kv_slot: buffer of the streamed KV that the Step fills or reads; None: it does neither.
        after: ids of Steps that must have ended, all smaller than `id`.
        deferred_batch: number of the deferred batch that the Step works for; None: it works for the micro-batch.
    """

    id: int
    kind: StepKind
    lane: Lane
    sweep: int
    layer: int
    batch: int
    weight_slot: int | None
    kv_slot: int | None
    after: tuple[int, ...]
    deferred_batch: int | None = None

    @property
    def weight_buffer(self) -> int:
        """The buffer of the weights, of a Step that fills one."""
        assert self.weight_slot is not None, self
        return self.weight_slot

    @property
    def kv_buffer(self) -> int:
        """The buffer of the streamed KV, of a Step that fills or empties one."""
        assert self.kv_slot is not None, self
        return self.kv_slot


@dataclass(frozen=True)
class Streams:
    """The layers that need something brought to the compute device in every sweep.

    Attributes:
        accelerated: Whether the compute device has a memory of its own, next to the host's.
        weights: for each layer, whether any of its weights are to be loaded.
        disk_weights: for each layer, whether any of its weights are on disk.
        dequantized: Whether weights are stored in 4 bits, and dequantized into as many buffers as layers can be in use
            at once (two, with sequences that the CPU attends to).
        packed_tokens: most tokens of a sweep in which such weights are multiplied as they are stored instead.
        vocabulary_chunks: chunks in which the output matrix comes over; 0: it stays on the device.
        kv_on_device: for each layer, whether KV that is streamed in others is on the device; empty: in none.
        kv_sources: for each layer, the layer whose KV it attends to; empty: each attends to its own.
        state_layers: numbers of the layers that keep a state, which their attention writes too, instead of KV.
        on_demand: for each layer, whether it has experts on disk that can be read once it is known which ones the
            tokens are routed to; empty: none has.
        on_demand_tokens: most tokens of a sweep in which they are.
        receives: Whether activations come from the previous stage of a pipeline, instead of being embedded.
        sends: Whether activations go to the next stage of a pipeline, instead of to the head.
        choosing: for each layer, whether decoding tokens choose pages of their KV there; empty: in none.
    """

    accelerated: bool
    weights: tuple[bool, ...]
    disk_weights: tuple[bool, ...]
    dequantized: bool = False
    vocabulary_chunks: int = 0
    kv_on_device: tuple[bool, ...] = ()
    state_layers: tuple[int, ...] = ()
    kv_sources: tuple[int, ...] = ()
    on_demand: tuple[bool, ...] = ()
    on_demand_tokens: int = 0
    packed_tokens: int = 0
    receives: bool = False
    sends: bool = False
    choosing: tuple[bool, ...] = ()

    @property
    def num_layers(self) -> int:
        return len(self.weights)

    def expands(self, num_tokens: int | None) -> bool:
        """Tell whether 4-bit weights are dequantized layer by layer in a sweep of so many tokens; None: of many.

        A sweep of deferred batches alone has no tokens of its own.
        """
        is_packed = num_tokens is not None and 0 < self.packed_tokens >= num_tokens
        return self.dequantized and not is_packed

    def stages_kv(self, layer: int) -> bool:
        """Tell whether streamed KV passes through a staging buffer in this layer."""
        return not self.kv_on_device or not self.kv_on_device[self.kv_source(layer)]

    def chooses_staged(self, layer: int) -> bool:
        """Tell whether pages are chosen in this layer before they pass through a staging buffer."""
        return bool(self.choosing) and self.choosing[layer] and self.stages_kv(layer)

    def kv_source(self, layer: int) -> int:
        """The layer whose KV this layer attends to: itself, mostly."""
        return self.kv_sources[layer] if self.kv_sources else layer


@dataclass(frozen=True)
class BatchFlow:
    """The data that one micro-batch of a sweep moves.

    Attributes:
        placements: placements of its sequences that attention sees (`KVPlacement.in_sweep`). Those of DEFERRED begin a
            token, and leave the batch after QKV of the first layer (`deferred_batches`).
        history: Whether STREAMED sequences have KV to bring in.
        stored: Whether new KV goes back to host memory.
        disk_read: Whether some KV comes from disk.
        disk_write: Whether some KV goes to disk.
        hidden_on_host: Whether activations wait in host memory between layers.
        samples: Whether there are rows for the head.
        swaps_in: Whether KV of DEVICE sequences comes from the host's pool to the device's, for good.
        swaps_out: Whether KV of other sequences comes from the device's pool to the host's, for good.
        chooses: Whether STREAMED sequences choose pages.
    """

    placements: frozenset[KVPlacement] = frozenset({KVPlacement.DEVICE})
    history: bool = False
    stored: bool = False
    disk_read: bool = False
    disk_write: bool = False
    hidden_on_host: bool = False
    samples: bool = True
    swaps_in: bool = False
    swaps_out: bool = False
    chooses: bool = False

    @property
    def moves(self) -> bool:
        """Tell whether anything of the batch is moved, or attended to elsewhere."""
        return self.hidden_on_host or self.swaps_in or not self.placements <= {KVPlacement.DEVICE}

    @property
    def stays(self) -> bool:
        """Tell whether any of its sequences goes through all layers in the sweep."""
        return not self.placements <= {KVPlacement.DEFERRED}
