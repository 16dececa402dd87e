"""Steps on a played device, without an executor: nothing waits forever, and times are what they are said to be."""

import itertools
import threading

import pytest
import torch
from fake_device import FakeDevice, PlayedLanes

from batchgen.core.kv_placement import KVPlacement
from batchgen.runtime import cuda
from batchgen.runtime.streams import LAUNCH, STREAMS
from batchgen.schedule.step_graph import LANES, BatchFlow, Step, Streams
from batchgen.schedule.sweeps import Sweeps

EVERYTHING = BatchFlow(
    frozenset({KVPlacement.DEVICE, KVPlacement.STREAMED, KVPlacement.CPU}),
    history=True,
    stored=True,
    disk_read=True,
    disk_write=True,
    hidden_on_host=True,
)


def step(number, lane, *after, kind="work", sweep=0, layer=0):
    return Step(number, kind, lane, sweep, layer, 0, None, None, after)


def execute(lanes, steps):
    lanes.execute(steps)()


class Broken(Exception):
    pass


class HeldUp:
    """Host Steps of these ids end when they are let go, or the semaphores are raised for all that were issued."""

    def __init__(self, *ids):
        self.device, self.ids, self.begun, self.let_go = FakeDevice(eager=3), ids, threading.Event(), threading.Event()
        signal = self.device.signal

        def opened(lane, count):
            signal(lane, count)
            if count == 2:
                self.let_go.set()

        self.device.signal = opened

    def perform(self, step):
        if step.id in self.ids:
            self.begun.set()
            assert self.let_go.wait(120)


def test_closing_while_the_disk_is_read():
    """The first read ends when the semaphore has been raised for both."""
    held = HeldUp(0)
    lanes = PlayedLanes(held.perform, held.device, patient=False)
    execute(lanes, [step(0, "disk_read"), step(1, "disk_read"), step(2, "h2d", 1)])
    held.begun.wait(120)
    lanes.close()
    assert held.device._semaphores == {"disk_read": 2}


@pytest.mark.parametrize("lane", ["compute", "d2h", "disk_write"])
def test_a_step_fails_while_the_disk_is_read(lane):
    held = HeldUp(0)

    def perform(step):
        if step.kind == "fails":
            held.begun.wait(120)
            raise Broken
        held.perform(step)

    lanes = PlayedLanes(perform, held.device, patient=False)
    steps = [step(0, "disk_read"), step(1, "disk_read"), step(2, "h2d", 1), step(3, lane, kind="fails")]
    with pytest.raises(Broken):
        execute(lanes, steps)
        lanes.drain()
    lanes.close()
    assert held.device._semaphores["disk_read"] == 2


def test_a_gate_that_nobody_opens_is_noticed_at_once():
    device, launched = FakeDevice(), threading.Event()
    lanes = PlayedLanes(
        lambda step: launched.set() if step.lane == "compute" else launched.wait(120), device, patient=False
    )
    device.signal = lambda lane, count: None
    with pytest.raises(AssertionError, match="waits at a semaphore of disk_read that nobody is to open"):
        execute(lanes, [step(0, "disk_read"), step(1, "compute", 0)])
    with pytest.raises(AssertionError, match="waits at a semaphore"):
        lanes.close()


@pytest.mark.parametrize("late", [("cpu_attention",), ("disk_read", "disk_write"), ()])
@pytest.mark.parametrize("eager", [0, 3])
def test_many_gpu_batches_do_not_fill_the_streams(eager, late):
    """Where launches would block, with the interpreter's lock, until a host lane has done something."""
    streams = Streams(True, (True,) * 3, (True, False, True), vocabulary_chunks=3)
    sweeps, ran = Sweeps(streams), []
    lanes = PlayedLanes(lambda s: ran.append(s.id), FakeDevice(eager=eager), late=late)
    for batches in ([EVERYTHING] * 24, [BatchFlow(frozenset({KVPlacement.DEVICE, KVPlacement.CPU}))] * 40):
        execute(lanes, sweeps.steps(batches))
    lanes.drain()
    lanes.close()
    assert sorted(ran) == list(range(sweeps._next_id))


class Clock:
    """A device on which Steps take their layer's ticks, besides one for each entry of a stream.

    With `stall` the launching thread is late.
    """

    def __init__(self, steps):
        self.device = FakeDevice(eager=3)
        self.lanes = PlayedLanes(self.perform, self.device)
        self.spans = []
        self.lanes._on_step = lambda s, start, end: self.spans.append((s, start, end))
        execute(self.lanes, steps(self.device))
        self.lanes.close()

    def perform(self, step):
        if step.lane in STREAMS:
            self.device.take(step.lane, step.layer)


def test_what_is_launched_late_is_not_busy():
    def steps(device):
        yield step(0, "compute", layer=100)
        device.idle(1000)
        yield step(1, "compute", layer=200)
        yield step(2, "compute", layer=200)

    ran = Clock(steps)
    assert 500 <= ran.lanes.busy_s["compute"] < 550
    assert 1000 <= ran.lanes.stalled_s[LAUNCH] < 1050
    assert set(ran.lanes.stalled_s) == {*LANES, LAUNCH}
    assert all(ran.lanes.stalled_s[lane] == 0 for lane in LANES)


def test_what_waits_is_not_busy_and_waits_for_its_lane():
    def steps(device):
        yield step(0, "compute", layer=100)
        yield step(1, "h2d", 0, layer=3000)
        yield step(2, "compute", 1, layer=200)

    ran = Clock(steps)
    assert 300 <= ran.lanes.busy_s["compute"] < 350 and 3000 <= ran.lanes.busy_s["h2d"] < 3050


def test_between_sweeps_nothing_is_launched_late():
    def steps(device):
        yield step(0, "compute", layer=100)
        device.idle(1000)
        yield step(1, "compute", layer=200, sweep=1)

    ran = Clock(steps)
    assert 300 <= ran.lanes.busy_s["compute"] < 350 and ran.lanes.stalled_s[LAUNCH] == 0


def test_busy_and_stalled_are_all_of_a_sweep():
    steps = list(Sweeps(Streams(True, (True,) * 3, (False,) * 3)).steps([EVERYTHING] * 3))
    ran = Clock(lambda device: steps)
    own = [(start, end) for s, start, end in ran.spans if s.lane == "compute"]
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(own))
    whole = own[-1][1] - own[0][0]
    assert ran.lanes.busy_s["compute"] + sum(ran.lanes.stalled_s.values()) == pytest.approx(whole)


FIRST_USES = {
    "operation": lambda x, device: x.mul_(2),
    "memory": lambda x, device: device.empty((5,), torch.float32),
    "pinned memory": lambda x, device: device.empty_pinned((5,), torch.float32),
}


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("kind", FIRST_USES)
def test_first_use_while_a_stream_waits_at_a_semaphore(kind, warm):
    device = FakeDevice(warm=FIRST_USES)
    held = threading.Event()
    x = torch.zeros(3)
    device.memory.keep([x])

    def perform(step):
        if step.lane == "cpu_attention":
            held.wait()
        elif step.kind == "uses":
            FIRST_USES[kind](x, device)

    lanes = PlayedLanes(perform, device, patient=False)
    if warm:
        execute(lanes, [step(0, "compute", kind="uses")])
    steps = [step(1, "cpu_attention"), step(2, "d2h", 1), step(3, "compute", kind="uses")]
    try:
        if warm:
            execute(lanes, steps)
        else:
            with pytest.raises(
                AssertionError, match=f"^{kind}: .* is used for the first time while a stream waits at a semaphore"
            ):
                execute(lanes, steps)
    finally:
        held.set()
        lanes.close()


@pytest.mark.parametrize("to_gpu", [True, False])
def test_rows_that_lie_apart_are_copied_in_few_pieces(to_gpu):
    """A copy for each row would fill the stream."""
    device, passing = FakeDevice(), torch.zeros(1024, dtype=torch.uint8)
    apart, own = torch.randint(256, (90, 64), dtype=torch.uint8), torch.randint(256, (90, 50), dtype=torch.uint8)
    device.memory.keep([own, passing])
    link = cuda.CudaLink(device, to_gpu)
    target, source = (own, apart[:, :50]) if to_gpu else (apart[:, :50], own)
    sent = source.clone()
    assert device.launch("h2d" if to_gpu else "d2h", lambda: link.copy_rows(target, source, passing)) == 12
    device.finish()
    assert torch.equal(target, sent) and link.moved_bytes == 4500
