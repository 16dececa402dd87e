"""Quantization of activations to 8 bits, rotated where the weight's rows are (`ops/int8.py`), by a Triton kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchgen.ops.triton.groups import ROUNDING
from batchgen.ops.triton.launch import Launch, power_of_two, warps_of

# Rows of codes begin at multiples of so many bytes, so that 16 are loaded at once.
_CODE_ALIGNMENT = 16
BLOCK = tl.constexpr(64)  # values that are rotated together
LARGEST = tl.constexpr(127.0)
LEAST = tl.constexpr(2.0**-100)  # a row of smaller numbers counts as zeros


def coded_launch(x: Tensor, weight: Tensor) -> tuple[Launch, Tensor, Tensor]:
    """The launch that quantizes rows of x for a weight, and its results.

    Args:
        x: Activations [rows, depth].
        weight: Int8 rows, whose first one tells whether x is rotated.

    Returns:
        The launch; codes, int8 [rows, depth], with rows at multiples of 16 bytes; scales, fp32 [rows].
    """
    rows, depth = x.shape
    assert x.stride(1) == 1 and weight.is_contiguous()
    stride = triton.cdiv(depth, _CODE_ALIGNMENT) * _CODE_ALIGNMENT
    codes = torch.empty(rows, stride, dtype=torch.int8, device=x.device)[:, :depth]
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    args = {"x": x, "codes": codes, "scales": scales, "sign": weight.view(-1)[weight.shape[1] - 1 :]}
    columns = power_of_two(depth, int(BLOCK))
    constants = {"DEPTH": depth, "CODES_STRIDE": stride, "COLUMNS": columns}
    return Launch(_code_rows, (rows,), args | {"x_stride": x.stride(0)}, constants, warps_of(columns)), codes, scales


@triton.jit
def _code_rows(
    x, codes, scales, sign, x_stride, DEPTH: tl.constexpr, CODES_STRIDE: tl.constexpr, COLUMNS: tl.constexpr
):
    """Kernel: one row. `sign` points to the byte that has the sign of the first scale of the weight."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    values = tl.load(x + row * x_stride + column, mask=column < DEPTH, other=0.0).to(tl.float32)
    if tl.load(sign) < 0:
        values = tl.where(column < DEPTH // BLOCK * BLOCK, rotated(values), values)
    odd = tl.max((values != values).to(tl.int32), 0) > 0
    largest = tl.max(tl.abs(values), 0)
    finite = (largest < float("inf")) & (odd == 0)
    counts = finite & (largest >= LEAST)
    steps = tl.where(counts, tl.div_rn(LARGEST, tl.where(counts, largest, 1.0)), 0.0)
    code = tl.minimum(tl.maximum(tl.where(counts, values, 0.0) * steps, -LARGEST), LARGEST)
    code = (code + ROUNDING) - ROUNDING
    tl.store(codes + row * CODES_STRIDE + column, code.to(tl.int8), mask=column < DEPTH)
    scale = tl.where(counts, tl.div_rn(largest, LARGEST), tl.where(finite, 0.0, float("nan")))
    tl.store(scales + row, scale)


@triton.jit
def rotated(values):
    """Values [n] in fp32 with each block of 64 multiplied by the Hadamard matrix / 8, in the reference's order of sums.

    Each step adds and subtracts neighbours, and lets the lowest bit of their numbers be the highest one of the results.
    After six steps all are where they were.
    """
    for _ in tl.static_range(6):
        first, second = tl.split(tl.reshape(values, (values.shape[0] // BLOCK, BLOCK // 2, 2)))
        values = tl.join(first + second, first - second)
        values = tl.reshape(tl.permute(values, (0, 2, 1)), (first.shape[0] * BLOCK,))
    return values * 0.125
