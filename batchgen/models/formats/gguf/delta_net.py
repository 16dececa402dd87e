"""Gated DeltaNet layers in a GGUF: the names of their tensors, and their shape.

llama.cpp's converter stores -exp(A_log) in place of A_log, and orders value heads of Qwen3.5 by their number within a
group first (`head_order.by_group` puts rows back; columns of "ssm_out" stay so, `DeltaNet.out_by_member`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from batchgen.core.errors import InputError
from batchgen.models.families import DELTA_NETS
from batchgen.models.state_layers import DeltaNet
from batchgen.models.stated_numbers import require_positive
from batchgen.models.tensor_files.headers import TensorInfo

# Role of a matrix (`layouts.role`) -> its name in a layer.
STATE_MATRICES = {"in_qkv": "attn_qkv", "in_z": "attn_gate", "state_out": "ssm_out"}
# Part of a layout, without its suffix -> its name in a layer.
STATE_VECTORS = {"a": "ssm_alpha", "b": "ssm_beta", "ba": "ssm_ba", "conv": "ssm_conv1d", "state_norm": "ssm_norm"}
# Part of a layout -> its name in a layer with its suffix, where it has another one.
_OTHER_SUFFIXES = {"linear_attn.A_log": "ssm_a", "linear_attn.dt_bias": "ssm_dt.bias"}
# Families whose files order value heads by their number within a group.
_BY_MEMBER = ("qwen3_5", "qwen3_5_moe")


def name_in_layer(part: str) -> str | None:
    """The name of a tensor in a layer, for a part whose suffix differs from that of the layout; None: it does not."""
    return _OTHER_SUFFIXES.get(part)


def read_states(
    fields: Mapping[str, Any], family: str, tensors: Mapping[str, TensorInfo], layers: int
) -> dict[str, Any]:
    """The fields of a ModelConfig that describe its state layers.

    Args:
        fields: Key-value pairs of the architecture.
        family: Family of the model.
        tensors: Tensors of the file, which show the layers that have a state.
        layers: Number of layers.

    Raises:
        InputError: A value is missing, or the file is of a converter that is not supported.
    """
    if family not in DELTA_NETS:
        return {}
    states = tuple(layer for layer in range(layers) if f"blk.{layer}.ssm_conv1d.weight" in tensors)
    if not states:
        return {"output_gate": True}
    if any(f"blk.{layer}.ssm_in.weight" in tensors for layer in states):
        raise InputError(
            "the GGUF is of an early converter of Qwen3-Next (ssm_in), which is not supported: take a newer one"
        )
    if len(states) == layers:
        raise InputError("the GGUF has no layer with attention (attn_q): it is incomplete")
    names = ("conv_kernel", "state_size", "group_count", "time_step_rank", "inner_size")
    for name in names:
        if fields.get(f"ssm.{name}") is None:
            raise InputError(f"the model's configuration has no 'ssm.{name}'")
        require_positive(f"ssm.{name}", fields[f"ssm.{name}"])
    kernel, key_dim, key_heads, value_heads, inner = (fields[f"ssm.{name}"] for name in names)
    if inner % value_heads:
        raise InputError(f"ssm.inner_size {inner} is not a multiple of ssm.time_step_rank {value_heads}")
    by_member = family in _BY_MEMBER and key_heads != value_heads
    shape = DeltaNet(key_heads, value_heads, key_dim, inner // value_heads, kernel, out_by_member=by_member)
    return {"output_gate": True, "state": shape, "state_layers": states}
