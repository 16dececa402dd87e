"""The layout of a model's tensors: the parts that each tensor consists of, and the format in which it is stored.

Query, key and value projections are fused into the tensor "qkv"; gate and up projections into "gate_up". Parts of a
fused tensor are stacked by rows. The matrices of experts are stacked by rows too. If the parts of a fused tensor have
different formats, they are stored as one tensor for each part: "qkv.q.weight", "qkv.k.weight" and "qkv.v.weight".
Nothing here imports torch.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from batchgen.core.dtypes import (
    FORMAT_BYTES,
    MIXED,
    NATIVE_FORMATS,
    PACKED_FORMATS,
    block_format,
    matrix_format,
    weight_row_bytes,
)
from batchgen.models.config import ModelConfig
from batchgen.models.families import FUSED_MLPS, FUSED_QKV, GRANITE_MIXTURES
from batchgen.models.state_layers import DeltaNet, ShortConv

Shape = tuple[int, ...]
# Tensors that are loaded together: before the layers, of a layer, after the layers, or the attention's sinks alone; and
# the table of per-layer embeddings, which is not loaded but read by row.
Which = Literal["embeddings", "layer", "head", "sinks", "per_layer"]
# name of a tensor -> the parts stacked in its rows, each with its shape
Layout = dict[str, tuple[tuple[str, Shape], ...]]

PER_LAYER = "per_layer_embed"
EMBEDDINGS, OUTPUT_MATRIX = "embed.weight", "lm_head.weight"
_OF_EXPERT = re.compile(r"experts\.\d+\.")


def embedding_layout(config: ModelConfig) -> Layout:
    """Parts of each tensor before the first layer."""
    layout = _linear("embed", {"embed": config.vocab_size}, config.embed_size, bias=False)
    if config.rope is None:
        rows = config.max_position + config.position_offset
        layout |= _linear("positions", {"positions": rows}, config.hidden_size, bias=False)
    if config.token_types:
        layout |= _linear("token_types", {"token_types": config.token_types}, config.hidden_size, bias=False)
    layout |= _norm(config, "embed_norm") if config.embed_norm else {}
    if config.embed_size != config.hidden_size:
        layout |= _linear("embed_proj", {"embed_proj": config.hidden_size}, config.embed_size, bias=False)
    if width := config.per_layer_width:
        layout |= _linear("per_layer_proj", {"per_layer_proj": width}, config.hidden_size, bias=False)
        layout |= _vector("per_layer_proj_norm.weight", config.per_layer_size)
    return layout


def per_layer_layout(config: ModelConfig) -> Layout:
    """The table of per-layer embeddings: for each token, the embeddings of all layers, one after the other."""
    if not config.per_layer_width:
        return {}
    return _linear(PER_LAYER, {PER_LAYER: config.vocab_size}, config.per_layer_width, bias=False)


def layer_layout(config: ModelConfig, layer: int, *, unfused: bool = False) -> Layout:
    """Parts of each tensor of a layer.

    Args:
        config: Configuration of the model.
        layer: Number of the layer.
        unfused: Whether each part is a single matrix of one expert, even if the family's own files fuse experts.
    """
    hidden = config.hidden_size
    inner = config.dense_size if layer in config.dense_layers else config.intermediate_size
    fused = config.family in FUSED_QKV and not unfused
    fused_mlp = config.family in (*FUSED_MLPS, *GRANITE_MIXTURES) and not unfused
    gate_up = {"gate_up": 2 * inner} if fused_mlp else {"gate": inner, "up": inner}
    before = config.norm_place != "outputs"
    layout = _norm(config, "input_norm") if before and not config.kind_of(layer).is_bare else {}
    layout |= _state_layout(config, unfused) if config.has_state(layer) else _attention_layout(config, layer, fused)
    if config.output_norms:
        layout |= _norm(config, "out_norm") | _norm(config, "down_norm")
    layout |= _norm(config, "post_norm") if before else {}
    if config.layer_scale:
        layout |= _vector("layer_scale.weight", 1, "block.layer_scalar")
    if width := config.per_layer_size:
        layout |= _linear("per_layer_up", {"per_layer_up": width}, hidden, bias=False)
        layout |= _linear("per_layer_down", {"per_layer_down": hidden}, width, bias=False)
        layout |= _norm(config, "per_layer_norm")
    if config.has_experts(layer):
        return layout | _experts_layout(config, unfused)
    if config.gated_mlp:
        layout |= _linear("gate_up", gate_up, hidden, config.mlp_bias)
    else:
        layout |= _linear("up", {"up": inner}, hidden, config.mlp_bias)
    return layout | _linear("down", {"down": hidden}, inner, config.mlp_bias)


def _attention_layout(config: ModelConfig, layer: int, fused: bool) -> Layout:
    """Parts of the tensors of attention: all projections, and the norms of queries and keys.

    The part "q" has the rows of the output gate too, before those of the queries, if the model has one.
    """
    hidden, shape, projections = config.hidden_size, config.attention_of(layer), config.projections(layer)
    rows = {"q": shape.q_size * (1 + config.output_gate), "k": shape.kv_size, "v": shape.kv_size}
    heads = {"qkv": shape.qkv_size} if fused else {part: rows[part] for part in projections}
    layout = _linear("qkv", heads, hidden, config.qkv_bias)
    for part, size in zip(("q", "k"), config.qk_norm_sizes(shape), strict=True):
        if size and part in projections:
            layout |= _vector(f"{part}_norm.weight", size)
    return layout | _linear("out", {"out": hidden}, shape.q_size, config.out_bias)


def _state_layout(config: ModelConfig, unfused: bool) -> Layout:
    """Parts of the tensors of a state layer: projections, convolution, and the gates and norm of a Gated DeltaNet."""
    state, hidden = config.state, config.hidden_size
    if isinstance(state, ShortConv):
        return _short_conv_layout(state, hidden)
    assert isinstance(state, DeltaNet), "a state layer has a shape"
    heads, next_family = state.value_heads, config.family == "qwen3_next"
    fused = {"in_qkvz": state.projected_size}
    rows = fused if next_family and not unfused else {"in_qkv": state.channels, "in_z": state.out_size}
    layout = _linear("qkv", rows, hidden, bias=False)
    layout |= _linear("ba", {"ba": 2 * heads} if next_family else {"b": heads, "a": heads}, hidden, bias=False)
    layout["conv.weight"] = (("conv.weight", (state.channels, state.kernel)),)
    layout |= {"a_log": (("linear_attn.A_log", (heads,)),), "dt_bias": (("linear_attn.dt_bias", (heads,)),)}
    layout["state_norm.weight"] = (("state_norm.weight", (state.value_dim,)),)
    return layout | _linear("out", {"state_out": hidden}, state.out_size, bias=False)


def _short_conv_layout(state: ShortConv, hidden: int) -> Layout:
    layout = _linear("qkv", {"in_bcx": state.projected_size}, hidden, state.bias)
    layout["conv.weight"] = (("short_conv.weight", (state.channels, state.kernel)),)
    layout |= _vector("conv.bias", state.channels, "short_conv.bias") if state.bias else {}
    return layout | _linear("out", {"conv_out": hidden}, state.channels, state.bias)


def _experts_layout(config: ModelConfig, unfused: bool) -> Layout:
    """Parts of the tensors of a mixture of experts: the router, the stacked experts, and the shared expert."""
    hidden, inner, experts = config.hidden_size, config.intermediate_size, range(config.num_experts)
    layout = _linear("router", {"router": config.num_experts}, hidden, bias=config.router_bias)
    if config.expert_bias:
        layout |= _vector("expert_bias", config.num_experts, "feed_forward.expert_bias")
    biased, shared = config.family == "gpt_oss", config.shared_expert_size
    if config.mlp_beside_experts:
        layout |= _vector("router_norm.weight", hidden, "router_input.scale")
        layout |= _vector("expert_scale.weight", config.num_experts, "router_input.per_expert_scale")
        for name in ("experts_norm", "experts_out_norm", "shared_out_norm"):
            layout |= _norm(config, name)
    if shared:
        layout |= _linear("shared_gate", {"shared_gate": 1}, hidden, bias=False) if config.shared_gate else {}
        fused = config.family in GRANITE_MIXTURES and not unfused
        parts = {"shared.gate_up": 2 * shared} if fused else {"shared.gate": shared, "shared.up": shared}
        layout |= _linear("shared_gate_up", parts, hidden, bias=False)
        layout |= _linear("shared_down", {"shared.down": hidden}, shared, bias=False)
    if biased and not unfused:
        return layout | _fused_experts_layout(config)
    gate_up = {f"experts.{e}.{part}": inner for e in experts for part in ("gate", "up")}
    layout |= _linear("gate_up", gate_up, hidden, bias=biased)
    return layout | _linear("down", {f"experts.{e}.down": hidden for e in experts}, inner, bias=biased)


def _fused_experts_layout(config: ModelConfig) -> Layout:
    """Parts of the tensors of experts in the files of gpt-oss: one part has all experts of a layer.

    `formats/fused_experts.py` reads them.
    """
    hidden, inner, experts = config.hidden_size, config.intermediate_size, config.num_experts
    return {
        "gate_up.weight": (("experts.gate_up_proj", (experts * 2 * inner, hidden)),),
        "gate_up.bias": (("experts.gate_up_proj_bias", (experts * 2 * inner,)),),
        "down.weight": (("experts.down_proj", (experts * hidden, inner)),),
        "down.bias": (("experts.down_proj_bias", (experts * hidden,)),),
    }


def head_layout(config: ModelConfig) -> Layout:
    """Parts of each tensor after the last layer."""
    layout = _norm(config, "final_norm") if config.final_norm else {}
    if config.embed_size != config.hidden_size:
        layout |= _linear("head_proj", {"head_proj": config.embed_size}, config.hidden_size, bias=False)
    if config.sinks:
        parts = ((f"attention.{layer}.sinks", (config.num_heads,)) for layer in range(config.num_layers))
        layout["sinks.weight"] = tuple(parts)
    if config.head_bias:
        layout["lm_head.bias"] = (("lm_head.bias", (config.vocab_size,)),)
    if not config.tied_embeddings:
        layout |= _linear("lm_head", {"lm_head": config.vocab_size}, config.embed_size, bias=False)
    return layout


def _linear(name: str, rows: dict[str, int], columns: int, bias: bool) -> Layout:
    layout: Layout = {f"{name}.weight": tuple((f"{part}.weight", (n, columns)) for part, n in rows.items())}
    if bias:
        layout[f"{name}.bias"] = tuple((f"{part}.bias", (n,)) for part, n in rows.items())
    return layout


def _vector(name: str, size: int, part: str = "") -> Layout:
    """A tensor of one part, which has another name if `part` is given."""
    return {name: ((part or name, (size,)),)}


def _norm(config: ModelConfig, name: str) -> Layout:
    kinds = ("weight", "bias") if config.norm == "layer" else ("weight",)
    return {f"{name}.{kind}": ((f"{name}.{kind}", (config.hidden_size,)),) for kind in kinds}


def tensor_shapes(layout: Layout) -> dict[str, Shape]:
    """The shape of each tensor of a layout, whose parts are stacked by rows."""
    return {name: (sum(shape[0] for _, shape in parts), *parts[0][1][1:]) for name, parts in layout.items()}


def layout_of(config: ModelConfig, which: Which, layer: int, *, unfused: bool = False) -> Layout:
    """Parts of each tensor of a layer, or before or after the layers.

    Args:
        config: Configuration of the model.
        which: "embeddings", "layer", "head", "sinks" (only the attention sinks) or "per_layer".
        layer: Number of the layer.
        unfused: Whether each part is a single matrix of one expert, even if the family's own files fuse experts.
    """
    if which == "layer":
        return layer_layout(config, layer, unfused=unfused)
    if which == "embeddings":
        return embedding_layout(config)
    if which == "per_layer":
        return per_layer_layout(config)
    head = head_layout(config)
    return {"sinks.weight": head["sinks.weight"]} if which == "sinks" else head


class Part(NamedTuple):
    """A part of a tensor: a matrix or vector that a checkpoint's file stores under one name.

    Attributes:
        name: Name in a layout, such as "q.weight".
        shape: Shape of the part.
        layer: Number of the layer; 0 for parts before and after the layers.
        in_layer: Whether the part belongs to a layer.
    """

    name: str
    shape: Shape
    layer: int
    in_layer: bool


def all_parts(config: ModelConfig, *, unfused: bool = False) -> Iterator[Part]:
    """Every part of all tensors of a model.

    Args:
        config: Configuration of the model.
        unfused: Whether each part is a single matrix of one expert, even if the family's own files fuse experts.
    """
    layouts = [(embedding_layout(config), 0, False), (head_layout(config), 0, False)]
    layouts.append((per_layer_layout(config), 0, False))
    of_layers = range(config.num_layers)
    layouts += [(layout_of(config, "layer", layer, unfused=unfused), layer, True) for layer in of_layers]
    for layout, layer, in_layer in layouts:
        for parts in layout.values():
            for name, shape in parts:
                yield Part(name, shape, layer, in_layer)


# Formats in which tensors are stored.


@dataclass(frozen=True)
class Stored:
    """The form in which a tensor is stored.

    Attributes:
        shape: Shape of the tensor as numbers.
        dtype: A compute dtype, "int4", "int8" or one of `BLOCK_FORMATS`.
    """

    shape: Shape
    dtype: str

    @property
    def is_packed(self) -> bool:
        """True where the tensor is stored as packed rows of bytes, not as numbers."""
        return self.dtype in PACKED_FORMATS

    @property
    def stored_shape(self) -> Shape:
        """Shape of the stored tensor. For packed rows, the last dimension is the bytes of a row."""
        return (self.shape[0], weight_row_bytes(self.shape[1], self.dtype)) if self.is_packed else self.shape

    @property
    def num_bytes(self) -> int:
        return math.prod(self.stored_shape) * (1 if self.is_packed else int(FORMAT_BYTES[self.dtype]))


def is_quantized(name: str, shape: Shape) -> bool:
    """True for matrices of a layer that are quantized: all but routers, gates of few rows, and convolutions."""
    return len(shape) == 2 and name not in ("router.weight", "shared_gate.weight", "ba.weight", "conv.weight")


def role(part: str) -> str:
    """The role of a matrix in its layer or expert, from its name: "experts.3.gate.weight" has the role "gate"."""
    return _OF_EXPERT.sub("", part).rsplit(".", 1)[0]


def packed_layout(config: ModelConfig, which: Which, layer: int, weight_format: str, *, unfused: bool) -> Layout:
    """Parts of each tensor, with one tensor for each role if the parts of a matrix have different formats.

    Args:
        config: Configuration of the model.
        which: "embeddings", "layer" or "head".
        layer: Number of the layer.
        weight_format: Format of the layers' matrices.
        unfused: Whether each part is a single matrix of one expert, even if the family's own files fuse experts.
    """
    layout = layout_of(config, which, layer, unfused=unfused)
    if which != "layer" or weight_format != MIXED:
        return layout
    formats = dict(config.layer_formats[layer])
    packed: Layout = {}
    for name, parts in layout.items():
        roles = dict.fromkeys(role(part) for part, _ in parts)
        if not is_quantized(name, parts[0][1]) or len({formats.get(r) for r in roles}) == 1:
            packed[name] = parts
            continue
        for part_role in roles:
            packed[name.replace(".", f".{part_role.split('.')[-1]}.")] = tuple(
                p for p in parts if role(p[0]) == part_role
            )
    return packed


def stored_tensors(config: ModelConfig, which: Which, layer: int, dtype: str, weight_format: str) -> dict[str, Stored]:
    """Every tensor of a layer, or before or after the layers, by name, with the form in which it is stored.

    Args:
        config: Configuration of the model.
        which: "embeddings", "layer" or "head".
        layer: Number of the layer.
        dtype: Compute dtype.
        weight_format: Format of the layers' matrices: the compute dtype, or one of `PACKED_FORMATS`.
    """
    # Parts one by one, as `layer_formats` names them; tensors are the same.
    layout = packed_layout(config, which, layer, weight_format, unfused=True)
    return {
        name: Stored(shape, _format_of(config, which, layer, name, layout[name][0][0], shape, dtype, weight_format))
        for name, shape in tensor_shapes(layout).items()
    }


def _format_of(  # all that it depends on
    config: ModelConfig, which: Which, layer: int, name: str, part: str, shape: Shape, dtype: str, weight_format: str
) -> str:
    if which != "layer":
        native = dict(config.end_formats) if weight_format in NATIVE_FORMATS else {}
        return native.get(name.removesuffix(".weight"), dtype)
    if not is_quantized(name, shape):
        return dtype
    if weight_format == MIXED:
        return dict(config.layer_formats[layer]).get(role(part), dtype)
    return matrix_format(weight_format, name.split(".")[0], dtype)


@lru_cache(maxsize=64)
def layer_sizes(config: ModelConfig, dtype: str, weight_format: str) -> tuple[Mapping[str, int], ...]:
    """Stored bytes of every tensor of every layer: one mapping by name for each layer."""
    sizes: dict[tuple[object, ...], Mapping[str, int]] = {}  # layers that are alike, once
    layers = []
    for j in range(config.num_layers):
        kind = config.kind_of(j), config.layer_formats[j] if weight_format == MIXED else ()
        if kind not in sizes:
            tensors = stored_tensors(config, "layer", j, dtype, weight_format)
            sizes[kind] = {name: stored.num_bytes for name, stored in tensors.items()}
        layers.append(sizes[kind])
    return tuple(layers)


@lru_cache(maxsize=64)
def end_bytes(config: ModelConfig, dtype: str, weight_format: str) -> tuple[int, int]:
    """Stored bytes of the tensors before the first layer, and of those after the last layer.

    For a pipeline stage, only the tensors that this stage has count.
    """

    def total(which: Which) -> int:
        return sum(stored.num_bytes for stored in stored_tensors(config, which, 0, dtype, weight_format).values())

    size = int(FORMAT_BYTES[dtype])
    sinks = config.sinks * config.num_layers * config.num_heads * size
    return total("embeddings") if config.has_embeddings else 0, total("head") if config.has_head else sinks


def output_row_bytes(config: ModelConfig, dtype: str, weight_format: str) -> int:
    """Stored bytes of one row of the output matrix (of the token embedding, if that is tied)."""
    return weight_row_bytes(config.embed_size, output_format(config, dtype, weight_format))


def output_format(config: ModelConfig, dtype: str, weight_format: str) -> str:
    """Format of the output matrix, or of the token embedding if the output matrix is tied to it.

    It is a compute dtype or one of `BLOCK_FORMATS`.
    """
    native = dict(config.end_formats) if weight_format in NATIVE_FORMATS else {}
    return native.get("embed" if config.tied_embeddings else "lm_head", dtype)


@lru_cache(maxsize=64)
def main_format(config: ModelConfig, weight_format: str) -> str:
    """The block format (one of `BLOCK_FORMATS`) that most of the layers' weights have.

    If `weight_format` is not one of `NATIVE_FORMATS`, it is returned unchanged.
    """
    if weight_format != MIXED:
        return block_format(weight_format)
    sizes: Counter[str] = Counter()
    for j in range(config.num_layers):
        for stored in stored_tensors(config, "layer", j, "float32", weight_format).values():
            sizes[stored.dtype] += math.prod(stored.shape) * stored.is_packed
    return sizes.most_common(1)[0][0]
