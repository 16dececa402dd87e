"""The parts of a decoder layer, as functions of a ModelConfig and one layer's tensors.

A layer is cut where attention happens: `pre_attention` (norm, QKV), then rotary embedding and
attention over paged KV, then `post_attention` (output projection, MLP). Families differ by flags of the
configuration only. Tensor names are those of `checkpoint.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from batchgen.models.config import ModelConfig
from batchgen.models.experts import OnCounts, OnInput, Routes, Weights, experts, route
from batchgen.models.rope import RopeConfig
from batchgen.ops import dispatch as ops

Rope = tuple[Tensor, Tensor]
# Adds the summands of several ranks, each of which has a part of the layer (`shard.py`): in place, [tokens, hidden].
Reduce = Callable[[Tensor], None]


def is_gated(name: str) -> bool:
    """Whether a tensor is the matrix of a gate and of what it is multiplied with, of an expert perhaps."""
    return name.startswith(("gate_up.", "shared_gate_up."))


def linear(weights: Weights, name: str, x: Tensor, on_input: OnInput | None = None, **options) -> Tensor:
    """X @ weightᵀ (+ bias), for x [tokens, in] and weight [out, in]. options: as `ops.linear`."""
    if on_input:
        on_input(f"{name}.weight", x)
    return ops.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"), **options)


def norm(config: ModelConfig, weights: Weights, name: str, x: Tensor, out: Tensor | None = None) -> Tensor:
    bias = weights[f"{name}.bias"] if config.norm == "layer" else None
    return ops.norm(x, weights[f"{name}.weight"], bias, config.norm_eps, out)


def rope_table(rope: RopeConfig, head_dim: int, num_positions: int) -> Rope:
    """Cos and sin, fp32 [num_positions, head_dim / 2], with the attention scaling in them. Pairs that are not rotated stay."""
    inv_freq = torch.tensor(rope.inv_freq(head_dim, num_positions), dtype=torch.float32)
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * inv_freq
    scaling = rope.attention_scaling()
    rest = (0, head_dim // 2 - len(inv_freq))
    return F.pad(angles.cos() * scaling, rest, value=1.0), F.pad(angles.sin() * scaling, rest)


def embed(config: ModelConfig, weights: Weights, token_ids: Tensor, positions: Tensor, dtype: torch.dtype) -> Tensor:
    """Hidden states [tokens, hidden] of token_ids [tokens] at positions [tokens], in `dtype`, as the weights that are numbers."""
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


def rotary_options(config: ModelConfig, weights: Weights, rope: Rope | None, positions: Tensor) -> dict:
    """What `ops.rotary` and `ops.rotary_store` are told of a layer. rope: of `rope_table`; None with learned positions."""
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
    """The layer's output [tokens, hidden] from its input and the attention result [tokens, heads * head_dim].

    out: where it goes, `hidden` perhaps. on_counts: as of `experts`. reduce: where the weights are a rank's part of the layer; called
    twice, of attention's result and of the MLP's.
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
    """`post_attention` of a layer with experts up to where these are needed: where each token goes. `hidden` becomes what MLPs add to."""
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
    """The rest of `post_attention`: adds to `hidden` what the experts make of it."""
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


def _added(  # the operands of a linear layer
    config: ModelConfig,
    weights: Weights,
    name: str,
    x: Tensor,
    hidden: Tensor,
    out: Tensor | None,
    on_input: OnInput | None,
    reduce: Reduce | None,
) -> Tensor:
    """`hidden` and what the linear layer makes of x, added over the ranks, normed where the model has a norm for it."""
    if not config.output_norms and reduce is None:
        return linear(weights, name, x, on_input, residual=hidden, out=out)
    y = linear(weights, name, x, on_input)
    if reduce:
        reduce(y)
    if config.output_norms:
        y = norm(config, weights, f"{name}_norm", y, y)
    return torch.add(hidden, y, out=out)


def before_logits(config: ModelConfig, weights: Weights, hidden: Tensor) -> Tensor:
    """What the output matrix is multiplied with [tokens, embed], of the last layer's hidden [tokens, hidden]."""
    x = norm(config, weights, "final_norm", hidden) if config.final_norm else hidden
    return linear(weights, "head_proj", x) if "head_proj.weight" in weights else x


def logits(config: ModelConfig, x: Tensor, rows: ops.Weight, out: Tensor | None = None) -> Tensor:
    """fp32 logits [tokens, rows] of `before_logits`' x, for rows [rows, embed] of the output matrix. out: where they go."""
    made = ops.linear(x, rows, out=out, out_dtype=torch.float32)
    return made.div_(config.logit_softcap).tanh_().mul_(config.logit_softcap) if config.logit_softcap else made
