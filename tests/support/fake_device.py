"""A device with streams, played on the CPU.

An operation that is launched there runs later, in an order that nothing but its waits restrains, so that a missing wait
shows in the result.

Operations of torch on the device's memory are intercepted while a Step is launched: views are made at once, everything
else is put off, and what it will fill is poisoned until then. Memory is `fake_memory`'s: given out again as soon as
torch might. Operations on the host's memory alone are done at once, as they are beside a real device. Nothing here
depends on how fast the machine is: streams and host lanes go on when the launching thread lets them, or when it cannot
go on without them.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import deque
from dataclasses import replace
from typing import NamedTuple

import torch
from fake_memory import HOST, FakeMemory
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from batchgen.engine.parts import EngineParts
from batchgen.models import experts
from batchgen.models.layouts import OUTPUT_MATRIX
from batchgen.ops import dispatch as ops
from batchgen.ops import quant, reference, torch_attention
from batchgen.ops.host_copy import Passage, bytes_of, upload
from batchgen.runtime import batch_preparation, token_table
from batchgen.runtime.cuda import CudaLink
from batchgen.runtime.lane_threads import prepare_thread
from batchgen.runtime.memory import kv_cache
from batchgen.runtime.memory.weight_packing import WeightPacker
from batchgen.runtime.steps import context
from batchgen.runtime.streams import STREAMS, StreamLanes

# Equal to no other device, and its tensors are the CPU's.
DEVICE = torch.device("cpu", 0)
# Which stream goes first, and how many of them run ahead of what is waited for.
ORDERS = [(order, eager) for eager in (0, 1, 2, 3) for order in itertools.permutations(STREAMS)][5:]
# Operations that may wait in a stream, and those that a Step is taken to launch.
QUEUE, LAUNCHES = 1024, 40
# Little enough for what is on its way to be in the way of what follows.
PASSAGE_BYTES = 16 << 10
# What is not to come while a stream waits at a semaphore.
FIRST_USES = ("operation", "memory", "pinned memory")
_HUNG_S = 600.0  # a Step of a host lane takes no longer


class Event:
    def __init__(self, lane):
        self.lane, self.done, self.at = lane, False, 0


class _Entry(NamedTuple):
    """Of a stream's queue: run is called once the event has come and the semaphore of (host lane, count) is raised."""

    run: object = None
    computes: bool = False
    event: Event | None = None
    semaphore: tuple[str, int] | None = None
    cost: int = 0


class FakeDevice:
    """The Driver of `streams`. Invariant: an entry of a stream is done after those before it there."""

    def __init__(self, order=STREAMS, eager=0, warm=(), passage_bytes=PASSAGE_BYTES):
        """Makes the device.

        Args:
            order: streams by priority.
            eager: how many of the first run as soon as they can; others when they must.
            warm: kinds of FIRST_USES that may not come while a stream waits at a semaphore.
            passage_bytes: pinned memory for small arrays.
        """
        self._order, self._eager, self.warm = order, eager, warm
        self._queues = {lane: deque() for lane in STREAMS}
        self._loads = dict.fromkeys(STREAMS, 0)
        self._semaphores = {}
        self._changed = threading.Condition(threading.RLock())
        self._awaited = set()  # events that host lanes wait for
        self._num_copies = 0
        self._known = set()
        self._failed = False  # what has failed computes no more
        self._stuck = 0  # launching threads that wait for streams or host lanes
        self.now = 0  # a clock
        self.lanes = None  # who raises the semaphores
        self.launching = threading.local()
        self.memory = FakeMemory(lambda lane, run: self._put(lane, _Entry(run)), self._first_use)
        record = lambda: self.record("compute")  # noqa: E731
        self.passage = Passage(self.empty_pinned((passage_bytes,), torch.uint8), record, self.synchronize)

    # Driver.

    def launch(self, lane, work):
        self._put(lane, _Entry(cost=LAUNCHES))
        before = self._num_copies + self.passage.num_copies
        self.launching.lane = lane
        try:
            with _Deferred(self, lane):
                work()
        finally:
            self.launching.lane = None
        self._pump()
        return self._num_copies + self.passage.num_copies - before

    def note_copy(self):
        self._num_copies += 1
        self._put(self.launching.lane, _Entry(cost=1))

    def record(self, lane):
        event = Event(lane)

        def reach():
            event.done, event.at = True, self.now
            if event in self._awaited:  # a thread that wakes takes the interpreter from the others
                self._changed.notify_all()

        self._put(lane, _Entry(reach, cost=1))
        self._pump()
        return event

    def wait(self, lane, event):
        self._put(lane, _Entry(event=event, cost=1))

    def wait_for_host(self, lane, host_lane, count):
        self._put(lane, _Entry(semaphore=(host_lane, count), cost=1))

    def signal(self, host_lane, count):
        with self._changed:
            self._semaphores[host_lane] = count  # as told: who lowers it has a stream wait forever
            self._changed.notify_all()

    def synchronize(self, event):
        is_host_lane = threading.current_thread().name.startswith("batchgen-")
        began = time.monotonic()
        with self._changed:
            while not event.done:
                self.memory.reclaim()
                if (self._stuck or not is_host_lane) and self._run_one(self._holding_up(event)):
                    continue
                if is_host_lane:
                    self._awaited.add(event)
                    self._changed.wait()
                    continue
                with self.stuck():
                    self._wait_for_host(event)
                assert time.monotonic() - began < _HUNG_S, "a host lane is at a Step that does not end"
            self._awaited.discard(event)

    def is_done(self, event):
        return event.done

    def seconds(self, start, stop):
        return float(stop.at - start.at)

    def finish(self):
        for lane in STREAMS:
            self.synchronize(self.record(lane))

    def close(self):
        """Nothing: it has no memory of the host's."""

    def empty(self, shape, dtype):
        return self.memory.empty(shape, dtype, self.launching.lane)

    def empty_pinned(self, shape, dtype):
        return self.memory.empty(shape, dtype, HOST)

    def reserve(self, lane, num_bytes):
        self.memory.reserve(lane, num_bytes)

    def upload(self, tensor):
        assert self.launching.lane == "compute", "small arrays go with what computes"
        assert not self.memory.is_on_device(tensor), "the host reads what is the device's"
        return self.passage.upload(bytes_of(tensor).numpy(), self.empty(tensor.shape, tensor.dtype))

    def borrow(self, tensor):
        self.memory.borrow(tensor, self.launching.lane)

    def uploaded(self, array):
        """As `host_copy.upload`."""
        return self.upload(torch.from_numpy(array))

    # For tests.

    def idle(self, ticks):
        """Time goes by in which nothing is launched."""
        with self._changed:
            for lane in STREAMS:
                while self._run_one(lane):
                    pass
            self.now += ticks

    def take(self, lane, ticks):
        """What is launched here takes some time."""

        def pass_by():
            self.now += ticks

        self._put(lane, _Entry(pass_by))

    @contextlib.contextmanager
    def stuck(self):
        """Meanwhile streams and host lanes go on, however lazy they are."""
        with self._changed:
            self._stuck += 1
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._stuck -= 1

    def await_stuck(self, or_else):
        """Returns when the launching thread cannot go on by itself, or when or_else() is true."""
        with self._changed:
            while not self._stuck and not or_else():
                self._changed.wait(0.05)  # or_else() comes without notice

    # Streams.

    def _put(self, lane, entry):
        with self._changed:
            self.memory.reclaim()
            while entry.cost and self._loads[lane] + entry.cost > QUEUE:
                holder = self._holding_up(lane)
                # Who launches holds the interpreter's lock: no other thread runs before there is room.
                assert self._run_one(holder), (
                    f"a launch into the full queue of {lane}, which waits for {holder}'s semaphore"
                )
            self._queues[lane].append(entry)
            self._loads[lane] += entry.cost

    def _pump(self):
        with self._changed:
            while any(self._run_one(lane) for lane in self._order[: self._eager]):
                pass

    def _holding_up(self, what):
        """The stream that has to go on for a stream, or an event, to do so: nothing else is done for it."""
        lane = what.lane if isinstance(what, Event) else what
        while True:
            entry = self._queues[lane][0]
            if entry.event is None or entry.event.done:
                return lane
            lane = entry.event.lane

    def _is_raised(self, semaphore):
        return semaphore is None or self._semaphores.get(semaphore[0], 0) >= semaphore[1]

    def _run_one(self, lane):
        queue = self._queues[lane]
        if not queue or not self._is_raised(queue[0].semaphore) or (queue[0].event and not queue[0].event.done):
            return False
        entry = queue.popleft()
        self._loads[lane] -= entry.cost
        if entry.run and not (entry.computes and self._failed):
            self._failed = True
            with torch._C._InferenceMode(True), torch._C._DisableTorchDispatch():  # modes cost more than what is run
                entry.run()
            self._failed = False
        self.now += 1
        return True

    def _wait_for_host(self, event):
        """Waits, with the lock held, until a host lane may have done something.

        Raises:
            AssertionError: the event waits at a semaphore that nobody is to open.
        """
        semaphore = self._queues[self._holding_up(event)][0].semaphore
        if self.lanes is not None:
            self._changed.release()
            try:
                comes = self.lanes.has_to_open(semaphore[0])
            finally:
                self._changed.acquire()
            assert comes or self._is_raised(semaphore), (
                f"the device waits at a semaphore of {semaphore[0]} that nobody is to open"
            )
        if not self._is_raised(semaphore):
            self._changed.wait(0.05)  # a lane may have failed

    def _first_use(self, kind, what):
        if kind == "operation" and what in self._known:
            return
        self._known.add(what)
        if kind not in self.warm:
            return
        with self._changed:
            closed = any(not self._is_raised(entry.semaphore) for queue in self._queues.values() for entry in queue)
        assert not closed, f"{kind}: {what} is used for the first time while a stream waits at a semaphore"


class _Deferred(TorchDispatchMode):
    def __init__(self, device, lane):
        super().__init__()
        self._device, self._memory, self._lane = device, device.memory, lane

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func not in _elementary:  # what is made of other operations is looked at in parts
            with self:
                found = func.decompose(*args, **kwargs)
            if found is not NotImplemented:
                return found
            _elementary.add(func)
        tensors = _tensors((args, kwargs))
        name, memory = func.name(), self._memory
        to_device = kwargs.get("device") == DEVICE
        # The device's tensors say that they are the CPU's: memory made for a result beside them is the device's.
        is_new = not tensors and name.startswith("aten::empty")
        on_device = to_device or is_new or any(map(memory.is_on_device, tensors))
        if func.is_view or not on_device or name.startswith(("aten::detach", "aten::lift_fresh")):
            return func(*args, **kwargs)
        if name.startswith(("aten::empty", "aten::new_empty")):
            return self._made(func, args, kwargs)[0]
        self._device._first_use("operation", name)
        if to_device:  # from the host's pageable memory, which is read at once
            value = func(*args, **kwargs)
            made = memory.empty(value.shape, value.dtype, self._lane)
            target = memory.unheld(made)
            self._put(lambda: target.copy_(value))
            return made
        args_then, kwargs_then = _changed(memory.unheld, args), _changed(memory.unheld, kwargs)
        if func._schema.is_mutable:
            if name.startswith("aten::copy_"):  # torch itself keeps pinned memory until its copies are done
                for tensor in filter(memory.is_pinned, tensors):
                    memory.borrow(tensor, self._lane)
            self._put(lambda: func(*args_then, **kwargs_then))
            return kwargs.get("out", args[0])
        made = self._made(func, args, kwargs)
        targets = [memory.unheld(m) for m in made]

        def run():
            for target, result in zip(targets, _tensors(func(*args_then, **kwargs_then)), strict=True):
                target.copy_(result)

        self._put(run)
        return made[0] if len(func._schema.returns) == 1 else tuple(made)

    def _made(self, func, args, kwargs):
        """Memory for the results."""
        return [self._memory.empty(*shape, self._lane, stride) for *shape, stride in _results(func, args, kwargs)]

    def _put(self, run):
        self._device._put(self._lane, _Entry(run, computes=True))


_elementary = set()  # operations that are not made of others
_shapes = {}


def _results(func, args, kwargs):
    """Shape, dtype and strides of each result."""
    key = func, repr(_changed(_layout, (args, kwargs)))
    if key not in _shapes:
        args, kwargs = _changed(
            lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta"), (args, kwargs)
        )
        kwargs |= {"device": "meta"} if "device" in kwargs else {}
        _shapes[key] = [(r.shape, r.dtype, r.stride()) for r in _tensors(func(*args, **kwargs))]
    return _shapes[key]


def _layout(tensor):
    return tuple(tensor.shape), tensor.stride(), tensor.dtype


def _changed(change, x):
    """With every tensor in tuples, lists and dicts changed."""
    if isinstance(x, torch.Tensor):
        return change(x)
    if type(x) in (tuple, list):
        return type(x)([_changed(change, value) for value in x])
    return {key: _changed(change, value) for key, value in x.items()} if type(x) is dict else x


def _tensors(x):
    """Every tensor in tuples, lists and dicts."""
    if isinstance(x, torch.Tensor):
        return [x]
    if type(x) not in (tuple, list, dict):
        return []
    return [tensor for part in (x.values() if type(x) is dict else x) for tensor in _tensors(part)]


class PlayedLanes(StreamLanes):
    """Lanes of a played device.

    Host lanes that are late act when nothing else can go on. A patient launching thread gives the others the time to do
    what they can.
    """

    def __init__(self, perform, device, *, late=(), patient=True, **options):
        super().__init__(perform, device, **options)
        self._late, self._patient, self._host_steps = late, patient, []
        device.lanes = self

    def has_to_open(self, host_lane):
        """Whether a Step of this lane is still to end."""
        with self._lock:
            ends = self._failure is not None or self._closed or host_lane in self._pending.values()
            return ends and any(thread.is_alive() for thread in self._threads.values())

    def drain(self):
        with self._driver.stuck():
            super().drain()

    def close(self):
        with self._driver.stuck():
            super().close()

    def _issue(self, step):
        self._host_steps.append(step)
        super()._issue(step)

    def _launch(self, step):
        while self._patient and self._a_prompt_step_can_run():
            time.sleep(1e-4)
        super()._launch(step)

    def _a_prompt_step_can_run(self):
        if self._failure is not None:
            return False
        with self._lock:
            self._host_steps = [s for s in self._host_steps if s.id in self._pending]
            first = {s.lane: s for s in reversed(self._host_steps) if s.lane not in self._late}
            return any(map(self._can_run, first.values()))

    def _can_run(self, step):
        return all(i not in self._pending and (i not in self._events or self._events[i][1].done) for i in step.after)

    def _await(self, step, thread):
        if step.lane in self._late:
            self._driver.await_stuck(lambda: self._failure is not None or self._closed)
        super()._await(step, thread)


def _all_experts(config, weights, x, shares, chosen):
    """The result of `experts.chosen_experts`; every expert multiplies all tokens."""
    weights = experts._split(config, weights)
    total = torch.zeros_like(x, dtype=torch.float32)
    for e in range(config.num_experts):
        result = torch.empty_like(x)
        experts._expert(config, weights, e, x, result, x.new_empty(len(x), config.intermediate_size))
        total.addcmul_(result.float(), (shares * (chosen == e)).sum(1, keepdim=True))
    return total


def as_on_a_device(monkeypatch) -> None:
    """Weights that are loaded for an emulated accelerator lie as a real one's: plain, all experts together."""
    monkeypatch.setattr(ops, "pack_weight", lambda weight, **_: weight)
    monkeypatch.setattr(WeightPacker, "splits_experts", property(lambda packer: packer.tiers.links is None))


def run_on(
    parts: EngineParts, device: FakeDevice, monkeypatch, late: tuple[str, ...] = (), ahead: bool = False
) -> EngineParts:
    """Has the parts, loaded for an emulated accelerator (`as_on_a_device`), run on the device's streams.

    Args:
        late: lanes of the host that are slow.
        ahead: tokens are sampled on the device, and sweeps launched before those of the last one have come to the host;
            else the host samples, and waits for the logits.
    """
    executor = parts.executor
    executor.lanes = PlayedLanes(executor._perform, device, on_thread=prepare_thread, late=late)
    executor.context.device = DEVICE
    _give_memory(executor, device)

    def on_device(name, function):
        """While a Step is launched, the function instead of the CPU's kernel."""
        real = getattr(ops, name)
        monkeypatch.setattr(
            ops, name, lambda *a, **k: (function if getattr(device.launching, "lane", None) else real)(*a, **k)
        )

    for name in ("linear", "norm"):
        on_device(name, getattr(reference, name))
    on_device("gather_rows", lambda target, source, index: torch.index_select(source, 0, index, out=target))
    on_device("quantize", quant.quantize)
    on_device("dequantize", lambda packed, out: quant.dequantize(packed, out.shape[-1], out=out))
    for module in (batch_preparation, kv_cache, context):
        monkeypatch.setattr(
            module, "upload", lambda array, to: device.uploaded(array) if to == DEVICE else upload(array, to)
        )
    real_experts = experts.chosen_experts

    def experts_of_tokens(*args):
        """Experts without the number of their tokens, for which the host would wait."""
        return (_all_experts if getattr(device.launching, "lane", None) else real_experts)(*args)

    monkeypatch.setattr(experts, "chosen_experts", experts_of_tokens)
    real_has_kernels = ops._has_kernels
    monkeypatch.setattr(
        ops, "_has_kernels", lambda *a: getattr(device.launching, "lane", None) is None and real_has_kernels(*a)
    )
    real_prepare = ops.prepare_attention

    def prepare(plan, operands, device, **options):
        if device == DEVICE:
            return torch_attention.prepare_attention(plan, operands, ops.CPU)
        return real_prepare(plan, operands, device, **options)

    monkeypatch.setattr(ops, "prepare_attention", prepare)
    if ahead:
        real_of_logits = ops._of_logits
        monkeypatch.setattr(
            ops, "_of_logits", lambda x: reference if getattr(device.launching, "lane", None) else real_of_logits(x)
        )
        assert executor.weights.embeds_on_device, "tokens that the host does not have cannot be looked up there"
        executor.context.tokens = token_table.TokenTable(DEVICE)
        return parts

    def looking(run):
        """As executor.run and .warm_up; the host reads what the device has come to."""

        def run_and_look(batches, on_logits, **options):
            def look(rows, logits, start):
                lane, device.launching.lane = device.launching.lane, None
                try:
                    device.synchronize(device.record("compute"))
                    with _disable_current_modes():
                        on_logits(rows, logits.clone(), start)
                finally:
                    device.launching.lane = lane

            run(batches, look, **options)

        return run_and_look

    executor.run, executor.warm_up = looking(executor.run), looking(executor.warm_up)
    return parts


def _give_memory(executor, device):
    """What an accelerator holds from beginning to end is the device's, and the links are a real device's."""
    weights = executor.weights
    caches = [cache for cache in (executor.kv_cache, executor.states) if cache is not None]
    stays = dict(enumerate(executor.kv_cache.on_device))
    held = [
        *(pool for cache in caches for pool in cache.pools.get("gpu", {}).values()),
        *(pool for cache in caches for layer, pool in cache.pools.get("cpu", {}).items() if stays.get(layer)),
        *(buffer for cache in caches for buffer in cache._staging),
        *weights.output_matrix.buffers,
        *(table for layer in executor.config.attention_layers for table in executor.context.ropes.of(layer) or ()),
    ]
    held += [*filter(torch.is_tensor, executor.kv_cache._passing), *executor.context.activations.on_device]
    tensors = [*weights._resident, *weights.slots.buffers, *weights.dequantized.buffers]
    tensors.append({n: t for n, t in weights.head.items() if n != OUTPUT_MATRIX or weights.residency.head == "gpu"})
    if weights.embeds_on_device:
        tensors.append(weights.embeddings)
    device.memory.keep([*held, *(t for named in tensors for t in named.values())])
    links = CudaLink(device, to_gpu=True), CudaLink(device, to_gpu=False)
    executor._tiers = executor.context.tiers = weights._tiers = replace(executor._tiers, links=links)
    for cache in caches:
        cache._tiers = executor._tiers
