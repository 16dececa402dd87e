"""A job over the stages of a pipeline, simulated: the real scheduler, and the Steps of every stage in lanes of its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from batchgen.core.hardware import HardwareProfile
from batchgen.core.plan import Plan, Policy
from batchgen.job.simulation import SimulatedJob
from batchgen.job.step_costs import BatchLoad, StepCosts, streams_of
from batchgen.models.config import ModelConfig
from batchgen.planner.ranks import GLOO, Link
from batchgen.runtime.steps.graph import Step, Sweeps
from batchgen.runtime.steps.simulator import OnStep, Simulator

# Steps that are simulated before the rest of the job is taken to go on like that.
_MOST_STEPS = 30_000
_LAYER_STEPS = 6  # of one micro-batch in one layer, about

StageLayers = tuple[int, int, Policy]  # first, stop, how these layers are run


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
            if step.kind == "send":
                return self._link.send_s(loads[step.batch].tokens * self._hidden_bytes)
            if step.kind != "receive":
                return seconds(step)
            start_s = max(self.lanes.now_s, self._received_s)  # the lane is busy while it waits
            self._received_s = max(start_s, arrivals_s[step.batch])
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
    link: Link = GLOO,
) -> float:
    """Simulate a job over stages.

    Args:
        plan: Of the largest stage; its policy says how rows are scheduled.
        config: The whole model's.
        hardware: Of each stage.
        stages: What each has.
        on_step: Called for every Step, with the number of its stage, its start and its end.
        link: From one stage to the next.

    Returns:
        Seconds of all sweeps.

    Raises:
        InputError: The budgets of the plan do not hold what it places.
    """
    largest = max(stop - first for first, stop, _ in stages)
    job = SimulatedJob(plan, config.first_layers(largest), sweeps_in_flight=len(stages))
    noting: list[OnStep | None] = [None] * len(stages)
    if on_step is not None:
        noting = [lambda *step, i=i: on_step(i, *step) for i in range(len(stages))]
    lanes = [_SimulatedStage(plan, config, hardware, own, link, note) for own, note in zip(stages, noting, strict=True)]
    first, answers = lanes[0], deque[float]()  # of sweeps under way: when the tokens are back
    done = [(0.0, 0)]  # after each sweep: seconds, tokens
    left = _MOST_STEPS

    def take_answers() -> None:
        first.lanes.spend(max(0.0, answers.popleft() - first.lanes.now_s))
        job.take_answers()

    while left > 0:
        if len(answers) == len(stages):
            take_answers()
        sweep = job.next_sweep()
        if sweep is None:
            break
        if not sweep.loads:  # all sequences are on their way
            take_answers()
            continue
        first.lanes.spend(first.costs.between_s(sweep.loads))
        arrivals_s = [0.0] * len(sweep.loads)
        for stage in lanes:
            arrivals_s = stage.run(sweep.loads, arrivals_s)
            left -= _LAYER_STEPS * stage.config.num_layers * len(sweep.loads)
        answers.append(lanes[-1].lanes.now_s)
        done.append((answers[-1], done[-1][1] + sum(load.tokens for load in sweep.loads)))
    (half_s, half), (total_s, tokens) = done[len(done) // 2], done[-1]
    if job.has_work:  # the rest as the second half of what was simulated
        workload = plan.workload
        of_job = workload.num_seqs * (workload.computed_prompt_len + workload.output_len.mean - 1)
        total_s += max(0.0, of_job - tokens) * (total_s - half_s) / max(1, tokens - half)
    return total_s
