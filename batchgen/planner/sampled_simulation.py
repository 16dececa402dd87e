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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from batchgen.core.plan import Plan
from batchgen.planner.costs import job_seconds
from batchgen.planner.phases import Phase
from batchgen.planner.placement import Placement
from batchgen.planner.problem import CostInputs
from batchgen.planner.search import Candidate
from batchgen.planner.simulation import SimulatedJob, simulated_rows
from batchgen.planner.step_costs import BatchLoad, StepCosts, streams_of
from batchgen.planner.step_simulator import Simulator
from batchgen.schedule.deferred_batches import DeferredBatch, DeferredBatches
from batchgen.schedule.step_graph import Step, Sweeps

# Sequences that are scheduled, each counted once a sweep that is scheduled, and Steps that are made, for one candidate.
_MOST_SCHEDULED = 8_000
_MOST_STEPS = 10_000
# So many times as many of both in a longer simulation.
_LONGER = 2
# So many times as many sequences where a part of the time as large as this is spent in mixes that have not been seen.
_UNTIL_SEEN, _MISSING = 3, 0.2
# A shortened job fills the block so often: once, and a part of it again.
_FILLED = 1.5
# Decoding alone is scheduled so often for the tokens of an output: the sweeps between are alike.
_JUMPS = 16
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


def simulate_shortened(plan: Plan, candidate: Candidate, *, longer: bool = False) -> ShortenedRun:
    """The time of a candidate, given as a plan too.

    Args:
        plan: The candidate's.
        candidate: Which one.
        longer: To simulate more of a large job, so as to be nearer to the whole.

    Raises:
        InputError: Its budgets do not hold what it places.
    """
    s = candidate.inputs
    at = candidate.counts.placement(s)
    times = _LONGER if longer else 1
    rows = _shortened_rows(s, _FILLED * times)
    job = SimulatedJob(plan, s.model, rows=rows)
    parts = _time_by_mix(s, candidate.phases, at)
    sweeps = _schedule(job, s, parts, _MOST_SCHEDULED * times, whole=len(rows) == s.workload.num_seqs)
    modelled = [job_seconds(s, [sweep.phase], at) for sweep in sweeps]
    numbers = _sampled(sweeps, s.model.num_layers, _MOST_STEPS * times)
    simulated = _simulate(plan, candidate, [sweeps[i] for i in numbers])
    ratios = [took_s / modelled[i] for i, took_s in zip(numbers, simulated, strict=True)]
    if len(rows) == s.workload.num_seqs and not job.has_work:
        alike = [job_seconds(s, [sweep.together], at) for sweep in sweeps]
        seconds = sum(each * _between(numbers, ratios, i) for i, each in enumerate(alike))
        return ShortenedRun(seconds, True)
    samples = [
        _Sample(
            _mix(sweep.phase, s.swept_seqs), sweep.later, (1 + sweep.jumped) * took_s, (1 + sweep.jumped) * modelled[i]
        )
        for i, took_s, sweep in zip(numbers, simulated, [sweeps[i] for i in numbers], strict=True)
    ]
    by_mix = _by_mix(samples, min(1.0, s.swept_seqs / s.workload.num_seqs))
    overall = _ratio(samples)
    # Each phase by itself: what prompts wait for is not what decoding waits for.
    seconds = sum(
        job_seconds(s, [phase], at) * by_mix.get(_mix(phase, s.swept_seqs), overall) for phase in candidate.phases
    )
    return ShortenedRun(seconds, False)


def _shortened_rows(s: CostInputs, filled: float) -> list[tuple[int, int]]:
    """The rows of a small job; of a larger one so many that its block is filled so many times.

    With deferred sequences, so many that it is full for some of their tokens.
    """
    workload = s.workload
    rows = workload.num_seqs
    if rows * workload.output_len.mean > _MOST_SCHEDULED:
        enough = filled * s.swept_seqs + s.deferred_seqs
        if s.deferral is not None:
            sweeps = _DEFERRED_TOKENS * s.deferral.sweeps_per_token
            enough += s.swept_seqs * sweeps / workload.output_len.mean
        rows = min(rows, math.ceil(enough))
    return list(itertools.islice(simulated_rows(workload), rows))


@dataclass(frozen=True)
class _Scheduled:
    """A sweep.

    deferred_batches: of deferred sequences that are under way when it begins, each with the load it began with. jumped: sweeps like it that
    follow, in which each sequence gains a token. later: whether any row was finished before.
    """

    loads: list[BatchLoad]
    phase: Phase
    deferred_batches: tuple[tuple[DeferredBatch, BatchLoad], ...] = ()
    jumped: int = 0
    later: bool = False

    @property
    def together(self) -> Phase:
        """The sweep and those that follow, with their mean context."""
        return replace(self.phase, sweeps=1 + self.jumped, context=self.phase.context + self.jumped / 2)


def _time_by_mix(s: CostInputs, phases: Sequence[Phase], at: Placement) -> dict[Mix, float]:
    """Of the whole job's modelled time, the part of the sweeps of each mix."""
    found: defaultdict[Mix, float] = defaultdict(float)
    for phase in phases:
        found[_mix(phase, s.swept_seqs)] += job_seconds(s, [phase], at)
    return {mix: seconds / sum(found.values()) for mix, seconds in found.items()}


def _schedule(
    job: SimulatedJob, s: CostInputs, parts: Mapping[Mix, float], most: int, *, whole: bool
) -> list[_Scheduled]:
    """The job's sweeps, if the CPU is always done with deferred attention in time.

    Of a job that is not whole, those in which deferred sequences are left alone are none of the whole job's.

    Args:
        job: Of which they are.
        s: The candidate's inputs.
        parts: Of its modelled time, by mix.
        most: Sequences that are scheduled, each counted once a sweep; more where mixes are missing in which much of the time is spent.
        whole: Whether the job has all rows.
    """
    found: list[_Scheduled] = []
    deferred_batches, loads = DeferredBatches(), dict[int, BatchLoad]()
    numbers = itertools.count(-1, -1)  # those of `Sweeps` count up from 0
    scheduled = 0.0
    missing = dict(parts)
    while scheduled < (_UNTIL_SEEN * _MOST_SCHEDULED if sum(missing.values()) > _MISSING else most):
        later = job.num_done > 0
        if (sweep := job.next_sweep()) is None:
            break
        begun = [DeferredBatch(next(numbers), k) for k, load in enumerate(sweep.loads) if load.deferred]
        loads |= {deferred_batch.number: sweep.loads[deferred_batch.batch] for deferred_batch in begun}
        before = tuple((deferred_batch, loads[deferred_batch.number]) for deferred_batch in deferred_batches.waiting)
        deferred = sum(loads[deferred_batch.number].deferred for deferred_batch in (*deferred_batches.waiting, *begun))
        phase = replace(sweep.phase, deferred_tokens=deferred / (s.model.num_layers + 1))
        deferred_batches.keep_step(s.model.num_layers, begun)
        job.end_sweep(deferred_batches)
        if phase.tokens == phase.deferred_tokens and not whole:
            break
        scheduled += max(1.0, phase.sampled)
        jumped = 0 if phase.prefill_tokens or s.deferral else job.jump(int(s.workload.output_len.mean / _JUMPS))
        found.append(_Scheduled(sweep.loads, phase, before, jumped, later))
        missing.pop(_mix(phase, s.swept_seqs), None)
    return found


def _sampled(sweeps: Sequence[_Scheduled], num_layers: int, most_steps: int) -> list[int]:
    """Which sweeps are simulated: the first, the last, and evenly spread ones between them."""
    steps = sum(len(sweep.loads) for sweep in sweeps) * num_layers * _LAYER_STEPS
    every = max(1, -(-steps // most_steps))
    return sorted({*range(0, len(sweeps), every), len(sweeps) - 1})


def _simulate(plan: Plan, candidate: Candidate, sampled: Sequence[_Scheduled]) -> list[float]:
    """Seconds of each sweep, one after the other, and no less than the CPU takes for what is deferred in it."""
    s = candidate.inputs
    costs, sweeps = StepCosts(plan, s.model, s.hardware), Sweeps(streams_of(plan, s.model))
    simulator = Simulator(shared_cores=s.hardware.shared_cores)
    seconds = []
    for sweep in sampled:
        before_s, deferred_s = simulator.now_s, 0.0
        deferred_batches = DeferredBatches([replace(deferred_batch) for deferred_batch, _ in sweep.deferred_batches])
        for deferred_batch, load in sweep.deferred_batches:
            costs.begun(deferred_batch.number, load)
        seconds_of = costs.sweep(sweep.loads)

        def counted(step: Step, seconds_of: Callable[[Step], float] = seconds_of) -> float:
            nonlocal deferred_s
            own_s = seconds_of(step)
            deferred_s += own_s if step.kind == "attend_deferred" else 0.0
            return own_s

        simulator.spend(costs.between_s(sweep.loads))
        flows, num_tokens = [load.flow for load in sweep.loads], sum(load.tokens for load in sweep.loads)
        steps = sweeps.steps(flows, deferred_batches, simulator.has_ended, num_tokens)
        simulator.run(steps, counted if s.deferral else seconds_of)
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


@dataclass(frozen=True)
class _Sample:
    """A simulated sweep, with those like it. later: as of `_Scheduled`."""

    mix: Mix
    later: bool
    simulated_s: float
    modelled_s: float


def _ratio(samples: Sequence[_Sample]) -> float:
    return sum(sample.simulated_s for sample in samples) / sum(sample.modelled_s for sample in samples)


def _by_mix(samples: Sequence[_Sample], first_frac: float) -> dict[Mix, float]:
    """Simulated over modelled seconds of sweeps of each mix.

    A block fills one KV class after the other, and has them mixed later. first_frac: the part of the rows that are of the first block.
    """
    found: dict[Mix, float] = {}
    for mix in {sample.mix for sample in samples}:
        first, later = ([s for s in samples if s.mix == mix and s.later == after] for after in (False, True))
        ratios = [_ratio(group) for group in (first, later) if group]
        found[mix] = first_frac * ratios[0] + (1 - first_frac) * ratios[-1]
    return found


def _mix(phase: Phase, swept_seqs: int) -> Mix:
    """Whether there are prompts, and how many thirds of the block decode, of those that are not deferred."""
    return phase.prefill_tokens > 0, min(2, int(3 * phase.decode_seqs / swept_seqs))
