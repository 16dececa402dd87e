"""A model's weights in memory, loaded layer by layer from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from batchgen.runtime.checkpoint import Checkpoint


@dataclass(frozen=True)
class ModelWeights:
    """Tensors by name, as `checkpoint.py` names them: before the layers, of each layer, after the layers."""

    embeddings: dict[str, Tensor]
    layers: list[dict[str, Tensor]]
    head: dict[str, Tensor]

    @property
    def num_bytes(self) -> int:
        parts = [self.embeddings, *self.layers, self.head]
        return sum(t.numel() * t.element_size() for part in parts for t in part.values())


def load_weights(
    checkpoint: Checkpoint, dtype: torch.dtype, on_layer: Callable[[int, int], None] | None = None
) -> ModelWeights:
    """Reads every layer in turn; memory peaks about one layer above the result.

    on_layer(done, total) is called after each layer.
    """
    layers = []
    for j in range(checkpoint.config.num_layers):
        layers.append(checkpoint.load_layer(j, dtype))
        if on_layer:
            on_layer(j + 1, checkpoint.config.num_layers)
    return ModelWeights(checkpoint.load_embeddings(dtype), layers, checkpoint.load_head(dtype))
