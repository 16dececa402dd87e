"""The parts of a decoder layer, as functions of a ModelConfig and one layer's tensors.

A layer is cut where attention happens: `pre_attention` (norm, QKV), then rotary embedding and
attention over paged KV, then `post_attention` (output projection, MLP). Families differ by flags of the
configuration only. Tensor names are those of `checkpoint.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from batchgen.models.config import ModelConfig
from batchgen.models.experts import OnCounts, OnInput, Routes, Weights, experts, route
from batchgen.models.rope import RopeConfig
from batchgen.ops import dispatch as ops

Rope = tuple[Tensor, Tensor]
# All-reduce: sums the results of ranks that have a part of the layer each (`shard.py`), in place, [tokens, hidden].
Reduce = Callable[[Tensor], None]


def is_gated(name: str) -> bool:
    """True for the matrix of a gate and of what it is multiplied with, of an expert perhaps."""
    return name.startswith(("gate_up.", "shared_gate_up."))


def linear(weights: Weights, name: str, x: Tensor, on_input: OnInput | None = None, **options: Any) -> Tensor:
    """Product x @ weightᵀ (+ bias), [tokens, out].

    Args:
        weights: Tensors of the layer.
        name: Name of the linear layer: "qkv".
        x: [tokens, in].
        on_input: Called with the weight's name and x.
        options: Options of `ops.linear`.
    """
    if on_input:
        on_input(f"{name}.weight", x)
    return ops.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"), **options)


def norm(config: ModelConfig, weights: Weights, name: str, x: Tensor, out: Tensor | None = None) -> Tensor:
    bias = weights[f"{name}.bias"] if config.norm == "layer" else None
    return ops.norm(x, weights[f"{name}.weight"], bias, config.norm_eps, out)


def rope_table(rope: RopeConfig, head_dim: int, num_positions: int) -> Rope:
    """Cos and sin, fp32 [num_positions, head_dim / 2], with the attention scaling in them.

    Pairs that are not rotated have 1 and 0.
    """
    inv_freq = torch.tensor(rope.inv_freq(head_dim, num_positions), dtype=torch.float32)
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * inv_freq
    scaling = rope.attention_scaling()
    rest = (0, head_dim // 2 - len(inv_freq))
    return F.pad(angles.cos() * scaling, rest, value=1.0), F.pad(angles.sin() * scaling, rest)


def embed(config: ModelConfig, weights: Weights, token_ids: Tensor, positions: Tensor, dtype: torch.dtype) -> Tensor:
    """Hidden states of tokens, [tokens, hidden].

    Args:
        config: Configuration of the model.
        weights: Tensors before the first layer.
        token_ids: [tokens].
        positions: [tokens].
        dtype: Compute dtype.
    """
    hidden = ops.embedding(token_ids, weights["embed.weight"], dtype)
    if config.embedding_scale != 1:
        # Rounded to the dtype first, as the models were trained.
        hidden = hidden * torch.tensor(config.embedding_scale, dtype=hidden.dtype).item()
    if "embed_proj.weight" in weights:
        hidden = linear(weights, "embed_proj", hidden)
    if "positions.weight" in weights:
        hidden = hidden + F.embedding(positions + config.position_offset, weights["positions.weight"])
    return hidden


def pre_attention(
    config: ModelConfig,
    weights: Weights,
    hidden: Tensor,
    out: Tensor | None = None,
    on_input: OnInput | None = None,
) -> Tensor:
    """Fused queries, keys and values [tokens, qkv] of hidden [tokens, hidden]."""
    x = norm(config, weights, "input_norm", hidden) if config.norm_first else hidden
    return linear(weights, "qkv", x, on_input, out=out)


def rotary_options(config: ModelConfig, weights: Weights, rope: Rope | None, positions: Tensor) -> dict[str, Any]:
    """Options of `ops.rotary` and `ops.rotary_store` that hold for a layer.

    Args:
        config: Configuration of the model.
        weights: Tensors of the layer.
        rope: Table of the layer's rotary positions; None: positions are learned.
        positions: [tokens].
    """
    return {
        "scale": config.attention_scale,
        "rope": rope,
        "positions": positions,
        "norms": (weights["q_norm.weight"], weights["k_norm.weight"]) if config.qk_norm else None,
        "eps": config.norm_eps,
    }


def post_attention(
    config: ModelConfig,
    weights: Weights,
    hidden: Tensor,
    attention: Tensor,
    out: Tensor | None = None,
    on_input: OnInput | None = None,
    *,
    reduce: Reduce | None = None,
    on_counts: OnCounts | None = None,
) -> Tensor:
    """The layer's output [tokens, hidden].

    Args:
        config: Configuration of the model.
        weights: Tensors of the layer.
        hidden: Input of the layer, [tokens, hidden].
        attention: Result of the attention, [tokens, heads * head_dim].
        out: Tensor for the output, `hidden` perhaps.
        on_input: Called with the name of each weight and its input.
        reduce: All-reduce where the weights are a rank's part of the layer; called for attention's result and for the
            MLP's.
        on_counts: Called with the tokens of each expert.
    """
    hidden = _with_attention(config, weights, hidden, attention, out, on_input, reduce)
    x = _mlp_input(config, weights, hidden)
    if "router.weight" in weights:
        y = experts(config, weights, x, on_input, on_counts=on_counts)
        if reduce:
            reduce(y)
        return torch.add(hidden, y, out=out)
    x = linear(weights, "gate_up" if config.gated_mlp else "up", x, on_input, activation=config.mlp_activation)
    hidden = _added(config, weights, "down", x, hidden, out, on_input, reduce)
    return hidden if config.norm_first else norm(config, weights, "post_norm", hidden, out)


def route_tokens(
    config: ModelConfig, weights: Weights, hidden: Tensor, attention: Tensor, reduce: Reduce | None = None
) -> Routes:
    """The experts of each token of a layer: `post_attention` up to where the experts are needed.

    `hidden` becomes what the MLPs add to.
    """
    hidden = _with_attention(config, weights, hidden, attention, hidden, reduce=reduce)
    return route(config, weights, _mlp_input(config, weights, hidden))


def add_experts(
    config: ModelConfig,
    weights: Weights,
    hidden: Tensor,
    routes: Routes,
    reduce: Reduce | None = None,
    on_counts: OnCounts | None = None,
) -> None:
    """The rest of `post_attention` behind `route_tokens`: adds to `hidden` the output of the experts."""
    y = experts(config, weights, _mlp_input(config, weights, hidden), routes=routes, on_counts=on_counts)
    if reduce:
        reduce(y)
    torch.add(hidden, y, out=hidden)


def _with_attention(
    config: ModelConfig,
    weights: Weights,
    hidden: Tensor,
    attention: Tensor,
    out: Tensor | None,
    on_input: OnInput | None = None,
    reduce: Reduce | None = None,
) -> Tensor:
    hidden = _added(config, weights, "out", attention, hidden, out, on_input, reduce)
    return hidden if config.norm_first else norm(config, weights, "input_norm", hidden, out)


def _mlp_input(config: ModelConfig, weights: Weights, hidden: Tensor) -> Tensor:
    return norm(config, weights, "post_norm", hidden) if config.norm_first else hidden


def _added(
    config: ModelConfig,
    weights: Weights,
    name: str,
    x: Tensor,
    hidden: Tensor,
    out: Tensor | None,
    on_input: OnInput | None,
    reduce: Reduce | None,
) -> Tensor:
    """`hidden` plus the output of a linear layer, summed over the ranks, and normed where the model does so."""
    if not config.output_norms and reduce is None:
        return linear(weights, name, x, on_input, residual=hidden, out=out)
    y = linear(weights, name, x, on_input)
    if reduce:
        reduce(y)
    if config.output_norms:
        y = norm(config, weights, f"{name}_norm", y, y)
    return torch.add(hidden, y, out=out)


def before_logits(config: ModelConfig, weights: Weights, hidden: Tensor) -> Tensor:
    """Input of the output matrix, [tokens, embed], for the last layer's hidden [tokens, hidden]."""
    x = norm(config, weights, "final_norm", hidden) if config.final_norm else hidden
    return linear(weights, "head_proj", x) if "head_proj.weight" in weights else x


def logits(config: ModelConfig, x: Tensor, rows: ops.Weight, out: Tensor | None = None) -> Tensor:
    """fp32 logits [tokens, rows].

    Args:
        config: Configuration of the model.
        x: Input of the output matrix, [tokens, embed].
        rows: Rows of the output matrix, [rows, embed].
        out: Tensor for the logits.
    """
    scores = ops.linear(x, rows, out=out, out_dtype=torch.float32)
    return scores.div_(config.logit_softcap).tanh_().mul_(config.logit_softcap) if config.logit_softcap else scores
