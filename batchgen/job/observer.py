"""The display of a running job after each sweep, for people, and its published state, for other programs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from batchgen.core.request import Completion, Scored
from batchgen.job.eta import Estimator, Expected
from batchgen.job.progress import Counts, Progress
from batchgen.job.snapshot import Publisher
from batchgen.job.time_left import Seen, TimeLeft

if TYPE_CHECKING:
    from batchgen.core.plan import Plan
    from batchgen.engine.engine import Engine
    from batchgen.engine.parts import EngineStats
    from batchgen.job.options import JobOptions
    from batchgen.job.row_sizes import RowSizes
    from batchgen.output.run_directory import Run
    from batchgen.share.run import SharedRun

_PLANNED_OUTPUTS = 8  # outputs that an expected length stands for, until others have ended


@dataclass(frozen=True)
class RowCounts:
    """Numbers of rows of this run.

    Attributes:
        done: Finished rows, failed ones included.
        failed: Failed rows.
        repeated: Finished rows that got a duplicate's result.
    """

    done: int
    failed: int
    repeated: int


class Observer:
    """The display and the published state of the rows of a running job."""

    def __init__(
        self,
        state: Run | SharedRun,
        total_rows: int | None,
        rows: Callable[[], RowCounts],
        progress: Progress,
        publisher: Publisher,
    ) -> None:
        """Show nothing yet.

        Args:
            state: The job's run directory.
            total_rows: Number of the job's rows; None: unknown.
            rows: Function that gives the numbers of rows.
            progress: The job's display.
            publisher: The job's published state.
        """
        self._state, self._total_rows, self._rows = state, total_rows, rows
        self._progress, self._publisher = progress, publisher
        self._failed_before = state.done_rows.failed
        self._estimator: Estimator | None = None

    def start(self, expected: Expected | None, engine: Engine) -> None:
        """Begin to count. expected: what the plan says; None: there is no estimate of the time left."""
        self._estimator = None if expected is None else Estimator(expected, engine.in_flight)
        self._progress.start(self._estimator)
        rows_done = len(self._state.done_rows)
        self._publisher.publish(
            state="running", rows=self._total_rows, rows_done=rows_done, rows_failed=self._failed_before
        )

    def finished(self, result: Completion | Scored) -> None:
        """Take the result of a row."""
        if self._estimator is not None and isinstance(result, Completion):
            for sample in result.samples:
                self._estimator.ended(len(sample.token_ids), cut=sample.finish_reason == "length")

    def after_sweep(self, stats: EngineStats) -> TimeLeft | None:
        """Show and publish the counts after a sweep.

        Args:
            stats: The engine's totals.

        Returns:
            The predicted time left; None: unknown.
        """
        counts = self._counts(stats)
        self._progress.update(counts)
        left = self._progress.time_left(counts)
        if self._publisher.is_due:
            self._publisher.publish(
                rows_done=counts.all_done,
                rows_failed=self._failed_before + counts.failed,
                rows_per_s=self._progress.rows_per_s(),
                prompt_tokens=counts.prompt_tokens,
                generated_tokens=counts.generated_tokens,
                sweeps=counts.sweeps,
                seconds_left=None if left is None else left.seconds,
                left_is_bound=left is not None and left.is_bound,
            )
        return left

    def _counts(self, stats: EngineStats) -> Counts:
        rows = self._rows()
        others = self._state.rows_of_others
        seen = Seen(
            rows.done,
            rows.repeated,
            others,
            stats.prompt_tokens,
            stats.cached_prompt_tokens,
            stats.prefilled_tokens,
            stats.prefill_keys,
            stats.decoded,
            stats.decode_keys,
            stats.forced_tokens + stats.accepted_tokens,
        )
        return Counts(
            self._total_rows,
            self._state.rows_resumed + self._state.rows_known,
            rows.done,
            rows.failed,
            stats.prompt_tokens,
            stats.generated_tokens,
            others,
            stats.sweeps,
            None if self._estimator is None else seen,
        )


def expected_of(
    plan: Plan, options: JobOptions, state: Run | SharedRun, total_rows: int | None, sizes: RowSizes
) -> Expected | None:
    """The knowledge before the first sweep about the rows that are left; None where no time can be told.

    Args:
        plan: The job's plan.
        options: The job's options.
        state: The job's run directory.
        total_rows: Number of the job's rows; None: unknown.
        sizes: Sizes of the input's rows.
    """
    if total_rows is None:
        return None
    rows = total_rows - len(state.done_rows)
    sampling, generates = options.sampling, options.task == "generate"
    finished = tuple(state.output_lens()) if generates else ()
    if not finished and options.expected_output_len is not None:
        finished = (options.expected_output_len,) * _PLANNED_OUTPUTS
    elif not finished and generates and plan.workload.output_len.max < plan.workload.max_output_len:  # of choices
        finished = (plan.workload.output_len.max,) * _PLANNED_OUTPUTS
    made_here = options.plan is None and rows
    return Expected.of(
        plan,
        rows,
        before=len(state.done_rows),
        seqs_per_row=plan.workload.num_seqs / rows if made_here else float(sampling.n),
        copies=sampling.n if generates else 1,
        ends_itself=generates and not sampling.ignore_eos,
        finished=finished,
        sizes=sizes,
        shared=options.share,
    )
