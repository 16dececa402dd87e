"""Partial completions on disk: one file of the tokens of rows in flight, and the thread that saves it.

The file is replaced in one step every few seconds and when a run ends. It holds no finished row for long, so its size
is bounded by what is in flight. Losing it, or a damaged one, costs tokens and no row.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, MutableMapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from batchgen.core.atomic_file import written_atomically
from batchgen.core.partial import PartialCompletion, PartialSample

logger = logging.getLogger(__name__)

PARTIALS_FILE = "partials.parquet"
Partials = MutableMapping[int, PartialCompletion]  # by row

_ORIGIN = b"batchgen"
_MOST_BYTES = 256 << 20
_REST = 100  # a save that takes a second of processor time is followed by so many seconds without one
_SCHEMA = pa.schema(
    [
        ("row", pa.int64()),
        ("digest", pa.binary(16)),
        ("token_ids", pa.list_(pa.list_(pa.int32()))),
        ("logprobs", pa.list_(pa.list_(pa.float64()))),  # of each sample its matrix, row by row
    ]
)


class DamagedPartials(Exception):
    """A file of partial completions whose content is not valid."""


def write_partials(path: Path, partials: Iterable[PartialCompletion], origin: dict[str, Any]) -> None:
    """Replace a file of partial completions in one step.

    Rows that begin after 256 MiB of tokens and log-probabilities are left out: they start again after a stop.

    Args:
        path: The file.
        partials: Partial completions of different rows.
        origin: JSON values about the job, which `read_partials` compares.

    Raises:
        OSError: The file cannot be written. The old one is still there.
    """
    kept: list[PartialCompletion] = []
    size_bytes = 0
    for partial in sorted(partials, key=lambda partial: partial.row):
        size_bytes += partial.num_bytes
        if size_bytes > _MOST_BYTES:
            break
        kept.append(partial)
    columns = [
        pa.array([partial.row for partial in kept], pa.int64()),
        pa.array([partial.digest for partial in kept], pa.binary(16)),
        _lists([[s.token_ids for s in partial.samples] for partial in kept], pa.int32()),
        _lists([[None if s.logprobs is None else s.logprobs.ravel() for s in p.samples] for p in kept], pa.float64()),
    ]
    schema = _SCHEMA.with_metadata({_ORIGIN: json.dumps(origin, sort_keys=True).encode()})
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, schema, compression="zstd", write_page_checksum=True) as writer:
        writer.write_table(pa.Table.from_arrays(columns, schema=schema))
    with written_atomically(path, contended=True) as file:
        file.write(sink.getvalue())


def read_partials(path: Path, origin: dict[str, Any]) -> dict[int, PartialCompletion]:
    """Read a file of partial completions.

    Args:
        path: The file.
        origin: JSON values about the job. A file that another job has written, or this one with other kernels or
            weights, is of no use.

    Returns:
        Partial completions by row; none where the file is missing, or of no use.

    Raises:
        DamagedPartials: The content is not valid.
        OSError: The file cannot be read.
    """
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            text = (file.schema_arrow.metadata or {}).get(_ORIGIN, b"null")
            if json.loads(text) != json.loads(json.dumps(origin)):
                return {}
            if not file.schema_arrow.equals(_SCHEMA):
                raise ValueError("its columns are others")
            columns = file.read().to_pydict()
        partials = [_partial(*values) for values in zip(*columns.values(), strict=True)]
    except FileNotFoundError:
        return {}
    except (pa.ArrowException, ValueError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise DamagedPartials(f"{path.name}: {' '.join(str(error).split())}") from error
    return {partial.row: partial for partial in partials}


def _lists(values: list[list[Any]], kind: pa.DataType) -> pa.Array:
    """An Arrow array of lists of lists of numbers, from arrays of numpy. None: a null in place of an inner list."""
    arrays = [array for row in values for array in row]
    lengths = [0 if array is None else len(array) for array in arrays]
    flat = np.concatenate([a for a in arrays if a is not None] or [np.zeros(0, kind.to_pandas_dtype())])
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())
    missing = pa.array([array is None for array in arrays], pa.bool_())
    inner = pa.ListArray.from_arrays(offsets, pa.array(flat, kind), mask=missing)
    outer = np.concatenate([[0], np.cumsum([len(row) for row in values])])
    return pa.ListArray.from_arrays(pa.array(outer, pa.int32()), inner)


def _partial(
    row: int, digest: bytes, token_ids: list[list[int]], logprobs: list[list[float] | None]
) -> PartialCompletion:
    """A partial completion from the values of its columns. Raises ValueError."""
    samples = []
    for tokens, numbers in zip(token_ids, logprobs, strict=True):
        matrix = None
        if numbers is not None:
            matrix = np.array(numbers, np.float64).reshape(len(tokens), -1 if tokens else 0)
        samples.append(PartialSample(np.array(tokens, np.int32), matrix))
    return PartialCompletion(row, digest, tuple(samples))


class PartialSaver:
    """A thread that saves the tokens of rows in flight every few seconds, and once more at its end.

    It saves less often where that would take more than a hundredth of a processor's time. A row keeps the tokens that
    were saved last until it is finished and on disk, or has more of them. No method holds a lock, so any thread may
    call `stop` at any moment.
    """

    def __init__(
        self,
        saved: Partials,
        in_flight: Callable[[], Iterable[PartialCompletion]],
        is_left: Callable[[int], bool],
        write: Callable[[Partials], None],
        interval_s: float,
    ) -> None:
        """Start the thread.

        Args:
            saved: Partial completions of earlier runs. Others may add to it.
            in_flight: Function that returns those of rows in flight.
            is_left: Function that says whether a row has still to be finished.
            write: Function that replaces what is on disk; it may raise OSError.
            interval_s: Seconds between two saves.
        """
        self._saved, self._in_flight, self._is_left, self._write = saved, in_flight, is_left, write
        self._interval_s = interval_s
        self._inbox: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._ended = self._has_failed = False
        threading.Thread(target=self._run, name="partial-saver", daemon=True).start()

    def stop(self) -> None:
        """Save once more and end the thread; returns when it has ended."""
        self._inbox.put(None)
        while not self._ended:
            time.sleep(0.002)

    def __enter__(self) -> PartialSaver:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def _run(self) -> None:
        wait_s, stopping = self._interval_s, False
        try:
            while not stopping:
                with contextlib.suppress(queue.Empty):
                    self._inbox.get(timeout=wait_s)
                    stopping = True
                began_s = time.thread_time()
                self._save()
                wait_s = max(self._interval_s, _REST * (time.thread_time() - began_s))
        finally:
            self._ended = True

    def _save(self) -> None:
        for partial in self._in_flight():
            self._saved[partial.row] = partial
        for row in list(self._saved):
            if not self._is_left(row):
                self._saved.pop(row, None)
        try:
            self._write(dict(self._saved))
            self._has_failed = False
        except OSError as error:
            if not self._has_failed:
                logger.warning("tokens of unfinished rows cannot be saved (%s): rows are saved whole", error.strerror)
            self._has_failed = True
