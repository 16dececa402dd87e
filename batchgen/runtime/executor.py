"""Runs one packed sweep through all layers and returns the logits it asks for.

This is the plain serial order: everything in memory, one layer after the other. It is the reference that
overlapped schedules are held to.
"""

from __future__ import annotations

import torch
from torch import Tensor

from batchgen import ops
from batchgen.model_config import ModelConfig
from batchgen.runtime import layers
from batchgen.runtime.batch import PackedBatch
from batchgen.runtime.kv_cache import KVCache
from batchgen.runtime.weights import ModelWeights


class Executor:
    """A model and its KV, ready to run sweeps. Not for use from several threads at once."""

    def __init__(self, config: ModelConfig, weights: ModelWeights, kv_cache: KVCache, max_positions: int) -> None:
        """max_positions: sequences never get longer than this."""
        self.config = config
        self.weights = weights
        self.kv_cache = kv_cache
        self._rope = layers.rope_table(config, max_positions) if config.rope else None

    @torch.inference_mode()
    def run(self, batch: PackedBatch) -> Tensor:
        """Computes the batch's KV in place; returns fp32 logits [len(batch.sampled), vocab]."""
        config, kv_cache, weights = self.config, self.kv_cache, self.weights
        positions = torch.from_numpy(batch.positions)
        cos = sin = None
        if self._rope:
            cos, sin = (table[positions].unsqueeze(1) for table in self._rope)
        rows = ops.kv_rows(batch.slots, config.num_kv_heads, kv_cache.block_size)
        hidden = layers.embed(config, weights.embeddings, torch.from_numpy(batch.token_ids), positions)
        plans = {
            window: ops.prepare_attention(plan, config.num_kv_heads, kv_cache.block_size, hidden.dtype)
            for window, plan in batch.plans.items()
        }
        for layer, (k_cache, v_cache), window in zip(weights.layers, kv_cache.layers, config.windows, strict=True):
            q, k, v = layers.pre_attention(config, layer, hidden, cos, sin)
            ops.write_kv(k_cache, v_cache, rows, k, v)
            attention = ops.paged_attention(q, k_cache, v_cache, plans[window])
            hidden = layers.post_attention(config, layer, hidden, attention)
        last = hidden[torch.from_numpy(batch.sampled_rows)]
        return layers.logits(config, weights.head, weights.embeddings, last)
