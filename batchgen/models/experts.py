"""The mixture of experts of a layer: the router, and the MLPs of the experts that it chooses for each token.

Tokens are sorted by expert, so that each expert multiplies all its tokens at once (MegaBlocks: Gale et al., 2022). The
results of a token's experts are added in the order in which the router ranks them. So the result of a token does not
depend on other tokens.

On the CPU, `split_experts` splits the stacked matrices into one matrix for each expert. The products of all experts are
then one loop. On a GPU the matrices of all experts stay stacked, and kernels find the experts of each token, so that
the host does not wait for the router's choice. On a GPU without such kernels it does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from batchgen.models.config import ModelConfig
from batchgen.ops import cpp as kernels
from batchgen.ops import dispatch as ops
from batchgen.ops.host_copy import fetch
from batchgen.ops.long_steps import note
from batchgen.ops.scratch import scratch

Weights = Mapping[str, ops.Weight]
# (name of a matrix, what it is multiplied with [tokens, in])
OnInput = Callable[[str, Tensor], None]
# (tokens of each expert)
OnCounts = Callable[[Sequence[int]], None]

# Matrices of all experts of a layer, one after the other in the rows.
MATRICES = ("gate_up.weight", "down.weight")
STACKED = (*MATRICES, "gate_up.bias", "down.bias")
# Operations of an expert's two products on a GPU, at most; those of packed matrices are noted where they are launched.
_EXPERT_OPERATIONS = 24
# Summand of the sum of sigmoids that weights are divided by, as in LFM2-MoE.
_LEAST_SUM = 1e-6
# Weights of the experts' results, fp32, and the experts' numbers, int64: [tokens, experts_per_token] each.
Routes = tuple[Tensor, Tensor]


def split_experts(config: ModelConfig, tensors: Weights, layer: int) -> dict[str, ops.Weight]:
    """The tensors of a layer, with one matrix for each expert in place of the stacked matrices.

    Args:
        config: Configuration of the model.
        tensors: Tensors of the layer as they are stored, by name: "down.weight" has the rows of all experts.
        layer: Number of the layer.

    Returns:
        Tensors by name, as views: "down.3.weight" is the matrix of the expert with number 3.
    """
    return _split(config, tensors) if config.has_experts(layer) else dict(tensors)


def _split(config: ModelConfig, tensors: Weights) -> dict[str, ops.Weight]:
    split: dict[str, ops.Weight] = {}
    for name, tensor in tensors.items():
        if name in STACKED:
            stem, kind = name.rsplit(".", 1)
            split |= {f"{stem}.{e}.{kind}": part for e, part in enumerate(_chunks(tensor, config.num_experts))}
        else:
            split[name] = tensor
    return split


def _chunks(weight: ops.Weight, count: int) -> list[ops.Weight]:
    """The rows of a weight in `count` equal parts, as views."""
    if isinstance(weight, ops.SplitWeight):
        return [ops.SplitWeight(parts) for parts in zip(*(_chunks(part, count) for part in weight.parts), strict=True)]
    if isinstance(weight, kernels.BlockWeight):
        return [replace(weight, data=part) for part in weight.data.chunk(count)]
    assert not isinstance(weight, kernels.PackedWeight | kernels.BoundWeight)
    return list(weight.chunk(count))


def is_of_experts(name: str) -> bool:
    """True for the name of a stored matrix that has rows of all experts, such as "gate_up.gate.weight"."""
    stem, kind = name.split(".")[0], name.rsplit(".", 1)[-1]
    return f"{stem}.{kind}" in MATRICES


def route(config: ModelConfig, weights: Weights, x: Tensor) -> Routes:
    """Choose the experts of each token: those with the largest weights, in decreasing order.

    A model may add a bias to each expert's weight for the choice alone.

    Args:
        config: Configuration of the model.
        weights: Tensors of the layer, among them "router.weight" [experts, hidden] and perhaps "router.bias" and
            "expert_bias" [experts]. "expert_scale.weight" [experts], if it is there, has a factor of each expert's
            result.
        x: Input of the router, [tokens, hidden]: that of the MLP, mostly.

    Returns:
        Weights of the chosen experts' results, fp32, and the experts' numbers, int64: each [tokens, experts_per_token].
    """
    scores = ops.linear(x, weights["router.weight"], weights.get("router.bias"), out_dtype=torch.float32)
    if config.sparsemixer_jitter is not None:
        return _sparsemixer(scores, config.sparsemixer_jitter)
    if config.mlp_beside_experts:
        scores.mul_(config.hidden_size**-0.5)
    is_sigmoid = config.router_activation == "sigmoid"
    scores = scores.sigmoid_() if is_sigmoid else scores.softmax(-1)
    biased = scores + weights["expert_bias"] if config.expert_bias else scores
    chosen = biased.topk(config.experts_per_token).indices
    shares = scores.gather(1, chosen)
    if config.norm_topk:
        shares = shares / (shares.sum(-1, keepdim=True) + (_LEAST_SUM if is_sigmoid else 0.0))
    if (scale := weights.get("expert_scale.weight")) is not None:
        assert isinstance(scale, Tensor), "factors are numbers"
        shares = shares * scale.float()[chosen]
    return (shares if config.routed_scale == 1 else shares * config.routed_scale), chosen


def _sparsemixer(scores: Tensor, jitter: float) -> Routes:
    """The two experts of each token by SparseMixer (Liu et al., 2024), as it chooses them outside of training.

    The first one has the largest score, the second one the largest score of the others. The share of each is a softmax
    over the scores, the first expert's left out for the second, of which only those near the largest one count.

    Args:
        scores: Scores of the router, fp32 [tokens, experts].
        jitter: Half of the largest distance to the largest score, as a part of the larger absolute value of both.
    """
    shares, chosen, left = [], [], scores
    for _ in range(2):
        largest, expert = left.max(-1, keepdim=True)
        distance = (largest - scores) / scores.abs().clamp(min=largest)
        near = left.masked_fill(distance > 2 * jitter, -torch.inf)
        shares.append(near.softmax(-1).gather(-1, expert))
        chosen.append(expert)
        left = left.scatter(-1, expert, -torch.inf)
    return torch.cat(shares, -1), torch.cat(chosen, -1)


def experts(
    config: ModelConfig,
    weights: Weights,
    x: Tensor,
    on_input: OnInput | None = None,
    *,
    routes: Routes | None = None,
    on_counts: OnCounts | None = None,
) -> Tensor:
    """Compute the MLP of a mixture of experts: for each token, the weighted sum of its experts' results.

    The result of a shared expert is added.

    Args:
        config: Configuration of the model.
        weights: Tensors of the layer, from `split_experts` or with stacked experts. With stacked experts the host need
            not wait for the router, and `on_input` and `on_counts` are not called.
        x: Input of the MLP, [tokens, hidden].
        on_input: Function that is called with the name of each weight and its input; or None.
        routes: Result of `route` for x. None: `route` is called.
        on_counts: Function that is called with the number of tokens of each expert; or None.

    Returns:
        Sums [tokens, hidden].
    """
    shares, chosen = route(config, weights, x) if routes is None else routes
    if "down.weight" in weights:
        total = together(config, weights, x, shares, chosen)
        return _with_shared(config, weights, x, total, on_input).to(x.dtype)
    token_of_row, row_of_choice, counts = kernels.sort_by_expert(chosen, config.num_experts)
    if on_counts:
        on_counts(counts)
    count = len(token_of_row)
    rows = kernels.gather_rows(x, token_of_row, scratch("rows of experts", (count, x.shape[1]), x.dtype))
    inner = scratch("within experts", (count, config.intermediate_size), x.dtype)
    if on_input:
        on_input("gate_up.weight", rows)
    _grouped(weights, "gate_up", rows, counts, inner, activation=config.mlp_activation)
    if on_input:
        on_input("down.weight", inner)
    results = _grouped(weights, "down", inner, counts, rows)  # over its own input
    sums_dtype = torch.float32 if _adds_shared(config) else x.dtype
    total = kernels.weighted_sums(results, row_of_choice, shares, sums_dtype)
    return _with_shared(config, weights, x, total, on_input).to(x.dtype)


def _grouped(weights: Weights, name: str, x: Tensor, counts: Sequence[int], out: Tensor, **options: Any) -> Tensor:
    """Products of the rows of x with the matrices of their experts. An expert without rows need not have a matrix.

    Args:
        weights: Tensors of the layer, from `split_experts`.
        name: Name of the matrix in each expert: "down".
        x: Rows sorted by expert, [rows, in].
        counts: Number of rows of each expert.
        out: Tensor for the products, [rows, out].
        options: Further arguments of `ops.grouped_linear`.
    """
    chosen = [e for e, count in enumerate(counts) if count]
    matrices = [weights[f"{name}.{e}.weight"] for e in chosen]
    biases = [weights.get(f"{name}.{e}.bias") for e in chosen]
    return ops.grouped_linear(x, matrices, [counts[e] for e in chosen], biases, out=out, **options)


def _adds_shared(config: ModelConfig) -> bool:
    """True for a model whose shared expert has the experts' input, and whose result is added to theirs."""
    return config.shared_expert_size > 0 and not config.mlp_beside_experts


def _with_shared(config: ModelConfig, weights: Weights, x: Tensor, total: Tensor, on_input: OnInput | None) -> Tensor:
    """`total`, fp32 [tokens, hidden], plus the result of the shared expert, weighted by the sigmoid of its gate if any.

    It is `total` itself if the model has no shared expert.
    """
    if not _adds_shared(config):
        return total
    inner = ops.linear(x, weights["shared_gate_up.weight"], activation=config.mlp_activation)
    if on_input:
        on_input("shared_gate_up.weight", x)
        on_input("shared_down.weight", inner)
    result = ops.linear(inner, weights["shared_down.weight"])
    if not config.shared_gate:
        return total.add_(result)
    return total.addcmul_(result, ops.linear(x, weights["shared_gate.weight"], out_dtype=torch.float32).sigmoid_())


def _expert(config: ModelConfig, weights: Weights, e: int, x: Tensor, out: Tensor, inner: Tensor) -> None:
    (gate_up, bias), (down, last_bias) = (
        (weights[f"{name}.{e}.weight"], weights.get(f"{name}.{e}.bias")) for name in ("gate_up", "down")
    )
    ops.linear(x, gate_up, bias, activation=config.mlp_activation, out=inner)
    ops.linear(inner, down, last_bias, out=out)


def together(config: ModelConfig, weights: Weights, x: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
    """The weighted sum of the results of each token's experts, fp32 [tokens, hidden], for stacked matrices."""
    gate_up, down = (weights[name] for name in MATRICES)
    if not ops.groups_experts(x, gate_up, down):
        return chosen_experts(config, weights, x, shares, chosen)
    biases = weights.get("gate_up.bias"), weights.get("down.bias")
    return ops.grouped_experts(x, shares, chosen, gate_up, biases[0], down, biases[1], config.mlp_activation)


def chosen_experts(config: ModelConfig, weights: Weights, x: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
    """The result of `together` in torch, on any device: every expert multiplies its own tokens, one expert at a time.

    The host waits once, for the number of tokens of each expert.
    """
    weights, k, flat = _split(config, weights), chosen.shape[1], chosen.reshape(-1)
    order = flat.argsort(stable=True)
    counts = flat.new_zeros(config.num_experts).scatter_add_(0, flat, torch.ones_like(flat))
    place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device)).view(-1, k)
    rows, start = x.index_select(0, order // k), 0
    for e, count in enumerate(fetch(counts).tolist()):
        if count:
            some = rows[start : start + count]
            _expert(config, weights, e, some, some, x.new_empty(count, config.intermediate_size))
            note(_EXPERT_OPERATIONS)
        start += count
    total = torch.zeros_like(x, dtype=torch.float32)
    for i in range(k):
        total.addcmul_(rows.index_select(0, place[:, i]).float(), shares[:, i : i + 1])
    return total
