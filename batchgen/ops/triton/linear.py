"""Linear layers on a GPU by cuBLAS, with bias and residual in the same call if cuBLAS supports it."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from batchgen.ops.int8 import gives_wide_sums
from batchgen.ops.triton.launch import card
from batchgen.ops.triton.norm import gate


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute activation(x weightᵀ + bias) + residual on a GPU, for x [M, K] and weight [N, K].

    `dispatch.linear` describes the arguments.
    """
    result_dtype = out.dtype if out is not None else out_dtype or x.dtype
    if activation is None and result_dtype == x.dtype:
        if residual is not None:
            # The residual is what the product is added to: rounded once, and in place where it is also the result.
            y = torch.addmm(residual, x, weight.T, out=out)
            return y if bias is None else y.add_(bias)
        return F.linear(x, weight, bias) if out is None else _into(out, x, weight, bias)
    if activation is None and residual is None and _wide_products(x):
        y = torch.mm(x, weight.T, out_dtype=result_dtype)  # fp32 logits, never rounded to 16 bits
        y = y if bias is None else y.add_(bias)
        return y if out is None else out.copy_(y)
    y = F.linear(x, weight, bias)
    if activation is not None:
        y = _ACTIVATIONS[activation](y)
    if residual is not None:
        return torch.add(residual, y, out=out) if out is not None else residual.add(y).to(result_dtype)
    if out is not None:
        return out.copy_(y)
    return y.to(result_dtype)


def _into(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.mm(x, weight.T, out=out) if bias is None else torch.addmm(bias, x, weight.T, out=out)


def _wide_products(x: Tensor) -> bool:
    """Tell whether torch supports products of x's dtype, of 16 bits, with an fp32 result on x's device.

    On a card before 8.0, which has no bf16 itself, torch supports those of fp16 alone.
    """
    if x.device.type != "cuda" or not gives_wide_sums():
        return False
    return x.dtype == torch.float16 or card(x.device).has_products


_ACTIVATIONS = {
    "relu": F.relu_,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu_mul": partial(gate, activation="silu_mul"),
    "gelu_tanh_mul": partial(gate, activation="gelu_tanh_mul"),
    "swiglu_oai_mul": partial(gate, activation="swiglu_oai_mul"),
    "gelu_mul": partial(gate, activation="gelu_mul"),
}
