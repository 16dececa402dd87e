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
    """

    name: str
    info: TensorInfo
    rows: int
    head_order: tuple[int, ...] | None = None

    @property
    def head_dim(self) -> int:
        """Number of rows that have to be read together: those of a head if rows are not in order, otherwise one."""
        return len(self.head_order) if self.head_order else 1

    def rows_read(self, start: int, stop: int) -> tuple[int, int]:
        """The range of the file's rows that contains rows [start, stop).

        If rows are not in order, the range has whole heads.
        """
        unit = self.head_dim
        return start // unit * unit, -(-stop // unit) * unit

    def order(self, start: int, stop: int) -> np.ndarray | None:
        """For each of rows [start, stop), its place in the range `rows_read`; None: they are in order."""
        if self.head_order is None:
            return None
        heads, place = np.divmod(np.arange(start, stop), self.head_dim)
        places: np.ndarray = heads * self.head_dim + np.array(self.head_order)[place]
        return places - self.rows_read(start, stop)[0]


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
