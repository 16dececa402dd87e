"""A tile of a matrix product, for weights that are numbers, int8 rows, int4 rows or blocks, and the rules for its size.

`packed.py` has the kernel for one matrix, `grouped.py` that for the matrices of experts. Both compute their tiles here.

- *Numbers* are multiplied as they are.
- *Int8 rows* (`ops/int8.py`) are multiplied as integers with int8 rows of x, and sums are exact. Then each sum is
  multiplied by both rows' scales, in the order of the reference.
- *Int4 rows* (`ops/quant.py`) are read once and unpacked in registers. Each weight is rounded to x's dtype, so the
  product has the numbers of a weight that was dequantized before. Low and high nibbles are two products: a byte has
  values of two columns that lie half a group apart.
- *Blocks* (`blocks.py`) are unpacked in registers in the same way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchgen.core.dtypes import CODE_GROUP, weight_row_bytes
from batchgen.ops import int8, quant
from batchgen.ops.cpp import BlockWeight
from batchgen.ops.triton.blocks import (
    BLOCK_CODINGS,
    BlockCoding,
    block_constants,
    byte_numbers,
    nibble_columns,
    nibble_numbers,
    run_bytes,
)
from batchgen.ops.triton.groups import flat_columns, unpack_flat
from batchgen.ops.triton.launch import Card

WeightKind = Literal["numbers", "int8", "int4"] | BlockCoding
_BLOCK_KINDS = set(BLOCK_CODINGS.values())
# Bytes of a value, without its scale, where it has fewer than x's dtype; of blocks whatever is loaded for it.
_VALUE_BYTES: dict[WeightKind, float] = {
    "int8": 1,
    "int4": 0.5,
    **{kind: 1.0 if kind in ("fp8", "q8_0") else 0.5 for kind in _BLOCK_KINDS},
}
# Halves of int4 rows lie half a group apart.
_NO_BLOCKS = {"VALUES": 0, "BYTES": 0, "HEAD": 0}
# Rows of a tile: of a product with few rows, with some, and of one whose time is that of multiplying.
_FEW, _SOME, _MANY = 16, 64, 128
_ROOMY = 200 << 10  # bytes of shared memory of cards whose products take both operands from there


@dataclass(frozen=True)
class ProductTile:
    """The tile that one program computes.

    Attributes:
        rows: Number of rows of x, in a mixture of experts all of one expert.
        columns: Number of columns of the result.
        depth: Number of columns of the operands that are multiplied in one step.
        warps: Number of warps of a program.
        stages: Number of stages of Triton's pipeline.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Storage:
    """The way in which a weight matrix is stored.

    Attributes:
        kind: The kind of its rows.
        weight_format: Format of the blocks, a key of `BLOCK_CODINGS`; "": its rows are not in blocks.
    """

    kind: WeightKind
    weight_format: str = ""

    def row_width(self, depth: int) -> int:
        """Elements of the tensor that has a row of `depth` weights."""
        if self.weight_format:
            return weight_row_bytes(depth, self.weight_format)
        return {"int8": int8.row_bytes(depth), "int4": quant.row_bytes(depth)}.get(self.kind, depth)

    @property
    def constants(self) -> dict[str, str | int]:
        """Constants of kernels: the kind, and those of `block_constants`, with a GAP of int4 rows too."""
        if self.weight_format:
            return {"KIND": self.kind, **block_constants(self.weight_format)}
        return {"KIND": self.kind, **_NO_BLOCKS, "GAP": CODE_GROUP // 2 if self.kind == "int4" else 0}


def storage_of(weight: Tensor | BlockWeight) -> Storage:
    """The way in which a weight matrix is stored: its format, or by its dtype."""
    if isinstance(weight, BlockWeight):
        return Storage(BLOCK_CODINGS[weight.weight_format], weight.weight_format)
    return Storage("int8" if weight.dtype == torch.int8 else "int4" if weight.dtype == torch.uint8 else "numbers")


def tensor_of(weight: Tensor | BlockWeight) -> Tensor:
    """The tensor with a matrix's rows."""
    return weight.data if isinstance(weight, BlockWeight) else weight


def product_tile(
    kind: WeightKind, dtype: torch.dtype, rows: float, columns: int, on: Card, *, gated: bool
) -> ProductTile:
    """Choose the tile that one program computes.

    With few rows, the time is that of reading the weights once, so padded rows cost nothing, and columns are cut so
    that as many multiprocessors as possible have a tile. With many rows, every weight that is read from the cache is
    multiplied with all rows of the tile. Row tiles are 4 times apart, as sweeps of warm-up are, so that each is
    compiled there.

    Args:
        kind: The way in which weights are stored.
        dtype: Dtype of x before it is quantized, if it is.
        rows: Number of rows; of a mixture of experts, the mean over experts.
        columns: Number of columns of the result; of a mixture of experts, those of all experts that may have rows.
        on: The GPU.
        gated: Whether two matrices, gate and up, are multiplied at once; then each has half of the columns.
    """
    matrices = 2 if gated else 1
    if dtype == torch.float32 and kind != "int8":  # products without tensor cores, whose operands take many registers
        depth = 32 if kind == "numbers" else max(CODE_GROUP, 2 * run_bytes(kind) if kind in _BLOCK_KINDS else 0)
        return ProductTile(32, 64 // matrices, depth, 4, 2)
    if kind == "numbers":
        tile_rows, across, depth = _SOME, 128, 64
    else:
        is_blocks, is_roomy = kind in _BLOCK_KINDS, on.shared_memory >= _ROOMY
        has_many = kind == "int8" or (is_blocks and is_roomy)
        tile_rows = _FEW if rows <= _FEW else _MANY if rows > _SOME and has_many else _SOME
        # Blocks that become floats take registers; where operands are in shared memory, a tile of some rows has them.
        widths = (64,) if is_blocks and (tile_rows == _FEW or not is_roomy) else (128, 64)
        widest = next((n for n in widths if columns * matrices // n >= on.num_sms), 32)
        across = 128 if tile_rows == _MANY else widest
        depth = (4 if tile_rows == _FEW and not is_blocks else 2) * CODE_GROUP
    of_x = 1 if kind == "int8" else dtype.itemsize
    step_bytes = int((tile_rows * of_x + across * _VALUE_BYTES.get(kind, dtype.itemsize)) * depth)
    warps = 8 if tile_rows == _MANY else 4
    stages = max(2, min(4, on.shared_memory // step_bytes - 1))
    return ProductTile(tile_rows, across // matrices, depth, warps, stages)


@triton.jit
def sums_of_products(
    x_rows,
    there,
    w_rows,
    inside,
    up_offset,
    DEPTH: tl.constexpr,
    KIND: tl.constexpr,
    VALUES: tl.constexpr,
    BYTES: tl.constexpr,
    HEAD: tl.constexpr,
    GAP: tl.constexpr,
    ALIGNED: tl.constexpr,
    IS_GATED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
):
    """Sums over DEPTH columns of the products of rows of x and rows of a weight.

    Args:
        x_rows: Pointers to the rows of x, [ROWS].
        there: Mask of the rows of x to load, [ROWS].
        w_rows: Pointers to the rows of the weight, [BLOCK].
        inside: Mask of the rows of the weight to load, [BLOCK].
        up_offset: Distance from a row of the gate to that of the up projection, in elements.
        DEPTH: Number of columns.
        KIND: The kind of the weight's rows (`WeightKind`).
        VALUES: Values of a block; 0 where rows are not in blocks.
        BYTES: Bytes of a block.
        HEAD: Bytes of a block before its values.
        GAP: Distance in columns of a byte's low and high nibble; 0 where values are not nibbles.
        ALIGNED: Whether tables of scales of int4 rows are at multiples of 4 bytes.
        IS_GATED: Whether rows at `up_offset` are multiplied, too.
        ROWS, BLOCK: Sizes of the tile.
        STEP: Number of columns of one step; with int4 whole groups.

    Returns:
        Sums [ROWS, BLOCK] of the weight's rows, and of the rows at `up_offset`: int32 for int8 rows, else fp32.
    """
    total = tl.zeros((ROWS, BLOCK), tl.int32 if KIND == "int8" else tl.float32)
    up = total
    for step in range(0, DEPTH, STEP):
        if GAP:
            low, high, low_there, high_there = _halves(step, DEPTH, KIND, GAP, STEP)
            low_mask, high_mask = there[:, None], there[:, None]
            if DEPTH % STEP:
                low_mask, high_mask = low_mask & low_there[None, :], high_mask & high_there[None, :]
            x_low = tl.load(x_rows[:, None] + low[None, :], mask=low_mask, other=0.0)
            x_high = tl.load(x_rows[:, None] + high[None, :], mask=high_mask, other=0.0)
            w_low, w_high = _nibbles(w_rows, inside, step, DEPTH, KIND, VALUES, BYTES, HEAD, GAP, ALIGNED, STEP)
            total = tl.dot(x_low, tl.trans(w_low.to(x_low.dtype)), total, input_precision="ieee")
            total = tl.dot(x_high, tl.trans(w_high.to(x_low.dtype)), total, input_precision="ieee")
            if IS_GATED:
                w_low, w_high = _nibbles(
                    w_rows + up_offset, inside, step, DEPTH, KIND, VALUES, BYTES, HEAD, GAP, ALIGNED, STEP
                )
                up = tl.dot(x_low, tl.trans(w_low.to(x_low.dtype)), up, input_precision="ieee")
                up = tl.dot(x_high, tl.trans(w_high.to(x_low.dtype)), up, input_precision="ieee")
        else:
            depth = step + tl.arange(0, STEP)[None, :]
            x_mask = there[:, None]
            if DEPTH % STEP:
                x_mask = x_mask & (depth < DEPTH)
            some = tl.load(x_rows[:, None] + depth, mask=x_mask, other=0)
            part = _numbers(w_rows, inside, step, DEPTH, KIND, VALUES, BYTES, HEAD, STEP).to(some.dtype)
            if KIND == "int8":
                total = tl.dot(some, tl.trans(part), total, out_dtype=tl.int32)
            else:
                total = tl.dot(some, tl.trans(part), total, input_precision="ieee")
            if IS_GATED:
                part = _numbers(w_rows + up_offset, inside, step, DEPTH, KIND, VALUES, BYTES, HEAD, STEP).to(some.dtype)
                if KIND == "int8":
                    up = tl.dot(some, tl.trans(part), up, out_dtype=tl.int32)
                else:
                    up = tl.dot(some, tl.trans(part), up, input_precision="ieee")
    return total, up


@triton.jit
def _numbers(
    w_rows, inside, step, DEPTH: tl.constexpr, KIND: tl.constexpr, VALUES: tl.constexpr, BYTES: tl.constexpr,
    HEAD: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Columns [step, step + STEP) of rows whose values are numbers or bytes."""
    if VALUES:
        numbers = byte_numbers(w_rows, inside, step, DEPTH, STEP, KIND, VALUES, BYTES, HEAD)
    else:
        depth = step + tl.arange(0, STEP)[None, :]
        mask = inside[:, None]
        if DEPTH % STEP:
            mask = mask & (depth < DEPTH)
        numbers = tl.load(w_rows[:, None] + depth, mask=mask, other=0)
    return numbers


@triton.jit
def _halves(step, DEPTH: tl.constexpr, KIND: tl.constexpr, GAP: tl.constexpr, STEP: tl.constexpr):
    """Columns of the low and of the high nibbles of STEP columns from `step` on, and masks of those that are there."""
    if KIND == "int4":
        low, high, low_there, high_there = flat_columns(step // 64, DEPTH, STEP // 64)
    else:
        low = nibble_columns(step, STEP, GAP)
        high, low_there = low + GAP, low < DEPTH
        high_there = low_there
    return low, high, low_there, high_there


@triton.jit
def _nibbles(
    w_rows, inside, step, DEPTH: tl.constexpr, KIND: tl.constexpr, VALUES: tl.constexpr, BYTES: tl.constexpr,
    HEAD: tl.constexpr, GAP: tl.constexpr, ALIGNED: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Numbers of rows whose values are nibbles, in the columns of `_halves`."""
    if KIND == "int4":
        low, high = unpack_flat(w_rows, inside, step // 64, DEPTH, STEP // 64, ALIGNED)
    else:
        low, high = nibble_numbers(w_rows, inside, step, DEPTH, STEP, KIND, VALUES, BYTES, HEAD, GAP)
    return low, high


@triton.jit
def scaled(total, x_scales, there, w_rows, inside, WIDTH: tl.constexpr):
    """Sums of products of int8 codes, multiplied by the scales of the weight's rows and then of x's rows, fp32.

    Args:
        total: Sums, int32 [ROWS, BLOCK].
        x_scales: Pointers to the scales of the rows of x, [ROWS].
        there: Mask of the rows of x, [ROWS].
        w_rows: Pointers to the rows of the weight, [BLOCK].
        inside: Mask of the rows of the weight, [BLOCK].
        WIDTH: Bytes of a row of the weight, of which the last four are the scale.
    """
    scale = tl.load((w_rows + WIDTH - 4).to(tl.pointer_type(tl.float32)), mask=inside, other=0.0)
    x_scale = tl.load(x_scales, mask=there, other=0.0)
    return total.to(tl.float32) * tl.abs(scale)[None, :] * x_scale[:, None]
