"""The run directory and the remaining requests of a job, run by one process or shared by several workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchgen.core.request import Request, ScoreRequest
from batchgen.job.append_resume import appended_to
from batchgen.job.options import JobOptions, seconds
from batchgen.job.source import RequestSource
from batchgen.output.run_directory import Run, open_run
from batchgen.share.run import SharedRun, open_shared_run

if TYPE_CHECKING:
    import pyarrow as pa


def open_output(
    options: JobOptions, output: str | Path, fingerprint: dict[str, Any], source: RequestSource, *, named: bool
) -> Run | SharedRun:
    """Open the run directory of a job's output, for this process alone or for one of several workers.

    Args:
        options: The job's options.
        output: The output file.
        fingerprint: All values that the rows' results depend on.
        source: The job's input.
        named: Whether the options name the output. Otherwise its name contains the fingerprint, so that no other job
            has it.

    Raises:
        BatchgenError: The output is another job's, or cannot be opened.
    """
    extends = appended_to(source) if named else None
    keep_parts = named and source.dataset.may_grow
    if options.share:
        return open_shared_run(
            output,
            fingerprint,
            rows=source.dataset.count_rows(),
            lease_s=seconds(options.share_lease),
            errors_file=source.is_openai,
            extends=extends,
            keep_parts=keep_parts,
            describe_files=source.dataset.describe_files,
        )
    return open_run(
        output,
        fingerprint,
        resume=options.resume,
        overwrite=options.overwrite,
        retry_failed=options.retry_failed,
        errors_file=source.is_openai,
        extends=extends,
        keep_parts=keep_parts,
        describe_files=source.dataset.describe_files,
        results_per_row=source.columns.results_per_row,
    )


def requests_left(
    source: RequestSource, state: Run | SharedRun, ahead: int, should_stop: Callable[[], bool]
) -> Iterator[Request | ScoreRequest | None]:
    """Yield the requests of the rows that this process must run.

    In a worker, None is yielded while it waits until it can claim rows.

    Args:
        source: The job's input.
        state: The job's run directory.
        ahead: Number of rows that a worker claims before it needs them.
        should_stop: Function that returns true when a worker is to claim no more rows.
    """
    if isinstance(state, Run):
        yield from source.requests(state.done_rows)
        return
    reader = _Reader(source)
    for rows in state.claims(ahead, should_stop):
        if rows is None:
            yield None
            continue
        needed = set(rows)
        for first, batch in reader.read(rows[0], rows[-1] + 1):
            for offset, request in enumerate(source.requests_of(batch, first)):
                if first + offset in needed:
                    yield source.numbered(request, first + offset)


def going_on(requests: Iterable[Any], state: Run | SharedRun) -> Iterator[Any]:
    """Give requests the tokens that an earlier run has generated for their rows.

    Args:
        requests: Requests, and None as `requests_left` yields it.
        state: The job's run directory.
    """
    for request in requests:
        partial = None
        if isinstance(request, Request) and request.row is not None and request.error is None:
            partial = state.partial(request.row)
        yield request if partial is None else replace(request, partial=partial)


class _Reader:
    """A reader of row ranges of an input. While ranges ascend, it reads the input once."""

    def __init__(self, source: RequestSource) -> None:
        self._source = source
        self._batches: Iterator[tuple[int, pa.RecordBatch]] = iter(())
        self._current: tuple[int, pa.RecordBatch] | None = None

    def read(self, start: int, stop: int) -> Iterator[tuple[int, pa.RecordBatch]]:
        """(first row, batch) of rows start to stop - 1, in order."""
        if self._current is None or start < self._current[0]:
            self._batches = self._source.batches(start)
            self._current = next(self._batches, None)
        while self._current is not None and self._current[0] < stop:
            first, batch = self._current
            low, high = max(start, first), min(stop, first + batch.num_rows)
            if low < high:
                yield low, batch.slice(low - first, high - low)
            if first + batch.num_rows > stop:
                return
            self._current = next(self._batches, None)
