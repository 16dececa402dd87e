"""Lanes: the same result as one Step after the other, whatever takes how long; and failures that come out."""

import itertools
import random
import signal
import threading
import time
from collections import defaultdict
from dataclasses import replace

import pytest
from new_threads import NewThreads
from timing import undisturbed

from batchgen.core.errors import BatchgenError
from batchgen.core.kv_placement import KVPlacement
from batchgen.runtime.lanes import Lanes
from batchgen.schedule.step_graph import LANES, BatchFlow, Step, Streams
from batchgen.schedule.sweeps import Sweeps

STREAMS = Streams(True, (True, True, False), (True, False, False), vocabulary_chunks=3)
DISK = BatchFlow(
    frozenset({KVPlacement.DEVICE, KVPlacement.STREAMED}), history=True, stored=True, disk_read=True, disk_write=True
)
SWEEP = [
    DISK,
    BatchFlow(
        frozenset({KVPlacement.DEVICE, KVPlacement.STREAMED, KVPlacement.CPU}),
        history=True,
        stored=True,
        hidden_on_host=True,
    ),
]

OF_STAGE = replace(STREAMS, receives=True, sends=True)  # with Steps in every lane


def make_steps(num_sweeps=2, streams=STREAMS, batches=SWEEP):
    sweeps = Sweeps(streams)
    return [step for _ in range(num_sweeps) for step in sweeps.steps(batches)]


def step(number, lane, *after, kind="work"):
    return Step(number, kind, lane, 0, 0, 0, None, None, after)


def in_time(function, seconds=300.0):
    """What the function returns or raises; fails where it hangs."""
    outcome = []

    def run():
        try:
            outcome.append((function(), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert outcome, f"hung for {seconds} s"
    result, error = outcome[0]
    if error is not None:
        raise error
    return result


class Arithmetic:
    """An executor on numbers, with the buffers of the real one: what a Step finds there goes into its result."""

    def __init__(self, streams, batches, most_s=0.0, seed=0):
        self.streams, self.batches = streams, batches
        self.most_s, self.random = most_s, random.Random(seed)
        self.buffers = defaultdict(int)
        self.results = []

    def perform(self, step):
        outputs = getattr(self, f"_{step.kind}")(step, self.batches[step.batch])
        time.sleep(self.most_s * self.random.random() ** 4)  # most of them short, some long
        self.buffers.update(outputs)

    def _mix(self, *names):
        return hash(tuple(self.buffers[name] for name in names))

    def _read_weight(self, s, b):
        return {("host", s.weight_slot): 1000 + s.layer}

    def _load_weight(self, s, b):
        from_disk = self.streams.disk_weights[s.layer]
        return {("device", s.weight_slot): self.buffers["host", s.weight_slot] if from_disk else 1000 + s.layer}

    def _load_head(self, s, b):
        return {("head", s.weight_slot): 2000 + s.layer}

    def _embed(self, s, b):
        return {("hidden", s.batch): 10 * s.sweep + s.batch}

    def _load_hidden(self, s, b):
        return {("hidden", s.batch): self._mix(("hidden", s.batch))}

    _store_hidden = _load_hidden

    def _pre(self, s, b):
        weight = ("device", s.weight_slot) if self.streams.weights[s.layer] else "resident"
        return {("q", s.batch): self._mix(("hidden", s.batch), weight)}

    def _read_cache(self, s, b):
        return {("read", s.kv_slot): self._mix(("disk", s.layer, s.batch))}

    def _load_cache(self, s, b):
        return {("staging", s.kv_slot): self._mix(("cpu", s.layer, s.batch), *[("read", s.kv_slot)] * b.disk_read)}

    def _attention(self, s, b):
        attended = self._mix(("q", s.batch), *[("staging", s.kv_slot)] * (KVPlacement.STREAMED in b.placements))
        return (
            {("attended", s.batch): attended, ("staging", s.kv_slot): attended}
            if KVPlacement.STREAMED in b.placements
            else {}
        )

    def _store_cache(self, s, b):
        return {
            ("cpu", s.layer, s.batch): self._mix(("staging", s.kv_slot)),
            ("write", s.kv_slot): self._mix(("staging", s.kv_slot)),
        }

    def _write_cache(self, s, b):
        return {("disk", s.layer, s.batch): self._mix(("write", s.kv_slot))}

    def _send_qkv(self, s, b):
        return {("sent", s.batch): self._mix(("q", s.batch)), ("own", s.layer, s.batch): self._mix(("q", s.batch))}

    def _cpu_attention(self, s, b):
        return {("result", s.batch): self._mix(("sent", s.batch), ("own", s.layer, s.batch))}

    def _load_attention(self, s, b):
        return {("joined", s.batch): self._mix(("result", s.batch))}

    def _post(self, s, b):
        weight = ("device", s.weight_slot) if self.streams.weights[s.layer] else "resident"
        parts = [("attended", s.batch), *[("joined", s.batch)] * (KVPlacement.CPU in b.placements)]
        return {("hidden", s.batch): self._mix(("hidden", s.batch), weight, *parts)}

    def _head(self, s, b):
        self.results.append((s.sweep, s.layer, s.batch, self._mix(("hidden", s.batch), ("head", s.weight_slot))))
        return {}


def run(steps, *, serial=False, shared_cores=False, most_s=0.004, seed=0):
    """(results, [(Step, start, end)]) of some sweeps."""
    work, seen = Arithmetic(STREAMS, SWEEP, most_s, seed), []
    lanes = Lanes(work.perform, serial=serial, shared_cores=shared_cores, on_step=lambda *event: seen.append(event))
    try:
        for sweep in sorted({s.sweep for s in steps}):
            lanes.execute(s for s in steps if s.sweep == sweep)
        lanes.drain()
    finally:
        lanes.close()
    assert lanes.busy_s == pytest.approx(
        {lane: sum(end - start for s, start, end in seen if s.lane == lane) for lane in LANES}
    )
    return work.results, seen


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("shared_cores", [False, True])
def test_overlapped_is_the_same_as_serial(seed, shared_cores):
    steps = make_steps()
    expected, serially = in_time(lambda: run(steps, serial=True, most_s=0.0))
    assert [s.id for s, _, _ in serially] == list(range(len(steps)))
    results, seen = in_time(lambda: run(steps, shared_cores=shared_cores, seed=seed))
    assert results == expected
    assert sorted(s.id for s, _, _ in seen) == list(range(len(steps)))
    times = {s.id: (start, end) for s, start, end in seen}
    for s in steps:
        assert all(times[earlier][1] <= times[s.id][0] for earlier in s.after)
    alone = [[lane] for lane in LANES] + ([["compute", "cpu_attention"]] if shared_cores else [])
    for lanes in alone:
        own = sorted(times[s.id] for s in steps if s.lane in lanes)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(own)), f"{lanes} ran two Steps at once"
        if len(lanes) == 1:
            assert own == [times[s.id] for s in steps if s.lane in lanes], "a lane keeps the order"


@pytest.mark.parametrize(
    ("kind", "slow"),
    [
        ("load_weight", "read_weight"), ("load_cache", "read_cache"), ("pre", "load_hidden"),
        ("load_attention", "cpu_attention"),
        ("write_cache", "store_cache"), ("head", "load_head"),
    ],
)  # fmt: skip
def test_a_step_that_does_not_wait_spoils_the_result(kind, slow):
    """So the comparison above would notice."""
    steps = make_steps()
    kinds = {s.id: s.kind for s in steps}
    broken = [s._replace(after=tuple(e for e in s.after if kinds[e] != slow)) if s.kind == kind else s for s in steps]
    expected, _ = run(steps, serial=True, most_s=0.0)
    work = Arithmetic(STREAMS, SWEEP)

    def perform(s):
        if s.kind == slow:
            time.sleep(0.01)
        work.perform(s)

    lanes = Lanes(perform)
    for sweep in range(2):
        lanes.execute(s for s in broken if s.sweep == sweep)
    lanes.drain()
    lanes.close()
    assert work.results != expected


class Broken(Exception):
    pass


@pytest.mark.parametrize("shared_cores", [False, True])
@pytest.mark.parametrize("lane", LANES)
def test_what_a_step_raises_comes_out_of_execute_or_drain(lane, shared_cores):
    steps, threads = make_steps(streams=OF_STAGE), NewThreads()
    error = Broken(lane)
    ran_after = []
    failed = threading.Event()

    def perform(s):
        if failed.is_set():
            ran_after.append(s)
        if s.lane == lane and s.sweep == 1:
            failed.set()
            raise error
        time.sleep(0.0005)

    lanes = Lanes(perform, shared_cores=shared_cores)

    def execute():
        for sweep in range(2):
            lanes.execute(s for s in steps if s.sweep == sweep)
        lanes.drain()

    with pytest.raises(Broken) as raised:
        in_time(execute)
    assert raised.value is error
    in_time(lanes.close)
    assert len(ran_after) <= len(LANES), "only what each lane was about to run"
    assert threads.running() == []


def test_threads_that_another_test_has_left_are_not_those_of_this_one():
    over = threading.Event()

    def start(name):
        thread = threading.Thread(target=over.wait, name=name, daemon=True)
        thread.start()
        return thread

    started = [start("batchgen-masks")]
    threads = NewThreads()
    assert threads.running() == []
    started.append(start("batchgen-h2d"))
    assert threads.running() == ["batchgen-h2d"]
    over.set()
    for thread in started:
        thread.join(20)
    assert threads.left() == []


def test_a_failure_does_not_wait_for_what_other_lanes_are_at():
    gate = threading.Event()

    def perform(s):
        if s.lane == "disk_read":
            gate.wait(20)
        if s.lane == "d2h":
            raise Broken("d2h")

    lanes = Lanes(perform)
    steps = [step(0, "disk_read"), step(1, "d2h"), step(2, "compute", 0)]
    with pytest.raises(Broken):
        in_time(lambda: lanes.execute(steps), seconds=5)
    with pytest.raises(BatchgenError, match="d2h"):
        lanes.execute([step(3, "compute")])
    with pytest.raises(Broken):
        lanes.drain()
    gate.set()
    in_time(lanes.close)


def test_what_fails_behind_shows_in_the_next_sweep():
    def perform(s):
        if s.lane == "disk_write":
            time.sleep(0.05)
            raise Broken("disk full")

    lanes = Lanes(perform)
    in_time(lambda: lanes.execute([step(0, "compute"), step(1, "disk_write", 0)]))
    with pytest.raises(Broken):
        in_time(lambda: lanes.execute([step(2, "compute", 1)]))
    in_time(lanes.close)


def test_an_error_while_steps_are_made_ends_all():
    def steps():
        yield step(0, "h2d")
        yield step(1, "compute", 0)
        raise Broken("no more")

    lanes = Lanes(lambda s: time.sleep(0.01))
    with pytest.raises(Broken):
        in_time(lambda: lanes.execute(steps()))
    in_time(lanes.close)


def test_an_error_of_who_is_told_comes_out_too():
    def on_step(s, start, end):
        if s.lane == "h2d":
            raise Broken("trace")

    lanes = Lanes(lambda s: None, on_step=on_step)
    with pytest.raises(Broken):
        in_time(lambda: lanes.execute([step(0, "h2d"), step(1, "d2h", 0), step(2, "compute", 1)]))
    in_time(lanes.close)


def test_an_interrupt_in_a_computation():
    steps = make_steps()

    def perform(s):
        if s.kind == "post" and s.sweep == 1:
            raise KeyboardInterrupt
        time.sleep(0.001)

    lanes = Lanes(perform)
    lanes.execute(s for s in steps if s.sweep == 0)
    with pytest.raises(KeyboardInterrupt):
        lanes.execute(s for s in steps if s.sweep == 1)
    in_time(lanes.close)


def test_an_interrupt_while_compute_waits():
    gate = threading.Event()
    lanes = Lanes(lambda s: s.lane == "h2d" and gate.wait())
    timer = threading.Timer(0.1, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        lanes.execute([step(0, "h2d"), step(1, "compute", 0)])
    gate.set()
    in_time(lanes.close)


def test_execute_ends_with_compute_and_drain_with_the_rest():
    gate, done = threading.Event(), []

    def perform(s):
        if s.lane == "disk_write":
            gate.wait(20)
        done.append(s.id)

    lanes = Lanes(perform)
    in_time(lambda: lanes.execute([step(0, "compute"), step(1, "disk_write", 0), step(2, "compute", 0)]))
    assert done == [0, 2]
    gate.set()
    in_time(lanes.drain)
    assert done == [0, 2, 1]
    in_time(lanes.close)
    with pytest.raises(RuntimeError, match="closed"):
        lanes.execute([])


def test_close_drops_what_waits_and_nothing_waits_for_it_any_more():
    gate, started, done = threading.Event(), threading.Event(), []

    def perform(s):
        if s.id == 0:
            started.set()
            gate.wait(20)
        done.append(s.id)

    lanes = Lanes(perform)
    in_time(lambda: lanes.execute([step(0, "h2d"), step(1, "h2d"), step(2, "d2h", 1), step(3, "disk_write", 0)]))
    started.wait(20)
    closing = threading.Thread(target=lanes.close, daemon=True)
    closing.start()
    time.sleep(0.05)
    gate.set()
    closing.join(20)
    assert not closing.is_alive()
    assert done == [0]
    in_time(lanes.drain)
    in_time(lanes.close)


@undisturbed
def test_seconds_stood_still_are_of_the_lane_that_was_waited_for():
    took_s = {"h2d": 0.06, "disk_read": 0.12, "compute": 0.0}
    lanes = Lanes(lambda s: time.sleep(took_s[s.lane]))
    started = time.perf_counter()
    in_time(lambda: lanes.execute([step(0, "h2d"), step(1, "disk_read"), step(2, "compute", 0, 1), step(3, "compute")]))
    took = time.perf_counter() - started
    lanes.close()
    assert lanes.busy_s["h2d"] >= 0.06
    assert lanes.busy_s["disk_read"] >= 0.12
    assert 0.05 < lanes.stalled_s["h2d"] < took - 0.04, "the disk is waited for from where the link is done"
    assert 0.02 < lanes.stalled_s["disk_read"] < took - 0.05
    assert sum(lanes.stalled_s.values()) <= took


@undisturbed
def test_waiting_for_the_cores_is_waiting_for_cpu_attention():
    entered = threading.Event()

    def perform(s):
        if s.lane == "cpu_attention":
            entered.set()
            time.sleep(0.1)
        elif s.id == 1:
            time.sleep(0.02)

    def steps():
        yield step(0, "cpu_attention")
        entered.wait(20)
        yield step(1, "compute")

    lanes = Lanes(perform, shared_cores=True)
    in_time(lambda: lanes.execute(steps()))
    lanes.close()
    assert lanes.stalled_s["cpu_attention"] > 0.05
    assert lanes.busy_s["compute"] < 0.08


def test_serial_stands_never_still():
    lanes = Lanes(lambda s: time.sleep(0.001), serial=True, shared_cores=True)
    lanes.execute(make_steps(1, OF_STAGE))
    assert set(lanes.stalled_s.values()) == {0.0}
    assert all(seconds > 0 for seconds in lanes.busy_s.values())
    lanes.close()
