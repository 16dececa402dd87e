"""The run directory and the remaining requests of a job, run by one process or shared by several workers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from batchgen.core.errors import BatchgenError
from batchgen.core.request import Request, ScoreRequest
from batchgen.core.scratch_folder import ScratchFolder
from batchgen.engine.prompt_order import MOST_REQUESTS
from batchgen.job.append_resume import appended_to
from batchgen.job.options import JobOptions, seconds
from batchgen.job.sorted_requests import NoSpace, SortedRequests, SortStopped, in_order_of_texts, sort_requests
from batchgen.job.source import RequestSource
from batchgen.output.row_map import DoneRows
from batchgen.output.run_directory import SORTED_FOLDER, Run, open_run
from batchgen.share.run import SharedRun, open_shared_run

if TYPE_CHECKING:
    import pyarrow as pa

_OF_INPUT = ""  # in place of the digest of an order


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
    source: RequestSource,
    state: Run | SharedRun,
    ahead: int,
    should_stop: Callable[[], bool],
    watch: Callable[[Iterable[Any]], Iterator[Any]],
    *,
    in_order: bool,
) -> Generator[Request | ScoreRequest | None, None, None]:
    """Yield the requests of the rows that this process must run.

    In a worker, None is yielded while it waits until it can claim rows.

    Args:
        source: The job's input.
        state: The job's run directory.
        ahead: Number of rows that a worker claims before it needs them.
        should_stop: Function that returns true when a worker is to claim no more rows, and nothing more be sorted.
        watch: Function that passes on requests, which it sees in the order of the input.
        in_order: Whether requests come in the order of their prompts' texts, where they are more than can wait.
    """
    if isinstance(state, Run):

        def requests() -> Iterator[Any]:
            return watch(source.requests(state.done_rows))

        folder = state.directory / SORTED_FOLDER
        yield from in_order_of_texts(requests, folder, should_stop) if in_order else requests()
        return
    with contextlib.ExitStack() as stack:
        try:
            ordered = _order_of_workers(source, state, stack, should_stop, watch, wanted=in_order)
        except SortStopped:
            return
        reader = _Reader(source)
        for rows in state.claims(ahead, should_stop):
            if rows is None:
                yield None
            elif ordered is None:
                yield from watch(reader.requests(rows))
            else:
                needed, positions = set(rows), (state.worker.position_of(rows[0]), state.worker.position_of(rows[-1]))
                for request in ordered.read(positions[0], positions[1] + 1):
                    if request.row in needed:
                        yield request


def _order_of_workers(
    source: RequestSource,
    state: SharedRun,
    stack: contextlib.ExitStack,
    should_stop: Callable[[], bool],
    watch: Callable[[Iterable[Any]], Iterator[Any]],
    *,
    wanted: bool,
) -> SortedRequests | None:
    """The requests of all workers in one order, of which ranges are claimed from now on; None: that of the input.

    Every worker sorts all rows. The first one decides, and records a digest of the order.

    Args:
        source: The job's input.
        state: The job's run directory.
        stack: Stack that removes the sorted requests.
        should_stop: Function that returns true when the job ends.
        watch: Function that passes on requests, which it sees in the order of the input.
        wanted: Whether this worker would sort.

    Raises:
        BatchgenError: The workers have come to different orders, or this one cannot sort.
        SortStopped: The job has ended.
    """
    if state.order is None and (not wanted or source.dataset.count_rows() <= MOST_REQUESTS):
        state.record_order(_OF_INPUT)
    if state.order == _OF_INPUT:
        return None
    try:
        state.sorted_folder = folder = _folder_for_sorting()
        stack.callback(folder.close)
        ordered = sort_requests(watch(source.requests(DoneRows())), folder.path / SORTED_FOLDER, should_stop)
    except NoSpace as error:
        state.record_order(_OF_INPUT)
        if state.order not in (None, _OF_INPUT):
            raise BatchgenError(f"rows cannot be sorted as other workers have done ({error}): set TMPDIR") from error
        return None
    state.record_order(ordered.digest)
    if state.order in (None, _OF_INPUT):
        return None
    if state.order != ordered.digest:
        raise BatchgenError("other workers have sorted the rows in another order: run the same batchgen everywhere")
    state.worker.work_in_order(np.asarray(ordered.rows))
    return ordered


def _folder_for_sorting() -> ScratchFolder:
    """Make a folder for sorted requests. Raises NoSpace where it cannot be made."""
    try:
        return ScratchFolder("sorted")
    except OSError as error:
        raise NoSpace(error.strerror or str(error)) from error


def going_on(requests: Iterable[Any], state: Run | SharedRun) -> Iterator[Any]:
    """Give requests the tokens that an earlier run has generated for their rows.

    Args:
        requests: Requests, and None as `requests_left` yields it.
        state: The job's run directory.
    """
    for request in requests:
        begun = None
        if isinstance(request, Request) and request.row is not None and request.error is None:
            begun = state.partial(request.row)
        yield request if begun is None else replace(request, partial=begun)


class _Reader:
    """A reader of row ranges of an input. While ranges ascend, it reads the input once."""

    def __init__(self, source: RequestSource) -> None:
        self._source = source
        self._batches: Iterator[tuple[int, pa.RecordBatch]] = iter(())
        self._current: tuple[int, pa.RecordBatch] | None = None

    def requests(self, rows: Sequence[int]) -> Iterator[Request | ScoreRequest]:
        """Yield the requests of some rows in ascending order."""
        needed = set(rows)
        for first, batch in self.read(rows[0], rows[-1] + 1):
            for offset, request in enumerate(self._source.requests_of(batch, first)):
                if first + offset in needed:
                    yield self._source.numbered(request, first + offset)

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
