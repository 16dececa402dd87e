"""The seconds that the rest of a job takes: sequences in flight and rows that wait, through the scheduler's limits.

This is a coarse simulation of sweeps, of some milliseconds, so that a running job can make it again and again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from batchgen.core.plan import SweepTimes

Array = np.ndarray[Any, Any]


class Sweeps(NamedTuple):
    """The work of sweeps, each field an array [n].

    Attributes:
        prompt: Prompt tokens.
        prompt_keys: Mean tokens that each of these attends to.
        decode: Decoding sequences.
        context: Mean tokens that each of these attends to.
    """

    prompt: Array
    prompt_keys: Array
    decode: Array
    context: Array


SweepSeconds = Callable[[Sweeps], Array]  # seconds of each sweep, [n]

_STEPS = 300  # into which the sweeps with waiting rows are divided, about


@dataclass(frozen=True)
class Rest:
    """The rest of a job.

    Attributes:
        running_prompt: Prompt tokens that each sequence in flight has yet to compute, [m].
        running_context: Tokens that each sequence in flight has, [m].
        running_output: Tokens that each sequence in flight has yet to generate, [m].
        waiting_prompt: Prompt tokens that each waiting sequence has to compute, in the order of admission, [k].
        waiting_context: Prompt tokens of each waiting sequence, [k].
        waiting_output: Tokens that each waiting sequence will generate, [k].
        waiting: Number of waiting sequences, for which the k ones stand.
        max_seqs: The most sequences in flight.
        max_tokens: The most tokens of a sweep.
        static: True where a block of sequences enters only when the block before has ended.
    """

    running_prompt: Array
    running_context: Array
    running_output: Array
    waiting_prompt: Array
    waiting_context: Array
    waiting_output: Array
    waiting: float
    max_seqs: int
    max_tokens: int
    static: bool


def seconds_of_rest(rest: Rest, sweep_s: SweepSeconds) -> float:
    """Predicted seconds until the last sequence has ended.

    Args:
        rest: The rest of the job.
        sweep_s: Seconds of sweeps.
    """
    in_prefill = rest.running_prompt > 0
    running = _Decoding(rest.running_output[~in_prefill], rest.running_context[~in_prefill])
    waiting = _Entering(rest.waiting_prompt, rest.waiting_context, rest.waiting_output)
    in_prefill_too = _Entering(
        rest.running_prompt[in_prefill], rest.running_context[in_prefill], rest.running_output[in_prefill]
    )
    if rest.static:
        return _blocks_s(rest, in_prefill_too, running, waiting, sweep_s)
    entering = in_prefill_too.followed_by(waiting)
    entering_s, decoding = _enter(rest, entering, running, sweep_s)
    if len(waiting.prompt):
        num_running = len(in_prefill_too.prompt)
        entering_s *= (num_running + rest.waiting) / (num_running + len(waiting.prompt))
    return entering_s + _drain_s(decoding, sweep_s)


class _Decoding(NamedTuple):
    """Sequences that decode, with the tokens that each has yet to generate and the tokens that it has."""

    left: Array
    context: Array

    def after(self, sweeps: float) -> _Decoding:
        """The sequences that are left after some sweeps."""
        stays = self.left > sweeps
        return _Decoding(self.left[stays] - sweeps, self.context[stays] + sweeps)


class _Entering(NamedTuple):
    """Sequences that enter, in order: the prompt tokens that each computes, all its prompt tokens, and its output."""

    prompt: Array
    context: Array
    output: Array

    def followed_by(self, others: _Entering) -> _Entering:
        return _Entering(*(np.concatenate([a, b]) for a, b in zip(self, others, strict=True)))

    @property
    def keys(self) -> Array:
        """Tokens that the computed prompt tokens of each sequence attend to, all together."""
        return self.prompt * (self.context - self.prompt / 2)


def _enter(rest: Rest, entering: _Entering, decoding: _Decoding, sweep_s: SweepSeconds) -> tuple[float, _Decoding]:
    """Seconds until the last sequence has entered, and the sequences that decode then.

    Args:
        rest: The rest of the job.
        entering: Sequences that enter.
        decoding: Sequences that decode now.
        sweep_s: Seconds of sweeps.
    """
    count = len(entering.prompt)
    if not count:
        return 0.0, decoding
    ends, keys = np.cumsum(entering.prompt), np.cumsum(entering.keys)
    total_output = float(entering.output.sum() + decoding.left.sum())
    length = max(1.0, max(ends[-1] / rest.max_tokens, total_output / rest.max_seqs) / _STEPS)  # of a step, in sweeps
    entered, computed, attended = 0, 0.0, 0.0
    steps: list[tuple[float, ...]] = []  # sweeps of each step, and what a sweep has
    while entered < count:
        in_flight = len(decoding.left)
        budget = max(1.0, rest.max_tokens - in_flight)  # of a sweep
        last = min(count, entered + max(0, rest.max_seqs - in_flight))
        tokens = min(budget * length, (ends[last - 1] if last > entered else computed) - computed)
        prefill = max(1.0, tokens / budget)  # sweeps with prompts
        passed = max(length, prefill) if in_flight else prefill
        computed += tokens
        keys_now = float(np.interp(computed, ends, keys, left=computed / ends[0] * keys[0] if ends[0] else 0.0))
        context = float(decoding.context.mean()) + passed / 2 if in_flight else 1.0
        prompt_keys = (keys_now - attended) / tokens if tokens else 0.0
        steps.append((passed, tokens / passed, prompt_keys, in_flight, context))
        attended = keys_now
        now_entered = max(entered, int(np.searchsorted(ends, computed + 1e-6, side="right")))
        new = slice(entered, now_entered)
        begun = _Decoding(entering.output[new] - 1.0, entering.context[new] + 1.0).after(max(0.0, passed - prefill))
        decoding = _Decoding(*(np.concatenate(pair) for pair in zip(decoding.after(passed), begun, strict=True)))
        entered = now_entered
    passed_of, *sweeps = map(np.array, zip(*steps, strict=True))
    return float(passed_of @ sweep_s(Sweeps(*sweeps))), decoding


def _drain_s(decoding: _Decoding, sweep_s: SweepSeconds) -> float:
    """Seconds until all sequences in flight have ended, where no more enter."""
    order = np.argsort(decoding.left)
    left, context = decoding.left[order], decoding.context[order]
    if not len(left):
        return 0.0
    sweeps = np.diff(left, prepend=0.0)
    in_flight = np.arange(len(left), 0, -1).astype(float)
    context_of_rest = np.cumsum(context[::-1])[::-1] / in_flight
    nothing = np.zeros(len(left))
    contexts = context_of_rest + left - sweeps / 2
    return float(sweeps @ sweep_s(Sweeps(nothing, nothing, in_flight, contexts)))


def _blocks_s(
    rest: Rest, in_prefill: _Entering, running: _Decoding, waiting: _Entering, sweep_s: SweepSeconds
) -> float:
    """Seconds of the rest of a job with static admission: the block in flight, then whole blocks of waiting ones."""
    seconds = _block_s(rest, in_prefill, running, sweep_s)
    count = len(waiting.prompt)
    nobody = _Decoding(np.zeros(0), np.zeros(0))
    for first in range(0, count, rest.max_seqs):
        block = _Entering(*(values[first : first + rest.max_seqs] for values in waiting))
        seconds += _block_s(rest, block, nobody, sweep_s) * rest.waiting / count
    return seconds


def _block_s(rest: Rest, entering: _Entering, running: _Decoding, sweep_s: SweepSeconds) -> float:
    """Seconds of a block: its prompts, then its tokens until the last sequence has ended."""
    tokens = float(entering.prompt.sum())
    sweeps = float(np.ceil(tokens / rest.max_tokens))
    prefill_s = 0.0
    if sweeps:
        one = Sweeps(*(np.array([value]) for value in (tokens / sweeps, entering.keys.sum() / tokens, 0.0, 1.0)))
        prefill_s = float(sweeps * sweep_s(one)[0])
    begun = _Decoding(entering.output - 1.0, entering.context + 1.0).after(0.0)
    return prefill_s + _drain_s(
        _Decoding(*(np.concatenate(pair) for pair in zip(running, begun, strict=True))), sweep_s
    )


class SweepTable:
    """Seconds of sweeps, interpolated on the grid of a plan."""

    def __init__(self, times: SweepTimes) -> None:
        self._axes = [np.array(axis, float) for axis in (times.prefill_tokens, times.decode_seqs, times.contexts)]
        self._seconds = np.array(times.seconds)
        self._times = times

    def __call__(self, sweeps: Sweeps) -> Array:
        """Seconds of each sweep, [n]; beyond the grid the last two values of an axis go on as a line."""
        corners = []
        for axis, values in zip(self._axes, (sweeps.prompt, sweeps.decode, sweeps.context), strict=True):
            if len(axis) == 1:
                nothing = np.zeros(len(values), int)
                corners.append((nothing, nothing, nothing.astype(float)))
                continue
            low = np.clip(np.searchsorted(axis, values, side="right") - 1, 0, len(axis) - 2)
            corners.append((low, low + 1, (values - axis[low]) / (axis[low + 1] - axis[low])))
        total = self._times.prompt_key_s * sweeps.prompt * (sweeps.prompt_keys - self._times.prompt_keys)
        for which in np.ndindex(2, 2, 2):
            weight = np.ones(len(total))
            for side, (_, _, part) in zip(which, corners, strict=True):
                weight = weight * (part if side else 1.0 - part)
            index = tuple(corner[side] for side, corner in zip(which, corners, strict=True))
            total = total + weight * self._seconds[index]
        return np.maximum(total, 0.0)
