"""The plan of a candidate, with the seconds before its first sweep."""

from __future__ import annotations

from dataclasses import replace

from batchgen.core.plan import Plan
from batchgen.planner.explain import make_plan
from batchgen.planner.lane_costs import lane_costs
from batchgen.planner.linear import number
from batchgen.planner.problem import Problem
from batchgen.planner.search import Candidate
from batchgen.planner.startup import startup_s


def plan_of(problem: Problem, candidate: Candidate, simulated_s: float | None = None) -> Plan:
    """A candidate as a plan.

    Args:
        problem: The problem that the candidate solves.
        candidate: The candidate.
        simulated_s: Simulated seconds of all sweeps; None: the cost model's.
    """
    s, at = candidate.inputs, candidate.counts.placement(candidate.inputs)
    before_s = problem.startup_s + number(startup_s(s, at))
    plan = make_plan(problem, candidate, startup_s=before_s, simulated_s=simulated_s)
    if simulated_s is None:  # to be compared with others, not to be run
        return plan
    return replace(plan, prediction=replace(plan.prediction, lane_costs=lane_costs(s, at)))
