"""Plans that are made once in a process: many tests ask for the plan of the same problem."""

from __future__ import annotations

import pickle

from batchgen.core.errors import InputError
from batchgen.core.plan import Plan
from batchgen.planner import plan_selection
from batchgen.planner.problem import Problem

_KNOWN: dict[bytes, bytes] = {}


def plan_problem(problem: Problem) -> Plan:
    """The plan that the planner makes of a problem, each time another object. Raises InputError if it has none."""
    key = pickle.dumps(problem)
    if key not in _KNOWN:
        try:
            plan: Plan | InputError = plan_selection.plan_problem(problem)
        except InputError as error:
            plan = error
        _KNOWN[key] = pickle.dumps(plan)
    plan = pickle.loads(_KNOWN[key])
    if isinstance(plan, InputError):
        raise plan
    return plan
