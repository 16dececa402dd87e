"""Block-quantized rows of FP8, GPTQ, AWQ and MXFP4 unpacked in a kernel's registers, for matrix products.

A block has its scale first, and then its values: bytes, or nibbles, of which 16 bytes have 32 values, low nibbles
before high ones. Its numbers are those of csrc/quant/ to the last bit.
"""

from __future__ import annotations

from typing import Literal

import triton
import triton.language as tl

from batchgen.core.dtypes import EXPERT_FORMATS, FP8_FORMATS, GROUP_FORMATS
from batchgen.ops.triton.groups import INTEGER, INTEGER_BITS

# What values are: FP8 numbers, integers of 4 bits with a zero point, MXFP4's floats of 4 bits.
BlockCoding = Literal["fp8", "w4", "mxfp4"]
BLOCK_CODINGS: dict[str, BlockCoding] = {
    **dict.fromkeys(FP8_FORMATS, "fp8"),
    **dict.fromkeys(GROUP_FORMATS, "w4"),
    **dict.fromkeys(EXPERT_FORMATS.values(), "mxfp4"),
}
# Values that share 16 bytes of nibbles.
RUN = tl.constexpr(32)


@triton.jit
def byte_numbers(
    rows, row_mask, first, N: tl.constexpr, STEP: tl.constexpr, CODING: tl.constexpr, VALUES: tl.constexpr,
    HEAD: tl.constexpr,
):  # fmt: skip
    """Dequantize columns of rows whose values are bytes.

    Args:
        rows: Pointers to the rows, [R].
        row_mask: Mask of the rows to load, [R].
        first: The first column, a multiple of STEP.
        N: Number of values in a row, whole blocks.
        STEP: Number of columns, a power of two of at least 32.
        CODING: Coding of the blocks (`BlockCoding`).
        VALUES: Values of a block, 32 or a multiple.
        HEAD: Bytes of a block before its values.

    Returns:
        Numbers, fp32 [R, STEP]; 0 in rows that are masked and after the end of a row.
    """
    column = first + tl.arange(0, STEP)
    mask = row_mask[:, None]
    if N % STEP:
        mask = mask & (column < N)[None, :]
    code = tl.load(rows[:, None] + _offsets(column, CODING, VALUES, HEAD)[None, :], mask=mask, other=0).to(tl.int32)
    scale, _ = _scales(rows, row_mask, first, N, STEP, CODING, VALUES, HEAD)
    # The bits of FP8 are those of fp16 but for two bits of mantissa and one of exponent: a number 2**8 times smaller.
    half = ((code & 0x80) << 8) | ((code & 0x7F) << 7)
    return half.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0 * _spread(scale, STEP)


@triton.jit
def nibble_numbers(
    rows, row_mask, first, N: tl.constexpr, STEP: tl.constexpr, CODING: tl.constexpr, VALUES: tl.constexpr,
    HEAD: tl.constexpr,
):  # fmt: skip
    """Dequantize columns of rows whose values are nibbles, as `byte_numbers` does.

    Returns:
        Numbers of the low and of the high nibbles, fp32 [R, STEP / 2] each, in the columns of `nibble_columns`.
    """
    column = nibble_columns(first, STEP)
    mask = row_mask[:, None]
    if N % STEP:
        mask = mask & (column < N)[None, :]
    code = tl.load(rows[:, None] + _offsets(column, CODING, VALUES, HEAD)[None, :], mask=mask, other=0).to(tl.int32)
    scale, zero = _scales(rows, row_mask, first, N, STEP, CODING, VALUES, HEAD)
    scale, zero = _spread(scale, STEP // 2), _spread(zero, STEP // 2)
    return _of_nibbles(code & 15, zero, CODING) * scale, _of_nibbles(code >> 4, zero, CODING) * scale


@triton.jit
def nibble_columns(first, STEP: tl.constexpr):
    """Columns of the low nibbles of STEP columns from `first` on; those of the high nibbles are 16 further."""
    byte = tl.arange(0, STEP // 2)
    return first + byte // (RUN // 2) * RUN + byte % (RUN // 2)


@triton.jit
def _of_nibbles(code, zero, CODING: tl.constexpr):
    """Numbers of nibbles before they are scaled."""
    if CODING == "mxfp4":
        # A sign, two bits of exponent and one of mantissa: an fp16 number 2**14 times smaller.
        half = ((code & 8) << 12) | ((code & 7) << 9)
        number = half.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0
    else:
        number = (code | INTEGER_BITS).to(tl.float32, bitcast=True) - (zero + INTEGER)
    return number


@triton.jit
def _offsets(column, CODING: tl.constexpr, VALUES: tl.constexpr, HEAD: tl.constexpr):
    """Offsets in a row of the bytes that have the values of columns; of nibbles, of columns of low ones."""
    within = column % VALUES
    if CODING == "fp8":
        offset = column // VALUES * (HEAD + VALUES) + HEAD + within
    else:
        offset = column // VALUES * (HEAD + VALUES // 2) + HEAD + within // RUN * (RUN // 2) + within % RUN
    return offset


@triton.jit
def _scales(
    rows, row_mask, first, N: tl.constexpr, STEP: tl.constexpr, CODING: tl.constexpr, VALUES: tl.constexpr,
    HEAD: tl.constexpr,
):  # fmt: skip
    """Scales and zero points of each 32 of STEP columns, fp32 [R, STEP / 32] each."""
    BYTES: tl.constexpr = HEAD + (VALUES if CODING == "fp8" else VALUES // 2)
    column = first + tl.arange(0, STEP // RUN) * RUN
    mask = row_mask[:, None] & (column < N)[None, :]
    at = rows[:, None] + (column // VALUES * BYTES)[None, :]
    word = tl.load(at, mask=mask, other=0).to(tl.uint32)
    for byte in tl.static_range(1, HEAD):
        word |= tl.load(at + byte, mask=mask, other=0).to(tl.uint32) << (8 * byte)
    zero = tl.zeros(word.shape, tl.float32)
    if CODING == "fp8":
        scale = word.to(tl.float32, bitcast=True)
    elif CODING == "w4":
        scale, zero = (word >> 8 << 8).to(tl.float32, bitcast=True), (word & 0xFF).to(tl.float32)
    else:
        # 2 ** (byte - 127), which is subnormal for the lowest one; 0 where there is no block.
        power = tl.where(word == 0, 0x400000, word << 23).to(tl.uint32).to(tl.float32, bitcast=True)
        scale = tl.where(mask, power, 0.0)
    return scale, zero


@triton.jit
def _spread(scale, COLUMNS: tl.constexpr):
    """Numbers of runs, [R, runs], repeated for each of COLUMNS values of them, [R, COLUMNS]."""
    shape: tl.constexpr = (scale.shape[0], scale.shape[1], COLUMNS // scale.shape[1])
    return tl.reshape(tl.broadcast_to(scale[:, :, None], shape), (scale.shape[0], COLUMNS))
