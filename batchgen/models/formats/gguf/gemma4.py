"""Gemma 4 in a GGUF: the names of its tensors, and the keys and tensors that state its mechanisms.

llama.cpp's converter puts gate and up of all experts into one tensor. Which pairs of values of a head are rotated in
layers without a sliding window is shown by divisors of their frequencies: 1 for those that are, 1e30 for the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from batchgen.core.errors import InputError
from batchgen.models.rope import RopeConfig
from batchgen.models.stated_numbers import require_positive
from batchgen.models.tensor_files.headers import TensorInfo

# Role of a matrix (`layouts.role`) -> its name in a layer.
PER_LAYER_MATRICES = {"per_layer_up": "inp_gate", "per_layer_down": "proj"}
# Role of a matrix in a layer with experts -> its name there: the MLP beside them is the shared expert.
BESIDE_EXPERTS = {"shared.gate": "ffn_gate", "shared.up": "ffn_up", "shared.down": "ffn_down"}
# Part of a layout, without its suffix -> its name in a layer.
GEMMA4_VECTORS = {
    "per_layer_norm": "post_norm",
    "experts_norm": "pre_ffw_norm_2",
    "experts_out_norm": "post_ffw_norm_2",
    "shared_out_norm": "post_ffw_norm_1",
}
# Part of a layout -> its name in a layer with its suffix, where it has another one.
GEMMA4_SUFFIXES = {
    "block.layer_scalar": "layer_output_scale.weight",
    "router_input.scale": "ffn_gate_inp.scale",
    "router_input.per_expert_scale": "ffn_down_exps.scale",
}
# Part of a layout, without its suffix -> its name before and after the layers.
PER_LAYER_ENDS = {
    "per_layer_embed": "per_layer_token_embd",
    "per_layer_proj": "per_layer_model_proj",
    "per_layer_proj_norm": "per_layer_proj_norm",
}
_UNROTATED = 1e20  # divisors above leave a pair where it is


def read_gemma4(
    fields: Mapping[str, Any], tensors: Mapping[str, TensorInfo], windows: tuple[int | None, ...]
) -> dict[str, Any]:
    """The fields of a ModelConfig that describe Gemma 4's heads, layers and per-layer embeddings.

    Args:
        fields: Key-value pairs of the architecture.
        tensors: Tensors of the file, which show the layers whose values are their keys.
        windows: Sliding window of each layer.

    Raises:
        InputError: A value is missing or not supported.
    """
    layers = len(windows)
    head_dim, global_dim = fields.get("attention.key_length_swa"), fields.get("attention.key_length")
    for name, size in (("attention.key_length_swa", head_dim), ("attention.key_length", global_dim)):
        require_positive(name, size)
    for kind, size in (("", global_dim), ("_swa", head_dim)):
        if fields.get(f"attention.value_length{kind}", size) != size:
            raise InputError("GGUFs whose key and value heads differ in size are not supported")
        if fields.get(f"rope.dimension_count{kind}", size) != size:
            raise InputError("GGUFs of Gemma 4 that rotate part of each head (rope.dimension_count) are not supported")
    local, everywhere = _kv_heads(fields, windows)
    shared = fields.get("attention.shared_kv_layers") or 0
    owning = [j for j in range(layers - shared) if windows[j] is None]
    alike = {f"blk.{j}.attn_v.weight" in tensors for j in owning}
    if len(alike) > 1:
        raise InputError("the GGUF has values (attn_v) in some layers without a window: it is incomplete")
    return {
        "num_kv_heads": local,
        "head_dim": head_dim,
        "global_head_dim": 0 if global_dim == head_dim else global_dim,
        "global_kv_heads": 0 if everywhere == local else everywhere,
        "shared_kv_layers": shared,
        "keys_are_values": alike == {False},
        "value_norm": True,
        "layer_scale": True,
        "per_layer_size": fields.get("embedding_length_per_layer_input") or 0,
    }


def _kv_heads(fields: Mapping[str, Any], windows: tuple[int | None, ...]) -> tuple[int, int]:
    """The number of key and value heads in layers with a sliding window, and in layers without one."""
    stated = fields.get("attention.head_count_kv", fields.get("attention.head_count"))
    by_layer = stated if isinstance(stated, tuple) else (stated,) * len(windows)
    counts: dict[bool, set[Any]] = {True: set(), False: set()}
    for window, count in zip(windows, by_layer, strict=False):
        counts[window is None].add(count)
    if len(by_layer) != len(windows) or max(map(len, counts.values())) > 1:
        raise InputError(f"attention.head_count_kv {stated} is not supported: layers of one kind must have as many")
    either = next(iter(counts[False] or counts[True]))
    return either, next(iter(counts[True] or {either}))


def read_gemma4_mlps(fields: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """The fields of a ModelConfig that describe the widths of MLPs, and the experts beside them.

    Args:
        fields: Key-value pairs of the architecture.
        layers: Number of layers.

    Raises:
        InputError: A value is missing or not supported.
    """
    stated = fields.get("feed_forward_length")
    widths = stated if isinstance(stated, tuple) else (stated,) * layers
    for width in widths:
        require_positive("feed_forward_length", width)
    if len(widths) != layers or len(set(widths)) > 2:
        raise InputError(f"feed_forward_length {stated} is not supported: there may be two widths of MLPs")
    if not fields.get("expert_count"):
        others = tuple(j for j, width in enumerate(widths) if width != widths[0])
        wider = {"dense_layers": others, "dense_size": widths[others[0]]} if others else {}
        return {"intermediate_size": widths[0], **wider}
    if len(set(widths)) > 1:
        raise InputError("GGUFs of Gemma 4 with MLPs of two widths beside experts are not supported")
    names = ("expert_feed_forward_length", "expert_count", "expert_used_count")
    for name in names:
        require_positive(name, fields.get(name))
    return {
        **dict(
            zip(("intermediate_size", "num_experts", "experts_per_token"), map(fields.__getitem__, names), strict=True)
        ),
        "norm_topk": True,
        "shared_expert_size": widths[0],
        "shared_gate": False,
        "mlp_beside_experts": True,
    }


def read_gemma4_ropes(fields: Mapping[str, Any], factors: tuple[float, ...] | None) -> tuple[RopeConfig, RopeConfig]:
    """Rotary positions of layers without a sliding window, and of layers with one.

    Args:
        fields: Key-value pairs of the architecture.
        factors: Divisors of the frequencies in layers without a window (`rope_freqs.weight`); None: there are none.
    """
    rope = RopeConfig(theta=float(fields.get("rope.freq_base", 1e6)))
    if factors:
        rotated = sum(factor < _UNROTATED for factor in factors)
        plain = (1.0,) * rotated == factors[:rotated]
        if plain and rotated:
            rope = RopeConfig(theta=rope.theta, kind="proportional", share=rotated / len(factors))
        else:
            rope = RopeConfig(theta=rope.theta, factors=factors)
    return rope, RopeConfig(theta=float(fields.get("rope.freq_base_swa", 1e4)))
