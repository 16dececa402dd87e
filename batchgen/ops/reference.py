"""The operations of `ops` in torch, on any device: the reference of the kernels, which runs where there are none.

KV of one layer is one tensor [num_blocks, 2, kv_heads, kv_block_size, width], K before V: a block is contiguous, so
that it moves between tiers in one piece, and within it each head's K and V are pages, so that the KV of any sequence is
gathered a page at a time, straight into the operand of a batched matrix product. Gathers are kept small enough to stay
in cache, so KV crosses the memory bus once. width is head_dim, or, with packed KV, the bytes of a packed row (`quant`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from batchgen.ops import int8, quant
from batchgen.ops.attention_plan import AttentionPlan, DecodeGroup, PrefillItem, SharedItem
from batchgen.ops.host_copy import upload
from batchgen.ops.sampling import Draws

# Scores of one product are tiled to this many bytes: large enough for an efficient product, small enough
# that scores stay in cache between the product, the softmax and the second product.
_SCORE_TILE_BYTES = 4 << 20


@dataclass(frozen=True)
class DeviceAttentionPlan:
    """An AttentionPlan with its indices and masks as tensors, made once per sweep and used by every layer."""

    shared: tuple[tuple[SharedItem, Tensor], ...]  # pages [kv_heads * blocks]
    decode: tuple[tuple[DecodeGroup, Tensor, Tensor | None], ...]  # pages, mask [seqs, 1, 1, keys]
    prefill: tuple[tuple[PrefillItem, Tensor], ...]


def prepare_attention(
    plan: AttentionPlan,
    kv_heads: int,
    kv_block_size: int,
    dtype: torch.dtype,
    device: torch.device | None = None,
) -> DeviceAttentionPlan:
    """Turn block numbers into page numbers and lengths into additive masks.

    Args:
        plan: Attention of the sweep.
        kv_heads: Key and value heads.
        kv_block_size: Tokens of a KV block.
        dtype: Dtype of queries.
        device: Device of queries and KV; None: the CPU.
    """

    def pages(blocks: np.ndarray) -> Tensor:  # [..., blocks] -> [..., kv_heads, blocks], flat
        return torch.from_numpy(
            (blocks.astype(np.int64)[..., None, :] * 2 * kv_heads + np.arange(kv_heads)[:, None]).reshape(-1)
        ).to(device)

    decode = []
    for group in plan.decode:
        keys = np.arange(group.blocks.shape[1] * kv_block_size)
        hidden = (keys >= group.num_keys[:, None]) | (keys < group.first_key[:, None])
        mask = None
        if hidden.any():
            mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(torch.from_numpy(hidden), float("-inf"))
            mask = mask[:, None, None, :].to(device)
        decode.append((group, pages(group.blocks), mask))
    return DeviceAttentionPlan(
        shared=tuple((item, pages(item.blocks)) for item in plan.shared),
        decode=tuple(decode),
        prefill=tuple((item, pages(item.blocks)) for item in plan.prefill),
    )


def paged_attention(
    q: Tensor,
    kv: Tensor,
    plan: DeviceAttentionPlan,
    out: Tensor | None = None,
    bits: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend causally from packed query tokens to paged KV, in torch.

    Args:
        q: [tokens, heads, head_dim].
        kv: [num_blocks, 2, kv_heads, kv_block_size, width].
        plan: Attention of the sweep.
        out: Memory of the result, of q's shape.
        bits: Bits of a quantized value of packed KV; 0: KV is numbers.
        softcap: Bound of the scores; 0: none.
        sinks: fp32 [heads].
    """
    tokens, heads, _ = q.shape
    out = torch.empty_like(q) if out is None else out
    # Log-sum-exp per token and head, needed only where a token's keys are attended to in two parts, or a sink joins
    # them.
    lse = torch.empty(tokens, heads, device=q.device) if plan.shared or sinks is not None else None
    for group, pages, mask in plan.decode:
        _decode_group(q, kv, bits, group, pages, mask, out, lse, softcap)
    for item, pages in plan.prefill:
        _prefill_item(q, kv, bits, item, pages, out, lse, softcap)
    for shared, pages in plan.shared:
        _shared_item(q, kv, bits, shared, pages, out, lse, softcap)
    if sinks is not None:
        out.copy_(out.float() * torch.sigmoid(lse - sinks)[..., None])
    return out


def _gather(q: Tensor, kv: Tensor, bits: int, pages: Tensor, batch: int) -> tuple[Tensor, Tensor]:
    """The pages' K and V as [batch, keys, head_dim] in q's dtype, batch running over (sequence,) kv head."""
    blocks, _, kv_heads, kv_block_size, width = kv.shape
    flat = kv.view(blocks * 2 * kv_heads, kv_block_size * width)
    gathered = (flat.index_select(0, which).view(batch, -1, width) for which in (pages, pages + kv_heads))
    if bits:
        gathered = (quant.dequantize(packed, q.shape[-1], dtype=q.dtype, bits=bits) for packed in gathered)
    return tuple(gathered)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, want_lse: bool, softcap: float
) -> tuple[Tensor, Tensor | None]:
    """softmax(q kᵀ + mask) v for q [batch, rows, dim], k and v [batch, keys, dim]; and the log-sum-exp.

    mask: additive [a, b, c, m] over scores seen as [a, ., c or broadcast, keys], for the last m keys.
    """
    scores = torch.bmm(q, k.transpose(1, 2))
    if softcap:
        scores.div_(softcap).tanh_().mul_(softcap)
    if mask is not None:
        masked = scores.view(mask.shape[0], -1, mask.shape[2] if mask.shape[2] > 1 else q.shape[1], scores.shape[2])
        masked[..., -mask.shape[3] :].add_(mask)
    weights = torch.softmax(scores, -1)
    lse = None
    if want_lse:
        # The largest softmax weight is exp(its score - lse): two maxima cost far less than torch.logsumexp.
        lse = scores.amax(-1).float() - weights.amax(-1).float().log()
    return torch.bmm(weights, v), lse


def _decode_group(q, kv, bits: int, group: DecodeGroup, pages, mask, out, lse, softcap) -> None:
    kv_heads, head_dim = kv.shape[2], q.shape[2]
    n = group.stop - group.start
    k, v = _gather(q, kv, bits, pages, n * kv_heads)
    rows = q[group.start : group.stop].reshape(n * kv_heads, -1, head_dim)
    result, part = _attend(rows, k, v, mask, lse is not None, softcap)
    out[group.start : group.stop] = result.view(n, -1, head_dim)
    if part is not None:
        lse[group.start : group.stop] = part.view(n, -1)


def _by_kv_head(q: Tensor, kv_heads: int) -> Tensor:
    """[tokens, heads, dim] -> [kv_heads, heads / kv_heads * tokens, dim]."""
    tokens, _, head_dim = q.shape
    return q.view(tokens, kv_heads, -1, head_dim).permute(1, 2, 0, 3).reshape(kv_heads, -1, head_dim)


def _by_token(x: Tensor, tokens: int) -> Tensor:
    """The inverse of `_by_kv_head`, for [kv_heads, group * tokens, ...] results."""
    return x.view(x.shape[0], -1, tokens, *x.shape[2:]).movedim(2, 0).flatten(1, 2)


def _tile_rows(q: Tensor, num_keys: int) -> int:
    return max(16, _SCORE_TILE_BYTES // (q.shape[1] * num_keys * q.element_size()))


@lru_cache(maxsize=64)
def _causal_mask(queries: int, keys: int, window: int | None, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Mask [1, 1, queries, columns] of the last `queries` of `keys` positions.

    Without a window only the last `queries` columns, since all keys before the first query are visible.
    """
    columns = queries if window is None else keys
    distance = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys - columns, keys)
    hidden = distance < 0
    if window is not None:
        hidden |= distance >= window
    return torch.zeros(1, 1, *hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf")).to(device)


def _prefill_item(q, kv, bits: int, item: PrefillItem, pages, out, lse, softcap) -> None:
    kv_heads = kv.shape[2]
    k, v = _gather(q, kv, bits, pages, kv_heads)
    count = item.stop - item.start
    step = _tile_rows(q, item.query_offset + count)
    for a in range(0, count, step):
        b = min(a + step, count)
        last = item.query_offset + b
        first = 0 if item.window is None else max(0, item.query_offset + a - item.window + 1)
        mask = _causal_mask(b - a, last - first, item.window, q.dtype, q.device)
        rows = _by_kv_head(q[item.start + a : item.start + b], kv_heads)
        result, part = _attend(rows, k[:, first:last], v[:, first:last], mask, lse is not None, softcap)
        out[item.start + a : item.start + b] = _by_token(result, b - a)
        if lse is not None:
            lse[item.start + a : item.start + b] = _by_token(part, b - a)


def _shared_item(q, kv, bits: int, item: SharedItem, pages, out, lse, softcap) -> None:
    """Attention of many sequences' tokens over one shared prefix: K and V are read once for all of them."""
    kv_heads = kv.shape[2]
    k, v = _gather(q, kv, bits, pages, kv_heads)
    step = _tile_rows(q, k.shape[1])
    for a in range(item.start, item.stop, step):
        b = min(a + step, item.stop)
        result, part = _attend(_by_kv_head(q[a:b], kv_heads), k, v, None, True, softcap)
        result, part = _by_token(result, b - a), _by_token(part, b - a)
        # Merge the two softmaxes: their weights are in proportion to exp(lse), exact up to rounding.
        weight = torch.sigmoid(part - lse[a:b])[..., None]
        out[a:b] = torch.lerp(out[a:b].float(), result.float(), weight).to(out.dtype)
        lse[a:b] = torch.logaddexp(lse[a:b], part)


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
    """Compute activation(x weightᵀ + bias) + residual in torch. weight: [N, K], or rows of 8 bits."""
    if weight.dtype == torch.int8:
        return int8.linear(x, weight, bias, activation=activation, residual=residual, out=out, out_dtype=out_dtype)
    y = F.linear(x, weight, bias)
    if activation in _GATES:
        return gate(y, activation, residual=residual, out=out, out_dtype=out_dtype)
    return _finished(y if activation is None else _ACTIVATIONS[activation](y), residual, out, out_dtype)


def gate(
    both: Tensor, activation: str, *, residual: Tensor | None, out: Tensor | None, out_dtype: torch.dtype | None
) -> Tensor:
    """Apply a gated activation and add the residual. both: [M, N], the gate's columns before the others."""
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
    "swiglu_oai_mul": lambda gate, up: _swiglu_oai(gate.clamp(max=7.0), up.clamp(-7.0, 7.0)),
}


def _swiglu_oai(gate: Tensor, up: Tensor) -> Tensor:
    return gate.mul(torch.sigmoid(gate * 1.702)).mul_(up + 1.0)


def norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, out: Tensor | None = None) -> Tensor:
    """RMSNorm of the rows of x [..., columns], or with a bias LayerNorm. Sums are in fp32."""
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
    """Norm, rotate and scale queries and keys of fused QKV, in torch. rotation: matrix that both are rotated with."""
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
    """Rotates halves (x1, x2) of the last dimension by the tokens' angles; x [tokens, heads, head_dim]."""
    x1, x2 = x.float().chunk(2, dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).to(x.dtype)


# Sorting whole vocabularies in float64 takes several times the logits' memory: this bounds it.
_DRAWN_AT_ONCE = 32


def argmax(logits: Tensor, *, want_lse: bool = False) -> tuple[Tensor, Tensor, Tensor | None]:
    """The first of the largest of each row of fp32 logits, int64, and its value.

    If wanted, also the log of the sum of exponentials.
    """
    values, index = logits.max(-1)
    return index, values, logits.logsumexp(-1) if want_lse else None


def draw(logits: Tensor, rows: np.ndarray, draws: Draws, out: Tensor) -> None:
    """Draw a token at random from each of some rows of fp32 logits, into int64 `out` at these rows."""
    where, *per_row = (upload(x, logits.device) for x in (rows, *draws))
    for some in (slice(i, i + _DRAWN_AT_ONCE) for i in range(0, len(rows), _DRAWN_AT_ONCE)):
        tokens = _draw(logits.index_select(0, where[some]), *(x[some, None] for x in per_row))
        out.index_copy_(0, where[some], tokens)


def forbid(logits: Tensor, rows: np.ndarray, allowed: np.ndarray) -> None:
    """Set fp32 logits of tokens that are not allowed to minus infinity, in place, in the rows that have a mask."""
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
