"""Prediction of the time left of a running job: a simulation of its rest, at the speed that its own sweeps have shown.

Known are the sequences in flight, the lengths of outputs that have ended, the sizes of the rows that wait, and the
plan's seconds for sweeps of any size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from batchgen.core.plan import Plan
from batchgen.engine.in_flight import InFlight
from batchgen.job.output_lengths import OutputLengths
from batchgen.job.rest_of_job import Rest, Sweeps, SweepTable, seconds_of_rest
from batchgen.job.row_sizes import RowSizes
from batchgen.job.time_left import Seen, TimeLeft

Array = np.ndarray[Any, Any]

_MOST_WAITING = 4  # waiting sequences that are simulated, as multiples of those in flight
_FEW_WAITING = 256  # all of so few are
_OCTAVES = 32  # of a sweep's tokens
_MOST_ADDED = 256  # sweeps whose speed is counted together
_SPEED_PRIOR_FRAC = 0.03  # sweeps of a size count with this part of all sweeps at the speed of all
_HALF_LIFE_FRAC, _LEAST_HALF_LIFE_S = 0.3, 20.0  # of the time that has passed: older sweeps count half
_CACHED_PRIOR_FRAC = 0.02  # the planned part of shared prompt tokens counts as this part of all rows


@dataclass(frozen=True)
class Expected:
    """A plan and what else is known about the rows that are not done when a job starts.

    Attributes:
        plan: The plan.
        rows: Number of these rows.
        before: Number of rows that were done before.
        seqs_per_row: Sequences of each row.
        copies: Sequences with the same prompt, of which one is computed.
        output_limit: The most tokens that a sequence may generate.
        ends_itself: True where outputs may end before the limit.
        finished: Lengths of outputs that earlier runs have finished.
        sizes: Sizes of the rows of the input; None: they are not known.
        shared: True where other workers run some of the rows.
    """

    plan: Plan
    rows: int
    before: int = 0
    seqs_per_row: float = 1.0
    copies: int = 1
    output_limit: int = 1
    ends_itself: bool = True
    finished: tuple[int, ...] = ()
    sizes: RowSizes | None = None
    shared: bool = False

    @classmethod
    def of(cls, plan: Plan, rows: int | None, **more: Any) -> Expected | None:
        """The expectation of a plan; None where the number of rows or the seconds of sweeps are not known.

        Args:
            plan: The job's plan.
            rows: Number of rows that are not done; None: unknown.
            **more: Further attributes.
        """
        if not rows or not plan.prediction.sweep_times.seconds:
            return None
        limit = plan.workload.max_output_len if plan.workload.task == "generate" else 1
        return cls(plan, rows, output_limit=limit, **more)


class Speed:
    """The seconds of sweeps as measured, over those of the plan, for sweeps of each kind and size.

    The kinds are sweeps that mostly have prompts, and sweeps that mostly decode. Sizes are octaves of tokens. A size
    that was not seen is as fast as the nearest one of its kind.
    """

    def __init__(self, planned_s: SweepTable) -> None:
        self._planned_s = planned_s
        self._measured = np.zeros((2, _OCTAVES))  # seconds by kind and size, older ones counted less
        self._planned = np.zeros((2, _OCTAVES))
        self._passed_s = 0.0
        # Since the speed was last asked for, as few at a time cost more.
        self._added: list[tuple[float, float, Sweeps]] = []

    def add(self, seconds: float, sweep: Sweeps, times: float = 1.0) -> None:
        """Count a sweep that did the work of `times` planned ones.

        Args:
            seconds: Its seconds, as measured.
            sweep: The work of such a planned one, arrays of length 1.
            times: The number of planned ones.
        """
        self._added.append((seconds, times, sweep))
        if len(self._added) >= _MOST_ADDED:
            self._count_added()

    def _count_added(self) -> None:
        """Count the sweeps that were added, in their order."""
        if not self._added:
            return
        sweeps = Sweeps(*map(np.concatenate, zip(*(sweep for *_, sweep in self._added), strict=True)))
        of_sweeps = (*(values.tolist() for values in _kinds_and_octaves(sweeps)), self._planned_s(sweeps).tolist())
        for (seconds, times, _), kind, octave, planned_s in zip(self._added, *of_sweeps, strict=True):
            self._passed_s += seconds
            half_life_s = max(_LEAST_HALF_LIFE_S, _HALF_LIFE_FRAC * self._passed_s)
            kept = 0.5 ** (seconds / half_life_s)
            self._measured *= kept
            self._planned *= kept
            self._measured[kind, octave] += seconds
            self._planned[kind, octave] += times * planned_s
        self._added = []

    def sweep_s(self, sweeps: Sweeps) -> Array:
        """Predicted seconds of sweeps at the measured speed, [n]."""
        self._count_added()
        planned = self._planned.sum()
        overall = self._measured.sum() / planned if planned else 1.0
        prior_s = _SPEED_PRIOR_FRAC * planned
        kinds, octaves = _kinds_and_octaves(sweeps)
        factors = np.full(len(kinds), overall)
        for kind in range(2):
            seen = np.flatnonzero(self._planned[kind])
            if len(seen):
                measured_s, planned_s = self._measured[kind, seen], self._planned[kind, seen]
                speeds = (measured_s + prior_s * overall) / (planned_s + prior_s)
                factors = np.where(kinds == kind, np.interp(octaves, seen, speeds), factors)
        return factors * self._planned_s(sweeps)


def _kinds_and_octaves(sweeps: Sweeps) -> tuple[Array, Array]:
    """For each sweep, 1 where it mostly has prompts, else 0; and the octave of its tokens."""
    octaves = np.log2(np.maximum(sweeps.prompt + sweeps.decode, 1.0)).astype(int)
    return (sweeps.prompt > sweeps.decode).astype(int), np.minimum(octaves, _OCTAVES - 1)


class Estimator:
    """The time left of a running job, from its counts after each sweep."""

    def __init__(self, expected: Expected, in_flight: Callable[[], InFlight]) -> None:
        """Begin with no sweep seen.

        Args:
            expected: The plan, and what else is known beforehand.
            in_flight: Function that gives the sequences of the engine.
        """
        self._expected, self._in_flight = expected, in_flight
        plan = expected.plan
        self._speed = Speed(SweepTable(plan.prediction.sweep_times))
        self._outputs = OutputLengths()
        for tokens in expected.finished:
            self._outputs.add(tokens, cut=tokens >= expected.output_limit)
        self._seen = Seen()
        self._capacity = 0  # the most sequences that a sweep without prompts had while rows were waiting

    def ended(self, tokens: int, *, cut: bool) -> None:
        """Count an output. tokens: its length. cut: True where it reached its limit."""
        self._outputs.add(tokens, cut=cut)

    def after_sweep(self, seconds: float, seen: Seen) -> None:
        """Take the counts after a sweep.

        Args:
            seconds: Seconds since the sweep before.
            seen: The job's counts.
        """
        before = self._seen
        prompt, decode = seen.prefilled - before.prefilled, seen.decoded - before.decoded
        if prompt + decode > 0:
            keys, context = seen.prefill_keys - before.prefill_keys, seen.decode_keys - before.decode_keys
            if not prompt and self._rows_left(seen) > decode / self._expected.seqs_per_row:
                self._capacity = max(self._capacity, decode)
            # In a planned sweep each sequence gains one token.
            times = 1 + max(0, seen.more_gained - before.more_gained) / decode if decode else 1.0
            values = prompt / times, keys / max(1, prompt), decode, context / max(1, decode)
            self._speed.add(seconds, Sweeps(*(np.array([value], float) for value in values)), times)
        self._seen = seen

    def time_left(self) -> TimeLeft:
        """The predicted time left."""
        rest = self._rest(self._in_flight())
        bound = self._expected.ends_itself and self._expected.output_limit > 1 and not self._outputs.known
        return TimeLeft(seconds_of_rest(rest, self._speed.sweep_s), bound)

    def _rest(self, now: InFlight) -> Rest:
        expected, seen, policy = self._expected, self._seen, self._expected.plan.policy
        generated, limits = np.array(now.generated, int), np.array(now.limits, int)
        running = (len(now.generated) + len(now.queued_prompt)) / expected.seqs_per_row
        rows_left = max(0.0, self._rows_left(seen) - running)
        if expected.shared:
            rows_left *= (seen.rows + running) / max(1.0, seen.rows + running + seen.others)
        if seen.rows:
            rows_left *= 1 - seen.repeated / seen.rows
        waiting = rows_left * expected.seqs_per_row
        most = _MOST_WAITING * policy.max_num_seqs + _FEW_WAITING
        count = math.ceil(min(waiting, most))
        queued_prompt, queued_limits = np.array(now.queued_prompt, float), np.array(now.queued_limits, int)
        computed_frac = self._computed_frac(seen)
        waiting_prompt = self._waiting_prompts(count, expected.before + seen.rows + seen.others + running)
        waiting_limits = np.full(count, expected.output_limit)
        limits_of_all = np.concatenate([limits, queued_limits, waiting_limits])
        generated_of_all = np.concatenate([generated, np.zeros(len(queued_limits) + count, int)])
        final = self._final_lengths(generated_of_all, limits_of_all, generated)
        m = len(generated)
        prompt = np.concatenate([queued_prompt, waiting_prompt])
        return Rest(
            running_prompt=np.array(now.prompt, float),
            running_context=np.array(now.context, float),
            running_output=(final[:m] - generated).astype(float),
            waiting_prompt=prompt * computed_frac / expected.copies,
            waiting_context=prompt,
            waiting_output=final[m:].astype(float),
            waiting=len(queued_limits) + waiting,
            max_seqs=self._capacity or policy.max_num_seqs,  # KV may hold fewer than planned
            max_tokens=policy.max_num_batched_tokens,
            static=policy.admission == "static",
        )

    def _final_lengths(self, generated: Array, limits: Array, running: Array) -> Array:
        if not self._expected.ends_itself:
            longest: Array = np.maximum(limits, generated + 1)
            return longest
        return self._outputs.draw(generated, limits, running)

    def _rows_left(self, seen: Seen) -> int:
        """Number of rows that nobody has finished."""
        return self._expected.rows - seen.rows - seen.others

    def _computed_frac(self, seen: Seen) -> float:
        """Part of prompt tokens that has to be computed, as no other row has computed it."""
        workload = self._expected.plan.workload
        planned = max(0.0, 1.0 - workload.computed_prompt_len * self._expected.copies / workload.prompt_len.mean)
        prior = _CACHED_PRIOR_FRAC * self._expected.rows * workload.prompt_len.mean
        return 1.0 - (seen.cached_tokens + planned * prior) / (seen.prompt_tokens + prior)

    def _waiting_prompts(self, count: int, first_row: float) -> Array:
        """Prompt tokens of the sequences that the engine has not read yet.

        Args:
            count: Number of sequences that stand for all of them.
            first_row: Number of the first of their rows.
        """
        workload, sizes = self._expected.plan.workload, self._expected.sizes
        if not count:
            return np.zeros(0)
        tokens = sizes.prompt_tokens(first_row, count) if sizes is not None else None
        if tokens is None:
            values = np.array(workload.prompt_len.values, float)
            spread: Array = values[np.random.default_rng(0).permutation(count) % len(values)]
            return spread
        return tokens * self._expected.copies / self._expected.seqs_per_row
