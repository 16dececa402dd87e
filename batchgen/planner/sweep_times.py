"""Predicted seconds of sweeps of any size under one placement, by which a running job tells its time left.

Where sequences have drafts, these are the seconds in which each gains a token, a part of those of a sweep.
"""

from __future__ import annotations

from dataclasses import replace

from batchgen.core.plan import Plan, SweepTimes
from batchgen.planner.costs import job_seconds
from batchgen.planner.drafts import drafted_phases
from batchgen.planner.phases import Phase
from batchgen.planner.placement import Placement
from batchgen.planner.problem import CostInputs
from batchgen.planner.search import Candidate

# Sizes on each axis of the grid. Seconds bend where a sweep's products take longer than moving the weights.
_MOST_SIZES = 7


def with_sweep_times(plan: Plan, candidate: Candidate, sweeps_s: float) -> Plan:
    """A plan with the seconds of sweeps of any size.

    Args:
        plan: The plan of a candidate.
        candidate: The candidate.
        sweeps_s: Predicted seconds of all sweeps.
    """
    at = candidate.counts.placement(candidate.inputs)
    times = sweep_times(candidate.inputs, at).stretched(sweeps_s / candidate.seconds)
    return replace(plan, prediction=replace(plan.prediction, sweep_times=times))


def sweep_times(s: CostInputs, at: Placement) -> SweepTimes:
    """The cost model's seconds of one sweep, on a grid of prompt tokens, decoding sequences and contexts.

    Args:
        s: Inputs of the cost model.
        at: The placement.
    """
    workload = s.workload
    most_seqs = max(1, min(s.swept_seqs, workload.num_seqs))
    prefill_tokens = (0, *_sizes(int(max(s.max_num_batched_tokens, 1))))
    decode_seqs = (0, *_sizes(most_seqs)) if workload.task == "generate" else (0,)
    shortest = max(1, round(workload.prompt_len.mean))
    contexts = (shortest, shortest + max(1, workload.max_output_len))
    per_prompt = max(1.0, workload.computed_prompt_len)

    def seconds(prompt: int, seqs: int, context: int) -> float:
        if not prompt and not seqs:
            return 0.0
        logits = workload.scored_len or 1.0
        phases = drafted_phases(s, [Phase(1, prompt, prompt / per_prompt, seqs, context, logits)], at)
        return job_seconds(s, phases, at)

    grid = tuple(tuple(tuple(seconds(p, d, c) for c in contexts) for d in decode_seqs) for p in prefill_tokens)
    tokens = prefill_tokens[-1]
    prompts = tokens / per_prompt
    keys = prompts * workload.prompt_len.mean_square / 2
    # Attention goes by prompts, all else by tokens.
    twice, once = (job_seconds(s, [Phase(1, tokens, n * prompts, 0, shortest, 0.0)], at) for n in (2, 1))
    return SweepTimes(prefill_tokens, decode_seqs, contexts, grid, keys / tokens, max(0.0, twice - once) / keys)


def _sizes(most: int) -> tuple[int, ...]:
    """Sizes from 1 to `most`, each about the same factor larger than the one before."""
    factor = most ** (1 / (_MOST_SIZES - 1))
    return tuple(sorted({round(factor**i) for i in range(_MOST_SIZES)} | {most}))
