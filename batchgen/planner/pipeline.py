"""A job over the stages of a pipeline: the plan of the largest stage, with the simulated time of all stages."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from batchgen.core.hardware import HardwareProfile
from batchgen.core.plan import Plan, Policy
from batchgen.models.config import ModelConfig
from batchgen.planner.parallel import PROCESSES, Link, split_layers, stage_policy
from batchgen.planner.simulation import SimulatedJob
from batchgen.planner.step_simulator import OnStep
from batchgen.planner.sweep_sampling import (
    ScheduledSweep,
    SimulatedStage,
    interpolate,
    sampled_numbers,
    scheduled_sweeps,
    simulate_sweeps,
)
from batchgen.schedule.step_graph import Step

# Sequences that are scheduled, each counted once a sweep, before the rest of the job is taken to go on likewise.
_MOST_SCHEDULED = 30_000
# Steps that are simulated, of all stages.
_MOST_STEPS = 30_000

StageLayers = tuple[int, int, Policy]  # first, stop, how these layers are run
OnStageStep = Callable[[int, Step, float, float], None]  # number of the stage, Step, start, end


def over_stages(plan: Plan, config: ModelConfig, hardware: HardwareProfile, count: int, link: Link) -> Plan:
    """The plan of the largest stage, with the time that all stages take.

    Args:
        plan: The plan of a job whose model is `largest_stage`.
        config: The whole model's configuration.
        hardware: The machine of each stage.
        count: Number of stages.
        link: The link from one stage to the next.

    Raises:
        InputError: The budgets of the plan do not hold what it places.
    """
    stages = [(first, stop, stage_policy(plan.policy, stop - first)) for first, stop in split_layers(config, count)]
    seconds = simulate_pipeline(plan, config, hardware, stages, link=link)
    return _with_sweeps_s(plan, seconds, planned_sweeps_s(plan, hardware))


def _with_sweeps_s(plan: Plan, sweeps_s: float, planned_s: float) -> Plan:
    """The plan with other seconds for all sweeps than those that were planned."""
    before = plan.prediction
    slower = sweeps_s / planned_s
    total_s = before.total_s - planned_s + sweeps_s

    def stretched(seconds: float) -> float:
        return before.startup_s + (seconds - before.startup_s) * slower

    return replace(
        plan,
        prediction=replace(
            before,
            total_s=total_s,
            low_s=min(total_s, stretched(before.low_s)),
            high_s=max(total_s, stretched(before.high_s)),
            generated_tokens_per_s=before.generated_tokens_per_s * before.total_s / total_s,
            total_tokens_per_s=before.total_tokens_per_s * before.total_s / total_s,
            block_latency_s=before.block_latency_s * slower,
            stages=tuple(replace(stage, seconds=stage.seconds * slower) for stage in before.stages),
            sweep_times=before.sweep_times.stretched(slower),
        ),
    )


def simulate_pipeline(
    plan: Plan,
    config: ModelConfig,
    hardware: HardwareProfile,
    stages: Sequence[StageLayers],
    on_step: OnStageStep | None = None,
    link: Link = PROCESSES,
) -> float:
    """Simulate a job over stages.

    Where a job is too large to be scheduled to its end, the plan says what one engine with the largest stage's layers
    takes for it; the beginning is simulated over the stages and with that engine, and the ratio holds for all of it.

    Args:
        plan: The plan of the largest stage; its policy says how rows are scheduled.
        config: The whole model's configuration.
        hardware: The machine of each stage.
        stages: The layers of each stage, and how they are run.
        on_step: Called for every Step that is simulated.
        link: The link from one stage to the next, between the memories of their hosts.

    Returns:
        Seconds of all sweeps.

    Raises:
        InputError: The budgets of the plan do not hold what it places.
    """
    run = _simulate(plan, config, hardware, stages, link, on_step)
    if run.whole:
        return run.seconds
    largest = max(stop - first for first, stop, _ in stages)
    alone = _simulate(plan, config.first_layers(largest), hardware, [(0, largest, plan.policy)], link, None)
    return planned_sweeps_s(plan, hardware) * run.seconds / alone.seconds


def planned_sweeps_s(plan: Plan, hardware: HardwareProfile) -> float:
    """Seconds of a job's sweeps as its plan has them, without its start, and reading and writing rows."""
    rows_s = plan.workload.num_seqs * hardware.row_overhead_s
    return max(plan.prediction.total_s - plan.prediction.startup_s - rows_s, 1e-9)


@dataclass(frozen=True)
class _SimulatedRun:
    """The first sweeps of a job.

    Attributes:
        seconds: Seconds of all these sweeps.
        whole: Whether the job has no more.
    """

    seconds: float
    whole: bool


def _simulate(
    plan: Plan,
    config: ModelConfig,
    hardware: HardwareProfile,
    layers: Sequence[StageLayers],
    link: Link,
    on_step: OnStageStep | None,
) -> _SimulatedRun:
    def observer(number: int) -> OnStep | None:
        return None if on_step is None else lambda *step: on_step(number, *step)

    stages = [
        SimulatedStage(replace(plan, policy=policy), config.stage(first, stop), hardware, link, observer(number))
        for number, (first, stop, policy) in enumerate(layers)
    ]
    largest = max(stop - first for first, stop, _ in layers)
    job = SimulatedJob(plan, config.first_layers(largest), sweeps_in_flight=len(stages))
    sweeps: list[ScheduledSweep] = []
    scheduled = 0.0
    for sweep in scheduled_sweeps(job, largest, in_flight=len(stages)):
        sweeps.append(sweep)
        scheduled += sweep.num_seqs
        if scheduled >= _MOST_SCHEDULED:
            break
    kinds = _kinds(sweeps)
    sampled = simulate_sweeps(stages, sweeps, sampled_numbers(sweeps, config.num_layers, _MOST_STEPS, kinds))
    seconds = interpolate(sampled, len(sweeps), kinds)
    return _SimulatedRun(_answer_times_s([sweep.answered for sweep in sweeps], seconds)[-1], not job.has_work)


def _kinds(sweeps: Sequence[ScheduledSweep]) -> list[list[int]]:
    """The numbers of the sweeps of each kind: by micro-batches, prompts or none, and sequences that decode."""
    most_seqs = max(sweep.phase.sampled for sweep in sweeps)
    kinds: defaultdict[tuple[int, bool, int], list[int]] = defaultdict(list)
    for i, sweep in enumerate(sweeps):
        thirds = round(3 * sweep.phase.decode_seqs / most_seqs)
        kinds[len(sweep.loads), sweep.phase.prefill_tokens > 0, thirds].append(i)
    return list(kinds.values())


def _answer_times_s(answered: Sequence[int], sweep_s: NDArray[np.float64]) -> list[float]:
    """When each sweep has come through the last stage, in seconds.

    A stage takes up a sweep when it is done with the one before, and the stage before with this one; the first stage
    also waits for tokens.

    Args:
        answered: For each sweep, how many have come through before it begins, as it needs their tokens.
        sweep_s: Seconds of each sweep in every stage [sweeps, stages].
    """
    ends_s = [0.0] * sweep_s.shape[1]
    answers_s: list[float] = []
    for known, seconds in zip(answered, sweep_s.tolist(), strict=True):
        ready_s = answers_s[known - 1] if known else 0.0
        for stage, stage_s in enumerate(seconds):
            ready_s = ends_s[stage] = max(ends_s[stage], ready_s) + stage_s
        answers_s.append(ready_s)
    return answers_s
