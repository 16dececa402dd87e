"""Weights of 4 bits in groups of columns: what GPTQ, AWQ and compressed-tensors (pack-quantized) share.

In all three, a weight is (quantized value - zero point) * scale. Quantized values and zero points are 0 to 15. There is
a scale for each row and group. The three differ in the layout of these numbers in a file, which a subclass of
`GroupScheme` describes. Words are little-endian; nibble i of a word is its bits 4 i to 4 i + 3. With act-order, groups
do not have consecutive columns, and `g_idx` [columns] has the number of each column's group.

In memory and in weight stores, the weights are block-quantized rows (`core.dtypes.GROUP_FORMATS`,
csrc/quant/int4_groups.h), without loss. A block has a group. Its first byte is the zero point. The next three bytes are
the upper bytes of the scale in fp32, which hold every 16-bit scale. The quantized values follow: 16 bytes for 32
values, the first 16 values in the low nibbles.
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
    """A scheme with weights of 4 bits, and a scale for each row and group of columns.

    Attributes:
        group_size: Number of columns of a group; None: a group is a whole row.
        symmetric: Whether all zero points are 8, and are not stored.
        act_order: Whether a group may have any columns.
        label: Name of the scheme for messages.
        names: Suffixes of the tensors of a matrix: quantized values, zero points, scales, and groups of columns.
        scales_by_row: Whether scales are stored as [rows, groups]. Otherwise they are [groups, rows].
    """

    group_size: int | None
    symmetric: bool = False
    act_order: bool = False
    label: ClassVar[str]
    names: ClassVar[tuple[str, str, str, str]] = ("qweight", "qzeros", "scales", "g_idx")
    scales_by_row: ClassVar[bool] = False

    @abstractmethod
    def shapes(self, rows: int, columns: int, groups: int) -> tuple[Shape, Shape]:
        """Shapes of a matrix's stored quantized values and zero points, in words of 32 bits."""

    @abstractmethod
    def read_quants(self, quants: NamedTensor) -> ReadQuants:
        """A function that reads quantized values of a matrix.

        Args:
            quants: Name and place of the stored quantized values.

        Returns:
            A function of (start, stop) that returns the quantized values of rows [start, stop), one in each byte: uint8
                [stop - start, columns, and up to 7 more].
        """

    @abstractmethod
    def zero_points(self, words: Tensor) -> Tensor:
        """Zero points, uint8 [groups, rows, and up to 7 more], from the stored words."""

    def check_rows(self, quants: NamedTensor, rows: int) -> None:
        """Raise InputError if a matrix of this scheme cannot have `rows` rows."""

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
    """True if a matrix of a layer has scales in fp32, of which a block can only store 24 bits."""
    return any(
        name.endswith((".scales", ".weight_scale")) and info.dtype in ("F32", "F64")
        for name, info in tensors.items()
        if is_of_layer_matrix(name, len(info.shape))
    )
