"""The probe of a machine's speed, by a clock of its own."""

import math

import pytest

from batchgen.core.knowledge import DECODE, FEW, MANY, SPEED, Knowledge
from batchgen.profiler.kinds import first_knowledge, rates_of_kind, table_of_kind
from batchgen.profiler.probe import probed, trials_here
from batchgen.profiler.timing import Trial

SIZES = {"cpu_memory_bytes": 1 << 30, "disk_bytes": 1 << 30}


def alone():
    return 0.0


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def trials(self, run_s, prepare_s=0.01, rate=100.0):
        """Trials of which each run takes so long, by the names of their kinds; all are expected at `rate`."""

        def prepare(seconds):
            def run(i):
                self.now += seconds

            self.now += prepare_s
            return Trial(rate * 0.01, run)

        for name, seconds in run_s.items():
            yield {SPEED: 1.0, name: 1.0}, rate, lambda seconds=seconds: prepare(seconds)


def test_a_machine_at_half_the_speed_is_recognised():
    clock = Clock()
    after = probed(Knowledge("t"), clock.trials({MANY: 0.02, FEW: 0.02, DECODE: 0.02}), 1.0, clock, alone)
    for name in (MANY, FEW, DECODE):
        assert math.exp(after.mean({SPEED: 1.0, name: 1.0})) == pytest.approx(2, rel=0.1)
    assert after.deviation({SPEED: 1.0, MANY: 1.0}) < 0.2
    assert clock.now <= 1.0 + 0.02


def test_what_others_take_is_not_taken_for_a_slow_machine():
    clock = Clock()
    after = probed(Knowledge("t"), clock.trials({MANY: 0.02}), 1.0, clock, lambda: 0.5)
    parts = {SPEED: 1.0, MANY: 1.0}
    assert math.exp(after.mean(parts)) == pytest.approx(1, rel=0.05)
    assert after.deviation(parts) > probed(Knowledge("t"), clock.trials({MANY: 0.02}), 1.0, clock, alone).deviation(
        parts
    )


def test_what_was_known_before_is_not_counted_twice():
    clock, known = Clock(), Knowledge("t").after({SPEED: 1.0, MANY: 1.0}, math.log(2), 0.05)
    after = probed(known, clock.trials({MANY: 0.01}), 1.0, clock, alone)  # as fast as expected
    assert after.mean({SPEED: 1.0, MANY: 1.0}) == pytest.approx(known.mean({SPEED: 1.0, MANY: 1.0}))


@pytest.mark.parametrize("run_s", [0.01, 0.05, 0.2, 0.5, 3.0])
@pytest.mark.parametrize("prepare_s", [0.0, 0.1, 0.6])
def test_it_ends_in_time_but_for_the_run_that_was_begun_and_the_operands_that_were_being_made(run_s, prepare_s):
    clock = Clock()
    probed(Knowledge("t"), clock.trials({MANY: run_s, FEW: run_s, DECODE: run_s}, prepare_s), 1.0, clock, alone)
    assert clock.now <= 1.0 + prepare_s + run_s


def test_a_trial_for_which_there_is_no_time_says_nothing():
    clock = Clock()
    assert probed(Knowledge("t"), clock.trials({MANY: 5.0}), 1.0, clock, alone) == Knowledge("t")
    assert probed(Knowledge("t"), clock.trials({MANY: 0.01}), 0.0, clock, alone) == Knowledge("t")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_trials_run_on_this_machine_and_do_the_work_that_they_count(dtype):
    profile = rates_of_kind(first_knowledge(table_of_kind()), None, SIZES)
    names = []
    for parts, expected, prepare in trials_here(profile, dtype, 16 << 20):
        trial = prepare()
        trial.run(0)
        assert trial.work > 0 and expected > 0
        names += [name for name in parts if name in (MANY, FEW, DECODE)]
    assert names == [MANY, FEW, DECODE]
