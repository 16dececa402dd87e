"""Split, norm and rotation of fused QKV, and storing of keys and values in paged KV, in one Triton kernel.

Each head of queries and keys is normed (RMSNorm) if the model does so, and its halves are rotated (rotary embedding)
unless positions are learned. For KV of 4 or 5 bits, heads are multiplied by `ops.rotation` and packed. The kernel
computes in fp32 and rounds once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchgen.ops import quant
from batchgen.ops.triton.groups import aligned, flat_columns, pack, pack_halves, tile_columns
from batchgen.ops.triton.launch import Launch, card, power_of_two

MAX_HEAD_DIM = 512
_TOKENS = 8  # of a program
_ROTATED_TOKENS = 64  # more of them, so that the rotation is read less often


def supports_rotary(head_dim: int, rotate_keys: bool, device: torch.device) -> bool:
    """Tell whether the kernel supports heads of `head_dim` values on a device.

    Args:
        head_dim: Number of values in one head.
        rotate_keys: Whether queries and keys are multiplied by `ops.rotation`.
        device: Device that computes.
    """
    return (card(device).has_products or not rotate_keys) and head_dim % 2 == 0 and head_dim <= MAX_HEAD_DIM


def rotary_store(  # the operands of one kernel
    qkv: Tensor,
    heads: int,
    kv_heads: int,
    *,
    scale: float,
    rope: tuple[Tensor, Tensor] | None = None,
    positions: Tensor | None = None,
    norms: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0,
    rotation: Tensor | None = None,
    kv: Tensor | None = None,
    slots: Tensor | None = None,
    bits: int = 0,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Split fused QKV; norm and rotate queries and keys; scale queries; store keys and values, or return them.

    Args:
        qkv: Output of the QKV projection, [tokens, (heads + 2 kv_heads) * head_dim].
        heads: Number of query heads.
        kv_heads: Number of key and value heads.
        scale: Factor of queries.
        rope: Tables of cos and sin, each fp32 [positions, head_dim / 2]. None: the model has no rotary positions.
        positions: Position of each token, int64 [tokens].
        norms: RMSNorm weights for each head's queries and keys, each [head_dim]. None: they are not normed.
        eps: Epsilon of these norms.
        rotation: Matrix by which queries and keys are also multiplied, fp32 [head_dim, head_dim]. It is needed for KV
            of 4 or 5 bits.
        kv: KV of the layer in which keys and values are stored. None: they are returned.
        slots: Place of each token in the KV, int64 [tokens]: block number * kv_block_size + offset in the block. Tokens
            with a slot below 0 are not stored.
        bits: Bits of each quantized value of packed KV. 0: KV is stored as numbers.

    Returns:
        Queries [tokens, heads, head_dim]; keys and values [tokens, kv_heads, head_dim] if `kv` is None.
    """
    tokens = len(qkv)
    head_dim = qkv.shape[1] // (heads + 2 * kv_heads)
    q = torch.empty(tokens, heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    k = v = None
    if kv is None:
        k, v = (torch.empty(tokens, kv_heads, head_dim, dtype=qkv.dtype, device=qkv.device) for _ in range(2))
    rotary_launch(qkv, heads, kv_heads, scale, rope, positions, norms, eps, rotation, kv, slots, bits, q, k, v)()
    return q, k, v


def rotary_launch(  # the operands of one kernel
    qkv: Tensor,
    heads: int,
    kv_heads: int,
    scale: float,
    rope: tuple[Tensor, Tensor] | None,
    positions: Tensor | None,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    rotation: Tensor | None,
    kv: Tensor | None,
    slots: Tensor | None,
    bits: int,
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
) -> Launch:
    head_dim = q.shape[2]
    assert qkv.stride(1) == 1 and (kv is None or (kv.is_contiguous() and kv.shape[2] == kv_heads))
    assert kv is None or (rotation is not None) == (0 < bits < 8)
    assert (kv is not None and kv.dtype == torch.uint8) == bool(bits)
    assert kv is None or kv.shape[4] == (quant.row_bytes(head_dim, bits) if bits else head_dim)
    cos, sin = rope or (None, None)
    q_norm, k_norm = norms or (None, None)
    args = {
        "qkv": qkv,
        "q": q,
        "k": k if kv is None else kv,
        "v": v if kv is None else kv,
        "slots": None if kv is None else slots,
        "positions": None if rope is None else positions,
        "cos": cos,
        "sin": sin,
        "q_norm": q_norm,
        "k_norm": k_norm,
        "rotation": rotation,
        "num_tokens": len(qkv),
        "qkv_stride": qkv.stride(0),
        "scale": scale,
        "eps": eps,
    }
    tokens = _TOKENS
    if rotation is not None:
        tokens = _ROTATED_TOKENS if head_dim <= 128 else 16  # registers hold no more
    warps = 8 if rotation is not None and head_dim > 64 else 4
    groups = power_of_two(triton.cdiv(head_dim, 64))
    constants = {
        "HEADS": heads,
        "KV_HEADS": kv_heads,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": 1 if kv is None else kv.shape[3],
        "WIDTH": head_dim if kv is None else kv.shape[4],
        "BITS": bits,
        "ALIGNED": aligned(head_dim, bits),
        "TOKENS": tokens,
        "HALF_DIM": power_of_two(head_dim // 2, 16),
        "GROUPS": groups,
        "ROTATED_GROUPS": groups if head_dim <= 128 else 1,
    }
    return Launch(_rotary_store, (triton.cdiv(len(qkv), tokens), heads + 2 * kv_heads), args, constants, warps)


# Positions are those of some of a batch's tokens, from any one on: no variant of the kernel for every other one.
@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["positions"])
def _rotary_store(  # a kernel takes pointers and scalars only
    qkv,
    q,
    k,
    v,
    slots,
    positions,
    cos,
    sin,
    q_norm,
    k_norm,
    rotation,
    num_tokens,
    qkv_stride,
    scale,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    BITS: tl.constexpr,
    ALIGNED: tl.constexpr,
    TOKENS: tl.constexpr,
    HALF_DIM: tl.constexpr,
    GROUPS: tl.constexpr,
    ROTATED_GROUPS: tl.constexpr,
):
    """Kernel: some tokens of one head of queries, keys or values."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    there = token < num_tokens
    head = tl.program_id(1)
    source = qkv + token.to(tl.int64) * qkv_stride + head * HEAD_DIM
    # Rows of what k and v are written to, counted from the first KV head.
    if slots is not None:
        slot = tl.load(slots + token, mask=there, other=-1)
        kept = slot >= 0
        row = slot // BLOCK_SIZE * (2 * KV_HEADS * BLOCK_SIZE) + slot % BLOCK_SIZE
        head_rows: tl.constexpr = BLOCK_SIZE
        value_rows: tl.constexpr = KV_HEADS * BLOCK_SIZE
    else:
        row = token.to(tl.int64) * KV_HEADS
        kept = there
        head_rows: tl.constexpr = 1  # type: ignore[no-redef]
        value_rows: tl.constexpr = 0  # type: ignore[no-redef]

    if head >= HEADS + KV_HEADS:
        rows = v + (row + value_rows + (head - HEADS - KV_HEADS) * head_rows) * WIDTH
        if BITS == 4 or BITS == 5:
            low, high, low_there, high_there = tile_columns(0, HEAD_DIM, GROUPS)
            all_there = there[:, None, None]
            low_mask, high_mask = all_there & low_there[None, :, :], all_there & high_there[None, :, :]
            low_value = tl.load(source[:, None, None] + low[None, :, :], mask=low_mask, other=0.0)
            high_value = tl.load(source[:, None, None] + high[None, :, :], mask=high_mask, other=0.0)
            pack(low_value.to(tl.float32), high_value.to(tl.float32), rows, kept, 0, HEAD_DIM, GROUPS, BITS, ALIGNED)
        else:
            column = tl.arange(0, HALF_DIM)[None, :]
            mask = there[:, None] & (column < HEAD_DIM // 2)
            first = tl.load(source[:, None] + column, mask=mask, other=0.0)
            second = tl.load(source[:, None] + HEAD_DIM // 2 + column, mask=mask, other=0.0)
            if BITS == 8:
                pack_halves(first.to(tl.float32), second.to(tl.float32), rows, kept, HEAD_DIM, GROUPS, ALIGNED)
            else:
                _store_halves(first, second, rows, mask & kept[:, None], column, HEAD_DIM)
        return

    column = tl.arange(0, HALF_DIM)[None, :]
    inside = column < HEAD_DIM // 2
    mask = there[:, None] & inside
    first = tl.load(source[:, None] + column, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(source[:, None] + HEAD_DIM // 2 + column, mask=mask, other=0.0).to(tl.float32)
    if q_norm is not None:
        mean_square = (tl.sum(first * first, 1) + tl.sum(second * second, 1)) / HEAD_DIM
        factor = tl.rsqrt(mean_square + eps)[:, None]
        if head < HEADS:
            first_weight = tl.load(q_norm + column, mask=inside, other=0.0)
            second_weight = tl.load(q_norm + HEAD_DIM // 2 + column, mask=inside, other=0.0)
        else:
            first_weight = tl.load(k_norm + column, mask=inside, other=0.0)
            second_weight = tl.load(k_norm + HEAD_DIM // 2 + column, mask=inside, other=0.0)
        first *= factor * first_weight.to(tl.float32)
        second *= factor * second_weight.to(tl.float32)
    if cos is not None:
        angle = tl.load(positions + token, mask=there, other=0)[:, None] * (HEAD_DIM // 2) + column
        c = tl.load(cos + angle, mask=mask, other=0.0)
        s = tl.load(sin + angle, mask=mask, other=0.0)
        first, second = first * c - second * s, second * c + first * s
    if head < HEADS:
        first *= scale
        second *= scale

    if rotation is None:
        if head < HEADS:
            _store_halves(first, second, q + (token.to(tl.int64) * HEADS + head) * HEAD_DIM, mask, column, HEAD_DIM)
        else:
            k_rows = k + (row + (head - HEADS) * head_rows) * WIDTH
            if BITS == 8:
                pack_halves(first, second, k_rows, kept, HEAD_DIM, GROUPS, ALIGNED)
            else:
                _store_halves(first, second, k_rows, mask & kept[:, None], column, HEAD_DIM)
    else:
        # Rotated, into columns of low and of high nibbles.
        exact: tl.constexpr = qkv.dtype.element_ty == tl.float32
        for group in tl.static_range(0, GROUPS, ROTATED_GROUPS):
            low, high, low_there, high_there = flat_columns(group, HEAD_DIM, ROTATED_GROUPS)
            low_value = _rotated(first, second, rotation, low, low_there, HEAD_DIM, HALF_DIM, exact)
            high_value = _rotated(first, second, rotation, high, high_there, HEAD_DIM, HALF_DIM, exact)
            low_mask = there[:, None] & low_there[None, :]
            high_mask = there[:, None] & high_there[None, :]
            if head < HEADS:
                q_rows = (q + (token.to(tl.int64) * HEADS + head) * HEAD_DIM)[:, None]
                tl.store(q_rows + low[None, :], low_value.to(q.dtype.element_ty), mask=low_mask)
                tl.store(q_rows + high[None, :], high_value.to(q.dtype.element_ty), mask=high_mask)
            else:
                k_rows = k + (row + (head - HEADS) * head_rows) * WIDTH
                if BITS == 4 or BITS == 5:
                    k_low = tl.reshape(low_value, (TOKENS, ROTATED_GROUPS, 32))
                    k_high = tl.reshape(high_value, (TOKENS, ROTATED_GROUPS, 32))
                    pack(k_low, k_high, k_rows, kept, group, HEAD_DIM, ROTATED_GROUPS, BITS, ALIGNED)
                else:
                    kept_low, kept_high = low_mask & kept[:, None], high_mask & kept[:, None]
                    tl.store(k_rows[:, None] + low[None, :], low_value.to(k.dtype.element_ty), mask=kept_low)
                    tl.store(k_rows[:, None] + high[None, :], high_value.to(k.dtype.element_ty), mask=kept_high)


@triton.jit
def _store_halves(first, second, rows, mask, column, HEAD_DIM: tl.constexpr):
    type: tl.constexpr = rows.dtype.element_ty
    tl.store(rows[:, None] + column, first.to(type), mask=mask)
    tl.store(rows[:, None] + HEAD_DIM // 2 + column, second.to(type), mask=mask)


@triton.jit
def _rotated(
    first,
    second,
    rotation,
    column,
    there,
    HEAD_DIM: tl.constexpr,
    HALF_DIM: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Some columns of the product of heads, given as two halves, and the rotation matrix.

    16-bit numbers are multiplied as tf32, which has at least as many digits.
    """
    depth = tl.arange(0, HALF_DIM)[:, None]
    column = column[None, :]
    mask = (depth < HEAD_DIM // 2) & there[None, :]
    upper = tl.load(rotation + depth * HEAD_DIM + column, mask=mask, other=0.0)
    lower = tl.load(rotation + (HEAD_DIM // 2 + depth) * HEAD_DIM + column, mask=mask, other=0.0)
    precision: tl.constexpr = "ieee" if EXACT else "tf32"
    total = tl.dot(first, upper, input_precision=precision)
    return tl.dot(second, lower, total, input_precision=precision)
