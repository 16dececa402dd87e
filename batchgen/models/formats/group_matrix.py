"""A stored matrix of 4-bit weights in groups of columns, read as numbers or as block-quantized rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from batchgen.core.dtypes import GROUP_FORMATS, weight_row_bytes
from batchgen.core.errors import InputError
from batchgen.models.formats.base import NamedTensor, StoredPart
from batchgen.models.formats.blocks import block_columns, fitting_blocks
from batchgen.models.tensor_files import reading
from batchgen.models.tensor_files.reading import check_stored, read_numbers, read_rows
from batchgen.ops import cpp as kernels

_SYMMETRIC_ZERO = 8
_SCALES = ("F16", "BF16", "F32")


class GroupLayout(Protocol):
    """The layout of quantized values, zero points and scales in a file. `groups.GroupScheme` describes the members."""

    @property
    def group_size(self) -> int | None: ...
    @property
    def scales_by_row(self) -> bool: ...
    def shapes(self, rows: int, columns: int, groups: int) -> tuple[tuple[int, ...], tuple[int, ...]]: ...
    def read_quants(self, quants: NamedTensor) -> Callable[[int, int], Tensor]: ...
    def zero_points(self, words: Tensor) -> Tensor: ...
    def check_rows(self, quants: NamedTensor, rows: int) -> None: ...


@dataclass(frozen=True)
class GroupMatrix(StoredPart):
    """A stored matrix [rows, columns] of 4-bit weights in groups of columns.

    Attributes:
        scheme: Layout of the tensors.
        shape: Rows and columns.
        quants: Name and place of the quantized values.
        scales: Name and place of the scales.
        zeros: Name and place of the zero points; None: all zero points are 8.
        group_of: Name and place of the number of each column's group; None: groups have consecutive columns.
    """

    scheme: GroupLayout
    shape: tuple[int, int]
    quants: NamedTensor
    scales: NamedTensor
    zeros: NamedTensor | None
    group_of: NamedTensor | None

    @property
    def group_size(self) -> int:
        """Number of columns of a group."""
        return self.scheme.group_size or self.shape[1]

    @property
    def num_groups(self) -> int:
        """Number of groups of a row; the last group may be shorter."""
        return -(-self.shape[1] // self.group_size)

    def check(self) -> None:
        """Raise InputError if a tensor has another shape or dtype than the scheme requires."""
        (rows, n), groups = self.shape, self.num_groups
        self.scheme.check_rows(self.quants, rows)
        quants, zeros = self.scheme.shapes(rows, n, groups)
        check_stored(*self.quants, quants, ("I32",))
        scales = (rows, groups) if self.scheme.scales_by_row else (groups, rows)
        if self.scales[1].shape != scales:
            (name, info), size = self.scales, self.scheme.group_size or "all"
            raise InputError(
                f"tensor {name} in {info.path} is {list(info.shape)}; groups of {size} columns, as config.json has "
                "them, "
                f"ask for {list(scales)}"
            )
        check_stored(*self.scales, scales, _SCALES)
        if self.zeros:
            check_stored(*self.zeros, zeros, ("I32",))
        if self.group_of:
            check_stored(*self.group_of, (n,), ("I32", "I64"))

    def fill(self, out: Tensor) -> None:
        """Fill a tensor with the matrix: with block-quantized rows if `out` is uint8, otherwise with numbers.

        Raises:
            InputError: A scale is NaN or infinite, a column has no group, or groups do not fit the block format.
        """
        scales, zeros, group_of = self._scales(), self._zeros(), self._group_of()
        packing, n = out.dtype == torch.uint8, self.shape[1]
        if packing and not self._in_order(group_of):
            name, info = self.group_of or self.quants
            raise InputError(f"tensor {name} in {info.path} has columns out of order: give --weights dequantized")
        block_format = self._block_format(group_of)
        for some, quants in self._pieces():
            if packing:
                _to_blocks(quants, scales[some], zeros[some], out[some])
            elif block_format:  # the kernels' threads are faster
                blocks = torch.empty(len(quants), weight_row_bytes(n, block_format), dtype=torch.uint8)
                _to_blocks(quants, scales[some], zeros[some], blocks)
                kernels.unpack_blocks(block_format.upper(), blocks, out[some])
            else:
                values = quants.float().sub_(zeros[some].float()[:, group_of])
                out[some] = values.mul_(scales[some][:, group_of])

    def _in_order(self, group_of: Tensor) -> bool:
        return bool(torch.equal(group_of, torch.arange(self.shape[1]) // self.group_size))

    def _block_format(self, group_of: Tensor) -> str | None:
        """The block format that can store this matrix without loss; None: no format can."""
        n = self.shape[1]
        if self.scales[1].dtype == "F32" or n % self.group_size or not self._in_order(group_of):
            return None
        return next(iter(fitting_blocks(GROUP_FORMATS, n, self.group_size)), None)

    def _pieces(self) -> Iterator[tuple[slice, Tensor]]:
        """Consecutive ranges of rows, each with its quantized values, uint8 [rows, columns]."""
        rows, n = self.shape
        step = max(8, reading.CHUNK_VALUES // n // 8 * 8)
        read = self.scheme.read_quants(self.quants)
        for start in range(0, rows, step):
            stop = min(rows, start + step)
            yield slice(start, stop), read(start, stop)[:, :n].contiguous()

    def _scales(self) -> Tensor:
        """The scales of the matrix, fp32 [rows, groups]."""
        name, info = self.scales
        scales = torch.empty(info.shape)
        read_numbers(name, info, scales)
        if not bool(scales.isfinite().all()):
            raise InputError(f"tensor {name} in {info.path} has scales that are no numbers: fetch the model again")
        return scales if self.scheme.scales_by_row else scales.t().contiguous()

    def _zeros(self) -> Tensor:
        """The zero points of the matrix, uint8 [rows, groups]."""
        rows = self.shape[0]
        if self.zeros is None:
            return torch.full((rows, self.num_groups), _SYMMETRIC_ZERO, dtype=torch.uint8)
        name, info = self.zeros
        return self.scheme.zero_points(read_rows(name, info, 0, info.shape[0]))[:, :rows].t().contiguous()

    def _group_of(self) -> Tensor:
        """The number of each column's group, int64 [columns]."""
        n = self.shape[1]
        if self.group_of is None:
            return torch.arange(n) // self.group_size
        name, info = self.group_of
        groups = read_rows(name, info, 0, n).long()
        if bool(((groups < 0) | (groups >= self.num_groups)).any()):
            raise InputError(
                f"tensor {name} in {info.path} has columns in groups that are not there: fetch the model again"
            )
        return groups


def nibbles(words: Tensor) -> Tensor:
    """The nibbles of words, int32 [a, b], the lowest nibble of each word first: uint8 [a, 8 b]."""
    pairs = words.contiguous().view(torch.uint8)
    return torch.stack((pairs & 15, pairs >> 4), dim=-1).view(len(words), -1)


def _to_blocks(quants: Tensor, scales: Tensor, zeros: Tensor, out: Tensor) -> None:
    """Write rows of quantized values as block-quantized rows.

    Args:
        quants: Quantized values, uint8 [rows, n].
        scales: Scales, fp32 [rows, groups].
        zeros: Zero points, uint8 [rows, groups].
        out: Tensor to fill, uint8 [rows, bytes of a row]. The number of bytes determines the block format.
    """
    rows, n = quants.shape
    size = block_columns(GROUP_FORMATS, n, out.shape[1])
    blocks = out.view(rows, n // size, 4 + size // 2)
    heads = (scales.contiguous().view(torch.int32) & ~255) | zeros.int()
    blocks_per_scale = n // size // scales.shape[1]
    heads = heads.repeat_interleave(blocks_per_scale, dim=1).contiguous()
    blocks[..., :4] = heads.view(torch.uint8).view(rows, n // size, 4)
    halves = quants.reshape(rows, n // 32, 2, 16)
    blocks[..., 4:] = (halves[:, :, 0] | halves[:, :, 1] << 4).view(rows, n // size, size // 2)
