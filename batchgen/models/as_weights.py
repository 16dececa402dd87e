"""Weights that linear layers take, from tensors as they are stored.

They are block-quantized rows, and matrices whose parts are in different formats.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from batchgen.core.dtypes import BLOCK_FORMATS
from batchgen.models.layouts import Stored
from batchgen.ops import dispatch as ops
from batchgen.ops.cpp import BlockWeight


def as_weights(stored: Mapping[str, Stored], tensors: Mapping[str, Tensor]) -> dict[str, ops.Weight]:
    """Tensors of a layer, or of those before and after, under the names that the model's layers use.

    Args:
        stored: Form in which each is stored. "qkv.q.weight", "qkv.k.weight" and "qkv.v.weight" become one "qkv.weight",
            in this order.
        tensors: The tensors by name.
    """
    parts: dict[str, list[ops.Weight]] = {}
    for name, tensor in tensors.items():
        kind = stored[name].dtype
        stem, suffix = name.split(".")[0], name.rsplit(".", 1)[1]
        parts.setdefault(f"{stem}.{suffix}", []).append(BlockWeight(tensor, kind) if kind in BLOCK_FORMATS else tensor)
    return {
        name: weights[0] if len(weights) == 1 else ops.SplitWeight(tuple(weights)) for name, weights in parts.items()
    }
