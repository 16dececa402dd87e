"""A part of a job's sweeps, simulated over one engine or the stages of a pipeline.

The order of the sweeps does not depend on time, so the real scheduler makes them first. Then the real Steps of some of
them run, each stage's in lanes of its own; what the others take lies between those next to them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from batchgen.core.hardware import HardwareProfile
from batchgen.core.plan import Plan
from batchgen.models.config import ModelConfig
from batchgen.planner.batch_load import BatchLoad
from batchgen.planner.parallel import PROCESSES, Link
from batchgen.planner.phases import Phase
from batchgen.planner.simulation import SimulatedJob
from batchgen.planner.step_costs import StepCosts, streams_of
from batchgen.planner.step_simulator import OnStep, Simulator
from batchgen.schedule.deferred_batches import DeferredBatch, DeferredBatches
from batchgen.schedule.step_graph import Step
from batchgen.schedule.sweeps import Sweeps

# Steps of one micro-batch in one layer, about.
LAYER_STEPS = 6


@dataclass(frozen=True)
class ScheduledSweep:
    """A sweep with its order in the job, but without a time.

    Attributes:
        loads: The load of each micro-batch; none where the sweep is not simulated.
        phase: The sweep as the cost model counts it.
        answered: Number of sweeps whose tokens are known before this one is scheduled.
        deferred_batches: Deferred batches under way when the sweep begins, each with the load it began with.
        jumped: Number of like sweeps that follow, in which each sequence gains a token.
        later: Whether any row was finished before the sweep.
    """

    loads: list[BatchLoad]
    phase: Phase
    answered: int = 0
    deferred_batches: tuple[tuple[DeferredBatch, BatchLoad], ...] = ()
    jumped: int = 0
    later: bool = False

    @property
    def num_seqs(self) -> float:
        """Sequences that are scheduled for it, at least one."""
        return max(1.0, self.phase.sampled)

    @property
    def with_jumped(self) -> Phase:
        """The sweep and the jumped ones as one phase, with their mean context."""
        return replace(self.phase, sweeps=1 + self.jumped, context=self.phase.context + self.jumped / 2)


def scheduled_sweeps(
    job: SimulatedJob,
    num_layers: int,
    *,
    in_flight: int = 1,
    most_jumped: int = 0,
    is_simulated: Callable[[bool, Phase], bool] = lambda later, phase: True,
) -> Iterator[ScheduledSweep]:
    """The job's sweeps in the order of the engine, if the CPU is always done with deferred attention in time.

    Args:
        job: A job that was not begun.
        num_layers: Number of layers that a deferred token goes through.
        in_flight: Most sweeps under way at once, over the stages of a pipeline.
        most_jumped: Most sweeps of decoding alone that are jumped over after each one.
        is_simulated: Whether a sweep will be simulated, by whether any row was finished before it and by the sweep as
            the cost model counts it; asked once for each sweep, and not where tokens may be deferred.
    """
    deferred_batches, loads = DeferredBatches(), dict[int, BatchLoad]()
    numbers = itertools.count(-1, -1)  # `Sweeps` counts up from 0
    scheduled = answered = 0
    while True:
        if scheduled - answered == in_flight:
            answered = _answered(job, answered, in_flight)
        later = job.num_done > 0
        if (sweep := job.next_sweep(partial(is_simulated, later))) is None:
            return
        if not sweep.phase.tokens and not sweep.loads:  # all sequences are under way
            answered = _answered(job, answered, in_flight)
            continue
        begun = [DeferredBatch(next(numbers), k) for k, load in enumerate(sweep.loads) if load.deferred]
        loads |= {batch.number: sweep.loads[batch.batch] for batch in begun}
        before = tuple((batch, loads[batch.number]) for batch in deferred_batches.waiting)
        deferred = sum(loads[batch.number].deferred for batch in (*deferred_batches.waiting, *begun))
        phase = replace(sweep.phase, deferred_tokens=deferred / (num_layers + 1))
        deferred_batches.keep_step(num_layers, begun)
        job.end_sweep(deferred_batches)
        jumped = job.jump(most_jumped) if most_jumped and not phase.prefill_tokens else 0
        scheduled += 1
        yield ScheduledSweep(sweep.loads, phase, answered, before, jumped, later)


def _answered(job: SimulatedJob, answered: int, in_flight: int) -> int:
    if in_flight > 1:  # one engine has taken the tokens
        job.take_answers()
    return answered + 1


def sampled_numbers(
    sweeps: Sequence[ScheduledSweep], num_layers: int, most_steps: int, kinds: Sequence[Sequence[int]] | None = None
) -> list[int]:
    """The numbers of the simulated sweeps: of each kind the first, the last, and evenly spread ones between them.

    Args:
        sweeps: The sweeps of a job.
        num_layers: Number of layers, over all stages.
        most_steps: Most Steps that are simulated, about.
        kinds: The numbers of the sweeps of each kind; None: all are of one.
    """
    steps = LAYER_STEPS * num_layers * sum(len(sweep.loads) for sweep in sweeps)
    every = max(1, -(-steps // most_steps))
    return sorted({i for numbers in kinds or [range(len(sweeps))] for i in (*numbers[::every], numbers[-1])})


class SimulatedStage:
    """The lanes of one stage of a pipeline, or of an engine with all layers."""

    def __init__(
        self,
        plan: Plan,
        config: ModelConfig,
        hardware: HardwareProfile,
        link: Link = PROCESSES,
        on_step: OnStep | None = None,
    ) -> None:
        """Start with idle lanes.

        Args:
            plan: A plan with the stage's own policy.
            config: The configuration of the stage's layers.
            hardware: The stage's machine.
            link: The link to the next stage, between the memories of their hosts.
            on_step: Called for every Step that is simulated, with its start and end in seconds.
        """
        self.costs = StepCosts(plan, config, hardware)
        self._sweeps = Sweeps(streams_of(plan, config))
        self._exchanges = not (config.embeds and config.has_head)  # activations with other stages
        # To and from host memory, where the activations of neighbours are; None where it computes there.
        self._h2d, self._d2h = hardware.h2d_bytes_per_s, hardware.d2h_bytes_per_s
        self._on_step, self._sent_s = on_step, dict[int, float]()
        self._hidden_bytes = config.hidden_size * self.costs.element_bytes
        self._received_s, self._link = 0.0, link
        self._deferred_s = 0.0
        self.lanes = Simulator(
            shared_cores=hardware.shared_cores,
            issue_s=hardware.issue_overhead_s,
            on_step=self._note if self._exchanges or on_step else None,
        )

    def run(self, sweep: ScheduledSweep, arrivals_s: Sequence[float]) -> tuple[list[float], float]:
        """Run a sweep.

        Args:
            sweep: The sweep.
            arrivals_s: When each micro-batch's activations arrive.

        Returns:
            When each micro-batch's activations are with the next stage, and the seconds of the sweep's deferred
            attention.
        """
        deferred_batches = DeferredBatches([replace(batch) for batch, _ in sweep.deferred_batches])
        for batch, load in sweep.deferred_batches:
            self.costs.begun(batch.number, load)
        seconds, self._sent_s, self._deferred_s = self.costs.sweep(sweep.loads), {}, 0.0
        if sweep.phase.deferred_tokens:
            seconds = self._with_deferred(seconds)
        if self._exchanges:
            seconds = self._with_transfers(seconds, sweep.loads, arrivals_s)
        flows, num_tokens = [load.flow for load in sweep.loads], sum(load.tokens for load in sweep.loads)
        self.lanes.run(self._sweeps.steps(flows, deferred_batches, self.lanes.has_ended, num_tokens), seconds)
        return [self._sent_s.get(k, self.lanes.now_s) for k in range(len(sweep.loads))], self._deferred_s

    def _with_deferred(self, seconds: Callable[[Step], float]) -> Callable[[Step], float]:
        """Seconds of Steps, where those of deferred attention are added up."""

        def seconds_of(step: Step) -> float:
            step_s = seconds(step)
            self._deferred_s += step_s if step.kind == "attend_deferred" else 0.0
            return step_s

        return seconds_of

    def _with_transfers(
        self, seconds: Callable[[Step], float], loads: Sequence[BatchLoad], arrivals_s: Sequence[float]
    ) -> Callable[[Step], float]:
        """Seconds of Steps, with those that send activations to the next stage and receive the previous one's."""

        def seconds_of(step: Step) -> float:
            if step.kind not in ("send", "receive"):
                return seconds(step)
            load = loads[step.batch]
            moved = load.tokens * self._hidden_bytes
            if step.kind == "send":
                return self._link.send_s(moved) + (moved / self._d2h if self._d2h else 0.0)
            start_s = max(self.lanes.now_s, self._received_s)  # the lane is busy while it waits
            self._received_s = max(start_s, arrivals_s[step.batch])
            if self._h2d and not load.hidden_on_host:
                self._received_s += moved / self._h2d
            return self._received_s - start_s

        return seconds_of

    def _note(self, step: Step, start_s: float, end_s: float) -> None:
        if step.kind == "send":
            self._sent_s[step.batch] = end_s
        if self._on_step is not None:
            self._on_step(step, start_s, end_s)


def simulate_sweeps(
    stages: Sequence[SimulatedStage], sweeps: Sequence[ScheduledSweep], numbers: Sequence[int]
) -> dict[int, list[float]]:
    """Simulate some of the sweeps, one after the other.

    Args:
        stages: The stages that each sweep goes through.
        sweeps: All sweeps.
        numbers: The numbers of those that are simulated, in ascending order.

    Returns:
        For each number the seconds of the sweep in every stage: from when the stage is done with the sweep before, and
            the stage before
        with this one; no less than the CPU takes for what is deferred in the sweep.
    """
    first, seconds = stages[0].lanes, dict[int, list[float]]()
    answers_s: list[float] = []
    for position, i in enumerate(numbers):
        sweep = sweeps[i]
        known = max(0, position - (i - sweep.answered))  # as many are under way as in the whole job
        before_s = [stage.lanes.now_s for stage in stages]
        first.spend(max(0.0, answers_s[known - 1] - first.now_s) if known else 0.0)
        before_s[0] = first.now_s
        first.spend(stages[0].costs.between_s(sweep.loads))
        arrivals_s, seconds[i], ready_s = [0.0] * len(sweep.loads), [], 0.0
        for stage, ended_s in zip(stages, before_s, strict=True):
            arrivals_s, deferred_s = stage.run(sweep, arrivals_s)
            seconds[i].append(max(stage.lanes.now_s - max(ended_s, ready_s), deferred_s))
            ready_s = stage.lanes.now_s
        answers_s.append(ready_s)
    return seconds


def interpolate(
    sampled: Mapping[int, Sequence[float]], count: int, kinds: Sequence[Sequence[int]] | None = None
) -> NDArray[np.float64]:
    """Values of all sweeps [sweeps, values]: those that were not sampled lie between others of their kind.

    Args:
        sampled: The values of each sampled sweep, by its number.
        count: Number of sweeps.
        kinds: The numbers of the sweeps of each kind; None: all are of one.
    """
    values = np.zeros((count, len(next(iter(sampled.values())))))
    for numbers in kinds or [range(count)]:
        known = [i for i in numbers if i in sampled]
        for column, seconds in enumerate(zip(*(sampled[i] for i in known), strict=True)):
            values[numbers, column] = np.interp(numbers, known, seconds)
    return values
