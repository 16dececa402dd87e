"""The experts of gpt-oss as its checkpoints have them: those of a layer in one tensor, with biases.

Matrices are [experts, in, out] in numbers of 16 or 32 bits, or [experts, out, in] in MXFP4 (OCP Microscaling Formats, 2023): "_blocks"
[experts, out, in / 32, 16] of 32 values each, two to a byte, the first in the low four bits, and "_scales" [experts, out, in / 32], powers
of two, 127 larger. Of gate and up, rows come in turns.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from batchgen.core.errors import InputError
from batchgen.models.config import ModelConfig
from batchgen.models.tensor_files.headers import TensorInfo
from batchgen.ops import cpp as kernels

_PARTS = ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")
_NUMBERS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_BLOCK = 32  # values
_CHUNK_VALUES = 1 << 20  # read and converted at a time

# (name and place of a tensor, first byte of it, what to fill)
Read = Callable[[str, TensorInfo, int, memoryview], None]


@dataclass(frozen=True)
class Source:
    """Where a part of a layer comes from: names and places of its tensor, or of its blocks and scales."""

    part: str
    tensors: tuple[tuple[str, TensorInfo], ...]

    @property
    def is_bias(self) -> bool:
        return self.part.endswith("_bias")

    @property
    def in_turns(self) -> bool:
        """Whether rows are those of gate and up in turns."""
        return "gate_up" in self.part


def is_fused(part: str) -> bool:
    """Whether a part of a layout is one of all experts of a layer."""
    return part.removeprefix("experts.") in _PARTS


def check(config: ModelConfig, path: Path, source: Source) -> None:
    """Raise InputError where tensors are not as the configuration has them. path: of the model."""
    rows, columns = _expert_shape(config, source)
    experts = config.num_experts
    if source.is_bias:
        shapes: tuple[tuple[int, ...], ...] = ((experts, rows),)
    elif len(source.tensors) == 1:
        shapes = ((experts, columns, rows),)
    elif columns % _BLOCK:
        raise InputError(
            f"{path} has MXFP4 blocks of {_BLOCK} values, which do not divide rows of {columns}: its config is wrong"
        )
    else:
        shapes = (experts, rows, columns // _BLOCK, _BLOCK // 2), (experts, rows, columns // _BLOCK)
    dtypes = ("U8",) if len(source.tensors) > 1 else tuple(_NUMBERS)
    for (name, info), shape in zip(source.tensors, shapes, strict=True):
        where = f"tensor {name} in {info.path}"
        if info.shape != shape:
            raise InputError(f"{where} is {list(info.shape)}, its config asks for {list(shape)}")
        if info.dtype not in dtypes:
            raise InputError(f"{where} is {info.dtype}; supported: {', '.join(dtypes)}")
        if info.num_bytes != math.prod(shape) * (1 if info.dtype == "U8" else _NUMBERS[info.dtype].itemsize):
            raise InputError(f"{where} has {info.num_bytes:,} bytes, which do not fit its shape")


def fill(config: ModelConfig, source: Source, read: Read, out: Tensor) -> None:
    """Fill `out`, rows of one expert after the other, gate before up: [experts * rows, columns], or [experts * rows] of biases.

    Of MXFP4 `out` may also be rows of a GGUF's blocks, uint8 [experts * rows, bytes of a row].
    """
    rows, columns = _expert_shape(config, source)
    for e, expert in enumerate(out.split(rows)):
        if source.is_bias:
            _in_order(source, expert).copy_(_numbers(source, read, e * rows, rows).view(_turns(source, rows)))
        elif len(source.tensors) == 1:
            _fill_transposed(source, read, e * rows * columns, expert)
        else:
            _fill_from_blocks(source, read, e * rows, expert, columns)


def _expert_shape(config: ModelConfig, source: Source) -> tuple[int, int]:
    """(rows, columns) of an expert's matrix."""
    return config.product_shapes["up" if source.in_turns else "down"]


def _turns(source: Source, rows: int) -> tuple[int, int]:
    """Rows of the file as (turns, rows of one)."""
    return (rows // 2, 2) if source.in_turns else (rows, 1)


def _in_order(source: Source, expert: Tensor) -> Tensor:
    """A view [turns, rows of one, ...] of an expert's rows: where the file's rows go."""
    first, second = _turns(source, len(expert))
    return expert.view(second, first, *expert.shape[1:]).transpose(0, 1)


def _numbers(source: Source, read: Read, start: int, count: int) -> Tensor:
    """So many numbers of the tensor, from one on."""
    name, info = source.tensors[0]
    values = torch.empty(count, dtype=_NUMBERS[info.dtype])
    read(name, info, start * values.itemsize, memoryview(values.view(torch.uint8).numpy()))
    return values


def _fill_transposed(source: Source, read: Read, start: int, expert: Tensor) -> None:
    rows, columns = expert.shape
    target = _in_order(source, expert)
    step = max(1, _CHUNK_VALUES // rows)
    for first in range(0, columns, step):
        count = min(step, columns - first)
        values = _numbers(source, read, start + first * rows, count * rows)
        target[..., first : first + count] = values.view(count, *_turns(source, rows)).permute(1, 2, 0)


def _fill_from_blocks(source: Source, read: Read, start: int, expert: Tensor, columns: int) -> None:
    """Rows from blocks and scales, as numbers or as a GGUF's blocks: these have a scale before its values, and halves, not turns."""
    rows = len(expert)
    (name, blocks), (scale_name, scales) = source.tensors
    per_row = columns // _BLOCK
    target = _in_order(source, expert)
    step = max(2, _CHUNK_VALUES // columns // 2 * 2)
    for first in range(0, rows, step):
        count = min(step, rows - first)
        pairs = torch.empty(count * per_row, _BLOCK // 2, dtype=torch.uint8)
        powers = torch.empty(count * per_row, 1, dtype=torch.uint8)
        read(name, blocks, (start + first) * per_row * _BLOCK // 2, memoryview(pairs.view(-1).numpy()))
        read(scale_name, scales, (start + first) * per_row, memoryview(powers.view(-1).numpy()))
        codes = torch.stack((pairs & 15, pairs >> 4), dim=-1).view(-1, 2, _BLOCK // 2)
        packed = torch.cat([powers, codes[:, 0] | codes[:, 1] << 4], dim=1).view(count, -1)
        if expert.dtype == torch.uint8:
            made = packed
        else:
            made = kernels.unpack_blocks("MXFP4", packed, torch.empty(count, columns, dtype=expert.dtype))
        made = made.view(*_turns(source, count), -1)
        target[first // target.shape[1] :][: len(made)] = made
