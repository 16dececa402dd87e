"""Strategies of the papers as a table: what each fixes, what it may use, and the candidates that it adds to the search.

A strategy restricts the planner's search. Each has what this engine does anyway: continuous admission, chunked prompts,
and the sizes that suit it best.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from batchgen.core.errors import InputError
from batchgen.core.kv_placement import TIERS, KVPlacement
from batchgen.core.plan import Policy
from batchgen.core.units import format_bytes
from batchgen.planner.bound import LowerBounds
from batchgen.planner.deferred_attention import may_defer, with_deferred_attention
from batchgen.planner.kv_memory import giving_window, kv_block_bytes
from batchgen.planner.problem import Problem
from batchgen.planner.search import (
    Candidate,
    Prune,
    in_orders,
    prune_nothing,
    search,
    search_unless_pruned,
)
from batchgen.planner.sizes import group_bytes

# With more sequences in flight than this, sequences that stream as a whole part the KV as finely as layers do.
_FEW_SEQS = 64


class NotApplicable(Exception):
    """A strategy does not apply to a problem, for the reason given."""


@dataclass(frozen=True)
class Strategy:
    """One strategy: a restriction of the planner's search.

    Attributes:
        name: The paper's system, or what is special about the strategy.
        description: Half a sentence that says what the strategy does.
        matches: Whether a policy uses the strategy; the first of several that match counts.
        weight_tiers: Tiers that may hold weights.
        kv_placements: KV placements that sequences may have.
        kv_by_layer: Whether KV of placement "streamed" stays on the GPU in some layers.
        gpu_batches: Number of micro-batches; None leaves it to the search.
        yields_gpu_batches: Whether a number that the user asks for goes before `gpu_batches`; otherwise the strategy
            needs its own.
        admissions: Admissions that the strategy may use; None allows those of the problem.
        unsuited: The reason why the strategy does not apply to a problem; "" where it does.
        unused: The reason why the fastest plan within the restriction does not use the strategy; "" where it does.
        extend: Candidates of the strategy made from the fastest plan within the restriction, but for those that are
            pruned.
        not_extended: The reason why there may be none of these; with {sweeps} for the sweeps that a deferred token
            takes.
        beside_search: Whether the strategy's plans are simulated beside the search's own candidates, which do not
            include them.
        most_seqs: The most sequences in flight that are tried beside the search; None leaves it to the problem.
    """

    name: str
    description: str
    matches: Callable[[Policy], bool]
    weight_tiers: tuple[str, ...] = TIERS
    kv_placements: tuple[str, ...] = tuple(KVPlacement)
    kv_by_layer: bool = False
    gpu_batches: int | None = None
    yields_gpu_batches: bool = False
    admissions: tuple[str, ...] | None = None
    unsuited: Callable[[Problem], str] = lambda problem: ""
    unused: Callable[[Candidate], str] = lambda candidate: ""
    extend: Callable[[Problem, Candidate, Prune], Iterator[Candidate]] | None = None
    not_extended: str = ""
    beside_search: bool = False
    most_seqs: int | None = None

    def restrict(self, problem: Problem) -> Problem:
        """The problem under the strategy. Raises NotApplicable."""
        self._check(problem)
        allowed = problem.allowed
        tiers = tuple(tier for tier in allowed.weight_tiers if tier in self.weight_tiers)
        classes = tuple(name for name in allowed.kv_placements if name in self.kv_placements)
        if not tiers or not classes:
            raise NotApplicable("is not among what this plan may do")
        batches = problem.num_gpu_batches if self.yields_gpu_batches else None
        return replace(
            problem,
            allowed=replace(allowed, weight_tiers=tiers, kv_placements=classes, kv_by_layer=self.kv_by_layer),
            num_gpu_batches=batches or self.gpu_batches or problem.num_gpu_batches,
            admissions=self.admissions or problem.admissions,
        )

    def _check(self, problem: Problem) -> None:
        """Raise NotApplicable where that is known without a search."""
        if self.weight_tiers == ("gpu",) and _layer_weights_bytes(problem) > problem.budgets["gpu"]:
            weights, memory = format_bytes(_layer_weights_bytes(problem)), format_bytes(problem.budgets["gpu"])
            raise NotApplicable(f"the weights of the layers take {weights}, more than the GPU's {memory}")
        if reason := self.unsuited(problem):
            raise NotApplicable(reason)
        if self.gpu_batches is None or self.yields_gpu_batches:
            return
        if problem.num_gpu_batches not in (None, self.gpu_batches):
            raise NotApplicable(
                f"takes {self.gpu_batches} micro-batches, --num-gpu-batches is {problem.num_gpu_batches}"
            )
        if problem.max_num_seqs is not None and problem.max_num_seqs % self.gpu_batches:
            raise NotApplicable(f"takes {self.gpu_batches} micro-batches, --max-num-seqs is {problem.max_num_seqs}")


def _layer_weights_bytes(problem: Problem) -> int:
    """Bytes of the weights of all layers in the smallest format that is allowed."""
    sizes = (group_bytes(problem.model, problem.compute_format, name) for name in problem.weight_formats)
    return min(sum(groups.values()) for groups in sizes) * problem.model.num_layers


def best_candidates(strategy: Strategy, problem: Problem) -> list[Candidate]:
    """The strategy's best candidates. Raises NotApplicable, or InputError where nothing fits."""
    restricted = strategy.restrict(problem)
    fastest = search(restricted)
    if reason := strategy.unused(fastest):
        raise NotApplicable(reason)
    if strategy.extend is None:
        return [fastest]
    extended = list(strategy.extend(restricted, fastest, prune_nothing))
    if not extended:
        raise NotApplicable(strategy.not_extended.format(sweeps=f"{problem.model.num_layers + 1:,}"))
    return extended


def added_candidates(problem: Problem, prune: Prune, bounds: LowerBounds | None = None) -> Iterator[Candidate]:
    """Candidates of the strategies whose plans the search does not find by itself, but for those that are pruned.

    bounds: of the search; None: those that it computed are not known.
    """
    bounds = bounds or LowerBounds()
    for strategy in strategies_for(problem):
        if not strategy.beside_search:
            continue
        most_seqs = min(problem.most_seqs, strategy.most_seqs or problem.most_seqs)
        with contextlib.suppress(NotApplicable, InputError):
            restricted = strategy.restrict(replace(problem, most_seqs=most_seqs))
            # What is extended may be faster than what it is made from.
            fastest = search_unless_pruned(restricted, prune_nothing if strategy.extend else prune, bounds)
            if fastest is None or strategy.unused(fastest):
                continue
            if not prune(fastest.job_s):
                yield fastest
            if strategy.extend is not None:
                yield from strategy.extend(restricted, fastest, prune)


def _no_cpu_attention(candidate: Candidate) -> str:
    return "" if candidate.counts.kv_seqs["cpu"] else "CPU attention beside a second batch would save nothing here"


def _with_deferred_attention(problem: Problem, base: Candidate, prune: Prune) -> Iterator[Candidate]:
    candidate = with_deferred_attention(problem, base, prune)
    if candidate is not None:
        yield candidate


def _defers_nothing(problem: Problem) -> str:
    needs = "needs continuous admission, one micro-batch and a block size that is left to the plan"
    return "" if may_defer(problem) else needs


def _keeps_kv_whole(problem: Problem) -> str:
    """Refuse KV by layer where classes forbid it, layers differ in KV, or a sliding window frees blocks."""
    if len(set(kv_block_bytes(problem.model, problem.kv_block_size, problem.kv_formats[0]))) > 1:
        return "needs KV of the same size in all layers"
    longest = problem.longest_tokens or problem.workload.max_seq_len
    may_part = giving_window(problem.model, problem.kv_block_size, longest) is None and (
        problem.hardware.gpu is not None
        and "gpu" in problem.allowed.weight_tiers
        and {"gpu", "streamed"} <= set(problem.allowed.kv_placements)
    )
    return "" if may_part else "is not among what this plan may do"


def _no_layer_keeps_kv(candidate: Candidate) -> str:
    return "" if candidate.counts.kv_layers else "GPU memory holds no layer's KV beside the weights"


def _nothing_on_disk(candidate: Candidate) -> str:
    at = candidate.counts.placement(candidate.inputs)
    on_disk = at.w_disk or at.kv_disk or at.head_disk or at.embed_disk
    return "" if on_disk else "all of it is in memory: nothing would be gained by streaming"


def _holds_weights(policy: Policy) -> bool:
    return all(not on_cpu and not on_disk for _, on_cpu, on_disk in policy.weight_layers.values())


def _classes(policy: Policy) -> set[str]:
    return {name for name, count in policy.kv_seqs.items() if count}


def _uses_disk(policy: Policy) -> bool:
    on_disk = "disk" in {*_classes(policy), policy.head_tier, policy.embedding_tier}
    return on_disk or any(layers for _, _, layers in policy.weight_layers.values())


GPU_ONLY = Strategy(
    "GPU-only",
    "weights and KV on the GPU",
    lambda policy: _holds_weights(policy) and _classes(policy) <= {"gpu"},
    weight_tiers=("gpu",),
    kv_placements=("gpu",),
    gpu_batches=1,  # nothing is waited for that a second micro-batch could hide
    yields_gpu_batches=True,
)
NEO = Strategy(
    "NEO",
    "weights on the GPU; the CPU attends for one batch while the other one computes",
    lambda policy: _holds_weights(policy) and policy.num_gpu_batches > 1 and _classes(policy) <= {"gpu", "cpu"},
    weight_tiers=("gpu",),
    kv_placements=("gpu", "cpu"),
    gpu_batches=2,
    unused=_no_cpu_attention,
    extend=in_orders,
)
APEX = Strategy(
    "APEX",
    "weights on the GPU; the CPU attends beside whole sweeps",
    lambda policy: "deferred" in _classes(policy),
    weight_tiers=("gpu",),
    kv_placements=("gpu",),  # attention within a sweep would wait behind that of deferred sequences
    gpu_batches=1,
    admissions=("continuous",),
    unsuited=_defers_nothing,
    extend=_with_deferred_attention,
    not_extended=(
        "a deferred token takes {sweeps} sweeps: the job is too short for that,"
        " or memory or the CPU have nothing to spare"
    ),
    beside_search=True,
)
PIE = Strategy(
    "Pie",
    "weights on the GPU, KV there in some layers; in the others it streams",
    lambda policy: policy.kv_layers > 0 and _holds_weights(policy),
    weight_tiers=("gpu",),
    kv_placements=("streamed",),
    kv_by_layer=True,
    unsuited=_keeps_kv_whole,
    unused=_no_layer_keeps_kv,
    beside_search=True,
    most_seqs=_FEW_SEQS,
)
FLEXGEN = Strategy(
    "FlexGen",
    "weights and KV in any tier, streamed where they are needed",
    lambda policy: True,
    kv_placements=("gpu", "cpu", "streamed", "disk"),
    extend=in_orders,
)
STREAMED = Strategy(
    "streamed",
    "weights or KV from disk",
    _uses_disk,
    weight_tiers=("cpu", "disk"),
    kv_placements=("cpu", "disk"),
    unused=_nothing_on_disk,
)
IN_MEMORY = Strategy(
    "in memory",
    "weights and KV in memory",
    lambda policy: True,
    weight_tiers=("cpu",),
    kv_placements=("cpu",),
)

WITH_GPU = (GPU_ONLY, NEO, APEX, PIE, FLEXGEN)
ON_CPU = (STREAMED, IN_MEMORY)


def strategies_for(problem: Problem) -> tuple[Strategy, ...]:
    """The strategies that there are on the problem's machine."""
    return ON_CPU if problem.hardware.gpu is None else WITH_GPU


def strategy_of(policy: Policy, strategies: tuple[Strategy, ...]) -> str:
    """The name of the strategy that a policy uses."""
    return next(strategy.name for strategy in strategies if strategy.matches(policy))
