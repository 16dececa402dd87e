"""The conversion of stored tensors to the weights that linear layers take.

Two kinds of tensors need it: block-quantized rows, and matrices whose parts are stored in different formats.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from batchgen.core.dtypes import BLOCK_FORMATS
from batchgen.models.layouts import Stored
from batchgen.ops import dispatch as ops
from batchgen.ops.cpp import BlockWeight


def as_weights(stored: Mapping[str, Stored], tensors: Mapping[str, Tensor]) -> dict[str, ops.Weight]:
    """Weights for linear layers, from the stored tensors of a layer, or from those before or after the layers.

    Args:
        stored: Form in which each tensor is stored, by name.
        tensors: The stored tensors, by name.

    Returns:
        Weights by the name that the model's layers use. "qkv.q.weight", "qkv.k.weight" and "qkv.v.weight" become one
            "qkv.weight" with these parts, in the order of `stored`.
    """
    parts: dict[str, list[ops.Weight]] = {}
    for name, tensor in tensors.items():
        kind = stored[name].dtype
        whole = f"{name.split('.')[0]}.{name.rsplit('.', 1)[1]}" if "." in name else name
        parts.setdefault(whole, []).append(BlockWeight(tensor, kind) if kind in BLOCK_FORMATS else tensor)
    return {
        name: weights[0] if len(weights) == 1 else ops.SplitWeight(tuple(weights)) for name, weights in parts.items()
    }
