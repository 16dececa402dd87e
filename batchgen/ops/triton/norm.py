"""RMSNorm, LayerNorm, gated activations and gates of rows by Triton kernels. They compute in fp32."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchgen.ops.triton.launch import Launch, power_of_two, warps_of

MAX_COLUMNS = 1 << 15  # of a row that is kept in a program's registers
_PROGRAM_VALUES = 1024  # short rows are taken together until there are so many
_GATED_COLUMNS = 1024


def norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, out: Tensor | None = None) -> Tensor:
    """Normalise rows of at most MAX_COLUMNS columns: RMSNorm without a bias, LayerNorm with one. Sums are in fp32."""
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    assert out.stride(-1) == 1 and (out.dim() == 2 or out.is_contiguous())
    norm_launch(x, weight, bias, eps, out)()
    return out


def norm_launch(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, out: Tensor) -> Launch:
    columns = x.shape[-1]
    rows = x if x.dim() == 2 else x.reshape(-1, columns)
    assert rows.stride(1) == 1 and columns <= MAX_COLUMNS
    block = power_of_two(columns, 16)
    together = max(1, _PROGRAM_VALUES // block)
    args = {
        "x": rows,
        "weight": weight,
        "bias": bias,
        "out": out,
        "num_rows": len(rows),
        "x_stride": rows.stride(0),
        "out_stride": out.stride(0) if out.dim() == 2 else columns,
        "eps": eps,
    }
    constants = {"N": columns, "ROWS": together, "BLOCK": block}
    return Launch(_norm, (triton.cdiv(len(rows), together),), args, constants, warps_of(block * together))


@triton.jit(do_not_specialize=["num_rows"])
def _norm(  # a kernel takes pointers and scalars only
    x, weight, bias, out, num_rows, x_stride, out_stride, eps, N: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    there = column < N
    mask = (row < num_rows) & there
    value = tl.load(x + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    if bias is not None:
        value -= (tl.sum(value, 1) / N)[:, None]
        value = tl.where(there, value, 0.0)
    variance = tl.sum(value * value, 1) / N
    value *= tl.rsqrt(variance + eps)[:, None]
    value *= tl.load(weight + column, mask=there, other=0.0).to(tl.float32)
    if bias is not None:
        value += tl.load(bias + column, mask=there, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + column, value.to(out.dtype.element_ty), mask=mask)


def gate(x: Tensor, activation: str) -> Tensor:
    """Apply a gated activation to x [M, 2 n], whose columns [0, n) are the gate. The result is [M, n]."""
    out = torch.empty(len(x), x.shape[1] // 2, dtype=x.dtype, device=x.device)
    gate_launch(x, activation, out)()
    return out


def gate_launch(x: Tensor, activation: str, out: Tensor) -> Launch:
    tokens, columns = out.shape
    assert x.stride(1) == 1 and x.shape == (tokens, 2 * columns)
    args = {"x": x, "out": out, "columns": columns, "x_stride": x.stride(0)}
    constants = {"ACTIVATION": activation, "BLOCK": _GATED_COLUMNS}
    return Launch(_gate, (tokens, triton.cdiv(columns, _GATED_COLUMNS)), args, constants)


@triton.jit
def _gate(x, out, columns, x_stride, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < columns
    gate = tl.load(x + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_stride + columns + column, mask=mask, other=0.0).to(tl.float32)
    made = activated(gate, up, ACTIVATION)
    tl.store(out + row * columns + column, made.to(out.dtype.element_ty), mask=mask)


@triton.jit
def activated(gate, up, ACTIVATION: tl.constexpr):
    """A gated activation of tensors `gate` and `up`, in fp32. ACTIVATION is its name in `dispatch.linear`."""
    if ACTIVATION == "gelu_mul":
        return pointwise(gate, "gelu") * up
    sharp = gate
    if ACTIVATION == "gelu_tanh_mul":  # gelu_tanh(x) = x sigmoid(2 u) with u = sqrt(2 / pi) (x + 0.044715 x^3)
        sharp = 1.5957691216 * (gate + 0.044715 * gate * gate * gate)
    if ACTIVATION == "swiglu_oai_mul":
        gate = tl.minimum(gate, 7.0)
        sharp = 1.702 * gate
        up = tl.maximum(tl.minimum(up, 7.0), -7.0) + 1.0
    return gate / (1.0 + tl.exp(-sharp)) * up


@triton.jit
def pointwise(x, ACTIVATION: tl.constexpr):
    """An activation of a tensor, in fp32. ACTIVATION is its name in `dispatch.linear`."""
    if ACTIVATION == "relu":
        y = tl.where(x < 0, 0.0, x)  # a NaN stays
    elif ACTIVATION == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067812))
    else:
        tl.static_assert(ACTIVATION == "gelu_tanh")
        y = x / (1.0 + tl.exp(-1.5957691216 * (x + 0.044715 * x * x * x)))
    return y


def gated(x: Tensor, gates: Tensor, out: Tensor | None = None) -> Tensor:
    """Compute x * sigmoid(gates) (`dispatch.gated`)."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    gated_launch(x, gates, out)()
    return out


def gated_launch(x: Tensor, gates: Tensor, out: Tensor) -> Launch:
    x, gates, out = (t.flatten(1) for t in (x, gates, out))
    tokens, columns = x.shape
    assert x.stride(1) == gates.stride(1) == 1 and gates.shape == x.shape and out.is_contiguous()
    strides = {"x_stride": x.stride(0), "gate_stride": gates.stride(0)}
    args = {"x": x, "gates": gates, "out": out, "columns": columns} | strides
    return Launch(_sigmoid_gate, (tokens, triton.cdiv(columns, _GATED_COLUMNS)), args, {"BLOCK": _GATED_COLUMNS})


@triton.jit
def _sigmoid_gate(x, gates, out, columns, x_stride, gate_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < columns
    value = tl.load(x + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gates + row * gate_stride + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * columns + column, (value / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty), mask=mask)


def gated_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """Compute RMSNorm(x) * weight * silu(z) of each head (`dispatch.gated_norm`)."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    gated_norm_launch(x, z, weight, eps, out)()
    return out


def gated_norm_launch(x: Tensor, z: Tensor, weight: Tensor, eps: float, out: Tensor) -> Launch:
    tokens, heads, dim = x.shape
    z = z.flatten(1)
    assert x.stride(2) == z.stride(1) == 1 and x.stride(1) == dim and z.shape[1] == heads * dim
    assert out.is_contiguous() and dim <= MAX_COLUMNS
    block = power_of_two(dim, 16)
    together = max(1, _PROGRAM_VALUES // block)
    args = {
        "x": x,
        "z": z,
        "weight": weight,
        "out": out,
        "num_rows": tokens * heads,
        "x_stride": x.stride(0),
        "z_stride": z.stride(0),
        "eps": eps,
    }
    constants = {"HEADS": heads, "DIM": dim, "ROWS": together, "BLOCK": block}
    return Launch(_gated_norm, (triton.cdiv(tokens * heads, together),), args, constants)


@triton.jit(do_not_specialize=["num_rows"])
def _gated_norm(  # a kernel takes pointers and scalars only
    x,
    z,
    weight,
    out,
    num_rows,
    x_stride,
    z_stride,
    eps,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    token, head = row // HEADS, row % HEADS
    column = tl.arange(0, BLOCK)[None, :]
    mask = (row < num_rows) & (column < DIM)
    value = tl.load(x + token * x_stride + head * DIM + column, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(z + token * z_stride + head * DIM + column, mask=mask, other=0.0).to(tl.float32)
    value *= tl.rsqrt(tl.sum(value * value, 1) / DIM + eps)[:, None]
    value *= tl.load(weight + column, mask=column < DIM, other=0.0).to(tl.float32)
    value *= gate / (1.0 + tl.exp(-gate))
    tl.store(out + row * DIM + column, value.to(out.dtype.element_ty), mask=mask)
