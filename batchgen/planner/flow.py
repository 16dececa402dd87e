"""How a job flows through the sweeps: how many rows are prefilled and how many decode, from first to last.

A fluid model of the scheduler: rows enter as soon as the block and a sweep's token budget allow, stay for as many
sweeps as their outputs have tokens, and the last ones leave a block half empty. Lengths are a distribution, not
one number. The result is a handful of phases, each a number of like sweeps.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from batchgen.core.workload import Workload

# Steps per mean output length, and block fillings simulated before the middle ones are taken as typical.
_STEPS_PER_OUTPUT = 32
_GENERATIONS = 6


@dataclass(frozen=True)
class Phase:
    """`sweeps` sweeps that are alike.

    Attributes:
        prefill_tokens, prefill_seqs: prompt tokens computed per sweep, and prompts completed per sweep.
        decode_seqs: sequences that gain a token from decoding, per sweep.
        context: tokens each of them attends to.
        logits_rows_per_prompt: rows of logits computed for a prompt.
        deferred_tokens: gained per sweep by sequences whose attention is deferred, which are not among `decode_seqs`.
    """

    sweeps: float
    prefill_tokens: float
    prefill_seqs: float
    decode_seqs: float
    context: float
    logits_rows_per_prompt: float = 1.0
    deferred_tokens: float = 0.0

    @property
    def tokens(self) -> float:
        """Tokens per sweep that go through the layers."""
        return self.prefill_tokens + self.decode_seqs + self.deferred_tokens

    @property
    def sampled(self) -> float:
        """Tokens generated per sweep; where prompts are scored, prompts that are done."""
        return self.prefill_seqs + self.decode_seqs + self.deferred_tokens

    @property
    def logits_rows(self) -> float:
        """Rows of logits per sweep."""
        return self.prefill_seqs * self.logits_rows_per_prompt + self.decode_seqs + self.deferred_tokens


@dataclass(frozen=True)
class Deferral:
    """Sequences of class "deferred" beside those that gain a token in every sweep (APEX section 3.3).

    Attributes:
        seqs: in flight.
        rows: in the whole job.
        sweeps_per_token: one for each layer, in which the CPU attends, and the one in which the token begins.
    """

    seqs: int
    rows: int
    sweeps_per_token: int


def deferral_of(workload: Workload, swept_seqs: int, most_seqs: int, sweeps_per_token: int) -> Deferral | None:
    """The deferral with at most `most_seqs` in flight that a job is long enough for.

    Its last sequences end when `swept_seqs` others, a token in every sweep, have run the rest of the job. None where that is over
    before any deferred sequence ends.
    """
    mean, longest = workload.output_len.mean, workload.output_len.max
    if most_seqs < 1 or mean <= 1:
        return None
    # Rows that the others end while a deferred one of mean length, and the longest one, is in flight.
    meanwhile, at_last = (swept_seqs * ((n - 1) * sweeps_per_token + 1) / mean for n in (mean, longest))
    waves = int((workload.num_seqs - (at_last - meanwhile)) / (most_seqs + meanwhile))
    if waves >= 1:
        return Deferral(most_seqs, waves * most_seqs, sweeps_per_token)
    seqs = int(workload.num_seqs - at_last)
    return Deferral(seqs, seqs, sweeps_per_token) if seqs >= 1 else None


@lru_cache(maxsize=4096)
def phases_of(
    workload: Workload,
    admission: str,
    block_size: int,
    max_num_batched_tokens: float,
    deferral: Deferral | None = None,
) -> tuple[Phase, ...]:
    """The phases of a whole job with at most `block_size` sequences in flight.

    Args:
        admission: "continuous" refills the block at once, "static" when the whole block has ended.
        deferral: Sequences beside those of the block, which are deferred.
    """
    if deferral is not None:
        others = replace(workload, num_seqs=workload.num_seqs - deferral.rows)
        phases = phases_of(others, admission, block_size, max_num_batched_tokens)
        return _with_deferred(phases, workload, deferral, max_num_batched_tokens)
    block_size = min(block_size, workload.num_seqs)
    simulated = min(workload.num_seqs, _GENERATIONS * block_size)
    steps = _simulate(workload, admission, block_size, max_num_batched_tokens, simulated)
    left = workload.num_seqs - simulated
    if left:
        steps = _repeat_middle(steps, workload, block_size, left)
    logits_rows = workload.scored_len or 1.0
    return tuple(replace(phase, logits_rows_per_prompt=logits_rows) for phase in _merged(steps, block_size))


def _with_deferred(phases: Iterable[Phase], workload: Workload, deferral: Deferral, budget: float) -> tuple[Phase, ...]:
    """Phases of the other rows, with the prompts and the tokens of those that are deferred spread over them.

    Where prompts exceed the token budget there are more sweeps.
    """
    phases = list(phases)
    sweeps = sum(phase.sweeps for phase in phases)
    tokens = deferral.rows * (workload.output_len.mean - 1) / sweeps
    more = workload.num_seqs / (workload.num_seqs - deferral.rows)
    found = []
    for phase in phases:
        left = max(1.0, budget - phase.decode_seqs - tokens)
        longer = max(1.0, phase.prefill_tokens * more / left) if phase.prefill_tokens else 1.0
        found.append(
            replace(
                phase,
                sweeps=phase.sweeps * longer,
                prefill_tokens=phase.prefill_tokens * more / longer,
                prefill_seqs=phase.prefill_seqs * more / longer,
                decode_seqs=phase.decode_seqs / longer,
                deferred_tokens=tokens / longer,
            )
        )
    return tuple(found)


def _simulate(workload: Workload, admission: str, block_size: int, budget: float, num_seqs: float) -> list[Phase]:
    outputs = np.array(workload.output_len.values, dtype=float)
    step = max(1.0, float(outputs.mean()) / _STEPS_PER_OUTPUT)  # sweeps
    # A row is prefilled somewhere within its first step, on average half way; its first token comes with that sweep.
    lost = (step + 1) / 2
    starts = np.maximum(0.0, np.arange(int(outputs.max() / step) + 3) * step - lost)
    width = np.full(len(starts), step)
    width[0] = step - lost
    # decoding[j]: of a row admitted j steps ago, the expected fraction of this step it decodes in.
    decoding = np.clip(outputs[:, None] - 1 - starts, 0, width).mean(0) / step
    ages = starts + width / 2
    prompt = workload.computed_prompt_len
    admitted = np.zeros(0)
    phases: list[Phase] = []
    left = float(num_seqs)
    filling = True
    while True:
        recent = admitted[::-1][: len(decoding) - 1]
        alive = recent * decoding[1 : len(recent) + 1]
        decode_seqs = float(alive.sum())
        if left <= 0 and decode_seqs <= 1e-9:
            return phases
        vacant = block_size - decode_seqs
        if admission == "static":
            if decode_seqs <= 1e-9:
                filling, in_block = True, 0.0
            vacant = block_size - in_block if filling else 0.0
        # At least a token a sweep, so that a tiny budget is slow rather than endless.
        affordable = max(1.0, budget - decode_seqs) * step / prompt
        entering = max(0.0, min(left, vacant, affordable))
        if admission == "static":
            in_block += entering
            filling = filling and in_block < block_size - 1e-9 and left > entering
        left = left - entering if left - entering > 1e-9 else 0.0
        admitted = np.append(admitted[-len(decoding) :], entering)
        first = entering * float(decoding[0])
        total = decode_seqs + first
        age = float((alive * ages[1 : len(recent) + 1]).sum() + first * ages[0]) / total if total > 0 else 0.0
        context = workload.prompt_len.mean + 0.5 + age
        phases.append(Phase(step, entering * prompt / step, entering / step, total, context))


def _repeat_middle(steps: list[Phase], workload: Workload, block_size: int, more_seqs: int) -> list[Phase]:
    """Stretch the steps in which the third and fourth filling entered, to admit `more_seqs` more.

    Those steps need not be whole periods, so what decodes in them is set to what the job's tokens come to.
    """
    entered = np.cumsum([s.prefill_seqs * s.sweeps for s in steps])
    middle = ((entered > 2 * block_size + 1e-6) & (entered <= 4 * block_size + 1e-6)).tolist()
    inside = [s for s, m in zip(steps, middle, strict=True) if m]
    outside = [s for s, m in zip(steps, middle, strict=True) if not m]
    stretch = 1 + more_seqs / sum(s.prefill_seqs * s.sweeps for s in inside)
    tokens = workload.num_seqs * (workload.output_len.mean - 1) - _decoded(outside)
    busier = tokens / (stretch * _decoded(inside)) if _decoded(inside) else 1.0
    # More work than those steps have is more sweeps, as the block cannot hold more; less work is emptier ones.
    longer, fuller = max(1.0, busier), min(1.0, busier)
    return [
        replace(
            s,
            sweeps=s.sweeps * stretch * longer,
            prefill_tokens=s.prefill_tokens / longer,
            prefill_seqs=s.prefill_seqs / longer,
            decode_seqs=s.decode_seqs * fuller,
        )
        if m
        else s
        for s, m in zip(steps, middle, strict=True)
    ]


def _decoded(phases: Iterable[Phase]) -> float:
    return sum(s.decode_seqs * s.sweeps for s in phases)


def _merged(steps: Iterable[Phase], block_size: int) -> list[Phase]:
    """Like steps as one: by how full the block is and how much is prefilled. Totals are kept exactly."""
    steps = list(steps)
    most = max(s.prefill_tokens for s in steps)
    groups: dict[tuple[int, int], list[Phase]] = {}
    for s in steps:
        prefill = 0 if s.prefill_tokens == 0 else 1 + (s.prefill_tokens > most / 2)
        groups.setdefault((prefill, min(2, int(3 * s.decode_seqs / block_size))), []).append(s)
    return [_mean_phase(group) for group in groups.values()]


def _mean_phase(group: list[Phase]) -> Phase:
    sweeps = sum(s.sweeps for s in group)
    decoded = _decoded(group)
    attended = sum(s.context * s.decode_seqs * s.sweeps for s in group)

    def mean(name: str) -> float:
        total: float = sum(getattr(s, name) * s.sweeps for s in group)
        return total / sweeps

    context = attended / decoded if decoded else group[0].context
    return Phase(sweeps, mean("prefill_tokens"), mean("prefill_seqs"), mean("decode_seqs"), context)
