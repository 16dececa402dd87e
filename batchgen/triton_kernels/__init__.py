"""Triton kernels for CUDA tensors: the counterparts of batchgen/kernels.py, with the signatures of `ops`.

Nothing imports this but `ops`, and only where a tensor lies on a card and Triton is installed.
"""

from batchgen.triton_kernels.attention import cut_attention, paged_attention, prepare_attention, supports_attention
from batchgen.triton_kernels.launch import card
from batchgen.triton_kernels.linear import linear
from batchgen.triton_kernels.norm import MAX_COLUMNS, norm, silu_mul
from batchgen.triton_kernels.plan import Capacity, CutPlan, DevicePlan
from batchgen.triton_kernels.rotary import rotary_store, supports_rotary
from batchgen.triton_kernels.rows import gather_rows, scatter_rows
from batchgen.triton_kernels.sampling import argmax, draw, forbid
from batchgen.triton_kernels.weights import dequantize, quantize

__all__ = [
    "MAX_COLUMNS",
    "Capacity",
    "CutPlan",
    "DevicePlan",
    "argmax",
    "card",
    "cut_attention",
    "dequantize",
    "draw",
    "forbid",
    "gather_rows",
    "linear",
    "norm",
    "paged_attention",
    "prepare_attention",
    "quantize",
    "rotary_store",
    "scatter_rows",
    "silu_mul",
    "supports_attention",
    "supports_rotary",
]
