"""A job over the stages of a pipeline: what can be split so, and the plan of the largest stage with the time that all of them take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from batchgen.core.device import Device
from batchgen.core.errors import InputError
from batchgen.core.hardware import HardwareProfile
from batchgen.core.plan import Plan, Policy, spread_layers
from batchgen.models.config import ModelConfig
from batchgen.planner.pipeline_time import planned_sweeps_s, simulate_pipeline
from batchgen.planner.ranks import Link
from batchgen.planner.stages import split_layers


def check_stages(config: ModelConfig, count: int, device: Device) -> None:
    """Refuse more stages than layers, and a device that runs none. Raises InputError."""
    if count > 1 and device.kind == "cuda":
        raise InputError("--pipeline does not run on CUDA yet: leave it out, or give --device cpu")
    if count > config.num_layers:
        raise InputError(f"--pipeline {count} is more than the model's {config.num_layers} layers: give fewer stages")


def largest_stage(config: ModelConfig, count: int) -> ModelConfig:
    """The shape that the largest stage is planned as: with as many layers, and both ends of the model."""
    return config.first_layers(max(stop - first for first, stop in split_layers(config, count)))


def over_stages(plan: Plan, config: ModelConfig, hardware: HardwareProfile, count: int, link: Link) -> Plan:
    """The plan of the largest stage, with the time that all of them take.

    Args:
        plan: Of a job whose model is `largest_stage`.
        config: The whole model's.
        hardware: Of each stage.
        count: Stages.
        link: From one to the next.

    Raises:
        InputError: The budgets of the plan do not hold what it places.
    """
    stages = [(first, stop, stage_policy(plan.policy, stop - first)) for first, stop in split_layers(config, count)]
    seconds = simulate_pipeline(plan, config, hardware, stages, link=link)
    return _taking(plan, seconds, planned_sweeps_s(plan, hardware))


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
