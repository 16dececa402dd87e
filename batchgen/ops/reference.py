"""The operations of `ops` in torch, on any device: the reference for the kernels, and used without kernels.

The KV of one layer is one tensor [num_blocks, 2, kv_heads, kv_block_size, width]. Index 0 of the second dimension is K,
index 1 is V. A block is contiguous, so it moves between tiers as one piece. Within a block, the K of one head is a
contiguous page, and so is its V. The KV of a sequence is gathered page by page into the operand of a batched matrix
product. Each gather is small enough to stay in the cache, so KV is read from memory once. `width` is head_dim where KV
is stored as numbers. For quantized KV it is the bytes of a packed row (`quant`).
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
    """An AttentionPlan with its indices and masks as tensors on a device, made once per sweep.

    Attributes:
        shared: Shared prefixes, each with the numbers of its pages [kv_heads * blocks].
        decode: Decode groups, each with the numbers of its pages, and an additive mask [sequences, 1, 1, keys] or None.
        prefill: Prefill items, each with the numbers of its pages.
    """

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
    """Turn an attention plan's block numbers into page numbers, and its lengths into additive masks, on a device.

    Args:
        plan: Attention plan of the sweep.
        kv_heads: Number of key and value heads.
        kv_block_size: Number of tokens in a KV block.
        dtype: Dtype of queries.
        device: Device that has queries and KV. None: the CPU.
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
    """Compute causal attention of a sweep's query tokens to paged KV, in torch.

    Args:
        q: Queries [tokens, heads, head_dim].
        kv: KV of the layer, [num_blocks, 2, kv_heads, kv_block_size, width].
        plan: Result of `prepare_attention`.
        out: Tensor for the result, of q's shape. None: a new tensor.
        bits: Bits of each quantized value of packed KV. 0: KV is stored as numbers.
        softcap: Bound of the scores. 0: no bound.
        sinks: One further score for each head, fp32 [heads]; or None.

    Returns:
        Attention output [tokens, heads, head_dim].
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
    """Keys and values of pages, each [batch, keys, head_dim] in q's dtype. `batch` counts (sequence,) KV head."""
    blocks, _, kv_heads, kv_block_size, width = kv.shape
    flat = kv.view(blocks * 2 * kv_heads, kv_block_size * width)
    gathered = (flat.index_select(0, which).view(batch, -1, width) for which in (pages, pages + kv_heads))
    if bits:
        gathered = (quant.dequantize(packed, q.shape[-1], dtype=q.dtype, bits=bits) for packed in gathered)
    return tuple(gathered)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, want_lse: bool, softcap: float
) -> tuple[Tensor, Tensor | None]:
    """softmax(q kᵀ + mask) v, and the log-sum-exp of the scores if `want_lse`.

    Args:
        q: Queries [batch, rows, dim].
        k, v: Keys and values [batch, keys, dim].
        mask: Additive mask [a, b, c, m] for the last m keys of scores that are viewed as [a, ., c or broadcast, keys];
            or None.
        want_lse: Whether the log-sum-exp is computed.
        softcap: Bound of the scores. 0: no bound.
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
    """Queries [tokens, heads, dim] reordered to [kv_heads, heads / kv_heads * tokens, dim]."""
    tokens, _, head_dim = q.shape
    return q.view(tokens, kv_heads, -1, head_dim).permute(1, 2, 0, 3).reshape(kv_heads, -1, head_dim)


def _by_token(x: Tensor, tokens: int) -> Tensor:
    """Results [kv_heads, heads / kv_heads * tokens, ...] reordered to [tokens, heads, ...]."""
    return x.view(x.shape[0], -1, tokens, *x.shape[2:]).movedim(2, 0).flatten(1, 2)


def _tile_rows(q: Tensor, num_keys: int) -> int:
    return max(16, _SCORE_TILE_BYTES // (q.shape[1] * num_keys * q.element_size()))


@lru_cache(maxsize=64)
def _causal_mask(queries: int, keys: int, window: int | None, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Additive causal mask [1, 1, queries, columns] for queries at the last `queries` of `keys` positions.

    Without a window it only has the last `queries` columns, because every query attends to all earlier keys.
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
    """Attention of the tokens of many sequences to a shared prefix, whose K and V are read once for all of them."""
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
