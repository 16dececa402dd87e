"""Pie's way: weights on the GPU, KV there in some layers; in the others it streams behind what is computed (section 3).

Beside whole sequences that stream it is worth something where these are few and long: with one of four streaming, a quarter of the KV moves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace

from batchgen.core.errors import InputError
from batchgen.planner.deferring import layers_bytes
from batchgen.planner.kv_memory import giving_window
from batchgen.planner.problem import Allowed, Problem
from batchgen.planner.search import Candidate, search_worth

# With more sequences in flight than this, whole ones that stream part the KV as finely as anybody could tell.
_FEW_SEQS = 64


def by_layer_candidates(problem: Problem, worth: Callable[[float], bool]) -> Iterator[Candidate]:
    """The fastest plan of few sequences with weights on the GPU and KV by layer, if there is one, and it is worth it."""
    if not may_part(problem) or layers_bytes(problem) > problem.budgets["gpu"]:
        return
    with contextlib.suppress(InputError):
        few = replace(problem, most_seqs=min(problem.most_seqs, _FEW_SEQS))
        found = search_worth(by_layer(few), worth)
        if found is not None and found.counts.kv_layers:
            yield found


def may_part(problem: Problem) -> bool:
    """Whether KV of one sequence may lie on the GPU and in host memory: not where layers with a sliding window give blocks back."""
    allowed = problem.allowed
    longest = problem.longest_tokens or problem.workload.prompt_len.max + problem.workload.max_output_len
    return giving_window(problem.model, problem.kv_block_size, longest) is None and (
        problem.hardware.gpu is not None
        and not problem.runtime.serial
        and "gpu" in allowed.weight_tiers
        and {"gpu", "streamed"} <= set(allowed.kv_classes)
    )


def by_layer(problem: Problem) -> Problem:
    """The problem with weights on the GPU and all KV by layer."""
    return replace(problem, allowed=Allowed(("gpu",), ("streamed",), kv_by_layer=True))
