"""The pieces of a decoder layer, as functions of a ModelConfig and one layer's tensors.

A layer is cut where attention happens: `pre_attention` (norm, QKV, rotary), then attention over paged KV,
then `post_attention` (output projection, MLP). Families differ by flags of the configuration only. Tensor
names are those of `checkpoint.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from batchgen import ops
from batchgen.model_config import ModelConfig

Weights = Mapping[str, Tensor]

_ACTIVATIONS = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def linear(weights: Weights, name: str, x: Tensor) -> Tensor:
    """x @ weightᵀ (+ bias), for x [tokens, in] and weight [out, in]."""
    return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))


def norm(config: ModelConfig, weights: Weights, name: str, x: Tensor) -> Tensor:
    if config.norm == "rms":
        return ops.rms_norm(x, weights[f"{name}.weight"], config.norm_eps)
    return ops.layer_norm(x, weights[f"{name}.weight"], weights[f"{name}.bias"], config.norm_eps)


def rope_table(config: ModelConfig, num_positions: int) -> tuple[Tensor, Tensor]:
    """cos and sin, fp32 [num_positions, head_dim / 2], with yarn's attention scaling in them."""
    inv_freq = torch.tensor(config.rope.inv_freq(config.head_dim), dtype=torch.float32)
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * inv_freq
    scaling = config.rope.attention_scaling()
    return angles.cos() * scaling, angles.sin() * scaling


def embed(config: ModelConfig, weights: Weights, token_ids: Tensor, positions: Tensor) -> Tensor:
    """Hidden states [tokens, hidden] of token_ids [tokens] at positions [tokens]."""
    hidden = F.embedding(token_ids, weights["embed.weight"])
    if "embed_proj.weight" in weights:
        hidden = linear(weights, "embed_proj", hidden)
    if "positions.weight" in weights:
        hidden = hidden + F.embedding(positions + config.position_offset, weights["positions.weight"])
    return hidden


def pre_attention(
    config: ModelConfig, weights: Weights, hidden: Tensor, cos: Tensor | None, sin: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Scaled q [tokens, heads, head_dim], k and v [tokens, kv_heads, head_dim] of hidden [tokens, hidden].

    cos, sin: the tokens' rows of the rope table [tokens, 1, head_dim / 2]; None with learned positions.
    """
    x = norm(config, weights, "input_norm", hidden) if config.norm_first else hidden
    heads, kv_heads = config.num_heads, config.num_kv_heads
    qkv = linear(weights, "qkv", x).view(x.shape[0], heads + 2 * kv_heads, config.head_dim)
    q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=1)
    if config.qk_norm:
        q, k = norm(config, weights, "q_norm", q), norm(config, weights, "k_norm", k)
    scale = config.head_dim**-0.5
    if cos is None:
        return q * scale, k, v
    # The softmax scale rides on q's rotation, which is computed in fp32 anyway.
    return ops.apply_rope(q, cos * scale, sin * scale), ops.apply_rope(k, cos, sin), v


def post_attention(config: ModelConfig, weights: Weights, hidden: Tensor, attention: Tensor) -> Tensor:
    """The layer's output [tokens, hidden] from its input and the attention result [tokens, heads * head_dim]."""
    hidden = hidden + linear(weights, "out", attention)
    if not config.norm_first:
        hidden = norm(config, weights, "input_norm", hidden)
    x = norm(config, weights, "post_norm", hidden) if config.norm_first else hidden
    if config.gated_mlp:
        x = ops.silu_and_mul(linear(weights, "gate_up", x))
    else:
        x = _ACTIVATIONS[config.activation](linear(weights, "up", x))
    hidden = hidden + linear(weights, "down", x)
    return hidden if config.norm_first else norm(config, weights, "post_norm", hidden)


def before_logits(config: ModelConfig, weights: Weights, hidden: Tensor) -> Tensor:
    """What the output matrix is multiplied with [tokens, embed], of the last layer's hidden [tokens, hidden]."""
    x = norm(config, weights, "final_norm", hidden) if config.final_norm else hidden
    return linear(weights, "head_proj", x) if "head_proj.weight" in weights else x


def logits(x: Tensor, rows: Tensor) -> Tensor:
    """fp32 logits [tokens, rows] of `before_logits`' x, for rows [rows, embed] of the output matrix."""
    return F.linear(x, rows).float()
