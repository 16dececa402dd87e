"""Rates of kinds of CPUs, which ship with the package: what a machine is planned with before anything was measured.

`kinds/` has a table for each of some instruction sets: a hardware profile of one core, measured by
benchmarks/kind_of_cpu.py. How a rate changes with sizes, weight formats and dtypes belongs to an instruction set. How
fast the cores of one machine are does not: a probe or a job on the machine says that (`core.knowledge`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

from batchgen.core.dtypes import BLOCK_FORMATS, matmul_key
from batchgen.core.hardware import ComputeRates, HardwareProfile, Rates
from batchgen.core.knowledge import (
    DECODE,
    ELEMENTWISE,
    FEW,
    MANY,
    OVERHEADS,
    PREFILL,
    SPEED,
    Knowledge,
    few_share,
    model_name,
    weights_name,
)
from batchgen.core.machine import available_cores, cpu_name
from batchgen.models.config import ModelConfig
from batchgen.ops.instruction_set import instruction_set

_FOLDER = resources.files("batchgen.profiler") / "kinds"
# The table that stands in for an instruction set without one, and the part of its speed.
_STAND_INS = {
    "avx512_vnni": ("avx512", 1.0),
    "avx_vnni": ("avx2", 1.0),
    "neon": ("avx2", 0.5),
    "neon_dot": ("avx2", 0.5),
    "scalar": ("avx2", 0.1),
}
# A stand-in's rates are so much less certain.
_STAND_IN_PRIOR = 1.5
# Cores beyond so many add nothing to what memory delivers.
_MEMORY_CORES = 8
# (vendor, family, model) of /proc/cpuinfo: logarithms of factors on the seconds of their table's cores. Of Zen 4 cores
# some were twice as fast as those of the tables (docs/benchmarks.md, machine A): this is the middle. The others are of
# the result files of benchmarks/kernel_rates.py.
_CPUS: dict[tuple[str, int, int], dict[str, float]] = {
    ("AuthenticAMD", 25, 17): {SPEED: math.log(0.7)},  # Zen 4
    ("AuthenticAMD", 26, 2): {SPEED: math.log(0.6), FEW: math.log(0.95), MANY: math.log(0.83)},  # Zen 5
    ("AuthenticAMD", 25, 1): {SPEED: math.log(1.2), FEW: math.log(1.45)},  # Zen 3
}


def rates_of_kind(knowledge: Knowledge, model: ModelConfig | None, sizes: dict[str, Any]) -> HardwareProfile:
    """The profile of this machine from its kind's table and from what is known of the machine.

    Args:
        knowledge: Factors on the table's seconds.
        model: Model of the job; None: any.
        sizes: The machine's sizes, fields of a profile.
    """
    name, speed = _STAND_INS.get(instruction_set(), (instruction_set(), 1.0))
    cores = available_cores()
    table = _of_cores(_table(name), cores, speed)
    profile = replace(table, name=f"{cpu_name()}, {cores} core{'s' if cores > 1 else ''}", sources={}, **sizes)
    return corrected(profile, knowledge, model)


def table_of_kind() -> str:
    """The name of the table of this machine's kind, for the cores that this thread may use."""
    return f"{instruction_set()}, {available_cores()} cores"


def first_knowledge(table: str) -> Knowledge:
    """The knowledge of this machine's rates by its kind of CPU alone. table: a name that `table_of_kind` gave."""
    return Knowledge(
        table, means=_CPUS.get(_cpu_ids(), {}), prior=_STAND_IN_PRIOR if table.partition(",")[0] in _STAND_INS else 1.0
    )


def corrected(profile: HardwareProfile, knowledge: Knowledge, model: ModelConfig | None) -> HardwareProfile:
    """A table's profile with the factors that are known applied to its rates.

    Args:
        profile: The table as a profile.
        knowledge: The factors.
        model: Model of the job, whose peculiar factor is applied too; None: any.
    """
    means = knowledge.means
    common = means.get(SPEED, 0.0)
    if model is not None:
        common += means.get(model_name(model.hidden_size, model.num_layers), 0.0)

    def slower(*names: str) -> float:
        return math.exp(common + sum(means.get(name, 0.0) for name in names))

    def scaled(tables: dict[str, Rates], name: str) -> dict[str, Rates]:
        return {key: rates.scaled(1 / slower(name)) for key, rates in tables.items()}

    cpu = profile.cpu
    gemm = {
        key: rates.slowed(_slowing(means, weights_name(key), common)) for key, rates in cpu.gemm_flops_per_s.items()
    }
    rates = replace(
        cpu,
        gemm_flops_per_s=gemm,
        prefill_attention_flops_per_s=scaled(cpu.prefill_attention_flops_per_s, PREFILL),
        shared_attention_flops_per_s=scaled(cpu.shared_attention_flops_per_s, PREFILL),
        decode_attention_bytes_per_s=scaled(cpu.decode_attention_bytes_per_s, DECODE),
        state_update_bytes_per_s=scaled(cpu.state_update_bytes_per_s, DECODE),
        state_prefill_flops_per_s=scaled(cpu.state_prefill_flops_per_s, PREFILL),
        elementwise_bytes_per_s=scaled(cpu.elementwise_bytes_per_s, ELEMENTWISE),
        expand_bytes_per_s=cpu.expand_bytes_per_s and cpu.expand_bytes_per_s / slower(ELEMENTWISE),
        step_overhead_s=cpu.step_overhead_s * slower(OVERHEADS),
    )
    return replace(
        profile,
        cpu=rates,
        dram_bytes_per_s=profile.dram_bytes_per_s / slower(FEW),
        load_bytes_per_s=profile.load_bytes_per_s / slower(),
        gguf_load_bytes_per_s=profile.gguf_load_bytes_per_s and profile.gguf_load_bytes_per_s / slower(),
        sampling_logits_per_s=profile.sampling_logits_per_s / slower(ELEMENTWISE),
        sweep_overhead_s=profile.sweep_overhead_s * slower(OVERHEADS),
        batch_overhead_s=profile.batch_overhead_s * slower(OVERHEADS),
        sequence_overhead_s=profile.sequence_overhead_s * slower(OVERHEADS),
        issue_overhead_s=profile.issue_overhead_s * slower(OVERHEADS),
        row_overhead_s=profile.row_overhead_s * slower(OVERHEADS),
        knowledge=knowledge,
    )


def _slowing(means: Any, weights: str, common: float) -> Callable[[float], float]:
    """The function from a number of tokens to the factor on the seconds of products."""

    def factor(tokens: float) -> float:
        few = few_share(tokens)
        return math.exp(common + means.get(weights, 0.0) + few * means.get(FEW, 0.0) + (1 - few) * means.get(MANY, 0.0))

    return factor


@lru_cache
def _table(name: str) -> HardwareProfile:
    profile = HardwareProfile.from_json(json.loads((_FOLDER / f"{name}.json").read_text(encoding="utf-8")))
    gemm = dict(profile.cpu.gemm_flops_per_s)
    for name in BLOCK_FORMATS:  # quantized rows are multiplied alike whatever the 16 bits of the activations
        for as_stored in (False, True):
            key = matmul_key(name, "bfloat16", as_stored=as_stored)
            if key in gemm:
                gemm.setdefault(matmul_key(name, "float16", as_stored=as_stored), gemm[key])
    return replace(profile, cpu=replace(profile.cpu, gemm_flops_per_s=gemm))


def _of_cores(one: HardwareProfile, cores: int, speed: float) -> HardwareProfile:
    """The profile of several cores from that of one: what memory bounds grows less than what cores compute.

    Args:
        one: Profile of one core.
        cores: Number of cores.
        speed: Factor on all rates.
    """
    computing, reading = speed * cores, speed * min(cores, _MEMORY_CORES)

    def grown(tokens: float) -> float:
        few = few_share(tokens)
        return 1 / (computing ** (1 - few) * reading**few)

    def scaled(name: str, factor: float) -> dict[str, Rates]:
        return {key: rates.scaled(factor) for key, rates in getattr(one.cpu, name).items()}

    cpu: ComputeRates = replace(
        one.cpu,
        gemm_flops_per_s={key: rates.slowed(grown) for key, rates in one.cpu.gemm_flops_per_s.items()},
        prefill_attention_flops_per_s=scaled("prefill_attention_flops_per_s", computing),
        decode_attention_bytes_per_s=scaled("decode_attention_bytes_per_s", reading),
        state_update_bytes_per_s=scaled("state_update_bytes_per_s", reading),
        state_prefill_flops_per_s=scaled("state_prefill_flops_per_s", computing),
        elementwise_bytes_per_s=scaled("elementwise_bytes_per_s", reading),
        expand_bytes_per_s=one.cpu.expand_bytes_per_s and one.cpu.expand_bytes_per_s * reading,
    )
    return replace(
        one,
        cpu=cpu,
        dram_bytes_per_s=one.dram_bytes_per_s * reading,
        sampling_logits_per_s=one.sampling_logits_per_s * reading,
    )


def _cpu_ids() -> tuple[str, int, int]:
    """Vendor, family and model of the CPU; ("", 0, 0) where the system does not give them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    values: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        values.setdefault(name.strip(), value.strip())
    try:
        return values["vendor_id"], int(values["cpu family"]), int(values["model"])
    except (KeyError, ValueError):
        return "", 0, 0
