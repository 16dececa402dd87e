"""Settings of an emulated accelerator and a job: in each something else is scarce and another strategy the fastest.

The accelerator has a core of its own. The model is small, with as many KV heads as query heads, so that attention is a
large part of a sweep, and few layers: a deferred token takes a sweep for each and one more, and jobs that are measured
have to last for that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from batchgen.core.device import Device
from batchgen.core.errors import InputError
from batchgen.core.hardware import ComputeRates, HardwareProfile, Rates
from batchgen.core.plan import Plan
from batchgen.core.workload import Workload
from batchgen.models.config import ModelConfig
from batchgen.planner.plan_selection import plan_problem
from batchgen.planner.problem import Loading, Problem, problem_of
from batchgen.planner.sizes import store_bytes
from batchgen.planner.strategies import NotApplicable, strategies_for, strategy_of
from batchgen.planner.strategy_times import best_plan
from batchgen.profiler.emulated import dedicated_core_profile

MIB = 1 << 20
SHAPE = {
    "num_hidden_layers": 4,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 2048,
    "max_position_embeddings": 4096,
}


@dataclass(frozen=True)
class Setting:
    """A device, and rows of equal lengths in tokens.

    Attributes:
        scarce: what there is too little of, and so which strategy is to be the fastest.
        winners: names of strategies, of which the plan is to follow one.
        strategies: those that are looked at beside the plan; empty for all.
    """

    name: str
    scarce: str
    winners: tuple[str, ...]
    device: Device
    rows: int
    prompt: int
    output: int
    strategies: tuple[str, ...] = ()

    @property
    def workload(self) -> Workload:
        return Workload.uniform(self.rows, self.prompt, self.output)


SETTINGS = (
    Setting(
        "all fits",
        "nothing: all KV fits the device, a second batch would double what each layer takes by itself,"
        " and the CPU attends slowly",
        ("GPU-only",),
        Device("emulated", 320 * MIB, 2e8, 2e8, slowdown=1.0, cpu_slowdown=64.0, step_overhead_s=2e-3),
        rows=64,
        prompt=128,
        output=24,
    ),
    Setting(
        "fast CPU",
        "memory of the device and its link: the CPU attends to all, sooner than the device computes the other batch",
        ("NEO",),
        Device("emulated", 128 * MIB, 2e8, 2e8, slowdown=4.0),
        rows=96,
        prompt=64,
        output=128,
    ),
    Setting(
        "fast link",
        "memory of the device and the CPU: KV comes over the link sooner than the CPU could attend to it",
        ("FlexGen", "Pie"),
        Device("emulated", 120 * MIB, 8e9, 8e9, slowdown=2.0, cpu_slowdown=32.0, step_overhead_s=3e-3),
        rows=96,
        prompt=128,
        output=64,
    ),
    Setting(
        "slow CPU",
        "memory of the device, its link and the CPU: a second batch would double what each layer takes by itself,"
        " for too little attention",
        ("APEX",),
        Device("emulated", 256 * MIB, 2e8, 2e8, slowdown=1.0, cpu_slowdown=6.0, step_overhead_s=5e-3),
        rows=480,
        prompt=32,
        output=224,
    ),
)

# The last of them but for one number: with a faster CPU a second batch pays. Between the two lies where APEX's
# inequality (6) flips.
FLIPPED = replace(
    SETTINGS[-1],
    name="slow CPU, four times as fast",
    scarce="as with the slow CPU, but it attends to so many sequences that a second batch pays",
    winners=("NEO",),
    device=replace(SETTINGS[-1].device, cpu_slowdown=1.5),
    strategies=("NEO", "APEX"),
)


def _constant(rate: float) -> dict[str, Rates]:
    return {"bfloat16": Rates((), rate)}


# One core of a server's CPU, in round numbers.
ROUND_CORE = HardwareProfile(
    name="one core in round numbers",
    cpu=ComputeRates(
        gemm_flops_per_s={
            "bfloat16": Rates(("tokens",), ((1, 1.6e10), (4, 6e10), (16, 1.5e11), (64, 1.7e11), (1024, 1.8e11)))
        },
        prefill_attention_flops_per_s=_constant(7e10),
        shared_attention_flops_per_s=_constant(8e10),
        decode_attention_bytes_per_s=_constant(8e9),
        elementwise_bytes_per_s=_constant(6e9),
        step_overhead_s=1e-4,
    ),
    gpu=None,
    cpu_memory_bytes=8 << 30,
    disk_bytes=50 << 30,
    dram_bytes_per_s=1.5e10,
    disk_read_bytes_per_s=2e9,
    disk_write_bytes_per_s=1e9,
    load_bytes_per_s=1e9,
    sampling_logits_per_s=1e9,
    sweep_overhead_s=3e-4,
    sequence_overhead_s=1e-5,
)
ROUND_PROCESS_BYTES = 300 * MIB


def round_machine(device: Device) -> HardwareProfile:
    """The machine of two cores in round numbers, one of which is the device's."""
    links: dict[str, Any] = {"h2d_bytes_per_s": device.h2d_bytes_per_s, "d2h_bytes_per_s": device.d2h_bytes_per_s}
    sizes = {"gpu_memory_bytes": device.gpu_memory_bytes}
    return dedicated_core_profile(replace(ROUND_CORE, gpu=ROUND_CORE.cpu, **links, **sizes), device, ROUND_CORE)


def problem_on(
    hardware: HardwareProfile, config: ModelConfig, workload: Workload, process_bytes: int, **budgets: int
) -> Problem:
    """The problem of every setting: bfloat16, no shared prefixes, and a weight store that must be written."""
    loading = {"bfloat16": Loading(store_bytes=store_bytes(config, "bfloat16", "native"))}
    return problem_of(
        hardware, config, workload, dtype="bfloat16", max_model_len=config.max_position, process_bytes=process_bytes,
        share_prefixes=False, loading=loading, **budgets,
    )  # fmt: skip


def plans_of(
    setting: Setting, hardware: HardwareProfile, config: ModelConfig, process_bytes: int
) -> tuple[dict[str, Plan], dict[str, str], str]:
    """Plans for a setting.

    Returns:
        The chosen plan and the best one of every strategy; why others cannot be followed; and the strategy that the
        chosen plan follows.
    """
    problem = problem_on(hardware, config, setting.workload, process_bytes)
    plans = {"chosen": plan_problem(problem)}
    reasons = {}
    for strategy in strategies_for(problem):
        if setting.strategies and strategy.name not in setting.strategies:
            continue
        try:
            plans[strategy.name] = best_plan(strategy, problem)
        except (NotApplicable, InputError) as error:
            reasons[strategy.name] = str(error)
    return plans, reasons, strategy_of(plans["chosen"].policy, strategies_for(problem))


def seconds_of(plans: dict[str, Plan]) -> Iterator[tuple[str, float]]:
    """Simulated seconds of each plan's sweeps."""
    for name, plan in plans.items():
        yield name, plan.prediction.total_s - plan.prediction.startup_s
