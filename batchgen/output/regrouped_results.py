"""The results of part files in groups of neighbouring rows, for an output in the order of the input.

Where rows were not run in the order of the input, every part file has rows from everywhere, and reading neighbours
means to decode all of them. The results are then written once more, to a file without a name, each sorted run of them
cut at the same row indices.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import pyarrow as pa

from batchgen.output.parts import PartIndex, newest_in_order, newest_of_all

_RUN_BYTES = 64 << 20  # of results that are sorted in memory at once
_WORTH_IT = 4.0  # times that reading windows decodes each result, from which on they are regrouped
_KEPT = 2  # spans in memory: a window may begin in one and end in the next


class _Piece(NamedTuple):
    """A place in the file."""

    offset: int
    size: int


class RegroupedResults:
    """The results of all rows in an unnamed file, in spans of rows that are read at once."""

    def __init__(self, index: PartIndex, folder: Path, run_bytes: int = _RUN_BYTES) -> None:
        """Write the results.

        Args:
            index: Index of the part files.
            folder: Folder for the file, which takes about as much space as the part files.
            run_bytes: Bytes of results that are sorted in memory at once.

        Raises:
            BatchgenError: A part file is damaged.
            OSError: The disk has no space.
        """
        self._span_rows = index.window_rows
        self._pieces: dict[int, list[_Piece]] = {}  # by the number of the span
        self._spans: dict[int, pa.RecordBatch] = {}
        self._file: BinaryIO = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - closed by `close`
        try:
            for run in _runs(index.tables(), run_bytes):
                self._write(run)
            self._file.flush()
        except BaseException:
            self.close()
            raise

    def read(self, first_row: int, count: int) -> pa.RecordBatch:
        """The newest results of consecutive rows, in order. Raises BatchgenError where a row has none."""
        numbers = range(first_row // self._span_rows, (first_row + count - 1) // self._span_rows + 1)
        pieces = []
        for number in numbers:
            if number not in self._pieces:
                continue
            span = self._span(number)
            low, high = np.searchsorted(span.column("row").to_numpy(), [first_row, first_row + count])
            pieces.append(pa.Table.from_batches([span.slice(low, high - low)]))
        return newest_of_all(pieces, first_row, count)

    def close(self) -> None:
        """Remove the file."""
        self._file.close()

    def _span(self, number: int) -> pa.RecordBatch:
        """The results of a span, of which the last ones that were read stay in memory."""
        if number not in self._spans:
            tables = []
            for piece in self._pieces[number]:
                self._file.seek(piece.offset)
                tables.append(pa.ipc.open_stream(self._file.read(piece.size)).read_all())
            while len(self._spans) >= _KEPT:
                del self._spans[next(iter(self._spans))]
            self._spans[number] = newest_in_order(tables)
        return self._spans[number]

    def _write(self, run: pa.RecordBatch) -> None:
        """Write results that are sorted by row."""
        spans = run.column("row").to_numpy() // self._span_rows
        starts = [0, *(np.flatnonzero(np.diff(spans)) + 1).tolist(), len(spans)]
        options = pa.ipc.IpcWriteOptions(compression="zstd")
        for start, stop in itertools.pairwise(starts):
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, run.schema, options=options) as writer:
                writer.write_batch(run.slice(start, stop - start))
            content = sink.getvalue()
            self._pieces.setdefault(int(spans[start]), []).append(_Piece(self._file.tell(), content.size))
            self._file.write(content)


def is_worth_regrouping(index: PartIndex) -> bool:
    """Tell whether reading one window after the other would decode each result several times."""
    return index.times_decoded >= _WORTH_IT


def _runs(tables: Iterator[pa.Table], run_bytes: int) -> Iterator[pa.RecordBatch]:
    """Yield tables that were put together and sorted by row."""
    run: list[pa.Table] = []
    size = 0
    for table in tables:
        if table.num_rows:
            run.append(table)
            size += table.nbytes
        if size >= run_bytes:
            yield newest_in_order(run)
            run, size = [], 0
    if run:
        yield newest_in_order(run)
