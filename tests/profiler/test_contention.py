"""Other work on the machine when a job begins."""

import pytest

from batchgen.core.machine import CpuTime
from batchgen.profiler import contention
from batchgen.profiler.contention import Beside, slowed_by


@pytest.fixture
def beside(monkeypatch):
    """beside(seconds, own CPU seconds, seconds of others, cores, seconds of the job) -> the expected slowdown."""

    def expect(seconds, own_s, others_s, cores=2, for_s=0.0):
        clock = iter([(0.0, 0.0, 0.0), (seconds, own_s, others_s)])
        now = [next(clock)]
        monkeypatch.setattr(contention.time, "monotonic", lambda: now[0][0])
        monkeypatch.setattr(contention.time, "process_time", lambda: now[0][1])
        monkeypatch.setattr(contention, "available_cores", lambda: cores)
        monkeypatch.setattr(CpuTime, "now", lambda: CpuTime(100 + now[0][0] * cores, 7 + now[0][2], 3.0))
        watcher = Beside()
        now[0] = next(clock)
        return watcher.slowdown(for_s)

    return expect


@pytest.mark.parametrize(
    ("seconds", "own_s", "others_s", "cores", "slowdown"),
    [
        (1.0, 1.0, 0.0, 2, 1.0),
        (1.0, 1.0, 1.0, 2, 1.5),  # a loop on the other core
        (3.0, 2.0, 4.0, 2, 2.0),  # two loops: each of three threads has two thirds of a core
        (5.0, 1.0, 9.0, 2, 5.0),  # nine loops: more than is ever expected
        (1.0, 0.2, 0.0, 2, 1.0),  # it waited for a disk
        (1.0, 1.0, 2.0, 16, 1.125),
        (0.1, 0.02, 0.18, 2, 1.0),  # too short to tell
    ],
)
def test_as_many_threads_as_ran_beside_this_one_will_share_the_cores(beside, seconds, own_s, others_s, cores, slowdown):
    assert beside(seconds, own_s, others_s, cores) == pytest.approx(slowdown)


@pytest.mark.parametrize(
    ("for_s", "slowdown"),
    [
        (0.0, 2.0),
        (59.0, 2.0),  # what runs now counts alone
        (132.0, 1.1),  # a minute's load: they have just begun
        (300.0, 1.5),
        (7200.0, 2.0),  # they have run for long
    ],
)
def test_others_are_expected_for_as_long_as_they_have_run(beside, monkeypatch, for_s, slowdown):
    monkeypatch.setattr("os.getloadavg", lambda: (0.2, 1.0, 4.0))
    assert beside(3.0, 2.0, 4.0, 2, for_s) == pytest.approx(slowdown)


def test_where_the_system_keeps_no_load_others_are_expected_to_go_on(beside, monkeypatch):
    monkeypatch.delattr("os.getloadavg")
    assert beside(3.0, 2.0, 4.0, 2, 7200.0) == pytest.approx(2.0)


def test_where_the_kernel_counts_nothing_the_machine_counts_as_idle(monkeypatch):
    monkeypatch.setattr(CpuTime, "now", lambda: None)
    assert Beside().taken_frac() == 0


@pytest.mark.parametrize(("taken", "factor"), [(0.0, 1.0), (0.5, 2.0), (0.99, 5.0)])
def test_what_others_took_made_the_rest_longer(taken, factor):
    import math

    assert math.exp(slowed_by(taken)) == pytest.approx(factor)
