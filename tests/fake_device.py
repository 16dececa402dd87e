"""A device with streams, played on the CPU: what is launched there is done later, in an order that nothing but its waits
restrains, so that a missing one shows in the result.

Operations of torch are intercepted while a Step is launched: views are made at once, everything else is put off, and what it
will fill is poisoned until then. Memory is the host's, as if all of it were pinned: who reads it too early reads poison.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map

from batchgen import ops, quant, reference
from batchgen.engine_parts import EngineParts
from batchgen.runtime import executor as executors
from batchgen.runtime.streams import STREAMS, StreamLanes

# Equal to no other device, and its tensors are the CPU's.
DEVICE = torch.device("cpu", 0)
# Which stream goes first, and how many of them run ahead of what is waited for.
ORDERS = [(order, eager) for eager in (0, 1, 2, 3) for order in itertools.permutations(STREAMS)][5:]
# Of host lanes: to run what is due, and to be behind.
_PROMPT_S, LATE_S = 0.001, 0.05


class Event:
    def __init__(self, lane):
        self.lane, self.done, self.at = lane, False, 0


class FakeDevice:
    """The Driver of `streams`. Invariant: an entry of a stream is done after those before it there."""

    def __init__(self, order=STREAMS, eager=0):
        """order: streams by priority. eager: how many of the first run as soon as they can; others when they must."""
        self._order, self._eager = order, eager
        self._queues = {lane: deque() for lane in STREAMS}
        self._gates = {}
        self._changed = threading.Condition(threading.RLock())
        self._entries_done = 0
        self.launching = threading.local()

    def launch(self, lane, work):
        self.launching.lane = lane
        try:
            with _Deferred(lambda run: self._put(lane, run)):
                work()
        finally:
            self.launching.lane = None
        self._pump(self._order[: self._eager])

    def record(self, lane):
        event = Event(lane)

        def reach():
            event.done, event.at = True, self._entries_done

        self._put(lane, reach)
        return event

    def wait(self, lane, event):
        self._put(lane, None, lambda: event.done, event)

    def wait_for_host(self, lane, host_lane, count):
        self._put(lane, None, lambda: self._gates.get(host_lane, 0) >= count)

    def open_gate(self, host_lane, count):
        with self._changed:
            self._gates[host_lane] = count
            self._changed.notify_all()

    def synchronize(self, event):
        with self._changed:
            while not event.done:
                if not self._run_one(self._holding_up(event)):
                    assert self._changed.wait(20), "the device waits for something that does not come"

    def _holding_up(self, event):
        """The stream that has to go on for the event to come: nothing else is done for it."""
        while True:
            _, ready, awaited = self._queues[event.lane][0]
            if awaited is None or ready():
                return event.lane
            event = awaited

    def is_done(self, event):
        return event.done

    def seconds(self, start, stop):
        return float(stop.at - start.at)

    def finish(self):
        for lane in STREAMS:
            self.synchronize(self.record(lane))

    def _put(self, lane, run, ready=lambda: True, awaited=None):
        with self._changed:
            self._queues[lane].append((run, ready, awaited))
            self._changed.notify_all()

    def _pump(self, lanes):
        with self._changed:
            while any(self._run_one(lane) for lane in lanes):
                pass

    def _run_one(self, lane):
        queue = self._queues[lane]
        if not queue or not queue[0][1]():
            return False
        run, _, _ = queue.popleft()
        if run:
            with torch.inference_mode(), _disable_current_modes():
                run()
        self._entries_done += 1
        self._changed.notify_all()
        return True


class _Deferred(TorchDispatchMode):
    def __init__(self, put):
        super().__init__()
        self._put = put

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        with self:  # what is made of other operations is looked at in parts
            found = func.decompose(*args, **kwargs)
        if found is not NotImplemented:
            return found
        tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, torch.Tensor)]
        name = func.name()
        if func.is_view or not tensors or name.startswith(("aten::detach", "aten::lift_fresh")):
            return func(*args, **kwargs)
        if name.startswith(("aten::empty_like", "aten::new_empty")):
            return _poisoned(func(*args, **kwargs))
        if func._schema.is_mutable:
            self._put(lambda: func(*args, **kwargs))
            return kwargs.get("out", args[0])
        shapes = func(*tree_map(_as_meta, args), **tree_map(_as_meta, kwargs))
        results, _ = tree_flatten(shapes)
        made = [_poisoned(torch.empty_strided(r.shape, r.stride(), dtype=r.dtype)) for r in results]

        def run():
            for place, result in zip(made, tree_flatten(func(*args, **kwargs))[0], strict=True):
                place.copy_(result)

        self._put(run)
        return made[0] if isinstance(shapes, torch.Tensor) else type(shapes)(made)


def _as_meta(x):
    if isinstance(x, torch.Tensor):
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    return torch.device("meta") if isinstance(x, torch.device) else x


def _poisoned(tensor):
    return tensor.fill_(float("nan") if tensor.is_floating_point() else 0)


class _LateLanes(StreamLanes):
    """Host lanes that take a while to look at what they wait for; the others are given the time to run first."""

    def __init__(self, *args, late, late_s, **options):
        super().__init__(*args, **options)
        self._late, self._late_s = late, late_s

    def _launch(self, step):
        if self._late:
            time.sleep(_PROMPT_S)
        super()._launch(step)

    def _await(self, step, thread):
        if step.lane in self._late:
            time.sleep(self._late_s)
        super()._await(step, thread)


def run_on(
    parts: EngineParts, device: FakeDevice, monkeypatch, late: tuple[str, ...] = (), late_s: float = LATE_S
) -> EngineParts:
    """Has the parts, loaded for an emulated accelerator, run on the device's streams. late: lanes of the host that are slow,
    late_s: by how much."""
    executor = parts.executor
    executor.lanes = _LateLanes(
        executor._perform, device, on_thread=executors._prepare_thread, late=late, late_s=late_s
    )
    executor._device = DEVICE

    def on_device(name, function):
        """While a Step is launched, the function instead of the CPU's kernel."""
        real = getattr(ops, name)
        monkeypatch.setattr(
            ops, name, lambda *a, **k: (function if getattr(device.launching, "lane", None) else real)(*a, **k)
        )

    for name in ("linear", "norm"):
        on_device(name, getattr(reference, name))
    on_device("quantize", quant.quantize)
    on_device("dequantize", lambda packed, out: quant.dequantize(packed, out.shape[-1], out=out))
    real_has_kernels = ops._has_kernels
    monkeypatch.setattr(
        ops, "_has_kernels", lambda *a: getattr(device.launching, "lane", None) is None and real_has_kernels(*a)
    )
    real_prepare = ops.prepare_attention

    def prepare(plan, heads, kv_heads, head_dim, block_size, dtype, kv_dtype, *, device):
        if device == DEVICE:
            return reference.prepare_attention(plan, kv_heads, block_size, dtype)
        return real_prepare(plan, heads, kv_heads, head_dim, block_size, dtype, kv_dtype, device=device)

    monkeypatch.setattr(ops, "prepare_attention", prepare)
    run = executor.run

    def run_and_look(batches, on_logits, **options):
        def look(asked, logits, start):
            """The host reads what the device has come to."""
            lane, device.launching.lane = device.launching.lane, None
            try:
                device.synchronize(device.record("compute"))
                with _disable_current_modes():
                    on_logits(asked, logits.clone(), start)
            finally:
                device.launching.lane = lane

        run(batches, look, **options)

    executor.run = run_and_look
    return parts
