"""The sweep as data: each transfer and computation is a Step with a lane and the Steps it must wait for. No torch.

FlexGen's Algorithm 1 with its loops over layers j and micro-batches k: weights of the layers ahead load, the KV of the
next batch loads and that of the last one stores, while a batch computes. Weights go on loading across the end of a
sweep. Nothing but what a Step waits for, and the order in its lane, holds back the Steps of a sweep until those of the
one before have ended. The order of `Sweeps.steps` is a valid serial order (every Step waits for earlier ones only), and
is the specification: an executor may overlap lanes, each of which keeps this order within itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from batchgen.core.kv_placement import KVPlacement
from batchgen.schedule.deferred_batches import DeferredBatch, DeferredBatches
from batchgen.schedule.step_graph import (
    HEAD_SLOTS,
    HIDDEN_SLOTS,
    KINDS,
    KV_SLOTS,
    WEIGHT_SLOTS,
    BatchFlow,
    Lane,
    Step,
    StepKind,
    Streams,
)

# Sequences of these placements are attended to on the compute device.
_ON_DEVICE = frozenset({KVPlacement.DEVICE, KVPlacement.STREAMED})
# Steps before and after all layers, where nothing moves.
_ENDS: tuple[StepKind, StepKind] = ("embed", "head")

LayerBatch = tuple[int, int]  # layer, micro-batch


class Sweeps:
    """Makes the Steps of one sweep after the other.

    Invariant: ids count up, and every buffer slot is filled again only after its last user.
    """

    def __init__(self, streams: Streams, *, whole: bool = False) -> None:
        """Start before the first sweep.

        Args:
            streams: Layers that need something brought to the compute device.
            whole: Whether a sweep over one micro-batch that moves nothing has one Step for all layers.
        """
        self.streams = streams
        self._whole = whole
        self._next_id = 0
        self._sweep = -1
        # Streamed layers are counted n = 0, 1, ... over all sweeps.
        self._streamed = [j for j, on in enumerate(streams.weights) if on]
        self._num_loaded = self._num_read = 0
        self._users: dict[int, int] = {}  # n -> the last Step that uses it
        self._loads: dict[int, int] = {}  # n -> the Step that brings it to the compute device
        self._reads: dict[int, int] = {}  # n -> the Step that brings it to host memory
        self._few_tokens = False  # in the sweep, so that experts are read on demand
        self._expands = streams.expands(None)  # 4-bit weights in the sweep
        self._without_experts: set[int] = set()  # n of layers whose experts are read on demand
        self._head_users: dict[int, tuple[int, ...]] = {}  # slot of the output matrix -> the last Steps that use it
        # KV of staged sequences passes through KV_SLOTS buffers on the compute device, and with an accelerator as many
        # in host memory for what is read from and written to disk. slot -> the last Steps that use it
        self._num_staged = 0
        self._staging_users: dict[int, tuple[int, ...]] = {}
        self._read_users: dict[int, tuple[int, ...]] = {}
        self._write_users: dict[int, tuple[int, ...]] = {}
        # Per layer, the last Step of each lane that stored KV in an earlier sweep; those before it in its lane have
        # ended too. Kept over sweeps in which nothing is stored.
        self._stored: list[dict[Lane, int]] = [{} for _ in range(streams.num_layers)]
        self._swapped_out: dict[int, int] = {}  # per layer, the last Step that took KV from the device's pool
        self._posted: dict[int, tuple[int, ...]] = {}  # per batch, the last `post` of the sweep before
        # Of an accelerator's stage of a pipeline, the last Step so far that took activations from where they are
        # received, and the last one that sent them.
        self._fetched: tuple[int, ...] = ()
        self._sent: tuple[int, ...] = ()
        self._num_deferred_batches = 0
        # Of sweeps in which nothing moves, by whether weights are expanded; numbered from 0.
        self._alike: dict[tuple[BatchFlow, bool], list[Step]] = {}

    def steps(
        self,
        batches: Sequence[BatchFlow],
        deferred_batches: DeferredBatches | None = None,
        has_ended: Callable[[int], bool] = lambda step_id: False,
        num_tokens: int | None = None,
    ) -> Iterator[Step]:
        """The Steps of the next sweep over these micro-batches.

        Args:
            batches: The data that each micro-batch moves.
            deferred_batches: Sequences whose attention is deferred, of the same job; None: there are none.
            has_ended: Tells whether a Step of CPU attention has ended; asked while Steps are taken from the iterator.
            num_tokens: Tokens of all micro-batches; None: many.
        """
        self._sweep += 1
        self._few_tokens = num_tokens is not None and num_tokens <= self.streams.on_demand_tokens
        self._expands = self.streams.expands(num_tokens)
        deferred_batches = DeferredBatches() if deferred_batches is None else deferred_batches
        deferred_batches.ended = []
        if len(batches) > 1 or batches[0].moves or deferred_batches.waiting or not self.are_resident:
            return self._make_steps(batches, _Deferral(deferred_batches, has_ended, not any(b.stays for b in batches)))
        return self._with_one_of_layers() if self._whole else self._repeat_steps(batches[0])

    def _repeat_steps(self, batch: BatchFlow) -> Iterator[Step]:
        """The Steps of a sweep over one batch in which nothing moves: only the numbers differ from sweep to sweep."""
        key = batch, self._expands
        if key not in self._alike:
            self._alike[key] = list(self._unmoved(batch))
        first, sweep = self._next_id, self._sweep
        for id, kind, lane, _, layer, k, weight_slot, kv_slot, after, _ in self._alike[key]:
            self._next_id = first + id + 1
            waits_for = tuple([first + earlier for earlier in after])
            yield Step(first + id, kind, lane, sweep, layer, k, weight_slot, kv_slot, waits_for)

    def _unmoved(self, batch: BatchFlow, expands: bool | None = None) -> Iterator[Step]:
        """The Steps, numbered from 0, of a sweep over one micro-batch in which nothing moves.

        Args:
            batch: The data that the micro-batch moves.
            expands: Whether 4-bit weights are expanded; None: as in the sweep that is being made.
        """
        alone = Sweeps(self.streams)
        alone._expands = self._expands if expands is None else expands
        return alone._make_steps([batch], _Deferral(DeferredBatches()))

    def _make_steps(self, batches: Sequence[BatchFlow], deferral: _Deferral) -> Iterator[Step]:
        layers, last_batch = self.streams.num_layers, len(batches) - 1
        yield from self._load_weights(0)
        hidden: list[int] = []  # per batch, the Step that made its latest activations
        for k in range(len(batches)):
            # Small copies that compute waits for do not queue behind the weights of layers to come.
            step = self._receive(k) if self.streams.receives else self._step("embed", 0, k)
            hidden.append(step.id)
            yield step
        order = [(j, k) for j in range(layers) for k in range(len(batches))]
        to_stage = deque(
            (j, k) for j, k in order if KVPlacement.STREAMED in batches[k].placements and self.streams.stages_kv(j)
        )
        flow = _Flow(hidden, deferral, to_stage, sent_before=self._sent, embedded=hidden[-1])
        yield from self._swap(0, batches, flow)
        # CPU attention of one batch runs during the products of the next, which therefore go first (NEO section 3).
        pipelines = deferral.deferred_batches.pipelines
        ahead = last_batch > 0 and (pipelines or any(KVPlacement.CPU in b.placements for b in batches))
        yield from self._load_caches(1, batches, flow)
        if ahead:
            yield from self._before_attention(order[0], batches, flow)
            yield from self._load_caches(1, batches, flow)
        for u, (j, k) in enumerate(order):
            if j == layers - 1 and k == 0:
                yield from self._load_head(flow, WEIGHT_SLOTS)
            if k == 0:
                yield from self._swap(j + 1, batches, flow)
            yield from self._load_caches(KV_SLOTS, batches, flow)
            if not ahead:
                yield from self._before_attention((j, k), batches, flow)
            elif u + 1 < len(order):
                yield from self._before_attention(order[u + 1], batches, flow)
            yield from self._load_caches(KV_SLOTS, batches, flow)  # of pages that are chosen now
            yield from self._attention_and_rest((j, k), batches, flow)
            if k == last_batch:
                self._used(j, flow.hidden_made[k])
                if j < layers - 1 or not self.streams.vocabulary_chunks:
                    yield from self._load_weights(j + 1)
        for j, stored in flow.stored.items():
            self._stored[j] |= stored
        yield from self._head(batches, flow)

    def _receive(self, k: int) -> Step:
        """The Step that receives a batch's activations, to where those of the sweep before are not needed any more."""
        return self._step("receive", 0, k, after=self._fetched if self.streams.accelerated else self._posted.get(k, ()))

    @property
    def are_resident(self) -> bool:
        """Tell whether all weights stay on the compute device, and activations stay in this process."""
        streams = self.streams
        return not (any(streams.weights) or streams.vocabulary_chunks or streams.receives or streams.sends)

    def layers(self, num_tokens: int) -> Iterator[Step]:
        """The Steps of all layers of a sweep over one micro-batch that moves nothing: all between `embed` and `head`.

        They are numbered from 0, and belong to no sweep.

        Args:
            num_tokens: Tokens of the micro-batch.
        """
        for step in self._unmoved(BatchFlow(), self.streams.expands(num_tokens)):
            if step.kind not in _ENDS:
                yield step

    def whole(self, *, embeds: bool = True, chooses: bool = False) -> Iterator[Step]:
        """The Steps of the next sweep over one micro-batch that moves nothing, with all layers in one.

        Args:
            embeds: Whether the embedding is a Step of its own, before the layers; otherwise it is in theirs.
            chooses: Whether the Step of the layers chooses the tokens too; otherwise the head is a Step after it.
        """
        self._sweep += 1
        return self._with_one_of_layers(embeds=embeds, chooses=chooses)

    def _with_one_of_layers(self, *, embeds: bool = True, chooses: bool = False) -> Iterator[Step]:
        """The Steps of the sweep that is being made: before all layers, all layers, after them."""
        after: tuple[int, ...] = ()
        embed, head = _ENDS
        before: tuple[StepKind, ...] = (embed,) if embeds else ()
        behind: tuple[StepKind, ...] = () if chooses else (head,)
        for kind in (*before, "layers", *behind):
            step = self._step(kind, 0, 0, after=after)
            after = (step.id,)
            yield step

    def _step(
        self,
        kind: StepKind,
        layer: int,
        batch: int,
        *,
        weight_slot: int | None = None,
        kv_slot: int | None = None,
        after: Iterable[int] = (),
        deferred_batch: int | None = None,
    ) -> Step:
        waits_for = tuple(dict.fromkeys(after))
        step = Step(
            self._next_id, kind, KINDS[kind], self._sweep, layer, batch, weight_slot, kv_slot, waits_for, deferred_batch
        )
        self._next_id += 1
        return step

    def _before_attention(self, at: LayerBatch, batches: Sequence[BatchFlow], flow: _Flow) -> Iterator[Step]:
        """Norm, QKV; and for sequences that the CPU attends to, all of attention."""
        j, k = at
        batch = batches[k]
        made = flow.hidden[k]
        comes_first = j == 0 and self.streams.receives and self.streams.accelerated
        if batch.hidden_on_host or comes_first:
            freed = made
            if batch.hidden_on_host:
                freed = flow.left[flow.num_fetched - HIDDEN_SLOTS] if flow.num_fetched >= HIDDEN_SLOTS else made
                flow.num_fetched += 1
            step = self._step("load_hidden", j, k, after=(made, freed))
            yield step
            made = step.id
            if comes_first:
                self._fetched = (step.id,)
        after = [made, *self._weights_ready(j)]
        weight_slot = self._weight_slot(j)
        if self._expands and k == 0:
            yield self._step("expand_weight", j, 0, weight_slot=weight_slot, after=after)
        pre = self._step("pre", j, k, weight_slot=weight_slot, after=after)
        yield pre
        flow.before_attention[at] = (pre.id,)
        if self._chooses(at, batch):
            choose = self._step("choose_pages", j, k, weight_slot=weight_slot, after=(pre.id,))
            yield choose
            flow.chosen[at] = flow.before_attention[at] = (choose.id,)
        if KVPlacement.CPU in batch.placements:
            send = self._step("send_qkv", j, k, weight_slot=weight_slot, after=(pre.id,))
            yield send
            # KV that moves to the host has gone in the lane of `send`.
            attend = self._step("cpu_attention", j, k, after=(send.id, *self._kv_there(j, flow)))
            yield attend
            self._note_stored(send, flow)
            if j in self.streams.state_layers:
                flow.note_stored(attend)
            flow.attended[at] = attend.id
        leaving = flow.joined.pop(k, [])
        if j == 0 and KVPlacement.DEFERRED in batch.placements:
            leaving = [DeferredBatch(self._num_deferred_batches, k)]
            self._num_deferred_batches += 1
        yield from self._defer(leaving, pre, flow)

    def _defer(self, leaving: Sequence[DeferredBatch], pre: Step, flow: _Flow) -> Iterator[Step]:
        """Have the CPU attend for deferred batches at their next attention; the sweep goes on without them."""
        j, k = pre.layer, pre.batch
        for deferred_batch in leaving:
            send = self._step("send_deferred", j, k, after=(pre.id,), deferred_batch=deferred_batch.number)
            yield send
            # What has gone to the host's memory before has done so in the lane of `send`.
            attend = self._step("attend_deferred", j, k, after=(send.id,), deferred_batch=deferred_batch.number)
            yield attend
            self._note_stored(send, flow)
            deferred_batch.layer, deferred_batch.attention, deferred_batch.sweep = j, attend.id, self._sweep
            flow.deferral.deferred_batches.waiting.append(deferred_batch)

    def _join(self, at: LayerBatch, flow: _Flow) -> Iterator[Step]:
        """Deferred batches whose attention of this layer is there go on with the batch.

        Unless the sweep is pipelined they are those of earlier sweeps.
        """
        j, k = at
        due = flow.deferral.deferred_batches.take_due(j, self._sweep, flow.deferral.can_join)
        for deferred_batch in due:
            yield self._step(
                "join_deferred", j, k, after=(deferred_batch.attention,), deferred_batch=deferred_batch.number
            )
        if due:
            flow.joined[k] = due
        if j == self.streams.num_layers - 1:
            flow.deferral.deferred_batches.ended = due

    def _attention_and_rest(self, at: LayerBatch, batches: Sequence[BatchFlow], flow: _Flow) -> Iterator[Step]:
        """Attention on the compute device, where new KV is written first; output projection and MLP."""
        j, k = at
        batch = batches[k]
        after, weight_slot = flow.before_attention.pop(at), self._weight_slot(j)
        if not _ON_DEVICE.isdisjoint(batch.placements):
            slot, ready = flow.staged.pop(at, (None, ()))
            slots = {"weight_slot": weight_slot, "kv_slot": slot}
            swapped = (flow.swapped.pop(at),) if at in flow.swapped else ()
            # Whoever moves to the host leaves blocks that new KV may go to.
            attention = self._step("attention", j, k, **slots, after=(*after, *ready, *swapped, *self._swapped_from(j)))
            yield attention
            after = (attention.id,)
            if slot is not None:
                yield from self._store_cache(at, batch, slot, attention.id, flow)
        if KVPlacement.CPU in batch.placements:
            join = self._step("load_attention", j, k, after=(flow.attended.pop(at),))
            yield join
            after = (*after, join.id)
        if k == (len(batches) - 1 if flow.deferral.deferred_batches.pipelines else 0):
            for join in self._join(at, flow):
                yield join
                after = (*after, join.id)
        if self.streams.weights[j] and self._count(j) in self._without_experts:
            route = self._step("route", j, k, weight_slot=weight_slot, after=after)
            yield route
            read = self._step("read_experts", j, k, weight_slot=weight_slot, after=(route.id,))
            yield read
            after = (read.id,)
        post = self._step("post", j, k, weight_slot=weight_slot, after=after)
        yield post
        flow.hidden[k] = flow.hidden_made[k] = post.id
        is_last = j == self.streams.num_layers - 1
        sends = is_last and self.streams.sends
        if self.streams.accelerated if sends else batch.hidden_on_host and not is_last:
            store = self._step("store_hidden", j, k, after=(post.id, *(flow.sent_before if is_last else ())))
            yield store
            flow.hidden[k] = store.id
        if batch.hidden_on_host:
            flow.left.append(flow.hidden[k])
        if is_last:
            self._posted[k] = (post.id,)
        if sends:
            send = self._step("send", j, k, after=(flow.hidden[k],))
            self._sent = (send.id,)
            yield send

    def _head(self, batches: Sequence[BatchFlow], flow: _Flow) -> Iterator[Step]:
        """Logits of the last tokens; where the output matrix is not on the compute device, chunk by chunk."""
        if self.streams.sends:
            return
        chunks = self.streams.vocabulary_chunks
        for p in range(max(1, chunks)):
            yield from self._load_head(flow, p + WEIGHT_SLOTS)
            loaded = (flow.head_loads[p],) if chunks else ()
            for k, batch in enumerate(batches):
                if batch.samples or k in flow.joined:
                    slot = p % HEAD_SLOTS if chunks else None
                    step = self._step("head", p, k, weight_slot=slot, after=(flow.hidden[k], *loaded))
                    yield step
                    if slot is not None:
                        self._head_users[slot] = (step.id,)
        if chunks:
            yield from self._load_weights(self.streams.num_layers)

    def _load_head(self, flow: _Flow, stop: int) -> Iterator[Step]:
        while len(flow.head_loads) < min(stop, self.streams.vocabulary_chunks):
            p = len(flow.head_loads)
            slot = p % HEAD_SLOTS
            kind: StepKind = "load_head" if self.streams.accelerated else "read_head"
            step = self._step(kind, p, 0, weight_slot=slot, after=self._head_users.get(slot, ()))
            flow.head_loads.append(step.id)
            yield step

    def _load_weights(self, layer: int) -> Iterator[Step]:
        """Loads that can be issued once all layers before `layer` of this sweep have been used."""
        count = len(self._streamed)
        stop = self._sweep * count + sum(j < layer for j in self._streamed) + WEIGHT_SLOTS if count else 0
        while self._num_loaded < stop:
            n = self._num_loaded
            after = [self._users[n - WEIGHT_SLOTS]] if n >= WEIGHT_SLOTS else []
            if self.streams.accelerated:
                yield from self._read_weights(n + 1)
                after += [self._reads[n]] if n in self._reads else []
                yield self._weight_step("load_weight", n, self._loads, after)
            else:
                yield self._weight_step(self._read_kind(n), n, self._loads, after)
            self._num_loaded += 1
        # Reads run ahead of loads by as many layers as there are buffers for in host memory.
        if self.streams.accelerated:
            yield from self._read_weights(self._num_loaded + WEIGHT_SLOTS if count else 0)
        for table in (self._users, self._loads, self._reads):
            for old in [n for n in table if n < self._num_loaded - 2 * WEIGHT_SLOTS]:
                del table[old]
        self._without_experts = {n for n in self._without_experts if n >= self._num_loaded - 2 * WEIGHT_SLOTS}

    def _read_kind(self, n: int) -> StepKind:
        """Without its experts, where these are read on demand.

        A layer is read as a whole the first time, when it is checked. What is read ahead for the next sweep is read as
        if that had as many tokens as this one.
        """
        layer = self._streamed[n % len(self._streamed)]
        if self._few_tokens and self.streams.on_demand[layer] and n >= len(self._streamed):
            self._without_experts.add(n)
            return "read_dense"
        return "read_weight"

    def _read_weights(self, stop: int) -> Iterator[Step]:
        """Reads into host memory of streamed layers before `stop`, of those that have something on disk."""
        while self._num_read < stop:
            n = self._num_read
            if self.streams.disk_weights[self._streamed[n % len(self._streamed)]]:
                after = [self._loads[n - WEIGHT_SLOTS]] if n >= WEIGHT_SLOTS else []
                yield self._weight_step("read_weight", n, self._reads, after)
            self._num_read += 1

    def _weight_step(self, kind: StepKind, n: int, table: dict[int, int], after: Iterable[int]) -> Step:
        layer = self._streamed[n % len(self._streamed)]
        step = self._step(kind, layer, 0, weight_slot=n % WEIGHT_SLOTS, after=after)
        table[n] = step.id
        return step

    def _count(self, layer: int) -> int:
        return self._sweep * len(self._streamed) + self._streamed.index(layer)

    def _weight_slot(self, layer: int) -> int | None:
        return self._count(layer) % WEIGHT_SLOTS if self.streams.weights[layer] else None

    def _weights_ready(self, layer: int) -> list[int]:
        return [self._loads[self._count(layer)]] if self.streams.weights[layer] else []

    def _used(self, layer: int, step_id: int) -> None:
        if self.streams.weights[layer]:
            self._users[self._count(layer)] = step_id

    def _load_caches(self, most: int, batches: Sequence[BatchFlow], flow: _Flow) -> Iterator[Step]:
        """Load KV, in the order of its use, until so many staging buffers are in use: as far ahead as these allow.

        KV that a layer reuses has new tokens, which its own layer computes and stores first. Pages are chosen before
        they come.
        """
        while flow.to_stage and len(flow.staged) < most:
            j, k = flow.to_stage[0]
            if (source := self.streams.kv_source(j)) != j and (source, k) not in flow.kept:
                return
            if self._chooses((j, k), batches[k]) and (j, k) not in flow.chosen:
                return
            yield from self._load_cache(flow.to_stage.popleft(), batches, flow)

    def _load_cache(self, at: LayerBatch, batches: Sequence[BatchFlow], flow: _Flow) -> Iterator[Step]:
        """Brings a batch's KV into a staging buffer of the compute device."""
        j, k = at
        yield from self._swap_out(j, batches, flow)
        batch, there = batches[k], self._kv_there(j, flow)
        slot = self._num_staged % KV_SLOTS
        self._num_staged += 1
        chosen = flow.chosen.pop(at, ())
        ready = (*self._staging_users.get(slot, ()), *chosen)
        history, disk_read = batch.history, batch.disk_read
        if self.streams.kv_source(j) != j:  # its new tokens come, too
            history, disk_read = True, batch.disk_read or batch.disk_write
        if disk_read:
            free = (*self._read_users.get(slot, ()), *chosen) if self.streams.accelerated else ready
            read = self._step("read_cache", j, k, kv_slot=slot, after=(*free, *there))
            yield read
            ready = (*ready, read.id)
        if history and self.streams.accelerated:
            load = self._step("load_cache", j, k, kv_slot=slot, after=(*ready, *there, *self._swapped_from(j)))
            yield load
            ready = (load.id,)
            if disk_read:
                self._read_users[slot] = ready
        flow.staged[at] = (slot, ready)

    def _chooses(self, at: LayerBatch, batch: BatchFlow) -> bool:
        """Tell whether sequences of a batch choose pages in a layer, which then pass through the staging buffer."""
        return batch.chooses and self.streams.chooses_staged(at[0])

    def _swap(self, layer: int, batches: Sequence[BatchFlow], flow: _Flow) -> Iterator[Step]:
        """Move the KV of sequences that change their pool in one layer, a layer ahead of its use.

        Whoever had their places there before had them in sweeps whose computation has ended when this one has begun, or
        moves to the host in this one, which goes first.
        """
        yield from self._swap_out(layer, batches, flow)
        for k, batch in enumerate(batches if self._moves_kv(layer) else ()):
            if batch.swaps_in:
                after = (flow.embedded, *self._kv_there(layer, flow), *self._swapped_from(layer))
                step = self._step("swap_in", layer, k, after=after)
                flow.swapped[layer, k] = step.id
                yield step

    def _swap_out(self, layer: int, batches: Sequence[BatchFlow], flow: _Flow) -> Iterator[Step]:
        """Take the KV of sequences that move to the host in one layer, unless that has been done."""
        if layer in flow.left_device or not self._moves_kv(layer):
            return
        flow.left_device.add(layer)
        for k, batch in enumerate(batches):
            if batch.swaps_out:
                step = self._step("swap_out", layer, k, after=(flow.embedded, *self._kv_there(layer, flow)))
                self._swapped_out[layer] = step.id
                flow.note_stored(step)
                yield step

    def _moves_kv(self, layer: int) -> bool:
        """Tell whether the KV of sequences that change their pool is moved in a layer: it has KV of its own."""
        streams = self.streams
        there_is = layer < streams.num_layers
        return there_is and streams.kv_source(layer) == layer and layer not in streams.state_layers

    def _store_cache(self, at: LayerBatch, batch: BatchFlow, slot: int, attention: int, flow: _Flow) -> Iterator[Step]:
        """Takes new KV of staged sequences to its tier, behind the computation."""
        j, k = at
        users = (attention,)
        flow.kept.add(at)
        if self.streams.kv_source(j) != j:  # there is none
            self._staging_users[slot] = users
            return
        if batch.stored or self.streams.accelerated:
            free = self._write_users.get(slot, ()) if batch.disk_write else ()
            store = self._step("store_cache", j, k, kv_slot=slot, after=(attention, *free))
            yield store
            users = (store.id,)
            flow.note_stored(store)
        if batch.disk_write:
            write = self._step("write_cache", j, k, kv_slot=slot, after=users)
            yield write
            flow.note_stored(write)
            if self.streams.accelerated:
                self._write_users[slot] = (write.id,)
            else:
                users = (write.id,)
        self._staging_users[slot] = users

    def _kv_there(self, layer: int, flow: _Flow) -> tuple[int, ...]:
        """The last Steps that stored what a layer's attention finds in its pool.

        They are Steps of earlier sweeps, and if it reuses the KV of an earlier layer, that one's in this sweep too.
        """
        source = self.streams.kv_source(layer)
        new = flow.stored.get(source, {}) if source != layer else {}
        return *self._stored[source].values(), *new.values()

    def _swapped_from(self, layer: int) -> tuple[int, ...]:
        """The last Step that took KV of a layer from the device's pool to the host's, if there was one."""
        return (self._swapped_out[layer],) if layer in self._swapped_out else ()

    def _note_stored(self, send: Step, flow: _Flow) -> None:
        """Note a Step that sends queries and new KV to the host, if the layer has KV of its own."""
        if self.streams.kv_source(send.layer) == send.layer and send.layer not in self.streams.state_layers:
            flow.note_stored(send)


@dataclass(frozen=True)
class _Deferral:
    """The deferred batches of a sweep.

    Attributes:
        deferred_batches: deferred batches of the job.
        has_ended: tells whether a Step of CPU attention has ended.
        alone: Whether nobody else goes through the layers, so that passing them by would compute nothing.
    """

    deferred_batches: DeferredBatches
    has_ended: Callable[[int], bool] = lambda step_id: False
    alone: bool = False

    def can_join(self, deferred_batch: DeferredBatch) -> bool:
        return self.alone or self.has_ended(deferred_batch.attention)


@dataclass
class _Flow:
    """The state of one sweep while its Steps are made."""

    hidden: list[int]  # per batch, the Step after which its latest activations are where they wait
    deferral: _Deferral
    to_stage: deque[LayerBatch]  # whose KV is to pass through a staging buffer, and has none yet
    embedded: int = -1  # the last Step that made activations of the first layer
    sent_before: tuple[int, ...] = ()  # the last `send` of the sweep before, on an accelerator's stage of a pipeline
    joined: dict[int, list[DeferredBatch]] = field(default_factory=dict)  # per batch, deferred batches that are with it
    hidden_made: dict[int, int] = field(default_factory=dict)  # per batch, the last `post`
    before_attention: dict[LayerBatch, tuple[int, ...]] = field(default_factory=dict)
    attended: dict[LayerBatch, int] = field(default_factory=dict)  # CPU attention
    staged: dict[LayerBatch, tuple[int, tuple[int, ...]]] = field(default_factory=dict)  # slot, and what fills it
    chosen: dict[LayerBatch, tuple[int, ...]] = field(
        default_factory=dict
    )  # the Step that chose pages, not yet brought
    swapped: dict[LayerBatch, int] = field(default_factory=dict)  # the Step that brings KV to the device's pool
    left_device: set[int] = field(default_factory=set)  # layers in which KV that moves to the host has gone there
    kept: set[LayerBatch] = field(default_factory=set)  # whose new KV that passed through a staging buffer goes home
    stored: dict[int, dict[Lane, int]] = field(default_factory=dict)  # per layer and lane, the last Step that stores KV
    num_fetched: int = 0  # activations brought from host memory, and the Steps after which their slots were free
    left: list[int] = field(default_factory=list)
    head_loads: list[int] = field(default_factory=list)

    def note_stored(self, step: Step) -> None:
        self.stored.setdefault(step.layer, {})[step.lane] = step.id
