"""The format of a model's weights with `--weights auto`: the model's own packed format, or the compute dtype.

Packed and dequantized weights hold the same numbers but for rounding. GEMMs with packed weights read fewer bytes, so
they are faster with few tokens. With many tokens, unpacking may take longer than that saves. So the measured rates of
GEMMs decide; and dequantized weights must fit the memory. A job that has finished rows keeps the format of those rows
if it can, as the two formats round differently in 16 bits.
"""

from __future__ import annotations

from dataclasses import replace

from batchgen.core.dtypes import DEQUANTIZED, MIXED, matmul_key, weight_format_of
from batchgen.core.hardware import HardwareProfile
from batchgen.core.units import format_bytes, format_seconds
from batchgen.core.workload import Workload
from batchgen.job.job import Job
from batchgen.models.layouts import main_format
from batchgen.planner.search import TIE
from batchgen.planner.sizes import store_bytes

# Tokens of a sweep that has prompts, and the most sequences of one that has none, for comparing rates of products.
_PROMPT_TOKENS, _MOST_SEQS = 1024, 256


def with_faster_weights(job: Job, hardware: HardwareProfile, workload: Workload) -> Job:
    """The job with its weights in the format whose GEMMs take less time, if memory holds it; with the reason.

    Args:
        job: The job. It is returned unchanged where its options give the format, or where the machine's rates of GEMMs
            with weights in the model's own format are not known; on a CUDA GPU weights are dequantized then.
        hardware: The profile of one process's part of the machine.
        workload: The job's rows.
    """
    if job.open_format is None:
        return job
    config, rates = job.process_config, hardware.compute
    key = matmul_key(main_format(config, job.open_format), job.dtype)
    if not rates.has_rates("gemm_flops_per_s", key):
        return job if job.device.kind != "cuda" else _in_format(job, DEQUANTIZED, "")
    native = job.open_format if job.open_format != MIXED else "the formats of the file"
    if not dequantized_fit(job, _memory_bytes(job, hardware)):
        size = format_bytes(store_bytes(config, job.dtype, DEQUANTIZED))
        reason = f"Weights stay in {native}: dequantized to {job.dtype} they take {size}."
        return _in_format(job, job.open_format, reason)
    native_s, dequantized_s = (_products_s(job, hardware, workload, name) for name in (key, job.dtype))
    times = format_seconds(native_s), format_seconds(dequantized_s)
    if dequantized_s * TIE < native_s:
        reason = f"Weights are dequantized to {job.dtype}: matrix products take {times[1]}, and {times[0]} in {native}."
        return _in_format(job, DEQUANTIZED, reason)
    reason = f"Weights stay in {native}: matrix products take {times[0]}, and {times[1]} dequantized to {job.dtype}."
    return _in_format(job, job.open_format, reason)


def in_format_of_rows(job: Job, weight_format: str) -> Job | None:
    """The job with weights in the format that computed its finished rows, and in no other.

    Args:
        job: The job.
        weight_format: The format of the weights that computed the finished rows.

    Returns:
        None where the job cannot have the format: its options give another one, or memory does not hold dequantized
            weights.
    """
    if job.native_format is None:
        return None
    formats = {weight_format_of(job.dtype, name): name for name in (job.native_format, DEQUANTIZED)}
    weights = formats.get(weight_format)
    if weights is None or (
        weights == DEQUANTIZED and not dequantized_fit(job, job.budgets["cpu"] + job.budgets.get("gpu", 0))
    ):
        return None
    return replace(_in_format(job, weights, ""), native_format=None)


def dequantized_fit(job: Job, memory_bytes: int) -> bool:
    """True where a memory holds the job's weights in the compute dtype. memory_bytes: bytes of the memory."""
    return store_bytes(job.process_config, job.dtype, DEQUANTIZED) <= memory_bytes


def _in_format(job: Job, weights: str, reason: str) -> Job:
    return replace(job, options=replace(job.options, weights=weights), weights_reason=reason)


def _memory_bytes(job: Job, hardware: HardwareProfile) -> int:
    """Bytes of GPU memory and host memory together that one process may use."""
    given = job.process_memory
    host = hardware.cpu_memory_bytes // job.of_host if given["cpu_memory"] is None else given["cpu_memory"]
    device = (hardware.gpu_memory_bytes or 0) if given["gpu_memory"] is None else given["gpu_memory"]
    return host + device


def _products_s(job: Job, hardware: HardwareProfile, workload: Workload, key: str) -> float:
    """Seconds of the layers' GEMMs for all tokens of a job, at the rates of one kind of GEMMs."""
    config, rates = job.process_config, hardware.compute.rates("gemm_flops_per_s", key)
    decoded = workload.num_seqs * workload.output_len.mean
    prompts = workload.num_seqs * workload.computed_prompt_len
    seconds = 0.0
    for tokens, of_sweep in ((prompts, _PROMPT_TOKENS), (decoded, min(workload.num_seqs, _MOST_SEQS))):
        rate = rates.at(width=config.hidden_size, tokens=float(of_sweep))
        seconds += 2 * config.matmul_params_per_layer * config.num_layers * tokens / rate
    return seconds
