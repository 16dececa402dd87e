"""Attention over paged KV by Triton kernels.

A kernel goes through an item's keys tile by tile with online softmax (Milakov and Gimelshein, 2018; FlashAttention: Dao
et al., 2022). A further kernel merges the partial results of a token's items (flash-decoding).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchgen.ops.attention_items import COLUMNS
from batchgen.ops.attention_operands import AttentionOperands
from batchgen.ops.attention_plan import AttentionPlan
from batchgen.ops.triton import plan as plans
from batchgen.ops.triton.groups import aligned, flat_columns, unpack, unpack_bytes
from batchgen.ops.triton.launch import Launch, Tile, attention_tiles, card, fits_attention, power_of_two
from batchgen.ops.triton.plan import CutPlan, DevicePlan, Geometry

MAX_HEAD_DIM = 512
MAX_GROUP = 64  # query heads of a KV head: they are rows of one tile

_MERGED_AT_ONCE = 8
_LOG2_E = tl.constexpr(1.4426950408889634)
_ITEM = tl.constexpr(COLUMNS)


def supports_attention(operands: AttentionOperands, device: torch.device) -> bool:
    """Tell whether the Triton attention kernels support operands of these shapes on a device."""
    this, head_dim, group, kv_block_size = card(device), operands.head_dim, operands.group, operands.kv_block_size
    return (
        this.has_products
        and head_dim % 2 == 0
        and head_dim <= MAX_HEAD_DIM
        and group <= MAX_GROUP
        and fits_attention(group, head_dim, this.shared_memory)
        and kv_block_size & (kv_block_size - 1) == 0
    )


def geometry(of: AttentionOperands, device: torch.device) -> Geometry:
    """The sizes and tiles for which attention plans are cut, from the operands' shapes and a GPU."""
    this = card(device)
    few, many = attention_tiles(of.group, of.head_dim, of.dtype, of.kv_format.bits, this.shared_memory)
    return Geometry(of.heads, of.kv_heads, of.head_dim, of.kv_block_size, few, many, this.num_sms)


def prepare_attention(
    plan: AttentionPlan, operands: AttentionOperands, device: torch.device, every_kernel: bool = False
) -> DevicePlan:
    """Cut the attention plan of a sweep into work items for a GPU, and copy them to it.

    every_kernel: Whether kernels that the plan has nothing for are launched too, with items that are empty.
    """
    cut = cut_attention(plan, operands, device)
    return cut.prepare(device, cut.capacity.of_every_kernel() if every_kernel else None)


def cut_attention(plan: AttentionPlan, operands: AttentionOperands, device: torch.device) -> CutPlan:
    """Cut the attention plan of a sweep into work items for a GPU, in the host's memory."""
    return plans.cut(plan, geometry(operands, device))


def paged_attention(
    q: Tensor,
    kv: Tensor,
    plan: DevicePlan,
    out: Tensor | None = None,
    bits: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute causal attention of queries [tokens, heads, head_dim] to paged KV, by the items of a plan.

    The result has the queries' shape. Rows of tokens that are in no item are not written.
    """
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    for launch in launches(q, kv, plan, out, bits, softcap, sinks):
        launch()
    return out


def launches(
    q: Tensor,
    kv: Tensor,
    plan: DevicePlan,
    out: Tensor,
    bits: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> list[Launch]:
    """The kernel launches of an attention: for items with few rows, for items with many rows, and for merges.

    A launch without items is left out.
    """
    shape = plan.geometry
    assert q.stride(2) == 1 and q.stride(1) == q.shape[2] == shape.head_dim and kv.is_contiguous()
    assert q.shape[1] == shape.heads and kv.shape[2:4] == (shape.kv_heads, shape.kv_block_size)
    rows = plan.capacity.partial_rows
    # Partial results, unnormalised, and of each the largest score (in powers of two) and the sum of softmax weights.
    partial = torch.empty(rows, shape.heads, shape.head_dim, dtype=torch.float32, device=q.device)
    stats = torch.empty(rows, shape.heads, 2, dtype=torch.float32, device=q.device)
    attending = [
        _attend_launch(q, kv, plan, out, partial, stats, items, tile, bits, softcap, sinks)
        for items, tile in ((plan.few, shape.few), (plan.many, shape.many))
        if len(items)
    ]
    if len(plan.merge_tokens):
        args = {
            "out": out,
            "partial": partial,
            "stats": stats,
            "tokens": plan.merge_tokens,
            "starts": plan.merge_starts,
            "rows": plan.merge_rows,
            "sinks": sinks,
        }
        constants = {
            "HEADS": shape.heads,
            "HEAD_DIM": shape.head_dim,
            "DIM": power_of_two(shape.head_dim, 16),
            "PARTS": _MERGED_AT_ONCE,
        }
        attending.append(Launch(_merge, (len(plan.merge_tokens), shape.heads), args, constants, warps=1))
    return attending


def _attend_launch(  # the operands of one kernel
    q: Tensor,
    kv: Tensor,
    plan: DevicePlan,
    out: Tensor,
    partial: Tensor,
    stats: Tensor,
    items: Tensor,
    tile: Tile,
    bits: int,
    softcap: float,
    sinks: Tensor | None,
) -> Launch:
    shape = plan.geometry
    assert (kv.dtype == torch.uint8) == bool(bits)
    args = {
        "q": q,
        "kv": kv,
        "out": out,
        "partial": partial,
        "stats": stats,
        "items": items,
        "table": plan.table,
        "sinks": sinks,
        "q_stride": q.stride(0),
    }
    constants = {
        "KV_HEADS": shape.kv_heads,
        "GROUP": shape.group,
        "HEAD_DIM": shape.head_dim,
        "BLOCK_SIZE": shape.kv_block_size,
        "WIDTH": kv.shape[4],
        "BITS": bits,
        "ALIGNED": aligned(shape.head_dim, bits),
        "ROWS": tile.rows,
        "KEYS": tile.keys,
        "DIM": power_of_two(shape.head_dim, 64 if bits else 16),
        "SOFTCAP": softcap,
    }
    return Launch(_attend, (len(items), shape.kv_heads), args, constants, tile.warps, tile.stages)


@triton.jit
def _attend(  # a kernel takes pointers and scalars only
    q,
    kv,
    out,
    partial,
    stats,
    items,
    table,
    sinks,
    q_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    BITS: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    DIM: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """Kernel: attention of one item and one KV head.

    Rows are pairs of a token of the item and a query head of the KV head. For KV of 4 or 5 bits, queries and results
    are in two halves, for the columns in low and in high nibbles, so that every byte is read once.
    """
    item = items + tl.program_id(0) * _ITEM
    num_tokens = tl.load(item + 1)
    if num_tokens == 0:
        return
    first_token, first_key, last_key = tl.load(item), tl.load(item + 2), tl.load(item + 3)
    causal, window = tl.load(item + 4), tl.load(item + 5)
    table += tl.load(item + 6)
    partial_row = tl.load(item + 7)
    kv_head = tl.program_id(1)

    row = tl.arange(0, ROWS)
    token = row // GROUP
    head = kv_head * GROUP + row % GROUP
    there = token < num_tokens
    q_rows = q + (first_token + token).to(tl.int64) * q_stride + head * HEAD_DIM
    if BITS == 4 or BITS == 5:
        low, high, low_there, high_there = flat_columns(0, HEAD_DIM, DIM // 64)
        q_high = tl.load(q_rows[:, None] + high[None, :], mask=there[:, None] & high_there[None, :], other=0)
        sum_high = tl.zeros((ROWS, DIM // 2), tl.float32)
    else:
        low = tl.arange(0, DIM)
        low_there = low < HEAD_DIM
        q_high = 0.0
        sum_high = 0.0
    q_low = tl.load(q_rows[:, None] + low[None, :], mask=there[:, None] & low_there[None, :], other=0)
    sum_low = tl.zeros(q_low.shape, tl.float32)
    most = tl.full((ROWS,), float("-inf"), tl.float32)
    weight_sum = tl.zeros((ROWS,), tl.float32)

    kv += kv_head * (BLOCK_SIZE * WIDTH)
    # Keys that every token sees need no mask: those up to the first token's own, where no window hides some.
    unmasked = tl.minimum(last_key, causal + 1)
    if window < 2147483647:
        unmasked = first_key
    whole = first_key + tl.maximum(unmasked - first_key, 0) // KEYS * KEYS
    for key in range(first_key, whole, KEYS):
        sum_low, sum_high, most, weight_sum = _attend_keys(
            q_low, q_high, sum_low, sum_high, most, weight_sum, kv, table, key, last_key, causal + token, window,
            KV_HEADS, HEAD_DIM, BLOCK_SIZE, WIDTH, BITS, ALIGNED, KEYS, DIM, SOFTCAP, False,
        )  # fmt: skip
    for key in range(whole, last_key, KEYS):
        sum_low, sum_high, most, weight_sum = _attend_keys(
            q_low, q_high, sum_low, sum_high, most, weight_sum, kv, table, key, last_key, causal + token, window,
            KV_HEADS, HEAD_DIM, BLOCK_SIZE, WIDTH, BITS, ALIGNED, KEYS, DIM, SOFTCAP, True,
        )  # fmt: skip

    low_mask = there[:, None] & low_there[None, :]
    if partial_row >= 0:
        rows = (partial_row + token).to(tl.int64) * (KV_HEADS * GROUP) + head
        tl.store(stats + rows * 2, most, mask=there)
        tl.store(stats + rows * 2 + 1, weight_sum, mask=there)
        tl.store(partial + rows[:, None] * HEAD_DIM + low[None, :], sum_low, mask=low_mask)
        if BITS == 4 or BITS == 5:
            high_mask = there[:, None] & high_there[None, :]
            tl.store(partial + rows[:, None] * HEAD_DIM + high[None, :], sum_high, mask=high_mask)
    else:
        rows = (first_token + token).to(tl.int64) * (KV_HEADS * GROUP) + head
        if sinks is not None:
            weight_sum += tl.exp2(tl.load(sinks + head) * _LOG2_E - most)
        divisor = tl.where(weight_sum > 0, weight_sum, 1.0)[:, None]  # no key in sight: zeros
        type: tl.constexpr = out.dtype.element_ty
        tl.store(out + rows[:, None] * HEAD_DIM + low[None, :], (sum_low / divisor).to(type), mask=low_mask)
        if BITS == 4 or BITS == 5:
            high_mask = there[:, None] & high_there[None, :]
            tl.store(out + rows[:, None] * HEAD_DIM + high[None, :], (sum_high / divisor).to(type), mask=high_mask)


@triton.jit
def _attend_keys(  # a kernel takes pointers and scalars only
    q_low,
    q_high,
    sum_low,
    sum_high,
    most,
    weight_sum,
    kv,
    table,
    first_key,
    last_key,
    position,
    window,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    BITS: tl.constexpr,
    ALIGNED: tl.constexpr,
    KEYS: tl.constexpr,
    DIM: tl.constexpr,
    SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Add a tile of keys, from first_key on, to the online softmax of an item's rows.

    `position` is the last key that each row attends to. Returns the new weighted sums of values, largest scores, and
    sums of softmax weights.
    """
    key = first_key + tl.arange(0, KEYS)
    there = tl.full((KEYS,), True, tl.int1)
    if MASKED:
        there = key < last_key
    block = tl.load(table + key // BLOCK_SIZE, mask=there, other=0).to(tl.int64)
    k_rows = kv + block * (2 * KV_HEADS * BLOCK_SIZE * WIDTH) + key % BLOCK_SIZE * WIDTH
    v_rows = k_rows + KV_HEADS * BLOCK_SIZE * WIDTH
    if BITS == 4 or BITS == 5:
        k_low, k_high = unpack(k_rows, there, 0, HEAD_DIM, DIM // 64, BITS, ALIGNED)
        k_low = tl.reshape(k_low, (KEYS, DIM // 2)).to(q_low.dtype)
        k_high = tl.reshape(k_high, (KEYS, DIM // 2)).to(q_low.dtype)
        scores = tl.dot(q_low, tl.trans(k_low), input_precision="ieee")
        scores = tl.dot(q_high, tl.trans(k_high), scores, input_precision="ieee")
    elif BITS == 8:
        k = unpack_bytes(k_rows, there, HEAD_DIM, DIM // 64, ALIGNED).to(q_low.dtype)
        scores = tl.dot(q_low, tl.trans(k), input_precision="ieee")
    else:
        column = tl.arange(0, DIM)[None, :]
        loaded = there[:, None]
        if HEAD_DIM < DIM:
            loaded = loaded & (column < HEAD_DIM)
        k = tl.load(k_rows[:, None] + column, mask=loaded, other=0).to(q_low.dtype)
        scores = tl.dot(q_low, tl.trans(k), input_precision="ieee")
    if SOFTCAP > 0:  # tanh(x) = 2 sigmoid(2 x) - 1
        scores = SOFTCAP * (2.0 / (1.0 + tl.exp(scores * (-2.0 / SOFTCAP))) - 1.0)
    scores *= _LOG2_E
    if MASKED:
        seen = there[None, :] & (key[None, :] <= position[:, None]) & (key[None, :] > position[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
    now_most = tl.maximum(most, tl.max(scores, 1))
    # Rows that see nothing yet have no largest score to take away.
    base = tl.where(now_most == float("-inf"), 0.0, now_most) if MASKED else now_most
    weight = tl.exp2(scores - base[:, None])
    faded = tl.exp2(most - base)
    weight_sum = weight_sum * faded + tl.sum(weight, 1)
    weight = weight.to(q_low.dtype)
    sum_low = sum_low * faded[:, None]
    if BITS == 4 or BITS == 5:
        v_low, v_high = unpack(v_rows, there, 0, HEAD_DIM, DIM // 64, BITS, ALIGNED)
        v_low = tl.reshape(v_low, (KEYS, DIM // 2)).to(q_low.dtype)
        v_high = tl.reshape(v_high, (KEYS, DIM // 2)).to(q_low.dtype)
        sum_low = tl.dot(weight, v_low, sum_low, input_precision="ieee")
        sum_high = tl.dot(weight, v_high, sum_high * faded[:, None], input_precision="ieee")
    elif BITS == 8:
        v = unpack_bytes(v_rows, there, HEAD_DIM, DIM // 64, ALIGNED).to(q_low.dtype)
        sum_low = tl.dot(weight, v, sum_low, input_precision="ieee")
    else:
        v = tl.load(v_rows[:, None] + column, mask=loaded, other=0).to(q_low.dtype)
        sum_low = tl.dot(weight, v, sum_low, input_precision="ieee")
    return sum_low, sum_high, now_most, weight_sum


@triton.jit
def _merge(  # a kernel takes pointers and scalars only
    out,
    partial,
    stats,
    tokens,
    starts,
    rows,
    sinks,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Kernel: merge the partial results of one token and head, in a fixed order."""
    token = tl.load(tokens + tl.program_id(0)).to(tl.int64)
    if token < 0:
        return
    start, stop = tl.load(starts + tl.program_id(0)), tl.load(starts + tl.program_id(0) + 1)
    head = tl.program_id(1)
    column = tl.arange(0, DIM)
    total = tl.zeros((DIM,), tl.float32)
    most = float("-inf")
    weight_sum = 0.0
    for first in range(start, stop, PARTS):
        index = first + tl.arange(0, PARTS)
        row = tl.load(rows + index, mask=index < stop, other=0).to(tl.int64) * HEADS + head
        part_most = tl.load(stats + row * 2, mask=index < stop, other=float("-inf"))
        part_weights = tl.load(stats + row * 2 + 1, mask=index < stop, other=0.0)
        now_most = tl.maximum(most, tl.max(part_most, 0))
        base = tl.where(now_most == float("-inf"), 0.0, now_most)
        weight, faded = tl.exp2(part_most - base), tl.exp2(most - base)
        mask = (index < stop)[:, None] & (column < HEAD_DIM)[None, :]
        part = tl.load(partial + row[:, None] * HEAD_DIM + column[None, :], mask=mask, other=0.0)
        total = total * faded + tl.sum(part * weight[:, None], 0)
        weight_sum = weight_sum * faded + tl.sum(part_weights * weight, 0)
        most = now_most
    if sinks is not None:
        weight_sum += tl.exp2(tl.load(sinks + head) * _LOG2_E - most)
    total = total / tl.where(weight_sum > 0, weight_sum, 1.0)
    offset = (token * HEADS + head) * HEAD_DIM + column
    tl.store(out + offset, total.to(out.dtype.element_ty), mask=column < HEAD_DIM)
