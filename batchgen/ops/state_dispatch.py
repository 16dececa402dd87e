"""The operations of state layers and of gates, each sent to the kernels of the tensor's device.

Tensors of the CPU go to the C++ kernels (`state_kernels`), those of a CUDA GPU to the Triton kernels if Triton is
installed, all else to torch (`state_reference`).
"""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from batchgen.ops import dispatch, state_kernels, state_reference
from batchgen.ops.state_slots import StateSlots


def causal_conv(  # the operands of one kernel
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    states: Tensor,
    slots: StateSlots,
    *,
    silu: bool,
    out: Tensor | None = None,
) -> Tensor:
    """Compute the causal convolution of each channel over the tokens of each sequence, and keep the last inputs.

    Args:
        x: Inputs of all sequences, packed, [tokens, channels]; rows may lie apart.
        weight: Factors of each channel, from the oldest input to the token's own, [channels, kernel].
        bias: Summand of each channel, [channels], or None.
        states: Last inputs of each sequence, the oldest first, [slots, channels, kernel - 1], in x's dtype; slots may
            lie apart.
        slots: Slots of the sequences, and their tokens in x.
        silu: Whether silu is applied to the results.
        out: Tensor for the result, of x's shape, contiguous. None: a new tensor.

    Returns:
        Results [tokens, channels].
    """
    compute = _kernels_of(x)
    if compute is state_kernels and not state_kernels.supports_kernel(weight.shape[1]):
        compute = state_reference
    return compute.causal_conv(x, weight, bias, states, slots, silu=silu, out=out)


def delta_gates(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the gates of `delta_rule` from projections of the tokens.

    Args:
        a, b: Projections, each [tokens, value_heads]; rows may lie apart.
        a_log: Logarithm of each head's rate of decay, [value_heads].
        dt_bias: Summand of `a`, [value_heads].

    Returns:
        g = -exp(a_log) * softplus(a + dt_bias) and beta = sigmoid(b), both fp32 [tokens, value_heads].
    """
    return _kernels_of(a).delta_gates(a, b, a_log, dt_bias)


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
    """Update the states of Gated DeltaNet by each token, and read each token's result from them.

    A state S [key_dim, value_dim] first decays by exp(g), then beta k (v - S^T k)^T is added to it, then the result
    S^T q is read (Gated Delta Networks: Yang et al., 2024). Each query and key is divided by its L2 norm, queries are
    multiplied by key_dim ** -0.5. All sums are in fp32.

    Args:
        qkv: Queries and keys of all key heads and values of all value heads, packed, [tokens, 2 * key_heads * key_dim +
            value_heads * value_dim]; rows may lie apart. Value heads that follow each other share a key head.
        g: Log decay, at most 0, fp32 [tokens, value_heads].
        beta: Strength of each update, fp32 [tokens, value_heads].
        states: States, fp32 or bf16 [slots, value_heads, key_dim, value_dim]; slots may lie apart.
        slots: Slots of the sequences, and their tokens in qkv.
        key_heads: Number of query heads, which is that of key heads.
        out: Tensor for the result, contiguous. None: a new tensor of qkv's dtype.

    Returns:
        Results [tokens, value_heads, value_dim].
    """
    compute = _kernels_of(qkv)
    return compute.delta_rule(qkv, g, beta, states, slots, key_heads=key_heads, out=out)


def gated_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """Compute RMSNorm(x) * weight * silu(z) of each head.

    Args:
        x: Tensor [tokens, heads, dim].
        z: Gate, [tokens, heads, dim] or [tokens, heads * dim]; rows may lie apart.
        weight: Factor of each column, [dim].
        eps: Number added to the mean square before the square root.
        out: Tensor for the result, contiguous, which may be x. None: a new tensor.

    Returns:
        Results [tokens, heads, dim].
    """
    return _kernels_of(x).gated_norm(x, z, weight, eps, out)


def gated(x: Tensor, gate: Tensor, out: Tensor | None = None) -> Tensor:
    """Compute x * sigmoid(gate), the output gate of attention.

    Args:
        x: Tensor [tokens, columns].
        gate: Tensor of x's shape, or [tokens, heads, dim] of as many columns; rows may lie apart.
        out: Tensor for the result, contiguous, which may be x. None: a new tensor.
    """
    return _kernels_of(x).gated(x, gate, out)


def _kernels_of(x: Tensor) -> ModuleType:
    """The module with the kernels of state layers, or torch operations, for the device of this tensor."""
    return state_kernels if x.is_cpu else dispatch.device_kernels(x.device) or state_reference
