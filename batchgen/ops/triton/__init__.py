"""The Triton kernels for tensors of a CUDA GPU, with the signatures of `batchgen/ops/cpp.py`.

Only `ops` imports this package, when a tensor is on a GPU and Triton is installed.
"""

from batchgen.ops.triton.attention import cut_attention, paged_attention, prepare_attention, supports_attention
from batchgen.ops.triton.block_rows import block_rows
from batchgen.ops.triton.conv import causal_conv
from batchgen.ops.triton.delta import delta_gates, delta_rule
from batchgen.ops.triton.grouped import grouped_experts
from batchgen.ops.triton.grouped_many import many_through_experts, takes_many
from batchgen.ops.triton.launch import card
from batchgen.ops.triton.linear import linear
from batchgen.ops.triton.norm import MAX_COLUMNS, gate, gated, gated_norm, norm
from batchgen.ops.triton.packed import packed_linear
from batchgen.ops.triton.plan import Capacity, CutPlan, DevicePlan
from batchgen.ops.triton.rotary import rotary_store, supports_rotary
from batchgen.ops.triton.rows import gather_rows, scatter_rows
from batchgen.ops.triton.sampling import argmax, argmax_if_finite, draw, forbid
from batchgen.ops.triton.weights import dequantize, quantize

__all__ = [
    "MAX_COLUMNS",
    "Capacity",
    "CutPlan",
    "DevicePlan",
    "argmax",
    "argmax_if_finite",
    "block_rows",
    "card",
    "causal_conv",
    "cut_attention",
    "delta_gates",
    "delta_rule",
    "dequantize",
    "draw",
    "forbid",
    "gate",
    "gated",
    "gated_norm",
    "gather_rows",
    "grouped_experts",
    "linear",
    "many_through_experts",
    "norm",
    "packed_linear",
    "paged_attention",
    "prepare_attention",
    "quantize",
    "rotary_store",
    "scatter_rows",
    "supports_attention",
    "supports_rotary",
    "takes_many",
]
