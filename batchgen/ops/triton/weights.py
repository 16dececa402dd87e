"""Group quantization (batchgen/ops/quant.py) of rows to 4, 5 and 8 bits, and dequantization from 4 bits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchgen.core.dtypes import WEIGHT_CODE_BITS
from batchgen.ops import quant
from batchgen.ops.triton.groups import aligned, pack, pack_halves, tile_columns, unpack
from batchgen.ops.triton.launch import Launch, power_of_two

_PROGRAM_GROUPS = 32  # 1 KiB of nibbles: 8 bytes a thread, which are 16 bytes of each half's 16-bit results
_MAX_GROUPS = 32  # of a row
_PROGRAM_HEADS = 16


def dequantize(packed: Tensor, n: int, out: Tensor) -> Tensor:
    """Dequantize packed rows of 4-bit values, uint8 [..., quant.row_bytes(n)], into `out` [..., n].

    Both tensors are contiguous. `out` has any float dtype.
    """
    dequantize_launch(packed, n, out)()
    return out


def dequantize_launch(packed: Tensor, n: int, out: Tensor) -> Launch:
    assert packed.is_contiguous() and out.is_contiguous() and out.numel() // n == packed.numel() // quant.row_bytes(n)
    args = {"packed": packed, "out": out}
    return Launch(_dequantize, *_shapes(args, out.numel() // n, n, packed, WEIGHT_CODE_BITS))


def quantize(x: Tensor, bits: int = WEIGHT_CODE_BITS) -> Tensor:
    """Quantize rows x [..., n] in groups, to uint8 [..., quant.row_bytes(n, bits)].

    With 8 bits, n must be even and small, as a head of KV is.
    """
    shape = *x.shape[:-1], quant.row_bytes(x.shape[-1], bits)
    packed = torch.empty(shape, dtype=torch.uint8, device=x.device)
    made = quantize_heads_launch(x.contiguous(), packed) if bits == 8 else quantize_launch(x.contiguous(), packed, bits)
    made()
    return packed


def quantize_heads_launch(x: Tensor, packed: Tensor) -> Launch:
    n = x.shape[-1]
    rows = x.numel() // n
    args = {"x": x, "packed": packed, "num_rows": rows}
    constants = {
        "N": n,
        "WIDTH": packed.shape[-1],
        "ROWS": _PROGRAM_HEADS,
        "HALF": power_of_two(n // 2, 16),
        "GROUPS": triton.cdiv(n, 64),
        "ALIGNED": aligned(n, 8, packed.data_ptr()),
    }
    return Launch(_quantize_heads, (triton.cdiv(rows, _PROGRAM_HEADS), 1), args, constants)


def quantize_launch(x: Tensor, packed: Tensor, bits: int = WEIGHT_CODE_BITS) -> Launch:
    n = x.shape[-1]
    return Launch(_quantize, *_shapes({"x": x, "packed": packed}, x.numel() // n, n, packed, bits))


def _shapes(args: dict, num_rows: int, n: int, packed: Tensor, bits: int) -> tuple[tuple[int, int], dict, dict]:
    groups = triton.cdiv(n, 64)
    across = power_of_two(min(groups, _MAX_GROUPS))
    rows = max(1, _PROGRAM_GROUPS // across)
    constants = {
        "N": n,
        "WIDTH": quant.row_bytes(n, bits),
        "ROWS": rows,
        "GROUPS": across,
        "BITS": bits,
        "ALIGNED": aligned(n, bits, packed.data_ptr()),
    }
    return (triton.cdiv(num_rows, rows), triton.cdiv(groups, across)), args | {"num_rows": num_rows}, constants


@triton.jit(do_not_specialize=["num_rows"])
def _dequantize(
    packed,
    out,
    num_rows,
    N: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    BITS: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    first_group = tl.program_id(1) * GROUPS
    low, high = unpack(packed + row * WIDTH, row < num_rows, first_group, N, GROUPS, BITS, ALIGNED)
    low_column, high_column, low_there, high_there = tile_columns(first_group, N, GROUPS)
    there = (row < num_rows)[:, None, None]
    rows = out + row[:, None, None] * N
    type: tl.constexpr = out.dtype.element_ty
    tl.store(rows + low_column[None, :, :], low.to(type), mask=there & low_there[None, :, :])
    tl.store(rows + high_column[None, :, :], high.to(type), mask=there & high_there[None, :, :])


@triton.jit(do_not_specialize=["num_rows"])
def _quantize(
    x,
    packed,
    num_rows,
    N: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    BITS: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    first_group = tl.program_id(1) * GROUPS
    low_column, high_column, low_there, high_there = tile_columns(first_group, N, GROUPS)
    there = (row < num_rows)[:, None, None]
    rows = x + row[:, None, None] * N
    low = tl.load(rows + low_column[None, :, :], mask=there & low_there[None, :, :], other=0.0).to(tl.float32)
    high = tl.load(rows + high_column[None, :, :], mask=there & high_there[None, :, :], other=0.0).to(tl.float32)
    pack(low, high, packed + row * WIDTH, row < num_rows, first_group, N, GROUPS, BITS, ALIGNED)


@triton.jit(do_not_specialize=["num_rows"])
def _quantize_heads(
    x,
    packed,
    num_rows,
    N: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    HALF: tl.constexpr,
    GROUPS: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, HALF)[None, :]
    there = row < num_rows
    mask = there[:, None] & (column < N // 2)
    rows = x + row[:, None] * N
    first = tl.load(rows + column, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(rows + N // 2 + column, mask=mask, other=0.0).to(tl.float32)
    pack_halves(first, second, packed + row * WIDTH, there, N, GROUPS, ALIGNED)
