"""The experts in the checkpoints of gpt-oss: one tensor for all experts of a layer, with biases.

Matrices are [experts, in, out] as numbers of 16 or 32 bits, or [experts, out, in] as MXFP4 (`mxfp4.py`). Rows of gate
and up alternate.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from batchgen.core.errors import InputError
from batchgen.models.config import ModelConfig
from batchgen.models.formats.base import NamedTensor, StoredPart, Tensors
from batchgen.models.formats.mxfp4 import BLOCK, read_blocks
from batchgen.models.tensor_files import reading
from batchgen.models.tensor_files.reading import read_into
from batchgen.ops import cpp as kernels

_PARTS = ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")
_NUMBERS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def is_fused(part: str) -> bool:
    """True for a part of a layout that has all experts of a layer."""
    return part.removeprefix("experts.") in _PARTS


def find(config: ModelConfig, model: Path, tensors: Tensors, part: str, name: str) -> FusedExperts:
    """The stored part of all experts of a layer, after a check of its shapes and dtypes.

    Args:
        config: Configuration of the model.
        model: Path of the model, for messages.
        tensors: All tensors of the checkpoint.
        part: Name of the part in a layout: "experts.down_proj".
        name: Name of the part in the checkpoint. MXFP4 has two tensors, with "_blocks" and "_scales" appended.

    Raises:
        InputError: A tensor is missing, or has another shape or dtype than the configuration requires.
    """
    suffixes = ("_blocks", "_scales") if f"{name}_blocks" in tensors else ("",)
    sources = tuple((f"{name}{suffix}", tensors[f"{name}{suffix}"]) for suffix in suffixes)
    rows, columns = config.matmul_shapes["up" if "gate_up" in part else "down"]
    experts = FusedExperts(part, rows, columns, sources)
    experts.check(model, config.num_experts)
    return experts


@dataclass(frozen=True)
class FusedExperts(StoredPart):
    """A stored part of all experts of a layer.

    Attributes:
        part: Name of the part in a layout: "experts.gate_up_proj", or a bias.
        rows, columns: Shape of one expert's matrix.
        tensors: Name and place of the numbers; or of blocks and scales of MXFP4.
    """

    part: str
    rows: int
    columns: int
    tensors: tuple[NamedTensor, ...]

    @property
    def is_bias(self) -> bool:
        return self.part.endswith("_bias")

    @property
    def turns(self) -> tuple[int, int]:
        """The number of matrices whose rows alternate in the file (2 for gate and up), and the rows of one of them."""
        return self._turns(self.rows)

    def _turns(self, rows: int) -> tuple[int, int]:
        return (rows // 2, 2) if "gate_up" in self.part else (rows, 1)

    def check(self, model: Path, experts: int) -> None:
        """Raise InputError if tensors do not have the shape and dtype that the configuration requires.

        Args:
            model: Path of the model, for messages.
            experts: Number of experts.
        """
        if self.is_bias:
            shapes: tuple[tuple[int, ...], ...] = ((experts, self.rows),)
        elif len(self.tensors) == 1:
            shapes = ((experts, self.columns, self.rows),)
        elif self.columns % BLOCK:
            raise InputError(
                f"{model} has MXFP4 blocks of {BLOCK} values, which do not divide rows of {self.columns}: its config "
                "is wrong"
            )
        else:
            blocks = (experts, self.rows, self.columns // BLOCK)
            shapes = (*blocks, BLOCK // 2), blocks
        dtypes = ("U8",) if len(self.tensors) > 1 else tuple(_NUMBERS)
        for (name, info), shape in zip(self.tensors, shapes, strict=True):
            reading.check_stored(name, info, shape, dtypes)

    def fill(self, out: Tensor) -> None:
        """Fill a tensor with the rows of all experts, one expert after the other.

        The rows of an expert's gate are before those of its up projection.

        Args:
            out: Tensor [experts * rows, columns], or [experts * rows] for biases. For MXFP4 it may be uint8 [experts *
                rows, bytes of a row], for rows of a GGUF's MXFP4 blocks.
        """
        for e, expert in enumerate(out.split(self.rows)):
            if self.is_bias:
                self._in_turns(expert).copy_(self._numbers(e * self.rows, self.rows).view(self.turns))
            elif len(self.tensors) == 1:
                self._fill_transposed(e * self.rows * self.columns, expert)
            else:
                self._fill_from_blocks(e * self.rows, expert)

    def _in_turns(self, expert: Tensor) -> Tensor:
        """A view of an expert's rows in the order of the file, where rows of gate and up alternate."""
        count, each = self.turns
        return expert.view(each, count, *expert.shape[1:]).transpose(0, 1)

    def _numbers(self, start: int, count: int) -> Tensor:
        """Numbers [start, start + count) of the flattened tensor."""
        name, info = self.tensors[0]
        values = torch.empty(count, dtype=_NUMBERS[info.dtype])
        read_into(name, info, start * values.itemsize, memoryview(values.view(torch.uint8).numpy()))
        return values

    def _fill_transposed(self, start: int, expert: Tensor) -> None:
        rows, columns = expert.shape
        target = self._in_turns(expert)
        step = max(1, reading.CHUNK_VALUES // rows)
        for first in range(0, columns, step):
            count = min(step, columns - first)
            values = self._numbers(start + first * rows, count * rows)
            target[..., first : first + count] = values.view(count, *self.turns).permute(1, 2, 0)

    def _fill_from_blocks(self, start: int, expert: Tensor) -> None:
        target = self._in_turns(expert)
        step = max(2, reading.CHUNK_VALUES // self.columns // 2 * 2)
        for first in range(0, self.rows, step):
            count = min(step, self.rows - first)
            blocks, scales = self.tensors
            values = read_blocks(blocks, scales, start + first, count, self.columns)
            if expert.dtype != torch.uint8:
                numbers = torch.empty(count, self.columns, dtype=expert.dtype)
                values = kernels.unpack_blocks("MXFP4", values, numbers)
            values = values.view(*self._turns(count), -1)
            target[first // target.shape[1] :][: len(values)] = values
