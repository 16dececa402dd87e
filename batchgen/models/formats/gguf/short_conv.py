"""Gated short convolutions of LFM2 in a GGUF: the names of their tensors, and their shape."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from batchgen.core.errors import InputError
from batchgen.models.state_layers import ShortConv
from batchgen.models.stated_numbers import require_positive
from batchgen.models.tensor_files.headers import TensorInfo

# Role of a matrix (`layouts.role`) -> its name in a layer.
SHORT_CONV_MATRICES = {"in_bcx": "shortconv.in_proj", "conv_out": "shortconv.out_proj"}
# Part of a layout, without its suffix -> its name in a layer.
SHORT_CONV_VECTORS = {"short_conv": "shortconv.conv"}
# Part of a layout -> its name in a layer with its suffix, where it has another one.
SHORT_CONV_SUFFIXES = {"feed_forward.expert_bias": "exp_probs_b.bias"}
FINAL_NORM = "token_embd_norm"  # name of the norm after the last layer


def read_short_convs(
    fields: Mapping[str, Any], tensors: Mapping[str, TensorInfo], layers: int, hidden: int
) -> dict[str, Any]:
    """The fields of a ModelConfig that describe its state layers, and its key and value heads.

    Args:
        fields: Key-value pairs of the architecture. `attention.head_count_kv` has a number for each layer, 0 for a
            layer with a convolution.
        tensors: Tensors of the file, which show the layers that have a convolution.
        layers: Number of layers.
        hidden: Width of the hidden states.

    Raises:
        InputError: A value is missing, or contradicts the tensors.
    """
    stated = fields.get("attention.head_count_kv")
    kv_heads = stated if isinstance(stated, tuple) else (stated,) * layers
    states = tuple(layer for layer in range(layers) if f"blk.{layer}.shortconv.conv.weight" in tensors)
    attending = {count for layer, count in enumerate(kv_heads) if layer not in states}
    if len(kv_heads) != layers or len(attending) != 1:
        raise InputError(f"attention.head_count_kv {stated!r} does not fit the layers with attention (attn_k)")
    (count,) = attending
    require_positive("attention.head_count_kv", count)
    if not states:
        return {"num_kv_heads": count}
    require_positive("shortconv.l_cache", fields.get("shortconv.l_cache"))
    kernel = int(fields["shortconv.l_cache"])
    bias = any(name.endswith(".shortconv.conv.bias") for name in tensors)
    return {"num_kv_heads": count, "state": ShortConv(hidden, kernel, bias), "state_layers": states}
