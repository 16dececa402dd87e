"""The ways of the papers beside the plan: what each would take for the same job on the same machine, or why it cannot be gone.

A way is a restriction of the planner's search. Its best candidate is simulated as the plan was. Each has what this engine does
anyway: continuous admission, chunked prompts, and the sizes that suit it best.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from batchgen.core.dtypes import INT4
from batchgen.core.errors import InputError
from batchgen.core.plan import Plan, Policy, StrategyTime
from batchgen.core.units import format_bytes, format_seconds
from batchgen.planner.by_layer import by_layer, may_part
from batchgen.planner.deferring import deferring, layers_bytes, may_defer
from batchgen.planner.explain import aligned
from batchgen.planner.problem import Problem
from batchgen.planner.sampled_simulation import simulate_shortened
from batchgen.planner.search import Candidate, in_neos_order, search

PlanOf = Callable[[Candidate, float | None], Plan]


class NotApplicable(Exception):
    """A way cannot be gone, for the reason given."""


@dataclass(frozen=True)
class Strategy:
    """What a plan may do that goes this strategy.

    Attributes:
        name: of the paper, or what is special about it.
        description: what it does, in half a sentence.
        find: its best candidates, of which the simulator chooses; raises NotApplicable, or InputError where nothing fits.
        matches: whether a policy uses the strategy; the first of several that match counts.
    """

    name: str
    description: str
    find: Callable[[Problem], Sequence[Candidate]]
    matches: Callable[[Policy], bool]


def limited(
    problem: Problem, weights: tuple[str, ...], kv: tuple[str, ...], num_gpu_batches: int | None = None
) -> Problem:
    """The problem with weights and KV in fewer tiers and classes. Raises NotApplicable where the user wants something else."""
    allowed = problem.allowed
    tiers = tuple(tier for tier in allowed.weight_tiers if tier in weights)
    classes = tuple(name for name in allowed.kv_classes if name in kv)
    if num_gpu_batches is not None and problem.num_gpu_batches not in (None, num_gpu_batches):
        raise NotApplicable(f"takes {num_gpu_batches} micro-batches, --num-gpu-batches is {problem.num_gpu_batches}")
    if num_gpu_batches is not None and problem.max_num_seqs is not None and problem.max_num_seqs % num_gpu_batches:
        raise NotApplicable(f"takes {num_gpu_batches} micro-batches, --max-num-seqs is {problem.max_num_seqs}")
    if not tiers or not classes:
        raise NotApplicable("is not among what this plan may do")
    return replace(
        problem,
        allowed=replace(allowed, weight_tiers=tiers, kv_classes=classes),
        num_gpu_batches=num_gpu_batches or problem.num_gpu_batches,
    )


def _weights_on_gpu(problem: Problem) -> None:
    """Raises NotApplicable where not even the layers' weights fit, which needs no search."""
    weights = layers_bytes(problem)
    if weights > problem.budgets["gpu"]:
        raise NotApplicable(
            f"the weights of the layers take {format_bytes(weights)}, more than the GPU's {format_bytes(problem.budgets['gpu'])}"
        )


def _gpu_only(problem: Problem) -> Sequence[Candidate]:
    _weights_on_gpu(problem)
    # Nothing is waited for that a second micro-batch could hide.
    return [search(limited(problem, ("gpu",), ("gpu",), num_gpu_batches=problem.num_gpu_batches or 1))]


def _flexgen(problem: Problem) -> Sequence[Candidate]:
    return [search(limited(problem, ("gpu", "cpu", "disk"), ("gpu", "cpu", "streamed", "disk")))]


def _neo(problem: Problem) -> Sequence[Candidate]:
    _weights_on_gpu(problem)
    own = limited(problem, ("gpu",), ("gpu", "cpu"), num_gpu_batches=2)
    even = search(own)
    if not even.counts.kv_seqs["cpu"]:
        raise NotApplicable("CPU attention beside a second batch would save nothing here")
    return [even, *in_neos_order(own, even)]


def _apex(problem: Problem) -> Sequence[Candidate]:
    _weights_on_gpu(problem)
    if not may_defer(problem):
        raise NotApplicable("needs continuous admission, one micro-batch and a block size that is left to the plan")
    own = limited(problem, ("gpu",), ("gpu",), num_gpu_batches=1)
    found = deferring(problem, search(replace(own, admissions=("continuous",))))
    if found is None:
        raise NotApplicable(
            f"a deferred token takes {problem.model.num_layers + 1:,} sweeps: the job is too short for that, or memory or the CPU"
            " have nothing to spare"
        )
    return [found]


def _pie(problem: Problem) -> Sequence[Candidate]:
    _weights_on_gpu(problem)
    if not may_part(problem):
        raise NotApplicable("is not among what this plan may do")
    found = search(by_layer(problem))
    if not found.counts.kv_layers:
        raise NotApplicable("GPU memory holds no layer's KV beside the weights")
    return [found]


def _in_memory(problem: Problem) -> Sequence[Candidate]:
    return [search(limited(problem, ("cpu",), ("cpu",)))]


def _streamed(problem: Problem) -> Sequence[Candidate]:
    found = search(limited(problem, ("cpu", "disk"), ("cpu", "disk")))
    at = found.counts.placement(found.inputs)
    if not at.w_disk and not at.kv_disk:
        raise NotApplicable("all of it is in memory: nothing would be gained by streaming")
    return [found]


def _quantised(problem: Problem) -> Sequence[Candidate]:
    return [search(replace(problem, weight_formats=(INT4,)))]


def _holds_weights(policy: Policy) -> bool:
    return all(not on_cpu and not on_disk for _, on_cpu, on_disk in policy.weight_layers.values())


def _classes(policy: Policy) -> set[str]:
    return {name for name, count in policy.kv_seqs.items() if count}


def _uses_disk(policy: Policy) -> bool:
    return "disk" in _classes(policy) or any(on_disk for _, _, on_disk in policy.weight_layers.values())


WITH_GPU = (
    Strategy(
        "GPU-only",
        "weights and KV on the GPU",
        _gpu_only,
        lambda policy: _holds_weights(policy) and _classes(policy) <= {"gpu"},
    ),
    Strategy(
        "NEO",
        "weights on the GPU; the CPU attends for one batch while the other one computes",
        _neo,
        lambda policy: _holds_weights(policy) and policy.num_gpu_batches > 1 and _classes(policy) <= {"gpu", "cpu"},
    ),
    Strategy(
        "APEX",
        "weights on the GPU; the CPU attends beside whole sweeps",
        _apex,
        lambda policy: "deferred" in _classes(policy),
    ),
    Strategy(
        "Pie",
        "weights on the GPU, KV there in some layers; in the others it streams",
        _pie,
        lambda policy: policy.kv_layers > 0 and _holds_weights(policy),
    ),
    Strategy("FlexGen", "weights and KV in any tier, streamed where they are needed", _flexgen, lambda policy: True),
)
ON_CPU = (
    Strategy(
        "quantised",
        "weights in 4 bits (--weights int4)",
        _quantised,
        lambda policy: policy.weight_format == INT4,
    ),
    Strategy("streamed", "weights or KV from disk", _streamed, _uses_disk),
    Strategy("in memory", "weights and KV in memory", _in_memory, lambda policy: True),
)


def strategies_for(problem: Problem) -> tuple[Strategy, ...]:
    """Those that there are on the problem's machine."""
    return ON_CPU if problem.hardware.gpu is None else WITH_GPU


def strategy_of(policy: Policy, strategies: tuple[Strategy, ...]) -> str:
    """The name of the one that a policy goes."""
    return next(strategy.name for strategy in strategies if strategy.matches(policy))


def best_plan(strategy: Strategy, problem: Problem, plan_of: PlanOf) -> Plan:
    """The best plan that goes this way, simulated. Raises NotApplicable, InputError.

    Args:
        way: Which one.
        problem: What is planned for.
        plan_of: Makes a plan of a candidate and the seconds of its sweeps, None for those of the cost model.
    """
    plans = [plan_of(c, simulate_shortened(plan_of(c, None), c, longer=True).seconds) for c in strategy.find(problem)]
    limit_s = problem.max_block_latency_s or math.inf
    kept = [plan for plan in plans if plan.prediction.block_latency_s <= limit_s]
    if not kept:
        raise NotApplicable("its blocks take longer than --max-block-latency")
    return min(kept, key=lambda plan: plan.prediction.total_s)


def with_strategies(plan: Plan, problem: Problem, plan_of: PlanOf) -> Plan:
    """The plan, chosen for the problem, with the time of each way beside its own. plan_of: as of `best_plan`.

    The way that it goes itself is not searched again.
    """
    strategies = strategies_for(problem)
    own = strategy_of(plan.policy, strategies)
    times = []
    for strategy in strategies:
        seconds, reason = None, ""
        try:
            seconds = (plan if strategy.name == own else best_plan(strategy, problem, plan_of)).prediction.total_s
        except (NotApplicable, InputError) as error:
            reason = str(error)
        times.append(StrategyTime(strategy.name, strategy.description, seconds, reason))
    chosen = StrategyTime("chosen", f"uses the strategy {own}", plan.prediction.total_s)
    return replace(plan, strategies=(*times, chosen))


def strategy_rows(plan: Plan) -> list[list[str]]:
    """A row of cells for each way, after one that names them."""
    rows = [["strategy", "time", ""]]
    for strategy in plan.strategies:
        time = "-" if strategy.seconds is None else format_seconds(strategy.seconds)
        rows.append(
            [
                strategy.name,
                time,
                f"{strategy.description}: {strategy.reason}" if strategy.reason else strategy.description,
            ]
        )
    return rows


def strategy_lines(plan: Plan) -> list[str]:
    """The same as text."""
    return aligned(strategy_rows(plan)) if plan.strategies else []
