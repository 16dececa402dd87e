"""Sequences over paged KV, and attention over them in float64, for the kernels and their reference in torch."""

import numpy as np
import torch

from batchgen.core.dtypes import KV_CODE_BITS
from batchgen.ops import quant
from batchgen.ops.attention_plan import SequenceSlice, SharedGroup, SweepTables, find_shared_groups, order_sequences


def laid_out(prefix_blocks, sequences, kv_block_size, seed):
    """Sequences in packing order with random blocks; groups; blocks there are."""
    rng = np.random.default_rng(seed)
    total = prefix_blocks + sum(-(-(q + c) // kv_block_size) for q, c, _ in sequences)
    numbers = list(rng.permutation(total + 2))
    prefix = [numbers.pop() for _ in range(prefix_blocks)]
    slices, matched = [], []
    for queries, cached, shares in sequences:
        own = [numbers.pop() for _ in range(-(-(queries + cached) // kv_block_size))]
        table = np.array(prefix + own if shares else own, dtype=np.int32)
        slices.append(SequenceSlice(queries, cached + (prefix_blocks * kv_block_size if shares else 0), table))
        matched.append(prefix_blocks if shares else 0)
    tables = SweepTables.of(slices)
    groups = find_shared_groups(tables, np.array(matched), kv_block_size)
    order = order_sequences(tables.num_queries, tables.num_keys, groups).tolist()
    place = {i: p for p, i in enumerate(order)}
    groups = [SharedGroup(tuple(sorted(place[i] for i in g.members)), g.num_blocks) for g in groups]
    return [slices[i] for i in order], groups, total + 2


def attended(q, kv, slices, window, softcap=0.0, sinks=None, *, causal=True):
    """Plain attention in float64, one sequence at a time. kv: fp32 [blocks, 2, kv_heads, kv_block_size, head_dim]."""
    out, row = [], 0
    for s in slices:
        k, v = (
            part[torch.from_numpy(s.blocks.astype(np.int64))].transpose(1, 2).flatten(0, 1)[: s.num_keys].double()
            for part in kv.unbind(1)
        )
        queries = q[row : row + s.num_queries].double()
        row += s.num_queries
        group = q.shape[1] // k.shape[1]
        scores = torch.einsum("qhd,khd->hqk", queries, k.repeat_interleave(group, 1))
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        distance = torch.arange(s.num_cached, s.num_keys)[:, None] - torch.arange(s.num_keys)
        hidden = (distance < 0) & causal | (distance.abs() >= (window or 10**9))
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is None:
            weights = scores.softmax(-1)
        else:  # one more score, whose weight meets no value
            weights = torch.cat([scores, sinks.double()[:, None, None].expand(*scores.shape[:2], 1)], -1).softmax(-1)[
                ..., :-1
            ]
        out.append(torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(group, 1)))
    return torch.cat(out)


def paged(kv, kv_format):
    """KV as the kernels read it, and in fp32 what that stands for."""
    if bits := KV_CODE_BITS.get(kv_format):
        packed = quant.quantize(kv, bits)
        return packed, quant.dequantize(packed, kv.shape[-1], bits=bits)
    stored = kv.to(getattr(torch, kv_format))
    return stored, stored.float()
