"""The plan of a candidate, with the seconds before its first sweep."""

from __future__ import annotations

from batchgen.core.plan import Plan
from batchgen.planner.explain import make_plan
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
    s = candidate.inputs
    before_s = problem.startup_s + number(startup_s(s, candidate.counts.placement(s)))
    return make_plan(problem, candidate, startup_s=before_s, simulated_s=simulated_s)
