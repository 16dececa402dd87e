"""Gathering and scattering of rows by an index, in one Triton kernel.

Source or target may be in the host's pinned memory, which the GPU accesses directly. So thousands of small rows take
one launch instead of thousands of copies.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchgen.ops.triton.launch import Launch, power_of_two

# Words that a program has under way at once: 16 KiB where rows are whole multiples of 8 bytes.
_TILE_WORDS = 2048
# By Little's law a PCIe 5.0 x16 link, 64 GB/s with a round trip of some 2 microseconds, is full with 128 KiB under way:
# 8 programs' tiles, and twice as many programs as each loads, then stores. More of them would be no faster, and hold
# multiprocessors that compute kernels beside them need.
PROGRAMS = 16
_TYPES = (torch.int64, torch.int32, torch.int16, torch.uint8)


def gather_rows(target: Tensor, source: Tensor, index: Tensor) -> None:
    """Compute target[i] = source[index[i]] along the first dimension.

    `target` and `source` are contiguous and of one dtype; `index` is int64.
    """
    gather_launch(target, source, index)()


def scatter_rows(target: Tensor, index: Tensor, source: Tensor) -> None:
    """Compute target[index[i]] = source[i] along the first dimension.

    `target` and `source` are contiguous and of one dtype; `index` is int64.
    """
    scatter_launch(target, index, source)()


def gather_launch(target: Tensor, source: Tensor, index: Tensor) -> Launch:
    return _launch(target, source, index, True)


def scatter_launch(target: Tensor, index: Tensor, source: Tensor) -> Launch:
    return _launch(target, source, index, False)


def _launch(target: Tensor, source: Tensor, index: Tensor, gathers: bool) -> Launch:
    assert target.is_contiguous() and source.is_contiguous() and target.dtype == source.dtype
    row_bytes = target[0].nbytes if len(target) else 0
    assert len(index) == len(target if gathers else source) and (not len(index) or source[0].nbytes == row_bytes)
    word = next(t for t in _TYPES if row_bytes % t.itemsize == 0)
    words = row_bytes // word.itemsize
    args = {
        "target": target.view(-1).view(torch.uint8).view(word),
        "source": source.view(-1).view(torch.uint8).view(word),
        "index": index,
        "num_rows": len(index),
        "words": words,
    }
    block = min(_TILE_WORDS, power_of_two(words, 32))
    rows = _TILE_WORDS // block
    constants = {"GATHERS": gathers, "ROWS": rows, "BLOCK": block}
    tiles = triton.cdiv(len(index), rows) * triton.cdiv(words, block)
    return Launch(_copy_rows, (min(PROGRAMS, tiles),), args, constants, warps=8)


@triton.jit(do_not_specialize=["num_rows"])
def _copy_rows(target, source, index, num_rows, words, GATHERS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Kernel: copy tiles of ROWS rows x BLOCK words. Programs take tiles in turn."""
    across = tl.cdiv(words, BLOCK)
    for tile in range(tl.program_id(0), tl.cdiv(num_rows, ROWS) * across, tl.num_programs(0)):
        row = tile // across * ROWS + tl.arange(0, ROWS)
        there = row < num_rows
        other = tl.load(index + row, mask=there, other=0)[:, None] * words
        own = row[:, None].to(tl.int64) * words
        at = (tile % across * BLOCK + tl.arange(0, BLOCK))[None, :]
        mask = there[:, None] & (at < words)
        if GATHERS:
            tl.store(target + own + at, tl.load(source + other + at, mask=mask), mask=mask)
        else:
            tl.store(target + other + at, tl.load(source + own + at, mask=mask), mask=mask)
