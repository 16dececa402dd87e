"""Which formats a plan may have its weights in: as they were found, or expanded to the compute dtype.

Both are the same numbers but for rounding. Few rows in flight are faster with packed weights, of which less is read; with many,
unpacking takes longer than it saves. So where both have measured rates, both are planned, and the faster one is taken. A job that has
finished rows keeps to the format of these, where it can: in 16 bits both do not round alike.
"""

from __future__ import annotations

from dataclasses import replace

from batchgen.core.dtypes import DEQUANTIZED, product_key, weight_format_of
from batchgen.core.hardware import HardwareProfile
from batchgen.core.plan import OtherWeights, Plan
from batchgen.engine.loader import store_bytes
from batchgen.job.resolved import ResolvedJob
from batchgen.models.layouts import main_format
from batchgen.planner.search import TIE


def expanded_fit(job: ResolvedJob, memory_bytes: int) -> bool:
    """Whether expanded weights have room in so much memory, so that they are worth planning for."""
    return store_bytes(job.process_config, job.dtype, DEQUANTIZED) <= memory_bytes


def quantizations_planned(job: ResolvedJob, hardware: HardwareProfile, memory_bytes: int) -> tuple[str, ...]:
    """Quantizations that a plan is made for: as found, and where there is room expanded.

    Args:
        job: The job.
        hardware: Its machine.
        memory_bytes: What it may take of all memories together.

    Returns:
        None of them where the choice is not the plan's: what `loader.choose_weights` gives stands, also where rates are not known.
    """
    if not job.planned_formats:
        return ()
    as_found = job.planned_formats[0]
    key = product_key(main_format(job.process_config, as_found), job.dtype)
    if not hardware.compute.has_rates("gemm_flops_per_s", key):
        return ()
    return job.planned_formats if expanded_fit(job, memory_bytes) else (as_found,)


def in_format_of_rows(job: ResolvedJob, weight_format: str) -> ResolvedJob | None:
    """The job with weights in the format that its finished rows were made with, and in no other.

    Returns:
        None where it cannot have that: another one is asked for, or expanded weights have no room in memory.
    """
    if job.as_found is None:
        return None
    formats = {weight_format_of(job.dtype, name): name for name in (job.as_found, DEQUANTIZED)}
    weights = formats.get(weight_format)
    if weights is None or (weights == DEQUANTIZED and not expanded_fit(job, _memory_bytes(job))):
        return None
    return replace(job, options=replace(job.options, weights=weights), as_found=None)


def _memory_bytes(job: ResolvedJob) -> int:
    """Of all memories together, for one process."""
    return job.budgets["cpu"] + job.budgets.get("gpu", 0)


def faster(plans: list[Plan]) -> Plan:
    """Of plans for weights as found and for expanded ones, in this order, the faster; it says what the other one would take."""
    found, expanded = plans
    times = [plan.prediction.total_s for plan in plans]
    # Of equal times that of weights as they were found, which take less memory.
    best, other = (expanded, found) if times[1] * TIE < times[0] else (found, expanded)
    return replace(best, other_weights=OtherWeights(other.policy.weight_format, other.prediction.total_s))


def without_room(plan: Plan, weight_format: str) -> Plan:
    """A plan beside which there is none for weights in the other format."""
    return replace(plan, other_weights=OtherWeights(weight_format, None))
