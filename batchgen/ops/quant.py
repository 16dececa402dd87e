"""Group quantization (FlexGen, section 5) of rows to 4, 5 or 8 bits: the layout, and a reference in torch.

A row of n values is cut into groups of 64 values; the last group may be shorter. A packed row is

    [codes of group 0, of group 1, ...] [scale, minimum of group 0] [scale, minimum of group 1] ...

A value is minimum + code * scale. Scales and minimums are little-endian fp16. The codes of a group of g values are
packed as follows.

With 4 bits there are h = ceil(g / 2) bytes. Byte i has value i in its low half and value i + h in its high half, so
that unpacking a vector gives two contiguous ranges.

With 5 bits, the lower four bits of each code are packed as with 4 bits. The fifth bits follow, lowest bit first: ceil(h
/ 8) bytes for the first h values, and as many bytes for the other values.

With 8 bits, byte i has value i.

Weights have codes of 4 bits. KV has the bits of its `KVFormat`. Tensors of packed rows are uint8 for all numbers of
bits.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from batchgen.core import dtypes as formats
from batchgen.core.dtypes import CODE_GROUP, WEIGHT_CODE_BITS, code_bytes

_MAX_FP16 = 65504.0
# Ranges that a fit starts from, as parts of a group's own, and its rounds from each.
_NARROWER, _FIT_ROUNDS = (1.0, 0.92, 0.84, 0.76), 3
# Values worked on at a time: for each thread of a CPU, so that intermediate results stay in cache; elsewhere, so that a
# launch has enough to do.
_THREAD_VALUES, _DEVICE_VALUES = 1 << 16, 1 << 24


def row_bytes(n: int, bits: int = WEIGHT_CODE_BITS) -> int:
    """Bytes of a packed row of `n` values with `bits` bits for each."""
    return formats.packed_bytes(n, bits)


def quantize(x: Tensor, bits: int = WEIGHT_CODE_BITS, *, importance: Tensor | None = None) -> Tensor:
    """Quantize rows of numbers in groups, and pack them.

    With scale = (maximum - minimum) / m in a group, where m = 2**bits - 1 is the largest code, a value is reproduced
    within scale / 2, plus the errors of rounding the minimum and m * scale to fp16 (each at most 2**-10 of its size, or
    m * 2**-25). A group that repeats one value reproduces it at least as precisely as fp16 does. Values beyond the
    range of fp16 are limited to it. A NaN makes only its own group NaN.

    Args:
        x: Numbers [..., n] of any float dtype, on any device.
        bits: Bits of a code: 4, 5 or 8.
        importance: Importance of each column, [n] and above zero. Then each group's scale and minimum are fitted by
            least squares, with errors weighted by importance. This takes several times as long, and is for weights,
            which are quantized once. The bound above then holds for the weighted mean square of a group's errors. None:
            no fit.

    Returns:
        Packed rows, uint8 [..., row_bytes(n, bits)].
    """
    n = x.shape[-1]
    width = row_bytes(n, bits)
    packed = torch.empty(*x.shape[:-1], width, dtype=torch.uint8, device=x.device)
    out, x = packed.view(-1, width), x.reshape(-1, n)
    table_start = code_bytes(n, bits)
    shares = None if importance is None else error_shares(importance)
    for rows in _chunks(len(x), n, x.device):
        values = x[rows].float().clamp(-_MAX_FP16, _MAX_FP16)
        tables = []
        for columns, span in _spans(n, bits):
            size = min(CODE_GROUP, n - columns.start)
            some_shares = None if shares is None else shares[columns].unflatten(0, (-1, size))
            codes, table = _pack_groups(values[:, columns].unflatten(1, (-1, size)), bits, some_shares)
            out[rows, span] = codes.flatten(1)
            tables.append(table)
        table = torch.cat(tables, dim=1)  # [rows, groups, 2]
        out[rows, table_start:] = table.view(torch.uint8).flatten(1)
    return packed


def error_shares(importance: Tensor) -> Tensor:
    """Part of each column's squared error in the whole of its group: importance [n], divided by its sum in the group.

    Args:
        importance: Importance of each column, [n] and above zero.

    Returns:
        Shares, fp32 [n].
    """
    return torch.cat([group / group.sum() for group in importance.float().split(CODE_GROUP)])


def dequantize(
    packed: Tensor,
    n: int,
    out: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    bits: int = WEIGHT_CODE_BITS,
) -> Tensor:
    """Dequantize packed rows.

    The computation is in fp32 and rounds once to the result's dtype. A NaN makes only its group NaN.

    Args:
        packed: Packed rows, uint8 [..., row_bytes(n, bits)].
        n: Number of values in a row.
        out: Tensor for the numbers, [..., n]. None: a new tensor.
        dtype: Dtype of a new tensor.
        bits: Bits of a code.

    Returns:
        Numbers [..., n].
    """
    if out is None:
        out = torch.empty(*packed.shape[:-1], n, dtype=dtype, device=packed.device)
    elif not out.is_contiguous():
        return out.copy_(dequantize(packed, n, dtype=out.dtype, bits=bits))
    packed, target = packed.reshape(-1, packed.shape[-1]), out.view(-1, n)
    table_start = code_bytes(n, bits)
    for rows in _chunks(len(packed), n, packed.device):
        # A copy, since rows of odd sizes leave the numbers unaligned.
        numbers = packed[rows, table_start:].clone(memory_format=torch.contiguous_format)
        table = numbers.view(torch.float16).float().unflatten(1, (-1, 2))  # [rows, groups, 2]
        for columns, span in _spans(n, bits):
            size = min(CODE_GROUP, n - columns.start)
            groups = slice(columns.start // CODE_GROUP, -(-columns.stop // CODE_GROUP))
            codes = packed[rows, span].unflatten(1, (-1, code_bytes(size, bits)))
            scale, minimum = table[:, groups, :1], table[:, groups, 1:]
            target[rows, columns] = _unpack_groups(codes, bits, scale, minimum, size).flatten(1)
    return out


def _pack_groups(x: Tensor, bits: int, shares: Tensor | None) -> tuple[Tensor, Tensor]:
    """Quantize groups of equal size.

    Args:
        x: Numbers, fp32 [rows, groups, size].
        bits: Bits of a code.
        shares: Part of each column's squared error in the whole, [groups, size]; or None: no fit.

    Returns:
        Packed codes, uint8 [rows, groups, code_bytes(size, bits)]; scales and minimums, fp16 [rows, groups, 2].
    """
    most = 2**bits - 1
    spoilt = x.isnan().any(-1)  # [rows, groups]
    x = x.masked_fill(spoilt.unsqueeze(-1), 0.0)
    low, high = (end + 0.0 for end in torch.aminmax(x, dim=-1))  # of both zeros the positive one
    minimum = low.half()
    scale = ((high - minimum.float()) / most).clamp_(min=0).half()
    # Rounded up at the very end of the range, a scale would take the maximum beyond it: one step down then.
    beyond = minimum.float() + most * scale.float() > _MAX_FP16
    scale = torch.where(beyond, (scale.view(torch.int16) - 1).view(torch.float16), scale)
    if shares is not None:
        scale, minimum = _fitted(x, shares, scale, minimum, most)
    codes = _quantized(x, scale, minimum, most).to(torch.uint8)
    table = torch.stack((scale, minimum), dim=-1).masked_fill_(spoilt.unsqueeze(-1), torch.nan)
    return _joined(codes, bits), table


def _joined(codes: Tensor, bits: int) -> Tensor:
    """Pack the codes of groups: uint8 [rows, groups, size] to uint8 [rows, groups, code_bytes(size, bits)]."""
    if bits == 8:
        return codes
    size = codes.shape[-1]
    half = (size + 1) // 2
    nibbles = codes[..., :half] & 15
    nibbles[..., : size - half] |= codes[..., half:] << 4
    if bits == 4:
        return nibbles
    whole = half + -half % 8
    halves = [F.pad(part >> 4, (0, whole - part.shape[-1])) for part in (codes[..., :half], codes[..., half:])]
    places = _bit_places(codes.device)
    fifth = [(part.unflatten(-1, (-1, 8)) << places).sum(-1, dtype=torch.uint8) for part in halves]
    return torch.cat((nibbles, *fifth), -1)


def _bit_places(device: torch.device) -> Tensor:
    """The places of bits in a byte, uint8 [8], made on the device: the host would wait for a copy."""
    return torch.arange(8, dtype=torch.uint8, device=device)


def _apart(stored: Tensor, bits: int, size: int) -> Tensor:
    """Unpack the codes of groups, from uint8 [rows, groups, code_bytes(size, bits)] to uint8 [rows, groups, size]."""
    if bits == 8:
        return stored
    half = (size + 1) // 2
    nibbles = stored[..., :half]
    codes = torch.cat((nibbles & 15, nibbles[..., : size - half] >> 4), -1)
    if bits == 4:
        return codes
    places = _bit_places(stored.device)
    low, high = ((part.unsqueeze(-1) >> places & 1).flatten(-2) for part in stored[..., half:].chunk(2, -1))
    return codes | torch.cat((low[..., :half], high[..., : size - half]), -1) << 4


def _quantized(x: Tensor, scale: Tensor, minimum: Tensor, most: int) -> Tensor:
    """The code, 0 to `most`, of each value of x [rows, groups, size], as fp32.

    Args:
        x: Numbers, fp32 [rows, groups, size].
        scale, minimum: Scales and minimums, fp16 [rows, groups].
        most: The largest code.
    """
    return x.sub(minimum.float().unsqueeze(-1)).mul_(_steps(scale).unsqueeze(-1)).clamp_(0, most).round_()


def _steps(scale: Tensor) -> Tensor:
    """Codes that a value is wide, fp32: 1 / scale, or 0 in a group that is narrower than fp16 can tell."""
    return torch.where(scale > 0, scale.float().reciprocal(), 0.0)


def _sum(terms: Tensor) -> Tensor:
    """Sums over the last dimension, one term after the other in fp32, so that the kernels get the same bits."""
    return functools.reduce(torch.add, terms.unbind(-1))


def _fitted(x: Tensor, shares: Tensor, scale: Tensor, minimum: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Scales and minimums, fp16 [rows, groups], whose weighted squared error is at most that of the given ones.

    The search begins with ranges somewhat narrower than the group's range. Then it alternates: codes are computed for
    the scale and minimum, and scale and minimum are fitted to the codes by least squares.

    Args:
        x: Numbers, fp32 [rows, groups, size].
        shares: Part of each column's squared error in the whole, [groups, size]; their sum in a group is 1.
        scale, minimum: Scales and minimums to improve, fp16 [rows, groups].
        most: The largest code.
    """

    def squared_error(scale: Tensor, minimum: Tensor) -> Tensor:
        back = _quantized(x, scale, minimum, most).mul_(scale.float().unsqueeze(-1)).add_(minimum.float().unsqueeze(-1))
        return _sum(back.sub_(x).square_().mul_(shares))

    best, least = (scale, minimum), squared_error(scale, minimum)
    middle = minimum.float() + scale.float() * (most / 2)
    mean = _sum(shares * x)
    centred = x - mean.unsqueeze(-1)
    for narrower in _NARROWER:
        tried = (scale.float() * narrower).half(), (middle - scale.float() * (narrower * most / 2)).half()
        for _ in range(_FIT_ROUNDS):
            tried = _refitted(x, centred, mean, shares, tried, most)
        error = squared_error(*tried)
        better = (error < least) & (tried[1].float() + most * tried[0].float() <= _MAX_FP16)
        best = torch.where(better, tried[0], best[0]), torch.where(better, tried[1], best[1])
        least = torch.where(better, error, least)
    return best


def _refitted(
    x: Tensor, centred: Tensor, mean: Tensor, shares: Tensor, tried: tuple[Tensor, Tensor], most: int
) -> tuple[Tensor, Tensor]:
    """Scales and minimums by least squares for the codes that other scales and minimums give.

    A group keeps its scale and minimum if it has no usable fit, such as if all its codes are equal.

    Args:
        x: Numbers, fp32 [rows, groups, size].
        centred: Numbers less the weighted mean of their group.
        mean: Weighted means, fp32 [rows, groups].
        shares: Part of each column's squared error in the whole, [groups, size].
        tried: Scales and minimums whose codes are taken, fp16 [rows, groups].
        most: The largest code.
    """
    scale, minimum = tried
    middle = (mean - minimum.float()) * _steps(scale)  # the mean as a code: sums of codes less it lose no digits
    codes = _quantized(x, scale, minimum, most).sub_(middle.unsqueeze(-1))
    parts = shares * codes
    total, spread = _sum(parts), _sum(parts * codes)
    spread = spread - total * total
    slope = _sum(parts * centred) / spread.clamp(min=1e-12)
    start = mean - slope * (total + middle)
    usable = (spread > 1e-6) & (slope > 0) & (start.abs() < _MAX_FP16) & (start + most * slope < _MAX_FP16)
    return (
        torch.where(usable, slope, scale.float()).half(),
        torch.where(usable, start, minimum.float()).half(),
    )


def _unpack_groups(codes: Tensor, bits: int, scale: Tensor, minimum: Tensor, size: int) -> Tensor:
    """Dequantize the packed codes of groups of equal size, to fp32 [rows, groups, size].

    Args:
        codes: Packed codes, uint8 [rows, groups, code_bytes(size, bits)].
        bits: Bits of a code.
        scale, minimum: Scales and minimums, fp32 [rows, groups, 1].
        size: Number of values in a group.
    """
    x = _apart(codes, bits, size).float()
    return torch.addcmul(minimum, x, scale, out=x)


def _spans(n: int, bits: int) -> Iterator[tuple[slice, slice]]:
    """The columns of all whole groups, and of a shorter last group, each with the bytes of their codes."""
    whole = n // CODE_GROUP * CODE_GROUP
    if whole:
        yield slice(0, whole), slice(0, code_bytes(whole, bits))
    if whole < n:
        yield slice(whole, n), slice(code_bytes(whole, bits), code_bytes(n, bits))


def _chunks(num_rows: int, n: int, device: torch.device) -> Iterator[slice]:
    values = _THREAD_VALUES * torch.get_num_threads() if device.type == "cpu" else _DEVICE_VALUES
    step = max(1, values // n)
    return (slice(start, min(num_rows, start + step)) for start in range(0, num_rows, step))
