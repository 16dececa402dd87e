"""The time that a job would take with another `--quality`, beside its plan."""

from __future__ import annotations

from dataclasses import dataclass, replace

from batchgen.core.errors import InputError
from batchgen.core.plan import Plan
from batchgen.core.quality import EXACT, SMALL
from batchgen.core.units import format_seconds
from batchgen.planner.format_choice import described, formats_of, is_quantized, with_quality
from batchgen.planner.format_search import in_best_formats
from batchgen.planner.plan_selection import plan_problem
from batchgen.planner.problem import Problem


@dataclass(frozen=True)
class OtherQuality:
    """Another quality than the plan's, with a plan that may have it.

    Attributes:
        quality: A value of `--quality`: "small" beside a plan in the formats without a choice, "exact" beside others.
        plan: A plan with it, of the coarse problem; None: no plan fits.
    """

    quality: str
    plan: Plan | None


def other_quality(plan: Plan, problem: Problem) -> OtherQuality | None:
    """Another quality and its plan; None where no other formats can be chosen, or the machine has no rates for them.

    Args:
        plan: The plan.
        problem: The problem that was planned.
    """
    quality = EXACT if _has_chosen(plan, problem) else SMALL
    others = with_quality(problem, quality)
    if len(list(others.formats)) == len(list(problem.formats)):
        return None
    try:
        best = in_best_formats(others)
        same = (best.weight_formats, best.kv_formats) == tuple((name,) for name in formats_of(plan.policy))
        return OtherQuality(quality, plan if same else plan_problem(replace(best, coarse=True)))
    except InputError:
        return OtherQuality(quality, None)


def quality_line(plan: Plan, problem: Problem, other: OtherQuality | None) -> str:
    """A line that says which formats a plan has chosen, and what another quality would give.

    Args:
        plan: The plan.
        problem: The problem that was planned.
        other: The other quality, with its plan; None: nothing is said of it.
    """
    parts = [described(plan.policy)] if _has_chosen(plan, problem) else []
    if other is not None:
        parts.append(f"with --quality {other.quality}: {_beside(other.plan, plan)}")
    return "; ".join(parts)


def _beside(other: Plan | None, plan: Plan) -> str:
    """The time of another plan beside that of this one."""
    if other is None:
        return "no plan fits"
    if formats_of(other.policy) == formats_of(plan.policy):
        return "no faster"
    times = [format_seconds(p.prediction.total_s) for p in (other, plan)]
    formats = f" ({described(other.policy)})" if is_quantized(other.policy) else ""
    return f"{times[0]} instead of {times[1]}{formats}"


def _has_chosen(plan: Plan, problem: Problem) -> bool:
    """True if a plan has other formats than without a choice."""
    return formats_of(plan.policy) != (problem.weight_formats[0], problem.kv_formats[0])
