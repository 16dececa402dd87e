"""MXFP4 (OCP Microscaling Formats, 2023), as gpt-oss has its experts.

A matrix [out, in] of each expert is `_blocks` [experts, out, in / 32, 16], of 32 values each, two to a byte, the first
in the low four bits; and `_scales` [experts, out, in / 32], powers of two, 127 larger. `fused_experts.py` says which
rows are whose.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from batchgen.core.dtypes import MXFP4_EXPERTS
from batchgen.models.formats.base import NamedTensor, Scheme, StoredPart, Tensors
from batchgen.models.formats.stated import Stated

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 32  # values that have one scale


@dataclass(frozen=True)
class Mxfp4(Scheme):
    """MXFP4 for experts. All other matrices are stored as plain numbers."""

    @classmethod
    def read(cls, config: Stated) -> Mxfp4:
        """The scheme that a `quantization_config` describes."""
        return cls()

    def describe(self) -> str:
        return "experts in MXFP4"

    def supports(self, family: str) -> bool:
        return family == "gpt_oss"

    def packed_format(self, tensors: Tensors, columns: Collection[int]) -> str | None:
        experts = [name for name in tensors if ".experts." in name and "_proj" in name and not name.endswith("_bias")]
        return MXFP4_EXPERTS if all(name.endswith(("_blocks", "_scales")) for name in experts) else None

    def find(self, tensors: Tensors, stem: str, shape: tuple[int, int], *, in_layer: bool) -> StoredPart | None:
        return None


def read_blocks(blocks: NamedTensor, scales: NamedTensor, first: int, count: int, columns: int) -> Tensor:
    """Read rows of MXFP4, in the order of bytes of a GGUF's blocks.

    In a GGUF a scale precedes its 32 values, and values 0 to 15 are in the low halves of the bytes. In the checkpoint,
    values 2 i and 2 i + 1 share a byte.

    Args:
        blocks: Name and place of the values.
        scales: Name and place of the scales.
        first: First row to read, counted over all experts.
        count: Number of rows to read.
        columns: Number of values in a row.

    Returns:
        Rows, uint8 [count, bytes of a row].
    """
    import torch

    from batchgen.models.tensor_files.reading import read_into

    per_row = columns // BLOCK
    pairs = torch.empty(count * per_row, BLOCK // 2, dtype=torch.uint8)
    powers = torch.empty(count * per_row, 1, dtype=torch.uint8)
    read_into(*blocks, first * per_row * BLOCK // 2, memoryview(pairs.view(-1).numpy()))
    read_into(*scales, first * per_row, memoryview(powers.view(-1).numpy()))
    quants = torch.stack((pairs & 15, pairs >> 4), dim=-1).view(-1, 2, BLOCK // 2)
    return torch.cat([powers, quants[:, 0] | quants[:, 1] << 4], dim=1).view(count, -1)
