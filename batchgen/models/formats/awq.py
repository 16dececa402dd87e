"""AWQ of 4 bits (Lin et al., 2023), as AutoAWQ's version "gemm" writes it.

| tensor | shape | words |
|---|---|---|
| `qweight` | [columns, rows / 8] | nibbles of word w are rows 0, 2, 4, 6, 1, 3, 5, 7 of the eight from row 8 w on |
| `qzeros` | [groups, rows / 8] | nibbles in the same order |
| `scales` | [groups, rows] | |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from batchgen.core.errors import InputError
from batchgen.models.formats.base import NamedTensor
from batchgen.models.formats.groups import GroupScheme, ReadQuants
from batchgen.models.formats.stated import Stated, flag, group_size, refuse, require_four_bits, whole_number

if TYPE_CHECKING:
    from torch import Tensor

    from batchgen.models.layouts import Shape

_NIBBLES = [0, 4, 1, 5, 2, 6, 3, 7]  # nibbles of a word that rows 0 to 7 of eight are in


@dataclass(frozen=True)
class Awq(GroupScheme):
    """AWQ with 4 bits. Groups have consecutive columns, and every group has a zero point."""

    label = "AWQ of 4 bits"

    @classmethod
    def read(cls, config: Stated) -> Awq:
        """The scheme that a `quantization_config` describes.

        Raises:
            InputError: A value is not supported; the message names it.
        """
        require_four_bits("AWQ", whole_number(config, "bits", "w_bit"))
        stated = config.get("version", "gemm")
        version = stated.lower() if isinstance(stated, str) else repr(stated)
        refuse("AWQ", {"version": version != "gemm" and version})
        flag(config, "zero_point", True)
        return cls(group_size(config, "group_size", "q_group_size"))

    def check_rows(self, quants: NamedTensor, rows: int) -> None:
        name, info = quants
        if rows % 8:
            raise InputError(f"tensor {name} in {info.path} cannot have {rows} rows: words hold eight")

    def shapes(self, rows: int, columns: int, groups: int) -> tuple[Shape, Shape]:
        return (columns, rows // 8), (groups, rows // 8)

    def read_quants(self, quants: NamedTensor) -> ReadQuants:
        from batchgen.models.tensor_files.reading import read_rows

        words = read_rows(*quants, 0, quants[1].shape[0])
        return lambda start, stop: _in_order(words[:, start // 8 : stop // 8]).t()

    def zero_points(self, words: Tensor) -> Tensor:
        return _in_order(words)


def _in_order(words: Tensor) -> Tensor:
    """The nibbles of words, int32 [a, b], in the order of rows: uint8 [a, 8 b]."""
    from batchgen.models.formats.group_matrix import nibbles

    return nibbles(words).view(*words.shape, 8)[..., _NIBBLES].reshape(len(words), -1)
