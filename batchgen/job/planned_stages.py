"""The progress of a running job through the stages of its plan."""

from __future__ import annotations

from dataclasses import dataclass, replace

from batchgen.core.plan import Plan, Stage


@dataclass(frozen=True)
class PlannedStages:
    """A plan's prediction for the rows that are not done when a job starts.

    Attributes:
        rows: Number of these rows.
        stages: Stages of sweeps, with their predicted seconds and tokens.
        output_len: Mean number of tokens that a row generates.
        is_bound: True where only the most tokens that a row may generate are known, so that outputs may be shorter.
    """

    rows: int
    stages: tuple[Stage, ...]
    output_len: float
    is_bound: bool

    @classmethod
    def of(cls, plan: Plan, rows: int | None, seqs_per_row: float | None = None) -> PlannedStages | None:
        """A plan's prediction for a number of rows; None where it cannot be known.

        Args:
            plan: The job's plan.
            rows: Number of rows that are not done; None: unknown.
            seqs_per_row: Sequences of each row, where the plan was made for other rows; None: it was made for these.
        """
        workload, stages = plan.workload, plan.prediction.stages
        if not rows or not stages:
            return None
        more = 1.0 if seqs_per_row is None else rows * seqs_per_row / workload.num_seqs
        stages = tuple(replace(stage, seconds=stage.seconds * more, tokens=stage.tokens * more) for stage in stages)
        if workload.task == "score":
            return cls(rows, stages, 0.0, False)
        output_len = workload.output_len.mean * workload.num_seqs * more / rows
        return cls(rows, stages, output_len, workload.output_len.mean >= workload.max_output_len)


@dataclass(frozen=True)
class StageCounts:
    """A running job's counts since its first sweep.

    Attributes:
        seconds: Seconds since the first sweep began.
        rows: Number of rows that are done.
        tokens: Tokens that went through the layers.
        generated: Generated tokens of all rows, those in flight included.
        finished: Generated tokens of rows that are done.
        repeated: Number of the done rows that got a duplicate's result.
    """

    seconds: float
    rows: int
    tokens: int
    generated: int = 0
    finished: int = 0
    repeated: int = 0


def progress_of(expected: PlannedStages, seen: StageCounts) -> tuple[float, float]:
    """Predicted seconds of the work that is done, and predicted seconds of the work that is left.

    The rows that are left get outputs as long as planned. If only a bound was planned, they get the mean output length
    so far. It counts the tokens of unfinished rows too, but divides by finished rows only: the maximum-likelihood mean
    of censored lengths.

    Args:
        expected: The plan's prediction.
        seen: The job's counts.
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


def _reached_s(stages: tuple[Stage, ...], tokens: float) -> float:
    """Predicted seconds until `tokens` tokens have gone through the layers."""
    passed_s = 0.0
    for stage in stages:
        if tokens < stage.tokens:
            return passed_s + stage.seconds * tokens / stage.tokens
        passed_s, tokens = passed_s + stage.seconds, tokens - stage.tokens
    return passed_s
