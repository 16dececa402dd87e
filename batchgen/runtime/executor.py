"""The executor, which takes the micro-batches of a sweep through all layers, in the order of its Steps.

The Steps and what they wait for come from `schedule.sweeps`. `lanes` and `streams` run them, and `steps.handlers` has
the work of each kind. With everything in the compute device's memory all Steps are in one lane, and this is the plain
serial order.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch

from batchgen.core.kv_expansion import Recut
from batchgen.models.config import ModelConfig
from batchgen.ops import scratch
from batchgen.runtime.batch_preparation import prepare_batches, prepare_for_graph
from batchgen.runtime.batch_state import BatchState
from batchgen.runtime.deferred import DeferredBatchState
from batchgen.runtime.graphs import GraphSweep
from batchgen.runtime.lane_threads import kernels_alone, prepare_thread
from batchgen.runtime.lanes import Lanes
from batchgen.runtime.memory.kv_cache import KVCache
from batchgen.runtime.memory.state_cache import StateCache
from batchgen.runtime.memory.tiers import Tiers
from batchgen.runtime.memory.weights import Weights
from batchgen.runtime.steps.captured import sweep_graphs
from batchgen.runtime.steps.context import Handler, StepContext
from batchgen.runtime.steps.handlers import HANDLERS
from batchgen.runtime.streams import Driver, StreamLanes
from batchgen.runtime.sweep_options import Largest, OnLogits, SweepOptions
from batchgen.runtime.token_table import TokenTable, places_of_rows
from batchgen.runtime.warm_up_steps import clear_kv, layers_that_differ, numbered_before, sweeps_of_layers
from batchgen.schedule.deferred_batches import DeferredBatches
from batchgen.schedule.packed_batch import PackedBatch, empty_batch
from batchgen.schedule.sequence import PENDING
from batchgen.schedule.step_graph import Step
from batchgen.schedule.sweeps import Sweeps


class Executor:
    """A model and its KV, ready to run sweeps. Not for use from several threads at once.

    Attributes:
        config: Configuration of the model.
        weights: Its weights.
        kv_cache: Its KV.
        states: States of its sequences; None: it has no state layers.
        context: Model, memory and sweep that the work of all Steps shares.
        lanes: Lanes that carry out Steps.
        routing: Numbers of tokens by expert, where the host computes.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        kv_cache: KVCache,
        tiers: Tiers,
        options: SweepOptions,
        states: StateCache | None = None,
    ) -> None:
        """Start the lanes, and make what all sweeps need.

        Args:
            config: Configuration of the model.
            weights: Its weights.
            kv_cache: Its KV.
            tiers: Tiers that weights and KV are in.
            options: Options of its sweeps.
            states: States of its sequences; None: it has no state layers.
        """
        self.config, self.weights, self.kv_cache, self.states = config, weights, kv_cache, states
        self._tiers, self._options = tiers, options
        self.lanes = self._make_lanes()
        # If it is not closed: memory goes when the executor has gone, and copies may be reading and writing it.
        weakref.finalize(self, self.lanes.close).atexit = False
        streams = weights.residency.streams(
            tiers.compute_tier,
            kv_cache.on_device,
            config.state_layers,
            config.kv_sources,
            choosing=config.choosing_layers(options.attention_budget),
            **config.ends,
        )
        # On a device with streams a Step costs time to launch; a trace shows each.
        self._sweeps = Sweeps(streams, whole=tiers.driver is not None and not options.serial and not options.on_step)
        with kernels_alone():
            self.context = StepContext(config, weights, kv_cache, tiers, options, states)
        self.context.layer_steps = _layer_steps(self._sweeps)
        self.routing = self.context.routing
        if options.captured_tokens and tiers.driver and options.is_whole:
            self.capture_sweeps(tiers.driver, options.captured_tokens)
        # Tokens can be taken over from one sweep to the next where they are sampled, if embeddings need nothing of the
        # host.
        on_device = weights.embeds_on_device and weights.per_layer is None
        if tiers.driver is not None and not options.serial and on_device and options.is_whole:
            self.context.tokens = TokenTable(tiers.device)
        self._batch_of: dict[int, BatchState] = {}  # Step -> the micro-batch that it works on
        self._deferred_batches: dict[int, DeferredBatchState] = {}  # under way, by number
        self._closed = False

    def capture_sweeps(self, driver: Driver, most_tokens: int) -> None:
        """Have sweeps of at most `most_tokens` tokens captured from now on, where kernels can be."""
        self.context.graphs = sweep_graphs(self.context, driver, most_tokens)

    @property
    def compute_tier(self) -> str:
        """The tier that is the compute device's own memory."""
        return self._tiers.compute_tier

    @property
    def _caches(self) -> tuple[KVCache | StateCache, ...]:
        return (self.kv_cache,) if self.states is None else (self.kv_cache, self.states)

    def _make_lanes(self) -> Lanes | StreamLanes:
        options, driver = self._options, self._tiers.driver
        on_thread = partial(prepare_thread, dedicated_core=self._tiers.dedicated_core)
        method = weakref.WeakMethod(self._perform)  # lanes' threads keep no engine alive that nobody has any more

        def perform(step: Step) -> None:
            if (do_work := method()) is not None:
                do_work(step)

        if driver is not None:
            return StreamLanes(perform, driver, serial=options.serial, on_step=options.on_step, on_thread=on_thread)
        return Lanes(
            perform,
            serial=options.serial,
            shared_cores=options.shared_cores,
            on_step=options.on_step,
            on_thread=on_thread,
        )

    @torch.inference_mode()
    def run(
        self,
        batches: Sequence[PackedBatch],
        on_logits: OnLogits,
        *,
        vocabulary_chunks: bool = False,
        deferred_batches: DeferredBatches | None = None,
        largest: Largest | None = None,
    ) -> Callable[[], None] | None:
        """Compute one sweep: the batches' KV, and the logits asked for.

        Args:
            batches: Micro-batches; with deferred batches under way there need be none.
            on_logits: Function that takes the logits.
            vocabulary_chunks: Whether it takes chunks of the vocabulary, one after the other for the same rows, where
                the output matrix comes in chunks; otherwise it gets the whole.
            deferred_batches: Deferred batches of the same job. Those that the batches begin are added, those whose last
                layer the sweep computes have their logits too.
            largest: Takes the tokens with the largest logits where a CUDA graph chooses them, in place of `on_logits`;
                None: logits are wanted.

        Returns:
            A function that waits for the sweep, on a device with streams where it has only been launched; None: it is
            over.
        """
        context = self.context
        context.vocabulary_chunks, context.largest = vocabulary_chunks, largest
        with kernels_alone(), self._computing():
            wait = self._run(batches, on_logits, DeferredBatches() if deferred_batches is None else deferred_batches)
        if wait is not None and context.tokens is None:
            wait()
            return None
        return wait

    @torch.inference_mode()
    def recut(self, recut: Recut) -> None:
        """Cut the host's KV pool anew, once nothing is under way. Raises what a Step of the last sweep raised."""
        self.lanes.drain()
        with kernels_alone(), self._computing():
            self.lanes.prepare(partial(self.kv_cache.recut, recut))
        self.lanes.drain()
        self._sweeps.streams = replace(self._sweeps.streams, kv_on_device=recut.after.on_device)

    def drop(self, deferred_batches: DeferredBatches) -> None:
        """Drop deferred batches under way. Return when the CPU is done with their KV; raise what a Step raised."""
        if deferred_batches.waiting:
            for deferred_batch in deferred_batches.waiting:
                self._deferred_batches.pop(deferred_batch.number, None)
            deferred_batches.waiting = []
            self.lanes.drain()

    @torch.inference_mode()
    def warm_up(
        self, sweeps: Iterable[Sequence[PackedBatch]], on_logits: OnLogits, *, vocabulary_chunks: bool = False
    ) -> None:
        """Run sweeps for nothing but what a first use of each operation brings with it.

        Kernels are compiled and loaded, libraries take their work space. That may wait for everything on the device,
        which would not end while something there waits for the host; so here every Step is done before the next one is
        launched.

        Layers of the model that differ, in where their weights are and what they attend to, are run. KV that is written
        is set to zero again, and nothing is counted. To be called before the first `run`.

        Args:
            sweeps: Micro-batches of each sweep.
            on_logits: Function that takes the logits.
            vocabulary_chunks: Whether it takes chunks of the vocabulary.
        """
        context = self.context
        context.on_logits, context.vocabulary_chunks, context.warms_up = on_logits, vocabulary_chunks, True
        layers = layers_that_differ(context)
        graph, deferred_batches = sweeps_of_layers(context, layers), DeferredBatches()
        with self.lanes.one_by_one(), kernels_alone(), self._computing():
            for batches in sweeps:
                context.reserve_positions(batches)
                to_run = batches
                while to_run:
                    prepared: list[BatchState] = []
                    self.lanes.prepare(lambda: prepared.extend(prepare_batches(context, to_run)))  # noqa: B023
                    flows = [batch.packed.flow(batch.on_host) for batch in prepared]
                    num_tokens = sum(batch.packed.num_tokens for batch in prepared)
                    context.expands = graph.streams.expands(num_tokens)
                    steps = graph.steps(flows, deferred_batches, lambda step_id: True, num_tokens)
                    self.lanes.execute(self._bound(numbered_before(steps, layers), prepared))
                    self.lanes.drain()
                    to_run = [empty_batch()] if deferred_batches.waiting else []  # until they are through all layers
                self._deferred_batches.clear()
                self.lanes.prepare(partial(clear_kv, context, batches, layers))
        context.warms_up = False
        for counted in (self.weights, *self._caches, self.routing, *(self._tiers.links or ())):
            counted.reset_counts()

    def _run(
        self, batches: Sequence[PackedBatch], on_logits: OnLogits, deferred_batches: DeferredBatches
    ) -> Callable[[], None] | None:
        batches = batches or [empty_batch()]
        context, prepared = self.context, list[BatchState]()
        context.reserve_positions(batches)
        if len(batches) == 1 and (sweep := self._graph_sweep(batches[0])) is not None:
            prepared.append(prepare_for_graph(sweep))
        else:
            self.lanes.prepare(lambda: prepared.extend(prepare_batches(context, batches)))
        context.on_logits, context.one_batch = on_logits, len(prepared) == 1
        num_tokens = sum(batch.packed.num_tokens for batch in prepared)
        context.expands = self._sweeps.streams.expands(num_tokens)
        steps = self._steps(prepared, deferred_batches, num_tokens)
        wait = self.lanes.execute(self._bound(steps, prepared))
        for deferred_batch in deferred_batches.ended:
            del self._deferred_batches[deferred_batch.number]
        return wait

    def _graph_sweep(self, packed: PackedBatch) -> GraphSweep | None:
        """A micro-batch as a CUDA graph runs it; None: it is launched."""
        graphs, largest, rows = self.context.graphs, self.context.largest, packed.logits_rows
        if graphs is None:
            return None
        chooses = bool(rows) and graphs.chooses and self.context.take_hidden is None
        if chooses and largest is not None and largest.takes_largest(rows):
            return graphs.sweep(packed, places_of_rows(rows))
        return graphs.sweep(packed)

    def _steps(
        self, batches: Sequence[BatchState], deferred_batches: DeferredBatches, num_tokens: int
    ) -> Iterator[Step]:
        """The Steps of the next sweep."""
        if (sweep := batches[0].graph_sweep) is not None:
            assert self.context.graphs is not None, "sweeps are no CUDA graphs"
            return self._sweeps.whole(embeds=not self.context.graphs.embeds, chooses=sweep.chooses)
        flows = [batch.packed.flow(batch.on_host) for batch in batches]
        return self._sweeps.steps(flows, deferred_batches, self.lanes.has_ended, num_tokens)

    def _bound(self, steps: Iterable[Step], batches: Sequence[BatchState]) -> Iterator[Step]:
        """Yield Steps with their micro-batches noted: Steps that store may run when the next sweep has begun."""
        for step in steps:
            batch = self._batch_of[step.id] = batches[step.batch]
            if step.deferred_batch is not None:  # it may be through before a lane of the host comes to its Steps
                if step.deferred_batch not in self._deferred_batches:
                    assert batch.begins is not None, f"nothing is deferred in the batch of {step}"
                    self._deferred_batches[step.deferred_batch] = batch.begins
                self.context.deferred_of[step.id] = self._deferred_batches[step.deferred_batch]
            yield step

    def _perform(self, step: Step) -> None:
        """Do the work of a Step."""
        handler, batch, core = HANDLERS[step.kind], self._batch_of.pop(step.id), self._tiers.dedicated_core
        if core is None:
            handler(self.context, step, batch)
            return
        with core.throttled(step):
            handler(self.context, step, batch)

    def _computing(self) -> contextlib.AbstractContextManager[None]:
        core = self._tiers.dedicated_core
        return contextlib.nullcontext() if core is None else core.computing()

    @property
    def sampled_token(self) -> int:
        """The token that stands for a sampled one in the next sweep: PENDING, where that may be run ahead."""
        return 0 if self.context.tokens is None else PENDING

    @property
    def bytes_moved(self) -> dict[str, int]:
        """Bytes moved since the executor was made, by lane."""
        moved = {
            "disk_read": self.weights.disk_bytes_read + sum(cache.disk_bytes_read for cache in self._caches),
            "disk_write": sum(cache.disk_bytes_written for cache in self._caches),
        }
        if links := self._tiers.links:
            moved |= {"h2d": links[0].moved_bytes, "d2h": links[1].moved_bytes}
        return moved

    @property
    def busy_s(self) -> dict[str, float]:
        """Seconds in which each lane was busy."""
        return dict(self.lanes.busy_s)

    @property
    def stalled_s(self) -> dict[str, float]:
        """Seconds in which compute stood still, by the lane it waited for."""
        return dict(self.lanes.stalled_s)

    @property
    def peak_bytes(self) -> dict[str, int]:
        """Allocated bytes of the tiers beside host memory; all of it is allocated beforehand."""
        return {"gpu": self.weights.arenas["gpu"].allocated_bytes, "disk": sum(c.disk_bytes for c in self._caches)}

    def close(self) -> None:
        """End what is under way, close files and let go of all memory, whoever has this executor. Counts stay."""
        if self._closed:
            return
        self._closed = True
        self.lanes.close()
        for cache in self._caches:
            cache.close()
        self.weights.close()
        self._tiers.close()
        scratch.release()
        self.context.close()
        for held in (self._batch_of, self._deferred_batches):
            held.clear()


def _layer_steps(sweeps: Sweeps) -> Callable[[int], Sequence[tuple[Handler, Step]]]:
    """`StepContext.layer_steps` of these sweeps; they are made once for sweeps with the same ones."""
    made: dict[bool, list[tuple[Handler, Step]]] = {}

    def layer_steps(num_tokens: int) -> list[tuple[Handler, Step]]:
        expands = sweeps.streams.expands(num_tokens)
        if expands not in made:
            made[expands] = [(HANDLERS[step.kind], step) for step in sweeps.layers(num_tokens)]
        return made[expands]

    return layer_steps
