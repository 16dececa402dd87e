"""The job's time under each strategy beside the plan, or why the strategy does not apply."""

from __future__ import annotations

import math
from dataclasses import replace

from batchgen.core.errors import InputError
from batchgen.core.plan import Plan, StrategyTime
from batchgen.core.units import format_seconds
from batchgen.planner.explain import aligned
from batchgen.planner.format_choice import described, formats_of, is_quantized
from batchgen.planner.format_search import in_formats
from batchgen.planner.other_quality import OtherQuality
from batchgen.planner.prediction import plan_of
from batchgen.planner.problem import Problem
from batchgen.planner.sampled_simulation import simulate_sampled
from batchgen.planner.strategies import NotApplicable, Strategy, best_candidates, strategies_for, strategy_of

# Formats go with each strategy. Name and description of the row of plans whose formats lose quality.
_QUANTIZED = "quantized", "weights or KV in fewer bits"


def best_plan(strategy: Strategy, problem: Problem) -> Plan:
    """Simulate the best candidates of a strategy, and return the plan whose job takes the least time.

    Args:
        strategy: The strategy.
        problem: The planner's problem.
        plan_of: Function of (candidate, seconds of all its sweeps) that makes it a plan; None for the seconds takes
            those of the cost model.

    Raises:
        NotApplicable: The strategy does not apply, or the blocks of all its plans take longer than --max-block-latency.
        InputError: Nothing fits the budgets.
    """
    plans = [
        plan_of(problem, candidate, simulate_sampled(plan_of(problem, candidate), candidate, longer=True).seconds)
        for candidate in best_candidates(strategy, problem)
    ]
    limit_s = problem.max_block_latency_s or math.inf
    in_time = [plan for plan in plans if plan.prediction.block_latency_s <= limit_s]
    if not in_time:
        raise NotApplicable("its blocks take longer than --max-block-latency")
    return min(in_time, key=lambda plan: plan.prediction.total_s)


def with_strategies(plan: Plan, problem: Problem, other: OtherQuality | None = None) -> Plan:
    """The plan with the time of each strategy beside its own; the strategy that it uses itself is not searched again.

    Args:
        plan: The plan that was chosen for the problem.
        problem: The planner's problem.
        other: Another quality with its plan; None: no other formats can be chosen.
    """
    problem = in_formats(problem, *formats_of(plan.policy))
    strategies = strategies_for(problem)
    used = strategy_of(plan.policy, strategies)
    times = []
    for strategy in strategies:
        seconds, reason = None, ""
        try:
            best = plan if strategy.name == used else best_plan(strategy, problem)
            seconds = best.prediction.total_s
        except (NotApplicable, InputError) as error:
            reason = str(error)
        times.append(StrategyTime(strategy.name, strategy.description, seconds, reason))
    chosen = StrategyTime("chosen", f'uses the strategy "{used}"', plan.prediction.total_s)
    return replace(plan, strategies=(*times, _quantized(plan, other), chosen))


def _quantized(plan: Plan, other: OtherQuality | None) -> StrategyTime:
    """The time of the fastest plan with quantized weights or KV, which is one of two."""
    quantized = [p for p in (plan, other and other.plan) if p and is_quantized(p.policy)]
    if not quantized:
        return StrategyTime(*_QUANTIZED, None, "is no faster" if other else "is not among what this plan may do")
    best = min(quantized, key=lambda p: p.prediction.total_s)
    return StrategyTime(_QUANTIZED[0], described(best.policy), best.prediction.total_s)


def strategy_rows(plan: Plan) -> list[list[str]]:
    """A row of cells for each strategy, after a header row."""
    rows = [["strategy", "time", ""]]
    for strategy in plan.strategies:
        time = "-" if strategy.seconds is None else format_seconds(strategy.seconds)
        described = f"{strategy.description}: {strategy.reason}" if strategy.reason else strategy.description
        rows.append([strategy.name, time, described])
    return rows


def strategy_lines(plan: Plan) -> list[str]:
    """Lines of text with the time of each strategy; none where the plan has no such times."""
    return aligned(strategy_rows(plan)) if plan.strategies else []
