"""Formats of weights and KV as a choice of the plan (FlexGen 4.3): what a quality allows, and what a policy loses."""

from __future__ import annotations

from dataclasses import replace

from batchgen.core.plan import Policy
from batchgen.core.quality import KV_LOSSES, QUALITIES, WEIGHT_LOSSES, allowed, format_loss, loss_of
from batchgen.planner.problem import Problem


def with_quality(problem: Problem, quality: str) -> Problem:
    """The problem whose plan may have all formats that a value of `--quality` allows.

    The first formats of the problem are those without a choice. What these lose by themselves was asked for, so it does
    not count.

    Args:
        problem: The planner's problem.
        quality: A key of `QUALITIES`.
    """
    weights = allowed(problem.open_weights, WEIGHT_LOSSES, quality)
    kv = allowed(problem.open_kv, KV_LOSSES, quality)
    return replace(
        problem,
        weight_formats=(problem.weight_formats[0], *weights),
        kv_formats=(problem.kv_formats[0], *kv),
        most_loss=QUALITIES[quality],
    )


def formats_of(policy: Policy) -> tuple[str, str]:
    """The formats of weights and of KV."""
    return policy.weight_format, policy.kv_format


def is_quantized(policy: Policy) -> bool:
    """True if weights or KV are in a format that loses quality."""
    return loss_of(*formats_of(policy)) > 0


def described(policy: Policy) -> str:
    """The formats of a policy and their loss, in words."""
    loss = loss_of(*formats_of(policy))
    words = f"weights in {policy.weight_format}, KV in {policy.kv_format}"
    return f"{words}: perplexity {format_loss(loss)} higher" if loss else words
