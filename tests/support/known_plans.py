"""Plans that are made once in a process: jobs of tests ask for the plan of nearly the same problem again and again.

What differs from job to job is the time since the command began, which adds to predicted times and decides nothing,
and the memory that is free and that the process takes, which decide nothing where there is plenty.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import TypeVar

from batchgen.core.errors import InputError
from batchgen.core.plan import Plan
from batchgen.planner import other_quality as quality
from batchgen.planner import plan_selection, strategy_times
from batchgen.planner.problem import Problem

Made = TypeVar("Made")

# Memory is plenty from so many bytes on, for models that take a small part of it.
_PLENTY_BYTES, _PARTS = 1 << 32, 16
_PROCESS_STEP_BYTES = 1 << 30


def made_once(make: Callable[..., Made]) -> Callable[..., Made]:
    """The function, called once for arguments that are written alike; what it makes is each time another object."""
    known: dict[str, bytes] = {}

    @wraps(make)
    def known_or_made(*arguments: object) -> Made:
        key = repr(arguments)
        if key not in known:
            try:
                made: Made | InputError = make(*arguments)
            except InputError as error:
                made = error
            known[key] = pickle.dumps(made)
        made = pickle.loads(known[key])
        if isinstance(made, InputError):
            raise made
        return made

    return known_or_made


other_quality = made_once(quality.other_quality)
plan_problem = made_once(plan_selection.plan_problem)
with_strategies = made_once(strategy_times.with_strategies)


def plan_of_job(problem: Problem) -> Plan:
    """The plan of a job's problem, made from that of a problem which is nearly the same.

    Raises:
        InputError: The problem has none.
    """
    alike = replace(_with_round_memory(problem), startup_s=0.0)
    return _for_job(plan_problem(alike), alike, problem)


def _with_round_memory(problem: Problem) -> Problem:
    """The problem with round sizes of memory, of which there is at least as much; as it is where that may decide."""
    hardware, budgets = problem.hardware, problem.budgets
    model_bytes = 4 * problem.model.held_params
    if budgets["cpu"] < max(_PLENTY_BYTES, _PARTS * model_bytes) or budgets["cpu"] > hardware.cpu_memory_bytes:
        return problem
    return replace(
        problem,
        hardware=replace(
            hardware,
            cpu_memory_bytes=_rounded_down(hardware.cpu_memory_bytes),
            disk_bytes=_rounded_down(hardware.disk_bytes),
        ),
        budgets={tier: size if tier == "gpu" else _rounded_down(size) for tier, size in budgets.items()},
        process_bytes=-(-problem.process_bytes // _PROCESS_STEP_BYTES) * _PROCESS_STEP_BYTES,
    )


def _rounded_down(size: int) -> int:
    """The largest power of two up to a size in bytes, where that is plenty; otherwise the size."""
    return 1 << size.bit_length() - 1 if size >= _PLENTY_BYTES else size


def _for_job(plan: Plan, alike: Problem, problem: Problem) -> Plan:
    """The plan of a problem which differs from the job's in start-up and memory, with those of the job."""
    predicted, later_s = plan.prediction, problem.startup_s - alike.startup_s
    total_s = predicted.total_s + later_s
    on_host = {**predicted.memory_bytes["cpu"], "process": float(problem.process_bytes)}
    return replace(
        plan,
        budgets={tier: size + problem.budgets[tier] - alike.budgets[tier] for tier, size in plan.budgets.items()},
        prediction=replace(
            predicted,
            total_s=total_s,
            low_s=predicted.low_s + later_s,
            high_s=predicted.high_s + later_s,
            startup_s=predicted.startup_s + later_s,
            generated_tokens_per_s=predicted.generated_tokens_per_s * predicted.total_s / total_s,
            total_tokens_per_s=predicted.total_tokens_per_s * predicted.total_s / total_s,
            memory_bytes={**predicted.memory_bytes, "cpu": on_host},
        ),
    )
