"""The KV tensors behind the block manager's numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from batchgen.model_config import ModelConfig


class KVCache:
    """K and V of every layer, each [num_blocks, kv_heads, block_size, head_dim].

    Pages are zeroed and touched on first use only, so a generous pool costs no memory until it is needed.
    """

    def __init__(self, config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype) -> None:
        shape = (num_blocks, config.num_kv_heads, block_size, config.head_dim)
        self.block_size = block_size
        self.layers: list[tuple[Tensor, Tensor]] = [
            (torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)) for _ in range(config.num_layers)
        ]
