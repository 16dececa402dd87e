"""A fluid model of the scheduler, for many block sizes and token budgets at once.

Time goes in steps of so many sweeps that a row's output takes about 32 of them, or where its prompt takes longer than
that, so many that this takes a few. Settings whose steps are as long go through a step together: columns of arrays with
a row for each step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from batchgen.core.workload import Workload

# Steps per mean output length, and block fillings simulated before the middle ones are taken as typical.
_STEPS_PER_OUTPUT = 32
# At least so many for a prompt that takes more sweeps, and less than twice as many.
_STEPS_PER_PROMPT = 4
_GENERATIONS = 6
_NONE = 1e-9  # rows
# Kinds of steps: by how much is prefilled, and by how many thirds of the block decode.
_KINDS = [(prefill, thirds) for prefill in range(3) for thirds in range(3)]

Array = Any  # numpy's, of floats or truth values


class Setting(NamedTuple):
    """Settings of the scheduler.

    Attributes:
        admission: "continuous" or "static".
        max_num_seqs: sequences in flight, at most as many as there are rows.
        budget: tokens of a sweep.
    """

    admission: str
    max_num_seqs: int
    budget: float


class Mean(NamedTuple):
    """`sweeps` sweeps that are alike, and what they have on average: the fields of `phases.Phase`."""

    sweeps: float
    prefill_tokens: float
    prefill_seqs: float
    decode_seqs: float
    context: float


def flow_through(workload: Workload, settings: Sequence[Setting]) -> list[list[Mean]]:
    """Estimate the sweeps of a whole job under each setting of the scheduler.

    Args:
        workload: The job.
        settings: Settings that are compared.

    Returns:
        For each setting, groups of sweeps that prefill and decode about as much, with their averages; groups come in
            the order of their first sweeps.
    """
    by_step: dict[float, list[Setting]] = {}
    for setting in settings:
        by_step.setdefault(_sweeps_of_step(workload, setting), []).append(setting)
    groups: dict[Setting, list[Mean]] = {}
    for step, alike in by_step.items():
        block = np.array([float(setting.max_num_seqs) for setting in alike])
        simulated = np.minimum(workload.num_seqs, _GENERATIONS * block)
        steps = _simulate(workload, alike, block, simulated, step)
        repeated = _repeat_middle(steps, workload, block, workload.num_seqs - simulated)
        groups |= zip(alike, _merged(repeated, block), strict=True)
    return [groups[setting] for setting in settings]


def _sweeps_of_step(workload: Workload, setting: Setting) -> float:
    """The number of sweeps of a step; of the number that a prompt asks for, the power of two below it."""
    of_output = max(1.0, float(np.mean(workload.output_len.values)) / _STEPS_PER_OUTPUT)
    of_prompt = workload.computed_prompt_len / setting.budget / _STEPS_PER_PROMPT
    return max(of_output, 2.0 ** math.floor(math.log2(max(1.0, of_prompt))))


@dataclass(frozen=True)
class _Steps:
    """Arrays of (steps, settings): the fields of `Mean`, and `there`, which is true where the job lasts that long."""

    there: Array
    sweeps: Array
    prefill_tokens: Array
    prefill_seqs: Array
    decode_seqs: Array
    context: Array

    @property
    def entered(self) -> Array:
        """Rows."""
        return self.prefill_seqs * self.sweeps

    @property
    def decoded(self) -> Array:
        """Tokens."""
        return self.decode_seqs * self.sweeps


def _simulate(workload: Workload, settings: Sequence[Setting], block: Array, rows: Array, step: float) -> _Steps:
    outputs = np.array(workload.output_len.values, dtype=float)
    # A row is prefilled somewhere within its first step, on average half way; its first token comes with that sweep.
    lost = (step + 1) / 2
    starts = np.maximum(0.0, np.arange(int(outputs.max() / step) + 3) * step - lost)
    width = np.full(len(starts), step)
    width[0] = step - lost
    # decoding[j]: of a row admitted j steps ago, the expected fraction of this step it decodes in.
    decoding = np.clip(outputs[:, None] - 1 - starts, 0, width).mean(0) / step
    ages = starts + width / 2
    prompt = workload.computed_prompt_len
    budget = np.array([float(setting.budget) for setting in settings])
    static = np.array([setting.admission == "static" for setting in settings])
    # Rows that enter in each step, below those of the steps before the first.
    before = len(decoding) - 1
    entered = np.zeros((before + 1024, len(block)))
    weights = np.array([decoding[:0:-1], (decoding * ages)[:0:-1]])
    sums: list[Array] = []  # of each step: sequences that decode, and their ages, of rows that entered before it
    waiting, in_block, filling = rows.astype(float), np.zeros(len(block)), np.ones(len(block), dtype=bool)
    length = np.full(len(block), -1)
    while True:
        t = len(sums)
        if before + t == len(entered):
            entered = np.concatenate([entered, np.zeros_like(entered)])
        alive = weights @ entered[t : before + t]
        empty = alive[0] <= _NONE
        length[(length < 0) & (waiting <= 0) & empty] = t
        if length.min() >= 0:
            break
        in_block[empty], filling[empty] = 0.0, True
        vacant = np.where(static, np.where(filling, block - in_block, 0.0), block - alive[0])
        # At least a token a sweep, so that a tiny budget is slow rather than endless.
        affordable = np.maximum(1.0, budget - alive[0]) * step / prompt
        entering = np.minimum(np.minimum(waiting, vacant), affordable)
        entering[entering <= _NONE] = 0.0  # what is vacant by rounding alone makes no step of another kind
        in_block += entering
        filling &= (in_block < block - _NONE) & (waiting > entering)
        waiting -= entering
        waiting[waiting <= _NONE] = 0.0
        entered[before + t] = entering
        sums.append(alive)
    steps = len(sums)
    decoded, aged = np.array(sums).reshape(steps, 2, len(block)).transpose(1, 0, 2)
    entered = entered[before : before + steps]
    first = entered * decoding[0]
    total = decoded + first
    age = np.divide(aged + first * ages[0], total, out=np.zeros_like(total), where=total > 0)
    return _Steps(
        there=np.arange(steps)[:, None] < length,
        sweeps=np.full_like(total, step),
        prefill_tokens=entered * prompt / step,
        prefill_seqs=entered / step,
        decode_seqs=total,
        context=workload.prompt_len.mean + 0.5 + age,
    )


def _repeat_middle(steps: _Steps, workload: Workload, block: Array, more_seqs: Array) -> _Steps:
    """Stretch the steps in which the third and fourth filling entered, to admit `more_seqs` more.

    Those steps need not be whole periods, so what decodes in them is set to what the job's tokens come to.
    """
    entered = np.cumsum(steps.entered, axis=0)
    middle = (entered > 2 * block + 1e-6) & (entered <= 4 * block + 1e-6) & steps.there & (more_seqs > 0)
    inside = np.where(middle, steps.decoded, 0.0).sum(axis=0)
    outside = np.where(steps.there & ~middle, steps.decoded, 0.0).sum(axis=0)
    admitted = np.where(middle, steps.entered, 0.0).sum(axis=0)
    stretch = 1 + np.divide(more_seqs, admitted, out=np.zeros_like(admitted), where=admitted > 0)
    tokens = workload.num_seqs * (workload.output_len.mean - 1) - outside
    busier = np.divide(tokens, stretch * inside, out=np.ones_like(inside), where=inside > 0)
    # More work than those steps have is more sweeps, as the block cannot hold more; less work is emptier ones.
    longer, fuller = np.where(middle, np.maximum(1.0, busier), 1.0), np.where(middle, np.minimum(1.0, busier), 1.0)
    return _Steps(
        there=steps.there,
        sweeps=steps.sweeps * np.where(middle, stretch, 1.0) * longer,
        prefill_tokens=steps.prefill_tokens / longer,
        prefill_seqs=steps.prefill_seqs / longer,
        decode_seqs=steps.decode_seqs * fuller,
        context=steps.context,
    )


def _merged(steps: _Steps, block: Array) -> list[list[Mean]]:
    """Like steps as one: by how full the block is and how much is prefilled. Totals are kept exactly."""
    most = np.where(steps.there, steps.prefill_tokens, 0.0).max(axis=0)
    prefill = np.where(steps.prefill_tokens == 0, 0, 1 + (steps.prefill_tokens > most / 2))
    thirds = np.minimum(2, (3 * steps.decode_seqs / block).astype(int))
    groups_of_settings: list[list[tuple[int, Mean]]] = [[] for _ in block]
    for kind in _KINDS:
        of_kind = steps.there & (prefill == kind[0]) & (thirds == kind[1])
        first = of_kind.argmax(axis=0)
        sweeps = np.where(of_kind, steps.sweeps, 0.0)
        totals = [
            (values * sweeps).sum(axis=0)
            for values in (
                steps.prefill_tokens,
                steps.prefill_seqs,
                steps.decode_seqs,
                steps.context * steps.decode_seqs,
            )
        ]
        for i in np.flatnonzero(of_kind.any(axis=0)).tolist():
            count = float(sweeps[:, i].sum())
            prompts, prompt_seqs, decoded, attended = (float(values[i]) for values in totals)
            context = attended / decoded if decoded else float(steps.context[first[i], i])
            mean = Mean(count, prompts / count, prompt_seqs / count, decoded / count, context)
            groups_of_settings[i].append((int(first[i]), mean))
    return [[mean for _, mean in sorted(groups)] for groups in groups_of_settings]
