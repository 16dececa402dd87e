"""Block-quantized rows in files, which `block_packer.py` prepacks while it reads them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from batchgen.models.tensor_files.headers import TensorInfo


@dataclass(frozen=True)
class FilePart:
    """A tensor of a file whose rows are some of the rows of a matrix.

    Attributes:
        name: Name of the tensor.
        info: Place of the tensor in the file.
        rows: Number of rows of the tensor.
        head_order: For each row of a head, its place in the file's rows of that head. llama.cpp's converter changes the
            order of rows of queries and keys. None: rows are in order.
        in_order_before: Number of rows at the beginning that `head_order` leaves as they are.
        runs: Ranges of the file's rows, each a first row and a number of rows, in the order of the matrix. None: one
            range of all rows.
    """

    name: str
    info: TensorInfo
    rows: int
    head_order: tuple[int, ...] | None = None
    in_order_before: int = 0
    runs: tuple[tuple[int, int], ...] | None = None

    @property
    def is_as_stored(self) -> bool:
        """True if rows are in the order of the file."""
        return self.head_order is None and self.runs is None

    @property
    def head_dim(self) -> int:
        """Number of rows that have to be read together: those of a head if rows are not in order, otherwise one."""
        return len(self.head_order) if self.head_order else 1

    def reads(self, start: int, stop: int) -> Iterator[tuple[int, int, np.ndarray | None]]:
        """The ranges of the file's rows that rows [start, stop) are read from, in order.

        Yields:
            The first row of a range; the row after its last one; for each of the rows that are taken from it, its place
            in the range, or None: all are, in order.
        """
        begin = 0
        for place, count in self.runs or ((0, self.rows),):
            first, last = max(start, begin), min(stop, begin + count)
            if first < last:
                yield from self._within(first, last, place - begin)
            begin += count

    def _within(self, start: int, stop: int, shift: int) -> Iterator[tuple[int, int, np.ndarray | None]]:
        """The ranges of `reads` for rows of one run. `shift` is the distance of the file's rows from the matrix's."""
        in_order = stop if self.head_order is None else min(max(start, self.in_order_before), stop)
        if start < in_order:
            yield start + shift, in_order + shift, None
        if in_order < stop:
            unit = self.head_dim
            first, last = in_order // unit * unit, -(-stop // unit) * unit  # whole heads
            heads, place = np.divmod(np.arange(in_order, stop), unit)
            yield first + shift, last + shift, heads * unit + np.array(self.head_order)[place] - first


@dataclass(frozen=True)
class RowsInFile:
    """The rows of a matrix in one or several tensors of files: the data of a `BlockWeight` before it is read.

    Attributes:
        parts: Tensors with the rows, one after the other.
        row_bytes: Bytes of a row.
    """

    parts: tuple[FilePart, ...]
    row_bytes: int

    def __len__(self) -> int:
        return self.shape[0]

    @cached_property
    def shape(self) -> tuple[int, int]:
        return sum(part.rows for part in self.parts), self.row_bytes

    @property
    def nbytes(self) -> int:
        return self.shape[0] * self.row_bytes

    def chunk(self, count: int) -> list[RowsInFile]:
        """Split the rows into `count` matrices with equal numbers of whole parts, one for each expert."""
        size = len(self.parts) // count
        assert size * count == len(self.parts)
        return [RowsInFile(self.parts[i * size : (i + 1) * size], self.row_bytes) for i in range(count)]

    def stretches(self, start: int, stop: int) -> Iterator[tuple[FilePart, int, int]]:
        """The ranges of rows of tensors that make up rows [start, stop) of the matrix, in order.

        Yields:
            The tensor; its first row; the row after its last one.
        """
        begin = 0
        for part in self.parts:
            first, last = max(start, begin), min(stop, begin + part.rows)
            if first < last:
                yield part, first - begin, last - begin
            begin += part.rows
