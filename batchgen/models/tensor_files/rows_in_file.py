"""Block-quantized rows that are still in a file: a matrix that is packed while it is read (`block_packer.py`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from batchgen.models.tensor_files.headers import TensorInfo


@dataclass(frozen=True)
class FilePart:
    """A tensor of a file, whose rows are some of a matrix.

    Attributes:
        name: Name of the tensor.
        info: Its place.
        rows: Number of its rows.
        head_order: Place in the file of each row of a head, where rows are in another order within each head, as
            llama.cpp's converter has q and k; None: they are in order.
    """

    name: str
    info: TensorInfo
    rows: int
    head_order: tuple[int, ...] | None = None

    @property
    def head_dim(self) -> int:
        """Rows that have to be read together."""
        return len(self.head_order) if self.head_order else 1

    def rows_read(self, start: int, stop: int) -> tuple[int, int]:
        """The rows of the file that have rows [start, stop): whole heads, where they are in another order."""
        unit = self.head_dim
        return start // unit * unit, -(-stop // unit) * unit

    def order(self, start: int, stop: int) -> np.ndarray | None:
        """The place of each of rows [start, stop) among `rows_read`; None: as they lie."""
        if self.head_order is None:
            return None
        heads, place = np.divmod(np.arange(start, stop), self.head_dim)
        places: np.ndarray = heads * self.head_dim + np.array(self.head_order)[place]
        return places - self.rows_read(start, stop)[0]


@dataclass(frozen=True)
class RowsInFile:
    """Rows of bytes, part after part: the `BlockWeight.data` of a matrix that is not read yet."""

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
        """`count` matrices with the same number of whole parts each, as experts are."""
        size = len(self.parts) // count
        assert size * count == len(self.parts)
        return [RowsInFile(self.parts[i * size : (i + 1) * size], self.row_bytes) for i in range(count)]

    def stretches(self, start: int, stop: int) -> Iterator[tuple[FilePart, int, int]]:
        """Rows [start, stop) as rows of parts, in order."""
        begin = 0
        for part in self.parts:
            first, last = max(start, begin), min(stop, begin + part.rows)
            if first < last:
                yield part, first - begin, last - begin
            begin += part.rows
