"""The simulator against hand-made cases, against the lanes' rules tried out tick by tick, and against the lanes themselves."""

import random
import time
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.runtime.lanes import Lanes
from batchgen.runtime.schedule import LANES, BatchFlow, Step, Streams, Sweeps
from batchgen.runtime.simulate import Simulator, simulate


def step(number, lane, *after, kind="work", sweep=0):
    return Step(number, kind, lane, sweep, 0, 0, 0, after)


def run(steps, seconds, **options):
    """(timeline, {Step: (start, end)})."""
    times = {}
    timeline = simulate(
        steps, lambda s: seconds[s.id], on_step=lambda s, start, end: times.update({s.id: (start, end)}), **options
    )
    return timeline, times


def test_what_is_needed_is_waited_for_and_nothing_else():
    steps = [step(0, "h2d"), step(1, "h2d"), step(2, "compute", 0), step(3, "compute", 1), step(4, "d2h", 2)]
    timeline, times = run(steps, [3.0, 2.0, 1.0, 1.0, 4.0])
    assert times == {0: (0, 3), 1: (3, 5), 2: (3, 4), 3: (5, 6), 4: (6, 10)}, "a Step is issued behind a computation"
    assert timeline.total_s == 10
    assert timeline.busy_s == dict.fromkeys(LANES, 0.0) | {"h2d": 5, "compute": 2, "d2h": 4}
    assert timeline.stalled_s == dict.fromkeys(LANES, 0.0) | {"h2d": 4}


def test_standing_still_counts_for_each_lane_in_turn():
    timeline, _ = run([step(0, "h2d"), step(1, "disk_read"), step(2, "compute", 0, 1)], [2.0, 5.0, 1.0])
    assert timeline.stalled_s == dict.fromkeys(LANES, 0.0) | {"h2d": 2, "disk_read": 3}
    assert timeline.total_s == 6


def test_shared_cores_are_taken_in_turns():
    steps = [
        step(0, "compute"), step(1, "d2h", 0), step(2, "cpu_attention", 1), step(3, "compute", 0), step(4, "compute", 0),
        step(5, "h2d", 2), step(6, "compute", 5),
    ]  # fmt: skip
    seconds = [1.0, 1.0, 4.0, 3.0, 2.0, 1.0, 1.0]
    timeline, times = run(steps, seconds)
    assert [times[i] for i in range(7)] == [(0, 1), (1, 2), (2, 6), (1, 4), (4, 6), (6, 7), (7, 8)]
    timeline, times = run(steps, seconds, shared_cores=True)
    # Attention asks at 2, while 3 runs; 4 comes after it, and has 5 issued late.
    assert [times[i] for i in range(7)] == [(0, 1), (1, 2), (4, 8), (1, 4), (8, 10), (10, 11), (11, 12)]
    assert timeline.stalled_s == dict.fromkeys(LANES, 0.0) | {"cpu_attention": 4, "h2d": 1}
    assert timeline.total_s == 12


def test_other_lanes_go_on_between_sweeps():
    simulator = Simulator()
    simulator.run([step(0, "compute"), step(1, "disk_write", 0), step(2, "h2d")], lambda s: 2.0)
    simulator.spend(1.0)
    simulator.run([step(3, "compute", 2, sweep=1), step(4, "compute", 1, sweep=1)], lambda s: 3.0)
    timeline = simulator.timeline()
    assert timeline.stalled_s == dict.fromkeys(LANES, 0.0) | {"h2d": 1}
    assert (timeline.between_s, timeline.total_s) == (1, 10)


def test_alternating_loads_and_products_take_as_long_as_the_longer():
    """FlexGen's loop: with everything else free, weights that take longer than the products set the pace."""
    layers = 6
    steps = list(Sweeps(Streams(False, (True,) * layers, (True,) * layers)).steps([BatchFlow(), BatchFlow()]))
    own = [s for s in steps if not (s.kind == "read_weight" and s.id > steps[-1].id - 3)]
    for load_s, post_s in ((4.0, 1.0), (1.0, 4.0)):
        seconds = {"read_weight": load_s, "post": post_s}
        ends = {}
        simulate(steps, lambda s, t=seconds: t.get(s.kind, 0.0), on_step=lambda s, a, b, e=ends: e.update({s.id: b}))
        last = max(ends[s.id] for s in own if s.kind == "post")
        assert last == load_s + max((layers - 1) * load_s, (layers - 1) * 2 * post_s) + 2 * post_s


@st.composite
def timed_steps(draw):
    """Steps of two sweeps in any lanes, with waits for any earlier ones, and whole seconds."""
    count = draw(st.integers(1, 14))
    second = draw(st.integers(0, count))
    steps = [
        Step(
            i,
            "work",
            draw(st.sampled_from(LANES)),
            int(i >= second),
            0,
            0,
            0,
            tuple(draw(st.sets(st.integers(0, i - 1), max_size=3))) if i else (),
        )
        for i in range(count)
    ]
    return steps, draw(st.lists(st.integers(0, 4), min_size=count, max_size=count)), draw(st.integers(0, 3))


def tick_by_tick(steps, seconds, between_s, shared_cores):
    """The same by trying at every second what can start: {Step: (start, end)}."""
    sweeps = [deque(s for s in steps if s.sweep == i) for i in (0, 1)]
    queues = {lane: deque() for lane in LANES}
    running, times = {}, {}  # lane -> Step
    asking = {}  # for the cores: lane -> since when
    idle_until, sweep = 0, 0
    for now in range(1000):
        changed = True
        while changed:  # Steps of no seconds end when they start
            changed = False
            for lane, s in list(running.items()):
                if times[s.id][1] <= now:
                    del running[lane]
                    changed = True
            ended = {i for i, (_, end) in times.items() if end <= now} - {s.id for s in running.values()}
            # The compute lane issues Steps up to its next computation.
            if not queues["compute"] and "compute" not in running and now >= idle_until:
                if sweeps[sweep]:
                    while sweeps[sweep] and not queues["compute"]:
                        s = sweeps[sweep].popleft()
                        queues[s.lane].append(s)
                    changed = True
                elif sweep == 0:
                    sweep, idle_until, changed = 1, now + between_s, True
            heads = {
                lane: queue[0] for lane, queue in queues.items()
                if queue and lane not in running and set(queue[0].after) <= ended
            }  # fmt: skip
            if shared_cores:
                both = ("cpu_attention", "compute")
                asking = {lane: asking.get(lane, now) for lane in both if lane in heads}
                first = None if any(lane in running for lane in both) else min(asking, key=asking.get, default=None)
                heads = {lane: s for lane, s in heads.items() if lane not in both or lane == first}
            for lane, s in heads.items():
                queues[lane].popleft()
                asking.pop(lane, None)
                running[lane] = s
                times[s.id] = (now, now + seconds[s.id])
                changed = True
        if len(times) == len(steps) and not running:
            return times
    raise AssertionError("never ends")


@settings(max_examples=600, deadline=None, derandomize=True)
@given(timed_steps(), st.booleans())
def test_the_same_as_tick_by_tick(job, shared_cores):
    steps, seconds, between_s = job
    times = {}
    simulator = Simulator(shared_cores=shared_cores, on_step=lambda s, a, b: times.update({s.id: (a, b)}))
    simulator.run([s for s in steps if s.sweep == 0], lambda s: seconds[s.id])
    simulator.spend(between_s)
    simulator.run([s for s in steps if s.sweep == 1], lambda s: seconds[s.id])
    timeline = simulator.timeline()
    expected = tick_by_tick(steps, seconds, between_s, shared_cores)
    assert times == expected
    busy = {lane: sum(seconds[s.id] for s in steps if s.lane == lane) for lane in LANES}
    assert timeline.busy_s == busy
    assert timeline.total_s >= max(busy.values())
    assert timeline.total_s <= sum(busy.values()) + between_s, "one after the other takes no less"
    computed = max([times[s.id][1] for s in steps if s.lane == "compute" and s.sweep == 1], default=None)
    if computed is not None:
        assert busy["compute"] + sum(timeline.stalled_s.values()) + between_s == computed


STREAMS = Streams(True, (True,) * 3, (True, False, True), head_pieces=2)
BATCHES = [
    BatchFlow(history=True, stored=True, disk_read=True, disk_write=True),
    BatchFlow(delegated=True, hidden_on_host=True),
]


def test_many_sweeps_leave_nothing_behind():
    simulator, sweeps = Simulator(), Sweeps(STREAMS)
    rng = random.Random(0)
    for _ in range(300):
        simulator.run(sweeps.steps(BATCHES), lambda s: rng.random())
        simulator.spend(0.5)
    assert len(simulator._ended) < 50
    timeline = simulator.timeline()
    assert timeline.total_s >= max(timeline.busy_s.values())


@pytest.mark.parametrize("shared_cores", [False, True])
def test_the_lanes_take_as_long(shared_cores):
    """Real threads whose Steps sleep."""
    rng = random.Random(1)
    sweeps = Sweeps(STREAMS)
    steps = [list(sweeps.steps(BATCHES)) for _ in range(2)]
    seconds = {s.id: rng.choice((0.001, 0.004, 0.012)) for sweep in steps for s in sweep}
    lanes, simulator = (
        Lanes(lambda s: time.sleep(seconds[s.id]), shared_cores=shared_cores),
        Simulator(shared_cores=shared_cores),
    )
    started = time.perf_counter()
    for sweep in steps:
        lanes.execute(sweep)
        simulator.run(sweep, lambda s: seconds[s.id])
    lanes.drain()
    took = time.perf_counter() - started
    lanes.close()
    timeline = simulator.timeline()
    assert timeline.total_s * 0.99 <= took <= timeline.total_s * 1.35 + 0.1, "sleeps are never too short"
    assert sum(seconds.values()) > 1.3 * timeline.total_s, "there is something to overlap"
