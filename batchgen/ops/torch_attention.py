"""Attention over paged KV in torch, on any device: what kernels are compared with, and used where there are none.

The items of a sweep (`attention_items`) are computed in batches. The items of a batch are padded to the same numbers of
queries and keys, so that a batch takes the same few operations, however many items it has. The device finds out what a
token sees from two numbers for each query.

Items are cut by tokens and by keys, so that what a batch makes has a bound. A token with several items has its result
in several rounds: the first one is written, the later ones are merged into it by their log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from batchgen.ops import quant
from batchgen.ops.attention_items import (
    CAUSAL,
    FIRST_KEY,
    FIRST_TOKEN,
    LAST_KEY,
    NUM_TOKENS,
    PARTIAL,
    TABLE,
    WINDOW,
    item_spans,
    keys_cut,
    tokens_cut,
)
from batchgen.ops.attention_operands import AttentionOperands
from batchgen.ops.attention_plan import AttentionPlan
from batchgen.ops.host_copy import upload
from batchgen.ops.long_steps import note

# Bytes that a batch makes beside its result: on a CPU what stays in its cache; on a GPU enough for efficient products,
# and less than what is planned for them (planner/sizes.py, DEVICE_WORKSPACE_BYTES).
_CPU_BATCH_BYTES, _GPU_BATCH_BYTES = 8 << 20, 24 << 20
# Keys of an item, and its tokens, which are fewer than its keys: so a token sees some key of its first part.
_MOST_KEYS, _MOST_TOKENS = 1024, 256
# Operations of a batch on a GPU, at most.
_BATCH_OPERATIONS = 96
# Padding of a batch: this factor, and so many blocks with one query each.
_PADDED, _PADDED_BLOCKS = 1.25, 64


@dataclass(frozen=True)
class ItemBatch:
    """Items that are computed together, padded to the same numbers of queries and keys.

    Attributes:
        tokens: Token of each query, int64 [items * queries].
        blocks: KV blocks of each item, int64 [items, blocks].
        lowest, highest: First and last key that each query sees, counted from its item's first block, int64 [items,
            queries]; None: every query sees every key.
        rows: Queries whose results are kept, as numbers of `tokens`; None: all.
        targets: Their tokens.
        is_first: Whether the results are written; otherwise they are merged into what is there.
    """

    tokens: Tensor
    blocks: Tensor
    lowest: Tensor | None
    highest: Tensor | None
    rows: Tensor | None
    targets: Tensor
    is_first: bool


@dataclass(frozen=True)
class TorchAttentionPlan:
    """The attention plan of a sweep as batches of items on a device, made once for all layers.

    Attributes:
        batches: The batches, in order of their rounds.
        keys: The numbers 0 to n - 1, where no item has more than n keys.
        merges: Whether any result is merged.
    """

    batches: tuple[ItemBatch, ...]
    keys: Tensor
    merges: bool


def prepare_attention(
    plan: AttentionPlan,
    operands: AttentionOperands,
    device: torch.device,
) -> TorchAttentionPlan:
    """Cut the attention plan of a sweep into batches, and copy them to a device. The host does not wait.

    Args:
        plan: Attention plan of the sweep.
        operands: Shapes and dtypes of queries and KV.
        device: Device that has queries and KV.
    """
    most_bytes = _CPU_BATCH_BYTES if device.type == "cpu" else _GPU_BATCH_BYTES
    # Of each query and key two scores; of each key itself and its value, perhaps also in fp32.
    itemsize, kv_block_size = operands.dtype.itemsize, operands.kv_block_size
    score_bytes = 2 * operands.heads * itemsize
    key_bytes = 2 * operands.kv_heads * operands.head_dim * (itemsize + (8 if operands.kv_format.bits else 0))
    most_keys = max(kv_block_size, _MOST_KEYS // kv_block_size * kv_block_size)
    most_tokens = min(_MOST_TOKENS, most_keys, max(1, most_bytes // (2 * score_bytes * most_keys)))
    items, rounds, table = _cut_items(plan, kv_block_size, most_tokens, most_keys)
    members = list(_alike(items, rounds, kv_block_size, most_bytes, score_bytes, key_bytes))
    arrays = [_padded(items[some], table, kv_block_size) for some in members]
    return TorchAttentionPlan(
        tuple(
            ItemBatch(**copies, is_first=bool(rounds[some[0]] == 0))
            for some, copies in zip(members, _uploaded(arrays, device), strict=True)
        ),
        torch.arange(most_keys + kv_block_size, device=device),
        bool(rounds.any()),
    )


def _cut_items(
    plan: AttentionPlan, kv_block_size: int, most_tokens: int, most_keys: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The items of a plan, cut.

    Returns:
        Items [items, COLUMNS]; the round of each one, in which no token has two items; the block table.
    """
    spans, table = item_spans(plan, kv_block_size)
    spans[:, PARTIAL] = np.arange(len(spans)) >= len(spans) - len(plan.shared)  # 1: a shared prefix
    items, parts = keys_cut(tokens_cut(spans, most_tokens), most_keys)
    shared = items[:, PARTIAL] == 1
    rounds = np.where(shared, parts + 1 + parts[~shared].max(initial=0), parts)
    return items, rounds, table


def _alike(
    items: np.ndarray, rounds: np.ndarray, kv_block_size: int, most_bytes: int, score_bytes: int, key_bytes: int
) -> Iterator[np.ndarray]:
    """Yield the numbers of the items of each batch: of one round, and of about the same numbers of queries and keys."""
    num_tokens = items[:, NUM_TOKENS]
    num_blocks = -(-items[:, LAST_KEY] // kv_block_size) - items[:, FIRST_KEY] // kv_block_size
    order = np.lexsort((num_blocks, num_tokens, rounds))
    columns = (order.tolist(), *(column[order].tolist() for column in (rounds, num_tokens, num_blocks)))
    members: list[int] = []
    most_queries = most_blocks = current = total = 0
    for item, turn, queries, blocks in zip(*columns, strict=True):
        widest, longest, size = max(most_queries, queries), max(most_blocks, blocks), len(members) + 1
        made = size * longest * kv_block_size * (widest * score_bytes + key_bytes)
        padded = size * widest * longest > _PADDED * (total + queries * blocks) + _PADDED_BLOCKS
        if members and (turn != current or made > most_bytes or padded):
            yield np.array(members)
            members, total, widest, longest = [], 0, queries, blocks
        members.append(item)
        most_queries, most_blocks, current, total = widest, longest, turn, total + queries * blocks
    if members:
        yield np.array(members)


def _padded(items: np.ndarray, table: np.ndarray, kv_block_size: int) -> dict[str, np.ndarray | None]:
    """The arrays of an `ItemBatch` by name. Padding repeats an item's last token and its last block."""
    first_block, num_tokens = items[:, FIRST_KEY] // kv_block_size, items[:, NUM_TOKENS]
    num_blocks = -(-items[:, LAST_KEY] // kv_block_size) - first_block
    query = np.minimum(np.arange(num_tokens.max()), num_tokens[:, None] - 1)
    block = np.minimum(np.arange(num_blocks.max()), num_blocks[:, None] - 1)
    tokens = (items[:, FIRST_TOKEN, None] + query).reshape(-1)
    blocks = table[items[:, TABLE, None] + first_block[:, None] + block].astype(np.int64)
    first, last, causal = (items[:, [column]] for column in (FIRST_KEY, LAST_KEY, CAUSAL))
    start = first_block[:, None] * kv_block_size
    lowest = np.maximum(first, causal + query - items[:, [WINDOW]] + 1) - start
    highest = np.minimum(last - 1, causal + query) - start
    is_kept = (np.arange(query.shape[1]) < num_tokens[:, None]) & (lowest <= highest)
    rows = None if is_kept.all() else np.flatnonzero(is_kept)
    sees_all = (lowest == 0).all() and (highest == blocks.shape[1] * kv_block_size - 1).all()
    return {
        "tokens": tokens,
        "blocks": blocks,
        "lowest": None if sees_all else lowest,
        "highest": None if sees_all else highest,
        "rows": rows,
        "targets": tokens if rows is None else tokens[rows],
    }


def _uploaded(batches: Sequence[dict[str, np.ndarray | None]], device: torch.device) -> list[dict[str, Tensor | None]]:
    """Arrays of int64 by name on a device, by one copy."""
    arrays = [array for batch in batches for array in batch.values() if array is not None]
    if not arrays:
        return []
    whole = upload(np.concatenate([array.reshape(-1) for array in arrays]), device)
    parts = iter(whole.split([array.size for array in arrays]))
    return [
        {name: None if array is None else next(parts).view(array.shape) for name, array in batch.items()}
        for batch in batches
    ]


def paged_attention(
    q: Tensor,
    kv: Tensor,
    plan: TorchAttentionPlan,
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
    out = torch.empty_like(q) if out is None else out
    # Log-sum-exp of each token and head, needed only where results are merged, or a sink joins them.
    lse = torch.empty(q.shape[:2], device=q.device) if plan.merges or sinks is not None else None
    for batch in plan.batches:
        result, part = _attend(q, kv, plan.keys, batch, bits, softcap, lse is not None)
        if batch.rows is not None:
            result = result.index_select(0, batch.rows)
            part = None if part is None else part.index_select(0, batch.rows)
        if not batch.is_first:
            assert lse is not None and part is not None
            result, part = _merged(out, lse, batch.targets, result, part)
        out.index_copy_(0, batch.targets, result)
        if lse is not None and part is not None:
            lse.index_copy_(0, batch.targets, part)
        note(_BATCH_OPERATIONS)
    if sinks is not None and lse is not None:
        out.copy_(out.float() * torch.sigmoid(lse - sinks)[..., None])
    return out


def _attend(
    q: Tensor, kv: Tensor, keys: Tensor, batch: ItemBatch, bits: int, softcap: float, want_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """The results of a batch's queries, [items * queries, heads, head_dim], and their log-sum-exp if `want_lse`."""
    heads, head_dim, kv_heads = q.shape[1], q.shape[2], kv.shape[2]
    items, group = len(batch.blocks), heads // kv_heads
    queries = len(batch.tokens) // items
    of_kv_heads = q.index_select(0, batch.tokens).view(items, queries, kv_heads, group, head_dim)
    rows = of_kv_heads.permute(0, 2, 3, 1, 4).reshape(items * kv_heads, group * queries, head_dim)
    k, v = _gather(kv, batch.blocks, q, bits)
    scores = torch.bmm(rows, k.transpose(1, 2))
    if softcap:
        scores.div_(softcap).tanh_().mul_(softcap)
    if batch.lowest is not None and batch.highest is not None:
        here = keys[: scores.shape[2]]
        hidden = (here < batch.lowest[..., None]) | (here > batch.highest[..., None])  # [items, queries, keys]
        scores.view(items, -1, queries, scores.shape[2]).masked_fill_(hidden[:, None], -torch.inf)
        # What lies beyond a sequence's last key need not be a number.
        v.view(items, kv_heads, -1, head_dim).masked_fill_(hidden.all(1)[:, None, :, None], 0)
    weights = torch.softmax(scores, -1)
    result = torch.bmm(weights, v).view(items, kv_heads, group, queries, head_dim)
    result = result.permute(0, 3, 1, 2, 4).reshape(items * queries, heads, head_dim)
    if not want_lse:
        return result, None
    # The largest softmax weight is exp(its score - lse): two maxima cost far less than torch.logsumexp.
    lse = scores.amax(-1).float() - weights.amax(-1).float().log()
    return result, lse.view(items, kv_heads, group, queries).permute(0, 3, 1, 2).reshape(items * queries, heads)


def _gather(kv: Tensor, blocks: Tensor, q: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Keys and values of each item's blocks, each [items * kv_heads, keys, head_dim] in q's dtype.

    A page, one head's part of a block, is gathered as a whole.
    """
    num_blocks, _, kv_heads, kv_block_size, width = kv.shape
    flat = kv.view(num_blocks * 2 * kv_heads, kv_block_size * width)
    head = torch.arange(kv_heads, device=blocks.device)[:, None]
    pages = (blocks[:, None, :] * (2 * kv_heads) + head).view(-1)
    gathered = (
        flat.index_select(0, which).view(-1, blocks.shape[1] * kv_block_size, width)
        for which in (pages, pages + kv_heads)
    )
    if bits:
        gathered = (quant.dequantize(packed, q.shape[-1], dtype=q.dtype, bits=bits) for packed in gathered)
    k, v = gathered
    return k, v


def _merged(out: Tensor, lse: Tensor, targets: Tensor, result: Tensor, part: Tensor) -> tuple[Tensor, Tensor]:
    """Results of some tokens merged with what `out` has of them, and the log-sum-exp of both."""
    before = lse.index_select(0, targets)
    # The weights of two softmaxes are in proportion to exp(lse), exact up to rounding.
    weight = torch.sigmoid(part - before)[..., None]
    merged = torch.lerp(out.index_select(0, targets).float(), result.float(), weight).to(out.dtype)
    return merged, torch.logaddexp(before, part)
