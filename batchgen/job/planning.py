"""Planning of a job: its planning problem on this machine or another one, and the fastest plan that solves it."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

from batchgen.core.dtypes import INT4
from batchgen.core.errors import InputError
from batchgen.core.hardware import HardwareProfile
from batchgen.core.kv_placement import KVPlacement
from batchgen.core.plan import Plan
from batchgen.engine.loader import TYPICAL_PROCESS_BYTES, existing_store, process_bytes
from batchgen.engine.tensor_parallel import KV_PLACEMENTS
from batchgen.job.draft_rates import expected_drafts
from batchgen.job.given_plan import read_plan, runnable
from batchgen.job.job import Job
from batchgen.job.kernels import kernels_here
from batchgen.job.machine_profile import link_between, profile_here, slowdown_here
from batchgen.job.routing import known_routing
from batchgen.job.weight_choice import with_faster_weights
from batchgen.job.workload import EstimatedWorkload
from batchgen.models.mtp import mtp_bytes
from batchgen.planner.format_choice import with_quality
from batchgen.planner.format_search import in_best_formats
from batchgen.planner.other_quality import other_quality, quality_line
from batchgen.planner.pipeline import over_stages
from batchgen.planner.plan_selection import plan_problem
from batchgen.planner.problem import Loading, Problem, problem_of
from batchgen.planner.sizes import store_bytes
from batchgen.planner.startup import loading_s
from batchgen.planner.strategies import NotApplicable, strategies_for
from batchgen.planner.strategy_times import best_plan, with_strategies

# A run of so many seconds may take the time of planning to say what another quality would give.
_WORTH_S = 600.0
# Importing torch and the engine, where that is done after planning.
_IMPORT_S = 1.5


def make_plan(
    job: Job,
    estimate: Callable[[], EstimatedWorkload],
    *,
    started_s: float,
) -> Plan:
    """The plan by which a job is run: the plan that its options name, or else the fastest one for this machine.

    Args:
        job: The job.
        estimate: Function that returns the job's workload; called where the options name no plan.
        started_s: Time of time.monotonic at which the command started.

    Raises:
        InputError: The named plan is for another job or machine, or no plan fits.
    """
    if job.options.plan is not None:
        plan = runnable(read_plan(job.options.plan), job)
    else:
        plan = plan_job(*problem_here(job, estimate(), started_s=started_s), worth_s=_WORTH_S)
    return replace(plan, kernels=kernels_here(plan.kernels))


def make_plan_of_strategy(name: str, job: Job, estimated: EstimatedWorkload, *, started_s: float) -> Plan:
    """The fastest plan of one strategy for this machine.

    Args:
        name: Name of the strategy.
        job: The job.
        estimated: The job's workload.
        started_s: Time of time.monotonic at which the command started.

    Raises:
        InputError: The strategy is not known or does not apply, the options name a plan or a pipeline, or no plan fits.
    """
    for flag, given in (("--plan", job.options.plan is not None), ("--pipeline", job.options.pipeline > 1)):
        if given:
            raise InputError(f"--strategy makes a plan for one engine: leave out {flag}")
    _, problem = problem_here(job, estimated, started_s=started_s)
    strategies = {strategy.name: strategy for strategy in strategies_for(problem)}
    if name not in strategies:
        raise InputError(f"--strategy must be one of {', '.join(strategies)} on this device, not {name!r}")
    try:
        plan = best_plan(strategies[name], in_best_formats(problem))
    except NotApplicable as error:
        raise InputError(f"--strategy {name} does not apply: {error}") from error
    return replace(plan, kernels=kernels_here(plan.kernels))


def plan_job(job: Job, problem: Problem, *, compare_strategies: bool = False, worth_s: float = math.inf) -> Plan:
    """The fastest plan for a job; for a pipeline, the plan of its largest stage with the time of all stages.

    Args:
        job: The job.
        problem: The job's planning problem.
        compare_strategies: Whether the plan also has the job's time under each other strategy; not for a pipeline.
        worth_s: Seconds of the job from which on the plan says what another `--quality` would give; not for a pipeline.

    Raises:
        InputError: No plan fits.
    """
    plan = plan_problem(problem)
    if job.options.pipeline > 1:
        link = link_between(problem.hardware, job)
        plan = over_stages(plan, job.config, problem.hardware, job.options.pipeline, link)
    else:
        looks_further = compare_strategies or plan.prediction.total_s >= worth_s
        other = other_quality(plan, problem) if looks_further else None
        plan = replace(plan, quality_line=quality_line(plan, problem, other))
        if compare_strategies:
            plan = with_strategies(plan, problem, other)
    return replace(plan, weights_reason=job.weights_reason if plan.policy.weight_format == job.weight_format else "")


def problem_here(job: Job, estimated: EstimatedWorkload, *, started_s: float) -> tuple[Job, Problem]:
    """The planning problem of a job on this machine.

    Args:
        job: The job.
        estimated: The job's workload.
        started_s: Time of time.monotonic at which the command started.

    Returns:
        The job, with its weights in the faster format and its budgets as of now; and the problem.

    Raises:
        InputError: The machine cannot be measured, or does not have the job's device.
    """
    hardware, budgets = profile_here(job, estimated.workload), job.budgets
    # What was free when the job began may be taken by others since.
    cpu_memory = budgets["cpu"] if job.cpu_memory is not None else min(budgets["cpu"], hardware.cpu_memory_bytes)
    job = replace(job, gpu_memory=budgets.get("gpu"), cpu_memory=cpu_memory * job.of_host)
    job = with_faster_weights(job, hardware, estimated.workload)
    to_write = {name: _to_write_bytes(job, name) for name in _weight_formats(job)}
    return job, problem_of_job(
        job,
        hardware,
        estimated,
        startup_s=time.monotonic() - started_s + (0.0 if "torch" in sys.modules else _IMPORT_S * slowdown_here()),
        process_bytes=process_bytes(),  # which gives back what measuring took
        to_write_bytes=to_write,
    )


def _kv_placements(job: Job) -> tuple[KVPlacement, ...]:
    """The KV placements that a plan of the job may use."""
    options = job.options
    if options.tensor_parallel > 1 or options.pipeline > 1:
        return KV_PLACEMENTS
    return tuple(KVPlacement)


def problem_of_job(
    job: Job,
    hardware: HardwareProfile,
    estimated: EstimatedWorkload,
    *,
    startup_s: float,
    process_bytes: int = TYPICAL_PROCESS_BYTES,
    to_write_bytes: Mapping[str, int] = MappingProxyType({}),
) -> Problem:
    """The planning problem of a job on a machine that is given by its profile.

    Args:
        job: The job.
        hardware: The profile of one process's part of the machine.
        estimated: The job's workload.
        startup_s: Seconds from the start of the command until weights begin to load.
        process_bytes: Host memory of a process before it loads any part of the model.
        to_write_bytes: Weight format -> bytes of the weight store that must be written first; of others, the whole one.

    Raises:
        InputError: The job's budgets contradict the machine.
    """
    options, config, memory = job.options, job.process_config, job.process_memory
    loading = {
        name: Loading(
            loading_s(hardware, config, job.dtype, job.files.kind, name),
            to_write_bytes[name] if name in to_write_bytes else store_bytes(config, job.dtype, name),
        )
        for name in _weight_formats(job)
    }
    problem = problem_of(
        hardware,
        config,
        replace(estimated.workload, routing=known_routing(job.files, job.config), drafts=expected_drafts(job)),
        dtype=job.dtype,
        weights=options.weights,
        kv_cache_dtype=options.kv_cache_dtype,
        state_dtype=options.state_dtype,
        attention_budget=options.attention_budget,
        admission=None if options.admission == "auto" else options.admission,
        gpu_memory=memory["gpu_memory"],
        cpu_memory=memory["cpu_memory"],
        disk_memory=memory["disk_memory"],
        sharing=job.of_host,
        loading=loading,
        open_weights=job.open_weights,
        open_kv=job.open_kv,
        kv_placements=_kv_placements(job),
        max_num_seqs=options.max_num_seqs,
        num_gpu_batches=options.num_gpu_batches,
        max_num_batched_tokens=options.max_num_batched_tokens,
        process_bytes=process_bytes + _mtp_bytes(job),
        offers_int4=options.tensor_parallel == 1,
        model_name=job.files.name,
        max_model_len=job.context,
        share_prefixes=options.share_prefixes and config.causal,
        output_len_known=estimated.output_len_known,
        startup_s=startup_s,
    )
    return with_quality(problem, options.quality)


def _mtp_bytes(job: Job) -> int:
    """Bytes of the model's MTP module, where it may draft."""
    options = job.options
    drafts = options.drafts and options.task == "generate" and job.device.kind == "cpu"
    if not drafts or options.tensor_parallel > 1 or options.pipeline > 1:
        return 0
    return mtp_bytes(job.files, job.config, job.dtype)


def _weight_formats(job: Job) -> tuple[str, ...]:
    """Weight formats that a plan of the job may have with some `--quality`."""
    return (job.weight_format, *job.open_weights)


def _to_write_bytes(job: Job, weight_format: str) -> int:
    """Bytes of the weight store in a format that a job writes first, where its plan needs a store."""
    size = store_bytes(job.process_config, job.dtype, weight_format)
    to_write = (
        0 if _has_store(job, job.options.weights if weight_format == job.weight_format else weight_format) else size
    )
    if job.shard is not None and weight_format == INT4 and not _has_store(job, INT4, whole_model=True):
        to_write += size  # the whole model's, which ranks cut theirs from
    return to_write


def _has_store(job: Job, weights: str, *, whole_model: bool = False) -> bool:
    """True where there is a weight store in this format, for the model or for the rank's part of it."""
    with contextlib.suppress(InputError):  # plans need no weights to be there
        return existing_store(job.files, job.offload_dir, job.dtype, weights, None if whole_model else job.shard)
    return False
