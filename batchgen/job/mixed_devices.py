"""`plan --devices "1x t4 + 1x a100"`: workers on devices of several kinds share a job's rows by their speed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from batchgen.core.errors import InputError
from batchgen.core.plan import Plan
from batchgen.job.job import Job
from batchgen.job.planning import plan_job
from batchgen.planner.problem import Problem

_ROUNDS = 6
_TOGETHER = 1.01  # most ratio of the end times of two kinds that have the right rows


@dataclass(frozen=True)
class Part:
    """The part of a job that the workers on all devices of one kind run.

    Attributes:
        count: Number of devices, each with one worker.
        sequences: Number of sequences of each worker.
        plan: Plan of each worker; None: it gets no rows, as it would begin after the others have run all.
    """

    count: int
    sequences: int
    plan: Plan | None

    @property
    def start_s(self) -> float:
        """Predicted seconds until a worker's first sweep begins."""
        return self.plan.prediction.startup_s if self.plan else 0.0

    @property
    def end_s(self) -> float:
        """Predicted seconds until a worker's last row is done."""
        return self.plan.prediction.total_s if self.plan else 0.0

    @property
    def rate(self) -> float:
        """Predicted sequences per second of all workers of this kind together."""
        busy_s = self.end_s - self.start_s
        return self.count * self.sequences / busy_s if busy_s > 0 else 0.0


def share_out(kinds: Sequence[tuple[int, Job, Problem, Plan]]) -> list[Part]:
    """Share a job's rows among workers on devices of several kinds, so that all end together, and plan each worker.

    Args:
        kinds: For each kind: number of devices, job and problem of one worker with all rows, and the plan for this.

    Returns:
        The part of the workers of each kind.

    Raises:
        InputError: Workers of two kinds would compute different rows, or no plan fits.
    """
    if len(dtypes := dict.fromkeys(plan.dtype for _, _, _, plan in kinds)) > 1:
        raise InputError(
            f"workers of one output need the same --dtype, and here they would have {' and '.join(dtypes)}"
        )
    total = kinds[0][2].workload.num_seqs
    parts = [Part(count, total, plan) for count, _, _, plan in kinds]
    for _ in range(_ROUNDS):
        each = _sequences_of_each(parts, total)
        parts = [
            Part(count, sequences, plan_job(job, with_sequences(problem, sequences)) if sequences else None)
            for (count, job, problem, _), sequences in zip(kinds, each, strict=True)
        ]
        ends = [part.end_s for part in parts if part.plan]
        if max(ends) <= _TOGETHER * min(ends):
            break
    return parts


def _sequences_of_each(parts: Sequence[Part], total: int) -> list[int]:
    """Number of sequences of one worker of each kind, such that all workers end at the same moment at their rates.

    Workers whose first sweep would begin after that moment get none.

    Args:
        parts: The workers of each kind, with plans from which their rates come.
        total: Number of sequences of the whole job.
    """
    working = [part for part in parts if part.rate]
    while True:
        # The sum of rate (end - start) is the total.
        end_s = (total + sum(part.rate * part.start_s for part in working)) / sum(part.rate for part in working)
        in_time = [part for part in working if part.start_s < end_s]
        if len(in_time) == len(working):
            break
        working = in_time
    return [
        -(-round(part.rate * (end_s - part.start_s)) // part.count) if any(part is one for one in working) else 0
        for part in parts
    ]


def with_sequences(problem: Problem, sequences: int) -> Problem:
    """A problem with a part of its sequences. sequences: their number."""
    return replace(problem, workload=replace(problem.workload, num_seqs=sequences))
