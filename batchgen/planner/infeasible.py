"""The message for a problem that no plan fits: the budget that is short, and the smallest changes that would do."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from batchgen.core.dtypes import INT4
from batchgen.core.errors import InputError
from batchgen.core.hardware import HardwareProfile
from batchgen.core.units import format_at_least, format_bytes
from batchgen.planner.kv_memory import TIER_FLAGS
from batchgen.planner.mip import shortfall_bytes
from batchgen.planner.problem import CostInputs, Problem
from batchgen.planner.search_space import LEAST_BATCHED_TOKENS, least_batched_tokens, search_space

# What the user may fix about the size of a batch -> the option, and the least value of it that is looked at.
_SIZES = {
    "max_num_seqs": ("--max-num-seqs", 1),
    "max_num_batched_tokens": ("--max-num-batched-tokens", LEAST_BATCHED_TOKENS),
    "num_gpu_batches": ("--num-gpu-batches", 1),
}
_TIER_WORDS = {"gpu": "GPU memory", "cpu": "memory", "disk": "free disk"}


def machine_bytes(hardware: HardwareProfile) -> dict[str, int]:
    """Size of each tier that the machine has."""
    sizes = {"gpu": hardware.gpu_memory_bytes, "cpu": hardware.cpu_memory_bytes, "disk": hardware.disk_bytes}
    return {tier: size for tier, size in sizes.items() if size is not None}


def check_budgets(problem: Problem) -> None:
    """Raise InputError for a budget the machine does not have."""
    hardware = problem.hardware
    sizes = machine_bytes(hardware)
    for tier, budget in problem.budgets.items():
        size = sizes.get(tier)
        if size is None:
            raise InputError(f"{TIER_FLAGS[tier]} is given, but {hardware.name} has no GPU: leave it out")
        if budget > size:
            raise InputError(
                f"{TIER_FLAGS[tier]} {format_bytes(budget)} is more than {hardware.name} has"
                f" ({format_bytes(size)}): give at most that"
            )
        if budget <= 0 and tier != "disk":
            raise InputError(f"{TIER_FLAGS[tier]} must be above 0")


def explain_infeasible(problem: Problem) -> str:
    """A message with the budget that is short, and the smallest changes, each by itself, with which a plan fits.

    Where a size of the batch that the user fixes is what does not fit, the message begins with it.
    """
    smallest = _smallest_batch(problem)
    inputs = next((inputs for inputs, _ in search_space(smallest)), None)
    if inputs is None:
        return f"{problem.hardware.name} has no rates for the formats asked for: allow another --weights"
    fixed, smaller = _smaller_sizes(problem)
    short_bytes = _shortfalls(smallest)
    changes = [f"give at most {smaller}"] if smaller else []
    changes += [_remedies(problem, short_bytes)] if short_bytes else []
    if not changes:
        changes = ["no single budget can make up for it, raise several"]
    hint = _int4_hint(problem, short_bytes) if short_bytes and not smaller else ""
    return f"no plan fits{fixed}: {_least_use(problem, inputs)}; {', or '.join(changes)}{hint}"


def _smallest_batch(problem: Problem) -> Problem:
    """The problem with the smallest batch of those that it allows, and one kind of admission: memory is that of all."""
    max_num_seqs = problem.max_num_seqs or 1
    return replace(
        problem,
        admissions=problem.admissions[:1],
        max_num_seqs=max_num_seqs,
        num_gpu_batches=problem.num_gpu_batches or 1,
        max_num_batched_tokens=least_batched_tokens(problem, max_num_seqs),
    )


def _smaller_sizes(problem: Problem) -> tuple[str, str]:
    """The option that alone keeps every plan from fitting, as it is given, and with the largest value that fits.

    Both are empty where there is no such option.
    """
    for name, (flag, least) in _SIZES.items():
        given = getattr(problem, name)
        if given is None or given <= least or not _fits(_with_size(problem, name, least)):
            continue
        fitting, failing = least, min(given, problem.workload.num_seqs) if name == "max_num_seqs" else given
        while failing - fitting > 1:
            middle = (fitting + failing) // 2
            if _fits(_with_size(problem, name, middle)):
                fitting = middle
            else:
                failing = middle
        return f" {flag} {given}", f"{flag} {fitting}"
    return "", ""


def _with_size(problem: Problem, name: str, size: int) -> Problem:
    change: dict[str, Any] = {name: size}
    return replace(problem, **change)


def _fits(problem: Problem) -> bool:
    """Tell whether a plan with the smallest batch that the problem allows fits all budgets."""
    return any(
        shortfall_bytes(inputs, phases, problem.allowed, "cpu") == 0
        for inputs, phases in search_space(_smallest_batch(problem))
    )


def _shortfalls(problem: Problem) -> dict[str, float]:
    """The least bytes by which each tier's budget is short, if it alone is raised; without those that cannot help."""
    least: dict[str, float] = {}
    for inputs, phases in search_space(problem):
        for tier in problem.budgets:
            short = shortfall_bytes(inputs, phases, problem.allowed, tier)
            if short is not None:
                least[tier] = min(short, least.get(tier, short))
    return least


def _least_weight_bytes(problem: Problem, inputs: CostInputs) -> float:
    """Bytes of all weights in the smallest format that the problem allows."""
    in_formats = (replace(inputs, weight_format=name) for name in problem.weight_formats)
    return min(s.model.num_layers * s.layer_bytes + s.embedding_bytes + s.head_bytes for s in in_formats)


def _least_use(problem: Problem, inputs: CostInputs) -> str:
    """The memory that weights, the process and sequences in flight take, in words.

    Args:
        problem: The planner's problem.
        inputs: Inputs with the smallest batch.
    """
    whose = "the model's" if problem.sharing == 1 else "one process's"
    weights = _least_weight_bytes(problem, inputs)
    process = f", the process {format_bytes(problem.process_bytes)}" if problem.process_bytes else ""
    seqs = inputs.max_num_seqs
    sizes = {"KV": seqs * inputs.seq_kv_bytes, "states": seqs * inputs.seq_state_bytes}
    kept = " and ".join(f"{format_bytes(size)} of {name}" for name, size in sizes.items() if size)
    sequences = "one sequence" if seqs == 1 else f"{seqs:,} sequences"
    return f"{whose} weights take {format_bytes(weights)}{process}, {sequences} {kept}"


def _remedies(problem: Problem, short_bytes: Mapping[str, float]) -> str:
    """The budgets to give, or the machine that it takes where it has no more memory than the budgets.

    Args:
        problem: The planner's problem.
        short_bytes: Bytes by which each tier's budget is short; budgets of "cpu" and "disk" are one process's.
    """
    sharing = {tier: 1 if tier == "gpu" else problem.sharing for tier in short_bytes}
    more = {tier: short * sharing[tier] for tier, short in short_bytes.items()}
    needed = {tier: (problem.budgets[tier] * sharing[tier] + more[tier]) * 1.001 for tier in more}
    sizes = machine_bytes(problem.hardware)
    by_shortfall = sorted(more, key=lambda tier: more[tier])
    changes = [
        f"{TIER_FLAGS[tier]} {format_at_least(needed[tier])} ({format_bytes(more[tier])} more)"
        for tier in by_shortfall
        if needed[tier] <= sizes[tier]
    ]
    if changes:
        return f"give at least {', or '.join(changes)}"
    larger = ", or ".join(f"{format_at_least(needed[tier])} of {_TIER_WORDS[tier]}" for tier in by_shortfall)
    return f"it takes a machine with at least {larger} ({problem.hardware.name} has less)"


def _int4_hint(problem: Problem, short_bytes: Mapping[str, float]) -> str:
    """A hint at what int4 weights would need, where that is less; embeddings and output matrix stay as they are.

    There is none where only one tier is allowed, as the caller offers no formats then.
    """
    if not problem.offers_int4 or len(problem.allowed.weight_tiers) < 2 or INT4 in problem.weight_formats:
        return ""
    packed = replace(problem, weight_formats=(INT4,))
    if _fits(packed):
        return "; with --weights int4 it fits"
    still_short = _shortfalls(_smallest_batch(packed))
    if not any(short < short_bytes.get(tier, math.inf) for tier, short in still_short.items()):
        return ""
    return f"; with --weights int4, {_remedies(packed, still_short)}"
