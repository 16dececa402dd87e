"""Drafts in a plan: how many each sequence has in each phase of a job, and what that saves; and tokens that are forced.

A phase with drafts has fewer sweeps, each with more tokens. Prompts come faster, as rows end faster. The number is the
one with which the phase takes least by the cost model: several where weights or KV stream, none where computation
binds. The placement is the one that is fastest without drafts. Tokens that a grammar forces are taken with drafts, and
without them where the CPU runs the sweeps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from batchgen.core.draft_rates import MOST_DRAFTS, DraftRates
from batchgen.core.kv_placement import KVPlacement
from batchgen.core.plan import Plan, takes_drafts, takes_forced
from batchgen.planner.costs import job_seconds
from batchgen.planner.linear import number
from batchgen.planner.phases import Phase
from batchgen.planner.placement import Placement
from batchgen.planner.problem import CostInputs
from batchgen.planner.search import Candidate
from batchgen.planner.sizes import held_logit_rows

# Numbers of drafts that are looked at; between them seconds change little.
_COUNTS = (1, 2, 3, 4, 6, 8, 12, MOST_DRAFTS)
# A phase that drafts make no shorter than by this factor has none.
_LEAST_GAIN = 1.02


def with_drafts(candidate: Candidate) -> Candidate:
    """A candidate with the drafts that are worth it, and the seconds with them."""
    s = candidate.inputs
    at = candidate.counts.placement(s)
    phases = drafted_phases(s, candidate.phases, at)
    if phases == candidate.phases:
        return candidate
    incumbent = replace(candidate.incumbent, seconds=job_seconds(s, phases, at))
    shorter = incumbent.seconds / candidate.seconds
    relaxed = replace(candidate.relaxed, seconds=candidate.relaxed.seconds * shorter)
    return replace(candidate, phases=phases, incumbent=incumbent, relaxed=relaxed)


def drafted_phases(s: CostInputs, phases: Sequence[Phase], at: Placement) -> tuple[Phase, ...]:
    """Phases with the drafts that are worth it.

    Args:
        s: The inputs of the cost model.
        phases: Phases without drafts.
        at: The placement.
    """
    rates = s.workload.drafts
    if rates is None:
        return tuple(phases)
    if not _takes_drafts(s, at, rates):
        return tuple(_undrafted(s, phase, rates) for phase in phases)
    if s.model.state:
        rates = replace(rates, proposed=rates.proposed * s.draft_state_share)
    holds_logits = number(at.head_cpu if s.on_gpu else at.head_disk) > 0
    most_rows = held_logit_rows(s.model, int(s.element_bytes), s, s.workload.task) if holds_logits else math.inf
    return tuple(_fastest(s, phase, at, rates, most_rows) for phase in phases)


def drafts_by_seqs(phases: Sequence[Phase]) -> tuple[tuple[int, int], ...]:
    """Drafts that each sequence may have by the number of sequences that decode: `Prediction.drafts`."""
    ordered = sorted((math.ceil(phase.decode_seqs), phase.most_drafts) for phase in phases if phase.decode_seqs)
    steps: list[tuple[int, int]] = []
    for seqs, drafts in ordered:
        if steps and steps[-1][1] == drafts:
            steps.pop()
        steps.append((seqs, drafts))
    return tuple(steps) if any(drafts for _, drafts in steps) else ()


def why_no_drafts(plan: Plan) -> str | None:
    """The reason why nothing is drafted in a job; None: drafts may be worth their time."""
    policy = plan.policy
    if not policy.takes_drafts:
        return f"--attention-budget is {policy.attention_budget}"
    beside = {KVPlacement.CPU, KVPlacement.DEFERRED} if "gpu" in plan.budgets else set()
    placements = {KVPlacement(name) for name, count in policy.kv_seqs.items() if count}
    if placements and placements <= beside:
        return "the CPU attends to all sequences, with one token of each"
    return None


def _takes_drafts(s: CostInputs, at: Placement, rates: DraftRates) -> bool:
    """Tell whether sequences have drafts that a plan counts.

    The CPU beside an accelerator takes one token of each. Where there are no state slots for drafts, their number
    depends on the slots that are free at the moment, so none are counted.
    """
    if not rates.most:
        return False
    beside = s.on_gpu and (number(at.kv_cpu) > 0 or s.deferral is not None)
    away = (at.w_streamed, at.head_cpu) if s.on_gpu else (at.w_disk, at.head_disk)
    streams = max(map(number, (*away, at.kv_streamed, at.kv_disk))) > 0
    if beside or (s.model.state and not s.draft_state_share) or (rates.only_while_streaming and not streams):
        return False
    return takes_drafts(s.attention_budget)


def _fastest(s: CostInputs, phase: Phase, at: Placement, rates: DraftRates, most_rows: float) -> Phase:
    """A phase with the number of drafts that makes it shortest; without any where the gain is small.

    Args:
        most_rows: Most rows of logits of a sweep.
    """
    if not phase.decode_seqs:
        return phase
    undrafted = _undrafted(s, phase, rates)
    seconds = {undrafted: job_seconds(s, (undrafted,), at) / _LEAST_GAIN}
    for count in {min(count, rates.most) for count in _COUNTS}:
        drafted = _drafted(phase, count, rates, s.max_num_batched_tokens)
        if drafted is not None and phase.decode_seqs * (1 + drafted.drafts) <= most_rows:
            seconds[drafted] = job_seconds(s, (drafted,), at)
    return min(seconds, key=lambda each: seconds[each])


def _undrafted(s: CostInputs, phase: Phase, rates: DraftRates) -> Phase:
    """A phase without drafts, with the tokens that grammars force where these are always taken."""
    if not takes_forced("gpu" if s.on_gpu else "cpu", s.attention_budget) or not (phase.decode_seqs and rates.forced):
        return phase
    return _drafted(phase, 0, rates, s.max_num_batched_tokens) or phase


def _drafted(phase: Phase, count: int, rates: DraftRates, budget: float) -> Phase | None:
    """A phase in which sequences have up to so many drafts; None: a sweep's budget of tokens does not hold them."""
    drafted = replace(
        phase, most_drafts=count, drafts=rates.drafts_of(count), accepted=rates.accepted_of(count), forced=rates.forced
    )
    spare = budget - drafted.decode_tokens
    if spare < 0 or (phase.prefill_tokens and spare < 1):
        return None
    # Rows end and enter as much faster, but for prompts that the budget holds up.
    faster = drafted.gained
    if phase.prefill_tokens:
        faster = min(faster, spare / phase.prefill_tokens)
    return replace(
        drafted,
        sweeps=phase.sweeps / faster,
        prefill_tokens=phase.prefill_tokens * faster,
        prefill_seqs=phase.prefill_seqs * faster,
        decode_seqs=phase.decode_seqs * faster / drafted.gained,
    )
