"""A job over the stages of a pipeline, simulated: the real scheduler, and the Steps of every stage in lanes of its own.

The order of the sweeps does not depend on time, so all are scheduled first. Of a job with many, the Steps of some sweeps of each kind
are simulated; the others take as long in each stage as those of their kind that lie next to them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from batchgen.core.hardware import HardwareProfile
from batchgen.core.plan import Plan, Policy
from batchgen.models.config import ModelConfig
from batchgen.planner.phases import Phase
from batchgen.planner.ranks import PROCESSES, Link
from batchgen.planner.simulation import SimulatedJob
from batchgen.planner.step_costs import BatchLoad, StepCosts, streams_of
from batchgen.planner.step_simulator import OnStep, Simulator
from batchgen.schedule.step_graph import Step, Sweeps

# Sequences that are scheduled, each counted once a sweep, before the rest of the job is taken to go on in the same way.
_MOST_SCHEDULED = 30_000
# Steps that are simulated, of all stages.
_MOST_STEPS = 30_000
_LAYER_STEPS = 6  # of one micro-batch in one layer, about

StageLayers = tuple[int, int, Policy]  # first, stop, how these layers are run


@dataclass(frozen=True)
class _Sweep:
    """loads: of its micro-batches. phase: the same as the cost model counts it. answered: sweeps whose tokens are known before it is scheduled."""

    loads: list[BatchLoad]
    phase: Phase
    answered: int

    @property
    def num_seqs(self) -> float:
        return self.phase.prefill_seqs + self.phase.decode_seqs

    def kind(self, most_seqs: float) -> tuple[int, bool, int]:
        """Sweeps of one kind have as many micro-batches, prompts or none, and about as many sequences that decode."""
        return len(self.loads), self.phase.prefill_tokens > 0, round(3 * self.phase.decode_seqs / most_seqs)


@dataclass(frozen=True)
class _Simulated:
    """Sweeps of a job. seconds: of all of them. whole: whether the job has no more."""

    seconds: float
    whole: bool


class _SimulatedStage:
    """One stage's lanes."""

    def __init__(
        self,
        plan: Plan,
        config: ModelConfig,
        hardware: HardwareProfile,
        layers: StageLayers,
        link: Link,
        on_step: OnStep | None,
    ) -> None:
        first, stop, policy = layers
        self.config = config.stage(first, stop)
        own = replace(plan, policy=policy)
        self.costs = StepCosts(own, self.config, hardware)
        self._sweeps = Sweeps(streams_of(own, self.config))
        # To and from host memory, where the activations of neighbours are; None where it computes there.
        self._h2d, self._d2h = hardware.h2d_bytes_per_s, hardware.d2h_bytes_per_s
        self._on_step, self._sent_s = on_step, dict[int, float]()
        self._hidden_bytes = self.config.hidden_size * self.costs.element_bytes
        self._received_s, self._link = 0.0, link
        self.lanes = Simulator(shared_cores=hardware.shared_cores, on_step=self._note)

    def run(self, loads: Sequence[BatchLoad], arrivals_s: Sequence[float]) -> list[float]:
        """Run a sweep whose activations come at these times, by micro-batch; returns when they are with the next stage."""
        seconds, self._sent_s = self.costs.sweep(loads), {}
        self.lanes.run(
            self._sweeps.steps([load.flow for load in loads], num_tokens=sum(load.tokens for load in loads)),
            self._with_transfers(seconds, loads, arrivals_s),
        )
        return [self._sent_s.get(k, self.lanes.now_s) for k in range(len(loads))]

    def _with_transfers(
        self, seconds: Callable[[Step], float], loads: Sequence[BatchLoad], arrivals_s: Sequence[float]
    ) -> Callable[[Step], float]:
        def of(step: Step) -> float:
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

        return of

    def _note(self, step: Step, start_s: float, end_s: float) -> None:
        if step.kind == "send":
            self._sent_s[step.batch] = end_s
        if self._on_step is not None:
            self._on_step(step, start_s, end_s)


def simulate_pipeline(
    plan: Plan,
    config: ModelConfig,
    hardware: HardwareProfile,
    stages: Sequence[StageLayers],
    on_step: Callable[[int, Step, float, float], None] | None = None,
    link: Link = PROCESSES,
) -> float:
    """Simulate a job over stages.

    Of a job that is too large to be scheduled to its end, the plan says what one engine with the largest stage's layers takes for it;
    the beginning is simulated over the stages and with that engine, and the ratio holds for all of it.

    Args:
        plan: Of the largest stage; its policy says how rows are scheduled.
        config: The whole model's.
        hardware: Of each stage.
        stages: What each has.
        on_step: Called for every Step that is simulated, with the number of its stage, its start and its end.
        link: From one stage to the next, between the memories of their hosts.

    Returns:
        Seconds of all sweeps.

    Raises:
        InputError: The budgets of the plan do not hold what it places.
    """
    found = _simulate(plan, config, hardware, stages, link, on_step)
    if found.whole:
        return found.seconds
    largest = max(stop - first for first, stop, _ in stages)
    alone = _simulate(plan, config.first_layers(largest), hardware, [(0, largest, plan.policy)], link, None)
    return planned_sweeps_s(plan, hardware) * found.seconds / alone.seconds


def planned_sweeps_s(plan: Plan, hardware: HardwareProfile) -> float:
    """Seconds of a job's sweeps as its plan has them, without its start, and reading and writing rows."""
    rows_s = plan.workload.num_seqs * hardware.row_overhead_s
    return max(plan.prediction.total_s - plan.prediction.startup_s - rows_s, 1e-9)


def _simulate(
    plan: Plan,
    config: ModelConfig,
    hardware: HardwareProfile,
    stages: Sequence[StageLayers],
    link: Link,
    on_step: Callable[[int, Step, float, float], None] | None,
) -> _Simulated:
    noting: list[OnStep | None] = [None] * len(stages)
    if on_step is not None:
        noting = [lambda *step, i=i: on_step(i, *step) for i in range(len(stages))]
    lanes = [_SimulatedStage(plan, config, hardware, own, link, note) for own, note in zip(stages, noting, strict=True)]
    largest = max(stop - first for first, stop, _ in stages)
    job = SimulatedJob(plan, config.first_layers(largest), sweeps_in_flight=len(stages))
    sweeps = _schedule(job, len(stages))
    kinds = _kinds(sweeps)
    own_s = _between(_own_times(lanes, sweeps, _sampled(sweeps, kinds, config.num_layers)), kinds, len(sweeps))
    return _Simulated(answer_times_s([sweep.answered for sweep in sweeps], own_s)[-1], not job.has_work)


def _schedule(job: SimulatedJob, in_flight: int) -> list[_Sweep]:
    """The job's first sweeps, or all, as the engine launches them: with so many under way it waits for the first one's answers."""
    found: list[_Sweep] = []
    answered, scheduled = 0, 0.0
    while scheduled < _MOST_SCHEDULED:
        if len(found) - answered == in_flight:
            answered = _take_answers(job, answered, in_flight)
        sweep = job.next_sweep()
        if sweep is None:
            break
        if not sweep.loads:  # all sequences are on their way
            answered = _take_answers(job, answered, in_flight)
            continue
        found.append(_Sweep(sweep.loads, sweep.phase, answered))
        scheduled += max(1.0, found[-1].num_seqs)
    return found


def _take_answers(job: SimulatedJob, answered: int, in_flight: int) -> int:
    if in_flight > 1:  # one engine has taken them
        job.take_answers()
    return answered + 1


def _kinds(sweeps: Sequence[_Sweep]) -> list[list[int]]:
    """The numbers of the sweeps of each kind."""
    most_seqs = max(sweep.num_seqs for sweep in sweeps)
    found: defaultdict[tuple[int, bool, int], list[int]] = defaultdict(list)
    for i, sweep in enumerate(sweeps):
        found[sweep.kind(most_seqs)].append(i)
    return list(found.values())


def _sampled(sweeps: Sequence[_Sweep], kinds: Sequence[Sequence[int]], num_layers: int) -> list[int]:
    """All sweeps, or, of a job with many Steps, of each kind some that are evenly spread, the first and the last among them."""
    steps = _LAYER_STEPS * num_layers * sum(len(sweep.loads) for sweep in sweeps)
    every = max(1, -(-steps // _MOST_STEPS))
    return sorted({i for numbers in kinds for i in (*numbers[::every], numbers[-1])})


def _own_times(
    lanes: Sequence[_SimulatedStage], sweeps: Sequence[_Sweep], numbers: Sequence[int]
) -> dict[int, list[float]]:
    """Simulate these sweeps, one after the other.

    Returns:
        By number, its seconds in every stage: from when this stage is done with the sweep before, and the stage before with this one.
    """
    first, own_s = lanes[0].lanes, dict[int, list[float]]()
    answers_s: list[float] = []
    for position, i in enumerate(numbers):
        sweep = sweeps[i]
        known = max(0, position - (i - sweep.answered))  # as many are under way as in the whole job
        before_s = [stage.lanes.now_s for stage in lanes]
        first.spend(max(0.0, answers_s[known - 1] - first.now_s) if known else 0.0)
        before_s[0] = first.now_s
        first.spend(lanes[0].costs.between_s(sweep.loads))
        arrivals_s, own_s[i], ready_s = [0.0] * len(sweep.loads), [], 0.0
        for stage, ended_s in zip(lanes, before_s, strict=True):
            arrivals_s = stage.run(sweep.loads, arrivals_s)
            own_s[i].append(stage.lanes.now_s - max(ended_s, ready_s))
            ready_s = stage.lanes.now_s
        answers_s.append(ready_s)
    return own_s


def _between(own_s: dict[int, list[float]], kinds: Sequence[Sequence[int]], count: int) -> np.ndarray:
    """Seconds of all sweeps in every stage [sweeps, stages]: those that were not simulated lie between others of their kind."""
    found = np.zeros((count, len(next(iter(own_s.values())))))
    for numbers in kinds:
        known = [i for i in numbers if i in own_s]
        for stage, seconds in enumerate(zip(*(own_s[i] for i in known), strict=True)):
            found[numbers, stage] = np.interp(numbers, known, seconds)
    return found


def answer_times_s(answered: Sequence[int], own_s: np.ndarray) -> list[float]:
    """When each sweep has come through the last stage, in seconds.

    A stage takes up a sweep when it is done with the one before, and the stage before with this one; the first stage also waits for
    tokens.

    Args:
        answered: For each sweep, how many have come through before it begins, as it needs their tokens.
        own_s: Seconds of each sweep in every stage [sweeps, stages].
    """
    ends_s = [0.0] * own_s.shape[1]
    found: list[float] = []
    for known, seconds in zip(answered, own_s.tolist(), strict=True):
        ready_s = found[known - 1] if known else 0.0
        for stage, of_stage in enumerate(seconds):
            ready_s = ends_s[stage] = max(ends_s[stage], ready_s) + of_stage
        found.append(ready_s)
    return found
