"""Paged attention in torch (`torch_attention`) against float64, for random mixes of prefill, decode, prefixes and
windows; what both it and the kernels (test_cpp.py) rest on."""

import numpy as np
import pytest
import torch
from attention_cases import attended, laid_out
from hypothesis import given, settings
from hypothesis import strategies as st
from thorough import some_draws
from torch.utils._python_dispatch import TorchDispatchMode

from batchgen.core.dtypes import KVFormat
from batchgen.ops import cpp as kernels
from batchgen.ops import dispatch as ops
from batchgen.ops import torch_attention
from batchgen.ops.attention_operands import AttentionOperands
from batchgen.ops.attention_plan import (
    SequenceSlice,
    SweepTables,
    plan_attention,
)
from batchgen.ops.quant import dequantize, quantize

BLOCK = 16


@st.composite
def sweeps(draw):
    """Sequences (queries, cached tokens, shared with the common prefix?) and the prefix's length in blocks."""
    prefix_blocks = draw(st.sampled_from([0, 4, 9]))
    sequences = draw(
        st.lists(
            st.tuples(
                st.sampled_from([1, 1, 1, 2, 7, 16, 40, 130]),
                st.integers(0, 150),
                st.booleans() if prefix_blocks else st.just(False),
            ),
            min_size=1,
            max_size=12,
        )
    )
    window = draw(st.sampled_from([None, None, 5, 33]))
    heads = draw(st.sampled_from([(1, 1), (4, 4), (6, 2), (9, 3), (16, 1)]))
    return prefix_blocks, sequences, window, heads, draw(st.integers(0, 2**20))


def prepare(plan, heads, kv_heads, head_dim, dtype=torch.float32, kv_format="float32"):
    operands = AttentionOperands(heads, kv_heads, head_dim, BLOCK, dtype, KVFormat.of(kv_format))
    return torch_attention.prepare_attention(plan, operands, ops.CPU)


def run(case, dtype, head_dim=32):
    prefix_blocks, sequences, window, (heads, kv_heads), seed = case
    slices, groups, num_blocks = laid_out(prefix_blocks, sequences, BLOCK, seed)
    plan = plan_attention(
        SweepTables.of(slices), groups, kv_block_size=BLOCK, key_bytes=kv_heads * head_dim * 4, window=window
    )
    torch.manual_seed(seed)
    tokens = sum(s.num_queries for s in slices)
    q = (torch.randn(tokens, heads, head_dim) * 0.4).to(dtype)
    kv = torch.randn(num_blocks, 2, kv_heads, BLOCK, head_dim).to(dtype)
    softcap = 2.0 if seed % 3 == 1 else 0.0
    prepared = prepare(plan, heads, kv_heads, head_dim, dtype)
    sinks = torch.randn(heads) * 3 if seed % 2 else None
    got = torch_attention.paged_attention(q, kv, prepared, softcap=softcap, sinks=sinks)
    return got.double(), attended(q, kv.float(), slices, window, softcap, sinks), plan


@settings(max_examples=some_draws(120), deadline=None)
@given(sweeps())
def test_fp32_matches_float64(case):
    got, expected, _ = run(case, torch.float32)
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-4)


@settings(max_examples=some_draws(30), deadline=None)
@given(sweeps(), st.sampled_from([32, 48, 64]), st.sampled_from([1, 20]), st.sampled_from([20 << 10, 8 << 20]))
def test_items_that_are_cut_match_too(case, most_keys, most_tokens, batch_bytes):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"_MOST_KEYS": most_keys, "_MOST_TOKENS": most_tokens}.items():
            patch.setattr(torch_attention, name, value)
        patch.setattr(torch_attention, "_CPU_BATCH_BYTES", batch_bytes)
        got, expected, _ = run(case, torch.float32)
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-4)


@settings(max_examples=some_draws(30), deadline=None)
@given(sweeps())
def test_bf16_within_its_precision(case):
    got, expected, _ = run(case, torch.bfloat16)
    # Scores of magnitude ~8 carry a relative error of 2**-9 into the exponent; outputs are means of N(0, 1).
    torch.testing.assert_close(got, expected, atol=0.08, rtol=0.05)


class CountedOperations(TorchDispatchMode):
    """Counts the operations of torch that are not mere views."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += not func.is_view
        return func(*args, **kwargs or {})


def operations(num_sequences, queries):
    """Number of torch's operations for the attention of so many sequences with about as many tokens each."""
    draw = np.random.default_rng(0)
    lengths = sorted(draw.integers(max(1, queries * 9 // 10), queries, num_sequences, endpoint=True).tolist())
    blocks = -(-(queries + 100) // BLOCK)
    slices = [
        SequenceSlice(n, 100 - n % 3, np.arange(i * blocks, (i + 1) * blocks, dtype=np.int32))
        for i, n in enumerate(lengths)
    ]
    plan = plan_attention(SweepTables.of(slices), [], kv_block_size=BLOCK, key_bytes=8 * 4)
    q, kv = torch.randn(sum(lengths), 4, 8), torch.randn(blocks * num_sequences, 2, 2, BLOCK, 8)
    prepared = prepare(plan, 4, 2, 8)
    with CountedOperations() as counted:
        torch_attention.paged_attention(q, kv, prepared)
    return counted.count


@pytest.mark.parametrize("queries", [1, 40])
def test_many_sequences_take_no_more_operations_than_few(queries):
    assert 5 < operations(64, queries) <= 2 * operations(2, queries)


def test_what_lies_beyond_the_last_key_need_not_be_a_number():
    slices = [SequenceSlice(n, 20 - n, np.array([0, 1], np.int32) + 2 * n) for n in (1, 3, 17)]
    plan = plan_attention(SweepTables.of(slices), [], kv_block_size=BLOCK, key_bytes=8 * 4)
    q, kv = torch.randn(21, 2, 8), torch.randn(36, 2, 1, BLOCK, 8)
    meant = torch_attention.paged_attention(q, kv, prepare(plan, 2, 1, 8))
    for s in slices:
        kv[int(s.blocks[1]), :, :, 4:] = float("nan")
    assert torch.equal(torch_attention.paged_attention(q, kv, prepare(plan, 2, 1, 8)), meant)


def test_a_shared_prefix_is_attended_to_once():
    case = (9, [(1, 20, True)] * 5 + [(30, 0, True), (1, 50, False)], None, (6, 2), 1)
    got, expected, plan = run(case, torch.float32)
    assert [item.stop - item.start for item in plan.shared] == [5 + 30]
    assert all(group.blocks.shape[1] <= 4 for group in plan.decode)
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-4)


def test_sliding_window_reads_only_the_blocks_it_needs():
    _, _, plan = run((0, [(1, 1000, False)], 33, (2, 2), 0), torch.float32)
    assert plan.decode[0].blocks.shape[1] <= 4


@pytest.mark.parametrize("head_dim", [64, 80])
@pytest.mark.parametrize("name", ["int5", "int4"])
def test_rotated_keys_with_one_large_channel_keep_their_products(name, head_dim):
    """Large channels are what keys of real models have; they must not take the codes of all others."""
    draw = torch.Generator().manual_seed(7)
    tokens, heads = 64, 2
    q, k, v = (torch.randn(tokens, heads, head_dim, generator=draw) for _ in range(3))
    k[..., 3] += 40
    kv_format = KVFormat.of(name)
    kv = torch.zeros(4, 2, heads, BLOCK, kv_format.row_bytes(head_dim), dtype=torch.uint8)
    qkv = torch.cat((q, k, v), 1).flatten(1)
    scale = head_dim**-0.5
    rotated = ops.rotary_store(qkv, heads, kv, torch.arange(tokens), kv_format, scale=scale)
    slices = [SequenceSlice(1, tokens - 1, np.arange(4, dtype=np.int32))]
    plan = plan_attention(SweepTables.of(slices), [], kv_block_size=BLOCK, key_bytes=heads * head_dim * 4, window=None)
    operands = AttentionOperands(heads, heads, head_dim, BLOCK, torch.float32, kv_format)
    for prepared in (
        ops.prepare_attention(plan, operands),
        prepare(plan, heads, heads, head_dim, kv_format=name),
    ):
        out = ops.paged_attention(rotated[-1:], kv, prepared, bits=kv_format.bits).view(heads, head_dim)
        check_close_to_exact(out, q[-1] * scale, k, v, kv_format.bits)


def packed_and_back(x, bits):
    return dequantize(quantize(x, bits), x.shape[-1], bits=bits)


def check_close_to_exact(out, q, k, v, bits):
    def attended(keys):
        weights = torch.einsum("hd,thd->ht", q, keys).softmax(-1)
        return torch.einsum("ht,thd->hd", weights, packed_and_back(v, bits))

    exact = attended(k)
    error = (out - exact).square().mean().sqrt()
    assert 0 < error < 0.5 * (attended(packed_and_back(k, bits)) - exact).square().mean().sqrt()


@pytest.mark.parametrize("num_slots", [1, 37])
def test_write_kv_round_trip(num_slots):
    rng = np.random.default_rng(0)
    slots = rng.permutation(8 * BLOCK)[:num_slots]
    kv = torch.zeros(8, 2, 3, BLOCK, 4)
    k, v = torch.randn(num_slots, 3, 4), torch.randn(num_slots, 3, 4)
    ops.write_kv(kv, ops.kv_rows(slots, 3, BLOCK), k, v)
    for i, slot in enumerate(slots):
        assert torch.equal(kv[slot // BLOCK, 0, :, slot % BLOCK], k[i])
        assert torch.equal(kv[slot // BLOCK, 1, :, slot % BLOCK], v[i])
    assert int((kv != 0).any(-1).sum()) == 2 * num_slots * 3


@pytest.mark.parametrize("heads", [288, 300])
def test_any_number_of_heads_may_share_a_kv_head(heads):
    """Also more than the kernels can hold."""
    slices = [SequenceSlice(3, 20, np.arange(2, dtype=np.int32)), SequenceSlice(1, 9, np.arange(2, 3, dtype=np.int32))]
    plan = plan_attention(SweepTables.of(slices), [], kv_block_size=BLOCK, key_bytes=32 * 4)
    torch.manual_seed(0)
    q, kv = torch.randn(4, heads, 32) * 0.4, torch.randn(3, 2, 1, BLOCK, 32)
    operands = AttentionOperands(heads, 1, 32, BLOCK, torch.float32, KVFormat("float32"))
    prepared = ops.prepare_attention(plan, operands)
    assert isinstance(prepared, kernels.AttentionPlan) == (heads == 288)
    meant = torch_attention.paged_attention(q, kv, prepare(plan, heads, 1, 32))
    torch.testing.assert_close(ops.paged_attention(q, kv, prepared), meant.flatten(1), atol=1e-5, rtol=1e-5)
