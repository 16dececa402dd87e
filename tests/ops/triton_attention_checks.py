"""Triton's attention against float64, as triton_checks.py does for other kernels."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from attention_cases import attended, laid_out, paged
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import MORE, random
from page_cases import check_chosen_pages, page_cases
from thorough import quick_or
from triton_device import DEVICE

from batchgen.core.dtypes import KV_CODE_BITS, KVFormat
from batchgen.ops import dispatch as ops
from batchgen.ops import quant
from batchgen.ops import triton as triton_kernels
from batchgen.ops.attention_operands import AttentionOperands
from batchgen.ops.attention_plan import (
    AttentionPlan,
    DecodeGroup,
    SequenceItems,
    SequenceSlice,
    SharedGroup,
    SharedItem,
    SweepTables,
    plan_attention,
)
from batchgen.ops.triton import attention
from batchgen.ops.triton import launch as launching
from batchgen.ops.triton import plan as plans
from batchgen.planner.sizes import DEVICE_WORKSPACE_BYTES

LONG, LONG_HEADS = quick_or((1500, (4, 1)), (3000, (8, 2))) if DEVICE.type == "cpu" else (3000, (8, 2))

# What kernels are compiled for. On a card that takes seconds for each: a few, and the same ones every time.
BLOCK_SIZES = [16, 16, 8, 32] if DEVICE.type == "cpu" else [16]
KV_HEADS_AND_GROUPS = [(1, 1), (3, 1), (2, 2), (1, 3), (2, 4), (1, 7), (1, 8), (1, 16), (1, 20)]
HEAD_DIMS = [8, 32, 40, 64, 80, 96, 128, 256, 512, 34]
if DEVICE.type != "cpu":
    KV_HEADS_AND_GROUPS, HEAD_DIMS = [(2, 1), (2, 4), (1, 7)], [64, 80, 128]


FORMATS = {  # (queries, KV): the largest error
    ("float32", "float32"): 2e-5,
    ("bfloat16", "bfloat16"): 0.015,
    ("float16", "float16"): 2e-3,
    ("float32", "int4"): 5e-5,
    ("bfloat16", "int4"): 0.03,
    ("float32", "int5"): 5e-5,
    ("bfloat16", "int5"): 0.03,
    ("float32", "int8"): 5e-5,
    ("bfloat16", "int8"): 0.03,
}


@st.composite
def sweeps(draw):
    """Sequences (queries, cached tokens, shared with the common prefix?), the prefix's blocks, and shapes."""
    kv_block_size = draw(st.sampled_from(BLOCK_SIZES))
    prefix_blocks = draw(st.sampled_from([0, 0, 64 // kv_block_size, 64 // kv_block_size + 1]))
    sequences = draw(
        st.lists(
            st.tuples(
                st.sampled_from([1, 1, 1, 1, 2, 7, 24]),
                st.one_of(st.sampled_from([0, 15, 16, 17, 63, 64]), st.integers(0, 200)),
                st.booleans() if prefix_blocks else st.just(False),
            ),
            min_size=1,
            max_size=6,
        )
    )
    kv_heads, group = draw(st.sampled_from(KV_HEADS_AND_GROUPS))
    return (
        prefix_blocks,
        sequences,
        draw(st.sampled_from([None, None, None, 1, 20, 100])),
        (kv_heads * group, kv_heads),
        draw(st.sampled_from(HEAD_DIMS)),
        kv_block_size,
        draw(st.sampled_from([1, 20, 132])),
        draw(st.integers(0, 2**20)),
    )


def prepared(  # what a plan is cut for, one by one
    plan, heads, kv_heads, head_dim, kv_block_size, dtype, kv_format="float32", num_sms=132, capacity=None
):
    kv_format = KVFormat.of(kv_format)
    operands = AttentionOperands(heads, kv_heads, head_dim, kv_block_size, dtype, KVFormat.of(kv_format))
    return plans.cut(plan, replace(attention.geometry(operands, DEVICE), num_sms=num_sms)).prepare(DEVICE, capacity)


def attend(q, kv, plan, bits=0, softcap=0.0, sinks=None):
    """On the device, and what was there before is no number."""
    out = torch.full(q.shape, float("nan"), dtype=q.dtype, device=DEVICE)
    for launch in attention.launches(
        q.to(DEVICE), kv.to(DEVICE), plan, out, bits, softcap, None if sinks is None else sinks.to(DEVICE)
    ):
        for name in ("partial", "stats"):
            if launch.kernel is attention._attend and name in launch.args:
                assert launch.args[name].numel() == 0 or len(plan.merge_tokens)
        launch()
    return out.cpu()


def check_attention(case, dtype, kv_format, tolerance, softcap=0.0):
    prefix_blocks, sequences, window, (heads, kv_heads), head_dim, kv_block_size, num_sms, seed = case
    slices, groups, num_blocks = laid_out(prefix_blocks, sequences, kv_block_size, seed)
    plan = plan_attention(
        SweepTables.of(slices), groups, kv_block_size=kv_block_size, key_bytes=kv_heads * head_dim * 2, window=window
    )
    q = random(seed, sum(s.num_queries for s in slices), heads, head_dim, dtype=dtype, scale=1.5 * head_dim**-0.5)
    stored, meant = paged(random(seed + 1, num_blocks, 2, kv_heads, kv_block_size, head_dim), kv_format)
    nothing = 255 if stored.dtype == torch.uint8 else float("nan")
    spare = torch.ones(num_blocks, dtype=torch.bool)
    for s in slices:
        spare[torch.from_numpy(s.blocks.astype(np.int64))] = False
        tail = s.num_keys % kv_block_size
        if tail:
            stored[int(s.blocks[(s.num_keys - 1) // kv_block_size]), :, :, tail:] = nothing
    stored[spare] = nothing
    made = prepared(plan, heads, kv_heads, head_dim, kv_block_size, dtype, kv_format, num_sms)
    sinks = random(seed + 2, heads, scale=3) if seed % 2 else None
    got = attend(q, stored, made, KVFormat.of(kv_format).bits, softcap, sinks)
    assert torch.isfinite(got).all()
    expected = attended(q, meant.nan_to_num(), slices, window, softcap, sinks)
    torch.testing.assert_close(got.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("formats", FORMATS, ids=" over ".join)
def test_attention(formats):
    dtype, kv_format = formats

    @settings(max_examples=int((18 if dtype == "float32" else 10) * MORE), deadline=None)
    @given(sweeps())
    def check(case):
        check_attention(case, getattr(torch, dtype), kv_format, FORMATS[formats])

    check()


@pytest.mark.parametrize("kv_format", ["float32", "bfloat16", *KV_CODE_BITS])
def test_a_long_context_is_cut_into_parts_and_put_together(kv_format):
    dtype = torch.float32 if kv_format == "float32" else torch.bfloat16
    case = (0, [(1, LONG, False), (1, 1024, False), (1, 1023, False), (1, 0, False)], None, LONG_HEADS, 64, 16, 132, 3)
    check_attention(case, dtype, kv_format, 2e-5 if dtype == torch.float32 else 0.01)


@pytest.mark.skipif(DEVICE.type != "cpu", reason="whole engines do it on a card")
def test_attention_to_chosen_pages(monkeypatch):
    """Pages that torch has chosen are in the places of a table that was cut before."""

    def prepare(plan, of, device, isa, every_kernel):
        return prepared(plan, of.heads, of.kv_heads, of.head_dim, of.kv_block_size, of.dtype, of.kv_format.name)

    def attend_to_chosen(q, kv, plan, out=None, bits=0):
        return attend(q, kv, plan, bits).flatten(1)

    monkeypatch.setattr(ops, "prepare_attention", prepare)
    monkeypatch.setattr(ops, "paged_attention", attend_to_chosen)

    @settings(max_examples=int(12 * MORE), deadline=None)
    @given(page_cases())
    def check(case):
        check_chosen_pages(case, by_torch=True)

    check()


@pytest.mark.parametrize("kv_format", ["float32", *KV_CODE_BITS])
def test_scores_are_capped(kv_format):
    case = (4, [(1, 100, True), (1, 64, True), (24, 64, False), (3, 0, False)], 100, (8, 2), 64, 16, 132, 3)
    check_attention(case, torch.float32, kv_format, 5e-5, softcap=1.5)


@pytest.mark.parametrize("head_dim", [256, 512])
@pytest.mark.parametrize("formats", [("bfloat16", "bfloat16"), ("float32", "int4"), ("bfloat16", "int8")], ids=str)
def test_wide_heads_under_a_window_and_in_every_kind_of_item(head_dim, formats):
    """As in Gemma 4: 256 values to a head in layers with a window, 512 in the others."""
    case = (4, [(1, 60, True), (1, 33, True), (40, 20, False), (3, 0, False)], None, (4, 2), head_dim, 16, 132, 3)
    window = 50 if head_dim == 256 else None
    case = (*case[:2], window, *case[3:]) if window is None else (0, case[1][2:], window, *case[3:])
    check_attention(case, getattr(torch, formats[0]), formats[1], FORMATS[formats])


@pytest.mark.parametrize("num_queries", [1, 24])
def test_all_kernels_are_launched_for_a_plan_that_needs_one(num_queries):
    slices, groups, num_blocks = laid_out(0, [(num_queries, 40, False)], 16, 0)
    plan = plan_attention(SweepTables.of(slices), groups, kv_block_size=16, key_bytes=None)
    operands = AttentionOperands(16, 2, 64, 16, torch.float32, KVFormat.of("float32"))
    q = random(0, num_queries, 16, 64, dtype=torch.float32)
    kv, _ = paged(random(1, num_blocks, 2, 2, 16, 64), "float32")
    needed, whole = (
        attention.prepare_attention(plan, operands, DEVICE, every_kernel) for every_kernel in (False, True)
    )
    launched = [launch.kernel for launch in attention.launches(q.to(DEVICE), kv.to(DEVICE), whole, q.to(DEVICE))]
    assert launched == [attention._attend, attention._attend, attention._merge]
    assert len(attention.launches(q.to(DEVICE), kv.to(DEVICE), needed, q.to(DEVICE))) == 1
    assert torch.equal(attend(q, kv, whole), attend(q, kv, needed))


def test_prompts_over_several_tiles():
    for window in (None, 70):
        case = (0, [(130, 75, False), (70, 0, False)], window, (4, 2), 32, 16, 132, 3)
        check_attention(case, torch.float32, "float32", 2e-5)


@settings(max_examples=int(200 * MORE), deadline=None)
@given(sweeps(), st.sampled_from([(16, 32), (32, 128)]))
def test_items_hold_every_key_that_a_token_sees_once(case, rows):
    prefix_blocks, sequences, window, (heads, kv_heads), head_dim, kv_block_size, num_sms, seed = case
    slices, groups, _ = laid_out(prefix_blocks, sequences, kv_block_size, seed)
    plan = plan_attention(SweepTables.of(slices), groups, kv_block_size=kv_block_size, key_bytes=2, window=window)
    few, many = (attention.Tile(max(n, heads // kv_heads), 32, 4, 2) for n in rows)
    shape = plans.Geometry(heads, kv_heads, head_dim, kv_block_size, few, many, num_sms)
    made = plans.cut(plan, shape).prepare(torch.device("cpu"))
    table = made.table.numpy()
    seen = {}
    partial_rows = {}
    for item, tile in [(i, few) for i in made.few.tolist()] + [(i, many) for i in made.many.tolist()]:
        token, count, first, last, causal, limit, start, partial = item
        assert count * shape.group <= tile.rows
        for i in range(count):
            for key in range(first, last):
                if causal + i - limit < key <= causal + i:
                    place = int(table[start + key // kv_block_size]) * kv_block_size + key % kv_block_size
                    seen.setdefault(token + i, []).append(place)
            seen.setdefault(token + i, [])
            partial_rows.setdefault(token + i, []).append(partial if partial < 0 else partial + i)
    token = 0
    for s in slices:
        for position in range(s.num_cached, s.num_keys):
            keys = np.arange(max(0, position - (window or 10**9) + 1), position + 1)
            places = s.blocks[keys // kv_block_size] * kv_block_size + keys % kv_block_size
            assert sorted(seen.pop(token)) == sorted(places.tolist())
            token += 1
    assert not seen
    merged = dict(zip(made.merge_tokens.tolist(), made.merge_starts.tolist(), strict=False))
    stops = made.merge_starts.tolist()[1:]
    for (token, start), stop in zip(merged.items(), stops, strict=True):
        assert sorted(made.merge_rows[start:stop].tolist()) == sorted(partial_rows.pop(token))
    assert all(rows == [-1] for rows in partial_rows.values())


SHAPES_OF_HEADS = [(32, 8, 128), (64, 8, 64), (56, 56, 128), (16, 8, 256), (32, 1, 128), (8, 1, 512), (40, 10, 128)]


@settings(max_examples=int(200 * MORE), deadline=None)
@given(
    st.sampled_from(SHAPES_OF_HEADS),
    st.lists(st.tuples(st.sampled_from([1, 1, 2, 16, 200, 2000]), st.integers(0, 40_000)), min_size=1, max_size=60),
    st.booleans(),
    st.sampled_from([132, 148]),
)
def test_partial_results_fit_what_is_planned_for_them(shape, sequences, shared, num_sms):
    heads, kv_heads, head_dim = shape
    tokens = sum(queries for queries, _ in sequences)
    slices = [
        SequenceSlice(queries, cached + 1024, np.zeros((queries + cached + 1024) // 16 + 1, np.int32))
        for queries, cached in sorted(sequences)
    ]
    groups = [SharedGroup(tuple(range(len(slices))), 64)] if shared else []
    plan = plan_attention(SweepTables.of(slices), groups, kv_block_size=16, key_bytes=2 * kv_heads * head_dim)
    operands = AttentionOperands(heads, kv_heads, head_dim, 16, torch.bfloat16, KVFormat.of("bfloat16"))
    cut_for = attention.geometry(operands, ops.CPU)
    rows = plans.cut(plan, replace(cut_for, num_sms=num_sms)).capacity.partial_rows
    planned = 0.75 * DEVICE_WORKSPACE_BYTES + (tokens * 2 * 4 * heads * (head_dim + 2) if shared else 0)
    assert rows * heads * (head_dim + 2) * 4 <= planned


def test_a_plan_is_written_over_another_in_the_same_memory():
    """As a captured CUDA graph is replayed with it."""
    kv = random(1, 64, 2, 2, 16, 32)
    shape = (8, 2, 32, 16, torch.float32, torch.float32)

    def sweep(lengths, first):
        ends = np.cumsum([-(-n // 16) for n in lengths])
        slices = [
            SequenceSlice(1, n - 1, (np.arange(end - -(-n // 16), end) + first).astype(np.int32) % 64)
            for n, end in zip(lengths, ends, strict=True)
        ]
        return slices, plan_attention(SweepTables.of(slices), [], kv_block_size=16, key_bytes=256)

    def write_over(plan):
        content = np.zeros(made.capacity.words, np.int32)
        plans.cut(plan, made.geometry).write(content, made.capacity)
        made.buffer.copy_(torch.from_numpy(content))

    made = prepared(sweep([300, 20, 7], 0)[1], *shape, capacity=plans.Capacity(8, 2, 40, 4, 10))
    address = made.buffer.data_ptr()
    for lengths, first in (([300, 20, 7], 0), ([1, 290], 5), ([17, 16, 15], 30), ([16], 3)):
        slices, plan = sweep(lengths, first)
        write_over(plan)
        q = random(first, len(lengths), 8, 32)
        got = attend(torch.cat((q, q.new_zeros(3 - len(q), 8, 32))), kv, made)[: len(q)]
        torch.testing.assert_close(got.double(), attended(q, kv, slices, None), atol=2e-5, rtol=2e-5)
        assert made.buffer.data_ptr() == address
    with pytest.raises(ValueError, match="does not fit"):
        write_over(sweep([600, 300], 0)[1])


def test_no_key_in_sight_gives_zeros():
    plan = AttentionPlan((), (DecodeGroup(0, 1, np.zeros((1, 1), np.int32), np.array([3]), np.array([3])),))
    q = random(1, 1, 1, 32)
    got = attend(q, random(0, 1, 2, 1, 16, 32), prepared(plan, 1, 1, 32, 16, q.dtype))
    assert torch.equal(got, torch.zeros_like(got))


def test_very_large_scores():
    """The softmax carries its maximum along: one key takes all."""
    kv = random(0, 24, 2, 1, 16, 64)
    q = kv[4, 0, 0, 7].reshape(1, 1, 64) * 1000
    plan = plan_attention(
        SweepTables.of([SequenceSlice(1, 383, np.arange(24, dtype=np.int32))]), [], kv_block_size=16, key_bytes=256
    )
    got = attend(q, kv, prepared(plan, 1, 1, 64, 16, q.dtype))
    torch.testing.assert_close(got[0, 0], kv[4, 1, 0, 7])


def test_queries_may_be_a_view():
    kv = random(0, 2, 2, 2, 16, 32)
    whole = random(1, 20, 6, 32).to(DEVICE)
    plan = AttentionPlan((), sequences=SequenceItems.of_one(0, 20, np.arange(2, dtype=np.int32), 4))
    made = prepared(plan, 4, 2, 32, 16, torch.float32, torch.float32)
    assert torch.equal(attend(whole[:, :4], kv, made), attend(whole[:, :4].clone(), kv, made))


def test_a_shared_prefix_with_many_rows():
    blocks = np.arange(6, dtype=np.int32)
    tail = np.arange(6, 9, dtype=np.int32)[:, None]
    plan = AttentionPlan(
        (SharedItem(0, 3, blocks),),
        (DecodeGroup(0, 3, tail, np.array([1, 16, 5]), np.zeros(3, np.int64)),),
    )
    kv, q = random(0, 9, 2, 1, 16, 64), random(1, 3, 16, 64, scale=0.2)
    got = attend(q, kv, prepared(plan, 16, 1, 64, 16, q.dtype))
    slices = [SequenceSlice(1, 96 + n - 1, np.append(blocks, t)) for n, t in zip((1, 16, 5), tail[:, 0], strict=True)]
    torch.testing.assert_close(got.double(), attended(q, kv, slices, None), atol=2e-5, rtol=2e-5)


def test_the_same_twice_is_the_same_bit_by_bit():
    slices, groups, num_blocks = laid_out(0, [(1, 1500, False), (1, 70, False), (24, 300, False)], 16, 5)
    plan = plan_attention(SweepTables.of(slices), groups, kv_block_size=16, key_bytes=256)
    kv, q = random(1, num_blocks, 2, 2, 16, 64, dtype=torch.bfloat16), random(2, 26, 4, 64, dtype=torch.bfloat16)
    first, second = (attend(q, kv, prepared(plan, 4, 2, 64, 16, q.dtype)) for _ in range(2))
    assert torch.equal(first, second)


def test_kv_beyond_the_reach_of_32_bits():
    """Memory that is not touched takes none.

    A pool of which only the last blocks are used gives what a small one gives.
    """
    heads, kv_heads, head_dim, tokens = 4, 2, 64, 20
    block = (2, kv_heads, 16, quant.row_bytes(head_dim, KV_CODE_BITS["int5"]))
    qkv = random(0, tokens, (heads + 2 * kv_heads) * head_dim).to(DEVICE)
    found = []
    for blocks in (3, 2**31 // math.prod(block) + 100):
        kv = torch.empty(blocks, *block, dtype=torch.uint8, device=DEVICE)
        table = np.array([blocks - 1, blocks - 3], dtype=np.int32)
        slots = torch.from_numpy(table.astype(np.int64).repeat(16)[:tokens] * 16 + np.arange(tokens) % 16).to(DEVICE)
        options = {"scale": 0.1, "kv": kv, "slots": slots, "bits": 5, "rotation": ops.rotation(head_dim, DEVICE)}
        q = triton_kernels.rotary_store(qkv, heads, kv_heads, **options)[0]
        plan = plan_attention(
            SweepTables.of([SequenceSlice(tokens, 0, table)]), [], kv_block_size=16, key_bytes=head_dim
        )
        found.append(attend(q, kv, prepared(plan, heads, kv_heads, head_dim, 16, q.dtype, "int5"), 5))
    assert torch.equal(*found) and torch.isfinite(found[0]).all()


def test_no_query_at_all():
    x, made = torch.empty(0, 2, 16, device=DEVICE), prepared(AttentionPlan(()), 2, 1, 16, 16, torch.float32)
    assert triton_kernels.paged_attention(x, x.new_zeros(1, 2, 1, 16, 16), made).shape == (0, 2, 16)


@pytest.mark.parametrize("shared_memory", [64, 99, 163, 227])
@pytest.mark.parametrize(
    ("dtype", "bits"),
    [(torch.float16, 0), (torch.float32, 0), *((torch.float16, bits) for bits in KV_CODE_BITS.values())],
    ids=str,
)
def test_tiles_fit_the_shared_memory(shared_memory, dtype, bits):
    for group in (1, 4, 8, 16, 64):
        for head_dim in (34, 64, 80, 128, 256, 512):
            if not launching.fits_attention(group, head_dim, shared_memory << 10):
                assert head_dim >= 256 and (shared_memory == 64 or group == 64)
                continue
            for tile in launching.attention_tiles(group, head_dim, dtype, bits, shared_memory << 10):
                dim = launching.power_of_two(head_dim, 16)
                keys_and_values = max(1, tile.stages - 2) * 2 * tile.keys * dim * dtype.itemsize
                weights_and_queries = tile.rows * (dim + tile.keys) * dtype.itemsize
                assert weights_and_queries + keys_and_values <= shared_memory << 10, (group, head_dim, tile)
                assert tile.keys >= 16 and tile.rows >= max(16, group) and tile.stages >= 2
