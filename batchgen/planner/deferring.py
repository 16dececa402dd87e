"""APEX's way: sequences whose attention is deferred, beside a block whose KV is on the GPU (section 3.3).

How many there are is decided before the placement, as what they take of a sweep does not depend on it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from batchgen.core.errors import InputError
from batchgen.core.plan import TIERS
from batchgen.planner.costs import bounds, can_delegate, decode_attention_s, layer_lanes
from batchgen.planner.memory import group_bytes
from batchgen.planner.mip import solve
from batchgen.planner.peak_memory import peak_bytes
from batchgen.planner.phases import deferral_of, phases_of
from batchgen.planner.problem import Problem
from batchgen.planner.search import Candidate, max_num_seqs_choices, realised_candidate, search

# Of the time in which the CPU has nothing else to do, so much is given to deferred attention: sweeps are not all equally long.
_DEFERRED_FRAC = 0.9
# Deferred sequences take memory on the GPU too, so fewer others may fit: so many smaller sizes are tried, to half of them.
_SMALLER_SIZES = 8


def apex_candidates(problem: Problem, worth: Callable[[float], bool]) -> Iterator[Candidate]:
    """One micro-batch with weights and KV on the GPU, alone and with deferred sequences beside it.

    What the CPU attends to within a sweep would wait behind theirs, so there are no others in host memory.
    """
    if not may_defer(problem) or layers_bytes(problem) > problem.budgets["gpu"]:
        return
    on_gpu = replace(problem.allowed, weight_tiers=("gpu",), kv_classes=("gpu",))
    with contextlib.suppress(InputError):
        base = search(replace(problem, num_gpu_batches=1, admissions=("continuous",), allowed=on_gpu))
        if worth(base.seconds):
            yield base
        found = deferring(problem, base, worth)
        if found is not None:
            yield found


def layers_bytes(problem: Problem) -> int:
    """Bytes of the weights of all layers in the smallest format that is allowed."""
    sizes = (group_bytes(problem.model, problem.compute_format, name) for name in problem.weight_formats)
    return min(sum(groups.values()) for groups in sizes) * problem.model.num_layers


def may_defer(problem: Problem) -> bool:
    """Whether any sequence's attention may be deferred: not where the block size is fixed, whose part they would be."""
    return (
        problem.hardware.gpu is not None
        and not problem.runtime.serial
        and "deferred" in problem.allowed.kv_classes
        and "continuous" in problem.admissions
        and problem.num_gpu_batches in (None, 1)
        and problem.max_num_seqs is None
    )


def deferring(
    problem: Problem, base: Candidate, worth: Callable[[float], bool] = lambda seconds: True
) -> Candidate | None:
    """The candidate with as many deferred sequences beside its own as the CPU, its memory, and the length of the job allow.

    None where there are none, where they do not fit, or it is not worth it.
    """
    s, best, best_s = base.inputs, None, math.inf
    most = _most_deferred(problem, base)
    allowed = replace(
        problem.allowed,
        weight_tiers=_weight_tiers(base),
        kv_classes=tuple(c for c, n in base.counts.kv_seqs.items() if n),
    )
    sizes = [s.max_num_seqs, *(size for size in reversed(max_num_seqs_choices(problem)) if size < s.max_num_seqs)]
    for swept_seqs in sizes[: 1 + _SMALLER_SIZES]:
        deferral = deferral_of(s.workload, swept_seqs, most, s.model.num_layers + 1)
        if deferral is None:
            continue
        inputs = replace(s, max_num_seqs=swept_seqs + deferral.seqs, deferral=deferral)
        phases = phases_of(s.workload, s.admission, swept_seqs, s.max_num_batched_tokens, deferral)
        realised = solve(inputs, phases, allowed, integer=True)
        if realised is None:
            continue
        if realised.seconds >= best_s:
            break  # more than it takes for all to fit
        best, best_s = (inputs, phases), realised.seconds
    relaxed = solve(*best, allowed, integer=False) if best else None
    return realised_candidate(replace(problem, allowed=allowed), relaxed, *best, worth) if best and relaxed else None


def _weight_tiers(base: Candidate) -> tuple[str, ...]:
    """Those that hold weights of the candidate: the CPU attends beside whole sweeps, which weights in transit would only make longer."""
    of_tiers = zip(*base.counts.weight_layers.values(), strict=True)
    return tuple(tier for tier, layers in zip(TIERS, of_tiers, strict=True) if any(layers))


def _most_deferred(problem: Problem, base: Candidate) -> int:
    """Deferred sequences that the CPU attends to in the time in which it would do nothing else, and has memory for."""
    s, at = base.inputs, base.counts.placement(base.inputs)
    if not can_delegate(s):
        return 0
    steady = max(base.phases, key=lambda phase: phase.decode_seqs * phase.sweeps)
    if not steady.decode_seqs:
        return 0
    lanes = layer_lanes(s, steady, at)
    idle_s = max(bounds(s.runtime, lanes)) - lanes.get("cores", lanes["cpu_attention"])
    each_s = decode_attention_s(s, steady, s.hardware.cpu) / steady.decode_seqs
    in_time = _DEFERRED_FRAC * s.model.num_layers * idle_s / each_s
    result = s.model.num_heads * s.model.head_dim * s.element_bytes
    in_memory = (s.budgets["cpu"] - peak_bytes(s, at)["cpu"]) / (s.seq_kv_bytes + 2 * result)
    return max(0, int(min(in_time, in_memory, problem.most_seqs - s.max_num_seqs)))
