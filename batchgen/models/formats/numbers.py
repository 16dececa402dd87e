"""Tensors of safetensors files that are stored as plain numbers of 16, 32 or 64 bits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from batchgen.models.formats.base import StoredPart
from batchgen.models.shard import Cut
from batchgen.models.tensor_files import reading
from batchgen.models.tensor_files.headers import TensorInfo
from batchgen.models.tensor_files.reading import NUMBERS, read_numbers
from batchgen.models.tensor_files.table_rows import FileRows, unpack_numbers


@dataclass(frozen=True)
class Numbers(StoredPart):
    """A part that is stored as plain numbers.

    Attributes:
        name: Name of the tensor in the file.
        info: Place of the tensor in the file.
        added: Number to be added to each stored value. Gemma's norms store w of (1 + w) x / rms(x).
    """

    name: str
    info: TensorInfo
    added: float = 0

    def fill(self, out: Tensor) -> None:
        if not self.added:
            return read_numbers(self.name, self.info, out)
        read_numbers(self.name, self.info, values := torch.empty(out.shape))
        out.copy_(values.add_(self.added))

    def fill_cut(self, out: Tensor, cut: Cut) -> bool:
        whole_rows = cut.is_stretch or (cut.by_columns and cut.column_sections == 1)
        if self.added or not whole_rows:
            return False
        if cut.by_columns:
            self._fill_columns(out, cut.rank * out.shape[1])
        else:
            read_numbers(self.name, self.info, out, first=cut.rank * out.numel())
        return True

    def table_rows(self) -> FileRows:
        return FileRows(self.name, self.info, unpack_numbers(self.info.dtype))

    def _fill_columns(self, out: Tensor, first: int) -> None:
        """Fill `out` with columns of a matrix, from column `first` on. Whole rows are read, some at a time."""
        rows, columns = self.info.shape
        step = max(1, reading.CHUNK_VALUES // columns)
        for start in range(0, rows, step):
            count = min(step, rows - start)
            values = torch.empty(count, columns, dtype=NUMBERS[self.info.dtype])
            read_numbers(self.name, self.info, values, start * columns)
            out[start : start + count].copy_(values[:, first : first + out.shape[1]])


class Zeros(StoredPart):
    """A bias that a model's files leave out, since it is zero."""

    def fill(self, out: Tensor) -> None:
        out.zero_()

    def fill_cut(self, out: Tensor, cut: Cut) -> bool:
        out.zero_()
        return True
