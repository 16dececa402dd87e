"""Prices after re-planning: the time of the plan that is made for a little more of a resource.

A dual holds at one block size and placement. With more memory another block size may be the best.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from batchgen.core.dtypes import STATE_DTYPES
from batchgen.core.plan import Plan, Prediction
from batchgen.core.units import GIB
from batchgen.planner.explanation import Resource, prices_of
from batchgen.planner.problem import Problem

# Names of `HardwareProfile.scaled` that make a lane faster.
_RATES = {
    "compute": (
        "gemm",
        "prefill_attention",
        "shared_attention",
        "decode_attention",
        "state_update",
        "state_prefill",
        "elementwise",
        "expand",
    ),
    "cpu_attention": ("cpu_decode_attention",),
    "h2d": ("h2d_bytes_per_s",),
    "d2h": ("d2h_bytes_per_s",),
    "disk_read": ("disk_read_bytes_per_s",),
    "disk_write": ("disk_write_bytes_per_s",),
    "disk": ("disk_read_bytes_per_s", "disk_write_bytes_per_s"),
    "dram": ("dram_bytes_per_s",),
}
_MEMORY = {"gpu": "gpu_memory_bytes", "cpu": "cpu_memory_bytes", "disk": "disk_bytes"}
# As many are looked for as a person waits for, and none of which a plan would not show.
_MOST, _WORTH = 2, 0.01


def replanned_s(
    problem: Problem, prediction: Prediction, planned_s: Callable[[Problem], float]
) -> Mapping[Resource, float]:
    """Seconds that the job saves with 10 % more of a lane, or 1 GiB more of a tier, if the job is re-planned.

    Of the two with the highest prices, as far as these are a hundredth of the time.

    Args:
        problem: The problem that was planned.
        prediction: The plan's, with its prices.
        planned_s: Plans a problem, and gives the job's seconds.
    """
    prices = prices_of(prediction)
    known = [r for r in prices if (r.is_tier or r.name in _RATES) and prices[r] > _WORTH * prediction.total_s]
    highest = sorted(known, key=lambda resource: (-prices[resource], resource))[:_MOST]
    return {resource: max(0.0, prediction.total_s - planned_s(with_more(problem, resource))) for resource in highest}


def smaller_states_s(problem: Problem, plan: Plan, planned_s: Callable[[Problem], float]) -> float | None:
    """Seconds that the job saves if it is re-planned with recurrent states in 16 bits; None: it has none in fp32.

    Args:
        problem: The problem that was planned.
        plan: Its plan.
        planned_s: Plans a problem, and gives the job's seconds.
    """
    state = problem.model.state
    if state is None or not state.matrix_shape[0] or plan.policy.state_dtype != STATE_DTYPES[0]:
        return None
    return max(0.0, plan.prediction.total_s - planned_s(replace(problem, state_dtype=STATE_DTYPES[-1])))


def with_more(problem: Problem, resource: Resource) -> Problem:
    """The problem on a machine with 10 % more of a lane's rate, or 1 GiB more of a tier."""
    hardware, name = problem.hardware, resource.name
    if not resource.is_tier:
        rates = _there(problem, _RATES[name])
        return replace(problem, hardware=hardware.scaled(**dict.fromkeys(rates, 1.1)))
    size = getattr(hardware, _MEMORY[name]) + GIB
    budgets = {**problem.budgets, name: problem.budgets[name] + GIB}
    larger = {_MEMORY[name]: size}
    return replace(problem, hardware=replace(hardware, **larger), budgets=budgets)


def _there(problem: Problem, rates: Iterable[str]) -> list[str]:
    """Without dequantizing, where the machine does none."""
    return [name for name in rates if name != "expand" or problem.hardware.compute.expand_bytes_per_s is not None]
