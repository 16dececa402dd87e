"""A plan for a job: this machine's profile or another's, the job's workload, and the search over both."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from batchgen.core.cores import dedicated_core, on_cores
from batchgen.core.device import Device
from batchgen.core.dtypes import (
    BLOCK_FORMATS,
    FORMAT_BYTES,
    INT4,
    INT8,
    KEPT_FORMATS,
    KV_CODE_BITS,
    NATIVE,
    changes_results,
    weight_format_of,
    weight_row_bytes,
)
from batchgen.core.errors import InputError, one_line
from batchgen.core.hardware import HARDWARE_VARIABLE, HardwareProfile, read_profile
from batchgen.core.machine import available_memory_bytes, resident_bytes
from batchgen.core.plan import TIERS, Plan
from batchgen.core.text_file import read_text
from batchgen.core.typed_json import parse_json
from batchgen.core.units import format_bytes
from batchgen.core.workload import Workload
from batchgen.engine.loader import (
    TYPICAL_PROCESS_BYTES,
    existing_store,
    process_bytes,
    store_bytes,
)
from batchgen.engine.tensor_parallel import KV_PLACEMENTS
from batchgen.job.kernels import kernels_here
from batchgen.job.resolved import ResolvedJob
from batchgen.job.routing import known_routing
from batchgen.job.weight_choice import faster, quantizations_planned, without_room
from batchgen.job.workload import EstimatedWorkload
from batchgen.models.config import ModelConfig
from batchgen.models.files import cache_dir, stored_weights
from batchgen.models.layouts import layer_sizes, main_format, output_format
from batchgen.planner import explain
from batchgen.planner.linear import number
from batchgen.planner.memory_requirements import kv_tokens_used
from batchgen.planner.parallel import Link, link_of, part_of_host, with_all_reduce
from batchgen.planner.pipeline import over_stages
from batchgen.planner.plan_selection import choose, simulate_candidates
from batchgen.planner.problem import Allowed, Problem
from batchgen.planner.search import Candidate, block_latency_s, search
from batchgen.planner.strategy_times import with_strategies
from batchgen.profiler.cache import Wanted
from batchgen.profiler.calibration import corrected_by_disk_probe, corrected_by_probe
from batchgen.profiler.emulated import emulated_profile
from batchgen.profiler.in_subprocess import recall_or_measure
from batchgen.profiler.shipped import shipped_profile, shipped_profiles

_GGUF_WEIGHT_BYTES = 0.6  # of a quantised weight in its file: 4.5 to 5 bits are usual
# Layers beyond this are planned with the curves for models of any size.
_LARGE_LAYER_PARAMS = 1 << 28
# Weights that take a smaller part of the memory leave so much for KV that nothing is likely to go to disk.
_MEMORY_FRAC_WITHOUT_DISK = 0.5
# Of the disk space that is free, this much is left alone.
_DISK_MARGIN_FRAC = 0.1


@dataclass(frozen=True)
class PlanRequest:
    """What is given of a plan, beside hardware, model and workload. Fields as the flags of the same names.

    weights, kv_cache_dtype: "auto" leaves the format to the plan. store_bytes: what a weight store would take on
    disk, which weights can be streamed from; 0 if there is one. has_int4_store: whether there is one of weights in 4 bits, for
    plans beside this one. stores_bytes: `store_bytes` of other quantizations that the plan may have. ranks: processes that share every layer. stages: those that share the layers. The plan is one's, and so are
    budgets; of_host: processes that share the host's.
    """

    model_name: str
    dtype: str
    max_model_len: int
    gpu_memory: int | None = None
    cpu_memory: int | None = None
    disk_memory: int | None = None
    weights: str = NATIVE
    kv_cache_dtype: str = "auto"
    admission: str | None = None
    max_num_seqs: int | None = None
    num_gpu_batches: int | None = None
    max_num_batched_tokens: int | None = None
    max_block_latency_s: float | None = None
    share_prefixes: bool = True
    process_bytes: int = 0
    store_bytes: int = 0
    has_int4_store: bool = False
    stores_bytes: Mapping[str, int] = field(default_factory=dict)
    ranks: int = 1
    stages: int = 1
    of_host: int = 1


@dataclass(frozen=True)
class Case:
    """A job and a machine to plan it for. startup_s: from the start of the command to where weights are loaded."""

    job: ResolvedJob
    hardware: HardwareProfile
    request: PlanRequest
    startup_s: float

    @property
    def link(self) -> Link:
        """Between the job's processes."""
        return _link_of(self.hardware, self.job)


def make_plan(
    job: ResolvedJob,
    estimate: Callable[[], EstimatedWorkload],
    *,
    started_s: float,
) -> Plan:
    """The plan that a job is run by: the one it was given, or else the fastest on this machine.

    Args:
        job: What to plan for.
        estimate: Gives its workload; called where no plan is given.
        started_s: When the command started, of time.monotonic.

    Raises:
        InputError: The given plan is for something else, or there is none that fits.
    """
    if job.options.plan is not None:
        plan = runnable(read_plan(job.options.plan), job)
    else:
        workload = estimate()
        plan, _ = plan_case(case_here(job, started_s=started_s), workload)
    return replace(plan, kernels=kernels_here(plan.kernels))


def plan_case(case: Case, estimated: EstimatedWorkload, *, compare_strategies: bool = False) -> tuple[Plan, Problem]:
    """The fastest plan for a job on a machine, and the problem that it solves.

    Args:
        case: The job and the machine.
        estimated: The job's workload.
        compare_strategies: Whether the plan has the job's time under each strategy.

    Raises:
        InputError: No plan fits.
    """
    workload = replace(estimated.workload, routing=known_routing(case.job.files, case.job.config))
    plan, problem = _plan_formats(case, estimated._replace(workload=workload))
    case = _case_of(case, problem)
    if compare_strategies and case.request.stages == 1:
        plan_of = plan_maker(
            problem,
            case.request,
            startup_s=case.startup_s,
            loading_s=_reading_s(case, problem),
            output_len_known=estimated.output_len_known,
        )
        plan = with_strategies(plan, problem, plan_of)
    return plan, problem


def _plan_formats(case: Case, estimated: EstimatedWorkload) -> tuple[Plan, Problem]:
    """The fastest plan among those for each format that weights may be in, and its problem. Raises InputError where none fits."""
    requests = _requests_by_format(case)
    found: list[tuple[Plan, Problem]] = []
    refused: list[tuple[PlanRequest, InputError]] = []
    for request in requests:
        try:
            problem = problem_of(case.hardware, case.job.process_config, estimated.workload, request)
            found.append((plan_problem(case, problem, estimated), problem))
        except InputError as error:
            refused.append((request, error))
    if not found:
        raise refused[0][1]
    if len(requests) == 1:
        return found[0]
    if refused:
        (other,) = _weight_formats(refused[0][0])
        return without_room(found[0][0], other), found[0][1]
    best = faster([plan for plan, _ in found])
    return best, next(problem for plan, problem in found if plan.policy == best.policy)


def _requests_by_format(case: Case) -> list[PlanRequest]:
    """The case's request with each quantization that the plan may have."""
    request, hardware = case.request, case.hardware
    host = hardware.cpu_memory_bytes // request.of_host if request.cpu_memory is None else request.cpu_memory
    device = (hardware.gpu_memory_bytes or 0) if request.gpu_memory is None else request.gpu_memory
    planned = quantizations_planned(case.job, hardware, host + device) or (request.weights,)
    written = {request.weights: request.store_bytes} | dict(request.stores_bytes)
    return [replace(request, weights=name, store_bytes=written.get(name, request.store_bytes)) for name in planned]


def _case_of(case: Case, problem: Problem) -> Case:
    """The case with the request that a problem was made from, of those for each format that weights may be in."""
    for request in _requests_by_format(case):
        if _weight_formats(request) == problem.weight_formats:
            return replace(case, request=request)
    return case


def plan_problem(case: Case, problem: Problem, estimated: EstimatedWorkload) -> Plan:
    """The fastest plan for a case whose problem may have been changed; over stages with the time of all. Raises InputError."""
    case = _case_of(case, problem)
    plan = plan_job(
        problem,
        case.request,
        startup_s=case.startup_s,
        loading_s=_reading_s(case, problem),
        output_len_known=estimated.output_len_known,
    )
    stages = case.request.stages
    return plan if stages == 1 else over_stages(plan, case.job.config, problem.hardware, stages, case.link)


def _reading_s(case: Case, problem: Problem) -> float:
    """Seconds to read all weights on the problem's machine."""
    job, request = case.job, case.request
    weight_format = weight_format_of(request.dtype, request.weights)
    return loading_s(problem.hardware, job.process_config, request.dtype, job.files.kind, weight_format)


def case_here(job: ResolvedJob, *, started_s: float) -> Case:
    """A job on this machine, with what it may use of it; measured where it was not before. Raises InputError."""
    hardware, request = machine_of(job)
    return Case(job, hardware, request, time.monotonic() - started_s)


def request_of(job: ResolvedJob) -> PlanRequest:
    """What a job asks of its plan."""
    options = job.options
    return PlanRequest(
        model_name=job.files.name,
        dtype=job.dtype,
        max_model_len=job.context,
        gpu_memory=job.gpu_memory,
        cpu_memory=None if job.cpu_memory is None else job.cpu_memory // job.of_host,
        disk_memory=None if job.disk_memory is None else job.disk_memory // job.of_host,
        weights=options.weights,
        kv_cache_dtype=options.kv_cache_dtype,
        admission=None if options.admission == "auto" else options.admission,
        max_num_seqs=options.max_num_seqs,
        num_gpu_batches=options.num_gpu_batches,
        max_num_batched_tokens=options.max_num_batched_tokens,
        share_prefixes=options.share_prefixes,
        process_bytes=TYPICAL_PROCESS_BYTES,
        ranks=options.tensor_parallel,
        stages=options.pipeline,
        of_host=job.of_host,
    )


def machine_of(job: ResolvedJob) -> tuple[HardwareProfile, PlanRequest]:
    """This machine, with the device that the job names, and what its plan may use of it. Raises InputError."""
    config, dtype, device, weights = job.process_config, job.dtype, job.device, job.options.weights
    may_stream = _MEMORY_FRAC_WITHOUT_DISK * job.budgets["cpu"] < store_bytes(config, dtype, weights)
    weight_formats, in_rows = _weight_formats_measured(job, may_stream=may_stream)
    kv_cache_dtype = job.options.kv_cache_dtype
    find = partial(
        find_hardware,
        job.options.hardware,
        dtype=dtype,
        offload_dir=job.offload_dir,
        model=config,
        device="cuda" if device.kind == "cuda" else "cpu",
        weight_formats=weight_formats,
        kv_formats=() if kv_cache_dtype == "auto" else (kv_cache_dtype,),
        in_rows=in_rows,
        memory_bytes=job.budgets["cpu"],
    )
    profile, core = find_for(device, find)
    if profile.gpu is not None and device.kind != "cuda":
        raise InputError(
            f"{profile.name} has a GPU, jobs run on the CPU here: leave out --hardware; `batchgen plan` takes it"
        )
    if profile.gpu is None and device.kind == "cuda":
        raise InputError(
            f"{profile.name} has no GPU, and jobs run on one here: leave out --hardware, or give --device cpu"
        )
    profile = on_this_machine(profile)
    given = bool(job.options.hardware or os.environ.get(HARDWARE_VARIABLE))
    budgets = job.budgets
    if may_stream:
        profile = corrected_by_disk_probe(profile, job.offload_dir)
    profile = process_profile(profile, job, whole=given)
    if device.kind == "emulated":
        profile = emulated_profile(profile, device, core)
    has_int4_store = False
    with contextlib.suppress(InputError):  # plans need no weights to be there
        has_int4_store = existing_store(job.files, job.offload_dir, dtype, INT4)
    to_write = _bytes_to_write(job, weights)
    if job.shard is not None and weights == INT4 and not has_int4_store:
        # The whole model's, which ranks cut theirs from.
        to_write += store_bytes(config, dtype, weights)
    request = replace(
        request_of(job),
        process_bytes=process_bytes(),  # which gives back what measuring took
        # What was free when the job began may be taken by others since.
        cpu_memory=budgets["cpu"] if job.cpu_memory is not None else min(budgets["cpu"], profile.cpu_memory_bytes),
        gpu_memory=budgets.get("gpu"),
        store_bytes=to_write,
        stores_bytes={name: _bytes_to_write(job, name) for name in job.planned_formats},
        has_int4_store=has_int4_store,
    )
    return profile, request


def _bytes_to_write(job: ResolvedJob, weights: str) -> int:
    """What a weight store would take on disk; 0 if there is one."""
    with contextlib.suppress(InputError):  # plans need no weights to be there
        if existing_store(job.files, job.offload_dir, job.dtype, weights, job.shard):
            return 0
    return store_bytes(job.process_config, job.dtype, weights)


def _weight_formats_measured(job: ResolvedJob, *, may_stream: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Weights' formats beside the compute dtype that this job's plan needs rates of; and those of products with weights as they are stored.

    may_stream: Whether weights may have no room in memory.
    """
    config, weights = job.process_config, (*job.planned_formats, job.options.weights)[0]
    layers, output = main_format(config, weights), output_format(config, job.dtype, weights)
    in_rows = []
    if job.device.kind != "cuda":  # whose memory holds all weights as they are stored
        streams = may_stream or job.device.accelerated
        in_rows += [layers if layers in (INT8, *BLOCK_FORMATS) else job.dtype] if streams and layers != INT4 else []
        # Chunks of an output matrix that come over lie as they are stored.
        in_rows += [output] if job.device.accelerated and output in BLOCK_FORMATS else []
    return tuple(name for name in (INT4, INT8, *BLOCK_FORMATS) if name in (layers, output)), tuple(
        dict.fromkeys(in_rows)
    )


def process_profile(hardware: HardwareProfile, job: ResolvedJob, *, whole: bool) -> HardwareProfile:
    """What one process of a job has. whole: as of `parallel.part_of_host`."""
    part = part_of_host(hardware, job.of_host, whole=whole)
    return part if job.shard is None else with_all_reduce(part, job.shard.size, _link_of(hardware, job))


def _link_of(hardware: HardwareProfile, job: ResolvedJob) -> Link:
    """Between the job's processes."""
    gpus_of_a_host = job.device.kind == "cuda" and job.processes <= job.of_host
    return link_of(hardware, job.link_bytes_per_s, gpus_of_a_host=gpus_of_a_host)


def find_for(device: Device, find: Callable[..., HardwareProfile]) -> tuple[HardwareProfile, HardwareProfile | None]:
    """The profile of the cores that the CPU has, and of the core that an emulated device has, where it has one of its own.

    find: `find_hardware`, but for `cores`. Raises InputError.
    """
    if device.slowdown is None:
        return find(), None
    core, others = dedicated_core()
    return find(cores=others), find(cores=core)


def find_hardware(
    name: str | None,
    *,
    dtype: str,
    offload_dir: Path,
    device: str = "cpu",
    weight_formats: tuple[str, ...] = (),
    kv_formats: tuple[str, ...] = (),
    in_rows: tuple[str, ...] = (),
    refresh: bool = False,
    model: ModelConfig | None = None,
    memory_bytes: int | None = None,
    cores: frozenset[int] | None = None,
) -> HardwareProfile:
    """Find the profile of a machine.

    Args:
        name: A file, or a profile that ships with the package; "": this machine's; None: what $BATCHGEN_HARDWARE names, or
            else this machine's. The rest is about this machine's, which is measured now if it was not before.
        dtype: To compute in.
        offload_dir: Directory of the disk tier, whose disk is measured.
        device: "cpu" or "cuda".
        weight_formats: Further ones that weights may be stored in: "int4", "int8", one of `BLOCK_FORMATS`.
        kv_formats: Further ones that KV may be stored in, of `KV_CODE_BITS`.
        in_rows: Those of weights that are multiplied as they are stored.
        refresh: Measure again.
        model: Whose layers' shapes are measured; None: rates for models of any size.
        memory_bytes: What measuring and this process may take of the host's memory together; None: what is free.
        cores: To measure on; None: all that this process may use.

    Raises:
        InputError: There is no such profile, or it cannot be measured.
    """
    origin = "--hardware"
    if name is None:
        name, origin = os.environ.get(HARDWARE_VARIABLE, ""), f"${HARDWARE_VARIABLE}"
    if name:
        if name in shipped_profiles():
            return shipped_profile(name)
        if not Path(name).exists():
            known = ", ".join(shipped_profiles())
            raise InputError(f"{origin} {name}: no such file, and none of the shipped profiles ({known})")
        return read_profile(name)
    wanted = Wanted(device, (dtype,), weight_formats, kv_formats, model, kernels_of=model, in_rows=in_rows)
    if model is not None and model.params_per_layer > _LARGE_LAYER_PARAMS:
        wanted = replace(wanted, model=None)  # large products reach the same rates whatever their shape, and take long
    with contextlib.nullcontext() if cores is None else on_cores(cores):
        profile = recall_or_measure(
            wanted,
            cache_dir=cache_dir(),
            offload_dir=offload_dir,
            refresh=refresh,
            memory_bytes=memory_bytes,
        )
        return corrected_by_probe(profile, dtype)


def problem_of(hardware: HardwareProfile, model: ModelConfig, workload: Workload, request: PlanRequest) -> Problem:
    """State the planner's problem.

    Args:
        hardware: The machine.
        model: The model's configuration.
        workload: What is to be run.
        request: Budgets and whatever else of the plan is given.

    Raises:
        InputError: The request contradicts the hardware.
    """
    if hardware.gpu is None and request.gpu_memory is not None:
        raise InputError(f"--gpu-memory is given, but {hardware.name} has no GPU: leave it out")
    budgets = {
        "cpu": hardware.cpu_memory_bytes // request.of_host if request.cpu_memory is None else request.cpu_memory,
        "disk": int(hardware.disk_bytes * (1 - _DISK_MARGIN_FRAC)) // request.of_host
        if request.disk_memory is None
        else request.disk_memory,
    }
    if hardware.gpu is not None and hardware.gpu_memory_bytes is not None:
        budgets["gpu"] = hardware.gpu_memory_bytes if request.gpu_memory is None else request.gpu_memory
    tiers: tuple[str, ...] = TIERS
    if budgets["disk"] < request.store_bytes:
        tiers = ("gpu", "cpu")
    else:
        budgets["disk"] -= request.store_bytes
    kv_formats = {name: (name,) for name in KV_CODE_BITS} | {"auto": (request.dtype,)}
    return Problem(
        hardware=hardware,
        model=model,
        workload=workload,
        budgets=budgets,
        compute_format=request.dtype,
        weight_formats=_weight_formats(request),
        kv_formats=kv_formats[request.kv_cache_dtype],
        admissions=("continuous", "static") if request.admission is None else (request.admission,),
        allowed=Allowed(tiers) if request.ranks == request.stages == 1 else Allowed(tiers, KV_PLACEMENTS),
        max_num_seqs=request.max_num_seqs,
        num_gpu_batches=request.num_gpu_batches,
        max_num_batched_tokens=request.max_num_batched_tokens,
        max_block_latency_s=request.max_block_latency_s,
        process_bytes=request.process_bytes,
        sharing=request.of_host,
        offers_int4=request.ranks == 1,
    )


def _weight_formats(request: PlanRequest) -> tuple[str, ...]:
    """Those that a plan may choose from."""
    if request.weights == "auto":
        return (request.dtype, INT4)
    return (weight_format_of(request.dtype, request.weights),)


def on_this_machine(hardware: HardwareProfile) -> HardwareProfile:
    """The profile's rates with this machine's memory, for a job that runs here wherever its rates came from."""
    here = available_memory_bytes() + resident_bytes()
    return replace(hardware, cpu_memory_bytes=max(here, 1))


def loading_s(
    hardware: HardwareProfile, model: ModelConfig, dtype: str, kind: str, weight_format: str | None = None
) -> float:
    """Seconds to read the weights, which may have to come from disk.

    kind: of `ModelFiles`. weight_format: the layers'; in one of `KEPT_FORMATS` they are taken as they are. None: `dtype`.
    """
    rate = min(hardware.load_bytes_per_s, hardware.disk_read_bytes_per_s)
    as_found, expanded = 0, model.num_params
    if weight_format in KEPT_FORMATS:
        as_found = sum(map(sum, (sizes.values() for sizes in layer_sizes(model, dtype, weight_format))))
        here = {"embed": model.has_embeddings, "lm_head": model.has_head}  # a stage may be without
        ends = [end_format for name, end_format in model.end_formats if here[name]]
        as_found += sum(model.vocab_size * weight_row_bytes(model.embed_size, end_format) for end_format in ends)
        expanded -= model.layer_params + len(ends) * model.vocab_size * model.embed_size
    seconds = expanded * FORMAT_BYTES[dtype] / rate
    if kind == "gguf" and hardware.gguf_load_bytes_per_s:
        on_disk = expanded * _GGUF_WEIGHT_BYTES / hardware.disk_read_bytes_per_s
        seconds = max(on_disk, expanded * FORMAT_BYTES[dtype] / hardware.gguf_load_bytes_per_s)
    return seconds + as_found / rate


def _loading_s(best: Candidate, whole_s: float, request: PlanRequest) -> float:
    """Seconds until the first sweep, if reading all weights takes `whole_s`.

    What stays on disk is not read, but where there is no store yet it is written first.
    """
    s, at = best.inputs, best.counts.placement(best.inputs)
    layers = s.model.layer_params / s.model.num_params
    seconds = whole_s * (1 - number(at.w_disk) * layers)
    written = _store_written_bytes(best, request)
    seconds += whole_s * bool(written) + written / s.hardware.disk_write_bytes_per_s
    return float(seconds)


def _store_written_bytes(best: Candidate, request: PlanRequest) -> float:
    """What a job writes before its first sweep, where it needs a store of the weights and there is none."""
    s = best.inputs
    if not best.counts.placement(s).w_disk and s.weight_format != INT4:
        return 0.0
    if s.weight_format == INT4 and request.weights != INT4:  # a plan beside the one that was asked for
        return 0.0 if request.has_int4_store else float(store_bytes(s.model, request.dtype, INT4))
    return float(request.store_bytes)


def runnable(plan: Plan, job: ResolvedJob) -> Plan:
    """The plan, if it is for this job and this machine. Raises InputError."""
    model, options = job.files.name, job.options
    if (plan.model, plan.dtype) != (model, job.dtype):
        raise InputError(
            f"--plan is for {plan.model} in {plan.dtype}, not {model} in {job.dtype}: make one for this job with `batchgen plan`"
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
            "--plan is for a machine with a GPU: give --device cuda, or emulated:gpu-memory=..., or plan without --hardware"
            if on_gpu
            else f"--plan is for the CPU: leave out --device {job.device}, or make a plan for it"
        )
    kv_format = job.dtype if options.kv_cache_dtype == "auto" else options.kv_cache_dtype
    weights = {weight_format_of(job.dtype, options.weights)}
    # Rows of blocks hold the same numbers as found and expanded, but for rounding; kernels for GPUs know the latter alone.
    if not changes_results(options.weights) and job.device.kind != "cuda":
        weights |= {job.dtype, stored_weights(job.files) or job.dtype} - {INT4, INT8}
    for flag, wanted, stored, planned in (
        ("--weights", options.weights, weights, policy.weight_format),
        ("--kv-cache-dtype", options.kv_cache_dtype, {kv_format}, policy.kv_format),
    ):
        if planned not in stored:
            raise InputError(f"--plan has {planned} where {flag} is {wanted}: {flag} must be as in `batchgen plan`")
    return plan


def _first_touch_s(best: Candidate) -> float:
    """Seconds for the host's KV pages to be provided by the kernel, as they are first used."""
    s, at = best.inputs, best.counts.placement(best.inputs)
    if s.hardware.first_touch_bytes_per_s is None:
        return 0.0
    workload = s.workload
    tokens = workload.num_seqs * (workload.computed_prompt_len + workload.output_len.mean)
    tokens = min(tokens, kv_tokens_used(workload, s.max_num_seqs))
    token_bytes = s.seq_kv_bytes / (s.seq_blocks * s.kv_block_size)  # of all layers
    on_host = number(at.kv_cpu + at.kv_streamed) * tokens * token_bytes
    return float(on_host / s.hardware.first_touch_bytes_per_s)


def plan_maker(
    problem: Problem, request: PlanRequest, *, startup_s: float, loading_s: float, output_len_known: bool
) -> Callable[[Candidate, float | None], Plan]:
    """A function from a candidate, and the seconds of its sweeps where they were simulated, to a plan. Arguments as of `plan_job`."""

    def plan_of(candidate: Candidate, simulated_s: float | None = None) -> Plan:
        return explain.make_plan(
            problem,
            candidate,
            model_name=request.model_name,
            max_model_len=request.max_model_len,
            share_prefixes=request.share_prefixes,
            startup_s=startup_s + _loading_s(candidate, loading_s, request) + _first_touch_s(candidate),
            output_len_known=output_len_known,
            simulated_s=simulated_s,
            store_written_bytes=_store_written_bytes(candidate, request),
        )

    return plan_of


def plan_job(
    problem: Problem, request: PlanRequest, *, startup_s: float, loading_s: float, output_len_known: bool
) -> Plan:
    """Search for the fastest plan, by simulation of the best candidates.

    Args:
        problem: Of `problem_of`.
        request: What it was made from.
        startup_s: Seconds from the start of the job to where weights are loaded.
        loading_s: Seconds to load all weights.
        output_len_known: Whether the workload's output lengths are more than a bound.

    Raises:
        InputError: No plan fits.
    """
    plan_of = plan_maker(problem, request, startup_s=startup_s, loading_s=loading_s, output_len_known=output_len_known)
    limited, shortest_s = problem, math.inf
    while True:
        try:
            found = simulate_candidates(limited, lambda candidate: plan_of(candidate, None))
        except InputError as error:
            if limited is not problem:
                raise InputError(
                    f"no plan has a block latency of {problem.max_block_latency_s:g} s: the shortest simulated is"
                    f" {shortest_s:.3g} s, give --max-block-latency at least that"
                ) from error
            raise InputError(f"{error}{_store_hint(problem, request)}") from error
        chosen = choose(found, problem.max_block_latency_s)
        if chosen is not None:
            return plan_of(chosen.candidate, chosen.seconds)
        # Blocks take longer than the cost model says: it is asked for shorter ones.
        assert limited.max_block_latency_s is not None
        shortest_s = min(shortest_s, *(block_latency_s(s.candidate) * s.slower for s in found))
        limited = replace(limited, max_block_latency_s=limited.max_block_latency_s / max(1.05, found[0].slower))


def _store_hint(problem: Problem, request: PlanRequest) -> str:
    """The disk that would help where none is allowed for weights: it must hold all of them."""
    if "disk" in problem.allowed.weight_tiers:
        return ""
    try:
        search(replace(problem, allowed=Allowed(), budgets={**problem.budgets, "disk": 0}))
    except InputError:
        return ""
    return f"; or --disk-memory {format_bytes(request.store_bytes * 1.001)}, for weights on disk"


def read_plan(path: str) -> Plan:
    """A plan that `batchgen plan -o` wrote. Raises InputError."""
    try:
        values: Any = parse_json(read_text(path))
    except OSError as error:
        raise InputError(f"--plan {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise InputError(f"--plan {path} is not valid JSON: {one_line(error)}") from error
    return Plan.from_json(values)
