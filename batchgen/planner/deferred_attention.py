"""The number of sequences whose attention is deferred beside a block whose KV is on the GPU (APEX section 3.3).

The number is decided before the placement, as what these sequences take of a sweep does not depend on it.
"""

from __future__ import annotations

import math
from dataclasses import replace

from batchgen.core.kv_placement import TIERS
from batchgen.planner.costs import can_delegate, layer_lanes, phase_decode_attention_s, slowest_s
from batchgen.planner.linear import number
from batchgen.planner.memory import peak_bytes
from batchgen.planner.mip import Solution, solve
from batchgen.planner.phases import Phase, deferral_of, phases_of
from batchgen.planner.problem import Allowed, CostInputs, Problem
from batchgen.planner.search import Candidate, Prune, integer_candidate, prune_nothing
from batchgen.planner.search_space import max_num_seqs_choices
from batchgen.planner.step_seconds import query_bytes

# The part of the CPU's idle time that is given to deferred attention: sweeps are not all equally long.
_DEFERRED_FRAC = 0.9
# Deferred sequences take memory on the GPU too, so fewer others may fit: so many smaller sizes are tried, down to half.
_SMALLER_SIZES = 8

_Option = tuple[Solution, CostInputs, tuple[Phase, ...]]


def may_defer(problem: Problem) -> bool:
    """True if attention may be deferred: not where the block size is fixed, beside which deferred sequences come."""
    return (
        problem.hardware.gpu is not None
        and "deferred" in problem.allowed.kv_placements
        and "continuous" in problem.admissions
        and problem.num_gpu_batches in (None, 1)
        and problem.max_num_seqs is None
    )


def with_deferred_attention(problem: Problem, base: Candidate, prune: Prune = prune_nothing) -> Candidate | None:
    """The candidate with as many deferred sequences as the CPU, its memory, and the length of the job allow.

    Args:
        problem: The planner's problem.
        base: A candidate with one micro-batch.
        prune: Prune predicate.

    Returns:
        The candidate; None where there are no deferred sequences, where they do not fit, or it is pruned.
    """
    allowed = replace(
        problem.allowed,
        weight_tiers=_weight_tiers(base),
        kv_placements=tuple(c for c, n in base.counts.kv_seqs.items() if n),
    )
    most, options = _most_deferred(problem, base), list[_Option]()
    while most and not options:  # the GPU may have no memory for the activations of so many
        options = _options(problem, base, allowed, most)
        most = most * 3 // 4
    options.sort(key=lambda option: option[0].job_s)
    candidates = (integer_candidate(replace(problem, allowed=allowed), *option, prune) for option in options)
    return next((candidate for candidate in candidates if candidate is not None), None)


def _options(problem: Problem, base: Candidate, allowed: Allowed, most: int) -> list[_Option]:
    """The placements by the LP of the candidate's block, and of smaller ones, beside so many deferred sequences.

    Smaller blocks are tried for as long as that is faster.
    """
    s, options, best_s = base.inputs, list[_Option](), math.inf
    sizes = [s.max_num_seqs, *(size for size in reversed(max_num_seqs_choices(problem)) if size < s.max_num_seqs)]
    for swept_seqs in sizes[: 1 + _SMALLER_SIZES]:
        deferral = deferral_of(s.workload, swept_seqs, most, s.model.num_layers + 1)
        if deferral is None:
            continue
        inputs = replace(s, max_num_seqs=swept_seqs + deferral.seqs, deferral=deferral)
        phases = phases_of(s.workload, s.admission, swept_seqs, s.max_num_batched_tokens, deferral)
        relaxed = solve(inputs, phases, allowed, integer=False)
        if relaxed is None:
            continue
        options.append((relaxed, inputs, phases))
        if relaxed.job_s >= best_s:
            break  # the block is smaller than it has to be for all to fit
        best_s = relaxed.job_s
    return options


def _weight_tiers(base: Candidate) -> tuple[str, ...]:
    """Tiers that hold weights of the candidate, which others would make slower by weights in transit."""
    layers_by_tier = zip(*base.counts.weight_layers.values(), strict=True)
    return tuple(tier for tier, layers in zip(TIERS, layers_by_tier, strict=True) if any(layers))


def _most_deferred(problem: Problem, base: Candidate) -> int:
    """Deferred sequences that the CPU has time for, in which it would do nothing else, and memory for."""
    s, at = base.inputs, base.counts.placement(base.inputs)
    if not can_delegate(s):
        return 0
    steady = max(base.phases, key=lambda phase: phase.decode_seqs * phase.sweeps)
    if not steady.decode_seqs:
        return 0
    lanes = layer_lanes(s, steady, at)
    idle_s = slowest_s(lanes) - number(lanes.get("cores", lanes["cpu_attention"]))
    seq_s = phase_decode_attention_s(s, steady, s.hardware.cpu) / steady.decode_seqs
    in_time = _DEFERRED_FRAC * s.model.num_layers * idle_s / seq_s
    in_memory = (s.budgets["cpu"] - number(peak_bytes(s, at)["cpu"])) / (
        s.seq_kv_bytes + s.seq_state_bytes + 2 * query_bytes(s)
    )
    return max(0, int(min(in_time, in_memory, problem.most_seqs - s.max_num_seqs)))
