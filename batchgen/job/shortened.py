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
from collections.abc import Sequence
from dataclasses import dataclass

from batchgen.core.plan import Plan
from batchgen.core.workload import Workload
from batchgen.job.simulation import SimulatedJob, SimulatedSweep, simulated_rows
from batchgen.job.step_costs import StepCosts, streams_of
from batchgen.planner.flow import Phase
from batchgen.planner.lp import job_seconds
from batchgen.planner.search import Candidate
from batchgen.runtime.steps.graph import Sweeps
from batchgen.runtime.steps.simulator import Simulator

# Sequences that are scheduled, each counted once a sweep, and Steps that are made, for one candidate.
_MOST_SCHEDULED = 8_000
_MOST_STEPS = 10_000
# A shortened job fills the block once, and a part of it again.
_FILLED = 1.5
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
    rows = _shortened_rows(s.workload, s.block_size)
    job, sweeps = SimulatedJob(plan, s.model, rows=rows), []
    scheduled = 0.0
    while scheduled < _MOST_SCHEDULED and (sweep := job.next_sweep()):
        sweeps.append(sweep)
        scheduled += sweep.phase.sampled
    modelled = [job_seconds(s, [sweep.phase], at) for sweep in sweeps]
    numbers = _sampled(sweeps, s.model.num_layers)
    simulated = _simulate(plan, candidate, [sweeps[i] for i in numbers])
    ratios = [took_s / modelled[i] for i, took_s in zip(numbers, simulated, strict=True)]
    if len(rows) == s.workload.num_seqs and not job.has_work:
        seconds = sum(each * _between(numbers, ratios, i) for i, each in enumerate(modelled))
        return ShortenedRun(seconds, True)
    mixes = [_mix(sweeps[i].phase, s.block_size) for i in numbers]
    by_mix = _by_mix(mixes, simulated, [modelled[i] for i in numbers])
    overall = sum(simulated) / sum(modelled[i] for i in numbers)
    # Each phase by itself: what prompts wait for is not what decoding waits for.
    seconds = sum(
        job_seconds(s, [phase], at) * by_mix.get(_mix(phase, s.block_size), overall) for phase in candidate.phases
    )
    return ShortenedRun(seconds, False)


def _shortened_rows(workload: Workload, block_size: int) -> list[tuple[int, int]]:
    """The rows of a small job; of a larger one so many that its block is filled, kept full for a while, and emptied."""
    rows = workload.num_seqs
    if rows * workload.output_len.mean > _MOST_SCHEDULED:
        rows = min(rows, math.ceil(_FILLED * block_size))
    return list(itertools.islice(simulated_rows(workload), rows))


def _sampled(sweeps: Sequence[SimulatedSweep], num_layers: int) -> list[int]:
    """Which sweeps are simulated: the first, the last, and evenly spread ones between them."""
    steps = sum(len(sweep.loads) for sweep in sweeps) * num_layers * _LAYER_STEPS
    every = max(1, -(-steps // _MOST_STEPS))
    return sorted({*range(0, len(sweeps), every), len(sweeps) - 1})


def _simulate(plan: Plan, candidate: Candidate, sampled: Sequence[SimulatedSweep]) -> list[float]:
    """Seconds of each sweep, one after the other."""
    s = candidate.inputs
    costs, sweeps = StepCosts(plan, s.model, s.hardware), Sweeps(streams_of(plan))
    simulator = Simulator(shared_cores=s.hardware.shared_cores)
    seconds = []
    for sweep in sampled:
        before_s = simulator.now_s
        simulator.spend(costs.between_s(sweep.loads))
        simulator.run(sweeps.steps([load.flow for load in sweep.loads]), costs.sweep(sweep.loads))
        seconds.append(simulator.now_s - before_s)
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


def _mix(phase: Phase, block_size: int) -> Mix:
    """Whether there are prompts, and how many thirds of the block decode."""
    return phase.prefill_tokens > 0, min(2, int(3 * phase.decode_seqs / block_size))
