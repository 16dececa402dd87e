"""The time left of a job, replayed: as planned, slower, with shorter outputs."""

import random
from dataclasses import replace

import pytest
from planner_cases import cpu_box, opt

from batchgen.core.plan import Plan, Stage
from batchgen.core.workload import Lengths, Workload
from batchgen.job.eta import Expected, Seen, remaining_s
from batchgen.job.progress import Counts, Progress
from batchgen.job.report import summary
from batchgen.planner import explain
from batchgen.planner.problem import problem_of
from batchgen.planner.search import search

# Prompts alone, prompts beside decoding, the last rows in sweeps that are nearly empty.
STAGES = (
    Stage(20.0, 40_000.0, "prefill", 20.0, "compute"),
    Stage(60.0, 50_000.0, "steady", 60.0, "compute"),
    Stage(20.0, 2_000.0, "tail", 20.0, "compute"),
)


def replay(stages, frac, *, slower=1.0, noise=0.0, rows=1000, output_len=50.0, is_bound=False):
    """(what is told to be left, what is left) when a part of the job's time has passed; every second sweeps end."""
    draw = random.Random(7)
    passed_s, tokens, whole_s = 0.0, 0.0, slower * sum(stage.seconds for stage in stages)
    for stage in stages:
        steps = max(1, round(stage.seconds))
        for _ in range(steps):
            if passed_s >= frac * whole_s:
                break
            tokens += stage.tokens / steps
            passed_s += stage.seconds * slower / steps * draw.uniform(1 - noise, 1 + noise)
    done = int(rows * tokens / sum(stage.tokens for stage in stages))
    finished = round(done * output_len)
    seen = Seen(passed_s, done, round(tokens), finished, finished)
    return remaining_s(Expected(rows, stages, output_len, is_bound), seen), whole_s - passed_s


@pytest.mark.parametrize("noise", [0.0, 0.2])
@pytest.mark.parametrize("frac", [0.03, 0.2, 0.5])
def test_a_job_that_goes_as_planned_is_told_rightly_from_the_start(frac, noise):
    told, left = replay(STAGES, frac, noise=noise)
    assert told == pytest.approx(left, rel=0.1)


def test_a_job_that_is_slower_is_found_to_be():
    wrong = [
        abs(told / left - 1) for told, left in (replay(STAGES, frac, slower=1.5) for frac in (0.03, 0.2, 0.5, 0.8))
    ]
    assert wrong == sorted(wrong, reverse=True) and wrong[0] < 1 / 3 and wrong[1] < 0.1 and wrong[2] < 0.05


def test_outputs_that_end_earlier_than_they_must_count_as_they_are():
    """The second half of rows that end after 20 of 200 tokens is expected to take as long as the first."""
    stages = (
        Stage(100.0, 100_000.0 + 200_000.0, "steady", 100.0, "compute"),
    )  # a thousand rows of a hundred prompt tokens
    seen = Seen(seconds=20.0, rows=500, tokens=60_000, generated=10_000, finished=10_000)
    bounded = Expected(1000, stages, 200.0, True)
    assert remaining_s(bounded, seen) == pytest.approx(20.0, rel=0.1)
    assert remaining_s(replace(bounded, is_bound=False), seen) > 45


def test_rows_under_way_count_with_what_they_have():
    """The first rows to end are the short ones: by them alone the others would seem to be short too."""
    stages = (Stage(100.0, 300_000.0, "steady", 100.0, "compute"),)
    expected = Expected(1000, stages, 200.0, True)
    seen = Seen(seconds=30.0, rows=100, tokens=90_000, generated=20_000, finished=500)
    assert remaining_s(expected, seen) > 2 * remaining_s(expected, replace(seen, generated=500))


@pytest.mark.parametrize(
    "seen", [Seen(0.0, 0, 0), Seen(5.0, 1000, 92_000, 50_000, 50_000), Seen(5.0, 1000, 10**9, 7, 7)]
)
def test_ends(seen):
    told = remaining_s(Expected(1000, STAGES, 50.0, False), seen)
    assert told == pytest.approx(0.0, abs=5.0) if seen.rows else told == pytest.approx(100.0)


def test_a_plan_has_its_stages():
    workload = Workload(400, Lengths((100,)), Lengths((40,)), 40)
    given = problem_of(cpu_box(), opt(1024, 4, 16), workload, dtype="float16", max_model_len=2048)
    plan = explain.make_plan(given, search(given), startup_s=3.0)
    stages = plan.prediction.stages
    assert sum(stage.seconds for stage in stages) == pytest.approx(plan.prediction.total_s - 3.0)
    assert sum(stage.tokens for stage in stages) == pytest.approx(400 * (100 + 39), rel=0.02)
    assert Plan.from_json(plan.to_json()).prediction.stages == stages
    expected = Expected.of(plan, 400)
    assert expected == Expected(400, stages, 40.0, True)
    assert Expected.of(plan, 800, 1.0).stages[0].seconds == pytest.approx(2 * stages[0].seconds)
    assert Expected.of(plan, None) is None
    older = replace(plan, prediction=replace(plan.prediction, stages=()))
    assert Expected.of(older, 400) is None


def test_what_was_said_at_first_is_compared_at_the_end():
    class Clock:
        now = 0.0

        def __call__(self):
            return self.now

    clock = Clock()
    progress = Progress("none", now=clock)
    clock.now = 10.0  # loading
    progress.start(Expected(1000, STAGES, 50.0, False))
    for second in range(1, 11):
        clock.now = 10.0 + second
        progress.update(Counts(1000, computed_tokens=2000 * second))
        assert (progress.estimated_s is None) == (second < 3)
    assert progress.estimated_s == pytest.approx(110.0, rel=0.02)
    report = {
        "state": "complete", "rows_ok": 1000, "rows_failed": 0, "rows_resumed": 0, "wall_s": 120.0,
        "predicted_wall_s": 105.0,
        "estimated_wall_s": progress.estimated_s, "prompt_tokens": 0, "errors": [], "output": "out.parquet",
        "finish_reasons": {}, "answers": [], "started": "2026-01-01T23:00:00+01:00",
        "ended": "2026-01-02T00:00:00+01:00",
        "host": "here", "versions": {"batchgen": "1"}, "model": "M", "model_sha256": "0" * 64,
    }  # fmt: skip
    assert "done in 2 min 00 s (predicted 1 min 45 s, 1 min 50 s when 3% were through)" in summary(report)[0]
