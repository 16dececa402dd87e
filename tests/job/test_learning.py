"""What a job's sweeps show of the machine."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest

from batchgen.core.knowledge import DECODE, FEW, MANY, SPEED, Knowledge
from batchgen.core.plan import Stage
from batchgen.job import learning
from batchgen.job.learning import Learner, SweepTimes, learned, told_anew
from batchgen.job.planned_stages import PlannedStages, StageCounts
from batchgen.job.time_left import TimeLeft
from batchgen.profiler.machine_record import MachineRecord

PROMPTS, DECODING = {SPEED: 1.0, MANY: 1.0}, {SPEED: 1.0, FEW: 0.5, DECODE: 0.5}
STAGES = (
    Stage(10.0, 10_000, "prefill", 10, "compute", PROMPTS),
    Stage(20.0, 2_000, "decode", 40, "compute", DECODING),
)
EXPECTED = PlannedStages(100, STAGES, 20.0, False)


class Plan:
    """The prediction's table and the factors that were applied to it."""

    table = "avx2, 2 cores"
    factors: dict = {}


@pytest.fixture(autouse=True)
def taken(monkeypatch):
    """The part of the cores' time that others take, as a list of one number."""
    taken = [0.0]
    monkeypatch.setattr(learning, "Beside", lambda: SimpleNamespace(taken_frac=lambda: taken[0]))
    return taken


def ran(slower=(1.0, 1.0), tokens=1.0):
    """The times of a job whose stages took so many times as long as planned, and its counts at the end."""
    times, done, passed_s = SweepTimes(), 0.0, 0.0
    for stage, factor in zip(STAGES, slower, strict=True):
        for _ in range(int(stage.sweeps)):
            done += tokens * stage.tokens / stage.sweeps
            passed_s += factor * tokens * stage.seconds / stage.sweeps
            times.after_sweep(round(done), passed_s)
    return times, StageCounts(passed_s, 100, round(done), 2_000, 2_000)


def test_each_stage_says_how_much_slower_its_kinds_of_work_are():
    times, seen = ran((1.5, 2.0))
    prompts, decoding = times.shown(Plan, EXPECTED, seen)
    assert prompts.parts == PROMPTS and decoding.parts == DECODING
    assert math.exp(prompts.logarithm) == pytest.approx(1.5, rel=0.01)
    assert math.exp(decoding.logarithm) == pytest.approx(2.0, rel=0.01)


def test_a_prompt_that_takes_many_sweeps_says_how_much_slower_all_of_them_are():
    """The plan has these sweeps as equal, but each takes longer than the one before."""
    tokens, sweeps = 1_000, (9, 6, 3, 6)
    stages = tuple(Stage(n * 1.0, n * tokens, "prefill", n, "compute", PROMPTS) for n in sweeps)
    times, passed_s, total = SweepTimes(), 0.0, sum(sweeps)
    for i in range(total):
        passed_s += 1.5 * (2 * i + 1) / total
        times.after_sweep((i + 1) * tokens, passed_s)
    seen = StageCounts(passed_s, 1, total * tokens, 1, 1)
    (shown,) = times.shown(Plan, PlannedStages(1, stages, 1.0, False), seen)
    assert math.exp(shown.logarithm) == pytest.approx(1.5) and shown.parts == PROMPTS


def test_a_long_job_keeps_few_points_and_says_the_same(monkeypatch):
    every, seen = ran((1.5, 2.0))
    monkeypatch.setattr(learning, "_MOST_POINTS", 32)
    few, _ = ran((1.5, 2.0))
    assert few.sweeps == every.sweeps > 32 >= len(few._points) - 1
    for a, b in zip(every.shown(Plan, EXPECTED, seen), few.shown(Plan, EXPECTED, seen), strict=True):
        assert a.logarithm == pytest.approx(b.logarithm, abs=0.1) and a.parts == b.parts


def test_factors_that_the_plan_had_applied_are_not_learned_away():
    times, seen = ran()
    applied = type("Applied", (Plan,), {"factors": {SPEED: 0.4, DECODE: 0.2}})
    prompts, decoding = times.shown(applied, EXPECTED, seen)
    assert prompts.logarithm == pytest.approx(0.4, abs=0.01) and decoding.logarithm == pytest.approx(0.5, abs=0.01)


def test_outputs_of_other_lengths_say_something_of_the_whole_job_only():
    times, seen = ran((2.0, 2.0), tokens=0.5)
    (whole,) = times.shown(Plan, EXPECTED, replace(seen, rows=50))
    assert whole.noise > times.shown(Plan, EXPECTED, ran()[1])[0].noise
    assert whole.parts[SPEED] == 1 and 0 < whole.parts[DECODE] < 0.5


def test_a_job_of_a_moment_shows_nothing():
    times = SweepTimes()
    times.after_sweep(12_000, 0.1)
    assert times.shown(Plan, EXPECTED, StageCounts(0.1, 100, 12_000)) == []


def test_a_second_job_is_predicted_by_the_first():
    first = Knowledge("avx2, 2 cores")
    times, seen = ran((1.5, 2.0))
    known = learned(MachineRecord(), first, times.shown(Plan, EXPECTED, seen)).knowledge[first.table]
    assert known.jobs == 1
    assert math.exp(known.mean(PROMPTS)) == pytest.approx(1.5, rel=0.05)
    assert math.exp(known.mean(DECODING)) == pytest.approx(2.0, rel=0.05)
    assert known.deviation(PROMPTS) < 0.15


def test_what_others_took_is_not_taken_for_a_slow_machine(taken):
    times, seen = ran((2.0, 2.0))
    alone = times.shown(Plan, EXPECTED, seen)
    taken[0] = 0.5
    beside = times.shown(Plan, EXPECTED, seen)
    assert [math.exp(shown.logarithm) for shown in beside] == pytest.approx([1.0, 1.0], rel=0.01)
    assert all(a.noise > 3 * b.noise for a, b in zip(beside, alone, strict=True))


def test_after_some_sweeps_a_long_job_is_predicted_anew():
    left = TimeLeft(40.0, False)
    assert told_anew(left, 10.0, 20) == "predicted: 50 s (46 s to 54 s, from this job's first 20 sweeps)"
    assert told_anew(TimeLeft(40.0, True), 10.0, 20) == "predicted: at most 50 s (from this job's first 20 sweeps)"


@pytest.mark.parametrize(("sweep_s", "told_after"), [(0.01, 300), (0.15, 20), (10.0, 20)])
def test_the_new_prediction_comes_once_after_some_sweeps_and_some_seconds(monkeypatch, sweep_s, told_after):
    """The sweeps of a job's first moment have the few rows that were read by then, and tell a tenth of its speed."""
    now, lines = [100.0], []
    monkeypatch.setattr(learning.time, "monotonic", lambda: now[0])
    job = SimpleNamespace(device=SimpleNamespace(kind="cpu"), processes=1)
    learner = Learner(job, Plan, EXPECTED, lambda line: lines.append((sweep, line)), started_s=98.0)
    for sweep in range(1, 2 * told_after):
        now[0] = 100.0 + sweep * sweep_s * (1 + 1e-9)
        learner.after_sweep(sweep, sweep, 0, 0, 0, TimeLeft(40.0, False))
    ((told, line),) = lines
    assert told == told_after and line.endswith(f"from this job's first {told_after} sweeps)")


def test_a_job_that_is_nearly_done_is_not_predicted_anew():
    assert told_anew(TimeLeft(5.0, False), 30.0, 20) is None
