"""Writing of the final file: the input's rows in order, each with its own columns and its results.

Rows are streamed. The content of the file depends on the rows alone, not on how part files divide them.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from batchgen.core.errors import InputError
from batchgen.output.columns import ONE_SAMPLE, Columns
from batchgen.output.formats import FORMATS, json_line
from batchgen.output.parts import PartIndex
from batchgen.output.regrouped_results import RegroupedResults, is_worth_regrouping
from batchgen.output.result_counts import ResultCounter, ResultCounts

_WINDOW_INPUT_BYTES = 16 << 20

# Turns one input row and its result into ("output" or "errors", what to write as a JSON line).
FormatRow = Callable[[dict[str, Any], dict[str, Any]], tuple[str, Any]]


class Dataset(Protocol):
    """The interface of an input that joining needs: batches of rows in order, each with the index of its first row."""

    @property
    def schema(self) -> pa.Schema: ...

    def batches(self, start_row: int = 0, batch_rows: int = 1024) -> Iterator[tuple[int, pa.RecordBatch]]: ...


def output_prefix(input_schema: pa.Schema, columns: Columns, prefix: str = "") -> str:
    """The prefix of the output columns' names.

    Args:
        input_schema: The input's columns that are kept.
        columns: The output columns.
        prefix: The prefix that the user chose. Where it is empty and the input already has one of the names, the result
            is `gen_`, or the first of `gen2_`, `gen3_` and so on for which all names differ.

    Raises:
        InputError: The input already has a name with the prefix that the user chose.
    """
    names, there = list(columns.types()), set(input_schema.names)
    taken = [prefix + name for name in names if prefix + name in there]
    if not taken:
        return prefix
    candidates = itertools.chain(["gen_"], (f"gen{i}_" for i in itertools.count(2)))
    free = next(p for p in candidates if not any(p + name in there for name in names))
    if not prefix:
        return free
    named = f"columns named {', '.join(taken)}" if len(taken) > 1 else f"a column named {taken[0]}"
    raise InputError(f"the input has {named} already: give --output-prefix {free}, or leave it out")


def output_schema(input_schema: pa.Schema, columns: Columns = ONE_SAMPLE, prefix: str = "") -> pa.Schema:
    """The schema of the final file: the input's columns, then the output columns with their prefix.

    Args:
        input_schema: The input's columns that are kept.
        columns: The output columns.
        prefix: The prefix of the output columns' names.

    Raises:
        InputError: The input already has a column with an output column's name.
    """
    prefix = output_prefix(input_schema, columns, prefix)
    fields = [pa.field(prefix + name, kind) for name, kind in columns.types().items()]
    return pa.schema([*input_schema, *fields], metadata=input_schema.metadata)


def join(
    dataset: Dataset,
    parts_dir: Path,
    file: BinaryIO,
    suffix: str,
    *,
    columns: Columns,
    prefix: str,
    note: str,
) -> tuple[dict[str, int], ResultCounts]:
    """Write the final file in one of FORMATS and return its counts of rows and tokens, and those of its results.

    Memory holds a few row groups, whatever the number of rows.

    Args:
        dataset: The input.
        parts_dir: The directory of the part files.
        file: The file to write, open in binary mode.
        suffix: The extension of the format, such as ".parquet".
        columns: The output columns.
        prefix: The prefix of the output columns' names.
        note: Text that a Parquet file's metadata gets under the key "batchgen".

    Raises:
        BatchgenError: Results are missing.
        OSError: The file cannot be written.
    """
    schema = output_schema(dataset.schema, columns, prefix)
    totals, counter = _no_totals(), ResultCounter()

    def batches() -> Iterator[pa.RecordBatch]:
        for rows, results in _with_results(dataset, parts_dir, columns.results_per_row):
            _count(totals, results, columns.results_per_row)
            counter.add(results, columns.answers(rows, results))
            yield pa.RecordBatch.from_arrays([*rows.columns, *columns.arrays(rows, results)], schema=schema)

    metadata = {**(schema.metadata or {}), b"batchgen": note.encode()}
    FORMATS[suffix](file, schema.with_metadata(metadata), batches())
    return totals, counter.counts()


def join_formatted(
    dataset: Dataset, parts_dir: Path, output: BinaryIO, errors: BinaryIO, columns: Columns, format_row: FormatRow
) -> tuple[dict[str, int], ResultCounts]:
    """Write a file of JSON lines for successful rows and one for failed rows; gives the counts that `join` gives.

    Args:
        dataset: The input.
        parts_dir: The directory of the part files.
        output: The file for successful rows.
        errors: The file for failed rows.
        columns: The output columns that the job would have in another format.
        format_row: The function that makes a row's JSON value from the input row and its result. The result has the
            fields of RowResult; its lists have one entry per sample.
    """
    totals, counter = _no_totals(), ResultCounter()
    files = {"output": output, "errors": errors}
    for rows, results in _with_results(dataset, parts_dir):
        _count(totals, results)
        counter.add(results, columns.answers(rows, results))
        for row, result in zip(rows.to_pylist(), results.to_pylist(), strict=True):
            target, line = format_row(row, result)
            files[target].write(json_line(line))
    return totals, counter.counts()


def _with_results(
    dataset: Dataset, parts_dir: Path, per_row: int = 1
) -> Iterator[tuple[pa.RecordBatch, pa.RecordBatch]]:
    """Yield each batch of input rows together with the batch of the same rows' results.

    Args:
        dataset: The input.
        parts_dir: The directory of the part files.
        per_row: Number of results of each row.
    """
    index = PartIndex(parts_dir)
    with contextlib.ExitStack() as stack:
        read = index.read
        if is_worth_regrouping(index):
            with contextlib.suppress(OSError):  # no space: every window is read from the parts, which takes longer
                regrouped = RegroupedResults(index, parts_dir)
                stack.callback(regrouped.close)
                read = regrouped.read
        yield from _in_windows(dataset, read, index.window_rows, per_row)


def _in_windows(
    dataset: Dataset, read: Callable[[int, int], pa.RecordBatch], most_results: int, per_row: int
) -> Iterator[tuple[pa.RecordBatch, pa.RecordBatch]]:
    """Yield each batch of input rows together with its results.

    Args:
        dataset: The input.
        read: Function that reads consecutive results (number of the first one, number of results).
        most_results: The number of results from which on no further batch is read at once.
        per_row: Number of results of each row.
    """
    window: list[pa.RecordBatch] = []
    window_first = window_rows = window_bytes = 0

    def read_window() -> Iterator[tuple[pa.RecordBatch, pa.RecordBatch]]:
        results = read(window_first * per_row, window_rows * per_row)
        offset = 0
        for batch in window:
            yield batch, results.slice(offset, batch.num_rows * per_row)
            offset += batch.num_rows * per_row

    for first_row, batch in dataset.batches():
        if batch.num_rows == 0:
            continue
        full = window_rows * per_row >= most_results or window_bytes >= _WINDOW_INPUT_BYTES
        if window and (full or first_row != window_first + window_rows):
            yield from read_window()
            window, window_rows, window_bytes = [], 0, 0
        if not window:
            window_first = first_row
        window.append(batch)
        window_rows += batch.num_rows
        window_bytes += batch.nbytes
    if window:
        yield from read_window()


def _no_totals() -> dict[str, int]:
    return dict.fromkeys(("rows", "rows_ok", "rows_failed", "prompt_tokens", "generated_tokens"), 0)


def _count(totals: dict[str, int], results: pa.RecordBatch, per_row: int = 1) -> None:
    """Add the rows and tokens of some results to totals. per_row: number of results of each row."""
    rows = results.num_rows // per_row
    last = results.column("error").take(pa.array(range(per_row - 1, results.num_rows, per_row), pa.int64()))
    failed = rows - last.null_count
    totals["rows"] += rows
    totals["rows_ok"] += rows - failed
    totals["rows_failed"] += failed
    totals["prompt_tokens"] += pc.sum(results.column("prompt_tokens")).as_py() or 0
    if "generated_tokens" in results.schema.names:
        totals["generated_tokens"] += pc.sum(results.column("generated_tokens").flatten()).as_py() or 0
