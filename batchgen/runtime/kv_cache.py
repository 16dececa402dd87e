"""The KV tensors behind the block manager's numbers."""

from __future__ import annotations

import contextlib
import math
import mmap

import torch
from torch import Tensor

from batchgen.model_config import ModelConfig


class KVCache:
    """K and V of every layer, each [num_blocks, kv_heads, block_size, head_dim]."""

    def __init__(self, config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype) -> None:
        shape = (num_blocks, config.num_kv_heads, block_size, config.head_dim)
        self.block_size = block_size
        self.layers: list[tuple[Tensor, Tensor]] = [
            (_untouched_zeros(shape, dtype), _untouched_zeros(shape, dtype)) for _ in range(config.num_layers)
        ]


def _untouched_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros whose pages the kernel provides at first use, so that a generous pool costs nothing until it is
    needed; torch.zeros would write them all. (Zeros, because masked attention still multiplies unused slots.)

    Huge pages where there are any: a page fault costs ten times as long as copying the 4 KiB it is for.
    """
    size_bytes = max(1, math.prod(shape) * dtype.itemsize)
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError, AttributeError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype, count=math.prod(shape)).view(shape)
