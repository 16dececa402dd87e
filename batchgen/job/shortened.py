"""What a candidate plan takes, from a simulation that is short enough to be made for each of several.

A small job is simulated from its first row to its last. Of a larger one the simulator tells how much longer sweeps take than
the cost model says: a job with fewer rows and shorter outputs goes through the real scheduler and the real Steps, and the ratio
holds for the sweeps of the whole job. No clock is looked at, so that the same problem always gets the same plan.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Hashable
from dataclasses import dataclass, replace

from batchgen.core.plan import Plan
from batchgen.core.workload import Lengths, Workload
from batchgen.job.simulation import SimulatedJob, SimulatedSweep
from batchgen.job.step_costs import StepCosts, streams_of
from batchgen.planner.flow import Phase
from batchgen.planner.lp import job_seconds
from batchgen.planner.search import Candidate
from batchgen.runtime.steps.graph import Sweeps
from batchgen.runtime.steps.simulator import Simulator

# Sequences that are scheduled, each counted once a sweep, and Steps that are made, for one candidate.
_MOST_SCHEDULED = 8_000
_MOST_STEPS = 25_000
# Sweeps that differ by no more than this factor in what they compute are alike, and as many of them are simulated.
_ALIKE = 1.25
_SAMPLES = 3


@dataclass(frozen=True)
class ShortenedRun:
    """seconds: of all sweeps of the job. whole: whether all its rows were scheduled."""

    seconds: float
    whole: bool


def simulate_shortened(plan: Plan, candidate: Candidate) -> ShortenedRun:
    """The time of a candidate, given as a plan too. Raises InputError where its budgets do not hold what it places."""
    s = candidate.inputs
    workload = _shortened(s.workload, s.block_size)
    plan = replace(plan, workload=workload)
    at = candidate.counts.placement(s)
    ratios = _Ratios()
    job = SimulatedJob(plan, s.model)
    costs, sweeps = StepCosts(plan, s.model, s.hardware), Sweeps(streams_of(plan))
    simulator = Simulator(shared_cores=s.hardware.shared_cores)
    total_s, steps_made = 0.0, 0
    while sweep := job.next_sweep():
        modelled_s = job_seconds(s, [sweep.phase], at)
        kind = _kind(sweep)
        if ratios.samples[kind] < _SAMPLES and steps_made < _MOST_STEPS:
            steps = list(sweeps.steps([load.flow for load in sweep.loads]))
            steps_made += len(steps)
            before_s = simulator.now_s
            simulator.spend(costs.between_s(sweep.loads))
            simulator.run(steps, costs.sweep(sweep.loads))
            took_s = simulator.now_s - before_s
            ratios.add(kind, sweep.phase, took_s, modelled_s)
        else:
            took_s = modelled_s * ratios.of(kind, sweep.phase)
        total_s += took_s
    if workload == s.workload:
        return ShortenedRun(total_s, True)
    # Each phase by itself: what prompts wait for is not what decoding waits for.
    seconds = sum(job_seconds(s, [phase], at) * ratios.of(None, phase) for phase in candidate.phases)
    return ShortenedRun(seconds, False)


def _shortened(workload: Workload, block_size: int) -> Workload:
    """Few enough rows of few enough tokens: the block is filled, and where it is not too large, once more.

    What outputs lose in length prompts gain by half, so that sequences attend to as much.
    """
    outputs = workload.output_len
    if workload.num_seqs * outputs.mean <= _MOST_SCHEDULED:
        return workload
    rows = min(workload.num_seqs, block_size * (2 if 4 * block_size <= _MOST_SCHEDULED else 1))
    part = _MOST_SCHEDULED / (rows * outputs.mean)
    if part >= 1:
        return replace(workload, num_seqs=rows)
    shorter = Lengths(tuple(min(n, max(2, round(n * part))) for n in outputs.values))
    longer = round((outputs.mean - shorter.mean) / 2)
    prompts = Lengths(tuple(n + longer for n in workload.prompt_len.values))
    return replace(workload, num_seqs=rows, prompt_len=prompts, output_len=shorter)


def _kind(sweep: SimulatedSweep) -> Hashable:
    """The same for sweeps that are alike."""

    def about(count: float) -> int:
        return round(math.log1p(count) / math.log(_ALIKE))

    return tuple(
        (
            load.flow,
            about(load.tokens),
            about(load.host_blocks),
            about(load.disk_blocks),
            *((name, about(sum(a.contexts))) for name, a in load.attended.items()),
        )
        for load in sweep.loads
    )


class _Ratios:
    """Simulated over modelled seconds, of sweeps alike, of sweeps with as many prompts, and of all."""

    def __init__(self) -> None:
        self.samples: Counter[Hashable] = Counter()
        self._simulated: defaultdict[Hashable, float] = defaultdict(float)
        self._modelled: defaultdict[Hashable, float] = defaultdict(float)

    def add(self, kind: Hashable, phase: Phase, simulated_s: float, modelled_s: float) -> None:
        self.samples[kind] += 1
        for key in (kind, _mix(phase), "all"):
            self._simulated[key] += simulated_s
            self._modelled[key] += modelled_s

    def of(self, kind: Hashable, phase: Phase) -> float:
        for key in (kind, _mix(phase), "all"):
            if self._modelled.get(key):
                return self._simulated[key] / self._modelled[key]
        return 1.0


def _mix(phase: Phase) -> str:
    """Prompts, decoding, or both in one sweep."""
    if not phase.prefill_tokens:
        return "decoding"
    return "both" if phase.decode_seqs > phase.prefill_seqs else "prompts"
