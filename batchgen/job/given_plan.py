"""`--plan FILE`: a plan from `batchgen plan -o` is read, and compared with the job that is to run by it."""

from __future__ import annotations

from typing import Any

from batchgen.core.dtypes import INT4, INT8, changes_results
from batchgen.core.errors import InputError, one_line
from batchgen.core.plan import Plan
from batchgen.core.quality import KV_LOSSES, WEIGHT_LOSSES, allowed
from batchgen.core.text_file import read_text
from batchgen.core.typed_json import parse_json
from batchgen.job.job import Job
from batchgen.models.files import stored_weights


def read_plan(path: str) -> Plan:
    """A plan that `batchgen plan -o` wrote. Raises InputError."""
    try:
        values: Any = parse_json(read_text(path))
    except OSError as error:
        raise InputError(f"--plan {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise InputError(f"--plan {path} is not valid JSON: {one_line(error)}") from error
    return Plan.from_json(values)


def runnable(plan: Plan, job: Job) -> Plan:
    """A given plan, after checks that it is for this job and this machine.

    Args:
        plan: The given plan.
        job: The job.

    Raises:
        InputError: The plan is for another model, dtype, context or device, or needs too much memory.
    """
    model, options = job.files.name, job.options
    if (plan.model, plan.dtype) != (model, job.dtype):
        raise InputError(
            f"--plan is for {plan.model} in {plan.dtype}, not {model} in {job.dtype}: make one for this job with "
            "`batchgen plan`"
        )
    policy = plan.policy
    if policy.max_model_len != job.context:
        raise InputError(
            f"--plan is for a context of {policy.max_model_len} tokens, not {job.context}: give --max-model-len"
            f" {policy.max_model_len}, or make another plan"
        )
    layers = {name: sum(counts) for name, counts in policy.weight_layers.items()}
    if layers != dict.fromkeys(job.config.layer_tensors, job.config.num_layers):
        raise InputError(
            f"--plan does not place the {job.config.num_layers} layers of this model: make another with `batchgen plan`"
        )
    on_gpu = "gpu" in plan.budgets
    if on_gpu != job.device.accelerated:
        raise InputError(
            "--plan is for a machine with a GPU: give --device cuda, or emulated:gpu-memory=..., or plan without "
            "--hardware"
            if on_gpu
            else f"--plan is for the CPU: leave out --device {job.device}, or make a plan for it"
        )
    kv_format = job.dtype if options.kv_cache_dtype == "auto" else options.kv_cache_dtype
    kv_formats = {kv_format, *allowed(job.open_kv, KV_LOSSES, options.quality)}
    formats = {job.weight_format, *allowed(job.open_weights, WEIGHT_LOSSES, options.quality)}
    # Packed and dequantized weights are the same numbers but for rounding; kernels for GPUs know the latter alone.
    if not changes_results(options.weights) and job.device.kind != "cuda":
        formats |= {job.dtype, stored_weights(job.files) or job.dtype} - {INT4, INT8}
    for flag, wanted, stored, planned in (
        ("--weights", options.weights, formats, policy.weight_format),
        ("--kv-cache-dtype", options.kv_cache_dtype, kv_formats, policy.kv_format),
        ("--state-dtype", options.state_dtype, {options.state_dtype}, policy.state_dtype),
        ("--attention-budget", options.attention_budget, {options.attention_budget}, policy.attention_budget),
    ):
        if planned not in stored:
            raise InputError(
                f"--plan has {planned} where {flag} is {wanted}: {flag} and --quality must be as in `batchgen plan`"
            )
    return plan
