"""A job over the stages of a pipeline: which layers each stage has, what it may use of its host, and how it is planned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from batchgen.core.errors import InputError
from batchgen.core.plan import Plan, Policy, spread_layers
from batchgen.distributed.launch import ranks_of_host
from batchgen.job.pipeline_time import planned_sweeps_s, simulate_pipeline
from batchgen.job.planning import Case, plan_problem, problem_of
from batchgen.job.resolved import ResolvedJob
from batchgen.job.workload import EstimatedWorkload
from batchgen.planner.stages import split_layers


def stage_job(job: ResolvedJob) -> ResolvedJob:
    """The job as its largest stage has it: with as many layers, its share of the host's budgets, and both ends of the model.

    Raises:
        InputError: There are more stages than layers, or a device that runs none.
    """
    count = job.options.pipeline
    if job.device.kind == "cuda":
        raise InputError("--pipeline does not run on CUDA yet: leave it out, or give --device cpu")
    if count > job.config.num_layers:
        raise InputError(
            f"--pipeline {count} is more than the model's {job.config.num_layers} layers: give fewer stages"
        )
    here = ranks_of_host(count)
    # Budgets leave one emulated memory out of the host's: the other stages have theirs there too.
    emulated = job.budgets.get("gpu", 0) if job.cpu_memory is None else 0
    layers = max(stop - first for first, stop in split_layers(job.config, count))
    return replace(
        job,
        config=job.config.first_layers(layers),
        cpu_memory=max(1, (job.budgets["cpu"] - (here - 1) * emulated) // here),
        disk_memory=job.budgets["disk"] // here,
    )


def plan_pipeline(case: Case, job: ResolvedJob, estimated: EstimatedWorkload) -> Plan:
    """The plan of the largest stage, with the time that all of them take.

    Args:
        case: Of `stage_job`.
        job: The whole one.
        estimated: Its workload.

    Raises:
        InputError: No plan fits.
    """
    problem = problem_of(case.hardware, case.job.config, estimated.workload, case.request)
    classes = tuple(name for name in problem.allowed.kv_classes if name != "deferred")
    allowed = replace(problem.allowed, kv_classes=classes)
    problem = replace(problem, allowed=allowed, sharing=ranks_of_host(job.options.pipeline))
    plan = plan_problem(case, problem, estimated)
    stages = [
        (first, stop, stage_policy(plan.policy, stop - first))
        for first, stop in split_layers(job.config, job.options.pipeline)
    ]
    seconds = simulate_pipeline(plan, job.config, case.hardware, stages)
    return _taking(plan, seconds, planned_sweeps_s(plan, case.hardware))


def _taking(plan: Plan, sweeps_s: float, planned_s: float) -> Plan:
    """The plan with another time for all sweeps. planned_s: the one that it has."""
    before = plan.prediction
    slower = sweeps_s / planned_s
    total_s = before.total_s - planned_s + sweeps_s

    def stretched(seconds: float) -> float:
        return before.startup_s + (seconds - before.startup_s) * slower

    return replace(
        plan,
        prediction=replace(
            before,
            total_s=total_s,
            low_s=min(total_s, stretched(before.low_s)),
            high_s=max(total_s, stretched(before.high_s)),
            generated_tokens_per_s=before.generated_tokens_per_s * before.total_s / total_s,
            total_tokens_per_s=before.total_tokens_per_s * before.total_s / total_s,
            block_latency_s=before.block_latency_s * slower,
            stages=tuple(replace(stage, seconds=stage.seconds * slower) for stage in before.stages),
        ),
    )


def stage_policy(policy: Policy, layers: int) -> Policy:
    """The policy of a stage with so many layers, from that of the largest: as evenly mixed over the tiers."""
    counts: dict[str, tuple[int, int, int]] = {}
    for group, placed in policy.weight_layers.items():
        tiers: Sequence[str] = list(spread_layers(placed))[:layers]
        counts[group] = (tiers.count("gpu"), tiers.count("cpu"), tiers.count("disk"))
    return replace(policy, weight_layers=counts)
