"""The C++ kernels of state layers (csrc/state/) as functions of torch tensors on the CPU.

`state_dispatch` describes the operations and calls these functions. They run on the process's instruction set (`cpp`).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from batchgen.ops.cpp import TYPES
from batchgen.ops.kernel_library import library as _kernels
from batchgen.ops.state_slots import StateSlots

_MOST_TAPS = 16


def supports_kernel(kernel: int) -> bool:
    """Tell whether `causal_conv` supports so many factors of a channel."""
    return kernel <= _MOST_TAPS


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    states: Tensor,
    slots: StateSlots,
    *,
    silu: bool,
    out: Tensor | None = None,
) -> Tensor:
    """Compute the causal convolution of each channel (`state_dispatch.causal_conv`) by the C++ kernels.

    Raises:
        IndexError: A slot or a token is not there.
    """
    tokens, channels = x.shape
    kernel = weight.shape[1]
    out = torch.empty(tokens, channels, dtype=x.dtype) if out is None else out
    assert x.stride(1) == 1 and out.stride(1) == 1 and weight.is_contiguous() and states[0].is_contiguous()
    assert states.shape[1:] == (channels, kernel - 1) and out.shape == x.shape
    assert weight.dtype == states.dtype == out.dtype == x.dtype and (bias is None or bias.dtype == x.dtype)
    _kernels.causal_conv(
        x.data_ptr(),
        x.stride(0),
        tokens,
        channels,
        kernel,
        weight.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        states.data_ptr(),
        states.stride(0),
        len(states),
        *_as_arrays(slots),
        silu,
        TYPES[x.dtype],
        out.data_ptr(),
        out.stride(0),
    )
    return out


def delta_gates(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the log decay and the strength of each update (`state_dispatch.delta_gates`) by the C++ kernels."""
    tokens, heads = a.shape
    a_log, dt_bias = a_log.float().contiguous(), dt_bias.float().contiguous()
    g, beta = torch.empty(tokens, heads), torch.empty(tokens, heads)
    assert a.stride(1) == 1 and b.stride(1) == 1 and a.dtype == b.dtype and b.shape == a.shape
    assert a_log.shape == dt_bias.shape == (heads,)
    _kernels.delta_gates(
        a.data_ptr(),
        a.stride(0),
        b.data_ptr(),
        b.stride(0),
        tokens,
        heads,
        TYPES[a.dtype],
        a_log.data_ptr(),
        dt_bias.data_ptr(),
        g.data_ptr(),
        beta.data_ptr(),
    )
    return g, beta


def delta_rule(  # the operands of one kernel
    qkv: Tensor,
    g: Tensor,
    beta: Tensor,
    states: Tensor,
    slots: StateSlots,
    *,
    key_heads: int,
    out: Tensor | None = None,
) -> Tensor:
    """Update the states of Gated DeltaNet and read from them (`state_dispatch.delta_rule`) by the C++ kernels.

    Raises:
        IndexError: A slot or a token is not there.
    """
    tokens, columns = qkv.shape
    count, value_heads, key_dim, value_dim = states.shape
    out = torch.empty(tokens, value_heads, value_dim, dtype=qkv.dtype) if out is None else out
    assert columns == 2 * key_heads * key_dim + value_heads * value_dim and value_heads % key_heads == 0
    assert qkv.stride(1) == 1 and out.is_contiguous() and out.shape == (tokens, value_heads, value_dim)
    assert out.dtype == qkv.dtype and states.dtype in (torch.float32, torch.bfloat16) and states[0].is_contiguous()
    for gate in (g, beta):
        assert gate.dtype == torch.float32 and gate.is_contiguous() and gate.shape == (tokens, value_heads)
    _kernels.delta_rule(
        qkv.data_ptr(),
        qkv.stride(0),
        tokens,
        TYPES[qkv.dtype],
        g.data_ptr(),
        beta.data_ptr(),
        states.data_ptr(),
        states.stride(0),
        TYPES[states.dtype],
        count,
        *_as_arrays(slots),
        key_heads,
        value_heads,
        key_dim,
        value_dim,
        out.data_ptr(),
    )
    return out


def gated_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """Compute RMSNorm(x) * weight * silu(z) of each head (`state_dispatch.gated_norm`) by the C++ kernels."""
    assert weight.dtype == x.dtype and weight.shape == x.shape[2:] and weight.is_contiguous()
    return _gated(x, z, weight, eps, out)


def gated(x: Tensor, gate: Tensor, out: Tensor | None = None) -> Tensor:
    """Compute x * sigmoid(gate) (`state_dispatch.gated`) by the C++ kernels."""
    return _gated(x, gate, None, 0.0, out)


def _gated(x: Tensor, gate: Tensor, weight: Tensor | None, eps: float, out: Tensor | None) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x) if out is None else out
    gate = gate.flatten(1)
    tokens, columns = gate.shape
    heads = x.shape[1] if x.ndim == 3 else 1
    assert out.is_contiguous() and out.shape == x.shape and out.dtype == gate.dtype == x.dtype
    assert gate.stride(1) == 1 and x.numel() == gate.numel()
    _kernels.gated(
        x.data_ptr(),
        gate.data_ptr(),
        gate.stride(0),
        tokens,
        heads,
        columns // heads,
        0 if weight is None else weight.data_ptr(),
        eps,
        TYPES[x.dtype],
        out.data_ptr(),
    )
    return out


def _as_arrays(slots: StateSlots) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Source, target and starts as the kernels take them, int64."""
    source, target, starts = (x.to(torch.int64).contiguous().numpy() for x in slots)
    return source, target, starts
