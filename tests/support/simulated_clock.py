"""A job on the real scheduler with a simulated clock, whose time left is asked for on the way."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from batchgen.core.plan import Plan
from batchgen.engine.in_flight import InFlight
from batchgen.job.eta import Estimator, Expected
from batchgen.job.time_left import Seen
from batchgen.planner.simulation import SimulatedJob
from batchgen.planner.step_costs import StepCosts, streams_of
from batchgen.planner.step_simulator import Simulator
from batchgen.schedule.deferred_batches import DeferredBatches
from batchgen.schedule.sweeps import Sweeps


@dataclass(frozen=True)
class Told:
    """What was told when a part of the job's time had passed, and what was true: seconds left of the job."""

    frac: float
    told_s: float
    left_s: float
    is_bound: bool

    @property
    def error(self) -> float:
        return abs(self.told_s / self.left_s - 1)


class CountedJob(SimulatedJob):
    """A simulated job that counts what an engine counts, and gives its sequences."""

    def __init__(self, *args, on_end, **more):
        super().__init__(*args, **more)
        self.seen, self._on_end = Seen(), on_end

    def _sample(self, sampled):
        begun = [s for s in sampled if s.num_generated == 0]
        generated = sum(s.num_generated for s in sampled)
        self.seen = replace(
            self.seen,
            prompt_tokens=self.seen.prompt_tokens + sum(s.num_prompt for s in begun),
            cached_tokens=self.seen.cached_tokens + sum(s.num_cached for s in begun),
        )
        super()._sample(sampled)
        for sequence in sampled:
            if sequence not in self._output_len:
                self._on_end(sequence.num_generated, sequence.sampling.max_tokens)
        more = sum(s.num_generated for s in sampled) - generated - len(sampled)
        self.seen = replace(self.seen, rows=self.num_done, more_gained=self.seen.more_gained + more)

    def _commit(self, sweep):
        self.seen = counted(self.seen, sweep)
        super()._commit(sweep)

    def in_flight(self) -> InFlight:
        return InFlight.of(self._scheduler)


def counted(seen: Seen, sweep) -> Seen:
    """The counts with those of a sweep that is about to run."""
    decode = [s for s in sweep if s.sequence.num_computed >= s.sequence.num_prompt and (s.decodes or s.samples)]
    prompts = [s for s in sweep if s not in decode]
    return replace(
        seen,
        prefilled=seen.prefilled + sum(s.num_tokens for s in prompts),
        prefill_keys=seen.prefill_keys + sum(s.prefill_keys for s in prompts),
        decoded=seen.decoded + len(decode),
        decode_keys=seen.decode_keys + sum(s.sequence.num_computed + 1 for s in decode),
    )


def replay(plan: Plan, config, hardware, expected: Expected, rows, *, slower=lambda tokens: 1.0, noise=0.0, parts=10):
    """What is told after each tenth of the job's time.

    Args:
        plan: The plan that is run.
        config: The model's configuration.
        hardware: The machine.
        expected: What the estimator is told beforehand; its plan may be another one.
        rows: (prompt tokens, generated tokens) of each row.
        slower: From a sweep's tokens to how much slower it is than the profile of the machine says.
        noise: Greatest relative deviation of a sweep's time.
        parts: Number of parts of the job's time.
    """
    ends_s = list(_sweeps(plan, config, hardware, rows, slower, noise, None))
    total_s, told, marks = ends_s[-1], [], [i / parts for i in range(1, parts)]
    estimator = None

    def ended(tokens, limit):
        estimator.ended(tokens, cut=tokens >= limit)

    job = CountedJob(plan, config, rows=iter(rows), on_end=ended)
    estimator = Estimator(expected, job.in_flight)
    before_s = 0.0
    for now_s in _sweeps(plan, config, hardware, rows, slower, noise, job):
        estimator.after_sweep(now_s - before_s, job.seen)
        before_s = now_s
        while marks and now_s >= marks[0] * total_s and now_s < total_s:
            left = estimator.time_left()
            told.append(Told(marks.pop(0), left.seconds, total_s - now_s, left.is_bound))
    return told


def _sweeps(plan, config, hardware, rows, slower, noise, job):
    """Yield the time at the end of each sweep, in seconds."""
    job = job or CountedJob(plan, config, rows=iter(rows), on_end=lambda tokens, limit: None)
    draw = random.Random(5)
    costs, sweeps = StepCosts(plan, config, hardware), Sweeps(streams_of(plan, config))
    simulator = Simulator(shared_cores=hardware.shared_cores, issue_s=hardware.issue_overhead_s)
    deferred, now_s, before_s = DeferredBatches(), 0.0, 0.0
    while sweep := job.next_sweep():
        loads = sweep.loads
        simulator.spend(costs.between_s(loads))
        tokens = sum(load.tokens for load in loads)
        steps = sweeps.steps([load.flow for load in loads], deferred, simulator.has_ended, tokens)
        simulator.run(steps, costs.sweep(loads))
        job.end_sweep(deferred)
        now_s += (simulator.now_s - before_s) * slower(tokens) * draw.uniform(1 - noise, 1 + noise)
        before_s = simulator.now_s
        yield now_s
