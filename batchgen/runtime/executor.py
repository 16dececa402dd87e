"""Takes the micro-batches of a sweep through all layers: what each Step does.

The order of Steps and what they wait for is `steps.graph`'s, running them `steps.threads`'s. With everything in the compute
device's memory all Steps are in one lane, and this is the plain serial order.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from batchgen.core.dtypes import INT4
from batchgen.core.kv_placement import KVPlacement
from batchgen.core.routing import RoutingCounts
from batchgen.models import layers
from batchgen.models.config import ModelConfig
from batchgen.models.rope import RopeConfig
from batchgen.ops import cpp as kernels
from batchgen.ops import dispatch as ops
from batchgen.ops import scratch
from batchgen.ops.attention_plan import AttentionPlan
from batchgen.ops.host_copy import upload
from batchgen.runtime.batch_state import BatchPart, BatchState, Plans, for_each
from batchgen.runtime.dedicated_core import DedicatedCore
from batchgen.runtime.deferred import DeferredBatchState, slices, with_deferred
from batchgen.runtime.graphs import DecodeGraphs, StaticBuffers
from batchgen.runtime.lanes import Lanes, OnStep
from batchgen.runtime.memory.activations import Activations
from batchgen.runtime.memory.kv_cache import KVCache
from batchgen.runtime.memory.tiers import Tiers
from batchgen.runtime.memory.weights import Weights
from batchgen.runtime.streams import Driver, StreamLanes
from batchgen.runtime.token_table import TokenTable
from batchgen.schedule.deferred_batches import DeferredBatches
from batchgen.schedule.packed_batch import PackedBatch, Segment, empty_batch
from batchgen.schedule.sequence import PENDING, LogitsRow
from batchgen.schedule.step_graph import Step, Sweeps

CPU = torch.device("cpu")
_BEFORE = 1 << 40  # Steps that warm up are numbered so far below the others
# (whose, fp32 logits [rows, columns], the token of the first column) as soon as they are there; returns the tokens chosen,
# int64 [rows], if any are.
OnLogits = Callable[[Sequence[LogitsRow], Tensor, int], Tensor | None]


class AdjacentRanks(Protocol):
    """The ranks of the previous and the next stage of a pipeline. Each call waits until it is done."""

    def receive_from_previous(self, hidden: Tensor) -> None:
        """Fill `hidden`, in host memory, with the next activations of the previous stage."""

    def send_to_next(self, hidden: Tensor) -> None:
        """Hand activations in host memory to the next stage."""


@dataclass(frozen=True)
class SweepOptions:
    """How an `Executor` runs sweeps.

    max_positions: sequences never get longer than this. batches_on_host, batch_tokens, delegated_seqs, deferred_seqs: as of
    `Activations`. chunk_tokens, logit_rows: tokens that go through a layer's products, sequences whose logits
    are made together; None: a micro-batch. captured_tokens: decode sweeps up to this size become CUDA graphs (`graphs`); for models
    whose weights and KV are all on the device. attention_isa: the instruction set that attends on the CPU; "": the
    process's. reduce: as of `layers.post_attention`, on tensors of the compute device. makes_logits: False: of a rank that is not asked for them.
    adjacent_ranks: of a stage of a pipeline. For the rest see `Lanes`.
    """

    max_positions: int
    batches_on_host: int = 0
    batch_tokens: int = 0
    delegated_seqs: int = 0
    deferred_seqs: int = 0
    chunk_tokens: int | None = None
    logit_rows: int | None = None
    captured_tokens: int = 0
    attention_isa: str = ""
    reduce: layers.Reduce | None = None
    makes_logits: bool = True
    adjacent_ranks: AdjacentRanks | None = None
    serial: bool = False
    shared_cores: bool = False
    on_step: OnStep | None = None


class Executor:
    """A model and its KV, ready to run sweeps. Not for use from several threads at once.

    Attributes:
        routing: What its experts' tokens were, where the host computes.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        kv_cache: KVCache,
        tiers: Tiers,
        options: SweepOptions,
    ) -> None:
        """tiers: those that the weights and the KV are in."""
        self.config, self.weights, self.kv_cache = config, weights, kv_cache
        self.links, self._tiers, self._options = tiers.links, tiers, options
        self._device, self._compute_tier = tiers.device, tiers.compute_tier
        self.lanes = self._make_lanes()
        # If it is not closed: memory goes when the executor has gone, and copies may be reading and writing it.
        weakref.finalize(self, self.lanes.close).atexit = False
        of_stage = {"embeds": config.embeds, "has_head": config.has_head}
        self._sweeps = Sweeps(weights.residency.streams(self._compute_tier, kv_cache.on_device, **of_stage))
        self.activations = Activations(
            config,
            weights.dtype,
            tiers.arenas,
            options.batches_on_host,
            options.batch_tokens,
            options.delegated_seqs,
            options.deferred_seqs,
        )
        self.routing = RoutingCounts(config.num_experts, config.experts_per_token, config.expert_layers)
        self._closed = False
        self._logits: Tensor | None = None
        self._ropes: dict[RopeConfig | None, layers.Rope | None] = {None: None}
        for rope in {config.rope_of(layer) for layer in range(config.num_layers)} - {None}:
            with _kernels_alone():
                cos, sin = layers.rope_table(rope, config.head_dim, options.max_positions)
            self._ropes[rope] = cos.to(self._device), sin.to(self._device)
        captured = options.captured_tokens
        self._graphs = self._make_graphs(tiers.driver, captured) if captured and tiers.driver else None
        self._batch_of: dict[int, BatchState] = {}  # Step -> what it works on
        self._deferred_batches: dict[int, DeferredBatchState] = {}  # under way, by number
        self._deferred_of: dict[int, DeferredBatchState] = {}  # Step -> whose it is
        self._on_logits: OnLogits = _nobody_takes_logits
        self._vocabulary_chunks = self._one_batch = False
        # Tokens can be taken over from one sweep to the next where embeddings need nothing of the host.
        ahead = tiers.driver is not None and not options.serial and weights.embeds_on_device
        self._tokens = TokenTable(self._device) if ahead else None

    @property
    def compute_tier(self) -> str:
        """The tier that is the compute device's own memory."""
        return self._compute_tier

    def _make_lanes(self) -> Lanes | StreamLanes:
        on_thread = partial(_prepare_thread, dedicated_core=self._tiers.dedicated_core)
        options = {"serial": self._options.serial, "on_step": self._options.on_step, "on_thread": on_thread}
        perform = weakref.WeakMethod(self._perform)  # lanes' threads keep no engine alive that nobody has any more
        if self._tiers.driver is None:
            return Lanes(lambda step: perform()(step), shared_cores=self._options.shared_cores, **options)
        return StreamLanes(lambda step: perform()(step), self._tiers.driver, **options)

    @torch.inference_mode()
    def run(
        self,
        batches: Sequence[PackedBatch],
        on_logits: OnLogits,
        *,
        vocabulary_chunks: bool = False,
        deferred_batches: DeferredBatches | None = None,
    ) -> Callable[[], None] | None:
        """Computes one sweep: the batches' KV, and the logits asked for.

        deferred_batches: of the same job, sequences whose attention is deferred. Those that the batches begin are added, those whose last
        layer the sweep computes have their logits too. With some of them under way there need be no batch.

        vocabulary_chunks: on_logits takes chunks of the vocabulary, one after the other for the same rows, where the
        output matrix comes in chunks; otherwise it gets the whole.

        On a device with streams the sweep may only have been launched; then the function returned waits for it.
        """
        self._vocabulary_chunks = vocabulary_chunks
        with _kernels_alone(), self._computing():
            wait = self._run(batches, on_logits, DeferredBatches() if deferred_batches is None else deferred_batches)
        if wait is not None and self._tokens is None:
            wait()
            return None
        return wait

    def drop(self, deferred_batches: DeferredBatches) -> None:
        """Forgets deferred batches that are under way; returns when the CPU is done with their KV. Raises what a Step raised."""
        if deferred_batches.waiting:
            for deferred_batch in deferred_batches.waiting:
                self._deferred_batches.pop(deferred_batch.number, None)
            deferred_batches.waiting = []
            self.lanes.drain()

    @torch.inference_mode()
    def warm_up(
        self, sweeps: Iterable[Sequence[PackedBatch]], on_logits: OnLogits, *, vocabulary_chunks: bool = False
    ) -> None:
        """Runs sweeps for nothing but what a first use of each operation brings with it.

        Kernels are compiled and loaded, libraries take their work space. That may wait for everything on the device, which would
        not end while something there waits for the host; so here every Step is done before the next one is launched.

        Of the model's layers those are run that differ, in where their weights are and what they attend to. KV that is written is
        set to zero again, and nothing is counted. vocabulary_chunks: as of `run`. To be called before the first of these.
        """
        chosen = self._unlike_layers()
        on_device = [self.kv_cache.on_device[j] for j in chosen if self.kv_cache.on_device]
        made = Sweeps(self.weights.residency.of_layers(chosen).streams(self._compute_tier, on_device))
        self._on_logits, self._vocabulary_chunks = on_logits, vocabulary_chunks
        deferred_batches = DeferredBatches()
        with self.lanes.one_by_one(), _kernels_alone(), self._computing():
            for batches in sweeps:
                to_run = batches
                while to_run:
                    prepared: list[BatchState] = []
                    self.lanes.prepare(lambda: prepared.extend(self._prepare_all(to_run)))  # noqa: B023
                    self.lanes.execute(self._warm_up_steps(made, prepared, chosen, deferred_batches))
                    self.lanes.drain()
                    to_run = [empty_batch()] if deferred_batches.waiting else []  # until they are through all layers
                self._deferred_batches.clear()
                self.lanes.prepare(lambda: [self._forget_kv(batch, chosen) for batch in batches])  # noqa: B023
        for counted in (self.weights, self.kv_cache, self.routing, *(self.links or ())):
            counted.reset_counts()

    def _unlike_layers(self) -> list[int]:
        """One layer of each kind, and the last one, which is told apart."""
        kinds: dict[tuple, int] = {}
        on_device = self.kv_cache.on_device or (False,) * self.config.num_layers
        for layer, tiers in enumerate(self.weights.residency.layers):
            kind = self.config.windows[layer], self.config.has_experts(layer), on_device[layer]
            kinds.setdefault((*kind, *sorted(tiers.items())), layer)
        return sorted({*kinds.values(), self.config.num_layers - 1})

    def _warm_up_steps(
        self, made: Sweeps, batches: Sequence[BatchState], layers: Sequence[int], deferred_batches: DeferredBatches
    ) -> Iterator[Step]:
        """As `_bound_to`, of a model of these layers; with numbers that no later Step has."""
        for step in made.steps([b.packed.flow(b.on_host) for b in batches], deferred_batches, lambda step_id: True):
            of_head = step.kind in ("head", "load_head")
            step = step._replace(
                id=step.id - _BEFORE,
                sweep=step.sweep - _BEFORE,
                layer=step.layer if of_head else layers[step.layer],
                after=tuple(earlier - _BEFORE for earlier in step.after),
            )
            self._bind(step, batches)
            yield step

    def _forget_kv(self, packed: PackedBatch, layers: Sequence[int]) -> None:
        """Zeros in the blocks of memory that the batch's new KV went to."""
        for segment in packed.segments:
            resident = segment.placement is KVPlacement.DEVICE
            for layer in layers:
                window = self.config.windows[layer]
                staged = segment.placement is KVPlacement.STREAMED
                slots = packed.staging[window].host_slots if staged else segment.slots[window]
                blocks = torch.from_numpy(np.unique(slots // self.kv_cache.shape.kv_block_size))
                if len(blocks):
                    pool = self.kv_cache.pools[self._compute_tier if resident else "cpu"][layer]
                    pool.index_fill_(0, blocks.to(pool.device), 0)

    def _run(
        self, batches: Sequence[PackedBatch], on_logits: OnLogits, deferred_batches: DeferredBatches
    ) -> Callable[[], None] | None:
        batches = batches or [empty_batch()]
        prepared: list[BatchState] = []

        def prepare() -> None:
            buffers = self._graphs.buffers(batches[0]) if self._graphs and len(batches) == 1 else None
            if buffers is not None:
                prepared.append(self._in_buffers(batches[0], buffers))
            else:
                prepared.extend(self._prepare_all(batches))

        self.lanes.prepare(prepare)
        self._on_logits = on_logits
        wait = self.lanes.execute(self._bound_to(prepared, deferred_batches))
        for deferred_batch in deferred_batches.ended:
            del self._deferred_batches[deferred_batch.number]
        return wait

    @property
    def sampled_token(self) -> int:
        """What stands for a token that a sweep has sampled, in the next one: PENDING, where that may be run ahead."""
        return 0 if self._tokens is None else PENDING

    @property
    def bytes_moved(self) -> dict[str, int]:
        """By lane, since the executor was made."""
        moved = {
            "disk_read": self.weights.disk_bytes_read + self.kv_cache.disk_bytes_read,
            "disk_write": self.kv_cache.disk_bytes_written,
        }
        if self.links:
            moved |= {"h2d": self.links[0].moved_bytes, "d2h": self.links[1].moved_bytes}
        return moved

    @property
    def busy_s(self) -> dict[str, float]:
        return dict(self.lanes.busy_s)

    @property
    def stalled_s(self) -> dict[str, float]:
        return dict(self.lanes.stalled_s)

    @property
    def peak_bytes(self) -> dict[str, int]:
        """Allocated of the tiers beside the host's memory: all of it is beforehand."""
        return {"gpu": self.weights.arenas["gpu"].allocated_bytes, "disk": self.kv_cache.disk_bytes}

    def close(self) -> None:
        """Ends what is under way, gives files back and lets go of all memory, whoever has this executor. Counts stay."""
        if self._closed:
            return
        self._closed = True
        self.lanes.close()
        self.kv_cache.close()
        self.weights.close()
        self._tiers.close()
        scratch.release()
        for held in (self._ropes, self._batch_of, self._deferred_batches, self._deferred_of):
            held.clear()
        self._on_logits = _nobody_takes_logits
        self._logits = self._graphs = self._tokens = None
        del self.activations

    def _prepare_all(self, batches: Sequence[PackedBatch]) -> list[BatchState]:
        first_on_host = len(batches) - self._options.batches_on_host
        return [self._prepare(batch, k >= first_on_host) for k, batch in enumerate(batches)]

    def _prepare(self, packed: PackedBatch, on_host: bool) -> BatchState:
        """What all layers need of a batch, as tensors."""
        parts, begins = {}, None
        for segment in packed.segments:
            device = CPU if segment.placement in (KVPlacement.CPU, KVPlacement.DEFERRED) else self._device
            plans = {window: self._prepared(plan, device) for window, plan in segment.plans.items()}
            if segment.placement is KVPlacement.DEFERRED:
                begins = self._prepare_deferred(packed, segment, plans)
                continue
            rows = self._rows_on_host(segment) if segment.placement is KVPlacement.CPU else None
            tokens, slots = slice(segment.start, segment.stop), self._uploaded(segment.slots)
            parts[segment.placement] = BatchPart(tokens, slots, rows, plans)
        in_place = None
        if packed.in_place:
            plans = {window: self._prepared(plan, self._device) for window, plan in packed.in_place.plans.items()}
            in_place = replace(parts[KVPlacement.STREAMED], slots=self._uploaded(packed.in_place.slots), plans=plans)
        moves = None
        if packed.staging:
            moves = for_each(packed.staging, lambda staging: self.kv_cache.prepare(staging, self._device))
        positions = torch.from_numpy(packed.positions), upload(packed.positions, self._device)
        indices = None  # all rows, in their order
        if len(packed.logits_rows) < packed.num_tokens or on_host:  # whose memory is the next batch's before the head
            indices = upload(packed.logits_indices, self._device)
        return BatchState(packed, *positions, indices, parts, moves, on_host, begins=begins, in_place=in_place)

    def _uploaded(self, slots: Mapping[int | None, np.ndarray]) -> dict[int | None, Tensor]:
        return for_each(slots, lambda own: upload(own, self._device))

    def _rows_on_host(self, segment: Segment) -> dict[int | None, tuple[Tensor, Tensor]]:
        """By sliding window, the rows of the host's pool, flat, where K and V of the segment's tokens go."""
        shape = self.kv_cache.shape

        def rows(slots: np.ndarray) -> tuple[Tensor, Tensor]:
            keys = upload(ops.kv_rows(slots, shape.kv_heads, shape.kv_block_size).numpy(), self._device)
            return keys, keys + shape.kv_heads * shape.kv_block_size

        return for_each(segment.slots, rows)

    def _prepare_deferred(self, packed: PackedBatch, segment: Segment, plans: Plans) -> DeferredBatchState:
        positions = upload(packed.positions[segment.start : segment.stop], self._device)
        slots = torch.from_numpy(packed.exchange_slots), upload(packed.exchange_slots, self._device)
        return DeferredBatchState(packed.deferred_rows, positions, *slots, self._rows_on_host(segment), plans)

    def _prepared(self, plan: AttentionPlan, device: torch.device) -> ops.PreparedAttention:
        return ops.prepare_attention(plan, *self._attention_shape, device=device, isa=self._options.attention_isa)

    @property
    def _attention_shape(self) -> tuple:
        config, shape = self.config, self.kv_cache.shape
        heads = config.num_heads, config.num_kv_heads, config.head_dim
        return *heads, shape.kv_block_size, self.weights.dtype, shape.format

    # Sweeps as CUDA graphs.

    def _make_graphs(self, driver: Driver, most_tokens: int) -> DecodeGraphs | None:
        config = self.config
        group = config.num_heads // config.num_kv_heads
        if not ops.can_capture(self._device, config.head_dim, group, self.kv_cache.shape.kv_block_size):
            return None
        return DecodeGraphs(
            self._launch_layers,
            driver.capture,
            lambda plan: ops.cut_attention(plan, *self._attention_shape, self._device),
            most_tokens,
            config.hidden_size,
            self.weights.dtype,
            self._device,
        )

    def _in_buffers(self, packed: PackedBatch, buffers: StaticBuffers) -> BatchState:
        positions = torch.from_numpy(packed.positions), upload(packed.positions, self._device)
        return BatchState(packed, *positions, None, {}, None, False, buffers=buffers)

    def _layers(self, step: Step, b: BatchState) -> None:
        b.hidden = self._graphs.run(b.buffers, b.hidden)

    def _launch_layers(self, buffers: StaticBuffers) -> None:
        """All layers over static buffers: the Steps of a sweep whose weights and KV are on the device."""
        part = BatchPart(slice(0, len(buffers.hidden)), buffers.slots, None, buffers.plans)
        b = BatchState(
            None, None, buffers.positions, None, {KVPlacement.DEVICE: part}, None, False, hidden=buffers.hidden
        )
        for layer in range(self.config.num_layers):
            for kind, perform in (("pre", self._pre), ("attention", self._attention), ("post", self._post)):
                perform(Step(-1, kind, "compute", -1, layer, 0, None, None, ()), b)

    def _bound_to(self, batches: Sequence[BatchState], deferred_batches: DeferredBatches) -> Iterator[Step]:
        """The sweep's Steps, each with its batch noted: those that store may run when the next sweep has begun."""
        captured = batches[0].buffers is not None
        flows = [b.packed.flow(b.on_host) for b in batches]
        num_tokens = sum(b.packed.num_tokens for b in batches)
        self._one_batch = len(batches) == 1
        steps = (
            self._sweeps.captured()
            if captured
            else self._sweeps.steps(flows, deferred_batches, self.lanes.has_ended, num_tokens)
        )
        for step in steps:
            self._bind(step, batches)
            yield step

    def _bind(self, step: Step, batches: Sequence[BatchState]) -> None:
        batch = self._batch_of[step.id] = batches[step.batch]
        if step.deferred_batch is not None:  # it may be through before a lane of the host comes to its Steps
            self._deferred_of[step.id] = self._deferred_batches.setdefault(step.deferred_batch, batch.begins)

    def _computing(self) -> contextlib.AbstractContextManager[None]:
        dedicated_core = self._tiers.dedicated_core
        return contextlib.nullcontext() if dedicated_core is None else dedicated_core.computing()

    def _perform(self, step: Step) -> None:
        work, dedicated_core, batch = (
            getattr(self, f"_{step.kind}"),
            self._tiers.dedicated_core,
            self._batch_of.pop(step.id),
        )
        if dedicated_core is None:
            work(step, batch)
            return
        with dedicated_core.throttled(step):
            work(step, batch)

    # Each kind of Step by its name. Weights.

    def _read_weight(self, step: Step, b: BatchState) -> None:
        self.weights.read(step.layer, step.weight_slot)

    def _read_dense(self, step: Step, b: BatchState) -> None:
        self.weights.read_dense(step.layer, step.weight_slot)

    def _read_experts(self, step: Step, b: BatchState) -> None:
        self.weights.read_experts(step.layer, step.weight_slot, b.experts)

    def _load_weight(self, step: Step, b: BatchState) -> None:
        self.weights.load(step.layer, step.weight_slot)

    def _expand_weight(self, step: Step, b: BatchState) -> None:
        self.weights.dequantize(step.layer, step.weight_slot, experts=not self._dequantizes_after_router(step))

    def _dequantizes_after_router(self, step: Step) -> bool:
        """Whether of a layer's 4-bit experts only those are dequantized that the sweep's tokens go through.

        Of several micro-batches each would dequantize its own again.
        """
        packed = self.weights.residency.weight_format == INT4 and self.config.has_experts(step.layer)
        return packed and self._compute_tier == "cpu" and self._one_batch

    # KV of staged sequences.

    def _read_cache(self, step: Step, b: BatchState) -> None:
        self.kv_cache.read(step.layer, step.kv_slot, b.moves[self.config.windows[step.layer]])

    def _load_cache(self, step: Step, b: BatchState) -> None:
        self.kv_cache.load(step.layer, step.kv_slot, b.moves[self.config.windows[step.layer]])

    def _store_cache(self, step: Step, b: BatchState) -> None:
        self.kv_cache.store(step.layer, step.kv_slot, b.moves[self.config.windows[step.layer]])

    def _write_cache(self, step: Step, b: BatchState) -> None:
        self.kv_cache.write(step.layer, step.kv_slot, b.moves[self.config.windows[step.layer]])

    # Activations.

    def _embed(self, step: Step, b: BatchState) -> None:
        on_device = self.weights.embeds_on_device
        token_ids, positions = torch.from_numpy(b.packed.token_ids), b.host_positions
        if on_device:
            token_ids, positions = upload(b.packed.token_ids, self._device), b.positions
        if len(b.packed.pending_rows):
            self._tokens.fill(token_ids, b.packed.pending_rows, b.packed.pending_slots)
        hidden = layers.embed(self.config, self.weights.embeddings, token_ids, positions, self.weights.dtype)
        if self.links and b.on_host:
            waiting = self.activations.waiting(step.batch, len(hidden))
            hidden = self.links[1].copy(waiting, hidden) if on_device else waiting.copy_(hidden)
        elif self.links and not on_device:
            hidden = self.links[0].bring(hidden)
        b.hidden = hidden

    def _receive(self, step: Step, b: BatchState) -> None:
        shape = b.packed.num_tokens, self.config.hidden_size
        waits = self.links and b.on_host
        hidden = (
            self.activations.waiting(step.batch, shape[0]) if waits else torch.empty(shape, dtype=self.weights.dtype)
        )
        self._options.adjacent_ranks.receive_from_previous(hidden)
        b.hidden = self.links[0].bring(hidden) if self.links and not waits else hidden

    def _send(self, step: Step, b: BatchState) -> None:
        hidden, b.hidden = b.hidden, None
        if self.links:
            hidden = self.links[1].copy(torch.empty(hidden.shape, dtype=hidden.dtype), hidden)
        self._options.adjacent_ranks.send_to_next(hidden)

    def _load_hidden(self, step: Step, b: BatchState) -> None:
        b.hidden = self.links[0].copy(self.activations.fetched(len(b.hidden)), b.hidden)

    def _store_hidden(self, step: Step, b: BatchState) -> None:
        b.hidden = self.links[1].copy(self.activations.waiting(step.batch, len(b.hidden)), b.hidden)

    # Computing.

    def _pre(self, step: Step, b: BatchState) -> None:
        tensors = self.weights.layer(step.layer, step.weight_slot)
        hidden = with_deferred(b.hidden, [c.hidden for c in b.joined])
        b.qkv = hidden.new_empty(hidden.shape[0], self.config.qkv_size)
        if len(hidden):
            for some, qkv in self._chunks(hidden, b.qkv):
                layers.pre_attention(self.config, tensors, some, qkv)
        leaving, b.joined = b.joined, []
        if step.layer == 0 and b.begins is not None:
            leaving = [b.begins]
        if leaving:
            self._leave(step, b, hidden, leaving)

    def _leave(self, step: Step, b: BatchState, hidden: Tensor, leaving: Sequence[DeferredBatchState]) -> None:
        """Deferred batches, the last rows of what has been computed, take with them what they need from here on."""
        qkv, start = b.qkv, len(hidden) - sum(len(c.rows) for c in leaving)
        b.hidden, b.qkv = b.hidden[:start], qkv[:start]
        for deferred_batch, own in zip(leaving, slices(start, leaving), strict=True):
            deferred_batch.leave(hidden[own], self._qkv_for_host(step, qkv[own], deferred_batch.positions))

    def _qkv_for_host(self, step: Step, qkv: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries for attention on the CPU, keys and values as they are stored."""
        heads, kv_format = (self.config.num_heads, self.config.num_kv_heads), self.kv_cache.shape.format
        options = self._rotary(step, positions)
        q, k, v = ops.rotary(qkv, *heads, rotate_keys=kv_format.rotates_keys, **options)
        if bits := kv_format.bits:
            k, v = ops.quantize(k, bits), ops.quantize(v, bits)
        return q, k, v

    def _attention(self, step: Step, b: BatchState) -> None:
        window = self.config.windows[step.layer]
        for placement, part in b.parts.items():
            if placement is KVPlacement.CPU:
                continue
            if placement is KVPlacement.DEVICE:
                kv = self.kv_cache.pools[self._compute_tier][step.layer]
            elif step.kv_slot is not None:
                kv = self.kv_cache.staging(step.kv_slot)
            else:  # in this layer the host's pool lies on the device
                part, kv = b.in_place, self.kv_cache.pools["cpu"][step.layer]
            options = self._rotary(step, b.positions_of(part.tokens))
            qkv = b.qkv if len(b.parts) == 1 else b.qkv[part.tokens]
            q = ops.rotary_store(
                qkv, self.config.num_heads, kv, part.slots[window], self.kv_cache.shape.format, **options
            )
            b.attended[placement] = ops.paged_attention(q, kv, part.plans[window], **self._softmax(step, self._device))

    def _softmax(self, step: Step, device: torch.device) -> dict:
        """What `ops.paged_attention` is told of a layer, on the device that attends."""
        return {
            "bits": self.kv_cache.shape.format.bits,
            "softcap": self.config.attention_softcap,
            "sinks": self.weights.sinks(step.layer, device),
        }

    def _rotary(self, step: Step, positions: Tensor) -> dict:
        tensors = self.weights.layer(step.layer, step.weight_slot) if self.config.qk_norm else {}
        rope = self._ropes[self.config.rope_of(step.layer)]
        return layers.rotary_options(self.config, tensors, rope, positions)

    def _send_qkv(self, step: Step, b: BatchState) -> None:
        """Queries of delegated sequences to the CPU, their new KV to the host's pool."""
        # What is compute's here outlives this: before it is given up, compute waits for the CPU, which has waited for the copies.
        part, d2h = b.parts[KVPlacement.CPU], self.links[1]
        q, k, v = self._qkv_for_host(step, b.qkv[part.tokens], b.positions_of(part.tokens))
        pool = self.kv_cache.pools["cpu"][step.layer]
        flat = pool.view(-1, pool.shape[-1])
        for rows, new in zip(part.rows[self.config.windows[step.layer]], (k, v), strict=True):
            d2h.scatter(flat, rows, new.reshape(-1, pool.shape[-1]))
        sent, attended = self.activations.exchange(len(q))
        d2h.copy(sent, q.contiguous())
        b.for_cpu[step.layer], b.from_cpu[step.layer] = (sent, attended), attended

    def _cpu_attention(self, step: Step, b: BatchState) -> None:
        kv = self.kv_cache.pools["cpu"][step.layer]
        plan = b.parts[KVPlacement.CPU].plans[self.config.windows[step.layer]]
        q, out = b.for_cpu.pop(step.layer)
        ops.paged_attention(q, kv, plan, out=out, **self._softmax(step, CPU))

    def _load_attention(self, step: Step, b: BatchState) -> None:
        attended = b.from_cpu.pop(step.layer).flatten(1)
        target = torch.empty(attended.shape, dtype=attended.dtype, device=self._device)
        b.attended[KVPlacement.CPU] = self.links[0].copy(target, attended)

    # Sequences whose attention is deferred: they are in no batch meanwhile.

    def _send_deferred(self, step: Step, b: BatchState) -> None:
        pool, window = self.kv_cache.pools["cpu"][step.layer], self.config.windows[step.layer]
        self._deferred_of.pop(step.id).send(self.links[1], pool, window, self.activations.deferred[0])

    def _attend_deferred(self, step: Step, b: BatchState) -> None:
        pool, window = self.kv_cache.pools["cpu"][step.layer], self.config.windows[step.layer]
        self._deferred_of.pop(step.id).attend(
            pool, window, self.activations.deferred, self.config.num_heads, **self._softmax(step, CPU)
        )

    def _join_deferred(self, step: Step, b: BatchState) -> None:
        deferred_batch = self._deferred_of.pop(step.id)
        deferred_batch.join(self.links[0], self.activations.deferred[1])
        b.joined.append(deferred_batch)

    def _to_go_on(self, step: Step, b: BatchState) -> tuple[Tensor, Tensor] | None:
        """(hidden, attention's result) of the tokens that the rest of a layer is for, deferred batches last; None: there are none."""
        b.qkv = None  # memory for the other batches
        found, hidden = [b.attended.pop(placement) for placement in b.parts], b.hidden
        if not found and not b.joined:
            return None
        if len(found) > 1:
            found = [torch.cat(found)]
        is_last = step.layer == self.config.num_layers - 1
        sends = is_last and not self.config.has_head
        if sends and b.on_host:  # whose memory is the next batch's before it is sent
            hidden = hidden.clone()
        # Of the last layer, only tokens whose logits are asked for go on.
        if is_last and not sends and b.logits_indices is not None:
            found, hidden = [attended[b.logits_indices] for attended in found], hidden[b.logits_indices]
        found += [c.attended for c in b.joined]
        return with_deferred(hidden, [c.hidden for c in b.joined]), found[0] if len(found) == 1 else torch.cat(found)

    def _route(self, step: Step, b: BatchState) -> None:
        """What of `_post` comes before the experts, so that it is known which ones to read."""
        b.routes, going_on = [], self._to_go_on(step, b)
        if going_on is None:
            return
        b.hidden, attention = going_on
        tensors = self.weights.layer(step.layer, step.weight_slot)
        for part, attended in self._chunks(b.hidden, attention):
            b.routes.append(layers.route_tokens(self.config, tensors, part, attended, self._options.reduce))

    def _through_experts(self, step: Step, b: BatchState) -> None:
        """The rest of `_post`, once the experts are read."""
        self.weights.dequantize_experts(step.layer, step.weight_slot, b.experts)
        tensors = self.weights.layer(step.layer, step.weight_slot)
        for (part,), routes in zip(self._chunks(b.hidden) if b.routes else (), b.routes, strict=True):
            layers.add_experts(self.config, tensors, part, routes, self._options.reduce, self.routing.add)
        b.routes = None

    def _post(self, step: Step, b: BatchState) -> None:
        if b.routes is None and self._dequantizes_after_router(step):
            self._route(step, b)
        if b.routes is not None:
            self._through_experts(step, b)
            return
        going_on = self._to_go_on(step, b)
        if going_on is None:
            return
        hidden, attention = going_on
        is_last, num_own = step.layer == self.config.num_layers - 1, len(hidden) - sum(len(c.rows) for c in b.joined)
        tensors = self.weights.layer(step.layer, step.weight_slot)
        options = {"reduce": self._options.reduce, "on_counts": self.routing.add}
        for part, attended in self._chunks(hidden, attention):
            layers.post_attention(self.config, tensors, part, attended, part, **options)
        if b.joined and not is_last:
            for deferred_batch, own in zip(b.joined, slices(num_own, b.joined), strict=True):
                deferred_batch.hidden, deferred_batch.attended = hidden[own], None
            hidden = b.hidden.copy_(hidden[:num_own]) if b.on_host else hidden[:num_own]
        b.hidden = hidden

    def _chunks(self, *tensors: Tensor) -> Iterable[Sequence[Tensor]]:
        """The tensors of the tokens that go through a layer's products together."""
        count = self._options.chunk_tokens
        if count is None or tensors[0].shape[0] <= count:
            return (tensors,)
        return zip(*(tensor.split(count) for tensor in tensors), strict=True)

    def _load_head(self, step: Step, b: BatchState) -> None:
        self.weights.load_head(step.layer, step.weight_slot)

    def _head(self, step: Step, b: BatchState) -> None:
        """Logits, or those of one chunk of the vocabulary."""
        if not self._options.makes_logits:
            b.hidden = None
            return
        weights = self.weights
        if step.layer == 0:
            b.hidden = layers.before_logits(self.config, weights.head, b.hidden)
        start, rows = weights.vocabulary_chunk(step.layer, step.weight_slot)
        stop = start + rows.shape[0]
        wanted = [*b.packed.logits_rows, *(row for deferred_batch in b.joined for row in deferred_batch.rows)]
        whole = rows.shape[0] == self.config.vocab_size
        if whole or self._vocabulary_chunks:
            count = self._options.logit_rows or len(wanted)
            for i in range(0, len(wanted), count):
                part = b.hidden[i : i + count]
                made = layers.logits(self.config, part, rows, self._logits_of(part, rows))
                self._take(wanted[i : i + count], made, start)
        else:
            if start == 0:
                b.logits = torch.empty(len(wanted), self.config.vocab_size, device=self._device)
            b.logits[:, start:stop] = layers.logits(self.config, b.hidden, rows)
            if stop == self.config.vocab_size:
                self._take(wanted, b.logits, 0)
        if stop == self.config.vocab_size:
            b.hidden = b.logits = None

    def _take(self, rows: Sequence[LogitsRow], logits: Tensor, start: int) -> None:
        dedicated_core = self._tiers.dedicated_core
        with contextlib.nullcontext() if dedicated_core is None else dedicated_core.hosts():
            chosen = self._on_logits(rows, logits, start)
        if chosen is not None and self._tokens is not None:
            self._tokens.keep([row.sequence.token_slot for row in rows], chosen)

    def _logits_of(self, x: Tensor, rows: ops.Weight) -> Tensor:
        """Memory for the logits of x, always the same: some that is new to the process costs more than filling it."""
        size = len(x) * rows.shape[0]
        if self._logits is None or self._logits.numel() < size:
            self._logits = None
            self._logits = x.new_empty(size, dtype=torch.float32)
        return self._logits[:size].view(len(x), rows.shape[0])


def _nobody_takes_logits(rows: Sequence[LogitsRow], logits: Tensor, start: int) -> None: ...


_of_thread = threading.local()


def _prepare_thread(lane: str, dedicated_core: DedicatedCore | None = None) -> None:
    """Copies are made by their lane's thread alone: a team of threads would wait for the cores that compute has."""
    if dedicated_core is not None:
        dedicated_core.keep_lane(lane)
    _of_thread.inference = torch.inference_mode()  # until the thread ends
    _of_thread.inference.__enter__()
    torch.set_num_threads(1)
    if lane not in ("compute", "cpu_attention"):
        kernels.run_alone()


@contextlib.contextmanager
def _kernels_alone() -> Iterator[None]:
    """The kernels' threads have the cores for themselves, torch's operations are done by the caller alone.

    A team of torch's would go on looking for work, on the same cores, for milliseconds after each of its operations.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
