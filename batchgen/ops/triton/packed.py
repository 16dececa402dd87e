"""Linear layers with packed weights by Triton kernels.

Int8 rows are multiplied as integers, int4 rows and blocks are unpacked in registers (`product.py`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchgen.ops.cpp import GATED, BlockWeight
from batchgen.ops.triton.groups import aligned
from batchgen.ops.triton.int8_rows import coded_launch
from batchgen.ops.triton.launch import Card, Launch, card
from batchgen.ops.triton.norm import activated, pointwise
from batchgen.ops.triton.product import product_tile, scaled, storage_of, sums_of_products, tensor_of


def packed_linear(
    x: Tensor,
    weight: Tensor | BlockWeight,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute activation(x weightᵀ + bias) + residual for int8 rows [N, bytes], int8, int4 rows [N, bytes], or blocks.

    Int4 rows are uint8. `dispatch.linear` describes the arguments. Sums, bias, activation and residual are in fp32, and
    are rounded once.
    """
    if out is None:
        columns = weight.shape[0] // (2 if activation in GATED else 1)
        out = torch.empty(len(x), columns, dtype=out_dtype or x.dtype, device=x.device)
    for launch in packed_launches(x, weight, bias, activation, residual, out):
        launch()
    return out


def packed_launches(
    x: Tensor,
    weight: Tensor | BlockWeight,
    bias: Tensor | None,
    activation: str | None,
    residual: Tensor | None,
    out: Tensor,
    on: Card | None = None,
) -> list[Launch]:
    """The kernel launches of `packed_linear`: of int8 rows x is quantized first.

    `on` is the GPU whose properties determine the tile; None: the GPU of x.
    """
    (rows, depth), columns, storage = x.shape, out.shape[1], storage_of(weight)
    kind, weight = storage.kind, tensor_of(weight)
    assert kind != "numbers" and weight.is_contiguous() and weight.shape[1] == storage.row_width(depth)
    assert x.stride(1) == out.stride(1) == 1 and (residual is None or residual.stride(1) == 1)
    gated = activation in GATED
    tile = product_tile(kind, x.dtype, rows, columns, on or card(x.device), gated=gated)
    quantizing, scales = [], None
    if kind == "int8":
        launch, x, scales = coded_launch(x, weight)
        quantizing = [launch]
    args = {
        "x": x,
        "x_scales": scales,
        "weight": weight,
        "bias": bias,
        "residual": residual,
        "out": out,
        "num_rows": rows,
        "x_stride": x.stride(0),
        "residual_stride": 0 if residual is None else residual.stride(0),
        "out_stride": out.stride(0),
    }
    constants = {
        "COLUMNS": columns,
        "DEPTH": depth,
        "WIDTH": weight.shape[1],
        **storage.constants,
        "ALIGNED": kind == "int4" and aligned(depth, 4, weight.data_ptr()),
        "ACTIVATION": activation,
        "IS_GATED": gated,
        "ROWS": tile.rows,
        "BLOCK": tile.columns,
        "STEP": tile.depth,
    }
    grid = triton.cdiv(columns, tile.columns), triton.cdiv(rows, tile.rows)
    return [*quantizing, Launch(_multiply_packed, grid, args, constants, tile.warps, tile.stages)]


@triton.jit(do_not_specialize=["num_rows"])
def _multiply_packed(  # a kernel takes pointers and scalars only
    x,
    x_scales,
    weight,
    bias,
    residual,
    out,
    num_rows,
    x_stride,
    residual_stride,
    out_stride,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    WIDTH: tl.constexpr,
    KIND: tl.constexpr,
    VALUES: tl.constexpr,
    BYTES: tl.constexpr,
    HEAD: tl.constexpr,
    GAP: tl.constexpr,
    ALIGNED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    IS_GATED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
):
    """Kernel: a tile of the result. Programs with the same rows of x are neighbours."""
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there, inside = row < num_rows, column < COLUMNS
    rows = row.to(tl.int64)
    w_rows = weight + column.to(tl.int64) * WIDTH
    up_offset = COLUMNS * WIDTH
    total, up = sums_of_products(
        x + rows * x_stride, there, w_rows, inside, up_offset,
        DEPTH, KIND, VALUES, BYTES, HEAD, GAP, ALIGNED, IS_GATED, ROWS, BLOCK, STEP,
    )  # fmt: skip
    if KIND == "int8":
        total = scaled(total, x_scales + row, there, w_rows, inside, WIDTH)
        if IS_GATED:
            up = scaled(up, x_scales + row, there, w_rows + up_offset, inside, WIDTH)
    if bias is not None:
        total += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)[None, :]
        if IS_GATED:
            up += tl.load(bias + COLUMNS + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    if IS_GATED:
        total = activated(total, up, ACTIVATION)
    elif ACTIVATION is not None:
        total = pointwise(total, ACTIVATION)
    mask = there[:, None] & inside[None, :]
    if residual is not None:
        at = residual + rows[:, None] * residual_stride + column[None, :]
        total += tl.load(at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + rows[:, None] * out_stride + column[None, :], total.to(out.dtype.element_ty), mask=mask)
