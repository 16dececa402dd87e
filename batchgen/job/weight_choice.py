"""Which formats a plan may have its weights in: as they were found, or expanded to the compute dtype.

Both are the same numbers but for rounding. Few rows in flight are faster with packed weights, of which less is read; with many,
unpacking takes longer than it saves. So where both have measured rates, both are planned, and the faster one is taken.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from batchgen.core.dtypes import EXPANDED, product_key, weight_format_of
from batchgen.core.hardware import HardwareProfile
from batchgen.core.plan import OtherWeights, Plan
from batchgen.engine.loader import store_bytes
from batchgen.job.resolved import ResolvedJob
from batchgen.models.layouts import main_format

if TYPE_CHECKING:
    from batchgen.job.planning import PlanRequest

# Times this close are equal: then weights stay as they were found, which takes less memory.
_TIE = 1.02


def expanded_fit(job: ResolvedJob, memory_bytes: int) -> bool:
    """Whether expanded weights have room in so much memory, so that they are worth planning for."""
    return store_bytes(job.process_config, job.dtype, EXPANDED) <= memory_bytes


def requests_by_format(job: ResolvedJob, hardware: HardwareProfile, request: PlanRequest) -> list[PlanRequest]:
    """What is to be planned: the request, or one for weights as found, and where there is room one for expanded ones.

    Args:
        job: The job.
        hardware: Its machine.
        request: With the quantization that `loader.choose_quantization` gives, which stands where rates are not known.
    """
    if job.as_found is None:
        return [request]
    key = product_key(main_format(job.process_config, job.as_found), job.dtype)
    if not hardware.compute.has_rates("gemm_flops_per_s", key):
        return [request]
    host = hardware.cpu_memory_bytes // request.of_host if request.cpu_memory is None else request.cpu_memory
    device = hardware.gpu_memory_bytes or 0 if request.gpu_memory is None else request.gpu_memory
    formats = (job.as_found, EXPANDED) if expanded_fit(job, host + device) else (job.as_found,)
    return [in_format(request, name) for name in formats]


def in_format(request: PlanRequest, quantization: str) -> PlanRequest:
    """The request with another quantization."""
    written = request.stores_bytes.get(quantization, request.store_bytes)
    return replace(request, quantization=quantization, store_bytes=written)


def faster(plans: list[Plan]) -> Plan:
    """Of plans for weights as found and for expanded ones, in this order, the faster; it says what the other one would take."""
    found, expanded = plans
    times = [plan.prediction.total_s for plan in plans]
    best, other = (expanded, found) if times[1] * _TIE < times[0] else (found, expanded)
    return replace(best, other_weights=OtherWeights(other.policy.weight_format, other.prediction.total_s))


def without_room(plan: Plan, request: PlanRequest) -> Plan:
    """A plan beside which there is none for weights as the other request has them."""
    return replace(plan, other_weights=OtherWeights(weight_format_of(request.dtype, request.quantization), None))
