"""The computations of a decoder layer before and after attention, as functions of a ModelConfig and tensors.

`pre_attention` computes norm and QKV projection. Rotary embedding and attention over paged KV follow (`ops`).
`post_attention` computes output projection and MLP. Switches of the configuration distinguish families. `checkpoint.py`
describes the tensors and their names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from batchgen.models.config import ModelConfig
from batchgen.models.experts import OnCounts, OnInput, Routes, Weights, experts, route
from batchgen.models.families import GEMMA, GEMMA4, ROBERTAS
from batchgen.models.rope import RopeConfig
from batchgen.ops import dispatch as ops
from batchgen.ops import state_dispatch as state_ops

Rope = tuple[Tensor, Tensor]
# All-reduce: sums the results of ranks that have a part of the layer each (`shard.py`), in place, [tokens, hidden].
Reduce = Callable[[Tensor], None]


def is_gated(name: str) -> bool:
    """True for the name of a matrix, of a layer or an expert, that consists of a gate and an up projection."""
    return name.startswith(("gate_up.", "shared_gate_up."))


def linear(weights: Weights, name: str, x: Tensor, on_input: OnInput | None = None, **options: Any) -> Tensor:
    """Compute a linear layer, x @ weightᵀ (+ bias).

    Args:
        weights: Tensors of the layer, by name.
        name: Name of the linear layer, such as "qkv".
        x: Activations [tokens, in].
        on_input: Function that is called with the weight's name and x before the product; or None.
        options: Further arguments of `ops.linear`.

    Returns:
        Activations [tokens, out].
    """
    if on_input:
        on_input(f"{name}.weight", x)
    return ops.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"), **options)


def norm(config: ModelConfig, weights: Weights, name: str, x: Tensor, out: Tensor | None = None) -> Tensor:
    bias = weights[f"{name}.bias"] if config.norm == "layer" else None
    return ops.norm(x, weights[f"{name}.weight"], bias, config.norm_eps, out)


def rope_table(rope: RopeConfig, head_dim: int, num_positions: int, context: int | None = None) -> Rope:
    """Tables of cos and sin for rotary embedding, each fp32 [num_positions, head_dim / 2].

    Both are multiplied by the attention scaling of `rope`. Pairs of values that are not rotated have cos 1 and sin 0.

    Args:
        rope: Rotary positions of a layer.
        head_dim: Number of values in one head.
        num_positions: Positions of the tables.
        context: Longest context of the sequences, in tokens, on which some tables depend; None: `num_positions`.
    """
    inv_freq = torch.tensor(rope.inv_freq(head_dim, context or num_positions), dtype=torch.float32)
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * inv_freq
    scaling, rotated = rope.attention_scaling(), len(inv_freq)
    cos, sin = torch.ones(num_positions, head_dim // 2), torch.zeros(num_positions, head_dim // 2)
    cos[:, :rotated] = angles.cos().mul_(scaling)
    sin[:, :rotated] = angles.sin_().mul_(scaling)
    return cos, sin


def query_growth_table(config: ModelConfig, num_positions: int) -> Tensor | None:
    """Factor of the queries at each position, fp32 [num_positions]; None: it is 1 everywhere."""
    if not config.query_growth or num_positions <= config.query_growth_period:
        return None
    periods = torch.arange(num_positions) // config.query_growth_period
    return 1 + config.query_growth * (1 + periods.float()).log()


def embed(
    config: ModelConfig,
    weights: Weights,
    token_ids: Tensor,
    positions: Tensor,
    dtype: torch.dtype,
    rows: Tensor | None = None,
) -> Tensor:
    """Hidden states of tokens: their embeddings, with learned positions and a projection if the model has them.

    Args:
        config: Configuration of the model.
        weights: Tensors before the first layer, by name.
        token_ids: Token ids, int64 [tokens]; those of type t are raised by t * vocab_size.
        positions: Position of each token, int64 [tokens].
        dtype: Compute dtype.
        rows: The tokens' rows of the embedding table, [tokens, embed], where `weights` has no such table.

    Returns:
        Hidden states [tokens, hidden].
    """
    types = None
    if "token_types.weight" in weights:
        types = F.embedding(token_ids // config.vocab_size, weights["token_types.weight"])
        token_ids = token_ids % config.vocab_size
    hidden = ops.embedding(token_ids, weights["embed.weight"], dtype) if rows is None else rows
    if config.embedding_scale != 1:
        scale = config.embedding_scale
        if config.family in (*GEMMA, *GEMMA4):  # rounded to the dtype first, as the models were trained
            scale = torch.tensor(scale, dtype=hidden.dtype).item()
        hidden = hidden * scale
    if "embed_proj.weight" in weights:
        hidden = linear(weights, "embed_proj", hidden)
    if "positions.weight" in weights:
        if config.family in ROBERTAS:
            positions = _positions_without_padding(token_ids, positions, config.position_offset - 1)
        hidden = hidden + F.embedding(positions + config.position_offset, weights["positions.weight"])
    if types is not None:
        hidden = hidden + types
    return norm(config, weights, "embed_norm", hidden) if config.embed_norm else hidden


def _positions_without_padding(token_ids: Tensor, positions: Tensor, padding: int) -> Tensor:
    """The positions of RoBERTa: a padding token, which a text may name, has none (-1), and none counts it.

    Args:
        token_ids: Token ids of whole texts, one text after the other, int64 [tokens].
        positions: Position of each token, int64 [tokens].
        padding: Token id of padding.

    Returns:
        Positions, int64 [tokens].
    """
    is_padding = token_ids == padding
    before = is_padding.cumsum(0) - is_padding.long()  # padding before each token, that of earlier texts included
    begins = (torch.arange(len(positions), device=positions.device) - positions).clamp_(min=0)  # below 0 in warm-ups
    counted = positions - before + before[begins]
    return torch.where(is_padding, -1, counted)


def per_layer_inputs(config: ModelConfig, weights: Weights, hidden: Tensor, rows: Tensor) -> Tensor:
    """The inputs of all layers beside activations, from tokens' per-layer embeddings and embeddings (Gemma 3n, 4).

    Args:
        config: Configuration of the model.
        weights: Tensors before the first layer, by name.
        hidden: Embeddings of the tokens (`embed`), [tokens, hidden].
        rows: Their rows of the table of per-layer embeddings, [tokens, layers * per_layer_size].

    Returns:
        Inputs of the layers, [layers, tokens, per_layer_size].
    """
    shape = len(hidden), config.num_layers, config.per_layer_size
    projected = linear(weights, "per_layer_proj", hidden).mul_(config.hidden_size**-0.5).view(shape)
    projected = norm(config, weights, "per_layer_proj_norm", projected, projected)
    scale = torch.tensor(config.per_layer_size**0.5, dtype=rows.dtype).item()  # rounded, as the models were trained
    return projected.add_(rows.view(shape) * scale).mul_(2**-0.5).transpose(0, 1).contiguous()


def pre_attention(
    config: ModelConfig,
    weights: Weights,
    hidden: Tensor,
    out: Tensor | None = None,
    on_input: OnInput | None = None,
    *,
    reduce: Reduce | None = None,
) -> Tensor:
    """Compute a layer's projections before attention, or before the update of its states, from its input.

    Args:
        config: Configuration of the model.
        weights: Tensors of the layer, by name.
        hidden: Input of the layer, [tokens, hidden].
        out: Tensor for the result. None: a new tensor.
        on_input: Function that is called with the name of each weight and its input; or None.
        reduce: All-reduce over tensor-parallel ranks, which norms of all heads together need; or None.

    Returns:
        Queries, keys and values [tokens, (heads + 2 kv_heads) head_dim], as far as the layer projects them, after the
        output gate [tokens, heads head_dim] if the model has one (`ungated`). For a state layer what `state.mix_state`
        takes, [tokens, `state.projected_width`].
    """
    normed = config.input_norms and "input_norm.weight" in weights
    x = norm(config, weights, "input_norm", hidden) if normed else hidden
    if "ba.weight" not in weights:
        projected = linear(weights, "qkv", x, on_input, out=out)
        if config.projection_norms:
            _norm_projections(config, weights, projected, reduce)
        return projected
    assert config.state is not None, "only state layers have such gates"
    out = x.new_empty(len(x), config.state.projected_width) if out is None else out
    fused = config.state.projected_size
    linear(weights, "qkv", x, on_input, out=out[:, :fused])
    linear(weights, "ba", x, out=out[:, fused:])
    return out


def _norm_projections(config: ModelConfig, weights: Weights, qkv: Tensor, reduce: Reduce | None) -> None:
    """Norm the queries of all heads together, and the keys, in place in their columns of qkv.

    A tensor-parallel rank has some of the heads: sums of squares are added over all ranks.
    """
    sizes = config.q_size, config.kv_size
    parts = qkv.split((*sizes, qkv.shape[1] - sum(sizes)), dim=1)[:2]
    scales = [weights["q_norm.weight"], weights["k_norm.weight"]]
    if reduce is None:
        for x, scale in zip(parts, scales, strict=True):
            ops.norm(x, scale, None, config.norm_eps, x)
        return
    of_ranks = torch.ones(len(qkv), 3, dtype=torch.float32, device=qkv.device)  # of queries, of keys, number of ranks
    for column, x in enumerate(parts):
        of_ranks[:, column] = x.float().square().mean(1)
    reduce(of_ranks)
    for column, (x, scale) in enumerate(zip(parts, scales, strict=True)):
        mean = (of_ranks[:, column] / of_ranks[:, 2]).unsqueeze(1)
        x.copy_(x.float() * torch.rsqrt(mean + config.norm_eps) * scale)


def ungated(config: ModelConfig, projected: Tensor) -> Tensor:
    """A view of queries, keys and values in the result of `pre_attention`, without the output gate before them.

    Args:
        config: Configuration of the model.
        projected: Result of `pre_attention` for a layer with attention.
    """
    return projected[:, config.q_size :] if config.output_gate else projected


def gate_attention(config: ModelConfig, projected: Tensor, attended: Tensor) -> Tensor:
    """Multiply the result of attention by the output gate, in place, if the model has one (Qwen3-Next).

    Args:
        config: Configuration of the model.
        projected: Result of `pre_attention` for the same tokens.
        attended: Result of attention, [tokens, heads, head_dim] or [tokens, heads * head_dim], contiguous.

    Returns:
        `attended`, as [tokens, heads * head_dim].
    """
    attended = attended.flatten(1)
    return state_ops.gated(attended, projected[:, : attended.shape[1]], attended) if config.output_gate else attended


def rotary_options(
    config: ModelConfig, layer: int, weights: Weights, rope: Rope | None, positions: Tensor, growth: Tensor | None
) -> dict[str, Any]:
    """The arguments of `ops.rotary` and `ops.rotary_store` that follow from a layer and its tokens' positions.

    Args:
        config: Configuration of the model.
        layer: Number of the layer.
        weights: Tensors of the layer, by name.
        rope: Cos and sin of the layer's rotary positions (`rope_table`); None: positions are learned.
        positions: Position of each token, int64 [tokens].
        growth: Factor of the queries at each position (`query_growth_table`); None: 1.
    """
    norms = None
    if config.qk_norm:  # without keys the second one is not used
        norms = weights["q_norm.weight"], weights.get("k_norm.weight", weights["q_norm.weight"])
    return {
        "scale": config.attention_scale,
        "growth": growth,
        "rope": rope,
        "positions": positions,
        "norms": norms,
        "eps": config.norm_eps,
        "value_norm": config.value_norm,
        "keys_are_values": config.kind_of(layer).keys_are_values,
    }


def post_attention(
    config: ModelConfig,
    weights: Weights,
    hidden: Tensor,
    attention: Tensor,
    out: Tensor | None = None,
    on_input: OnInput | None = None,
    *,
    per_layer: Tensor | None = None,
    reduce: Reduce | None = None,
    on_counts: OnCounts | None = None,
) -> Tensor:
    """Compute a layer's output from the result of its attention: output projection, residual adds, norms and MLP.

    Args:
        config: Configuration of the model.
        weights: Tensors of the layer, by name.
        hidden: Input of the layer, [tokens, hidden].
        attention: Result of the attention, [tokens, heads * head_dim].
        out: Tensor for the output, which may be `hidden`. None: a new tensor.
        on_input: Function that is called with the name of each weight and its input; or None.
        per_layer: The tokens' input of this layer (`per_layer_inputs`), [tokens, per_layer_size]; None: the model has
            none.
        reduce: All-reduce over tensor-parallel ranks, which is called for the output projection and for the MLP. None:
            the weights are those of the whole layer.
        on_counts: Function that is called with the number of tokens of each expert; or None.

    Returns:
        Output of the layer, [tokens, hidden].
    """
    hidden = _with_attention(config, weights, hidden, attention, out, on_input, reduce)
    if "router.weight" in weights:
        y = _experts_output(config, weights, hidden, None, on_input, reduce, on_counts)
        return _layer_output(config, weights, torch.add(hidden, y, out=out), per_layer, on_input)
    x = _mlp_input(config, weights, hidden)
    x = linear(weights, "gate_up" if config.gated_mlp else "up", x, on_input, activation=config.mlp_activation)
    hidden = _added(config, weights, "down", x, hidden, out, on_input, reduce)
    if config.norm_place == "sums":
        hidden = norm(config, weights, "post_norm", hidden, out)
    return _layer_output(config, weights, hidden, per_layer, on_input)


def route_tokens(
    config: ModelConfig, weights: Weights, hidden: Tensor, attention: Tensor, reduce: Reduce | None = None
) -> Routes:
    """Compute `post_attention` of a layer up to the router: choose each token's experts, without computing them.

    Args:
        config: Configuration of the model.
        weights: Tensors of the layer, by name.
        hidden: Input of the layer, [tokens, hidden]. It is overwritten with the sum of input and attention.
        attention: Result of the attention, [tokens, heads * head_dim].
        reduce: All-reduce over tensor-parallel ranks; or None.

    Returns:
        Weights of each token's experts, fp32, and their numbers, int64: each [tokens, experts_per_token].
    """
    hidden = _with_attention(config, weights, hidden, attention, hidden, reduce=reduce)
    return route(config, weights, _router_input(config, weights, hidden))


def add_experts(
    config: ModelConfig,
    weights: Weights,
    hidden: Tensor,
    routes: Routes,
    per_layer: Tensor | None = None,
    reduce: Reduce | None = None,
    on_counts: OnCounts | None = None,
) -> None:
    """Compute the rest of `post_attention` after `route_tokens`: add the experts' output to `hidden`, in place.

    Args:
        config: Configuration of the model.
        weights: Tensors of the layer, by name.
        hidden: Sum of input and attention, [tokens, hidden], from `route_tokens`.
        routes: Result of `route_tokens`.
        per_layer: The tokens' input of this layer, [tokens, per_layer_size]; or None.
        reduce: All-reduce over tensor-parallel ranks; or None.
        on_counts: Function that is called with the number of tokens of each expert; or None.
    """
    y = _experts_output(config, weights, hidden, routes, None, reduce, on_counts)
    _layer_output(config, weights, torch.add(hidden, y, out=hidden), per_layer, None)


def _experts_output(
    config: ModelConfig,
    weights: Weights,
    hidden: Tensor,
    routes: Routes | None,
    on_input: OnInput | None,
    reduce: Reduce | None,
    on_counts: OnCounts | None,
) -> Tensor:
    """The summand of `hidden` that a mixture of experts gives, with the MLP beside it if the model has one.

    Args:
        config: Configuration of the model.
        weights: Tensors of the layer, by name.
        hidden: Sum of input and attention, [tokens, hidden].
        routes: Result of `route_tokens`; None: experts are chosen here.
        on_input: Function that is called with the name of each weight and its input; or None.
        reduce: All-reduce over tensor-parallel ranks; or None.
        on_counts: Function that is called with the number of tokens of each expert; or None.
    """
    x = _mlp_input(config, weights, hidden)
    if not config.mlp_beside_experts:
        y = experts(config, weights, x, on_input, routes=routes, on_counts=on_counts)
        if reduce:
            reduce(y)
        return y
    inner = linear(weights, "shared_gate_up", x, on_input, activation=config.mlp_activation)
    of_mlp = linear(weights, "shared_down", inner, on_input)
    routes = route(config, weights, _router_input(config, weights, hidden)) if routes is None else routes
    x = norm(config, weights, "experts_norm", hidden)
    of_experts = experts(config, weights, x, on_input, routes=routes, on_counts=on_counts)
    if reduce:
        reduce(of_mlp)
        reduce(of_experts)
    y = norm(config, weights, "shared_out_norm", of_mlp, of_mlp)
    y.add_(norm(config, weights, "experts_out_norm", of_experts, of_experts))
    return norm(config, weights, "down_norm", y, y)


def _layer_output(
    config: ModelConfig, weights: Weights, hidden: Tensor, per_layer: Tensor | None, on_input: OnInput | None
) -> Tensor:
    """The output of a layer from the sum after its MLP, [tokens, hidden], in place: per-layer input and scale."""
    if per_layer is not None:
        x = linear(weights, "per_layer_up", hidden, on_input, activation=config.activation)
        y = linear(weights, "per_layer_down", x.mul_(per_layer), on_input)
        hidden.add_(norm(config, weights, "per_layer_norm", y, y))
    if config.layer_scale:
        hidden.mul_(weights["layer_scale.weight"])
    return hidden


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
    return norm(config, weights, "input_norm", hidden, out) if config.norm_place == "sums" else hidden


def _mlp_input(config: ModelConfig, weights: Weights, hidden: Tensor) -> Tensor:
    return norm(config, weights, "post_norm", hidden) if config.input_norms else hidden


def _router_input(config: ModelConfig, weights: Weights, hidden: Tensor) -> Tensor:
    if config.mlp_beside_experts:
        return norm(config, weights, "router_norm", hidden)
    return _mlp_input(config, weights, hidden)


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
    """`hidden` plus a linear layer of x.

    The linear layer's output is first summed over tensor-parallel ranks, and normed if the model norms it.
    """
    if not config.output_norms and reduce is None:
        return linear(weights, name, x, on_input, residual=hidden, out=out)
    y = linear(weights, name, x, on_input)
    if reduce:
        reduce(y)
    if config.output_norms:
        y = norm(config, weights, f"{name}_norm", y, y)
    return torch.add(hidden, y, out=out)


def before_logits(config: ModelConfig, weights: Weights, hidden: Tensor) -> Tensor:
    """Compute the input of the output matrix, [tokens, embed], from the last layer's output [tokens, hidden]."""
    x = norm(config, weights, "final_norm", hidden) if config.final_norm else hidden
    if config.logit_scale != 1:
        x = x * config.logit_scale
    return linear(weights, "head_proj", x) if "head_proj.weight" in weights else x


def logits(
    config: ModelConfig, x: Tensor, rows: ops.Weight, out: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """Compute logits, fp32 [tokens, rows], for all or some rows of the output matrix.

    Args:
        config: Configuration of the model.
        x: Result of `before_logits`, [tokens, embed].
        rows: Rows of the output matrix, [rows, embed].
        out: Tensor for the logits. None: a new tensor.
        bias: Bias of these rows, [rows]; None: there is none.
    """
    scores = ops.linear(x, rows, out=out, out_dtype=torch.float32)
    if bias is not None:
        scores += bias
    return scores.div_(config.logit_softcap).tanh_().mul_(config.logit_softcap) if config.logit_softcap else scores
