"""The shapes and dtypes of the operands of attention, which decide what kernels compute it and how plans are cut."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from batchgen.core.dtypes import KVFormat


@dataclass(frozen=True)
class AttentionOperands:
    """Shapes and dtypes of the queries and of the KV of a layer.

    Attributes:
        heads: Number of query heads.
        kv_heads: Number of key and value heads.
        head_dim: Number of values in one head.
        kv_block_size: Number of tokens in a KV block.
        dtype: Dtype of queries.
        kv_format: Format in which the KV is stored.
    """

    heads: int
    kv_heads: int
    head_dim: int
    kv_block_size: int
    dtype: torch.dtype
    kv_format: KVFormat

    @property
    def group(self) -> int:
        """Number of query heads that share a KV head."""
        return self.heads // self.kv_heads
