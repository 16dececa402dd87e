"""When a job will be done: its plan's stages, corrected by what the job itself has shown so far."""

from __future__ import annotations

from dataclasses import dataclass, replace

from batchgen.core.plan import Plan, Stage

# The plan's speed counts as much as having watched this part of the job.
_PRIOR_FRAC = 0.05


@dataclass(frozen=True)
class Expected:
    """What a plan expects of the rows that are left when a job starts.

    Attributes:
        rows: how many they are.
        stages: the sweeps, with all their seconds and tokens.
        output_len: tokens that a row generates, on average.
        is_bound: rows may generate fewer, as nothing but the limit is known.
    """

    rows: int
    stages: tuple[Stage, ...]
    output_len: float
    is_bound: bool

    @classmethod
    def of(cls, plan: Plan, rows: int | None, seqs_per_row: float | None = None) -> Expected | None:
        """What a plan expects of so many rows; None where nobody knows.

        Args:
            plan: How the job is run.
            rows: Those that are left; None: unknown.
            seqs_per_row: Sequences of each, where the plan was made for other rows than these; None: it is theirs.
        """
        workload, stages = plan.workload, plan.prediction.stages
        if not rows or not stages:
            return None
        more = 1.0 if seqs_per_row is None else rows * seqs_per_row / workload.num_seqs
        stages = tuple(replace(s, seconds=s.seconds * more, tokens=s.tokens * more) for s in stages)
        if workload.task == "score":
            return cls(rows, stages, 0.0, False)
        output_len = workload.output_len.mean * workload.num_seqs * more / rows
        return cls(rows, stages, output_len, workload.output_len.mean >= workload.max_output_len)


@dataclass(frozen=True)
class Seen:
    """What a job has shown since its first sweep.

    Attributes:
        seconds: since then.
        rows: that are done.
        tokens: that went through the layers.
        generated: tokens of all rows, of those under way too.
        finished: generated tokens of rows that are done.
        repeated: rows of those done that took over another row's result.
    """

    seconds: float
    rows: int
    tokens: int
    generated: int = 0
    finished: int = 0
    repeated: int = 0


def progress_of(expected: Expected, seen: Seen) -> tuple[float, float]:
    """The seconds that the plan gives to what is done, and to what is left.

    Outputs of rows that are left are as long as planned; where that is a bound only, as long as those so far, in which rows
    under way count with what they have: the maximum-likelihood mean of lengths that are cut off.
    """
    planned_s = sum(stage.seconds for stage in expected.stages)
    planned_tokens = sum(stage.tokens for stage in expected.stages)
    computed = seen.rows - seen.repeated
    part = computed / seen.rows if computed else 1.0  # of the rows that are left too
    left = part * max(0, expected.rows - seen.rows)
    output_len = expected.output_len
    if expected.is_bound and computed:
        output_len = min(output_len, seen.generated / computed)
    prompt_len = planned_tokens / expected.rows - expected.output_len
    tokens = (computed + left) * prompt_len + part * seen.finished + left * output_len
    smaller = max(tokens, seen.tokens + left, 1.0) / planned_tokens  # than planned, with the same stages
    done_s = smaller * _reached_s(expected.stages, seen.tokens / smaller)
    return done_s, max(0.0, planned_s * smaller - done_s)


def remaining_s(expected: Expected, seen: Seen) -> float:
    """Seconds to go: what the plan gives to what is left, at the speed that the job has shown."""
    done_s, left_s = progress_of(expected, seen)
    prior_s = _PRIOR_FRAC * (done_s + left_s)
    return left_s * (seen.seconds + prior_s) / (done_s + prior_s) if left_s else 0.0


def _reached_s(stages: tuple[Stage, ...], tokens: float) -> float:
    """When so many tokens have gone through the layers, if all goes as planned."""
    passed_s = 0.0
    for stage in stages:
        if tokens < stage.tokens:
            return passed_s + stage.seconds * tokens / stage.tokens
        passed_s, tokens = passed_s + stage.seconds, tokens - stage.tokens
    return passed_s
