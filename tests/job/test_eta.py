"""The time left of a job, on the real scheduler with a simulated clock: rows of equal and of very unequal length."""

import random
import threading
import tracemalloc
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from known_plans import plan_problem
from planner_cases import cpu_box, opt
from simulated_clock import replay
from thorough import quick_or, some_of

from batchgen.core.draft_rates import NO_RATES, DraftRates
from batchgen.core.plan import Plan
from batchgen.core.workload import Lengths, Workload
from batchgen.engine.in_flight import InFlight
from batchgen.job.eta import Estimator, Expected
from batchgen.job.progress import Counts, Progress
from batchgen.job.report import summary
from batchgen.job.rest_of_job import Sweeps, SweepTable
from batchgen.job.row_sizes import RowSizes
from batchgen.job.time_left import Seen, TimeLeft
from batchgen.planner.problem import problem_of

CONFIG = opt(256, 2, 4)
ROWS, MOST_SEQS, MOST_TOKENS = quick_or(800, 1200), 16, 512
WITHIN = 0.25
draws = random.Random(3)


def log_normal(mean, spread, least, most):
    """A draw whose logarithm is normal."""
    return int(min(most, max(least, draws.lognormvariate(mean, spread))))


def planned(rows, limit, *, ends_itself=False, shared=0.0, admission="continuous"):
    """The plan of a job, made of a sample of its rows: of outputs that end by themselves only the limit is known."""
    sample = rows[:: max(1, len(rows) // 256)]
    outputs = Lengths((limit,)) if ends_itself else Lengths.of(output for _, output in sample)
    prompts = Lengths.of(prompt for prompt, _ in sample)
    workload = Workload(len(rows), prompts, outputs, limit, shared)
    problem = problem_of(
        cpu_box(),
        CONFIG,
        workload,
        dtype="float16",
        max_model_len=2048,
        max_num_seqs=MOST_SEQS,
        max_num_batched_tokens=MOST_TOKENS,
        admission=admission,
    )
    return plan_problem(problem)


def sizes_of(rows):
    """The sizes of rows of four bytes a token, and a sample of their tokens."""
    sizes = RowSizes([(row, prompt) for row, (prompt, _) in enumerate(rows)][:: max(1, len(rows) // 256)])
    sizes.know(0, np.array([4.0 * prompt + 20 for prompt, _ in rows]))
    return sizes


def told(rows, limit, *, finished=(), ends_itself=False, gained=None, drafts=(), **more):
    plan = planned(rows, limit, ends_itself=ends_itself, **more)
    expected = Expected.of(plan, len(rows), ends_itself=ends_itself, finished=finished, sizes=sizes_of(rows))
    if gained is not None:  # tokens that the plan knows nothing of
        workload, prediction = replace(plan.workload, drafts=gained), replace(plan.prediction, drafts=drafts)
        plan = replace(plan, workload=workload, prediction=prediction)
    # A machine that is slower than its profile, more so in sweeps of few tokens, with neighbours.
    return replay(plan, CONFIG, cpu_box(), expected, rows, slower=lambda tokens: 1.6 if tokens <= 8 else 1.3, noise=0.2)


def lengths(kind):
    """(rows, limit of outputs, further arguments) of a kind of job."""
    outputs = [log_normal(3.2, 0.8, 1, 300) for _ in range(ROWS)]
    prompts = [log_normal(4.0, 0.9, 4, 1000) for _ in range(ROWS)]
    long_rows = [(1200, 20)] * 25
    return {
        "equal": ([(60, 24)] * ROWS, 24, {}),
        "static blocks": ([(60, 24)] * ROWS, 24, {"admission": "static"}),
        "outputs that end early": ([(60, 12)] * ROWS, 96, {"ends_itself": True}),
        "log-normal outputs": ([(60, n) for n in outputs], 300, {"ends_itself": True}),
        "log-normal prompts and outputs": (list(zip(prompts, outputs, strict=True)), 300, {"ends_itself": True}),
        "very long prompts at the end": ([(40, 20)] * ROWS + long_rows, 20, {}),
        "very long prompts at the beginning": (long_rows + [(40, 20)] * ROWS, 20, {}),
        "forced tokens": ([(60, 48)] * ROWS, 48, {"gained": replace(NO_RATES, most=0, forced=1.5)}),
        "forced tokens of outputs that end early": (
            [(60, n) for n in outputs], 300, {"ends_itself": True, "gained": replace(NO_RATES, most=0, forced=4.0)},
        ),
        "drafts": ([(60, 48)] * ROWS, 48, {"gained": DraftRates(0.7, 0.6), "drafts": ((MOST_SEQS, 4),)}),
        "a shared prefix": ([(400, 8)] * ROWS, 8, {"shared": 368.0}),
        "a resumed job": (
            [(60, n) for n in outputs], 300,
            {"ends_itself": True, "finished": tuple(log_normal(3.2, 0.8, 1, 300) for _ in range(500))},
        ),
        "scored rows": ([(prompt, 1) for prompt in prompts], 1, {}),
    }[kind]  # fmt: skip


KINDS = (
    "equal",
    "static blocks",
    "outputs that end early",
    "log-normal outputs",
    "log-normal prompts and outputs",
    "very long prompts at the end",
    "very long prompts at the beginning",
    "a shared prefix",
    "a resumed job",
    "scored rows",
)
SEVERAL_TOKENS = "forced tokens", "forced tokens of outputs that end early", "drafts"  # of a sequence in a sweep


def test_long_rows_are_expected_anywhere_among_rows_that_run_in_any_order():
    tokens = [10] * 40 + [90] * 40
    sizes = RowSizes(list(enumerate(tokens)))
    sizes.mixed(80)
    sizes.know(0, np.array(tokens, float))
    assert sizes.prompt_tokens(0, 4) == pytest.approx([50.0] * 4)
    sizes.mixed(50)
    sizes.know(0, np.array(tokens, float))
    assert sizes.prompt_tokens(50, 3) == pytest.approx([90.0] * 3)
    assert sizes.prompt_tokens(0, 1) == pytest.approx([50.0])


@pytest.mark.parametrize("mixed", [1, 4096])
def test_sizes_of_many_rows_take_a_few_numbers_of_each(mixed):
    """Each estimate looks at the rows that are left: it once made four arrays of them, and reading sizes a list."""
    rows = 300_000
    given = np.random.default_rng(0).integers(1, 100, rows).astype(float)
    batch = pa.record_batch({"text": ["a" * int(size) for size in given[:1000]]})

    def peak_bytes_per_row(of) -> float:
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        of()
        return (tracemalloc.get_traced_memory()[1] - before) / rows

    sizes = RowSizes(list(enumerate(given[:1000])))
    sizes.mixed(mixed)
    tracemalloc.start()
    try:
        scanning = peak_bytes_per_row(lambda: sizes.scan(((first, batch) for first in range(0, rows, 1000)), 60.0))
        kept = tracemalloc.get_traced_memory()[0] / rows
        estimating = peak_bytes_per_row(lambda: sizes.prompt_tokens(1234, 2000))
    finally:
        tracemalloc.stop()
    assert sizes.prompt_tokens(0, 3) == pytest.approx([given[:1000].mean()] * 3, rel=0.01)
    assert scanning < 30 and kept < 10 and estimating < 1, (scanning, kept, estimating)


def test_no_thread_reads_sizes_any_more_once_reading_is_stopped():
    reading, go_on = threading.Event(), threading.Event()

    def batches():
        reading.set()
        go_on.wait()
        yield 0, pa.record_batch({"text": ["a"]})

    sizes = RowSizes()
    sizes.scan_in_thread(batches(), 1.0)
    reading.wait()
    threading.Timer(0.05, go_on.set).start()
    sizes.stop()
    assert not [thread for thread in threading.enumerate() if thread.name == "batchgen-sizes"]


@pytest.mark.parametrize("kind", [*some_of(KINDS, 3, "kinds of jobs"), *SEVERAL_TOKENS])
def test_the_time_left_is_within_a_quarter_from_the_tenth_part_on(kind):
    draws.seed(3)
    rows, limit, more = lengths(kind)
    times = told(rows, limit, **more)
    assert [round(one.frac, 1) for one in times] == [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9]
    assert max(one.error for one in times) <= WITHIN, [(one.frac, one.told_s, one.left_s) for one in times]
    assert not any(one.is_bound for one in times)


def test_before_any_output_has_ended_the_time_left_is_a_bound():
    rows = [(60, 200)] * MOST_SEQS
    times = told(rows, 300, ends_itself=True)
    assert times[0].is_bound and times[0].told_s > times[0].left_s


def test_rows_of_other_workers_are_not_waited_for():
    rows = [(60, 24)] * 400
    plan = planned(rows, 24)
    expected = Expected.of(plan, 400, shared=True)
    alone = Estimator(expected, InFlight)
    helped = Estimator(expected, InFlight)
    for estimator, others in ((alone, 0), (helped, 100)):
        estimator.after_sweep(1.0, Seen(rows=100, others=others, prompt_tokens=6000, prefilled=6000, decoded=2400))
    assert helped.time_left().seconds < 0.4 * alone.time_left().seconds


def test_repeated_rows_take_no_time():
    plan = planned([(60, 24)] * 400, 24)
    half, none = (Estimator(Expected.of(plan, 400), InFlight) for _ in range(2))
    for estimator, repeated in ((half, 50), (none, 0)):
        estimator.after_sweep(1.0, Seen(rows=100, repeated=repeated, prompt_tokens=6000, prefilled=6000, decoded=2400))
    assert half.time_left().seconds == pytest.approx(none.time_left().seconds / 2, rel=0.15)


def test_a_plan_has_the_seconds_of_sweeps_of_any_size():
    plan = planned([(100, 40)] * 400, 40)
    assert Plan.from_json(plan.to_json()).prediction.sweep_times == plan.prediction.sweep_times
    table = SweepTable(plan.prediction.sweep_times)

    def seconds(prompt, decode, context=100.0, keys=50.0):
        return float(table(Sweeps(*(np.array([value], float) for value in (prompt, keys, decode, context))))[0])

    assert 0 < seconds(0, 1) < seconds(0, 8) < seconds(0, 16) < seconds(512, 16)
    assert seconds(0, 16, context=200.0) > seconds(0, 16) and seconds(512, 0, keys=500.0) > seconds(512, 0)
    stages = plan.prediction.stages
    assert sum(stage.seconds for stage in stages) == pytest.approx(
        plan.prediction.total_s - plan.prediction.startup_s, rel=0.01
    )


def test_nothing_is_expected_without_a_number_of_rows():
    assert Expected.of(planned([(60, 24)] * 64, 24), None) is None


def test_what_was_said_at_first_is_compared_at_the_end():
    class Clock:
        now = 0.0

        def __call__(self):
            return self.now

    class Steady:
        def after_sweep(self, seconds, seen):
            self.left_s = 100.0 - seen.rows / 10

        def time_left(self):
            return TimeLeft(self.left_s, False)

    clock = Clock()
    progress = Progress("none", now=clock)
    clock.now = 10.0  # loading
    progress.start(Steady())
    for second in range(1, 11):
        clock.now = 10.0 + second
        progress.update(Counts(1000, done=10 * second, seen=Seen(rows=10 * second)))
        assert (progress.estimated_s is None) == (second < 3)
    assert progress.estimated_s == pytest.approx(110.0)
    report = {
        "state": "complete", "rows_ok": 1000, "rows_failed": 0, "rows_resumed": 0, "wall_s": 120.0,
        "predicted_wall_s": 105.0,
        "estimated_wall_s": 110.0, "prompt_tokens": 0, "errors": [], "output": "out.parquet", "limits_of": "job",
        "finish_reasons": {}, "answers": [], "started": "2026-01-01T23:00:00+01:00",
        "ended": "2026-01-02T00:00:00+01:00",
        "host": "here", "versions": {"batchgen": "1"}, "model": "M", "model_sha256": "0" * 64,
    }  # fmt: skip
    assert "done in 2 min 00 s (predicted 1 min 45 s, 1 min 50 s when 3% of it was done)" in summary(report)[0]
