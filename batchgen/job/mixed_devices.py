"""`plan --devices "1x t4 + 1x a100"`: a worker on each of devices of several kinds, which share the rows by how fast they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from batchgen.core.errors import InputError
from batchgen.core.plan import Plan
from batchgen.job.job import Job
from batchgen.job.planning import plan_job
from batchgen.planner.problem import Problem

_ROUNDS = 6
_TOGETHER = 1.01  # kinds that end so close together have the right rows


@dataclass(frozen=True)
class Part:
    """What the workers on the devices of one kind do of a job.

    Attributes:
        count: Devices, each with a worker.
        sequences: Of each worker.
        plan: Of each worker; None where it would begin when the others have done all.
    """

    count: int
    sequences: int
    plan: Plan | None

    @property
    def start_s(self) -> float:
        """Until a worker's first sweep."""
        return self.plan.prediction.startup_s if self.plan else 0.0

    @property
    def end_s(self) -> float:
        """Until a worker's last row."""
        return self.plan.prediction.total_s if self.plan else 0.0

    @property
    def rate(self) -> float:
        """Sequences of all workers in a second."""
        busy_s = self.end_s - self.start_s
        return self.count * self.sequences / busy_s if busy_s > 0 else 0.0


def share_out(kinds: Sequence[tuple[int, Job, Problem, Plan]]) -> list[Part]:
    """Plans for workers on devices of several kinds, with so many rows each that they end together, as `--share` has it.

    Args:
        kinds: Number of devices, job and problem of a worker with all rows, and its plan; one entry a kind.

    Raises:
        InputError: Workers of two kinds would make different rows, or no plan fits.
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
    """Of each kind, the sequences of a worker with which all end at the same moment, if they keep to their rates.

    Those of a kind that would begin later than that have none.
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
    """The problem of a part of the rows."""
    return replace(problem, workload=replace(problem.workload, num_seqs=sequences))
