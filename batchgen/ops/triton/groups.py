"""Rows in 4-bit groups (batchgen/ops/quant.py) in a kernel's registers.

A row of N values is taken as low and high halves of its groups, [.., groups, 32] each: byte i of group g holds value
64 g + i in its low nibble and 64 g + half + i in its high one, half being 32 or less in a shorter last group. Groups are
padded to a power of two.
"""

from __future__ import annotations

import triton
import triton.language as tl

GROUP = tl.constexpr(64)
HALF = tl.constexpr(32)
MAX_FP16 = tl.constexpr(65504.0)
# Added and taken away again, it rounds numbers below 2**22 to the nearest integer, ties to even.
ROUNDING = tl.constexpr(12582912.0)


@triton.jit
def columns(group, i, N: tl.constexpr):
    """Columns of the low and of the high nibbles of bytes i of groups, and which of them are there."""
    low = group * GROUP + i
    if N % 64 == 0:  # masks of whole groups leave runs of bytes in one piece
        high = low + HALF
        low_there = tl.broadcast_to(group * GROUP < N, low.shape)
        high_there = low_there
    else:
        size = tl.minimum(GROUP, N - group * GROUP)
        half = (size + 1) // 2
        high = low + half
        low_there = i < half
        high_there = half + i < size
    return low, high, low_there, high_there


@triton.jit
def tile_columns(first_group, N: tl.constexpr, GROUPS: tl.constexpr):
    """`columns` of GROUPS groups from first_group on, [GROUPS, 32] each."""
    return columns((first_group + tl.arange(0, GROUPS))[:, None], tl.arange(0, HALF)[None, :], N)


@triton.jit
def flat_columns(N: tl.constexpr, GROUPS: tl.constexpr):
    """`columns` of the first GROUPS groups, [GROUPS * 32] each."""
    byte = tl.arange(0, GROUPS * HALF)
    return columns(byte // HALF, byte % HALF, N)


@triton.jit
def nibble_bytes(N: tl.constexpr):
    """Bytes of a row before its table."""
    return N // 64 * 32 + (N % 64 + 1) // 2


@triton.jit
def load_table(table, mask, ALIGNED: tl.constexpr):
    """Scale and minimum in fp32, at the pointers `table` of any shape. ALIGNED: to 4 bytes."""
    if ALIGNED:
        word = tl.load(table.to(tl.pointer_type(tl.uint32)), mask=mask, other=0)
        scale, minimum = word & 0xFFFF, word >> 16
    else:
        scale = tl.load(table, mask=mask, other=0).to(tl.uint32) | (
            tl.load(table + 1, mask=mask, other=0).to(tl.uint32) << 8
        )
        minimum = tl.load(table + 2, mask=mask, other=0).to(tl.uint32) | (
            tl.load(table + 3, mask=mask, other=0).to(tl.uint32) << 8
        )
    return (
        scale.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32),
        minimum.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32),
    )


@triton.jit
def unpack(rows, row_mask, first_group, N: tl.constexpr, GROUPS: tl.constexpr, ALIGNED: tl.constexpr):
    """Values of the low and of the high nibbles, fp32 [R, GROUPS, 32], of packed rows at `rows` [R]; 0 where nothing is."""
    group = first_group + tl.arange(0, GROUPS)
    _, _, low_there, _ = tile_columns(first_group, N, GROUPS)
    bytes_at = group[:, None] * HALF + tl.arange(0, HALF)[None, :]
    byte = tl.load(
        rows[:, None, None] + bytes_at[None, :, :], mask=row_mask[:, None, None] & low_there[None, :, :], other=0
    )
    table = rows[:, None] + (nibble_bytes(N) + 4 * group)[None, :]
    scale, minimum = load_table(table, row_mask[:, None] & (group * GROUP < N)[None, :], ALIGNED)
    low = (byte & 15).to(tl.float32) * scale[:, :, None] + minimum[:, :, None]
    high = (byte >> 4).to(tl.float32) * scale[:, :, None] + minimum[:, :, None]
    return low, high


@triton.jit
def pack(low, high, rows, row_mask, first_group, N: tl.constexpr, GROUPS: tl.constexpr, ALIGNED: tl.constexpr):
    """Stores packed rows at `rows` [R], of values low and high, fp32 [R, GROUPS, 32]."""
    group = first_group + tl.arange(0, GROUPS)
    _, _, low_there, high_there = tile_columns(first_group, N, GROUPS)
    low_there, high_there = low_there[None, :, :], high_there[None, :, :]
    odd = (low_there & (low != low)) | (high_there & (high != high))
    spoilt = tl.max(odd.to(tl.int32), 2) > 0
    low = tl.minimum(tl.maximum(low, -MAX_FP16), MAX_FP16)
    high = tl.minimum(tl.maximum(high, -MAX_FP16), MAX_FP16)
    least = tl.minimum(tl.min(tl.where(low_there, low, MAX_FP16), 2), tl.min(tl.where(high_there, high, MAX_FP16), 2))
    most = tl.maximum(tl.max(tl.where(low_there, low, -MAX_FP16), 2), tl.max(tl.where(high_there, high, -MAX_FP16), 2))
    minimum = least.to(tl.float16)
    base = minimum.to(tl.float32)
    scale = tl.maximum(tl.div_rn(most - base, 15.0), 0.0).to(tl.float16)
    # Rounded up at the very end of the range, a scale would take the maximum beyond it: one step down then.
    bits = scale.to(tl.uint16, bitcast=True)
    bits = tl.where(base + 15.0 * scale.to(tl.float32) > MAX_FP16, bits - 1, bits).to(tl.uint16)
    step = bits.to(tl.float16, bitcast=True).to(tl.float32)
    # What is left of a group narrower than fp16 can tell is its minimum.
    steps = tl.where(step > 0, tl.div_rn(1.0, tl.where(step > 0, step, 1.0)), 0.0)
    low_level = _level(low, base, steps, low_there)
    high_level = _level(high, base, steps, high_there)
    bytes_at = group[:, None] * HALF + tl.arange(0, HALF)[None, :]
    tl.store(
        rows[:, None, None] + bytes_at[None, :, :],
        (low_level | (high_level << 4)).to(tl.uint8),
        mask=row_mask[:, None, None] & low_there,
    )
    # A group with a NaN comes back as NaN.
    scale_word = tl.where(spoilt, 0x7E00, bits.to(tl.uint32))
    minimum_word = tl.where(spoilt, 0x7E00, minimum.to(tl.uint16, bitcast=True).to(tl.uint32))
    table = rows[:, None] + (nibble_bytes(N) + 4 * group)[None, :]
    mask = row_mask[:, None] & (group * GROUP < N)[None, :]
    if ALIGNED:
        word = (scale_word | (minimum_word << 16)).to(tl.uint32)
        tl.store(table.to(tl.pointer_type(tl.uint32)), word, mask=mask)
    else:
        tl.store(table, (scale_word & 255).to(tl.uint8), mask=mask)
        tl.store(table + 1, (scale_word >> 8).to(tl.uint8), mask=mask)
        tl.store(table + 2, (minimum_word & 255).to(tl.uint8), mask=mask)
        tl.store(table + 3, (minimum_word >> 8).to(tl.uint8), mask=mask)


@triton.jit
def _level(x, base, steps, there):
    """The code of each value, int32; 0 where there is none."""
    code = tl.minimum(tl.maximum((x - base[:, :, None]) * steps[:, :, None], 0.0), 15.0)
    code = (code + ROUNDING) - ROUNDING
    return tl.where(there & (code == code), code, 0.0).to(tl.int32)


def aligned(n: int, address: int = 0) -> bool:
    """Whether tables of rows of n values from `address` on lie at multiples of 4 bytes."""
    return n % 8 in (0, 7) and address % 4 == 0
