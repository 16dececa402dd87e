"""The Steps of a sweep: everything computed once and in order, and no buffer touched before or after its time.

`hazards` knows what each kind of Step reads and writes, and nothing of how the schedule comes to what a Step waits for.
What happens before what follows from two things only: a lane runs its Steps in order, and a Step waits for those it
names. A sweep may be launched before the one before it has run.
"""

import itertools
import math
import random
from collections import Counter, defaultdict
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thorough import some_draws

from batchgen.core.kv_placement import KVPlacement
from batchgen.core.plan import kv_on_device
from batchgen.schedule.deferred_batches import MOST_PASSED_BY, DeferredBatches
from batchgen.schedule.step_graph import EXCHANGE_SLOTS, HIDDEN_SLOTS, LANES, BatchFlow, Streams
from batchgen.schedule.sweeps import Sweeps

FEW = 10  # tokens of a sweep in which experts are read on demand


def all_steps(streams, sweeps, ready=1.0, pipelined=()):
    """The Steps of a job.

    Args:
        ready: How often the CPU is said to be done with attention that nobody waits for yet.
        pipelined: Numbers of sweeps that are pipelined.
    """
    made, deferred_batches, draw, tokens = Sweeps(streams), DeferredBatches(), random.Random(3), random.Random(1)
    steps = []
    for number, batches in enumerate(sweeps):
        deferred_batches.pipelines = number in pipelined
        steps += made.steps(
            batches, deferred_batches, lambda step_id: draw.random() < ready, tokens.choice([FEW, FEW + 1])
        )
    return steps


def happens_before(steps):
    """For each Step a bit set: those that have ended whenever it starts."""
    ended, last_of = [], {}
    for step in steps:
        bits = 0
        for earlier in (*step.after, last_of.get(step.lane)):
            if earlier is not None:
                bits |= ended[earlier] | 1 << earlier
        ended.append(bits)
        last_of[step.lane] = step.id
    return ended


def hazards(steps, streams, sweeps):  # noqa: C901 (a line for each kind of Step)
    """What could go wrong, in words; nothing where the Steps wait for all that they must."""
    found, ended = [], happens_before(steps)
    used = defaultdict(list)  # buffer -> (Step, whether it writes, what it holds then)
    homes = defaultdict(list)  # KV's home -> (Step, whether it writes)
    num_dequantized = (
        2 if streams.accelerated and any(KVPlacement.CPU in b.placements for batches in sweeps for b in batches) else 1
    )
    fetched, exchanged = Counter(), Counter()  # so far, of activations and of what the CPU attends to
    slot_of = {}  # (which, micro-batch) -> its slot, for buffers whose slots no Step names
    leaving, lives = defaultdict(list), deferred_lives(steps, streams)
    routed = {(s.sweep, s.layer, s.batch) for s in steps if s.kind == "route"}
    begun = {}
    for step in steps:
        if step.kind == "send_deferred":
            leaving[step.sweep, step.layer, step.batch].append(step.deferred_batch)
            begun.setdefault(step.deferred_batch, (step.sweep, step.batch))
    for step in steps:
        kind, layer, k, slot = step.kind, step.layer, step.batch, step.weight_slot
        batch = sweeps[step.sweep][k]

        def use(buffer, writes, holds, step=step):
            used[buffer].append((step, writes, holds))

        if kind in (
            "read_weight",
            "load_weight",
            "expand_weight",
            "pre",
            "attention",
            "send_qkv",
            "post",
            "read_dense",
            "route",
            "choose_pages",
        ):
            _use_weights(step, streams, num_dequantized, use)
        # Pages are chosen by the queries; in host memory it is said which to read, on the device which to copy.
        if kind == "choose_pages":
            use(("chosen", k), True, (step.sweep, layer))
            use(("qkv", k), False, (step.sweep, layer))
        if kind in ("read_cache", "load_cache") and batch.chooses and streams.chooses_staged(layer):
            use(("chosen", k), False, (step.sweep, layer))
        if kind in ("read_weight", "read_dense"):  # each batch's experts by themselves: what others touch is read once
            for batch_number in range(4):
                use(("experts", slot, batch_number), True, layer if kind == "read_weight" else None)
        if kind in ("read_experts", "post") and streams.weights[layer] and not streams.accelerated:
            use(("experts", slot, k), kind == "read_experts", layer)
        if kind in ("route", "read_experts") or (kind == "post" and (step.sweep, layer, k) in routed):
            use(("routes", k), kind == "route", (step.sweep, layer))
        if kind in ("read_head", "load_head"):
            use(("head", slot), True, (step.sweep, layer))
        if kind == "head":
            if streams.vocabulary_chunks:
                use(("head", slot), False, (step.sweep, layer))
            use(("logits", k), True, None)
        # Activations of the batch; those that wait in host memory share slots on the device.
        if kind in ("embed", "load_hidden", "pre", "route", "post", "store_hidden", "head"):
            use(("hidden", k), kind not in ("pre", "head"), None)
        if kind == "load_hidden":
            slot_of["hidden", k] = fetched["all"] % HIDDEN_SLOTS
            fetched["all"] += 1
        if batch.hidden_on_host and kind in ("load_hidden", "pre", "post", "store_hidden"):
            holds = (step.sweep, layer, k)
            use(("hidden slot", slot_of["hidden", k]), kind in ("load_hidden", "post"), holds)
        # Queries, keys and values; results of attention.
        if kind in ("pre", "attention", "send_qkv"):
            use(("qkv", k), kind == "pre", (step.sweep, layer))
        if kind == "attention":
            use(("attended", k), True, (step.sweep, layer))
        if kind in ("route", "post") and ({KVPlacement.DEVICE, KVPlacement.STREAMED} & batch.placements):
            use(("attended", k), False, (step.sweep, layer))
        if kind == "load_attention" or (kind == "post" and KVPlacement.CPU in batch.placements):
            use(("attended on CPU", k), kind == "load_attention", (step.sweep, layer))
        if kind == "send_qkv":
            slot_of["exchange", k] = exchanged["all"] % EXCHANGE_SLOTS
            exchanged["all"] += 1
        if kind in ("send_qkv", "cpu_attention", "load_attention"):
            holds = (step.sweep, layer, k)
            use(("exchange", slot_of["exchange", k]), kind != "load_attention", holds)
        # KV that comes to the device's pool for good, where somebody else's may have been before.
        if kind == "swap_in":
            use(("swapped", k, layer), True, step.sweep)
            homes["cpu", layer].append((step, False))
        if kind == "attention" and batch.swaps_in and _owns_kv(streams, layer):
            use(("swapped", k, layer), False, step.sweep)
        if kind == "swap_in" or (kind == "attention" and KVPlacement.DEVICE in batch.placements):
            homes["gpu", layer].append((step, True))
        # KV that goes to the host's pool for good, where somebody of the sweep may write at once. Those who go in
        # another sweep have blocks of their own: a deferred sequence keeps its blocks while the CPU attends for it.
        if kind == "swap_out":
            use(("swapped out", step.sweep, k, layer), True, step.sweep)
            homes["gpu", layer].append((step, False))
            homes["cpu", layer].append((step, True))
        begins = kind == "attend_deferred" and begun[step.deferred_batch] == (step.sweep, k)
        reads = begins or kind == "cpu_attention" or (kind == "load_cache" and batch.history)
        if reads and batch.swaps_out and _owns_kv(streams, layer):
            use(("swapped out", step.sweep, k, layer), False, step.sweep)
        # Sequences whose attention is deferred.
        for deferred_batch in leaving[step.sweep, layer, k] if kind == "pre" else ():
            use(("sending", deferred_batch), True, layer)
        if kind == "send_deferred":
            use(("sending", step.deferred_batch), False, layer)
        if kind in ("send_deferred", "attend_deferred"):
            use(("queries", step.deferred_batch), kind == "send_deferred", layer)
        if kind in ("attend_deferred", "join_deferred"):
            use(("attended later", step.deferred_batch), kind == "attend_deferred", layer)
        # KV: in staging buffers, in the disk's buffers, at home.
        staged = kind.endswith("_cache") or (kind == "attention" and KVPlacement.STREAMED in batch.placements)
        if staged and streams.stages_kv(layer):
            _use_staging(step, batch, streams, use)
        elif staged:
            homes["device", layer].append((step, True))
        # New KV is sent to its place, states are written by the CPU.
        attends, sends = ("cpu_attention", "attend_deferred"), ("send_qkv", "send_deferred")
        new = attends if layer in streams.state_layers else sends
        if kind == "load_cache" or (kind == "store_cache" and batch.stored) or kind in (*attends, *new):
            homes["cpu", layer].append((step, kind in ("store_cache", *new)))
        if kind in ("read_cache", "write_cache"):
            homes["disk", layer].append((step, kind == "write_cache"))

    for buffer, touches in used.items():
        written, holds, readers = None, None, []
        for step, writes, content in touches:
            if not writes and content is not None and content != holds:
                found.append(f"{step.kind} finds {holds} in {buffer}, not {content}")
            for earlier in [e for e in (written, *(readers if writes else ())) if e not in (None, step)]:
                if not ended[step.id] >> earlier.id & 1:
                    found.append(f"{step.kind} may use {buffer} before {earlier.kind} is done with it")
            if writes:
                written, holds, readers = step, content, []
            else:
                readers.append(step)
    for home, touches in homes.items():
        for i, (step, writes) in enumerate(touches):
            for earlier, wrote in touches[:i]:
                # Sequences of a sweep have places of their own; those of another sweep may have had the same, but for
                # those that have been in flight since.
                apart = _together(earlier, step, lives) and _sequences(earlier) != _sequences(step)
                apart &= home[0] != "gpu" or "swap_out" not in (earlier.kind, step.kind)
                # A deferred sequence stays one, and who has its place next does not read before it has written.
                apart |= (earlier.kind, step.kind) == ("attend_deferred", "load_cache")
                if (writes or wrote) and not apart and not ended[step.id] >> earlier.id & 1:
                    found.append(f"{step.kind} may touch KV on {home} before {earlier.kind} is done with it")
    return found


def _sequences(step):
    """The sequences whose KV a Step touches: those that the CPU attends to, or whose KV is streamed, of a batch."""
    swaps = step.kind if step.kind in ("swap_in", "swap_out") else None
    return step.deferred_batch, step.batch, step.kind in ("send_qkv", "cpu_attention"), swaps


def deferred_lives(steps, streams):
    """The sweeps in which each deferred batch begins its token and has it through all layers."""
    begins = {s.deferred_batch: s.sweep for s in reversed(steps) if s.kind == "send_deferred"}
    last = streams.num_layers - 1
    ends = {s.deferred_batch: s.sweep for s in steps if s.kind == "join_deferred" and s.layer == last}
    return {deferred_batch: (begun, ends.get(deferred_batch, math.inf)) for deferred_batch, begun in begins.items()}


def _owns_kv(streams, layer):
    return streams.kv_source(layer) == layer and layer not in streams.state_layers


def _together(one, other, lives):
    (begin, end), (begins, ends) = (lives.get(s.deferred_batch, (s.sweep, s.sweep)) for s in (one, other))
    return begin <= ends and begins <= end


def _use_weights(step, streams, num_dequantized, use):
    """On its way a layer is in a slot of the host's buffers, of the device's, and is dequantized in another."""
    layer, slot = step.layer, step.weight_slot
    content = layer
    arrives = "device" if streams.accelerated else "host"
    if step.kind in ("read_weight", "read_dense"):
        use(("weights", "host", slot), True, content)
    elif step.kind == "load_weight":
        if streams.disk_weights[layer]:
            use(("weights", "host", slot), False, content)
        use(("weights", "device", slot), True, content)
    else:  # norms (of queries and keys too) and biases are never packed: they are used where they arrive
        if streams.weights[layer]:
            use(("weights", arrives, slot), False, content)
        if streams.dequantized and step.kind in ("expand_weight", "pre", "route", "post"):
            use(("weights", "dequantized", layer % num_dequantized), step.kind == "expand_weight", content)


def _use_staging(step, batch, streams, use):
    content, slot = (step.sweep, step.layer, step.batch), step.kv_slot
    staging = ("staging", slot)
    reads = ("read buffer", slot) if streams.accelerated else staging
    writes = ("write buffer", slot) if streams.accelerated else staging
    if step.kind == "read_cache":
        use(reads, True, content)
    elif step.kind == "load_cache":
        if batch.disk_read:
            use(reads, False, content)
        use(staging, True, content)
    elif step.kind == "attention":
        if batch.history:
            use(staging, False, content)
        use(staging, True, content)
    elif step.kind == "store_cache":
        use(staging, False, content)
        if batch.disk_write:
            use(writes, True, content)
    else:
        use(writes, False, content)


def check_computation(steps, streams, sweeps, pipelined=()):
    """Every layer of every batch once per sweep and in order; activations are on the device when they are used."""
    for sweep, batches in enumerate(sweeps):
        own = [s for s in steps if s.sweep == sweep]
        places = [(j, k) for j in range(streams.num_layers) for k in range(len(batches))]

        def of(kind, own=own):
            return [(s.layer, s.batch) for s in own if s.kind == kind]

        assert of("pre") == of("post") == places
        choosing = [(j, k) for j, k in places if batches[k].chooses and streams.chooses_staged(j)]
        assert of("choose_pages") == choosing
        assert of("attention") == [
            (j, k) for j, k in places if {KVPlacement.DEVICE, KVPlacement.STREAMED} & batches[k].placements
        ]
        for kind in ("send_qkv", "cpu_attention", "load_attention"):
            assert of(kind) == [(j, k) for j, k in places if KVPlacement.CPU in batches[k].placements]
        assert of("route") == of("read_experts")
        assert all(streams.on_demand[j] for j, _ in of("route"))
        assert of("expand_weight") == [(j, k) for j, k in places if streams.dequantized and k == 0]
        assert of("swap_in") == [(j, k) for j, k in places if batches[k].swaps_in and _owns_kv(streams, j)]
        assert of("swap_out") == [(j, k) for j, k in places if batches[k].swaps_out and _owns_kv(streams, j)]
        assert of("write_cache") == [(j, k) for j, k in places if batches[k].disk_write]
        assert of("read_cache") == [(j, k) for j, k in places if batches[k].disk_read]
        passing = [(j, k) for j, k in places if streams.accelerated and streams.stages_kv(j)]
        assert of("load_cache") == [(j, k) for j, k in passing if batches[k].history]
        assert of("store_cache") == [(j, k) for j, k in passing if KVPlacement.STREAMED in batches[k].placements]
        chunks = range(max(1, streams.vocabulary_chunks))
        joins = streams.num_layers - 1 in [s.layer for s in own if s.kind == "join_deferred"]
        joined = len(batches) - 1 if sweep in pipelined else 0
        sampling = [k for k in range(len(batches)) if batches[k].samples or (k == joined and joins)]
        assert of("head") == [(p, k) for p in chunks for k in sampling]
        position = {(s.kind, s.layer, s.batch): i for i, s in enumerate(own)}
        for j, k in places:
            kinds = ("pre", "attention", "route", "read_experts", "post")
            order = [position[kind, j, k] for kind in kinds if (kind, j, k) in position]
            assert order == sorted(order)
        on_host = [b.hidden_on_host for b in batches]
        for s in own:
            if s.kind in ("load_hidden", "store_hidden"):
                assert on_host[s.batch] == (s.kind == "load_hidden")
                on_host[s.batch] = s.kind == "store_hidden"
            elif s.kind in ("pre", "post", "head"):
                assert not on_host[s.batch]


def check_deferred_batches(steps, streams, sweeps, pipelined=()):
    """A deferred batch goes through the layers in order, and is passed by not for ever.

    It goes through one layer in a sweep at most, and through all that it has left in a pipelined one.
    """
    own = defaultdict(list)
    for step in steps:
        if step.deferred_batch is not None:
            own[step.deferred_batch].append(step)
    assert len(own) == sum(KVPlacement.DEFERRED in b.placements for batches in sweeps for b in batches)
    kinds = ["send_deferred", "attend_deferred", "join_deferred"]
    for of_batch in own.values():
        wanted = [(kind, j) for j in range(streams.num_layers) for kind in kinds]
        assert [(s.kind, s.layer) for s in of_batch] == wanted[: len(of_batch)]
        for sent, joined in zip(of_batch[1::3], of_batch[2::3], strict=False):
            assert (0 if joined.sweep in pipelined else 1) <= joined.sweep - sent.sweep <= MOST_PASSED_BY + 1
            assert joined.batch == (len(sweeps[joined.sweep]) - 1 if joined.sweep in pipelined else 0)
            assert joined.after == (sent.id,)
        last = of_batch[-1]
        if last.kind == "attend_deferred":
            assert len(sweeps) - 1 - last.sweep <= MOST_PASSED_BY
            assert not [number for number in pipelined if number >= last.sweep], "it waits in a pipelined sweep"


@st.composite
def batch_flows(draw, accelerated, by_layer):
    """Sequences by where they live: none, new ones, or some with KV. by_layer: all in host memory, in some layers."""
    host = draw(st.sampled_from(["none", "new", "old"])) if accelerated else "none"
    disk = "none" if by_layer else draw(st.sampled_from(["none", "new", "old"]))
    delegated = accelerated and not by_layer and draw(st.booleans())
    deferred = accelerated and not by_layer and draw(st.booleans())
    placements = {
        KVPlacement.STREAMED: host != "none" or disk != "none",
        KVPlacement.CPU: delegated,
        KVPlacement.DEFERRED: deferred,
    }
    placements[KVPlacement.DEVICE] = not any(placements.values()) or draw(st.booleans())
    return BatchFlow(
        frozenset(placement for placement, there in placements.items() if there),
        history="old" in (host, disk),
        stored=host != "none",
        disk_read=disk == "old",
        disk_write=disk != "none",
        samples=draw(st.booleans()),
        swaps_in=accelerated and not by_layer and placements[KVPlacement.DEVICE] and draw(st.booleans()),
        swaps_out=(delegated or deferred or host == "old") and not by_layer and draw(st.booleans()),
    )


@st.composite
def jobs(draw):
    """(streams, the batches of each sweep)."""
    accelerated = draw(st.booleans())
    by_layer = accelerated and draw(st.booleans())
    layers = draw(st.integers(1, 4))
    tiers = draw(st.lists(st.sampled_from(["device", "host", "disk"]), min_size=layers, max_size=layers))
    streams = Streams(
        accelerated=accelerated,
        weights=tuple(t == "disk" or (t == "host" and accelerated) for t in tiers),
        disk_weights=tuple(t == "disk" for t in tiers),
        dequantized=draw(st.booleans()),
        vocabulary_chunks=draw(st.integers(0, 5)),
        kv_on_device=kv_on_device(layers, draw(st.integers(1, layers))) if by_layer else (),
        state_layers=tuple(j for j in range(layers) if draw(st.booleans())),
        on_demand=() if accelerated else tuple(t == "disk" and draw(st.booleans()) for t in tiers),
        on_demand_tokens=0 if accelerated else FEW,
    )
    sweeps = []
    for _ in range(draw(st.integers(1, 6))):
        batches = draw(st.lists(batch_flows(accelerated, by_layer), min_size=1, max_size=4))
        first_on_host = draw(st.integers(0, len(batches))) if accelerated else len(batches)
        sweeps.append([replace(b, hidden_on_host=k >= first_on_host) for k, b in enumerate(batches)])
    # Only the last micro-batch of a pipelined sweep has deferred sequences, and weights are not dequantized.
    alone = [KVPlacement.DEFERRED not in b.placements for batches in sweeps for b in batches[:-1]]
    may = accelerated and not streams.dequantized and all(alone)
    pipelined = [n for n, batches in enumerate(sweeps) if may and len(batches) > 1 and draw(st.booleans())]
    return streams, sweeps, pipelined


@settings(max_examples=some_draws(400), deadline=None)
@given(jobs(), st.sampled_from([0.0, 0.5, 1.0]))
def test_no_step_comes_too_early(job, ready):
    streams, sweeps, pipelined = job
    steps = all_steps(streams, sweeps, ready, pipelined)
    assert [s.id for s in steps] == list(range(len(steps))), "ids count up"
    for step in steps:
        assert step.lane in LANES
        assert all(earlier < step.id for earlier in step.after)
    check_computation(steps, streams, sweeps, pipelined)
    check_deferred_batches(steps, streams, sweeps, pipelined)
    assert hazards(steps, streams, sweeps) == []


DISK = BatchFlow(
    frozenset({KVPlacement.DEVICE, KVPlacement.STREAMED}), history=True, stored=True, disk_read=True, disk_write=True
)
CPU = BatchFlow(frozenset({KVPlacement.DEVICE, KVPlacement.CPU}))
ALL = replace(DISK, placements=DISK.placements | {KVPlacement.CPU})
NEW_ON_DISK = BatchFlow(frozenset({KVPlacement.STREAMED}), disk_write=True)
OLD_ON_DISK = BatchFlow(frozenset({KVPlacement.STREAMED}), history=True, disk_read=True, disk_write=True)
OLD_ON_HOST = BatchFlow(frozenset({KVPlacement.STREAMED}), history=True, stored=True)
DEFERRED = BatchFlow(frozenset({KVPlacement.DEVICE, KVPlacement.DEFERRED}))
ON_HOST = {"hidden_on_host": True}
CHOOSING, CHOOSE = {"choosing": (False, True, True, True)}, replace(OLD_ON_DISK, stored=True, chooses=True)
CHOOSE_ON_HOST = replace(OLD_ON_HOST, chooses=True)
# Between them these have every kind of Step wait for every kind that it ever waits for.
JOBS = [
    (
        Streams(True, (True, True, True), (True, False, True), vocabulary_chunks=3),
        [[DISK, replace(CPU, **ON_HOST), replace(ALL, **ON_HOST), replace(DISK, **ON_HOST)]] * 3,
    ),
    (Streams(True, (True, True, True), (True, False, True), dequantized=True, vocabulary_chunks=3), [[ALL], [ALL]]),
    (Streams(False, (True, True, True), (True, True, True)), [[OLD_ON_DISK] * 3, [OLD_ON_DISK] * 3]),
    (
        Streams(False, (True, True, True), (True, True, True), dequantized=True),
        [[BatchFlow()], [NEW_ON_DISK], [BatchFlow()], [OLD_ON_DISK]],
    ),
    (
        Streams(False, (True,) * 3, (True,) * 3, dequantized=True, on_demand=(True, False, True), on_demand_tokens=FEW),
        [[BatchFlow(), BatchFlow()]] * 8,
    ),
    (Streams(True, (False,), (False,)), [[DISK], [BatchFlow()], [OLD_ON_DISK]]),
    (Streams(True, (False,) * 3, (False,) * 3, kv_on_device=(True, False, False)), [[OLD_ON_HOST, OLD_ON_HOST]] * 3),
    (Streams(True, (False, False), (False, False)), [[DEFERRED, BatchFlow()]] * 2 + [[DEFERRED]] * 3),
    (Streams(True, (True,) * 4, (True, False) * 2, **CHOOSING), [[CHOOSE, ALL, replace(CHOOSE, **ON_HOST)]] * 3),
    (Streams(True, (False,) * 4, (False,) * 4, **CHOOSING, kv_on_device=(False, True) * 2), [[CHOOSE_ON_HOST]] * 3),
    (Streams(False, (True,) * 4, (True,) * 4, **CHOOSING), [[replace(OLD_ON_DISK, chooses=True), OLD_ON_DISK]] * 3),
    (
        Streams(True, (False, True), (False, True), state_layers=(0, 1)),
        [
            [CPU, OLD_ON_HOST],
            [OLD_ON_HOST, CPU],
            [DEFERRED, OLD_ON_HOST],
            [OLD_ON_HOST],
            [DEFERRED],
            [CPU, OLD_ON_HOST],
        ],
    ),
    (
        Streams(False, (True, False), (True, False), vocabulary_chunks=3),
        [[BatchFlow(), BatchFlow()], [BatchFlow(samples=False)], [BatchFlow()]],
    ),
    (
        Streams(False, (False, False), (False, False), dequantized=True),
        [[BatchFlow()], [BatchFlow(samples=False)], [OLD_ON_DISK], [BatchFlow()], [BatchFlow(samples=False)]],
    ),
    (
        Streams(True, (False,) * 3, (False,) * 3),
        [[BatchFlow(frozenset({KVPlacement.STREAMED}), stored=True), CPU], [BatchFlow(swaps_in=True), CPU], [CPU]],
    ),
    (
        Streams(True, (False,) * 3, (False,) * 3),
        [
            [BatchFlow()],
            [BatchFlow(), replace(CPU, swaps_out=True)],
            [BatchFlow()],
            [replace(OLD_ON_HOST, swaps_out=True), BatchFlow(swaps_in=True)],
            [BatchFlow()],
            [CPU],
            [BatchFlow()],
            [replace(DEFERRED, swaps_out=True), BatchFlow(swaps_in=True)],
            [BatchFlow()],
        ],
    ),
    (Streams(True, (False,), (False,)), [[BatchFlow()], *[[BatchFlow(), replace(DEFERRED, swaps_out=True)]] * 2]),
]
# Waits that are there for simplicity, and which buffers could do without: the expansion of weights needs no
# activations, a read need not wait for the load of a layer of which nothing came from disk.
NOT_ALWAYS_NEEDED = {("read_weight", "load_weight")}


def test_a_wait_left_out_is_a_hazard():
    """Each wait by itself, unless what else is waited for makes up for it."""
    needed, detected = Counter(), Counter()
    for streams, sweeps in JOBS:
        steps = all_steps(streams, sweeps)
        check_computation(steps, streams, sweeps)
        assert hazards(steps, streams, sweeps) == []
        for i, step in enumerate(steps):
            for earlier in step.after:
                broken = list(steps)
                broken[i] = step._replace(after=tuple(e for e in step.after if e != earlier))
                if not happens_before(broken)[i] >> earlier & 1:
                    waits = (step.kind, steps[earlier].kind)
                    needed[waits] += 1
                    detected[waits] += bool(hazards(broken, streams, sweeps))
    assert needed.total() > 400
    assert detected.total() / needed.total() > 0.95
    assert {waits for waits, count in needed.items() if detected[waits] < count} == NOT_ALWAYS_NEEDED
    assert {waits for waits, count in detected.items() if count == needed[waits]} >= {
        ("pre", "read_weight"), ("pre", "load_hidden"), ("expand_weight", "read_weight"),
        ("read_weight", "post"), ("load_weight", "read_weight"), ("load_weight", "post"),
        ("read_cache", "load_cache"), ("read_cache", "write_cache"), ("load_cache", "read_cache"),
        ("load_cache", "store_cache"), ("attention", "load_cache"), ("attention", "read_cache"),
        ("attention", "write_cache"), ("store_cache", "attention"), ("store_cache", "write_cache"),
        ("write_cache", "attention"), ("write_cache", "store_cache"),
        ("send_qkv", "pre"), ("cpu_attention", "send_qkv"), ("load_attention", "cpu_attention"),
        ("load_hidden", "post"), ("load_hidden", "store_hidden"), ("store_hidden", "post"),
        ("head", "load_head"), ("load_head", "head"), ("head", "read_head"), ("read_head", "head"),
        ("expand_weight", "read_dense"), ("read_dense", "post"), ("read_experts", "route"), ("post", "read_experts"),
        ("send_deferred", "pre"), ("attend_deferred", "send_deferred"), ("join_deferred", "attend_deferred"),
        ("attention", "swap_in"), ("swap_in", "store_cache"), ("swap_in", "embed"),
        ("swap_out", "embed"), ("attention", "swap_out"), ("load_cache", "swap_out"),
        ("swap_in", "swap_out"),
        ("read_cache", "choose_pages"), ("load_cache", "choose_pages"),
    }  # fmt: skip


def test_a_deferred_batch_is_passed_by_while_the_cpu_is_late_but_not_for_ever():
    streams = Streams(True, (False, False), (False, False))
    late = all_steps(streams, [[DEFERRED]] + [[BatchFlow()]] * 30, ready=0.0)
    assert [s.sweep for s in late if s.kind == "join_deferred"] == [MOST_PASSED_BY + 1, 2 * (MOST_PASSED_BY + 1)]
    prompt = all_steps(streams, [[DEFERRED]] + [[BatchFlow()]] * 3)
    assert [s.sweep for s in prompt if s.kind == "join_deferred"] == [1, 2]
    alone = all_steps(streams, [[DEFERRED]] + [[BatchFlow(frozenset())]] * 2, ready=0.0)
    assert [s.sweep for s in alone if s.kind == "join_deferred"] == [1, 2], "there is nothing else to compute"


def test_deferred_attention_runs_beside_the_whole_sweep():
    steps = all_steps(Streams(True, (False,) * 4, (False,) * 4), [[DEFERRED]] + [[BatchFlow()]] * 4)
    attend = next(s for s in steps if s.kind == "attend_deferred" and s.layer == 1)
    join = next(s for s in steps if s.kind == "join_deferred" and s.layer == 1)
    ended = happens_before(steps)
    between = [s for s in steps[attend.id + 1 : join.id] if s.lane == "compute"]
    assert len({s.layer for s in between if s.kind == "post"}) == 4
    assert not any(ended[s.id] >> attend.id & 1 or ended[attend.id] >> s.id & 1 for s in between)


def test_in_a_pipelined_sweep_deferred_batches_go_through_all_layers_that_they_have_left():
    """One began two sweeps before, one in the sweep before, one begins in it; the GPU goes on beside the CPU."""
    streams, others = Streams(True, (False,) * 4, (False,) * 4), BatchFlow()
    begins = BatchFlow(frozenset({KVPlacement.DEFERRED}), samples=False)
    sweeps = [[others, begins], [others, begins], [others, begins], [others]]
    steps = all_steps(streams, sweeps, pipelined=[2])
    ends = {s.deferred_batch: s.sweep for s in steps if s.kind == "join_deferred" and s.layer == 3}
    assert ends == {0: 2, 1: 2, 2: 2}
    in_it = Counter(s.deferred_batch for s in steps if s.kind == "join_deferred" and s.sweep == 2)
    assert in_it == {0: 3, 1: 4, 2: 4}
    ended = happens_before(steps)
    for j in range(4):
        (attend,) = [s for s in steps if (s.kind, s.deferred_batch, s.layer) == ("attend_deferred", 2, j)]
        beside = [s for s in steps if s.sweep == 2 and s.kind == "post" and (s.layer, s.batch) == (j, 0)]
        assert beside and not any(ended[s.id] >> attend.id & 1 or ended[attend.id] >> s.id & 1 for s in beside)


def test_nothing_waits_that_need_not():
    """What is to overlap: loading ahead, storing behind, CPU attention of one batch beside the products of the next."""
    steps = all_steps(
        Streams(True, (True,) * 4, (True,) * 4),
        [[CPU, BatchFlow(frozenset({KVPlacement.DEVICE, KVPlacement.STREAMED}), history=True, stored=True)]],
    )
    for one, other in [
        (("load_weight", 2, 0), ("pre", 1, 1)),
        (("load_weight", 2, 0), ("post", 1, 0)),
        (("read_weight", 3, 0), ("load_weight", 2, 0)),
        (("load_cache", 1, 1), ("attention", 1, 0)),
        (("store_cache", 1, 1), ("pre", 2, 1)),
        (("cpu_attention", 1, 0), ("pre", 1, 1)),
        (("cpu_attention", 1, 0), ("post", 0, 1)),
    ]:
        assert apart(steps, one, other), f"{one} and {other}"
    steps = all_steps(Streams(False, (False,) * 4, (False,) * 4), [[OLD_ON_DISK, OLD_ON_DISK]])
    for one, other in [
        (("read_cache", 1, 1), ("attention", 1, 0)),
        (("write_cache", 1, 0), ("attention", 1, 1)),
        (("write_cache", 1, 0), ("read_cache", 1, 1)),
    ]:
        assert apart(steps, one, other), f"{one} and {other}"


def test_kv_of_a_layer_loads_behind_the_layers_whose_kv_stays():
    """As soon as a buffer is free, however many layers ahead: here behind all that are computed since."""
    streams = Streams(True, (False,) * 9, (False,) * 9, kv_on_device=kv_on_device(9, 6))
    steps = all_steps(streams, [[OLD_ON_HOST]] * 3)
    loads = [s for s in steps if s.kind == "load_cache"]
    assert [(s.sweep, s.layer) for s in loads] == [(sweep, j) for sweep in range(3) for j in (2, 5, 8)]
    number = {(s.kind, s.sweep, s.layer): s.id for s in steps}
    ended = happens_before(steps)
    for load in loads[3:]:
        before = {s.layer for s in steps if s.kind == "post" and s.sweep == load.sweep and ended[load.id] >> s.id & 1}
        # Of two buffers, the layer's is free once the one before the last that was loaded has been attended to, and its
        # new KV sent.
        assert before == ({0, 1} if load.layer == 8 else set()), load
        assert ended[load.id] >> number["store_cache", load.sweep - 1, load.layer] & 1, "what is new comes back"


@pytest.mark.parametrize(("num_layers", "kv_layers"), [(9, 6), (9, 7), (4, 1), (5, 2), (32, 20), (1, 0), (7, 0)])
def test_layers_whose_kv_streams_are_evenly_spread(num_layers, kv_layers):
    on_device = kv_on_device(num_layers, kv_layers)
    assert len(on_device) == num_layers and sum(on_device) == kv_layers
    streamed = [-1, *(j for j in range(num_layers) if not on_device[j])]
    gaps = [b - a for a, b in itertools.pairwise(streamed)]
    assert streamed[-1] == num_layers - 1 and max(gaps) - min(gaps) <= 1


def apart(steps, one, other):
    """Whether neither of two (kind, layer, batch), each the first of its kind, has to wait for the other."""
    number = {(s.kind, s.layer, s.batch): s.id for s in reversed(steps)}
    earlier, later = sorted((number[one], number[other]))
    return not happens_before(steps)[later] >> earlier & 1


def test_weights_load_on_across_sweeps():
    steps = all_steps(Streams(False, (True,) * 3, (True,) * 3), [[BatchFlow()]] * 2)
    loads = [(s.sweep, s.layer, s.weight_slot) for s in steps if s.kind == "read_weight"]
    assert loads == [(0, 0, 0), (0, 1, 1), (0, 2, 0), (0, 0, 1), (0, 1, 0), (1, 2, 1), (1, 0, 0), (1, 1, 1)]
    uses = [(s.sweep, s.layer, s.weight_slot) for s in steps if s.kind == "pre"]
    assert uses == [(0, 0, 0), (0, 1, 1), (0, 2, 0), (1, 0, 1), (1, 1, 0), (1, 2, 1)]


def test_experts_are_read_on_demand_once_a_layer_has_been_read_as_a_whole():
    """What is read ahead for a sweep is read as the sweep before it was."""
    made = Sweeps(Streams(False, (True,) * 3, (True,) * 3, on_demand=(False, True, True), on_demand_tokens=FEW))
    kinds = []
    for num_tokens in (FEW, FEW, FEW + 1, FEW + 1, FEW):
        steps = list(made.steps([BatchFlow()], num_tokens=num_tokens))
        kinds.append(["route" in {s.kind for s in steps if s.layer == j} for j in range(3)])
    some = [False, True, True]
    assert kinds == [[False] * 3, some, [False, True, False], [False] * 3, [False, False, True]]


def test_in_memory_all_is_computation_in_one_lane():
    steps = all_steps(Streams(False, (False,) * 2, (False,) * 2), [[BatchFlow(), BatchFlow(samples=False)]])
    assert {s.lane for s in steps} == {"compute"}
    per_layer = ["pre", "attention", "post"] * 2
    assert [s.kind for s in steps] == ["embed", "embed", *per_layer, *per_layer, "head"]


def test_a_stage_receives_and_sends():
    """Each micro-batch as soon as it is there, and as soon as it is done; nothing is embedded, no logits are made."""
    made = Sweeps(Streams(False, (False, False), (False, False), receives=True, sends=True))
    first, second = (list(made.steps([BatchFlow(), BatchFlow()])) for _ in range(2))
    layer = ["pre", "attention", "post"]
    assert [s.kind for s in first] == ["receive", "receive", *layer, *layer, *layer, "send", *layer, "send"]
    by_id = {s.id: s for s in (*first, *second)}
    for step in (*first, *second):
        waited = [by_id[i] for i in step.after]
        assert all(earlier.batch == step.batch for earlier in waited)
        if step.kind == "pre" and step.layer == 0:
            assert [s.kind for s in waited] == ["receive"] and waited[0].sweep == step.sweep
        if step.kind == "send":
            assert [(s.kind, s.layer, s.sweep) for s in waited] == [("post", 1, step.sweep)]
        if step.kind == "receive":  # what was received before may still be where this one goes
            assert [(s.kind, s.layer, s.sweep) for s in waited] == [("post", 1, 0)] * step.sweep
    alone = Sweeps(Streams(False, (False,), (False,), sends=True)).steps([BatchFlow()])
    assert [s.kind for s in alone] == ["embed", *layer, "send"]


@pytest.mark.parametrize("on_host", [False, True])
def test_a_stage_on_an_accelerator_receives_and_sends_through_memory_of_the_host(on_host):
    """Which a sweep fills again only when all that the sweep before had there has been taken."""
    made = Sweeps(Streams(True, (False, False), (False, False), receives=True, sends=True))
    flow = BatchFlow(hidden_on_host=on_host)
    sweeps = [list(made.steps([flow] * count)) for count in (3, 2, 3)]
    layer, between = ["pre", "attention", "post"], ["store_hidden", "load_hidden"] if on_host else []
    for sweep in sweeps:
        kinds = [s.kind for s in sweep if s.batch == 1]
        assert kinds == ["receive", "load_hidden", *layer, *between, *layer, "store_hidden", "send"]
    by_id = {s.id: s for sweep in sweeps for s in sweep}
    for before, sweep in zip([[], *sweeps], sweeps, strict=False):
        loads = [s.id for s in before if s.kind == "load_hidden" and s.layer == 0]
        sends = [s.id for s in before if s.kind == "send"]
        for step in sweep:
            others = {i for i in step.after if by_id[i].sweep < step.sweep or by_id[i].batch != step.batch}
            own = {(by_id[i].kind, by_id[i].layer) for i in {*step.after} - others}
            if step.kind == "receive":
                assert others == {*loads[-1:]} and not own
            elif step.kind == "load_hidden" and step.layer == 0:
                assert own == {("receive", 0)}
            elif step.kind == "store_hidden" and step.layer == 1:
                assert others == {*sends[-1:]} and own == {("post", 1)}
            elif step.kind == "send":
                assert own == {("store_hidden", 1)} and not others


@pytest.mark.parametrize("dequantized", [False, True])
def test_layers_that_are_captured_have_all_steps_of_a_sweep_that_is_not(dequantized):
    streams = Streams(accelerated=True, weights=(False,) * 3, disk_weights=(False,) * 3, dequantized=dequantized)
    whole = [(step.kind, step.layer) for step in Sweeps(streams).steps([BatchFlow()])]
    captured = [(step.kind, step.layer) for step in Sweeps(streams).layers(1)]
    assert [("embed", 0), *captured, ("head", 0)] == whole
    assert [layer for kind, layer in captured if kind == "expand_weight"] == ([0, 1, 2] if dequantized else [])


@pytest.mark.parametrize("weights", [(False,) * 3, (True, False, True)], ids=["resident", "streamed"])
def test_small_sweeps_multiply_weights_as_they_are_stored(weights):
    """Whether captured or not, and whatever the sweeps before."""
    fields = {"accelerated": True, "weights": weights, "disk_weights": (False,) * 3}
    sweeps = Sweeps(Streams(**fields, dequantized=True, packed_tokens=FEW))
    numbers = Sweeps(Streams(**fields))
    for tokens in (FEW + 1, FEW, 1, FEW + 1, None, FEW):
        made = [(s.kind, s.layer) for s in sweeps.steps([BatchFlow()], num_tokens=tokens)]
        expanded = [layer for kind, layer in made if kind == "expand_weight"]
        assert expanded == ([] if tokens is not None and tokens <= FEW else [0, 1, 2])
        others = [(kind, layer) for kind, layer in made if kind != "expand_weight"]
        assert others == [(s.kind, s.layer) for s in numbers.steps([BatchFlow()], num_tokens=tokens)]
    for tokens in (FEW, FEW + 1) if not any(weights) else ():  # captured
        kinds = [s.kind for s in sweeps.layers(tokens)]
        assert ("expand_weight" in kinds) == (tokens > FEW)
