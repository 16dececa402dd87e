"""`batchgen plan` and `batchgen profile`: the predicted time of a job, and the measured rates of a machine."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from batchgen.core.cache_folder import cache_dir
from batchgen.core.device import Device, has_cuda, parse_device, require_cuda
from batchgen.core.errors import InputError
from batchgen.core.hardware import HardwareProfile
from batchgen.core.machine import available_cores
from batchgen.core.plan import Plan
from batchgen.core.units import format_bytes
from batchgen.core.workload import Workload, uniform_workload
from batchgen.distributed.launch import own_share, ranks_of_host
from batchgen.engine.embedding import num_pooled
from batchgen.engine.loader import choose_weights, resolve_context
from batchgen.job.checks import check_options, check_path
from batchgen.job.command_options import PlanOptions, ProfileOptions
from batchgen.job.devices import (
    Comparison,
    Devices,
    ProblemOf,
    Split,
    compare_devices,
    compare_kinds,
    device_lines,
    parse_kinds,
)
from batchgen.job.embedding import for_task, head_of, with_head_context
from batchgen.job.files import check_files, write_text
from batchgen.job.given_hardware import given_hardware, shipped_cards
from batchgen.job.job import Job, dequantized_line, resolve_for, resolve_job, why_not_run
from batchgen.job.machine_profile import (
    for_device,
    link_between,
    may_stream,
    measured_hardware,
    process_profile,
    wanted_of,
    weight_formats_measured,
)
from batchgen.job.options import OF_VECTORS, JobOptions, seconds
from batchgen.job.pages.plan_page import plan_page
from batchgen.job.planning import plan_job, problem_here, problem_of_job
from batchgen.job.progress import Progress
from batchgen.job.step_source import open_rows
from batchgen.job.weight_choice import with_faster_weights
from batchgen.job.what_if import what_if
from batchgen.job.workload import EstimatedWorkload, measure_workload
from batchgen.models.config import ModelConfig
from batchgen.models.files import ModelFiles, resolve_for_planning
from batchgen.models.pooling import VectorSpec
from batchgen.models.tokenizers.tokenizer import Tokenizer
from batchgen.planner.explain import compare, explain, frontier_lines, headline, kernel_lines
from batchgen.planner.explanation import explanation_of
from batchgen.planner.format_choice import formats_of
from batchgen.planner.format_search import in_formats
from batchgen.planner.problem import Problem
from batchgen.planner.replanned import replanned_s, smaller_states_s
from batchgen.planner.simulation import trace_plan
from batchgen.planner.strategy_times import strategy_lines
from batchgen.profiler.cache import Wanted
from batchgen.profiler.emulated import emulated_profile
from batchgen.profiler.shipped import shipped_profiles

# Interpreter, libraries and tokenizer, on a machine that is not here to be timed.
_STARTUP_S = 5.0


def run_plan(options: PlanOptions) -> list[str]:
    """The lines that `batchgen plan` prints. Raises InputError."""
    with Progress(options.job.progress):
        return _plan_lines(options, time.monotonic())


def _plan_lines(options: PlanOptions, started_s: float) -> list[str]:
    """The lines that `batchgen plan` prints. started_s: start of the command, of time.monotonic."""
    devices, asked = _devices(options)
    options = replace(options, job=asked)
    _check_plan(options, asked)
    files, config = resolve_for_planning(asked.model, asked.lora)
    if asked.task in OF_VECTORS:
        files, config = for_task(files, asked), config.without_logits()

    tokenizer = partial(_tokenizer, files, asked)
    head = head_of(files, config, asked, tokenizer)
    asked = with_head_context(asked, config, head)
    options = replace(options, job=asked)
    estimated = _workload(options, config, tokenizer, head, resolve_context(config, asked.max_model_len))
    given = Split(tensor_parallel=asked.tensor_parallel, pipeline=asked.pipeline)

    def here(split: Split = given, of_host: int | None = None) -> tuple[Job, Problem]:
        shared = of_host or ranks_of_host(split.processes)
        _check_cores(of_host)
        with own_share(shared):  # as `run` has it
            resolved = resolve_job(split.of(replace(asked, hardware=None)), files, config, shared)
            return problem_here(resolved, estimated, started_s=started_s)

    def problem_for(
        split: Split = given, of_host: int | None = None, hardware: str | None = asked.hardware
    ) -> tuple[Job, Problem]:
        if hardware is None:
            job, problem = here(split, of_host)
        else:
            job, problem = _problem_there(
                split.of(replace(asked, hardware=hardware)), files, config, of_host, estimated
            )
        return job, _limited(problem, options)

    job, problem = problem_for()
    plan = plan_job(job, problem, compare_strategies=True)

    def planned_s(other: Problem) -> float:
        return plan_job(job, other).prediction.total_s

    looks_further = options.explain or options.html
    explained = explanation_of(
        plan,
        price_per_hour=options.price_per_hour,
        watts=options.watts,
        replanned_s=replanned_s(problem, plan.prediction, planned_s) if looks_further else None,
        smaller_states_s=smaller_states_s(problem, plan, planned_s) if looks_further else None,
    )
    on_devices = _compared(devices, problem_for, problem, asked)
    beside = {"explanation": asdict(explained)} | ({"devices": on_devices.to_json()} if on_devices else {})
    as_json = json.dumps(plan.to_json() | beside | _of_processes(job), indent=2)
    if options.plan_file and options.plan_file != "-":
        write_text(as_json + "\n", options.plan_file, "-o")
    if asked.trace:
        trace_plan(plan, config, problem.hardware, asked.trace)
    others, impossible = _beside(job, problem, options, estimated)
    if options.html:
        in_its_formats = in_formats(problem, *formats_of(plan.policy))
        page = plan_page(plan, explained, in_its_formats, config, problem.hardware, others)
        write_text(page, options.html, "--html")
    if options.as_json or options.plan_file == "-":
        return [as_json]
    lines = _split_lines(job, problem)
    lines += explain(plan, explained) if options.explain else headline(plan)
    if others:
        lines += ["", *compare([("now", plan), *others]), *impossible]
    if options.compare:
        lines += ["", *_beside_this_machine(lambda: plan_job(*problem_for(hardware=None)), plan)]
    lines += ["", *strategy_lines(plan)] if plan.strategies else []
    lines += ["", *device_lines(on_devices)] if on_devices else []
    if options.frontier:
        lines += ["", *frontier_lines(in_formats(problem, *formats_of(plan.policy)))]
    return lines


def predicted_s(options: PlanOptions, shares: Sequence[float]) -> list[float]:
    """The predicted seconds of a job that generates or scores, over each share of its rows.

    Args:
        options: The options of `batchgen plan`.
        shares: Shares of the rows, above 0 to 1.

    Raises:
        InputError: No plan fits.
    """
    asked = options.job
    files, config = resolve_for_planning(asked.model, asked.lora)
    context = resolve_context(config, asked.max_model_len)
    estimated = _workload(options, config, partial(_tokenizer, files, asked), None, context)

    def seconds_of(share: float) -> float:
        workload = replace(estimated.workload, num_seqs=max(1, round(share * estimated.workload.num_seqs)))
        part = estimated._replace(workload=workload)
        if asked.hardware is None:
            job = resolve_job(asked, files, config)
            return plan_job(*problem_here(job, part, started_s=time.monotonic())).prediction.total_s
        return plan_job(*_problem_there(asked, files, config, None, part)).prediction.total_s

    return [seconds_of(share) for share in shares]


def _check_plan(options: PlanOptions, asked: JobOptions) -> None:
    """Raise InputError for options of a plan that contradict each other. asked: the job's options on one device."""
    check_options(asked)
    if asked.device == "cuda" and asked.hardware is None:
        require_cuda(
            f"or, to plan for a machine with one, give --hardware h100, or another of {', '.join(shipped_cards())}"
        )
    _check_processes(options)
    check_files(asked, plan_file=options.plan_file, plan_page=options.html)
    if (options.as_json or options.plan_file == "-") and (options.what_if or options.frontier or options.compare):
        raise InputError(
            "--json and -o - give the plan alone: leave out --what-if, --compare and --frontier, or plan for each case "
            "by itself"
        )
    if options.compare and not asked.hardware:
        raise InputError("--compare puts another machine beside this one: give --hardware too")
    if options.max_block_latency is not None and seconds(options.max_block_latency) <= 0:
        raise InputError(f"--max-block-latency must be above 0, not {options.max_block_latency!r}")
    check_path("-o", options.plan_file)
    check_path("--html", options.html)


def _compared(
    kinds: tuple[Devices, ...], problem_for: Callable[..., tuple[Job, Problem]], problem: Problem, asked: JobOptions
) -> Comparison | None:
    """The comparison of all strategies of using several devices; None where no devices are asked for.

    Args:
        kinds: Devices of each kind.
        problem_for: Function that returns the job and the problem of one process.
        problem: The problem of one process on a device of the first kind.
        asked: The job's options.
    """
    if not kinds:
        return None

    def of(kind: Devices) -> ProblemOf:
        name = asked.hardware if len(kinds) == 1 else kind.hardware

        def at_the_same_moment(split: Split, of_host: int) -> tuple[Job, Problem]:
            job, other = problem_for(split, of_host, name)
            return job, replace(other, startup_s=problem.startup_s)

        return at_the_same_moment

    if len(kinds) == 1:
        return compare_devices(of(kinds[0]), asked, kinds[0], problem.hardware.name)
    named = [(kind, kind.hardware or problem_for(Split(), 1, None)[1].hardware.name, of(kind)) for kind in kinds]
    return compare_kinds(named, asked)


def _devices(options: PlanOptions) -> tuple[tuple[Devices, ...], JobOptions]:
    """The devices of each kind that are asked for, and the job's options on one of the first. Raises InputError."""
    if options.devices is None:
        if options.hosts is not None:
            raise InputError("--hosts says where --devices are: give them too, or leave it out")
        return (), options.job
    kinds = parse_kinds(options.devices, options.hosts)
    for name in (kind.hardware for kind in kinds):
        if name and name not in shipped_profiles() and not Path(name).exists():
            known = ", ".join(shipped_profiles())
            raise InputError(f"--devices {options.devices}: {name} is no file, nor one of cpu, {known}")
    if options.job.hardware and (len(kinds) > 1 or kinds[0].hardware):
        raise InputError("--devices names the hardware: leave out --hardware, or give --devices a number alone")
    return kinds, replace(options.job, hardware=kinds[0].hardware or options.job.hardware)


def _check_processes(options: PlanOptions) -> None:
    """Raise InputError for options that have no meaning in a plan of several processes."""
    job = options.job
    if job.tensor_parallel == job.pipeline == 1:
        return
    flag = "--tensor-parallel" if job.tensor_parallel > 1 else "--pipeline"
    if options.devices is not None:
        raise InputError(f"--devices has {flag} in its table: leave one of them out")
    if options.plan_file is not None:
        raise InputError(
            f"-o is for plans of one process, as `batchgen run --plan` is: leave out {flag}, or give --json"
        )
    of_one = {
        "--frontier": options.frontier,
        "--html": options.html is not None,
        "--trace": job.trace is not None,
        "--max-block-latency": options.max_block_latency is not None,
    }
    if job.pipeline > 1 and (given := [name for name, value in of_one.items() if value]):
        raise InputError(f"{given[0]} is for plans without stages: leave out {given[0]}, or --pipeline")


def _check_cores(of_host: int | None) -> None:
    """Raise InputError for more processes than this host has CPU cores. of_host: their number; None: not given."""
    if of_host and of_host > (cores := available_cores()):
        raise InputError(f"{of_host:,} processes need a core each, and this machine has {cores}")


def _of_processes(job: Job) -> dict[str, str]:
    """Further fields for the JSON of a plan that is for one of several processes."""
    return {"not_run": why_not_run(job)} if job.processes > 1 else {}


def _split_lines(job: Job, problem: Problem) -> list[str]:
    """Lines that say that a plan is for one of several processes, and why this version cannot run it if it cannot."""
    if job.processes == 1:
        return []
    kind, rate = "ranks" if job.shard is not None else "stages", link_between(problem.hardware, job).bytes_per_s
    lines = [f"of each of {job.processes:,} {kind}, over a link of {rate / 1e9:,.3g} GB/s; times are the job's"]
    lines += dequantized_line(job)
    return lines + ([f"not run yet: {refused}"] if (refused := why_not_run(job)) else [])


def _beside(
    job: Job, problem: Problem, options: PlanOptions, estimated: EstimatedWorkload
) -> tuple[list[tuple[str, Plan]], list[str]]:
    """Plans for each change of `--what-if` alone and for all together, and lines about changes that leave no plan.

    Args:
        job: The job.
        problem: The job's problem on the unchanged machine.
        options: The options of `batchgen plan`.
        estimated: The job's workload.

    Returns:
        (text of the change, plan) for each change; and the lines.

    Raises:
        InputError: A change makes no sense, or all changes together leave no plan.
    """
    changes = _changes(options.what_if)
    alone = [{name: value} for name, value in changes.items()] if len(changes) > 1 else []
    cases = [(some, _changed(job, problem, some, options.job.weights, estimated)) for some in (*alone, changes) if some]
    plans, impossible = [], []
    for some, changed in cases:
        label = ", ".join(f"{name}={value}" for name, value in some.items())
        try:
            other = plan_job(*changed)
        except InputError as error:
            if some is changes:
                raise
            impossible.append(f"{label}: {error}")
        else:
            plans.append((label, other))
    return plans, impossible


def _changed(
    job: Job, problem: Problem, changes: dict[str, str], weights: str, estimated: EstimatedWorkload
) -> tuple[Job, Problem]:
    """The job and its problem on a changed machine; with `--weights auto` the format is chosen anew for its memory.

    Args:
        job: The job.
        problem: The job's problem on the unchanged machine.
        changes: Changes by name.
        weights: The value of `--weights` that was asked for.
        estimated: The job's workload.
    """
    job, hardware = what_if(job, problem.hardware, changes)
    if job.shard is None:
        of_machine, name = hardware.cpu_memory_bytes, "cpu_memory"
        if job.device.kind == "cuda" and hardware.gpu_memory_bytes is not None:
            of_machine, name = hardware.gpu_memory_bytes, "gpu_memory"
        given = job.process_memory[name]
        memory = of_machine if given is None else given
        weights = choose_weights(job.files, job.config, weights, job.dtype, job.device, lambda: memory)
        job = with_faster_weights(
            replace(job, options=replace(job.options, weights=weights)), hardware, estimated.workload
        )
    changed = problem_of_job(
        job,
        hardware,
        estimated,
        startup_s=problem.startup_s,
        process_bytes=problem.process_bytes,
        to_write_bytes={name: loading.store_bytes for name, loading in problem.loading.items()},
    )
    return job, replace(changed, max_block_latency_s=problem.max_block_latency_s)


def _tokenizer(files: ModelFiles, options: JobOptions) -> Tokenizer:
    """The tokenizer of a model, as a job has it."""
    from batchgen.models.tokenizers.loading import load_tokenizer

    return load_tokenizer(files, options.special_tokens, options.chat_template)


def _workload(
    options: PlanOptions, config: ModelConfig, tokenizer: Callable[[], Tokenizer], head: VectorSpec | None, context: int
) -> EstimatedWorkload:
    job = options.job
    lengths = (options.num_prompts, options.input_len, options.output_len)
    if job.input is None:
        if head is not None and options.num_prompts is not None and options.input_len is not None:
            uniform = uniform_workload(options.num_prompts, options.input_len, 1, 1, context + 1)
            return EstimatedWorkload(
                replace(uniform, scored_len=float(num_pooled(head, options.input_len)), is_pooled=True), True
            )
        if options.num_prompts is None or options.input_len is None or options.output_len is None:
            raise InputError("give an --input to plan for, or --num-prompts, --input-len and --output-len")
        if job.task == "score":  # outputs are what is scored: all but their last tokens are run
            whole = uniform_workload(options.num_prompts, options.input_len, options.output_len, 1, context)
            uniform = Workload.uniform(whole.num_seqs, options.input_len + options.output_len - 1, 1)
            return EstimatedWorkload(replace(uniform, scored_len=float(options.output_len)), True)
        uniform = uniform_workload(options.num_prompts, options.input_len, options.output_len, job.sampling.n, context)
        return EstimatedWorkload(uniform, True)
    if any(length is not None for length in lengths):
        raise InputError("--num-prompts, --input-len and --output-len stand in for an --input: give one or the other")
    source, loaded = open_rows(job), tokenizer()
    source = source.for_model(config, loaded, job)
    source = source if head is None else source.with_head(head, job)
    return measure_workload(source, loaded, job, context, rows_left=source.dataset.num_rows)


def _problem_there(
    options: JobOptions, files: ModelFiles, config: ModelConfig, of_host: int | None, estimated: EstimatedWorkload
) -> tuple[Job, Problem]:
    """The job and the problem of a process on another machine, which is known by its hardware profile.

    Args:
        options: The job's options.
        files: The model's files.
        config: The model's configuration.
        of_host: Processes on each host; None: all that share the model.
        estimated: The job's workload.
    """
    hardware = given_hardware(options.hardware)
    assert hardware is not None
    _check_device(options.device, hardware)
    job = resolve_for(hardware, options, files, config, of_host)
    part = process_profile(hardware, job, whole=True)
    job = with_faster_weights(job, part, estimated.workload)
    return job, problem_of_job(job, part, estimated, startup_s=_STARTUP_S)


def _check_device(device: str, hardware: HardwareProfile) -> None:
    """Raise InputError where a machine's profile does not have the device that the options name."""
    own = "cpu" if hardware.gpu is None else "cuda"
    if device in ("auto", own):
        return
    if device not in ("cpu", "cuda"):
        parse_device(device)
        what = f"--device {device} is emulated on this machine"
    elif own == "cpu":
        what = f"{hardware.name} has no GPU"
    else:
        what = f"the profile of {hardware.name} has no rates of products on its CPU"
    raise InputError(
        f"{what}: leave out --device to plan for --hardware, or leave out --hardware to plan for this machine"
    )


def _limited(problem: Problem, options: PlanOptions) -> Problem:
    """The problem with the limit of `--max-block-latency` on the time of a block."""
    latency = options.max_block_latency
    return problem if latency is None else replace(problem, max_block_latency_s=seconds(latency))


def _beside_this_machine(plan_here: Callable[[], Plan], plan: Plan) -> list[str]:
    try:
        return compare([("this machine", plan_here()), (plan.hardware, plan)])
    except InputError as error:
        return [f"on this machine: {error}"]


def _changes(given: tuple[str, ...]) -> dict[str, str]:
    changes = {}
    for change in given:
        name, equals, value = change.partition("=")
        if not equals or not value:
            raise InputError(f"--what-if {change!r} is not NAME=SIZE, as in gpu-memory=48GiB")
        if name.strip() in changes:
            raise InputError(f"--what-if {name.strip()} is given twice: give it once")
        changes[name.strip()] = value.strip()
    return changes


def run_profile(options: ProfileOptions) -> list[str]:
    """The lines that `batchgen profile` prints: this machine's profile, measured if it is not cached."""
    with Progress("plain"):
        return _profile_lines(options)


def _profile_lines(options: ProfileOptions) -> list[str]:
    """The lines that `batchgen profile` prints."""
    check_path("-o", options.output)
    where = Device("cuda") if options.device == "auto" and has_cuda() else parse_device(options.device)
    device = "cuda" if where.kind == "cuda" else "cpu"
    profile = core = None
    for wanted, offload_dir in _wanted(options, device):
        refresh = options.refresh and profile is None
        profile, core = for_device(where, partial(measured_hardware, wanted, offload_dir, refresh=refresh))
    assert profile is not None  # there is at least one format
    if where.kind == "emulated":
        profile = emulated_profile(profile, where, core)
    if options.output == "-":
        return [json.dumps(profile.to_json(), indent=2)]
    if options.output:
        write_text(json.dumps(profile.to_json(), indent=2) + "\n", options.output, "-o")
    return describe_profile(profile)


def _wanted(options: ProfileOptions, device: str) -> Iterator[tuple[Wanted, Path]]:
    """The rates to measure, with the directory of the disk tier: for each format those of the model, or of any model.

    Args:
        options: The options.
        device: "cpu" or "cuda".
    """
    for name in dict.fromkeys(options.dtype or ("auto",)):
        if options.model is None:
            dtype = native_format(device) if name == "auto" else name
            yield wanted_of(None, dtype, device=device), Path(options.offload_dir or cache_dir())
            continue
        files, config = resolve_for_planning(options.model)
        asked = JobOptions(options.model, None, None, dtype=name, device=device, offload_dir=options.offload_dir)
        job = resolve_job(asked, files, config)
        formats = weight_formats_measured(job, may_stream=may_stream(job))
        yield wanted_of(job.process_config, job.dtype, *formats, device=device), job.offload_dir


def native_format(device: str) -> str:
    """The dtype in which a device computes models that are stored in 16 bits. device: "cpu" or "cuda"."""
    from batchgen.ops.instruction_set import has_fast_bfloat16

    return "bfloat16" if device == "cuda" or has_fast_bfloat16() else "float32"


def describe_profile(profile: HardwareProfile) -> list[str]:
    """The most important sizes and rates of a hardware profile, as lines."""
    lines = [f"{profile.name}"]
    sizes = [
        ("CPU memory", profile.cpu_memory_bytes),
        ("GPU memory", profile.gpu_memory_bytes),
        ("disk", profile.disk_bytes),
    ]
    lines.append(", ".join(f"{name} {format_bytes(size)}" for name, size in sizes if size))
    for device, rates in (("GPU", profile.gpu), ("CPU", profile.cpu)):
        if rates is None:
            continue
        for dtype in rates.gemm_flops_per_s:
            curve = [
                f"{rates.rates('gemm_flops_per_s', dtype).at(width=2048, tokens=t) / 1e9:,.0f}"
                for t in (1, 16, 256, 1024)
            ]
            lines.append(f"{device} {dtype} GEMM, GFLOP/s at 1, 16, 256, 1024 tokens: {', '.join(curve)}")
        for dtype in rates.decode_attention_bytes_per_s:
            table = rates.rates("decode_attention_bytes_per_s", dtype)
            curve = [f"{table.at(group=g, batch=32, context=1024) / 1e9:,.1f}" for g in (1, 4, 8)]
            lines.append(f"{device} {dtype} decode attention, GB/s of KV at groups of 1, 4, 8: {', '.join(curve)}")
    for name, rate in (
        ("host to GPU", profile.h2d_bytes_per_s),
        ("GPU to host", profile.d2h_bytes_per_s),
        ("host memory", profile.dram_bytes_per_s),
        ("disk read", profile.disk_read_bytes_per_s),
        ("disk write", profile.disk_write_bytes_per_s),
    ):
        if rate:
            lines.append(f"{name}: {rate / 1e9:,.2f} GB/s")
    if profile.kernels.names() or profile.kernels.default:
        lines += kernel_lines(profile.kernels)
    return lines
