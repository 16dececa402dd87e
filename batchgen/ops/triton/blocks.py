"""Block-quantized rows, as model files have them, unpacked in a kernel's registers for matrix products.

The formats are those of GGUF, FP8, GPTQ, AWQ and MXFP4 (`BLOCK_FORMATS`). A block has bytes, each with one value or
more, or nibbles: of a run of bytes the low nibbles are the values before those of the high ones. A number is value *
scale + minimum, with a scale and perhaps a minimum for 16 or 32 values. Products of values and scales are exact, so
numbers are those of csrc/quant/ to the last bit.
"""

from __future__ import annotations

from typing import Literal, cast

import triton
import triton.language as tl

from batchgen.core.dtypes import BLOCK_FORMATS, FP8_FORMATS, GGUF_FORMATS, GROUP_FORMATS
from batchgen.ops.triton.groups import INTEGER, INTEGER_BITS

# What values are: FP8 numbers, integers of 4 bits with a zero point, or as in a format of GGUF.
BlockCoding = Literal[
    "fp8", "w4", "mxfp4", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_nl",
    "iq4_xs",
]  # fmt: skip
BLOCK_CODINGS: dict[str, BlockCoding] = {
    **dict.fromkeys(FP8_FORMATS, "fp8"),
    **dict.fromkeys(GROUP_FORMATS, "w4"),
    **{name: cast("BlockCoding", name) for name in GGUF_FORMATS},
}
# Bytes of a block before its values, or before the nibbles of these.
_HEADS: dict[BlockCoding, int] = {
    "fp8": 4, "w4": 4, "mxfp4": 1, "q4_0": 2, "q4_1": 4, "q5_0": 6, "q5_1": 8, "q8_0": 2, "q2_k": 16, "q3_k": 32,
    "q4_k": 16, "q5_k": 48, "q6_k": 0, "iq4_nl": 2, "iq4_xs": 8,
}  # fmt: skip
# Bytes of a run, where values are nibbles and not bytes: a low nibble's value is so many columns before the high one's.
_WIDE_RUNS: dict[BlockCoding, int] = {"q4_k": 32, "q5_k": 32, "q6_k": 64}
_BYTES = ("fp8", "q8_0", "q2_k", "q3_k")


def run_bytes(coding: BlockCoding) -> int:
    """Bytes of a run of nibbles; 0 for blocks of bytes."""
    return 0 if coding in _BYTES else _WIDE_RUNS.get(coding, 16)


def block_constants(weight_format: str) -> dict[str, int]:
    """Constants of kernels that unpack blocks of a format.

    VALUES and BYTES are those of a block, HEAD its bytes before the values, and GAP the bytes of a run of nibbles.
    """
    coding = BLOCK_CODINGS[weight_format]
    values, num_bytes = BLOCK_FORMATS[weight_format]
    return {"VALUES": values, "BYTES": num_bytes, "HEAD": _HEADS[coding], "GAP": run_bytes(coding)}


@triton.jit
def byte_numbers(
    rows, row_mask, first, N: tl.constexpr, STEP: tl.constexpr, CODING: tl.constexpr, VALUES: tl.constexpr,
    BYTES: tl.constexpr, HEAD: tl.constexpr,
):  # fmt: skip
    """Dequantize columns of rows whose values are in bytes.

    Args:
        rows: Pointers to the rows, [R].
        row_mask: Mask of the rows to load, [R].
        first: The first column, a multiple of STEP.
        N: Number of values in a row, whole blocks.
        STEP: Number of columns, a power of two of at least 32.
        CODING: Coding of the blocks (`BlockCoding`).
        VALUES: Values of a block, 32 or a multiple.
        BYTES: Bytes of a block.
        HEAD: Bytes of a block before its values.

    Returns:
        Numbers, fp32 [R, STEP]; 0 in rows that are masked and after the end of a row.
    """
    column = first + tl.arange(0, STEP)
    mask = row_mask[:, None]
    if N % STEP:
        mask = mask & (column < N)[None, :]
    within = column % VALUES
    block = rows[:, None] + (column // VALUES * BYTES)[None, :]
    RUN: tl.constexpr = 16 if VALUES == 256 else 32  # values that share a scale
    start = first + tl.arange(0, STEP // RUN) * RUN
    scale, minimum, _ = _scales(rows, row_mask, start, N, CODING, VALUES, BYTES, HEAD)
    if CODING == "q2_k" or CODING == "q3_k":  # four values of two bits in a byte
        byte = tl.load(block + (HEAD + within // 128 * 32 + within % 32)[None, :], mask=mask, other=0).to(tl.int32)
        code = byte >> (within % 128 // 32 * 2)[None, :] & 3
        if CODING == "q3_k":
            upper = tl.load(block + (within % 32)[None, :], mask=mask, other=0).to(tl.int32)
            code += (upper >> (within // 32)[None, :] & 1) * 4 - 4
    else:
        code = tl.load(block + (HEAD + within)[None, :], mask=mask, other=0).to(tl.int32)
    if CODING == "fp8":
        # The bits of FP8 are those of fp16 but for two bits of mantissa and one of exponent: a number 2**8 smaller.
        half = ((code & 0x80) << 8) | ((code & 0x7F) << 7)
        number = half.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    elif CODING == "q8_0":
        number = ((code ^ 128) - 128).to(tl.float32)
    else:
        number = code.to(tl.float32)
    return number * _spread(scale, STEP) + _spread(minimum, STEP)


@triton.jit
def nibble_numbers(
    rows, row_mask, first, N: tl.constexpr, STEP: tl.constexpr, CODING: tl.constexpr, VALUES: tl.constexpr,
    BYTES: tl.constexpr, HEAD: tl.constexpr, GAP: tl.constexpr,
):  # fmt: skip
    """Dequantize columns of rows whose values are in nibbles, as `byte_numbers` does.

    GAP is the bytes of a run of nibbles, and STEP at least twice as many.

    Returns:
        Numbers of the low and of the high nibbles, fp32 [R, STEP / 2] each, in the columns of `nibble_columns`.
    """
    column = nibble_columns(first, STEP, GAP)
    mask = row_mask[:, None]
    if N % STEP:
        mask = mask & (column < N)[None, :]
    within = column % VALUES
    block = rows[:, None] + (column // VALUES * BYTES)[None, :]
    at = HEAD + within // (2 * GAP) * GAP + within % (2 * GAP)
    code = tl.load(block + at[None, :], mask=mask, other=0).to(tl.int32)
    low, high = code & 15, code >> 4
    if CODING == "q5_0" or CODING == "q5_1":  # the fifth bits of 32 values, one after the other
        low_bits = tl.load(block + (HEAD - 4 + within // 8)[None, :], mask=mask, other=0).to(tl.int32)
        high_bits = tl.load(block + (HEAD - 2 + within // 8)[None, :], mask=mask, other=0).to(tl.int32)
        low |= (low_bits >> (within % 8)[None, :] & 1) << 4
        high |= (high_bits >> (within % 8)[None, :] & 1) << 4
    elif CODING == "q5_k":  # a byte has the fifth bits of values that are 32 apart
        bits = tl.load(block + (16 + within % 32)[None, :], mask=mask, other=0).to(tl.int32)
        low |= (bits >> (within // 32)[None, :] & 1) << 4
        high |= (bits >> (within // 32 + 1)[None, :] & 1) << 4
    elif CODING == "q6_k":  # a byte has the upper two bits of values that are 32 apart
        byte = 128 + within // 128 * 32 + within % 32
        bits = tl.load(block + byte[None, :], mask=mask, other=0).to(tl.int32)
        low |= (bits >> (within % 128 // 32 * 2)[None, :] & 3) << 4
        high |= (bits >> (within % 128 // 32 * 2 + 4)[None, :] & 3) << 4
    SHARING: tl.constexpr = 32 if GAP == 32 else 16  # nibbles of a run that share a scale
    byte = tl.arange(0, STEP // 2 // SHARING) * SHARING
    start = first + byte // GAP * (2 * GAP) + byte % GAP
    scale, minimum, zero = _scales(rows, row_mask, start, N, CODING, VALUES, BYTES, HEAD)
    low_numbers = _of_nibbles(low, scale, minimum, zero, CODING, STEP // 2)
    if GAP > 16:  # else 16 low nibbles and as many high ones have one scale
        scale, minimum, zero = _scales(rows, row_mask, start + GAP, N, CODING, VALUES, BYTES, HEAD)
    return low_numbers, _of_nibbles(high, scale, minimum, zero, CODING, STEP // 2)


@triton.jit
def nibble_columns(first, STEP: tl.constexpr, GAP: tl.constexpr):
    """Columns of the low nibbles of STEP columns from `first` on; those of the high nibbles are GAP further."""
    byte = tl.arange(0, STEP // 2)
    return first + byte // GAP * (2 * GAP) + byte % GAP


@triton.jit
def _of_nibbles(code, scale, minimum, zero, CODING: tl.constexpr, COLUMNS: tl.constexpr):
    """Numbers of nibbles, to which upper bits may have been added: fp32 [R, COLUMNS]."""
    if CODING == "mxfp4":
        # A sign, two bits of exponent and one of mantissa: an fp16 number 2**14 times smaller.
        half = ((code & 8) << 12) | ((code & 7) << 9)
        number = half.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0
    elif CODING == "iq4_nl" or CODING == "iq4_xs":
        # A table of 127, 104, 83, 65, 49, 35, 22, 10 below zero, then 1, 13, 25, 38, 53, 69, 89, 113.
        below = tl.where(code < 4, 0x4153687F, 0x0A162331)
        above = tl.where(code < 12, 0x26190D01, 0x71594535)
        size = tl.where(code < 8, below, above) >> (code % 4 * 8) & 0xFF
        number = tl.where(code < 8, -size, size).to(tl.float32)
    else:
        offset = 8.0 if CODING == "q4_0" else 16.0 if CODING == "q5_0" else 32.0 if CODING == "q6_k" else 0.0
        number = (code | INTEGER_BITS).to(tl.float32, bitcast=True) - (_spread(zero, COLUMNS) + (INTEGER + offset))
    return number * _spread(scale, COLUMNS) + _spread(minimum, COLUMNS)


@triton.jit
def _scales(
    rows, row_mask, column, N: tl.constexpr, CODING: tl.constexpr, VALUES: tl.constexpr, BYTES: tl.constexpr,
    HEAD: tl.constexpr,
):  # fmt: skip
    """Scales, minimums and zero points of the values in some columns, fp32 [R, columns] each."""
    within = (column % VALUES)[None, :]
    mask = row_mask[:, None] & (column < N)[None, :]
    block = rows[:, None] + (column // VALUES * BYTES)[None, :]
    zero = tl.zeros((rows.shape[0], column.shape[0]), tl.float32)
    minimum = zero
    if CODING == "fp8":
        scale = _word(block, mask, 4).to(tl.float32, bitcast=True)
    elif CODING == "w4":
        word = _word(block, mask, 4)
        scale, zero = (word >> 8 << 8).to(tl.float32, bitcast=True), (word & 0xFF).to(tl.float32)
    elif CODING == "mxfp4":
        # 2 ** (byte - 127), which is subnormal for the lowest one; 0 where there is no block.
        word = _word(block, mask, 1)
        power = tl.where(word == 0, 0x400000, word << 23).to(tl.uint32).to(tl.float32, bitcast=True)
        scale = tl.where(mask, power, 0.0)
    elif CODING == "q4_k" or CODING == "q5_k":
        # Eight scales of 6 bits, and eight minimums: of four each the lower bits are in one byte, of four in another.
        first = _byte(block + 4 + within // 32 % 4, mask)
        second = _byte(block + 8 + within // 32 % 4, mask)
        third = _byte(block + 12 + within // 32 % 4, mask)
        is_later = within >= 128
        scale_code = tl.where(is_later, (third & 15) | (first >> 2 & 0x30), first & 63)
        minimum_code = tl.where(is_later, (third >> 4) | (second >> 2 & 0x30), second & 63)
        scale = _half(block, mask) * scale_code.to(tl.float32)
        minimum = -(_half(block + 2, mask) * minimum_code.to(tl.float32))
    elif CODING == "q6_k":
        scale = _half(block + 208, mask) * ((_byte(block + 192 + within // 16, mask) ^ 128) - 128).to(tl.float32)
    elif CODING == "q2_k":
        both = _byte(block + within // 16, mask)
        scale = _half(block + 80, mask) * (both & 15).to(tl.float32)
        minimum = -(_half(block + 82, mask) * (both >> 4).to(tl.float32))
    elif CODING == "q3_k":
        run = within // 16
        low = _byte(block + 96 + run // 4 % 2 * 4 + run % 4, mask) >> (run // 8 * 4) & 15
        high = _byte(block + 104 + run % 4, mask) >> (run // 4 * 2) & 3
        scale = _half(block + 108, mask) * ((low | high << 4) - 32).to(tl.float32)
    elif CODING == "iq4_xs":
        run = within // 32
        low = _byte(block + 4 + run // 2, mask) >> (run % 2 * 4) & 15
        high = _byte(block + 2 + run // 4, mask) >> (run % 4 * 2) & 3
        scale = _half(block, mask) * ((low | high << 4) - 32).to(tl.float32)
    else:
        scale = _half(block, mask)
        if CODING == "q4_1" or CODING == "q5_1":
            minimum = _half(block + 2, mask)
    return scale, minimum, zero


@triton.jit
def _byte(at, mask):
    """Bytes, int32; 0 where they are masked."""
    return tl.load(at, mask=mask, other=0).to(tl.int32)


@triton.jit
def _word(at, mask, BYTES: tl.constexpr):
    """Words of some bytes, the lowest first, which need not be aligned: uint32."""
    word = tl.load(at, mask=mask, other=0).to(tl.uint32)
    for byte in tl.static_range(1, BYTES):
        word |= tl.load(at + byte, mask=mask, other=0).to(tl.uint32) << (8 * byte)
    return word


@triton.jit
def _half(at, mask):
    """Fp16 numbers, which need not be aligned, as fp32."""
    return _word(at, mask, 2).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _spread(scale, COLUMNS: tl.constexpr):
    """Numbers of runs, [R, runs], repeated for each of COLUMNS values of them, [R, COLUMNS]."""
    shape: tl.constexpr = (scale.shape[0], scale.shape[1], COLUMNS // scale.shape[1])
    return tl.reshape(tl.broadcast_to(scale[:, :, None], shape), (scale.shape[0], COLUMNS))
