"""The seconds of a candidate plan from a simulation that is short enough to be made for each of several candidates.

A small job is simulated from its first row to its last. For a larger one the simulator tells how much longer sweeps
take than the cost model says: a job with fewer rows and shorter outputs goes through the real scheduler and the real
Steps, and the ratio holds for the sweeps of the whole job. No clock is looked at, so that the same problem always gets
the same plan.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from batchgen.core.errors import InputError
from batchgen.core.plan import Plan
from batchgen.planner.costs import job_seconds
from batchgen.planner.part_of_layers import layers_simulated, simulated_seconds
from batchgen.planner.phases import Phase
from batchgen.planner.placement import Placement
from batchgen.planner.problem import CostInputs
from batchgen.planner.search import Candidate
from batchgen.planner.simulation import SimulatedJob, simulated_rows
from batchgen.planner.sweep_sampling import LAYER_STEPS, ScheduledSweep, interpolate, scheduled_sweeps

# Sequences that are scheduled, each counted once a sweep that is scheduled, and Steps that are made, for one candidate.
_MOST_SCHEDULED = 8_000
_MOST_STEPS = 4_000
# So many times as many sequences and Steps in a longer simulation.
_LONGER, _MORE_STEPS = 2, 2.5
# So many times as many sequences where a part of the time as large as this is spent in mixes that have not been seen.
_UNTIL_SEEN, _MISSING = 3, 0.2
# Sweeps of mixes with less than this part of the time are not simulated: the others say what they take.
_RARE = 0.03
# A sampled job fills the block so often: once, and a part of it again.
_FILLED = 1.5
# Decoding alone is scheduled so often for the tokens of an output: the sweeps between are alike.
_JUMPS = 16
# With deferred sequences, the sampled job lasts for so many of their tokens.
_DEFERRED_TOKENS = 2

Mix = tuple[bool, int]


@dataclass(frozen=True)
class SampledRun:
    """The result of a sampled simulation.

    Attributes:
        seconds: Seconds of all sweeps of the job.
        settled: Whether a longer simulation would say no more: all rows were scheduled, or it would have the same
            sweeps.
    """

    seconds: float
    settled: bool


def simulate_sampled(plan: Plan, candidate: Candidate, *, longer: bool = False) -> SampledRun:
    """Simulate a part of a candidate's sweeps.

    Args:
        plan: The candidate as a plan.
        candidate: The candidate.
        longer: Whether more of a large job is simulated, so as to be nearer to the whole.

    Raises:
        InputError: The candidate's budgets do not hold what it places, or none of the sampled rows.
    """
    s = candidate.inputs
    at = candidate.counts.placement(s)
    times = _LONGER if longer else 1
    rows = _sampled_rows(s, _FILLED * times)
    whole = len(rows) == s.workload.num_seqs
    job = SimulatedJob(plan, s.model, rows=rows)
    most_steps = _MOST_STEPS * (_MORE_STEPS if longer else 1)
    sweep_steps = LAYER_STEPS * s.num_gpu_batches * sum(layers_simulated(candidate))
    time_by_mix = _time_by_mix(s, candidate.phases, at)
    chosen = _Chosen(s, time_by_mix, int(most_steps / sweep_steps))
    sweeps = _schedule(job, s, time_by_mix, _MOST_SCHEDULED * times, chosen, whole=whole)
    if not sweeps:
        raise InputError(f"KV of {s.max_num_seqs} sequences has no memory for rows that are longer than most")
    numbers = chosen.numbers(len(sweeps))
    modelled_s = {i: job_seconds(s, [sweeps[i].phase], at) for i in numbers}
    simulated_s = simulated_seconds(plan, candidate, sweeps, modelled_s)
    if whole and not job.has_work:
        of_samples = {i: [simulated_s[i] / modelled_s[i]] for i in numbers}
        ratios = interpolate(of_samples, len(sweeps))[:, 0].tolist()
        seconds_s = (job_seconds(s, [sweep.with_jumped], at) for sweep in sweeps)
        return SampledRun(sum(seconds * ratio for seconds, ratio in zip(seconds_s, ratios, strict=True)), True)
    samples = [_sample(s, sweeps[i], simulated_s[i], modelled_s[i]) for i in numbers]
    by_mix = _ratio_by_mix(samples, min(1.0, s.swept_seqs / s.workload.num_seqs))
    overall = _ratio(samples)
    # Each phase by itself: what prompts wait for is not what decoding waits for.
    seconds = sum(
        job_seconds(s, [phase], at) * by_mix.get(_mix(phase, s.swept_seqs), overall) for phase in candidate.phases
    )
    has_more = not longer and (
        len(rows) < len(_sampled_rows(s, _FILLED * _LONGER))
        or (job.has_work and sum(sweep.num_seqs for sweep in sweeps) < _MOST_SCHEDULED * _LONGER)
        or chosen.has_more(int(_MOST_STEPS * _MORE_STEPS / sweep_steps))
    )
    return SampledRun(seconds, not has_more)


def _sampled_rows(s: CostInputs, filled: float) -> list[tuple[int, int]]:
    """The rows of a small job; of a larger one so many that its block is filled so many times.

    With deferred sequences, so many that the block is full for some of their tokens.
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


def _time_by_mix(s: CostInputs, phases: Sequence[Phase], at: Placement) -> dict[Mix, float]:
    """The part of the whole job's modelled time that sweeps of each mix take."""
    seconds: defaultdict[Mix, float] = defaultdict(float)
    for phase in phases:
        seconds[_mix(phase, s.swept_seqs)] += job_seconds(s, [phase], at)
    total_s = sum(seconds.values())
    return {mix: mix_s / total_s for mix, mix_s in seconds.items()}


class _Chosen:
    """The sweeps that are simulated: of each kind evenly spread ones, its first among them.

    A kind is a mix, before any row is finished or later. Which sweeps there will be is not known when one is asked for,
    so of each kind every one is taken first, and then every second, fourth and so on of the kinds with most of them.
    Mixes in which little of the time is spent are left out.
    """

    def __init__(self, s: CostInputs, time_by_mix: Mapping[Mix, float], most: int) -> None:
        """Begin without sweeps.

        Args:
            s: The candidate's inputs.
            time_by_mix: The part of the modelled time that sweeps of each mix take.
            most: Most sweeps that are simulated, where there are not more kinds.
        """
        self._s, self._most = s, most
        self._mixes = {mix for mix, part in time_by_mix.items() if part >= _RARE}
        self._count = 0
        self._of_kind: defaultdict[tuple[Mix, bool], list[int]] = defaultdict(list)  # all its sweeps, by number
        self._every: defaultdict[tuple[Mix, bool], int] = defaultdict(lambda: 1)

    def takes(self, phase: Phase, later: bool) -> bool:
        """True if the next sweep is among those that are simulated, as far as is known."""
        kind = mix, _ = _mix(phase, self._s.swept_seqs), later
        self._count += 1
        if mix not in self._mixes and self._count > 1:
            return False
        numbers = self._of_kind[kind]
        numbers.append(self._count - 1)
        if (len(numbers) - 1) % self._every[kind]:
            return False
        to_come = len(self._mixes.difference(mix for mix, _ in self._of_kind))
        while to_come + sum(map(self._num_taken, self._of_kind)) > self._most:
            most = max(self._of_kind, key=self._num_taken)
            if self._num_taken(most) == 1:
                break
            self._every[most] *= 2
        return (len(numbers) - 1) % self._every[kind] == 0

    def has_more(self, most: int) -> bool:
        """Tell whether others would be simulated with another limit that is no lower."""
        return any(every > 1 for every in self._every.values()) and most > len(self._of_kind)

    def _num_taken(self, kind: tuple[Mix, bool]) -> int:
        return -(-len(self._of_kind[kind]) // self._every[kind])

    def numbers(self, count: int) -> list[int]:
        """The numbers of the sweeps that are simulated, of the first `count` ones, in ascending order."""
        return sorted(i for kind, numbers in self._of_kind.items() for i in numbers[:: self._every[kind]] if i < count)


def _schedule(
    job: SimulatedJob,
    s: CostInputs,
    time_by_mix: Mapping[Mix, float],
    most_seqs: int,
    chosen: _Chosen,
    *,
    whole: bool,
) -> list[ScheduledSweep]:
    """The job's first sweeps. In a job that is not whole, it ends where deferred sequences are left alone.

    Args:
        job: The sampled job.
        s: The candidate's inputs.
        time_by_mix: The part of the modelled time that sweeps of each mix take.
        most_seqs: Most sequences that are scheduled, each counted once a sweep; more where mixes are missing in which
            much of the time is spent.
        chosen: Chooses the sweeps that are simulated.
        whole: Whether the job has all rows.
    """
    sweeps: list[ScheduledSweep] = []
    scheduled, missing = 0.0, dict(time_by_mix)
    most_jumped = 0 if s.deferral else int(s.workload.output_len.mean / _JUMPS)
    defers = s.deferral is not None  # then the loads of all sweeps are needed
    for sweep in scheduled_sweeps(
        job,
        s.model.num_layers,
        most_jumped=most_jumped,
        is_simulated=lambda later, phase: chosen.takes(phase, later) or defers,
    ):
        if sweep.phase.tokens == sweep.phase.deferred_tokens and not whole:
            break
        sweeps.append(sweep)
        scheduled += sweep.num_seqs
        missing.pop(_mix(sweep.phase, s.swept_seqs), None)
        if scheduled >= (_UNTIL_SEEN * _MOST_SCHEDULED if sum(missing.values()) > _MISSING else most_seqs):
            break
    return sweeps


@dataclass(frozen=True)
class _Sample:
    """A simulated sweep, with the like ones that were jumped over.

    Attributes:
        mix: The mix of the sweep.
        later: Whether any row was finished before the sweep.
        simulated_s: Seconds by the simulator.
        modelled_s: Seconds by the cost model.
    """

    mix: Mix
    later: bool
    simulated_s: float
    modelled_s: float


def _sample(s: CostInputs, sweep: ScheduledSweep, simulated_s: float, modelled_s: float) -> _Sample:
    sweeps = 1 + sweep.jumped
    return _Sample(_mix(sweep.phase, s.swept_seqs), sweep.later, sweeps * simulated_s, sweeps * modelled_s)


def _ratio(samples: Sequence[_Sample]) -> float:
    return sum(sample.simulated_s for sample in samples) / sum(sample.modelled_s for sample in samples)


def _ratio_by_mix(samples: Sequence[_Sample], first_frac: float) -> dict[Mix, float]:
    """Simulated over modelled seconds of sweeps of each mix.

    A block fills one KV placement after the other, and has them mixed later.

    Args:
        samples: The simulated sweeps.
        first_frac: The part of the rows that are in the first block.
    """
    by_mix: dict[Mix, float] = {}
    for mix in {sample.mix for sample in samples}:
        first, later = ([s for s in samples if s.mix == mix and s.later == after] for after in (False, True))
        ratios = [_ratio(group) for group in (first, later) if group]
        by_mix[mix] = first_frac * ratios[0] + (1 - first_frac) * ratios[-1]
    return by_mix


def _mix(phase: Phase, swept_seqs: int) -> Mix:
    """A sweep's mix: whether it has prompts, and how many thirds of the block decode, without deferred sequences."""
    return phase.prefill_tokens > 0, min(2, int(3 * phase.decode_seqs / swept_seqs))
