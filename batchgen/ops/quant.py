"""4-bit group quantization (FlexGen section 5) of the rows of a matrix: the layout, and a reference in torch.

A row of n values is cut into groups of 64, the last one perhaps shorter. Packed, it is

    [nibbles of group 0, of group 1, ...] [scale, minimum of group 0] [scale, minimum of group 1] ...

A group of g values has h = ceil(g / 2) bytes: byte i holds value i in its low half and value i + h in its high half, so
that unpacking a vector gives two runs. Scales and minimums are little-endian fp16. A value is minimum + q * scale.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from batchgen.core import dtypes as formats
from batchgen.core.dtypes import INT4, INT4_GROUP

_MAX_CODE = 15  # codes are 0 to 15, from a group's minimum to its maximum
_MAX_FP16 = 65504.0
# Ranges that a fit starts from, as parts of a group's own, and its rounds from each.
_NARROWER, _FIT_ROUNDS = (1.0, 0.92, 0.84, 0.76), 3
# Values worked on at a time: for each thread of a CPU, so that intermediate results stay in cache; elsewhere, so that a
# launch has enough to do.
_THREAD_VALUES, _DEVICE_VALUES = 1 << 16, 1 << 24


def row_bytes(n: int) -> int:
    """Bytes of a packed row of `n` values."""
    return formats.row_bytes(n, INT4)


def quantize(x: Tensor, *, importance: Tensor | None = None) -> Tensor:
    """Packs rows of numbers: x [..., n] of any float dtype, on any device -> uint8 [..., row_bytes(n)].

    importance: [n], above zero: scale and minimum are fitted to each group by least squares, each value's error weighted by
    its column's importance. That takes several times as long: for weights, which are packed once. The bound below then
    holds for the weighted mean square of a group's errors.

    With scale = (maximum - minimum) / 15 of its group, a value comes back within scale / 2, plus the rounding of the
    minimum and of 15 scales to fp16 (each at most 2**-10 of its size, or 15 * 2**-25). Groups of one value repeated come
    back at least as close to it as fp16 is. Values beyond fp16's range count as its ends; a NaN spoils its group and nothing else.
    """
    n = x.shape[-1]
    packed = torch.empty(*x.shape[:-1], row_bytes(n), dtype=torch.uint8, device=x.device)
    out, x = packed.view(-1, row_bytes(n)), x.reshape(-1, n)
    table_start = _nibble_bytes(n)
    for rows in _chunks(len(x), n, x.device):
        values = x[rows].float().clamp(-_MAX_FP16, _MAX_FP16)
        tables = []
        for columns, span in _spans(n):
            size = min(INT4_GROUP, n - columns.start)
            weights = None if importance is None else importance[columns].unflatten(0, (-1, size))
            nibbles, table = _pack_groups(values[:, columns].unflatten(1, (-1, size)), weights)
            out[rows, span] = nibbles.flatten(1)
            tables.append(table)
        table = torch.cat(tables, dim=1)  # [rows, groups, 2]
        out[rows, table_start:] = table.view(torch.uint8).flatten(1)
    return packed


def dequantize(packed: Tensor, n: int, out: Tensor | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
    """Dequantize packed rows: uint8 [..., row_bytes(n)] -> [..., n], in `out` if given (its dtype then counts).

    Computed in fp32 and rounded once to the result's dtype; finite in all of them.
    """
    if out is None:
        out = torch.empty(*packed.shape[:-1], n, dtype=dtype, device=packed.device)
    elif not out.is_contiguous():
        return out.copy_(dequantize(packed, n, dtype=out.dtype))
    packed, target = packed.reshape(-1, row_bytes(n)), out.view(-1, n)
    table_start = _nibble_bytes(n)
    for rows in _chunks(len(packed), n, packed.device):
        # A copy, since rows of odd sizes leave the numbers unaligned.
        numbers = packed[rows, table_start:].clone(memory_format=torch.contiguous_format)
        table = numbers.view(torch.float16).float().unflatten(1, (-1, 2))  # [rows, groups, 2]
        for columns, span in _spans(n):
            size = min(INT4_GROUP, n - columns.start)
            groups = slice(columns.start // INT4_GROUP, -(-columns.stop // INT4_GROUP))
            nibbles = packed[rows, span].unflatten(1, (-1, (size + 1) // 2))
            scale, minimum = table[:, groups, :1], table[:, groups, 1:]
            target[rows, columns] = _unpack_groups(nibbles, scale, minimum, size).flatten(1)
    return out


def _pack_groups(x: Tensor, importance: Tensor | None) -> tuple[Tensor, Tensor]:
    """Codes and their scales of whole groups.

    x fp32 [rows, groups, size], importance [groups, size] -> nibbles uint8 [rows, groups, ceil(size / 2)], table fp16 [rows,
    groups, 2].
    """
    size = x.shape[-1]
    low, high = torch.aminmax(x, dim=-1)  # [rows, groups]
    minimum = low.half()
    scale = ((high - minimum.float()) / _MAX_CODE).clamp_(min=0).half()
    # Rounded up at the very end of the range, a scale would take the maximum beyond it: one step down then.
    beyond = minimum.float() + _MAX_CODE * scale.float() > _MAX_FP16
    scale = torch.where(beyond, (scale.view(torch.int16) - 1).view(torch.float16), scale)
    if importance is not None:
        scale, minimum = _fitted(x, importance / importance.sum(-1, keepdim=True), scale, minimum)
    q = _quantized(x, scale, minimum).to(torch.uint8)
    half = (size + 1) // 2
    nibbles = q[..., :half].clone()
    nibbles[..., : size - half] |= q[..., half:] << 4
    return nibbles, torch.stack((scale, minimum), dim=-1)


def _quantized(x: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
    """The code (quantized value) of each value of x [rows, groups, size], as fp32. scale, minimum: fp16 [rows, groups]."""
    # What is left of a group narrower than fp16 can tell is its minimum.
    steps = torch.where(scale > 0, scale.float().reciprocal(), 0.0)
    return x.sub(minimum.float().unsqueeze(-1)).mul_(steps.unsqueeze(-1)).round_().clamp_(0, _MAX_CODE)


def _fitted(x: Tensor, weights: Tensor, scale: Tensor, minimum: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minimums, fp16 [rows, groups], with smaller weighted squared errors than those given, group by group.

    weights: [groups, size], 1 in sum.

    From ranges somewhat narrower than the group's, codes and line are fitted to each other in turn.
    """

    def squared_error(scale: Tensor, minimum: Tensor) -> Tensor:
        back = _quantized(x, scale, minimum).mul_(scale.float().unsqueeze(-1)).add_(minimum.float().unsqueeze(-1))
        return back.sub_(x).square_().mul_(weights).sum(-1)

    best, least = (scale, minimum), squared_error(scale, minimum)
    middle = minimum.float() + scale.float() * (_MAX_CODE / 2)
    mean_x = (weights * x).sum(-1, keepdim=True)
    centred = x - mean_x
    for narrower in _NARROWER:
        tried = (scale.float() * narrower).half(), (middle - scale.float() * (narrower * _MAX_CODE / 2)).half()
        for _ in range(_FIT_ROUNDS):
            q = _quantized(x, *tried)
            mean_q = (weights * q).sum(-1, keepdim=True)
            from_mean = (q - mean_q).mul_(weights)
            spread = (from_mean * q).sum(-1)
            slope = (from_mean * centred).sum(-1) / spread.clamp(min=1e-12)
            start = mean_x.squeeze(-1) - slope * mean_q.squeeze(-1)
            usable = (spread > 1e-6) & (slope > 0) & (start.abs() < _MAX_FP16) & (start + _MAX_CODE * slope < _MAX_FP16)
            tried = (
                torch.where(usable, slope, tried[0].float()).half(),
                torch.where(usable, start, tried[1].float()).half(),
            )
        error = squared_error(*tried)
        better = (error < least) & (tried[1].float() + _MAX_CODE * tried[0].float() <= _MAX_FP16)
        best = torch.where(better, tried[0], best[0]), torch.where(better, tried[1], best[1])
        least = torch.where(better, error, least)
    return best


def _unpack_groups(nibbles: Tensor, scale: Tensor, minimum: Tensor, size: int) -> Tensor:
    """Nibbles uint8 [rows, groups, ceil(size / 2)], scale and minimum fp32 [rows, groups, 1] -> fp32 [rows, groups, size]."""
    half = (size + 1) // 2
    x = torch.empty(*nibbles.shape[:-1], size, dtype=torch.float32, device=nibbles.device)
    x[..., :half] = nibbles & 15
    x[..., half:] = nibbles[..., : size - half] >> 4
    return torch.addcmul(minimum, x, scale, out=x)


def _nibble_bytes(n: int) -> int:
    return n // INT4_GROUP * (INT4_GROUP // 2) + (n % INT4_GROUP + 1) // 2


def _spans(n: int) -> Iterator[tuple[slice, slice]]:
    """(values of a row, their nibbles' bytes): of the whole groups together, and of a shorter last one."""
    whole = n // INT4_GROUP * INT4_GROUP
    if whole:
        yield slice(0, whole), slice(0, whole // 2)
    if whole < n:
        yield slice(whole, n), slice(whole // 2, _nibble_bytes(n))


def _chunks(num_rows: int, n: int, device: torch.device) -> Iterator[slice]:
    values = _THREAD_VALUES * torch.get_num_threads() if device.type == "cpu" else _DEVICE_VALUES
    step = max(1, values // n)
    return (slice(start, min(num_rows, start + step)) for start in range(0, num_rows, step))
