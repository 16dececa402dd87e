"""Weights of 4 bits in groups of columns: what GPTQ, AWQ and compressed-tensors (pack-quantized) have in common.

All three are the same numbers, (quantized value - zero point) * scale, with quantized values and zero points from 0 to
15 and a scale for each row and group. They differ in where these lie, which a subclass of `GroupScheme` says. Words are
little-endian, nibble i of a word are its bits 4 i to 4 i + 3. `g_idx` [columns] says which group each column is of,
where that is not the order of columns (act-order).

In memory and in weight stores they are block-quantized rows (`core.dtypes.GROUP_FORMATS`, csrc/quant/int4_groups.h),
without loss: of each group four bytes, the first of which is the zero point and the others are the upper ones of the
scale in fp32, which holds those of 16 bits; then its quantized values, for each 32 of them 16 bytes, the first half in
the low nibbles.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from batchgen.core.dtypes import GROUP_FORMATS
from batchgen.core.errors import InputError
from batchgen.models.formats.base import NamedTensor, Scheme, StoredPart, Tensors
from batchgen.models.formats.blocks import has_plain_matrices, is_of_layer_matrix, largest_blocks

if TYPE_CHECKING:
    from torch import Tensor

    from batchgen.models.layouts import Shape

# Gives the quantized values of rows [start, stop), uint8 [stop - start, columns, and up to 7 more].
ReadQuants = Callable[[int, int], "Tensor"]


@dataclass(frozen=True)
class GroupScheme(Scheme):
    """A scheme with 4 bits a weight and a scale for each group of columns of a row.

    Attributes:
        group_size: Columns that have one scale; None: all of a row.
        symmetric: Whether all zero points are 8, and the files have none.
        act_order: Whether a group may be of any columns.
        label: Name of the format for people.
        names: Suffixes of a matrix's quantized values, zero points, scales and groups of columns.
        scales_by_row: Whether scales are [rows, groups] in the file, and not [groups, rows].
    """

    group_size: int | None
    symmetric: bool = False
    act_order: bool = False
    label: ClassVar[str]
    names: ClassVar[tuple[str, str, str, str]] = ("qweight", "qzeros", "scales", "g_idx")
    scales_by_row: ClassVar[bool] = False

    @abstractmethod
    def shapes(self, rows: int, columns: int, groups: int) -> tuple[Shape, Shape]:
        """Shapes of a matrix's quantized values and zero points in the file, in words of 32 bits."""

    @abstractmethod
    def read_quants(self, quants: NamedTensor) -> ReadQuants:
        """A function of (start, stop) that gives these rows of a matrix's 4-bit values, one value a byte.

        Its result is uint8 [stop - start, columns, and up to 7 more].

        Args:
            quants: The tensor in the file that has the values, with its name.
        """

    @abstractmethod
    def zero_points(self, words: Tensor) -> Tensor:
        """Zero points, uint8 [groups, rows, and up to 7 more], from their words in the file."""

    def check_rows(self, quants: NamedTensor, rows: int) -> None:
        """Raise InputError where a matrix cannot have so many rows."""

    def describe(self) -> str:
        size = f"groups of {self.group_size}" if self.group_size else "a scale for each row"
        return f"{self.label}, {size}{', act-order' if self.act_order else ''}"

    def packed_format(self, tensors: Tensors, columns: Collection[int]) -> str | None:
        shorter_last_group = any(n % (self.group_size or n) for n in columns)
        if self.act_order or shorter_last_group or has_plain_matrices(tensors) or _has_wide_scales(tensors):
            return None
        return largest_blocks(GROUP_FORMATS, columns, self.group_size)

    def find(self, tensors: Tensors, stem: str, shape: tuple[int, int], *, in_layer: bool) -> StoredPart | None:
        quants, zeros, scales, group_of = (f"{stem}.{name}" for name in self.names)
        if quants not in tensors:
            return None
        order = (group_of,) if self.act_order and self.group_size else ()
        for name in (scales, *order) if self.symmetric else (scales, zeros, *order):
            if name not in tensors:
                raise InputError(f"{tensors[quants].path} has no tensor {name} beside {quants}: fetch the model again")
        from batchgen.models.formats.group_matrix import GroupMatrix

        matrix = GroupMatrix(
            self,
            shape,
            (quants, tensors[quants]),
            (scales, tensors[scales]),
            None if self.symmetric else (zeros, tensors[zeros]),
            (group_of, tensors[group_of]) if group_of in tensors else None,
        )
        matrix.check()
        return matrix


def _has_wide_scales(tensors: Tensors) -> bool:
    """True where a matrix of a layer has scales in fp32, of which a block holds 24 bits."""
    return any(
        name.endswith((".scales", ".weight_scale")) and info.dtype in ("F32", "F64")
        for name, info in tensors.items()
        if is_of_layer_matrix(name, len(info.shape))
    )
