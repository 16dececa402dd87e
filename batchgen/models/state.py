"""The computation of a state layer between its projections: convolution, update of the states, gates and norm.

`layers.pre_attention` computes norm and projections before it, `layers.post_attention` all that follows. Operations are
those of `ops`; `state_layers.py` has the shapes.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor

from batchgen.models.config import ModelConfig
from batchgen.models.experts import Weights
from batchgen.models.state_layers import DeltaNet, ShortConv
from batchgen.ops import state_dispatch as ops
from batchgen.ops.state_slots import StateSlots

# The factors of the convolution, a tensor of two dimensions that no other is multiplied with as a matrix.
CONVOLUTION = "conv.weight"
# Tensors of a state layer that `mix_state` takes.
STATE_TENSORS = (CONVOLUTION, "conv.bias", "a_log", "dt_bias", "state_norm.weight")


class StateViews(NamedTuple):
    """The states in the slots of one layer's pool, as tensors; slots may lie apart.

    Attributes:
        inputs: The last inputs of the convolution, the oldest first, [slots, channels, kernel - 1], in the compute
            dtype.
        matrices: Recurrent states, fp32 or bf16 [slots, value_heads, key_dim, value_dim]; None: the layer has none.
    """

    inputs: Tensor
    matrices: Tensor | None


def mix_state(
    config: ModelConfig,
    weights: Weights,
    projected: Tensor,
    states: StateViews,
    slots: StateSlots,
    out: Tensor | None = None,
) -> Tensor:
    """Update the states of sequences by their tokens, and compute what the output projection takes.

    Args:
        config: Configuration of the model.
        weights: Tensors of the layer, by name.
        projected: Result of `layers.pre_attention` for all sequences, packed, [tokens, `state.projected_width`]; rows
            may lie apart.
        states: States of the layer, which are updated.
        slots: Slots of the sequences, and their tokens in `projected`.
        out: Tensor for the result, contiguous. None: a new tensor.

    Returns:
        Result [tokens, `state.out_size`].
    """
    state = config.state
    if isinstance(state, ShortConv):
        b, c, x = projected.split(state.channels, dim=1)
        bias = cast("Tensor | None", weights.get("conv.bias"))
        y = ops.causal_conv(b * x, weights["conv.weight"], bias, states.inputs, slots, silu=False)
        return torch.mul(c, y, out=y if out is None else out)
    assert isinstance(state, DeltaNet) and states.matrices is not None, "the layer is a Gated DeltaNet"
    mixed, z, b, a = projected.split((state.channels, state.out_size, state.value_heads, state.value_heads), dim=1)
    qkv = ops.causal_conv(mixed, weights["conv.weight"], None, states.inputs, slots, silu=True)
    g, beta = ops.delta_gates(a, b, weights["a_log"], weights["dt_bias"])
    by_head = None if out is None else out.view(-1, state.value_heads, state.value_dim)
    y = ops.delta_rule(qkv, g, beta, states.matrices, slots, key_heads=state.key_heads, out=by_head)
    y = ops.gated_norm(y, z, weights["state_norm.weight"], config.norm_eps, y)
    if state.out_by_member:
        y.copy_(y.unflatten(1, (state.key_heads, -1)).transpose(1, 2).reshape(y.shape))
    return y.flatten(1)
