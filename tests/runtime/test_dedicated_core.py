"""An emulated accelerator with a core of its own: the same tokens, where its work runs, and how long it takes."""

import os
import time

import pytest
from tiered import before_each_step, everything_moves, generate, make_parts, make_policy

from batchgen.core.cores import dedicated_core, on_cores
from batchgen.core.device import Device, parse_device
from batchgen.core.errors import InputError
from batchgen.ops import cpp as kernels
from batchgen.runtime import dedicated_core as throttles
from batchgen.runtime import sleeps
from batchgen.runtime.dedicated_core import Throttle
from batchgen.runtime.devices import open_tiers

GIB = 1 << 30
CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
two_cores = pytest.mark.skipif(len(CORES) < 2, reason="the accelerator's core, and another")
APART = Device("emulated", GIB, slowdown=2.0, cpu_slowdown=1.5)
PROMPTS = [[5 + (7 * i + j) % 400 for j in range(3 + 2 * i)] for i in range(8)]
LENGTHS = [3, 5, 2, 6, 4, 3, 5, 4]


@pytest.fixture
def model(tiny_models):
    return tiny_models("llama", num_hidden_layers=3)[0]


@pytest.mark.parametrize(
    "text",
    [
        "emulated:gpu-memory=1GiB,slowdown=2",
        "emulated:gpu-memory=1GiB,h2d=2GiB/s,slowdown=1.5,step-overhead=2.5ms,cpu-slowdown=4",
    ],
)
def test_a_device_is_written_as_it_is_read(text):
    device = parse_device(text)
    assert not device.shares_cores and parse_device(str(device)) == device


@pytest.mark.parametrize(
    "option",
    [
        "slowdown=0.5",
        "slowdown=x",
        "slowdown=inf",
        "slowdown=nan",
        "slowdown=",
        "cpu-slowdown=2",
        "slowdown=1,step-overhead=-1ms",
    ],
)
def test_a_device_that_cannot_be_is_refused(option):
    with pytest.raises(InputError, match=r"slowdown|step-overhead"):
        parse_device(f"emulated:gpu-memory=1GiB,{option}")


@two_cores
@pytest.mark.parametrize("serial", [False, True])
def test_tokens_are_those_of_a_device_that_takes_turns(model, tmp_path, serial):
    policy = everything_moves(model)
    expected = generate(make_parts(model, Device("emulated", GIB), policy, tmp_path), PROMPTS, LENGTHS)
    assert generate(make_parts(model, APART, policy, tmp_path, serial=serial), PROMPTS, LENGTHS) == expected


@two_cores
def test_each_lane_keeps_to_its_cores(model, tmp_path):
    core, others = dedicated_core()
    belongs = {"compute": core, "h2d": core | others, "d2h": core | others, "cpu_attention": others}
    seen = {}
    threads = kernels.num_threads()
    parts = make_parts(model, APART, everything_moves(model), tmp_path)
    before_each_step(parts, lambda s: seen.setdefault(s.lane, (os.sched_getaffinity(0), kernels.num_threads())))
    generate(parts, PROMPTS, LENGTHS)
    for lane, (cores, lane_threads) in seen.items():
        assert cores == belongs.get(lane, others), lane
        assert lane_threads <= len(cores), lane
    assert seen.keys() >= belongs.keys()
    assert sorted(os.sched_getaffinity(0)) == CORES and kernels.num_threads() == threads, "all is given back"


@two_cores
def test_cpu_attention_runs_beside_compute(model, tmp_path):
    parts = make_parts(model, APART, make_policy(model, APART, kv_seqs={"cpu": 8}), tmp_path)
    assert parts.executor.lanes._cores is None
    generate(parts, PROMPTS, LENGTHS)


def test_one_core_is_not_enough():
    if not CORES:
        pytest.skip("the system does not keep threads to cores")
    with on_cores(CORES[:1]), pytest.raises(InputError, match="leave out slowdown"):
        open_tiers(APART)
    assert sorted(os.sched_getaffinity(0)) == CORES


class PlayedTime:
    """The module `time` as a lane sees it, where work, waits and sleeps take exactly what they are said to."""

    def __init__(self, late_s: float = 0.0) -> None:
        """Begin at 0; each sleep lasts `late_s` longer than it was asked to."""
        self.now_s, self.busy_s, self.slept, self._late_s = 0.0, 0.0, [], late_s

    def perf_counter(self):
        return self.now_s

    def thread_time(self):
        return self.busy_s

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.now_s += seconds + self._late_s

    def work(self, seconds):
        self.busy_s += seconds
        self.now_s += seconds

    def wait(self, seconds):
        self.now_s += seconds


@pytest.fixture
def played(monkeypatch):
    """A function that puts a played time in place of the throttle's."""

    def begin(**options):
        clock = PlayedTime(**options)
        monkeypatch.setattr(throttles, "time", clock)
        monkeypatch.setattr(sleeps, "time", clock)
        return clock

    return begin


class TestThrottle:
    @pytest.mark.parametrize("slowdown", [2.0, 5.0])
    def test_work_takes_so_many_times_as_long(self, slowdown):
        """By the system's clocks."""
        started = time.perf_counter()
        with Throttle(slowdown).held():
            end_s = time.thread_time() + 0.01
            while time.thread_time() < end_s:
                pass
        assert time.perf_counter() - started >= slowdown * 0.01

    @pytest.mark.parametrize("slowdown", [1.5, 5.0])
    def test_work_takes_no_longer_than_so_many_times(self, slowdown, played):
        clock = played()
        with Throttle(slowdown).held(overhead_s=0.001):
            clock.work(0.01)
        assert clock.now_s == pytest.approx(slowdown * 0.01 + 0.001)

    @pytest.mark.parametrize("waited_s", [0.0, 0.004, 0.05])
    def test_waiting_is_a_part_of_it(self, waited_s, played):
        """Only a thread's own work counts, not the time in which another had its core."""
        clock = played()
        with Throttle(4.0).held():
            clock.wait(waited_s)
            clock.work(0.005)
        assert clock.now_s == pytest.approx(max(4 * 0.005, waited_s + 0.005))

    def test_sleeps_that_last_too_long_do_not_add_up(self, played):
        clock, throttle = played(late_s=0.0001), Throttle(2.0)
        for _ in range(100):
            with throttle.held():
                clock.work(0.0002)
        assert clock.now_s == pytest.approx(100 * 2 * 0.0002, abs=0.00011)

    def test_what_is_the_hosts_takes_no_longer(self, played):
        clock, throttle = played(), Throttle(5.0)
        with throttle.held():
            clock.work(0.002)
            with throttle.hosts():
                clock.work(0.02)
        with throttle.held():
            clock.work(0.003)
        assert clock.slept == pytest.approx([4 * 0.002, 4 * 0.003]), "and what follows is the device's again"

    def test_no_slowdown_is_no_wait(self, played):
        clock = played()
        with Throttle(1.0).held():
            clock.work(0.001)
        assert not clock.slept
