"""A mixture of experts: the MLPs that each token goes through, and their products.

Tokens are sorted by expert, so that each expert multiplies all of its tokens at once (MegaBlocks: Gale et al., 2022). A
token's results are added in the order in which its experts were chosen, so a row's result does not depend on those
beside it. On the CPU matrices are split into those of each expert (`split_experts`), and all experts' products are the
items of one loop. On a device the host must not wait for what the router chooses: matrices of all experts stay
together, for kernels that find each token's on the device.
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
from batchgen.ops.scratch import scratch

Weights = Mapping[str, ops.Weight]
# (name of a matrix, what it is multiplied with [tokens, in])
OnInput = Callable[[str, Tensor], None]
# (tokens of each expert)
OnCounts = Callable[[Sequence[int]], None]

# Matrices of all experts of a layer, one after the other in the rows.
MATRICES = ("gate_up.weight", "down.weight")
STACKED = (*MATRICES, "gate_up.bias", "down.bias")
# Weights of the experts' results, fp32, and the experts' numbers, int64: [tokens, experts_per_token] each.
Routes = tuple[Tensor, Tensor]


def split_experts(config: ModelConfig, tensors: Weights, layer: int) -> dict[str, ops.Weight]:
    """A layer's tensors, those of all experts split into one for each: "down.3.weight" is the fourth expert's."""
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
    """The rows of a weight in `count` equal parts, without a copy."""
    if isinstance(weight, ops.SplitWeight):
        return [ops.SplitWeight(parts) for parts in zip(*(_chunks(part, count) for part in weight.parts), strict=True)]
    if isinstance(weight, kernels.BlockWeight):
        return [replace(weight, data=part) for part in weight.data.chunk(count)]
    assert not isinstance(weight, kernels.PackedWeight | kernels.BoundWeight)
    return list(weight.chunk(count))


def is_of_experts(name: str) -> bool:
    """True for a stored matrix of all experts of a layer, or of one role in it: "gate_up.gate.weight"."""
    stem, kind = name.split(".")[0], name.rsplit(".", 1)[1]
    return f"{stem}.{kind}" in MATRICES


def route(config: ModelConfig, weights: Weights, x: Tensor) -> Routes:
    """The experts of each token, the most probable first.

    Args:
        config: The model's.
        weights: With "router.weight" [experts, hidden], and "router.bias" where it has one.
        x: [tokens, hidden].

    Returns:
        Weights of their results, fp32, and their numbers, int64: [tokens, experts_per_token].
    """
    probs = ops.linear(x, weights["router.weight"], weights.get("router.bias"), out_dtype=torch.float32).softmax(-1)
    shares, chosen = probs.topk(config.experts_per_token)
    return (shares / shares.sum(-1, keepdim=True) if config.norm_topk else shares), chosen


def experts(
    config: ModelConfig,
    weights: Weights,
    x: Tensor,
    on_input: OnInput | None = None,
    *,
    routes: Routes | None = None,
    on_counts: OnCounts | None = None,
) -> Tensor:
    """The weighted sum of the chosen experts' results, and of the expert that all tokens share: [tokens, hidden].

    Args:
        config: Configuration of the model.
        weights: Tensors of the layer from `split_experts`; or as they are stored, all experts together: then the host
            need not wait for the router, and `on_input` and `on_counts` are not called.
        x: [tokens, hidden].
        on_input: Called with the name of each weight and its input.
        routes: Result of `route` for x, where that is known.
        on_counts: Called with the tokens of each expert.
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
    total = kernels.weighted_sums(
        results, row_of_choice, shares, torch.float32 if config.shared_expert_size else x.dtype
    )
    return _with_shared(config, weights, x, total, on_input).to(x.dtype)


def _grouped(weights: Weights, name: str, x: Tensor, counts: Sequence[int], out: Tensor, **options: Any) -> Tensor:
    """Products of each expert's rows of x with its own matrix, which experts without rows need not have."""
    chosen = [e for e, count in enumerate(counts) if count]
    matrices = [weights[f"{name}.{e}.weight"] for e in chosen]
    biases = [weights.get(f"{name}.{e}.bias") for e in chosen]
    return ops.grouped_linear(x, matrices, [counts[e] for e in chosen], biases, out=out, **options)


def _with_shared(config: ModelConfig, weights: Weights, x: Tensor, total: Tensor, on_input: OnInput | None) -> Tensor:
    """`total`, fp32, plus the shared expert's result for all tokens, weighted by the sigmoid of its gate.

    It is `total` itself where there is no shared expert.
    """
    if not config.shared_expert_size:
        return total
    weight = ops.linear(x, weights["shared_gate.weight"], out_dtype=torch.float32).sigmoid_()
    inner = ops.linear(x, weights["shared_gate_up.weight"], activation=config.mlp_activation)
    if on_input:
        on_input("shared_gate_up.weight", x)
        on_input("shared_down.weight", inner)
    return total.addcmul_(ops.linear(inner, weights["shared_down.weight"]), weight)


def _expert(config: ModelConfig, weights: Weights, e: int, x: Tensor, out: Tensor, inner: Tensor) -> None:
    (gate_up, bias), (down, last_bias) = (
        (weights[f"{name}.{e}.weight"], weights.get(f"{name}.{e}.bias")) for name in ("gate_up", "down")
    )
    ops.linear(x, gate_up, bias, activation=config.mlp_activation, out=inner)
    ops.linear(inner, down, last_bias, out=out)


def together(config: ModelConfig, weights: Weights, x: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
    """The weighted sum, fp32, of the results of experts whose matrices are not split."""
    gate_up, down = (weights[name] for name in MATRICES)
    if not ops.groups_experts(x, gate_up, down):
        return all_experts(config, weights, x, shares, chosen)
    biases = weights.get("gate_up.bias"), weights.get("down.bias")
    return ops.grouped_experts(x, shares, chosen, gate_up, biases[0], down, biases[1], config.mlp_activation)


def all_experts(config: ModelConfig, weights: Weights, x: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
    """The result of `together` where there are no kernels: every expert multiplies all tokens.

    That is experts / experts_per_token times the work.
    """
    weights = _split(config, weights)
    of_each = shares.new_zeros(len(x), config.num_experts).scatter_(1, chosen, shares)
    total = torch.zeros_like(x, dtype=torch.float32)
    inner, result = x.new_empty(len(x), config.intermediate_size), torch.empty_like(x)
    for e in range(config.num_experts):
        _expert(config, weights, e, x, result, inner)
        total += result * of_each[:, e : e + 1]
    return total
