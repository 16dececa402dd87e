"""The way of rows through a job's steps: the answer of one step makes the prompt of the next.

Rows come in batches, answers in any order. A row whose answer has come goes on before new rows begin, so that no more
rows are between two steps than wait in the engine, and an engine has requests of all steps at once.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Protocol

import pyarrow as pa

from batchgen.core.request import Completion, Request, Sample
from batchgen.dataset.bad_lines import bad_lines
from batchgen.job.deduplication import WAKING
from batchgen.job.source import DoneRows
from batchgen.job.step_source import CompiledStep, SteppedSource
from batchgen.output.parts import PartIndex
from batchgen.output.row_result import FILTERED, SKIPPED, RowResult
from batchgen.output.step_columns import filter_text, step_arrays

_ROWS_AT_ONCE = 64  # rows whose prompts are made together
_POLL_S = 0.1
_MOST_MADE = 1024  # results that wait for the engine's next result


class _Results(Protocol):
    """The results of an engine: an iterator that can be closed."""

    def __iter__(self) -> Iterator[Completion]: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class _Row:
    """A row between two steps.

    Attributes:
        number: Number of the row in the input.
        step: Number of the step that comes next.
        values: A record batch with the row alone: the columns that steps read, and those of earlier steps.
    """

    number: int
    step: int
    values: pa.RecordBatch


class RowFlow:
    """The rows of a job that are between its steps.

    One thread reads `requests`, another one reads `results`. The result of step k for row r has the row number
    `r * len(steps) + k`.
    """

    def __init__(self, source: SteppedSource, done: DoneRows, parts_dir: Path, should_stop: Callable[[], bool]) -> None:
        """Begin with the results of earlier runs.

        Args:
            source: The job's input.
            done: Numbers of the results that are done.
            parts_dir: Directory of the part files with these results.
            should_stop: Function that returns true when no further row is to begin.
        """
        self._source, self._done, self._parts_dir, self._should_stop = source, done, parts_dir, should_stop
        self._steps = source.steps
        self._index: PartIndex | None = None
        self._in_flight: dict[int, _Row] = {}  # by the number of the result that the engine makes
        self._returned: deque[tuple[_Row, Completion]] = deque()
        self._made: deque[Completion] = deque()  # results of filters, and of steps to which a row does not come
        self._changed = threading.Condition()
        self._closed = False

    def requests(self) -> Generator[Request | None, None, None]:
        """Yield the requests of all steps; None while answers are waited for."""
        for first, batch in self._source.batches(self._done.next_unfinished(0) // len(self._steps)):
            for start in range(0, batch.num_rows, _ROWS_AT_ONCE):
                if self._should_stop():
                    return
                if len(self._made) > _MOST_MADE:
                    yield WAKING
                yield from self._requests_of(self._take_returned())
                yield from self._requests_of(self._begun(batch.slice(start, _ROWS_AT_ONCE), first + start))
        while True:
            yield None
            rows = self._wait_for_returned()
            if not rows and (self._closed or not self._in_flight or self._should_stop()):
                return
            yield from self._requests_of(rows)

    def results(self, results: _Results) -> Generator[Completion, None, None]:
        """Yield the results of all steps.

        Args:
            results: The engine's results of `requests`.
        """
        try:
            for result in results:
                number = result.row
                if number is None:
                    yield from self._drain()
                    continue
                if result.error is not None:
                    step = self._steps[number % len(self._steps)].step
                    result = replace(result, error=f"step {step.name}: {result.error}")
                yield result
                self._return(number, result)
                yield from self._drain()
            yield from self._drain()
        finally:
            with self._changed:
                self._closed = True
                self._changed.notify_all()
            results.close()

    def _return(self, number: int, result: Completion) -> None:
        """Hand a row back with the engine's result, or make the results of its later steps where it has failed."""
        with self._changed:
            row = self._in_flight.pop(number)
            if result.error is None:
                self._returned.append((row, result))
            self._changed.notify_all()
        if result.error is not None:
            self._fail(row.number, row.step + 1, result.error)

    def _drain(self) -> Iterator[Completion]:
        while self._made:
            yield self._made.popleft()

    def _wait_for_returned(self) -> list[_Row]:
        with self._changed:
            while not (self._returned or self._closed or not self._in_flight or self._should_stop()):
                self._changed.wait(_POLL_S)
        return self._take_returned()

    def _take_returned(self) -> list[_Row]:
        """The rows whose answers have come, each before its next step."""
        rows = []
        while self._returned:
            row, result = self._returned.popleft()
            rows.append(self._after(row, self._kept(row.number, row.step, result)))
        return rows

    def _kept(self, row: int, step: int, result: Completion) -> pa.RecordBatch:
        """A result as part files have it."""
        options = self._steps[step].options
        kept = RowResult.from_completion(result, token_ids=options is not None and options.token_ids)
        return RowResult.to_batch({row: kept})

    def _after(self, row: _Row, result: pa.RecordBatch) -> _Row:
        """A row after its step, with the columns that the step adds. result: the step's result, as parts have it."""
        step = self._steps[row.step]
        added = step_arrays(step.columns, row.values, result)
        names = step.schema_after.names[len(step.schema) :]
        arrays = [*row.values.columns, *added]
        values = pa.RecordBatch.from_arrays(arrays, names=[*row.values.schema.names, *names])
        return replace(row, step=row.step + 1, values=values)

    def _begun(self, batch: pa.RecordBatch, first: int) -> list[_Row]:
        """The rows of a batch that are not done, each before the first step whose result is missing."""
        bad, count, rows = bad_lines(batch), len(self._steps), []
        batch = batch.replace_schema_metadata(None)
        for offset in range(batch.num_rows):
            number = first + offset
            missing = next((k for k in range(count) if number * count + k not in self._done), count)
            if missing == count:
                continue
            if number in bad:
                self._fail(number, 0, bad[number])
                continue
            row = _Row(number, 0, batch.slice(offset, 1))
            if missing:
                row = self._again(row, missing)
            if row.step < count:
                rows.append(row)
        return rows

    def _again(self, row: _Row, step: int) -> _Row:
        """A row before a step, with the results that earlier runs have of the steps before it."""
        count = len(self._steps)
        self._index = self._index or PartIndex(self._parts_dir)
        results = self._index.read(row.number * count, step)
        for number in range(step):
            result = results.slice(number, 1)
            if (error := result.column("error")[0].as_py()) is not None:  # the run ended before the rest was written
                self._fail(row.number, step, error)
                return replace(row, step=count)
            row = self._after(row, result)
            text = result.column("text")[0].as_py()
            if self._steps[number].source is None and text != [filter_text(True)]:
                self._skip(row.number, step)
                return replace(row, step=count)
        return row

    def _requests_of(self, rows: Sequence[_Row]) -> Iterator[Request]:
        """Yield the requests of rows, after they have come through filters."""
        while rows:
            going_on: list[_Row] = []
            for number, group in groupby(sorted(rows, key=lambda row: row.step), key=lambda row: row.step):
                if number == len(self._steps):
                    continue
                step, members = self._steps[number], list(group)
                if step.source is None:
                    going_on += self._filtered(step, members)
                else:
                    yield from self._prompted(step, members)
            rows = going_on

    def _filtered(self, step: CompiledStep, rows: Sequence[_Row]) -> Iterator[_Row]:
        """Yield the rows that a filter keeps, each before the next step."""
        assert step.keeps is not None
        values = [row.values.to_pylist()[0] for row in rows]
        for row, keeps in zip(rows, step.keeps(values), strict=True):
            if isinstance(keeps, Exception):
                self._fail(row.number, row.step, f"step {step.step.name}: {keeps}")
                continue
            result = self._make(row.number, row.step, text=filter_text(keeps))
            if keeps:
                yield self._after(row, self._kept(row.number, row.step, result))
            else:
                self._skip(row.number, row.step + 1)

    def _prompted(self, step: CompiledStep, rows: Sequence[_Row]) -> Iterator[Request]:
        """Yield the requests of a step that generates."""
        assert step.source is not None and step.options is not None
        batch = pa.Table.from_batches([row.values for row in rows]).combine_chunks().to_batches()[0]
        for row, request in zip(rows, step.source.requests_of(batch, 0), strict=True):
            assert isinstance(request, Request)
            row_id = row.number if step.options.id_column is None else request.id
            number = row.number * len(self._steps) + row.step
            with self._changed:
                self._in_flight[number] = row
            sampling = request.sampling or step.options.sampling
            request = replace(request, id=f"{row_id}/{step.step.name}", sampling=sampling)
            numbered = step.source.numbered(request, number)
            assert isinstance(numbered, Request)
            yield numbered

    def _skip(self, row: int, step: int) -> None:
        """Make the results of a row that a filter has kept from a step and those after it."""
        for number in range(step, len(self._steps)):
            self._make(row, number, finish_reason=SKIPPED)

    def _fail(self, row: int, step: int, error: str) -> None:
        """Make the results of a row that has failed, at a step and those after it."""
        for number in range(step, len(self._steps)):
            self._make(row, number, error=error)

    def _make(
        self, row: int, step: int, *, text: str = "", finish_reason: str = FILTERED, error: str | None = None
    ) -> Completion:
        """Make a result without the engine."""
        samples = () if error is not None else (Sample(text, (), finish_reason),)
        result = Completion(0, str(row), 0, samples, error, row=row * len(self._steps) + step)
        self._made.append(result)
        return result
