"""Rows taken from and put to places that an index gives; either side may be pinned memory of the host, which the card reads
and writes itself: thousands of small rows in one launch, where copies would be thousands of calls."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchgen.triton_kernels.launch import Launch, power_of_two

_WORDS = 2048  # of a row that a program copies
_TYPES = (torch.int64, torch.int32, torch.int16, torch.uint8)


def gather_rows(target: Tensor, source: Tensor, index: Tensor) -> None:
    """target[i] = source[index[i]], along the first dimension, both contiguous and of one dtype. index: int64."""
    gather_launch(target, source, index)()


def scatter_rows(target: Tensor, index: Tensor, source: Tensor) -> None:
    """target[index[i]] = source[i], along the first dimension, both contiguous and of one dtype. index: int64."""
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
        "words": words,
    }
    block = min(_WORDS, power_of_two(words, 32))
    constants = {"GATHERS": gathers, "BLOCK": block}
    return Launch(
        _copy_rows, (len(index), triton.cdiv(words, block)), args, constants, warps=max(1, min(8, block // 128))
    )


@triton.jit
def _copy_rows(target, source, index, words, GATHERS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    other = tl.load(index + row)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if GATHERS:
        tl.store(target + row * words + at, tl.load(source + other * words + at, mask=at < words), mask=at < words)
    else:
        tl.store(target + other * words + at, tl.load(source + row * words + at, mask=at < words), mask=at < words)
