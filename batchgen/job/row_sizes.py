"""The sizes of an input's rows, read without making prompts of them, by which a job knows where its long rows are.

A tokenized sample says how many tokens a row of a size has.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

Array = np.ndarray[Any, Any]

_MOST_ROWS = 1_000_000
SCAN_ROWS = 8192  # of a batch that is scanned
_PATIENCE_S = 5.0  # with an input whose next rows do not come
_SCAN_FRAC, _LEAST_SCAN_S, _MOST_SCAN_S = 0.01, 0.05, 2.0  # CPU seconds of reading, as part of the job's


class _Tokens(NamedTuple):
    """The prompt tokens of all rows, those of neighbouring rows that run in any order together.

    Attributes:
        sums: Tokens of all rows before each stretch of neighbours, and of all rows, [stretches + 1].
        stretch_rows: Rows of each stretch but the last one.
        rows: Number of rows.
    """

    sums: Array
    stretch_rows: int
    rows: int

    @classmethod
    def of(cls, tokens: Array, stretch_rows: int) -> _Tokens:
        """Add up the tokens of each row, [rows], in their place."""
        sums, rows = np.cumsum(tokens, out=tokens), len(tokens)
        rest = sums[-1:] if rows % stretch_rows else sums[:0]
        return cls(np.concatenate([[0.0], sums[stretch_rows - 1 :: stretch_rows], rest]), stretch_rows, rows)

    def before(self, places: Array) -> Array:
        """Tokens before each of some places, [n]. places: numbers of rows before them, 0 to `rows`."""
        stretches = np.minimum(places // self.stretch_rows, len(self.sums) - 2).astype(int)
        first = stretches * self.stretch_rows
        parts = (places - first) / np.minimum(self.stretch_rows, self.rows - first)
        sums: Array = self.sums[stretches] + parts * (self.sums[stretches + 1] - self.sums[stretches])
        return sums


class RowSizes:
    """Bytes of each row in the columns that prompts are made of, and the tokens that they stand for."""

    def __init__(self, sample: Sequence[tuple[int, int]] = ()) -> None:
        """Know no sizes yet.

        Args:
            sample: (number of the row, tokens of its prompt) of some rows.
        """
        self._sample = sample
        self._tokens: _Tokens | None = None
        self._mixed_rows = 1
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def sampled(self, sample: Sequence[tuple[int, int]]) -> None:
        """Take a sample before sizes are read. sample: (number of the row, tokens of its prompt) of some rows."""
        self._sample = sample

    def mixed(self, rows: int) -> None:
        """Expect so many neighbouring rows to be run in any order, from before sizes are read."""
        self._mixed_rows = rows

    def stop(self) -> None:
        """Read no further, and end the thread: one that is inside Arrow while Python ends would abort the process."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(timeout=_PATIENCE_S)

    def scan(self, batches: Iterator[tuple[int, pa.RecordBatch]], most_s: float) -> None:
        """Read the sizes of all rows. Nothing is known if that takes too long, or if the input cannot be read.

        Args:
            batches: (number of the first row, rows) of all rows in order.
            most_s: The most CPU seconds of this thread.
        """
        sizes: list[Array] = []
        first, rows, started_s = None, 0, time.thread_time()
        try:
            for number, batch in batches:
                first = number if first is None else first
                sizes.append(row_bytes(batch))
                rows += batch.num_rows
                if self._stopped.is_set() or rows > _MOST_ROWS or time.thread_time() - started_s > most_s:
                    return
        except Exception:  # the job itself will say what is wrong with its input
            return
        if first is not None:
            together = np.concatenate(sizes)
            sizes.clear()  # else each row's size is there twice
            self.know(first, together)

    def scan_in_thread(self, batches: Iterator[tuple[int, pa.RecordBatch]], job_s: float) -> None:
        """Read the sizes of all rows in a thread of its own, for a small part of the job's time.

        Args:
            batches: (number of the first row, rows) of all rows in order.
            job_s: Predicted seconds of the job.
        """
        most_s = min(_MOST_SCAN_S, max(_LEAST_SCAN_S, _SCAN_FRAC * job_s))
        self._thread = threading.Thread(target=self.scan, args=(batches, most_s), name="batchgen-sizes", daemon=True)
        self._thread.start()

    def know(self, first: int, sizes: Array) -> None:
        """Take the sizes of all rows.

        Args:
            first: Number of the first row.
            sizes: Bytes of each row.
        """
        rows = np.array([row - first for row, _ in self._sample if 0 <= row - first < len(sizes)], int)
        tokens = np.array([count for row, count in self._sample if 0 <= row - first < len(sizes)], float)
        if not len(rows):
            return
        x = sizes[rows].astype(float)
        spread = float(((x - x.mean()) ** 2).sum())
        slope = float(((x - x.mean()) * (tokens - tokens.mean())).sum() / spread) if spread else 0.0
        slope = min(max(slope, 0.0), 1.0)  # a token has at least one byte
        fitted = sizes * slope
        fitted += tokens.mean() - slope * x.mean()
        np.maximum(1.0, fitted, out=fitted)
        fitted[rows] = tokens
        self._tokens = _Tokens.of(fitted, self._mixed_rows)

    def prompt_tokens(self, first_row: float, count: int) -> Array | None:
        """Prompt tokens of the rows from one on, divided into equal stretches; None: not known.

        Args:
            first_row: Number of rows before these.
            count: Number of stretches.

        Returns:
            Mean tokens of a row in each stretch, [count].
        """
        known = self._tokens
        if known is None:
            return None
        first = min(int(first_row), known.rows - 1)
        means: Array = np.diff(known.before(np.linspace(first, known.rows, count + 1))) * count / (known.rows - first)
        return means


def row_bytes(batch: pa.RecordBatch) -> Array:
    """Bytes of text, or values of numbers, in each row of a batch, [rows]."""
    return sum((_bytes(column) for column in batch.columns), np.zeros(batch.num_rows))


def _bytes(array: pa.Array) -> Array:
    kind = array.type
    if pa.types.is_dictionary(kind):
        return _bytes(array.dictionary_decode())
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_binary(kind):
        return np.asarray(pc.fill_null(pc.binary_length(array), 0).to_numpy(zero_copy_only=False), float)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False)
        sums = np.concatenate([[0.0], np.cumsum(_bytes(array.flatten()))])
        ends = np.cumsum(lengths)
        return np.asarray(sums[ends] - sums[ends - lengths], float)
    if pa.types.is_struct(kind):
        return sum((_bytes(part) for part in array.flatten()), np.zeros(len(array)))
    return np.ones(len(array))
