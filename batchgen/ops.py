"""The one door to compute kernels over paged KV.

Everything here is torch, and is the reference that faster kernels (C++, Triton) are held to. KV of one
layer is one tensor [num_blocks, 2, kv_heads, block_size, width], K before V: a block is contiguous, so that it
moves between tiers in one piece, and within it each head's K and V are pages, so that the KV of any sequence is
gathered a page at a time, straight into the operand of a batched matrix product. Gathers are kept small enough
to stay in cache, so KV crosses the memory bus once. width is head_dim, or, with 4-bit KV (uint8), the bytes of a
packed row (`quant`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from batchgen import quant
from batchgen.attention_plan import AttentionPlan, DecodeGroup, PrefillItem, SharedItem

# Scores of one product are tiled to this many bytes: large enough for an efficient product, small enough
# that scores stay in cache between the product, the softmax and the second product.
_SCORE_TILE_BYTES = 4 << 20


def kv_rows(slots: np.ndarray, kv_heads: int, block_size: int) -> Tensor:
    """Rows of a [num_blocks * 2 * kv_heads * block_size, width] view that hold each token's K; V lies
    kv_heads * block_size rows behind.

    slots: physical slot (block * block_size + offset) per token. Returns int64 [tokens * kv_heads].
    """
    block, offset = np.divmod(slots.astype(np.int64), block_size)
    rows = (block[:, None] * 2 * kv_heads + np.arange(kv_heads)) * block_size + offset[:, None]
    return torch.from_numpy(rows.reshape(-1))


def write_kv(kv: Tensor, rows: Tensor, k: Tensor, v: Tensor) -> None:
    """Stores new tokens' K and V [tokens, kv_heads, head_dim] at `rows` (of `kv_rows`) of a layer's KV; for 4-bit KV they
    are packed here unless they come so, as uint8 [tokens, kv_heads, width]."""
    _, _, kv_heads, block_size, width = kv.shape
    if kv.dtype == torch.uint8 and k.dtype != torch.uint8:
        k, v = pack_kv(k, v)
    flat = kv.view(-1, width)
    flat.index_copy_(0, rows, k.reshape(-1, width))
    flat.index_copy_(0, rows + kv_heads * block_size, v.reshape(-1, width))


def pack_kv(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """4-bit K and V, uint8 [tokens, kv_heads, width], of [tokens, kv_heads, head_dim].

    K is rotated first: some of its channels are far larger than the rest, and would take all levels for themselves. A
    query rotated alike sees the same products.
    """
    return quant.quantize(_rotated(k)), quant.quantize(v)


def _rotated(x: Tensor) -> Tensor:
    """x [..., n] with its last dimension turned so that what is in one channel spreads over all of them."""
    return x @ _rotation(x.shape[-1]).to(x.dtype)


@lru_cache
def _rotation(n: int) -> Tensor:
    """An orthogonal matrix [n, n], fp32: Hadamard's where n is a power of two, else the cosine transform's."""
    if n & (n - 1) == 0:
        matrix = torch.ones(1, 1)
        while len(matrix) < n:
            matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
        return matrix / n**0.5
    angles = torch.outer(torch.arange(n).double() + 0.5, torch.arange(n)) * (torch.pi / n)
    matrix = angles.cos() * (2 / n) ** 0.5
    matrix[:, 0] = n**-0.5
    return matrix.float()


@dataclass(frozen=True)
class DeviceAttentionPlan:
    """An AttentionPlan with its indices and masks as tensors, made once per sweep and used by every layer."""

    shared: tuple[tuple[SharedItem, Tensor], ...]  # pages [kv_heads * blocks]
    decode: tuple[tuple[DecodeGroup, Tensor, Tensor | None], ...]  # pages, mask [seqs, 1, 1, keys]
    prefill: tuple[tuple[PrefillItem, Tensor], ...]


def prepare_attention(plan: AttentionPlan, kv_heads: int, block_size: int, dtype: torch.dtype) -> DeviceAttentionPlan:
    """Turns block numbers into page numbers and lengths into additive masks."""

    def pages(blocks: np.ndarray) -> Tensor:  # [..., blocks] -> [..., kv_heads, blocks], flat
        return torch.from_numpy(
            (blocks.astype(np.int64)[..., None, :] * 2 * kv_heads + np.arange(kv_heads)[:, None]).reshape(-1)
        )

    decode = []
    for group in plan.decode:
        keys = np.arange(group.blocks.shape[1] * block_size)
        hidden = (keys >= group.num_keys[:, None]) | (keys < group.first_key[:, None])
        mask = None
        if hidden.any():
            mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(torch.from_numpy(hidden), float("-inf"))
            mask = mask[:, None, None, :]
        decode.append((group, pages(group.blocks), mask))
    return DeviceAttentionPlan(
        shared=tuple((item, pages(item.blocks)) for item in plan.shared),
        decode=tuple(decode),
        prefill=tuple((item, pages(item.blocks)) for item in plan.prefill),
    )


def paged_attention(q: Tensor, kv: Tensor, plan: DeviceAttentionPlan) -> Tensor:
    """Causal attention of packed query tokens over paged KV, prefill and decode in one call.

    q: [tokens, heads, head_dim], already scaled; heads is a multiple of kv_heads (grouped-query attention).
    kv: [num_blocks, 2, kv_heads, block_size, width]; the tokens' own K and V are already there.
    Returns [tokens, heads * head_dim].
    """
    tokens, heads, head_dim = q.shape
    if kv.dtype == torch.uint8:
        q = _rotated(q)
    out = torch.empty_like(q)
    # Log-sum-exp per token and head, needed only where a token's keys are attended to in two parts.
    lse = torch.empty(tokens, heads) if plan.shared else None
    for group, pages, mask in plan.decode:
        _decode_group(q, kv, group, pages, mask, out, lse)
    for item, pages in plan.prefill:
        _prefill_item(q, kv, item, pages, out, lse)
    for item, pages in plan.shared:
        _shared_item(q, kv, item, pages, out, lse)
    return out.view(tokens, heads * head_dim)


def _gather(q: Tensor, kv: Tensor, pages: Tensor, batch: int) -> tuple[Tensor, Tensor]:
    """The pages' K and V as [batch, keys, head_dim] in q's dtype, batch running over (sequence,) kv head."""
    blocks, _, kv_heads, block_size, width = kv.shape
    flat = kv.view(blocks * 2 * kv_heads, block_size * width)
    gathered = (flat.index_select(0, which).view(batch, -1, width) for which in (pages, pages + kv_heads))
    if kv.dtype == torch.uint8:
        gathered = (quant.dequantize(packed, q.shape[-1], dtype=q.dtype) for packed in gathered)
    return tuple(gathered)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, want_lse: bool) -> tuple[Tensor, Tensor | None]:
    """softmax(q kᵀ + mask) v for q [batch, rows, dim], k and v [batch, keys, dim]; and the log-sum-exp.

    mask: additive [a, b, c, m] over scores seen as [a, ., c or broadcast, keys], for the last m keys.
    """
    scores = torch.bmm(q, k.transpose(1, 2))
    if mask is not None:
        masked = scores.view(mask.shape[0], -1, mask.shape[2] if mask.shape[2] > 1 else q.shape[1], scores.shape[2])
        masked[..., -mask.shape[3] :].add_(mask)
    shares = torch.softmax(scores, -1)
    lse = None
    if want_lse:
        # The likeliest key's share is exp(its score - lse): two maxima cost far less than torch.logsumexp.
        lse = scores.amax(-1).float() - shares.amax(-1).float().log()
    return torch.bmm(shares, v), lse


def _decode_group(q, kv, group: DecodeGroup, pages, mask, out, lse) -> None:
    kv_heads, head_dim = kv.shape[2], q.shape[2]
    n = group.stop - group.start
    k, v = _gather(q, kv, pages, n * kv_heads)
    rows = q[group.start : group.stop].reshape(n * kv_heads, -1, head_dim)
    result, part = _attend(rows, k, v, mask, lse is not None)
    out[group.start : group.stop] = result.view(n, -1, head_dim)
    if lse is not None:
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
def _causal_mask(queries: int, keys: int, window: int | None, dtype: torch.dtype) -> Tensor:
    """Mask [1, 1, queries, columns] for the last `queries` of `keys` positions asking; without a window only
    the last `queries` columns, since all keys before the first query are visible."""
    columns = queries if window is None else keys
    distance = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys - columns, keys)
    hidden = distance < 0
    if window is not None:
        hidden |= distance >= window
    return torch.zeros(1, 1, *hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))


def _prefill_item(q, kv, item: PrefillItem, pages, out, lse) -> None:
    kv_heads = kv.shape[2]
    k, v = _gather(q, kv, pages, kv_heads)
    count = item.stop - item.start
    step = _tile_rows(q, item.query_offset + count)
    for a in range(0, count, step):
        b = min(a + step, count)
        last = item.query_offset + b
        first = 0 if item.window is None else max(0, item.query_offset + a - item.window + 1)
        mask = _causal_mask(b - a, last - first, item.window, q.dtype)
        rows = _by_kv_head(q[item.start + a : item.start + b], kv_heads)
        result, part = _attend(rows, k[:, first:last], v[:, first:last], mask, lse is not None)
        out[item.start + a : item.start + b] = _by_token(result, b - a)
        if lse is not None:
            lse[item.start + a : item.start + b] = _by_token(part, b - a)


def _shared_item(q, kv, item: SharedItem, pages, out, lse) -> None:
    """Attention of many sequences' tokens over one shared prefix: K and V are read once for all of them."""
    kv_heads = kv.shape[2]
    k, v = _gather(q, kv, pages, kv_heads)
    step = _tile_rows(q, k.shape[1])
    for a in range(item.start, item.stop, step):
        b = min(a + step, item.stop)
        result, part = _attend(_by_kv_head(q[a:b], kv_heads), k, v, None, True)
        result, part = _by_token(result, b - a), _by_token(part, b - a)
        # Merge the two softmaxes: weights are the shares of exp(lse), exact up to rounding.
        weight = torch.sigmoid(part - lse[a:b])[..., None]
        out[a:b] = torch.lerp(out[a:b].float(), result.float(), weight).to(out.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension, the mean square in fp32."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates halves (x1, x2) of the last dimension by the tokens' angles.

    x: [tokens, heads, head_dim]; cos, sin: fp32 [tokens, 1, head_dim / 2]. Computed in fp32, returned as x's dtype.
    """
    x1, x2 = x.float().chunk(2, dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).to(x.dtype)


def silu_and_mul(x: Tensor) -> Tensor:
    """silu(gate) * up for x [tokens, 2 * intermediate], gate first."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
