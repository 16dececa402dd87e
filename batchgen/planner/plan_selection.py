"""Plan selection: the plan is the candidate that the simulator finds fastest.

The cost model takes lanes to overlap as far as their Steps allow on average. The simulator has the real scheduler and
the real Steps, so it knows what waits for what, and it decides.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from dataclasses import dataclass, replace

from batchgen.core.errors import InputError
from batchgen.core.plan import Plan
from batchgen.planner.bound import LowerBounds
from batchgen.planner.costs import moved_bytes
from batchgen.planner.drafts import with_drafts
from batchgen.planner.format_search import in_best_formats
from batchgen.planner.linear import number
from batchgen.planner.prediction import plan_of
from batchgen.planner.problem import CostInputs, Problem
from batchgen.planner.sampled_simulation import simulate_sampled
from batchgen.planner.search import TIE, Candidate, block_latency_s, candidates, first_rows_s
from batchgen.planner.strategies import added_candidates
from batchgen.planner.sweep_times import with_sweep_times

# The most kinds of plans that are looked at; most are pruned early, as not even the cost model has them faster than the
# best one.
_MOST_KINDS = 6
# Kinds of a coarse problem.
_MOST_COARSE_KINDS = 3
# The cost model may be slower by this factor than the simulator, which has whole sweeps where it has averages.
_MODEL_ABOVE = 1.05
# With several micro-batches sweeps take longer than the cost model says, in each order by a factor of its own. It is at
# least that of the candidates simulated so far, over this.
_NEARER_TO_MODEL = 1.2
# Where simulated blocks take too long, the cost model is asked for blocks shorter by at least this factor.
_LEAST_SHORTENING = 1.05


@dataclass(frozen=True)
class Simulated:
    """A candidate that was simulated.

    Attributes:
        candidate: The candidate.
        seconds: Simulated seconds of its sweeps.
        settled: Whether a longer simulation would say no more.
    """

    candidate: Candidate
    seconds: float
    settled: bool = True

    @property
    def job_s(self) -> float:
        """Seconds of the job, from where weights begin to load."""
        return self.candidate.startup_s + self.seconds

    @property
    def first_rows_s(self) -> float:
        """Seconds until the first rows are finished, from where weights begin to load."""
        return self.candidate.startup_s + first_rows_s(self.candidate) * self.slower

    @property
    def slower(self) -> float:
        """Simulated over modelled time."""
        return self.seconds / self.candidate.seconds


def plan_problem(problem: Problem) -> Plan:
    """The plan that the simulator finds fastest among the best candidates of the search, in the best of its formats.

    Raises:
        InputError: No plan fits the budgets and the latency.
    """
    problem = in_best_formats(problem)
    limited, shortest_s = problem, math.inf
    while True:
        try:
            simulated = simulate_candidates(limited)
        except InputError as error:
            if limited is not problem:
                raise InputError(
                    f"no plan has a block latency of {problem.max_block_latency_s:g} s: the shortest simulated is"
                    f" {shortest_s:.3g} s, give --max-block-latency at least that"
                ) from error
            raise
        chosen = choose(simulated, problem.max_block_latency_s)
        if chosen is not None:
            plan = plan_of(problem, chosen.candidate, chosen.seconds)
            return with_sweep_times(plan, chosen.candidate, chosen.seconds)
        # Blocks take longer than the cost model says: it is asked for shorter ones.
        assert limited.max_block_latency_s is not None
        shortest_s = min(shortest_s, *(block_latency_s(s.candidate) * s.slower for s in simulated))
        shortening = max(_LEAST_SHORTENING, simulated[0].slower)
        limited = replace(limited, max_block_latency_s=limited.max_block_latency_s / shortening)


def simulate_candidates(problem: Problem) -> list[Simulated]:
    """Simulate the candidates that may be the fastest, the cost model's fastest first.

    A candidate whose memory plan does not hold it is left out. Where none is left, the cost model's fastest stands with
    its modelled time, and its job will say what is short. A coarse problem has few candidates, which are not simulated
    for longer.

    Raises:
        InputError: No plan fits.
    """
    simulated: list[Simulated] = []

    def prune(seconds: float) -> bool:
        return bool(simulated) and seconds > _MODEL_ABOVE * TIE * most_gain * min(s.job_s for s in simulated)

    def prune_order(inputs: CostInputs, order: str, seconds: float, startup_s: float) -> bool:
        return _is_slower(inputs, order, seconds, startup_s, simulated)

    most_gain = 1.0  # by drafts, which the search leaves out
    fastest: Candidate | None = None
    most, bounds = _MOST_COARSE_KINDS if problem.coarse else _MOST_KINDS, LowerBounds()
    searched = candidates(problem, most, prune, prune_order, bounds)
    added = () if problem.coarse else added_candidates(problem, prune, bounds)
    for candidate in itertools.chain(searched, added):
        without_drafts_s = candidate.job_s
        candidate = with_drafts(candidate)
        most_gain = max(most_gain, without_drafts_s / candidate.job_s)
        fastest = fastest or candidate
        inputs = candidate.inputs
        if prune_order(inputs, inputs.batch_order, candidate.seconds, candidate.startup_s):
            continue
        with contextlib.suppress(InputError):
            run = simulate_sampled(plan_of(problem, candidate), candidate)
            simulated.append(Simulated(candidate, run.seconds, run.settled))
    assert fastest is not None  # or it would have been an InputError
    settled = simulated if problem.coarse else _settled(problem, simulated)
    return settled or [Simulated(fastest, fastest.seconds)]


def _settled(problem: Problem, simulated: list[Simulated]) -> list[Simulated]:
    """The simulated candidates, where those that tie for the fastest are from longer simulations."""
    while True:
        limit_s = TIE * min((s.job_s for s in simulated), default=0.0)
        tied = [s for s in simulated if not s.settled and s.job_s <= limit_s]
        if not tied:
            return simulated
        first = min(tied, key=lambda s: s.job_s)
        run = simulate_sampled(plan_of(problem, first.candidate), first.candidate, longer=True)
        simulated = [Simulated(s.candidate, run.seconds) if s is first else s for s in simulated]


def _is_slower(inputs: CostInputs, order: str, seconds: float, startup_s: float, simulated: list[Simulated]) -> bool:
    """True if a candidate would have to be much nearer to the cost model than others of its order to be the fastest.

    A candidate of several micro-batches is no nearer to it than one of the same sweeps in fewer parts.

    Args:
        inputs: The candidate's inputs.
        order: The order of its micro-batches.
        seconds: Seconds of its sweeps by the cost model, or a lower bound on them.
        startup_s: Seconds of its start-up.
        simulated: The candidates simulated so far.
    """
    known = [(s.candidate.inputs, s.slower) for s in simulated if s.candidate.inputs.num_gpu_batches > 1]
    alike = [(other, slower) for other, slower in known if other.batch_order == order]
    if inputs.num_gpu_batches == 1 or not alike:
        return False
    least = [1.0, min(slower for _, slower in alike) / _NEARER_TO_MODEL]
    least += [
        slower
        for other, slower in alike
        if other.num_gpu_batches < inputs.num_gpu_batches
        and other.max_num_batched_tokens == inputs.max_num_batched_tokens
    ]
    return startup_s + seconds * max(least) > TIE * min(s.job_s for s in simulated)


def choose(simulated: list[Simulated], max_block_latency_s: float | None = None) -> Simulated | None:
    """The fastest candidate, but of those within 2 % of it the one that finishes its first rows earliest.

    Where first rows are finished equally early, to a tenth, it is the one with fewer micro-batches, less movement and
    shorter sweeps. None where all exceed the latency.
    """
    limit_s = max_block_latency_s or float("inf")
    allowed = [s for s in simulated if block_latency_s(s.candidate) * s.slower <= limit_s]
    if not allowed:
        return None
    fastest_s = min(s.job_s for s in allowed)
    tied = [s for s in allowed if s.job_s <= fastest_s * TIE]
    earliest_s = min(s.first_rows_s for s in tied)

    def preference(s: Simulated) -> tuple[float, ...]:
        inputs = s.candidate.inputs
        late = int(s.first_rows_s > 1.1 * earliest_s)
        first_s = s.first_rows_s if late else 0.0
        moved = _moved_bytes(s.candidate)
        return late, first_s, inputs.num_gpu_batches, moved, inputs.max_num_batched_tokens, s.job_s

    return min(tied, key=preference)


def _moved_bytes(candidate: Candidate) -> float:
    """Bytes over all links in the whole job."""
    s, at = candidate.inputs, candidate.counts.placement(candidate.inputs)
    return s.model.num_layers * sum(
        phase.sweeps * sum(map(number, moved_bytes(s, phase, at).values())) for phase in candidate.phases
    )
