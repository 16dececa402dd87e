"""What a candidate plan takes, from a simulation that is short enough to be made for each of several.

A small job is simulated from its first row to its last. Of a larger one the simulator tells how much longer sweeps take than
the cost model says: a job with fewer rows and shorter outputs goes through the real scheduler and the real Steps, and the ratio
holds for the sweeps of the whole job. No clock is looked at, so that the same problem always gets the same plan.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from batchgen.core.plan import Plan
from batchgen.job.simulation import SimulatedJob, simulated_rows
from batchgen.job.step_costs import BatchLoad, StepCosts, streams_of
from batchgen.planner.flow import Phase
from batchgen.planner.inputs import CostInputs
from batchgen.planner.lp import job_seconds
from batchgen.planner.search import Candidate
from batchgen.runtime.steps.cohorts import Cohort, Cohorts
from batchgen.runtime.steps.graph import Step, Sweeps
from batchgen.runtime.steps.simulator import Simulator

# Sequences that are scheduled, each counted once a sweep, and Steps that are made, for one candidate.
_MOST_SCHEDULED = 8_000
_MOST_STEPS = 10_000
# A shortened job fills the block once, and a part of it again.
_FILLED = 1.5
# With deferred sequences, it lasts for so many of their tokens.
_DEFERRED_TOKENS = 2
# Steps of one micro-batch in one layer, about.
_LAYER_STEPS = 6

Mix = tuple[bool, int]


@dataclass(frozen=True)
class ShortenedRun:
    """seconds: of all sweeps of the job. whole: whether all its rows were scheduled."""

    seconds: float
    whole: bool


def simulate_shortened(plan: Plan, candidate: Candidate) -> ShortenedRun:
    """The time of a candidate, given as a plan too. Raises InputError where its budgets do not hold what it places."""
    s = candidate.inputs
    at = candidate.counts.placement(s)
    rows = _shortened_rows(s)
    job = SimulatedJob(plan, s.model, rows=rows)
    sweeps = _schedule(job, s, whole=len(rows) == s.workload.num_seqs)
    modelled = [job_seconds(s, [sweep.phase], at) for sweep in sweeps]
    numbers = _sampled(sweeps, s.model.num_layers)
    simulated = _simulate(plan, candidate, [sweeps[i] for i in numbers])
    ratios = [took_s / modelled[i] for i, took_s in zip(numbers, simulated, strict=True)]
    if len(rows) == s.workload.num_seqs and not job.has_work:
        seconds = sum(each * _between(numbers, ratios, i) for i, each in enumerate(modelled))
        return ShortenedRun(seconds, True)
    mixes = [_mix(sweeps[i].phase, s.swept_seqs) for i in numbers]
    by_mix = _by_mix(mixes, simulated, [modelled[i] for i in numbers])
    overall = sum(simulated) / sum(modelled[i] for i in numbers)
    # Each phase by itself: what prompts wait for is not what decoding waits for.
    seconds = sum(
        job_seconds(s, [phase], at) * by_mix.get(_mix(phase, s.swept_seqs), overall) for phase in candidate.phases
    )
    return ShortenedRun(seconds, False)


def _shortened_rows(s: CostInputs) -> list[tuple[int, int]]:
    """The rows of a small job; of a larger one so many that its block is filled, kept full for a while, and emptied.

    With deferred sequences, so many that it is full for some of their tokens.
    """
    workload = s.workload
    rows = workload.num_seqs
    if rows * workload.output_len.mean > _MOST_SCHEDULED:
        enough = _FILLED * s.swept_seqs + s.deferred_seqs
        if s.deferral is not None:
            sweeps = _DEFERRED_TOKENS * s.deferral.sweeps_per_token
            enough += s.swept_seqs * sweeps / workload.output_len.mean
        rows = min(rows, math.ceil(enough))
    return list(itertools.islice(simulated_rows(workload), rows))


@dataclass(frozen=True)
class _Scheduled:
    """A sweep, and the cohorts of deferred sequences that are under way when it begins, each with the load it began with."""

    loads: list[BatchLoad]
    phase: Phase
    cohorts: tuple[tuple[Cohort, BatchLoad], ...] = ()


def _schedule(job: SimulatedJob, s: CostInputs, *, whole: bool) -> list[_Scheduled]:
    """The job's sweeps, if the CPU is always done with deferred attention in time.

    Of a job that is not whole, those in which deferred sequences are left alone are none of the whole job's.
    """
    found: list[_Scheduled] = []
    cohorts, loads = Cohorts(), dict[int, BatchLoad]()
    numbers = itertools.count(-1, -1)  # those of `Sweeps` count up from 0
    scheduled = 0.0
    while scheduled < _MOST_SCHEDULED and (sweep := job.next_sweep()):
        begun = [Cohort(next(numbers), k) for k, load in enumerate(sweep.loads) if load.deferred]
        loads |= {cohort.number: sweep.loads[cohort.batch] for cohort in begun}
        before = tuple((cohort, loads[cohort.number]) for cohort in cohorts.waiting)
        deferred = sum(loads[cohort.number].deferred for cohort in (*cohorts.waiting, *begun))
        phase = replace(sweep.phase, deferred_tokens=deferred / (s.model.num_layers + 1))
        cohorts.keep_step(s.model.num_layers, begun)
        job.end_sweep(cohorts)
        if phase.tokens == phase.deferred_tokens and not whole:
            break
        found.append(_Scheduled(sweep.loads, phase, before))
        scheduled += max(1.0, phase.sampled)
    return found


def _sampled(sweeps: Sequence[_Scheduled], num_layers: int) -> list[int]:
    """Which sweeps are simulated: the first, the last, and evenly spread ones between them."""
    steps = sum(len(sweep.loads) for sweep in sweeps) * num_layers * _LAYER_STEPS
    every = max(1, -(-steps // _MOST_STEPS))
    return sorted({*range(0, len(sweeps), every), len(sweeps) - 1})


def _simulate(plan: Plan, candidate: Candidate, sampled: Sequence[_Scheduled]) -> list[float]:
    """Seconds of each sweep, one after the other, and no less than the CPU takes for what is deferred in it."""
    s = candidate.inputs
    costs, sweeps = StepCosts(plan, s.model, s.hardware), Sweeps(streams_of(plan, s.model))
    simulator = Simulator(shared_cores=s.hardware.shared_cores)
    seconds = []
    for sweep in sampled:
        before_s, deferred_s = simulator.now_s, 0.0
        cohorts = Cohorts([replace(cohort) for cohort, _ in sweep.cohorts])
        for cohort, load in sweep.cohorts:
            costs.begun(cohort.number, load)
        seconds_of = costs.sweep(sweep.loads)

        def counted(step: Step, seconds_of: Callable[[Step], float] = seconds_of) -> float:
            nonlocal deferred_s
            own_s = seconds_of(step)
            deferred_s += own_s if step.kind == "attend_deferred" else 0.0
            return own_s

        simulator.spend(costs.between_s(sweep.loads))
        flows, num_tokens = [load.flow for load in sweep.loads], sum(load.tokens for load in sweep.loads)
        simulator.run(sweeps.steps(flows, cohorts, simulator.has_ended, num_tokens), counted)
        seconds.append(max(simulator.now_s - before_s, deferred_s))
    return seconds


def _between(numbers: Sequence[int], ratios: Sequence[float], i: int) -> float:
    """The ratio at sweep `i`: between those of its simulated neighbours."""
    after = bisect_left(numbers, i)
    if numbers[after] == i:
        return ratios[after]
    start, stop = numbers[after - 1], numbers[after]
    part = (i - start) / (stop - start)
    return ratios[after - 1] * (1 - part) + ratios[after] * part


def _by_mix(mixes: Sequence[Mix], simulated: Sequence[float], modelled: Sequence[float]) -> dict[Mix, float]:
    """Simulated over modelled seconds of sweeps of each mix."""
    sums: defaultdict[Mix, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for mix, took_s, modelled_s in zip(mixes, simulated, modelled, strict=True):
        sums[mix][0] += took_s
        sums[mix][1] += modelled_s
    return {mix: took_s / modelled_s for mix, (took_s, modelled_s) in sums.items()}


def _mix(phase: Phase, swept_seqs: int) -> Mix:
    """Whether there are prompts, and how many thirds of the block decode, of those that are not deferred."""
    return phase.prefill_tokens > 0, min(2, int(3 * phase.decode_seqs / swept_seqs))
