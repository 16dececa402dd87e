"""Random sweeps in which decoding tokens choose pages, compared with a loop over pages in float64."""

import numpy as np
import pytest
import torch
from attention_cases import attended, laid_out, paged
from hypothesis import strategies as st

from batchgen.core.attention_budget import AttentionBudget
from batchgen.core.dtypes import KV_CODE_BITS, KVFormat
from batchgen.ops import chosen_attention, cpp
from batchgen.ops import dispatch as ops
from batchgen.ops.attention_operands import AttentionOperands
from batchgen.ops.attention_plan import SequenceSlice, SweepTables
from batchgen.ops.page_choice import PageTables, plan_chosen

TOLERANCES = {torch.float32: 5e-5, torch.bfloat16: 0.02}


@st.composite
def page_cases(draw):
    """Sequences, shapes, KV format, budget and seed."""
    prefix_blocks = draw(st.sampled_from([0, 5, 9]))
    sequences = draw(
        st.lists(
            st.tuples(
                st.sampled_from([1, 1, 1, 7]), st.integers(0, 700), st.booleans() if prefix_blocks else st.just(False)
            ),
            min_size=1,
            max_size=7,
        )
    )
    kv_heads, group = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 3, 4, 9]))
    return (
        prefix_blocks,
        sequences,
        (kv_heads * group, kv_heads),
        draw(st.sampled_from([16, 24, 64, 80, 128])),
        draw(st.sampled_from([8, 16])),
        draw(st.sampled_from(["float32", "bfloat16", *KV_CODE_BITS])),
        draw(st.sampled_from(["20%", "50%", "64", "100"])),
        draw(st.integers(0, 2**20)),
    )


def pages_by_hand(q, meant, sequence, budget, kv_block_size, kv_format):
    """The pages of a sequence that its last token attends to, by the rule, one page and head at a time in float64."""
    blocks = sequence.blocks[: -(-sequence.num_keys // kv_block_size)]
    wanted, candidates = budget.pages(len(blocks), kv_block_size), range(1, len(blocks) - 2)
    if wanted >= len(blocks):
        return list(range(len(blocks)))
    group = len(q) // meant.shape[2]
    best = dict.fromkeys(candidates, 0.0)
    for head, query in enumerate(q.double().numpy()):
        bounds = {}
        for page in candidates:
            keys = meant[blocks[page], 0, head // group]
            low, high = (
                x.to(getattr(torch, KVFormat.of(kv_format).summary_format)).double().numpy()
                for x in (keys.amin(0), keys.amax(0))
            )
            bounds[page] = np.maximum(query * low, query * high).sum()
        weights = {page: np.exp(bounds[page] - max(bounds.values())) for page in candidates}
        for page in candidates:
            best[page] += weights[page] / sum(weights.values())
    ranked = sorted(candidates, key=lambda page: -best[page])
    return sorted([0, *ranked[: wanted - 3], len(blocks) - 2, len(blocks) - 1])


def check_chosen_pages(case, *, by_torch):
    prefix_blocks, sequences, (heads, kv_heads), head_dim, kv_block_size, kv_format, text, seed = case
    slices, groups, num_blocks = laid_out(prefix_blocks, sequences, kv_block_size, seed)
    dtype = torch.bfloat16 if kv_format == "bfloat16" else torch.float32
    budget, tables = AttentionBudget.of(text), SweepTables.of(slices)
    decodes = tables.num_queries == 1
    generator = torch.Generator().manual_seed(seed)
    q = (torch.randn(int(tables.starts[-1]), heads, head_dim, generator=generator) * 1.5 * head_dim**-0.5).to(dtype)
    stored, meant = paged(torch.randn(num_blocks, 2, kv_heads, kv_block_size, head_dim, generator=generator), kv_format)
    stored_as, bits = KVFormat.of(kv_format), KV_CODE_BITS.get(kv_format, 0)
    summaries = torch.full(
        (num_blocks, kv_heads, 2, head_dim), torch.nan, dtype=getattr(torch, stored_as.summary_format)
    )
    # What is complete before the sweep was summarised then.
    old = [s.blocks[: s.num_cached // kv_block_size] for s in slices]
    blocks = torch.from_numpy(np.unique(np.concatenate(old)).astype(np.int64))
    chosen_attention.summarise(stored, blocks, blocks, summaries, bits=bits)
    plan = plan_chosen(
        tables, PageTables(budget, decodes, tables.blocks), groups, kv_block_size=kv_block_size, key_bytes=2 * head_dim
    )
    operands = AttentionOperands(heads, kv_heads, head_dim, kv_block_size, dtype, stored_as)
    with pytest.MonkeyPatch.context() as patch:
        if by_torch:
            patch.setattr(ops, "has_cpu_attention", lambda *_: False)
            patch.setattr(cpp, "supports_head_dim", lambda *_: False)
        prepared = chosen_attention.prepare_attention(plan, operands)
        got = chosen_attention.paged_attention(q, stored, prepared, summaries, bits=bits).view(q.shape)
    seen = []
    for i, s in enumerate(slices):
        if not decodes[i]:
            seen.append(s)
            continue
        pages = pages_by_hand(q[tables.starts[i]], meant, s, budget, kv_block_size, kv_format)
        keys = s.num_keys - (-(-s.num_keys // kv_block_size) - len(pages)) * kv_block_size
        seen.append(SequenceSlice(1, keys - 1, s.blocks[pages]))
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(got.double(), attended(q, meant, seen, None), atol=tolerance, rtol=tolerance)
