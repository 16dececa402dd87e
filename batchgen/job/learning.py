"""Learning from a job's sweeps: they measure the machine for later jobs, and for the rest of this one."""

from __future__ import annotations

import bisect
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from batchgen.core.knowledge import Knowledge, Parts
from batchgen.core.plan import Plan, Prediction, Stage
from batchgen.core.units import format_seconds
from batchgen.job.job import Job
from batchgen.job.machine_profile import knowledge_of_table, record_of_machine
from batchgen.job.planned_stages import PlannedStages, StageCounts, progress_of
from batchgen.job.time_left import TimeLeft
from batchgen.planner.cost_parts import mean_parts
from batchgen.profiler.contention import Beside, slowed_by
from batchgen.profiler.machine_record import MachineRecord, update_record

# Standard deviations of the logarithm of a stage's measured time over the predicted one, and of a whole job's whose
# outputs had other lengths than planned; and their part of the logarithm by which others slowed the job down.
_NOISE, _NOISE_OF_OTHER_LENGTHS, _NOISE_OF_OTHERS = 0.06, 0.15, 0.5
# A job has the planned lengths if it has so many times as many tokens.
_AS_PLANNED = (0.8, 1.25)
# A stage tells nothing if it has fewer sweeps, or takes less time.
_FEWEST_SWEEPS, _LEAST_S = 3, 0.3
# Parts of which no share differs by more are alike.
_LIKE_PARTS = 0.05
# A new prediction is told after so many sweeps that have taken so long, if as much time is left. A moment's sweeps are
# those of the few rows that were read by then.
_FIRST_SWEEPS, _FIRST_S, _WORTH_TELLING_S = 20, 3.0, 20.0
# Points of a job's time that are kept; where there are more sweeps, a point stands for several of them.
_MOST_POINTS = 1 << 13
# 90 % of what sweeps of one kind say of those of another.
_SPREAD_AFTER_SWEEPS = 0.1


@dataclass(frozen=True)
class Shown:
    """A measured time, as `Knowledge.after` takes it.

    Attributes:
        parts: Parts of the time.
        logarithm: Logarithm of the measured time over the time by the table.
        noise: Standard deviation of that logarithm.
    """

    parts: Parts
    logarithm: float
    noise: float


class SweepTimes:
    """The times of a job's sweeps, by the tokens that have gone through the layers."""

    def __init__(self) -> None:
        # (tokens, seconds since the first sweep began, sweeps) so far, after every so many sweeps and after the last
        self._points: list[tuple[int, float, int]] = [(0, 0.0, 0)]
        self._sweeps_of_point = 1
        self._beside = Beside()

    @property
    def sweeps(self) -> int:
        """Number of sweeps so far."""
        return self._points[-1][2]

    def after_sweep(self, tokens: int, seconds: float) -> None:
        """Note the end of a sweep.

        Args:
            tokens: Tokens that have gone through the layers.
            seconds: Seconds since the first sweep began.
        """
        point = (tokens, seconds, self.sweeps + 1)
        if self.sweeps % self._sweeps_of_point:
            self._points[-1] = point
            return
        if len(self._points) > _MOST_POINTS:
            self._points = self._points[::2]
            self._sweeps_of_point *= 2
        self._points.append(point)

    def shown(self, prediction: Prediction, expected: PlannedStages, seen: StageCounts) -> list[Shown]:
        """The measured times of the stages, or of the whole job where its outputs had other lengths.

        Args:
            prediction: Prediction of the job's plan.
            expected: The prediction for the rows that this run had.
            seen: The job's counts at its end.
        """
        slower = slowed_by(self._beside.taken_frac())
        beside = _NOISE_OF_OTHERS * slower
        stages = _alike(expected.stages)
        planned = sum(stage.tokens for stage in stages)
        applied = Knowledge(prediction.table, means=prediction.factors)
        if planned and _AS_PLANNED[0] <= seen.tokens / planned <= _AS_PLANNED[1]:
            noise = math.hypot(_NOISE, beside)
            tokens = [stage.tokens * seen.tokens / planned for stage in stages]
            times = zip(stages, self._stage_times(tokens), strict=True)
            return [
                Shown(stage.parts, math.log(seconds / stage.seconds) + applied.mean(stage.parts) - slower, noise)
                for stage, (seconds, sweeps) in times
                if sweeps >= _FEWEST_SWEEPS and seconds >= _LEAST_S and stage.parts and stage.seconds
            ]
        done_s, _ = progress_of(expected, seen)
        if self.sweeps < _FEWEST_SWEEPS or seen.seconds < _LEAST_S or not done_s:
            return []
        parts = mean_parts([(stage.seconds, stage.parts) for stage in stages])
        noise = math.hypot(_NOISE_OF_OTHER_LENGTHS, beside)
        return [Shown(parts, math.log(seen.seconds / done_s) + applied.mean(parts) - slower, noise)]

    def _stage_times(self, tokens: Sequence[float]) -> Iterator[tuple[float, int]]:
        """Seconds and sweeps of stages with so many tokens each."""
        ends = list(itertools.accumulate(tokens))
        for start, end in itertools.pairwise([0.0, *ends]):
            first, last = (self._points[min(self._place(at), len(self._points) - 1)][2] for at in (start, end))
            yield self._seconds_at(end) - self._seconds_at(start), last - first

    def _seconds_at(self, tokens: float) -> float:
        """Seconds until so many tokens had gone through the layers."""
        at = self._place(tokens)
        if at == 0 or at == len(self._points):
            return self._points[min(at, len(self._points) - 1)][1]
        (before, start_s, _), (after, end_s, _) = self._points[at - 1], self._points[at]
        return start_s + (end_s - start_s) * (tokens - before) / (after - before)

    def _place(self, tokens: float) -> int:
        """The first of the points by which so many tokens had gone through the layers."""
        return bisect.bisect_left(self._points, (tokens, -math.inf, 0))


def _alike(stages: Sequence[Stage]) -> list[Stage]:
    """Stages of which those that follow one another with like parts are one.

    The plan has the sweeps of a stage as equal. While a long prompt is read each takes longer than the one before, so
    that only all of them together take what was planned.
    """
    joined: list[Stage] = []
    for stage in stages:
        before = joined[-1] if joined else None
        if before is None or _most_apart(before.parts, stage.parts) > _LIKE_PARTS:
            joined.append(stage)
            continue
        times = [(part.seconds, part.parts) for part in (before, stage)]
        parts = mean_parts(times) if any(seconds for seconds, _ in times) else before.parts
        seconds, tokens = before.seconds + stage.seconds, before.tokens + stage.tokens
        joined[-1] = replace(before, seconds=seconds, tokens=tokens, sweeps=before.sweeps + stage.sweeps, parts=parts)
    return joined


def _most_apart(a: Parts, b: Parts) -> float:
    """The largest difference between the shares that a kind of work has of two times."""
    return max((abs(a.get(name, 0.0) - b.get(name, 0.0)) for name in (*a, *b)), default=0.0)


def learned(record: MachineRecord, first: Knowledge, shown: Sequence[Shown]) -> MachineRecord:
    """A machine's record after a job.

    Args:
        record: The record.
        first: Knowledge of the table's factors where the record has nothing.
        shown: Measured times of the job.
    """
    known = (record.knowledge.get(first.table) or first).drifted()
    for measured in shown:
        known = known.after(measured.parts, measured.logarithm, measured.noise)
    return record.with_knowledge(replace(known, jobs=known.jobs + 1))


class Learner:
    """A watcher of a running job: its first sweeps make a new prediction, and all of them are kept for later jobs."""

    def __init__(
        self, job: Job, plan: Plan, expected: PlannedStages | None, say: Callable[[str], None], started_s: float
    ):
        """Begin when the first sweep begins.

        Args:
            job: The job.
            plan: Its plan.
            expected: The prediction for the rows of this run; None: there is none.
            say: Function that shows a line.
            started_s: Time of time.monotonic at which the command started.
        """
        self._plan, self._say = plan, say
        # What several processes or an emulated device need says nothing of this machine's cores.
        self._expected = expected if job.device.kind == "cpu" and job.processes == 1 else None
        self._times, self._seen = SweepTimes(), StageCounts(0.0, 0, 0)
        self._has_told = False
        self._begun_s = time.monotonic()
        self._before_s = self._begun_s - started_s

    def after_sweep(
        self, rows: int, tokens: int, generated: int, finished: int, repeated: int, left: TimeLeft | None
    ) -> None:
        """Take the counts at the end of a sweep.

        Args:
            rows: Number of rows that are done.
            tokens: Tokens that went through the layers.
            generated: Generated tokens of all rows, those in flight included.
            finished: Generated tokens of rows that are done.
            repeated: Number of the done rows that got a duplicate's result.
            left: The predicted time left; None: unknown.
        """
        if self._expected is None:
            return
        seconds = time.monotonic() - self._begun_s
        self._seen = StageCounts(seconds, rows, tokens, generated, finished, repeated)
        self._times.after_sweep(tokens, seconds)
        sweeps = self._times.sweeps
        if left is None or self._has_told or sweeps < _FIRST_SWEEPS or seconds < _FIRST_S:
            return
        self._has_told = True
        if (line := told_anew(left, self._before_s + seconds, sweeps)) is not None:
            self._say(line)

    def keep(self) -> None:
        """Add what the sweeps have shown to the machine's record."""
        prediction = self._plan.prediction
        if self._expected is None or not prediction.table:
            return
        shown = self._times.shown(prediction, self._expected, self._seen)
        if shown:
            first = knowledge_of_table(prediction.table)
            update_record(record_of_machine(), lambda record: learned(record, first, shown))


def told_anew(left: TimeLeft, passed_s: float, sweeps: int) -> str | None:
    """The line with the prediction that a job's first sweeps make; None where it is not worth a line.

    Args:
        left: The predicted time left.
        passed_s: Seconds since the start of the command.
        sweeps: Number of sweeps so far.
    """
    if left.seconds < _WORTH_TELLING_S:
        return None
    origin = f"from this job's first {sweeps} sweeps"
    if left.is_bound:
        return f"predicted: at most {format_seconds(passed_s + left.seconds)} ({origin})"
    low, high = (format_seconds(passed_s + left.seconds * (1 + side * _SPREAD_AFTER_SWEEPS)) for side in (-1, 1))
    return f"predicted: {format_seconds(passed_s + left.seconds)} ({low} to {high}, {origin})"
