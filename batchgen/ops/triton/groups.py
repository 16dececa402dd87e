"""Packing and unpacking of group-quantized rows (batchgen/ops/quant.py) in a kernel's registers.

A row of N values in 4 or 5 bits is held as two tensors [.., groups, 32], for low and high nibbles. Byte i of group g
has value 64 g + i in its low nibble and value 64 g + half + i in its high nibble. `half` is 32, or less in a shorter
last group. The number of groups is padded to a power of two. A row in 8 bits is held as one tensor.
"""

from __future__ import annotations

import triton
import triton.language as tl

from batchgen.core.dtypes import code_bytes

GROUP = tl.constexpr(64)
HALF = tl.constexpr(32)
MAX_FP16 = tl.constexpr(65504.0)
# Added and taken away again, it rounds numbers below 2**22 to the nearest integer, ties to even.
ROUNDING = tl.constexpr(12582912.0)
# A float whose last bits count in ones, and its bits.
INTEGER = tl.constexpr(8388608.0)
INTEGER_BITS = tl.constexpr(0x4B000000)


@triton.jit
def columns(group, i, N: tl.constexpr):
    """Columns of the values in the low and in the high nibbles of bytes of groups, with masks.

    Args:
        group: Numbers of groups.
        i: Numbers of bytes in a group, of a shape that broadcasts with `group`.
        N: Number of values in a row.

    Returns:
        Columns of low nibbles; columns of high nibbles; masks of the low and of the high nibbles that have a value.
    """
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
    """The result of `columns` for all bytes of GROUPS groups from first_group on, [GROUPS, 32] each."""
    return columns((first_group + tl.arange(0, GROUPS))[:, None], tl.arange(0, HALF)[None, :], N)


@triton.jit
def flat_columns(first_group, N: tl.constexpr, GROUPS: tl.constexpr):
    """The result of `columns` for all bytes of GROUPS groups from first_group on, [GROUPS * 32] each."""
    byte = tl.arange(0, GROUPS * HALF)
    return columns(first_group + byte // HALF, byte % HALF, N)


@triton.jit
def fifth_bits(group, i, N: tl.constexpr):
    """Offsets in a row of bytes i of the fifth bits of 5-bit groups, for low and high halves, and their mask."""
    half = (tl.minimum(GROUP, N - group * GROUP) + 1) // 2
    count = (half + 7) // 8
    low = group * 40 + half + i
    return low, low + count, i < count


@triton.jit
def table_start(N: tl.constexpr, BITS: tl.constexpr):
    """Offset in bytes, in a packed row, of the table with the scale and minimum of each group.

    Args:
        N: Number of values in the row.
        BITS: Bits of a value, 4 or 5.
    """
    half = (N % 64 + 1) // 2
    return N // 64 * (BITS * 8) + half + (2 * ((half + 7) // 8) if BITS == 5 else 0)


@triton.jit
def load_table(table, mask, ALIGNED: tl.constexpr):
    """Load scales and minimums, as fp32, from the pointers `table`.

    ALIGNED means that the pointers are multiples of 4 bytes.
    """
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
def unpack(
    rows, row_mask, first_group, N: tl.constexpr, GROUPS: tl.constexpr, BITS: tl.constexpr, ALIGNED: tl.constexpr
):
    """Dequantize packed rows of 4 or 5 bits.

    Args:
        rows: Pointers to the rows, [R].
        row_mask: Mask of the rows to load, [R].
        first_group: Number of the first group to load.
        N: Number of values in a row.
        GROUPS: Number of groups to load.
        BITS: Bits of a value, 4 or 5.
        ALIGNED: Whether tables of scales are at multiples of 4 bytes.

    Returns:
        Values of the low and of the high nibbles, fp32 [R, GROUPS, 32] each; 0 in rows that are masked and after the
            last group.
    """
    group = first_group + tl.arange(0, GROUPS)
    _, _, low_there, _ = tile_columns(first_group, N, GROUPS)
    i = tl.arange(0, HALF)[None, :]
    bytes_at = group[:, None] * (BITS * 8) + i
    mask = row_mask[:, None, None] & low_there[None, :, :]
    byte = tl.load(rows[:, None, None] + bytes_at[None, :, :], mask=mask, other=0)
    low_code, high_code = byte & 15, byte >> 4
    if BITS == 5:
        low_at, high_at, _ = fifth_bits(group[:, None], i // 8, N)
        low_bits = tl.load(rows[:, None, None] + low_at[None, :, :], mask=mask, other=0)
        high_bits = tl.load(rows[:, None, None] + high_at[None, :, :], mask=mask, other=0)
        place = (i % 8)[None, :, :].to(tl.uint8)
        low_code |= ((low_bits >> place) & 1) << 4
        high_code |= ((high_bits >> place) & 1) << 4
    table = rows[:, None] + (table_start(N, BITS) + 4 * group)[None, :]
    scale, minimum = load_table(table, row_mask[:, None] & (group * GROUP < N)[None, :], ALIGNED)
    low = low_code.to(tl.float32) * scale[:, :, None] + minimum[:, :, None]
    high = high_code.to(tl.float32) * scale[:, :, None] + minimum[:, :, None]
    return low, high


@triton.jit
def unpack_flat(rows, row_mask, first_group, N: tl.constexpr, GROUPS: tl.constexpr, ALIGNED: tl.constexpr):
    """Dequantize packed rows of 4 bits, with the bytes of all groups side by side, for matrix products.

    A code becomes the last bits of a float, since converting integers to floats has a fraction of the rate of sums.

    Args:
        rows: Pointers to the rows, [R].
        row_mask: Mask of the rows to load, [R].
        first_group: Number of the first group to load.
        N: Number of values in a row.
        GROUPS: Number of groups to load.
        ALIGNED: Whether tables of scales are at multiples of 4 bytes.

    Returns:
        Values of the low and of the high nibbles, fp32 [R, GROUPS * 32] each, in the columns of `flat_columns`; 0 in
            rows that are masked and after the last group.
    """
    group = first_group + tl.arange(0, GROUPS)
    byte = first_group * HALF + tl.arange(0, GROUPS * HALF)
    mask, table_mask = row_mask[:, None], row_mask[:, None]
    if N % (GROUPS * 64):
        _, _, byte_there, _ = flat_columns(first_group, N, GROUPS)
        mask = mask & byte_there[None, :]
        table_mask = table_mask & (group * GROUP < N)[None, :]
    code = tl.load(rows[:, None] + byte[None, :], mask=mask, other=0).to(tl.int32)
    scale, minimum = load_table(rows[:, None] + (table_start(N, 4) + 4 * group)[None, :], table_mask, ALIGNED)
    shape: tl.constexpr = (rows.shape[0], GROUPS, HALF)
    scale = tl.reshape(tl.broadcast_to(scale[:, :, None], shape), code.shape)
    minimum = tl.reshape(tl.broadcast_to(minimum[:, :, None], shape), code.shape)
    low = ((code & 15) | INTEGER_BITS).to(tl.float32, bitcast=True) - INTEGER
    high = ((code >> 4) | INTEGER_BITS).to(tl.float32, bitcast=True) - INTEGER
    return low * scale + minimum, high * scale + minimum


@triton.jit
def pack(  # a kernel takes pointers and scalars only
    low,
    high,
    rows,
    row_mask,
    first_group,
    N: tl.constexpr,
    GROUPS: tl.constexpr,
    BITS: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Quantize values to 4 or 5 bits, and store them as packed rows.

    Args:
        low: Values of the low nibbles, fp32 [R, GROUPS, 32].
        high: Values of the high nibbles, fp32 [R, GROUPS, 32].
        rows: Pointers to the rows, [R].
        row_mask: Mask of the rows to store, [R].
        first_group: Number of the first group to store.
        N: Number of values in a row.
        GROUPS: Number of groups to store.
        BITS: Bits of a value, 4 or 5.
        ALIGNED: Whether tables of scales are at multiples of 4 bytes.
    """
    group = first_group + tl.arange(0, GROUPS)
    _, _, low_there, high_there = tile_columns(first_group, N, GROUPS)
    low_there, high_there = low_there[None, :, :], high_there[None, :, :]
    odd = (low_there & (low != low)) | (high_there & (high != high))
    spoilt = tl.max(odd.to(tl.int32), 2) > 0
    low = tl.minimum(tl.maximum(low, -MAX_FP16), MAX_FP16)
    high = tl.minimum(tl.maximum(high, -MAX_FP16), MAX_FP16)
    least = tl.minimum(tl.min(tl.where(low_there, low, MAX_FP16), 2), tl.min(tl.where(high_there, high, MAX_FP16), 2))
    most = tl.maximum(tl.max(tl.where(low_there, low, -MAX_FP16), 2), tl.max(tl.where(high_there, high, -MAX_FP16), 2))
    most_code: tl.constexpr = 31.0 if BITS == 5 else 15.0
    base, steps, scale_word, minimum_word = _table_of(least, most, spoilt, most_code)
    low_code = tl.where(low_there, _code(low, base[:, :, None], steps[:, :, None], most_code), 0)
    high_code = tl.where(high_there, _code(high, base[:, :, None], steps[:, :, None], most_code), 0)
    if BITS == 5:
        byte = tl.arange(0, 4)
        low_at, high_at, bits_there = fifth_bits(group[:, None], byte[None, :], N)
        mask = row_mask[:, None, None] & (bits_there & (group * GROUP < N)[:, None])[None, :, :]
        tl.store(rows[:, None, None] + low_at[None, :, :], _joined(low_code >> 4), mask=mask)
        tl.store(rows[:, None, None] + high_at[None, :, :], _joined(high_code >> 4), mask=mask)
        low_code, high_code = low_code & 15, high_code & 15
    bytes_at = group[:, None] * (BITS * 8) + tl.arange(0, HALF)[None, :]
    tl.store(
        rows[:, None, None] + bytes_at[None, :, :],
        (low_code | (high_code << 4)).to(tl.uint8),
        mask=row_mask[:, None, None] & low_there,
    )
    table = rows[:, None] + (table_start(N, BITS) + 4 * group)[None, :]
    _store_table(table, scale_word, minimum_word, row_mask[:, None] & (group * GROUP < N)[None, :], ALIGNED)


@triton.jit
def _joined(bits):
    """Pack bits [R, G, 32], each 0 or 1, into bytes [R, G, 4], the lowest bit first."""
    eights = tl.reshape(bits, (bits.shape[0], bits.shape[1], 4, 8))
    return tl.sum(eights << tl.arange(0, 8)[None, None, None, :], 3).to(tl.uint8)


@triton.jit
def unpack_bytes(rows, row_mask, N: tl.constexpr, GROUPS: tl.constexpr, ALIGNED: tl.constexpr):
    """Dequantize packed rows of 8 bits at pointers `rows` [R], to fp32 [R, GROUPS * 64]; 0 after the end of a row."""
    group = tl.arange(0, GROUPS)
    column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    there = row_mask[:, None, None] & (column < N)[None, :, :]
    code = tl.load(rows[:, None, None] + column[None, :, :], mask=there, other=0).to(tl.float32)
    table = rows[:, None] + (N + 4 * group)[None, :]
    scale, minimum = load_table(table, row_mask[:, None] & (group * GROUP < N)[None, :], ALIGNED)
    values = code * scale[:, :, None] + minimum[:, :, None]
    return tl.reshape(values, (rows.shape[0], GROUPS * GROUP))


@triton.jit
def pack_halves(first, second, rows, row_mask, N: tl.constexpr, GROUPS: tl.constexpr, ALIGNED: tl.constexpr):
    """Quantize values to 8 bits, and store them as packed rows at pointers `rows` [R].

    `first` and `second` are the first and the second half of each row of N values: fp32 [R, at least N / 2].
    """
    column = tl.arange(0, first.shape[1])[None, :]
    inside = column < N // 2
    odd_first, odd_second = first != first, second != second
    first = tl.minimum(tl.maximum(first, -MAX_FP16), MAX_FP16)
    second = tl.minimum(tl.maximum(second, -MAX_FP16), MAX_FP16)
    first_code = tl.zeros(first.shape, tl.int32)
    second_code = tl.zeros(first.shape, tl.int32)
    for group in tl.static_range(GROUPS):
        in_first = inside & (column // GROUP == group)
        in_second = inside & ((N // 2 + column) // GROUP == group)
        least = tl.minimum(
            tl.min(tl.where(in_first, first, MAX_FP16), 1), tl.min(tl.where(in_second, second, MAX_FP16), 1)
        )
        most = tl.maximum(
            tl.max(tl.where(in_first, first, -MAX_FP16), 1), tl.max(tl.where(in_second, second, -MAX_FP16), 1)
        )
        spoilt = tl.max(((in_first & odd_first) | (in_second & odd_second)).to(tl.int32), 1) > 0
        base, steps, scale_word, minimum_word = _table_of(least, most, spoilt, 255.0)
        first_code = tl.where(in_first, _code(first, base[:, None], steps[:, None], 255.0), first_code)
        second_code = tl.where(in_second, _code(second, base[:, None], steps[:, None], 255.0), second_code)
        table_mask = row_mask & (group * GROUP < N)
        _store_table(rows + N + 4 * group, scale_word, minimum_word, table_mask, ALIGNED)
    mask = row_mask[:, None] & inside
    tl.store(rows[:, None] + column, first_code.to(tl.uint8), mask=mask)
    tl.store(rows[:, None] + N // 2 + column, second_code.to(tl.uint8), mask=mask)


@triton.jit
def _table_of(least, most, spoilt, MOST_CODE: tl.constexpr):
    """Minimums, codes per unit, and the 16-bit words of scale and minimum to store, from the ranges of groups."""
    minimum = least.to(tl.float16)
    base = minimum.to(tl.float32)
    scale = tl.maximum(tl.div_rn(most - base, MOST_CODE), 0.0).to(tl.float16)
    # Rounded up at the very end of the range, a scale would take the maximum beyond it: one step down then.
    bits = scale.to(tl.uint16, bitcast=True)
    bits = tl.where(base + MOST_CODE * scale.to(tl.float32) > MAX_FP16, bits - 1, bits).to(tl.uint16)
    step = bits.to(tl.float16, bitcast=True).to(tl.float32)
    # What is left of a group narrower than fp16 can tell is its minimum.
    steps = tl.where(step > 0, tl.div_rn(1.0, tl.where(step > 0, step, 1.0)), 0.0)
    # A group with a NaN comes back as NaN.
    scale_word = tl.where(spoilt, 0x7E00, bits.to(tl.uint32))
    minimum_word = tl.where(spoilt, 0x7E00, minimum.to(tl.uint16, bitcast=True).to(tl.uint32))
    return base, steps, scale_word, minimum_word


@triton.jit
def _store_table(table, scale_word, minimum_word, mask, ALIGNED: tl.constexpr):
    """Store the words of scales and minimums at the pointers `table`.

    ALIGNED means that the pointers are multiples of 4 bytes.
    """
    if ALIGNED:
        word = (scale_word | (minimum_word << 16)).to(tl.uint32)
        tl.store(table.to(tl.pointer_type(tl.uint32)), word, mask=mask)
    else:
        tl.store(table, (scale_word & 255).to(tl.uint8), mask=mask)
        tl.store(table + 1, (scale_word >> 8).to(tl.uint8), mask=mask)
        tl.store(table + 2, (minimum_word & 255).to(tl.uint8), mask=mask)
        tl.store(table + 3, (minimum_word >> 8).to(tl.uint8), mask=mask)


@triton.jit
def _code(x, base, steps, MOST_CODE: tl.constexpr):
    """The code of each value, int32; 0 for a NaN."""
    code = tl.minimum(tl.maximum((x - base) * steps, 0.0), MOST_CODE)
    code = (code + ROUNDING) - ROUNDING
    return tl.where(code == code, code, 0.0).to(tl.int32)


def aligned(n: int, bits: int, address: int = 0) -> bool:
    """Tell whether the tables of scales of packed rows are at multiples of 4 bytes, or rows are not packed.

    Args:
        n: Number of values in a row.
        bits: Bits of a value. 0: rows are not packed.
        address: Address of the first row.
    """
    return bits == 0 or (code_bytes(n, bits) % 4 == 0 and address % 4 == 0)
