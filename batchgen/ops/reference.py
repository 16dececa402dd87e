"""The operations of `ops` in torch, on any device: the reference for the kernels, and used without kernels.

Attention is in `torch_attention`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from batchgen.ops import int8
from batchgen.ops.host_copy import upload
from batchgen.ops.sampling import Draws


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
    """Compute activation(x weightᵀ + bias) + residual in torch.

    Args:
        x: Activations [M, K].
        weight: Weight [N, K] of numbers, or int8 rows [N, int8.row_bytes(K)].
        bias: Bias [N], or None.
        activation: Name of an activation of `dispatch.linear`, or None.
        residual: Tensor of the result's shape, which is added last; or None.
        out: Tensor for the result. None: a new tensor.
        out_dtype: Dtype of a new result. None: x's dtype.
    """
    if weight.dtype == torch.int8:
        return int8.linear(x, weight, bias, activation=activation, residual=residual, out=out, out_dtype=out_dtype)
    y = F.linear(x, weight, bias)
    if activation in _GATES:
        return gate(y, activation, residual=residual, out=out, out_dtype=out_dtype)
    return _finished(y if activation is None else _ACTIVATIONS[activation](y), residual, out, out_dtype)


def gate(
    both: Tensor, activation: str, *, residual: Tensor | None, out: Tensor | None, out_dtype: torch.dtype | None
) -> Tensor:
    """Apply a gated activation and add the residual.

    Args:
        both: Output of the fused projection, [M, 2 n]: columns [0, n) are the gate, the others the up projection.
        activation: Name of the gated activation.
        residual: Tensor [M, n], which is added last; or None.
        out: Tensor for the result, [M, n]. None: a new tensor.
        out_dtype: Dtype of a new result. None: the dtype of `both`.
    """
    first, second = both.chunk(2, dim=-1)
    return _finished(_GATES[activation](first, second), residual, out, out_dtype)


def _finished(y: Tensor, residual: Tensor | None, out: Tensor | None, out_dtype: torch.dtype | None) -> Tensor:
    if residual is not None:
        y = residual + y
    if out is not None:
        return out.copy_(y)
    return y if out_dtype is None else y.to(out_dtype)


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}
_GATES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "silu_mul": lambda gate, up: F.silu(gate).mul_(up),
    "gelu_tanh_mul": lambda gate, up: F.gelu(gate, approximate="tanh").mul_(up),
    "gelu_mul": lambda gate, up: F.gelu(gate).mul_(up),
    "swiglu_oai_mul": lambda gate, up: _swiglu_oai(gate.clamp(max=7.0), up.clamp(-7.0, 7.0)),
}


def _swiglu_oai(gate: Tensor, up: Tensor) -> Tensor:
    return gate.mul(torch.sigmoid(gate * 1.702)).mul_(up + 1.0)


def norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, out: Tensor | None = None) -> Tensor:
    """Normalise rows of x [..., columns]: RMSNorm without a bias, LayerNorm with one. Sums are in fp32."""
    shape = (x.shape[-1],)
    y = F.rms_norm(x, shape, weight, eps) if bias is None else F.layer_norm(x, shape, weight, bias, eps)
    return y if out is None else out.copy_(y)


def rotary(  # the operands of one kernel
    qkv: Tensor,
    heads: int,
    kv_heads: int,
    *,
    scale: float,
    rope: tuple[Tensor, Tensor] | None,
    positions: Tensor | None,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    rotation: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Split fused QKV; norm and rotate queries and keys; scale queries. `dispatch.rotary` describes the arguments.

    `rotation` is a matrix [head_dim, head_dim] by which queries and keys are also multiplied, or None.
    """
    q, k, v = qkv.view(len(qkv), heads + 2 * kv_heads, -1).split((heads, kv_heads, kv_heads), dim=1)
    if norms is not None:
        q, k = (norm(x, weight, None, eps) for x, weight in zip((q, k), norms, strict=True))
    if rope is None:
        q = q * scale
    else:
        # The softmax scale rides on q's rotation, which is computed in fp32 anyway.
        cos, sin = (table[positions].unsqueeze(1) for table in rope)
        q, k = _rotated(q, cos * scale, sin * scale), _rotated(k, cos, sin)
    if rotation is not None:
        q, k = (x @ rotation.to(x.dtype) for x in (q, k))
    return q, k, v


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [tokens, heads, head_dim]: the halves of a head are rotated by each token's angles."""
    x1, x2 = x.float().chunk(2, dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).to(x.dtype)


# Sorting whole vocabularies in float64 takes several times the logits' memory: this bounds it.
_DRAWN_AT_ONCE = 32


def argmax(logits: Tensor, *, want_lse: bool = False) -> tuple[Tensor, Tensor, Tensor | None]:
    """Find the largest logit of each row, the first one of equals, and compute the log-sum-exp if wanted.

    Args:
        logits: fp32 [rows, columns].
        want_lse: Whether the log-sum-exp is computed.

    Returns:
        Index of the largest logit, int64 [rows]; its value, fp32 [rows]; the log-sum-exp, fp32 [rows], or None.
    """
    values, index = logits.max(-1)
    return index, values, logits.logsumexp(-1) if want_lse else None


def argmax_if_finite(logits: Tensor, otherwise: int) -> tuple[Tensor, Tensor]:
    """Find the largest logit of each row. `ops.argmax_if_finite` describes arguments and result."""
    values, index = logits.max(-1)
    return index, index.where(logits.amin(-1).isfinite() & values.isfinite(), otherwise)  # amin keeps a NaN


def draw(logits: Tensor, rows: np.ndarray, draws: Draws, out: Tensor) -> None:
    """Draw a random token from each of some rows of logits, fp32 [.., columns].

    Args:
        logits: Logits, fp32 [.., columns].
        rows: Numbers of the rows to draw from, int64 [draws].
        draws: Sampling parameters for each of these rows.
        out: Tensor for token ids, int64 [..]; the token drawn from row r is stored in element r.
    """
    where, *per_row = (upload(x, logits.device) for x in (rows, *draws))
    for some in (slice(i, i + _DRAWN_AT_ONCE) for i in range(0, len(rows), _DRAWN_AT_ONCE)):
        tokens = _draw(logits.index_select(0, where[some]), *(x[some, None] for x in per_row))
        out.index_copy_(0, where[some], tokens)


def forbid(logits: Tensor, rows: np.ndarray, allowed: np.ndarray) -> None:
    """Set the logits of forbidden tokens to minus infinity, in place.

    Args:
        logits: Logits, fp32 [.., columns].
        rows: Numbers of the rows that have a mask, int64 [masks].
        allowed: Masks, int32 [masks, words]: one bit for each token, 1 where the token is allowed.
    """
    columns, bits = logits.shape[1], torch.arange(8, dtype=torch.uint8, device=logits.device)
    where, octets = upload(rows, logits.device), upload(allowed.view(np.uint8), logits.device)
    for some in (slice(i, i + _DRAWN_AT_ONCE) for i in range(0, len(rows), _DRAWN_AT_ONCE)):
        forbidden = ((octets[some, :, None] >> bits) & 1 == 0).flatten(1)[:, :columns]
        here = where[some]
        logits.index_copy_(0, here, logits.index_select(0, here).masked_fill_(forbidden, -torch.inf))


def _draw(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor) -> Tensor:
    # In float64: a row's cumulative probabilities must not depend on how a batch is vectorised.
    wide = logits.double()
    probs = torch.softmax((wide - wide.amax(-1, keepdim=True)) / temperature.double(), -1)
    ordered, index = torch.sort(probs, dim=-1, descending=True, stable=True)
    rank = torch.arange(probs.shape[-1], device=probs.device)
    keep = ((rank < top_k) | (top_k == 0)) & (ordered >= min_p * ordered[:, :1])
    ordered = torch.where(keep, ordered, 0.0)
    weight = ordered / ordered.sum(-1, keepdim=True)
    before = weight.cumsum(-1) - weight  # mass of the more probable ones: the first token is always kept
    ordered = torch.where((before < top_p) | (top_p >= 1.0), ordered, 0.0)
    probs = torch.zeros_like(probs).scatter_(-1, index, ordered)
    cumulative = probs.cumsum(-1)
    picked = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)[:, 0]
    # Rounding may point past the last token with any probability.
    last = probs.shape[-1] - 1 - (probs > 0).to(torch.int8).flip(-1).argmax(-1)
    return torch.minimum(picked, last)
