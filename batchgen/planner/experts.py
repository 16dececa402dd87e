"""Experts of a layer that a sweep touches, and what follows from it: when to read only these, and from how many tokens on reading all pays."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from batchgen.models.config import ModelConfig
from batchgen.models.layouts import layer_sizes
from batchgen.planner.cost import dequantize_weights_s, elementwise_s, experts_touched, linear_s
from batchgen.planner.flow import Phase
from batchgen.planner.inputs import CostInputs

_MOST_TOKENS = 1 << 20  # of a sweep that is looked at


def expert_bytes(config: ModelConfig, dtype: str, weight_format: str) -> dict[str, int]:
    """Stored bytes of the matrices of one expert, by the group that they are in; the mean where formats of layers differ.

    None where there are no experts.
    """
    if not config.num_experts:
        return {}
    layers = [s for j, s in enumerate(layer_sizes(config, dtype, weight_format)) if config.has_experts(j)]
    found = {}
    for group, stem in (("up", "gate_up."), ("down", "down.")):
        total = sum(
            size for s in layers for name, size in s.items() if name.startswith(stem) and name.endswith(".weight")
        )
        found[group] = total // (len(layers) * config.num_experts)
    return found


def on_demand_tokens(s: CostInputs, weight_layers: Mapping[str, tuple[float, float, float]]) -> int:
    """The most tokens of a sweep with which a layer is done sooner where of its experts only those touched are read, after the router.

    Reading all of them goes on beside the products of the layers before. Reading some waits for the layer's router, and its
    products wait for that; what all tokens need is still read ahead. Of 4-bit weights, only experts that were read are dequantized.

    Args:
        weight_layers: as of `Policy`.
    """
    if s.on_gpu or not s.model.num_experts:
        return 0
    model, hardware = s.model, s.hardware
    on_disk = {group: counts[2] / model.num_layers for group, counts in weight_layers.items()}
    mixtures = model.expert_layers / model.num_layers
    sizes = expert_bytes(model, s.compute_format, s.weight_format)
    one_s = sum(on_disk[group] * mixtures * size for group, size in sizes.items()) / hardware.disk_read_bytes_per_s
    requests_s = sum(on_disk[group] * mixtures for group in sizes) * hardware.disk_read_overhead_s
    all_s = sum(part * s.group_bytes[group] for group, part in on_disk.items()) / hardware.disk_read_bytes_per_s
    if not one_s:
        return 0
    dequantize_s = dequantize_weights_s(s)
    of_experts_s = dequantize_s * expert_frac(model)

    def is_sooner(tokens: int) -> bool:
        touched = experts_touched(model, tokens)
        products_s = _products_s(s, tokens)
        read_ahead_s = max(all_s - model.num_experts * one_s, products_s + dequantize_s - of_experts_s)
        some_s = touched * (one_s + requests_s) + read_ahead_s + of_experts_s * touched / model.num_experts
        return some_s < max(all_s, products_s + dequantize_s)

    return _first(lambda tokens: not is_sooner(tokens)) - 1


def break_even_tokens(s: CostInputs, moved_s: float) -> int:
    """Tokens of a sweep from which on a layer's products take as long as bringing its weights; 0: whatever they are, or never.

    Args:
        moved_s: of the weights of one layer that are brought to the compute device in every sweep.
    """
    first = _first(lambda tokens: _products_s(s, tokens) >= moved_s)
    return first if 1 < first < _MOST_TOKENS else 0


def expert_frac(model: ModelConfig) -> float:
    """Of the weights of a layer, those of matrices of its experts."""
    return model.num_experts * model.expert_params * model.expert_layers / model.num_layers / model.params_per_layer


def _products_s(s: CostInputs, tokens: int) -> float:
    phase = Phase(1, 0, 0, tokens, 1)
    return linear_s(s, phase) + elementwise_s(s, phase)


def _first(holds: Callable[[int], bool]) -> int:
    """The smallest number of tokens for which it holds, as it does for all larger ones; `_MOST_TOKENS`: if that is too few."""
    low, high = 1, _MOST_TOKENS
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low
