"""Every Triton kernel against float64: under Triton's interpreter, where `test_triton.py` runs this file in processes
of their own, and on a card by `make gpu-check`."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from attention_cases import attended, laid_out, paged
from draw_cases import check_draws, drawn, draws
from gguf_blocks import random_rows
from hypothesis import example, given, settings
from hypothesis import strategies as st
from page_cases import check_chosen_pages, page_cases
from thorough import quick_or, some_of
from triton_device import DEVICE

from batchgen.core.dtypes import BLOCK_FORMATS, KV_CODE_BITS, KVFormat, code_bytes
from batchgen.models.experts import experts, split_experts
from batchgen.models.hf.config import config_of_hf
from batchgen.ops import cpp as kernels
from batchgen.ops import dispatch as ops
from batchgen.ops import int8, quant, reference, torch_attention
from batchgen.ops import triton as triton_kernels
from batchgen.ops.attention_operands import AttentionOperands
from batchgen.ops.attention_plan import (
    AttentionPlan,
    DecodeGroup,
    PrefillItem,
    SequenceSlice,
    SharedGroup,
    SharedItem,
    SweepTables,
    plan_attention,
)
from batchgen.ops.cpp import BlockWeight
from batchgen.ops.triton import attention, grouped, grouped_many, int8_rows, packed, product, rotary
from batchgen.ops.triton import launch as launching
from batchgen.ops.triton import plan as plans
from batchgen.ops.triton import rows as row_copies
from batchgen.ops.triton.blocks import BLOCK_CODINGS
from batchgen.planner.sizes import DEVICE_WORKSPACE_BYTES

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROUNDING = {torch.float32: 3e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}
BLOCKS = tuple(BLOCK_FORMATS)
# On a card, compiling is what takes the time.
MORE = quick_or(0.3, 1) if DEVICE.type == "cpu" else 2
LARGE_VOCABULARY, LONG = quick_or((24_064, 1500), (152_064, 3000)) if DEVICE.type == "cpu" else (152_064, 3000)


# What kernels are compiled for. On a card that takes seconds for each: a few, and the same ones every time.
BLOCK_SIZES = [16, 16, 8, 32] if DEVICE.type == "cpu" else [16]
KV_HEADS_AND_GROUPS = [(1, 1), (3, 1), (2, 2), (1, 3), (2, 4), (1, 7), (1, 8), (1, 16), (1, 20)]
HEAD_DIMS = [8, 32, 40, 64, 80, 96, 128, 256, 512, 34]
if DEVICE.type != "cpu":
    KV_HEADS_AND_GROUPS, HEAD_DIMS = [(2, 1), (2, 4), (1, 7)], [64, 80, 128]
    settings.register_profile("card", derandomize=True, database=None)
    settings.load_profile("card")


def random(seed, *shape, dtype=torch.float32, scale=1.0):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


# Attention.

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
    case = (0, [(1, LONG, False), (1, 1024, False), (1, 1023, False), (1, 0, False)], None, (8, 2), 64, 16, 132, 3)
    check_attention(case, dtype, kv_format, 2e-5 if dtype == torch.float32 else 0.01)


@pytest.mark.skipif(DEVICE.type != "cpu", reason="whole engines do it on a card")
def test_attention_to_chosen_pages(monkeypatch):
    """Pages that torch has chosen are in the places of a table that was cut before."""

    def prepare(plan, of, device, isa):
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


def test_prompts_over_several_tiles():
    for window in (None, 70):
        case = (0, [(130, 75, False), (70, 0, False)], window, (4, 2), 32, 16, 132, 3)
        check_attention(case, torch.float32, "float32", 2e-5)


@settings(max_examples=200, deadline=None)
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


@settings(max_examples=200, deadline=None)
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
    plan = AttentionPlan((), (DecodeGroup(0, 1, np.zeros((1, 1), np.int32), np.array([3]), np.array([3])),), ())
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
    plan = AttentionPlan((), (), (PrefillItem(0, 20, np.arange(2, dtype=np.int32), 4),))
    made = prepared(plan, 4, 2, 32, 16, torch.float32, torch.float32)
    assert torch.equal(attend(whole[:, :4], kv, made), attend(whole[:, :4].clone(), kv, made))


def test_a_shared_prefix_with_many_rows():
    blocks = np.arange(6, dtype=np.int32)
    tail = np.arange(6, 9, dtype=np.int32)[:, None]
    plan = AttentionPlan(
        (SharedItem(0, 3, blocks),),
        (DecodeGroup(0, 3, tail, np.array([1, 16, 5]), np.zeros(3, np.int64)),),
        (),
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


# Around attention.


def wide_rotary(qkv, heads, kv_heads, scale, rope, positions, norms, rotation):
    """q, k and v in float64."""
    parts = list(qkv.double().reshape(len(qkv), heads + 2 * kv_heads, -1).split((heads, kv_heads, kv_heads), 1))
    for i in range(2):
        if norms:
            parts[i] = F.rms_norm(parts[i], (parts[i].shape[-1],), norms[i].double(), 1e-6)
        if rope:
            cos, sin = (t.double()[positions][:, None] for t in rope)
            a, b = parts[i].chunk(2, -1)
            parts[i] = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
        if rotation is not None:
            parts[i] = parts[i] @ rotation.double()
    parts[0] = parts[0] * scale
    return parts


ROTARY = [
    (dtype, head_dim, kv_format, family)
    for dtype, head_dims in ((torch.float32, (8, 80, 256)), (torch.bfloat16, (34, 64, 96, 512)), (torch.float16, (64,)))
    for head_dim in head_dims
    for kv_format in ("own", *KV_CODE_BITS, "none", "none, rotated")
    for family in ("rope", "learned", "qk_norm")
]


@pytest.mark.parametrize(
    "dtype, head_dim, kv_format, family", some_of(ROTARY, 28, "rotary") if DEVICE.type == "cpu" else ROTARY, ids=str
)
def test_rotary_and_store(dtype, head_dim, kv_format, family):
    tokens, heads, kv_heads, kv_block_size, scale = 19, 4, 2, 16, head_dim**-0.5
    qkv = random(0, tokens, (heads + 2 * kv_heads) * head_dim + 3, dtype=dtype)
    positions = torch.from_numpy(np.random.default_rng(0).integers(0, 50, tokens))
    angles = torch.outer(torch.arange(50.0), 1.0 / 100 ** (torch.arange(head_dim // 2) / head_dim))
    rope = None if family == "learned" else (angles.cos(), angles.sin())
    norms = tuple(random(i, head_dim, dtype=dtype) for i in (5, 6)) if family == "qk_norm" else None
    rotation = ops.rotation(head_dim) if kv_format in ("int4", "int5", "none, rotated") else None
    slots = torch.from_numpy(np.random.default_rng(1).permutation(4 * kv_block_size)[:tokens])
    slots[5] = -1  # of this one nothing is stored
    kv, bits = None, KV_CODE_BITS.get(kv_format, 0)
    if kv_format == "own":
        kv = torch.full((4, 2, kv_heads, kv_block_size, head_dim), 77.0, dtype=dtype)
    elif bits:
        shape = (4, 2, kv_heads, kv_block_size, KVFormat.of(kv_format).row_bytes(head_dim))
        kv = torch.full(shape, 77, dtype=torch.uint8)
    on_device = None if kv is None else kv.to(DEVICE)
    q, k, v = triton_kernels.rotary_store(
        qkv.to(DEVICE)[:, :-3],
        heads,
        kv_heads,
        scale=scale,
        rope=rope and tuple(t.to(DEVICE) for t in rope),
        positions=positions.to(DEVICE),
        norms=norms and tuple(t.to(DEVICE) for t in norms),
        eps=1e-6,
        rotation=None if rotation is None else rotation.to(DEVICE),
        kv=on_device,
        slots=None if kv is None else slots.to(DEVICE),
        bits=bits,
    )
    wide = wide_rotary(qkv[:, :-3], heads, kv_heads, scale, rope, positions, norms, rotation)
    tolerance = {"atol": 4 * ROUNDING[dtype], "rtol": 2 * ROUNDING[dtype]}
    torch.testing.assert_close(q.cpu().double(), wide[0], **tolerance)
    if kv is None:
        k, v = k.cpu(), v.cpu()
    else:
        stored = on_device.cpu().transpose(2, 3)  # [blocks, 2, kv_block_size, kv_heads, width]
        kept = slots >= 0
        slots, wide = slots[kept], [part[kept] for part in wide]
        k, v = (
            stored[slots // kv_block_size, 0, slots % kv_block_size],
            stored[slots // kv_block_size, 1, slots % kv_block_size],
        )
        stored[slots // kv_block_size, :, slots % kv_block_size] = 77
        assert (stored == 77).all()
    if not bits:
        torch.testing.assert_close(k.double(), wide[1], **tolerance)
        assert torch.equal(v.double(), wide[2])
        return
    for got, meant in ((k, wide[1]), (v, wide[2])):
        moved = 0.03 if got is k else 0.0
        same_codes(got.contiguous(), quant.quantize(meant.float(), bits), head_dim, bits, moved)
        groups, most = meant.split(64, -1), 2**bits - 1
        bound = torch.cat([(g.amax(-1, True) - g.amin(-1, True)).expand_as(g) / (2 * most) for g in groups], -1)
        assert (
            (quant.dequantize(got.contiguous(), head_dim, bits=bits).double() - meant).abs() <= bound * 1.05 + 0.01
        ).all()


def codes(packed, n, bits):
    """Of each value the code, as far as whole groups go."""
    stored = packed.view(torch.uint8)[..., : code_bytes(n, bits)].reshape(-1, code_bytes(n, bits))
    return torch.cat(
        [
            quant._apart(stored[:, span].unflatten(1, (-1, code_bytes(size, bits))), bits, size).flatten(1)
            for columns, span in quant._spans(n, bits)
            for size in [min(64, n - columns.start)]
        ],
        1,
    ).int()


def same_codes(got, meant, n, bits, differing):
    """Codes are those of the reference, but for ties, one beside, and this share that rounding before them moves."""
    off = (codes(got, n, bits) - codes(meant, n, bits)).abs()
    if not differing:
        assert off.max() <= 1
        assert torch.equal(got[..., code_bytes(n, bits) :], meant[..., code_bytes(n, bits) :])
    assert (off > 0).sum().item() <= max(2, (differing or 0.02) * off.numel())


@settings(max_examples=int(25 * MORE), deadline=None)
@given(
    st.integers(1, 9), st.one_of(st.integers(1, 70), st.sampled_from([576, 1000])), st.sampled_from(DTYPES),
    st.booleans(),
    st.integers(0, 2**20),
)  # fmt: skip
def test_norms(rows, columns, dtype, layer_norm, seed):
    x, weight = random(seed, rows, columns + 2, dtype=dtype, scale=3) + 1, random(seed + 1, columns, dtype=dtype)
    bias = random(seed + 2, columns, dtype=dtype) if layer_norm else None
    view = x.to(DEVICE)[:, 1:-1]
    got = triton_kernels.norm(view, weight.to(DEVICE), None if bias is None else bias.to(DEVICE), 1e-5).cpu()
    wide = x[:, 1:-1].double()
    if layer_norm:
        expected = F.layer_norm(wide, (columns,), weight.double(), bias.double(), 1e-5)
    else:
        expected = F.rms_norm(wide, (columns,), weight.double(), 1e-5)
    slack = 3e-4 if layer_norm and columns < 4 else 4e-6
    tolerance = {"atol": 2 * ROUNDING[dtype] + slack, "rtol": 2 * ROUNDING[dtype]}
    torch.testing.assert_close(got.double(), expected, **tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_of_some_columns_is_in_place(dtype):
    x, weight = random(1, 5, 96, dtype=dtype).to(DEVICE), random(2, 40, dtype=dtype).to(DEVICE)
    expected = x.clone()
    expected[:, 16:56] = triton_kernels.norm(x[:, 16:56].contiguous(), weight, None, 1e-5)
    triton_kernels.norm(x[:, 16:56], weight, None, 1e-5, x[:, 16:56])
    assert torch.equal(x.cpu(), expected.cpu())


def test_norm_of_long_rows_in_place():
    x, weight = random(0, 3, 16384, dtype=torch.bfloat16), random(1, 16384, dtype=torch.bfloat16)
    expected = F.rms_norm(x.double(), (16384,), weight.double(), 1e-5)
    here = x.to(DEVICE)
    assert triton_kernels.norm(here, weight.to(DEVICE), None, 1e-5, here) is here
    torch.testing.assert_close(here.cpu().double(), expected, atol=0.01, rtol=0.01)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gated(dtype):
    x = random(0, 5, 2 * 1100 + 1, dtype=dtype, scale=3)
    gate, up = x[:, :-1].double().chunk(2, -1)
    for activation, made in reference._GATES.items():
        got = triton_kernels.gate(x.to(DEVICE)[:, :-1], activation).cpu().double()
        torch.testing.assert_close(got, made(gate, up), atol=4 * ROUNDING[dtype], rtol=2 * ROUNDING[dtype])


@settings(max_examples=int(60 * MORE), deadline=None)
@given(
    st.integers(1, 40),
    st.integers(1, 70),
    st.sampled_from(DTYPES),
    st.sampled_from([None, "relu", "gelu", "gelu_tanh", "silu_mul", "gelu_tanh_mul", "swiglu_oai_mul", "gelu_mul"]),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["new", "new, fp32", "given", "given, fp32", "residual"]),
    st.integers(0, 2**20),
)
def test_linear(rows, columns, dtype, activation, with_bias, with_residual, where, seed):
    depth = 48
    made = columns
    columns *= 2 if activation in reference._GATES else 1
    x = random(seed, rows, depth, dtype=dtype)
    w = random(seed + 1, columns, depth, dtype=dtype, scale=depth**-0.5)
    bias = random(seed + 2, columns, dtype=dtype) if with_bias else None
    residual = random(seed + 3, rows, made, dtype=dtype) if with_residual or where == "residual" else None
    expected = x.double() @ w.double().T
    if with_bias:
        expected += bias.double()
    if activation in reference._GATES:
        expected = reference._GATES[activation](expected[:, :made], expected[:, made:])
    elif activation:
        expected = reference._ACTIVATIONS[activation](expected)
    if residual is not None:
        expected += residual.double()
    x, w, bias, residual = (None if t is None else t.to(DEVICE) for t in (x, w, bias, residual))
    wide = torch.float32 if "fp32" in where else dtype
    out = torch.full((rows, made), float("nan"), dtype=wide, device=DEVICE) if "given" in where else None
    out = residual if where == "residual" else out
    got = triton_kernels.linear(
        x, w, bias, activation=activation, residual=residual, out=out, out_dtype=wide if where == "new, fp32" else None
    )
    assert got.dtype == wide and (out is None or got is out)
    # Rounded after the product, the activation and the residual.
    tolerance = {"atol": 12 * ROUNDING[dtype], "rtol": 6 * ROUNDING[dtype]}
    torch.testing.assert_close(got.cpu().double(), expected, **tolerance)


# Packed weights.


def int8_rows_of(w, *, rotates=True):
    return int8.quantize(w) if rotates else int8.join(*int8.to_codes(w))


@settings(max_examples=int(40 * MORE), deadline=None)
@given(
    st.integers(1, 9), st.sampled_from([1, 40, 64, 100, 200, 577]), st.sampled_from(DTYPES), st.booleans(),
    st.integers(0, 2**20),
)  # fmt: skip
def test_activations_are_coded_as_by_the_reference(rows, n, dtype, rotates, seed):
    x = (random(seed, rows, n + 3) * torch.logspace(-3, 3, rows)[:, None]).to(dtype)
    x[0, 0], x[-1, : n // 2] = 0.0, 0.0
    weight = int8_rows_of(random(seed, 2, n), rotates=rotates)
    launch, codes, scales = int8_rows.coded_launch(x.to(DEVICE)[:, :n], weight.to(DEVICE))
    launch()
    expected = int8.to_codes(int8.rotate(x[:, :n]) if rotates else x[:, :n].float())
    assert torch.equal(codes.cpu(), expected[0]) and torch.equal(scales.cpu(), expected[1][:, 0])


def test_rows_that_are_not_numbers_are_coded_as_by_the_reference():
    x = random(0, 5, 130)
    x[0, 7], x[1, 64], x[2], x[3] = math.nan, math.inf, 0.0, 1e-33
    for rotates in (False, True):
        weight = int8_rows_of(random(1, 2, 130), rotates=rotates)
        launch, codes, scales = int8_rows.coded_launch(x.to(DEVICE), weight.to(DEVICE))
        launch()
        expected = int8.to_codes(int8.rotate(x) if rotates else x)
        assert torch.equal(codes.cpu(), expected[0])
        torch.testing.assert_close(scales.cpu(), expected[1][:, 0], rtol=0, atol=0, equal_nan=True)


ACTIVATIONS = [None, "relu", "gelu", "gelu_tanh", "silu_mul", "gelu_tanh_mul", "swiglu_oai_mul", "gelu_mul"]


@settings(max_examples=int(50 * MORE), deadline=None)
@given(
    st.sampled_from(["int8", "int8, not rotated", "int4", *BLOCKS]),
    st.sampled_from([1, 3, 16, 17, 64, 70, 140]),
    st.sampled_from([1, 31, 64, 150]),
    st.sampled_from([40, 64, 100, 128, 300, 576]),
    st.sampled_from(DTYPES),
    st.sampled_from(ACTIVATIONS),
    st.sampled_from(["plain", "bias", "residual", "bias and residual"]),
    st.sampled_from(["new", "new, fp32", "columns of a matrix", "residual"]),
    st.integers(0, 2**20),
)  # fmt: skip
@example("int4", 17, 150, 576, torch.bfloat16, "silu_mul", "bias and residual", "new", 0)
@example("int8", 140, 150, 577, torch.bfloat16, "silu_mul", "bias", "columns of a matrix", 0)
@example("fp8_g32", 17, 150, 576, torch.bfloat16, "silu_mul", "bias and residual", "new", 0)
@example("fp8_g128", 140, 64, 300, torch.bfloat16, None, "plain", "new, fp32", 0)
@example("w4_g32", 3, 150, 576, torch.float32, "silu_mul", "bias", "new", 0)
@example("w4_g128", 70, 31, 300, torch.bfloat16, "relu", "residual", "columns of a matrix", 0)
@example("mxfp4", 16, 150, 100, torch.float16, "swiglu_oai_mul", "bias", "new", 0)
@example("q4_k", 17, 150, 512, torch.bfloat16, "silu_mul", "bias and residual", "new", 0)
@example("q6_k", 3, 31, 300, torch.float32, "silu_mul", "plain", "new", 0)
@example("q8_0", 70, 64, 100, torch.bfloat16, None, "plain", "new, fp32", 0)
def test_packed_linear(kind, rows, columns, depth, dtype, activation, added, where, seed):  # all that it takes
    """Int8 rows as the reference multiplies them; int4 rows and blocks as the numbers that they are dequantized to."""
    of_weight = columns * (2 if activation in reference._GATES else 1)
    if kind in BLOCKS:
        depth = -(-depth // BLOCK_FORMATS[kind][0]) * BLOCK_FORMATS[kind][0]
    x = random(seed, rows, depth + 5, dtype=dtype)[:, :depth]
    w = random(seed + 1, of_weight, depth, scale=depth**-0.5)
    bias = random(seed + 2, of_weight, dtype=dtype) if "bias" in added else None
    residual = random(seed + 3, rows, columns, dtype=dtype) if "residual" in added or where == "residual" else None
    if kind == "int4" or kind in BLOCKS:
        weight = quant.quantize(w) if kind == "int4" else blocks(kind, of_weight, depth, seed + 4)
        numbers = dequantized(weight, depth, dtype).double()
        wide = (None if t is None else t.double() for t in (bias, residual))
        expected = plain_linear(x.double(), numbers, *wide, activation)
    else:
        weight = int8_rows_of(w, rotates=kind == "int8")
        options = {"activation": activation, "residual": residual, "out_dtype": torch.float32}
        expected = int8.linear(x, weight, bias, **options).double()
    x, bias, residual = (None if t is None else t.to(DEVICE) for t in (x, bias, residual))
    weight = on_device(weight)
    out = residual if where == "residual" else None
    around = torch.full((rows, columns + 8), 7.0, dtype=dtype, device=DEVICE)
    if where == "columns of a matrix":
        out = around[:, 4:-4]
    out_dtype = torch.float32 if where == "new, fp32" else None
    got = triton_kernels.packed_linear(
        x, weight, bias, activation=activation, residual=residual, out=out, out_dtype=out_dtype
    )
    assert got.dtype == (out_dtype or dtype) and (out is None or got is out)
    assert (around[:, :4] == 7).all() and (around[:, -4:] == 7).all()
    rounding = ROUNDING[got.dtype]
    torch.testing.assert_close(got.cpu().double(), expected, atol=max(1e-5, 2 * rounding), rtol=max(1e-5, rounding))


@pytest.mark.parametrize("weight_format", BLOCKS)
def test_blocks_are_multiplied_as_the_numbers_that_they_hold(weight_format):
    """Every column by itself: a row of x has a one there, so that the product is the weight's own number."""
    depth = max(256, BLOCK_FORMATS[weight_format][0])
    weight = blocks(weight_format, 5, depth, 3)
    got = triton_kernels.packed_linear(torch.eye(depth).to(DEVICE), on_device(weight)).cpu()
    assert torch.equal(got.T, dequantized(weight, depth, torch.float32))


@pytest.mark.parametrize("weight_format", BLOCKS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_a_block_quantized_table_are_those_of_the_cpu(weight_format, dtype):
    """Whatever the index: rows are asked for twice, and not in order."""
    columns = 3 * max(96, BLOCK_FORMATS[weight_format][0])
    table, index = blocks(weight_format, 11, columns, 5), torch.tensor([10, 0, 3, 3, 7, 1, 0, 9, 2])
    got = triton_kernels.block_rows(on_device(table), index.to(DEVICE), dtype).cpu()
    assert torch.equal(got, dequantized(table, columns, dtype)[index])


def blocks(weight_format, rows, depth, seed):
    """Random blocks whose numbers are about as large as those of a layer."""
    data = torch.from_numpy(random_rows(weight_format.upper(), rows, depth, seed=seed))
    return BlockWeight(data, weight_format)


def dequantized(weight, depth, dtype):
    """The numbers of int4 rows or of blocks, in a dtype."""
    if not isinstance(weight, BlockWeight):
        return quant.dequantize(weight, depth, dtype=dtype)
    numbers = torch.empty(weight.shape, dtype=dtype)
    return kernels.unpack_blocks(weight.weight_format.upper(), weight.data, numbers)


def on_device(weight):
    return replace(weight, data=weight.data.to(DEVICE)) if isinstance(weight, BlockWeight) else weight.to(DEVICE)


def plain_linear(x, w, bias, residual, activation):
    """In float64."""
    y = x @ w.T + (0 if bias is None else bias)
    if activation in reference._GATES:
        y = reference._GATES[activation](*y.chunk(2, -1))
    elif activation:
        y = reference._ACTIVATIONS[activation](y)
    return y if residual is None else y + residual


def test_values_that_are_not_numbers_stay_in_their_rows():
    x = random(0, 3, 128)
    x[1, 5] = math.nan
    for weight in (int8.quantize(random(1, 20, 128)), quant.quantize(random(1, 20, 128))):
        for activation in (None, "relu", "silu_mul"):
            got = triton_kernels.packed_linear(x.to(DEVICE), weight.to(DEVICE), activation=activation).cpu()
            assert got[1].isnan().all() and got[[0, 2]].isfinite().all()


@pytest.mark.parametrize("shared_memory", [99, 163, 227])
def test_tiles_of_products_fit_the_shared_memory(shared_memory):
    card = launching.Card(90, 132, shared_memory << 10)
    for kind, dtype, rows, columns, gated in (
        (kind, dtype, rows, columns, gated)
        for kind in ("numbers", "int8", "int4", *BLOCK_CODINGS.values())
        for dtype in DTYPES
        for rows in (1, 16, 17, 64, 65, 5000)
        for columns in (64, 4096, 28672)
        for gated in (False, True)
    ):
        tile = product.product_tile(kind, dtype, rows, columns, card, gated=gated)
        of_x = 1 if kind == "int8" else dtype.itemsize
        stored = {"numbers": dtype.itemsize, "int8": 1, "fp8": 1, "q8_0": 1}.get(kind, 0.5)
        step = (tile.rows * of_x + tile.columns * (2 if gated else 1) * stored) * tile.depth
        assert step * tile.stages <= shared_memory << 10 and tile.columns >= 16 and tile.rows >= 16


# Mixtures of experts.


def mixture(seed, num_experts, hidden, inner, dtype=torch.float32, biased=False):
    """(gate_up, gate_up_bias, down, down_bias)"""
    shapes = (num_experts * 2 * inner, hidden), (num_experts * hidden, inner)
    made = [random(seed + i, *shape, dtype=dtype, scale=shape[1] ** -0.5) for i, shape in enumerate(shapes)]
    biases = [random(seed + 2 + i, len(w), dtype=dtype) if biased else None for i, w in enumerate(made)]
    return made[0], biases[0], made[1], biases[1]


def routed(seed, tokens, num_experts, k):
    """Weights of results, and experts, of a router whose favourites are those with high numbers."""
    favourites = torch.arange(num_experts) * (4 / num_experts)
    return (random(seed, tokens, num_experts) + favourites).softmax(-1).topk(k)


def multiplied(x, shares, chosen, weights, activation):
    """On the device. x's rows have gaps between them; what is there is no number."""
    wide = torch.full((len(x), x.shape[1] + 16), float("nan"), dtype=x.dtype, device=DEVICE)
    wide[:, 8:-8] = x.to(DEVICE)
    operands = [None if w is None else on_device(w) for w in (shares, chosen, *weights)]
    return triton_kernels.grouped_experts(wide[:, 8:-8], *operands, activation).cpu()


def wide_experts(x, shares, chosen, weights, activation):
    """In float64, one expert after the other; one that no token is routed to is not looked at."""
    gate_up, gate_up_bias, down, down_bias = (None if w is None else w.double() for w in weights)
    num_experts = len(down) // x.shape[1]
    total = torch.zeros(x.shape, dtype=torch.float64)
    for e in chosen.unique().tolist():
        (token, choice), (first, last) = (
            (chosen == e).nonzero(as_tuple=True),
            (w.chunk(num_experts)[e] for w in (gate_up, down)),
        )
        made = x[token].double() @ first.T + (0 if gate_up_bias is None else gate_up_bias.chunk(num_experts)[e])
        made = reference._GATES[activation](*made.chunk(2, -1)) @ last.T
        made += 0 if down_bias is None else down_bias.chunk(num_experts)[e]
        total.index_add_(0, token, made * shares[token, choice].double()[:, None])
    return total


MIXTURES = [  # experts, of a token, tokens, hidden, intermediate, activation, biases, dtype
    (4, 1, 1, 40, 24, "silu_mul", False, torch.float32),
    (4, 4, 70, 33, 65, "silu_mul", True, torch.float32),
    (8, 2, 33, 136, 70, "swiglu_oai_mul", True, torch.float32),
    (16, 3, 300, 24, 40, "gelu_tanh_mul", False, torch.float32),
    (128, 8, 9, 40, 24, "silu_mul", False, torch.float32),
    (64, 8, 40, 24, 40, "swiglu_oai_mul", True, torch.bfloat16),
    (32, 4, 17, 72, 130, "swiglu_oai_mul", True, torch.float16),
    (6, 5, 100, 130, 72, "silu_mul", False, torch.bfloat16),
]


@pytest.mark.parametrize("case", MIXTURES, ids=lambda case: "-".join(map(str, case)))
def test_tokens_go_through_their_experts(case):
    num_experts, k, tokens, hidden, inner, activation, biased, dtype = case
    x = random(7, tokens, hidden, dtype=dtype, scale=2)
    weights = mixture(8, num_experts, hidden, inner, dtype, biased)
    shares, chosen = routed(9, tokens, num_experts, k)
    for e in set(range(num_experts)) - set(chosen.unique().tolist()):
        for w in (weights[0], weights[2]):
            w.chunk(num_experts)[e].fill_(float("nan"))
    got = multiplied(x, shares, chosen, weights, activation)
    assert got.dtype == torch.float32
    # Rounded after the activation and after the second product.
    tolerance = {"atol": 12 * ROUNDING[dtype], "rtol": 4 * ROUNDING[dtype]}
    torch.testing.assert_close(got.double(), wide_experts(x, shares, chosen, weights, activation), **tolerance)


@pytest.mark.parametrize("num_experts, k, tokens", [(4, 1, 1), (8, 2, 600), (6, 5, 90)])
def test_many_rows_of_experts_are_multiplied_by_torch(num_experts, k, tokens):
    hidden, inner, dtype = 72, 40, torch.bfloat16
    x, (gate_up, _, down, _) = random(1, tokens, hidden, dtype=dtype), mixture(2, num_experts, hidden, inner, dtype)
    shares, chosen = routed(3, tokens, num_experts, k)
    operands = (t.to(DEVICE) for t in (x, shares, chosen, gate_up, down))
    got = grouped_many.many_through_experts(*operands, "silu_mul").cpu()
    tolerance = {"atol": 12 * ROUNDING[dtype], "rtol": 4 * ROUNDING[dtype]}
    expected = wide_experts(x, shares, chosen, (gate_up, None, down, None), "silu_mul")
    torch.testing.assert_close(got.double(), expected, **tolerance)


def test_only_many_rows_in_bf16_are_multiplied_by_torch(monkeypatch):
    def takes(dtype=torch.bfloat16, pairs=8 * 64 + 2, hidden=64, bias=None):
        x = SimpleNamespace(dtype=dtype, shape=(pairs // 2, hidden), device=torch.device("cuda"))
        gate_up, down = torch.empty(8 * 2 * 16, hidden, dtype=dtype), torch.empty(8 * hidden, 16, dtype=dtype)
        return grouped_many.takes_many(x, torch.empty(pairs // 2, 2), gate_up, bias, down, None)

    for capability, can in ((80, False), (89, False), (90, True), (100, True), (120, False)):
        found = launching.Card(capability, 132, 227 << 10)
        monkeypatch.setattr(grouped_many, "card", lambda device, found=found: found)
        assert takes() == (can and hasattr(F, "grouped_mm"))
        assert not takes(torch.float16) and not takes(pairs=8 * 64) and not takes(hidden=60)
        assert not takes(bias=torch.zeros(1))


PACKED_MIXTURES = [  # kind, experts, of a token, tokens, hidden, intermediate, activation, biases, dtype
    ("int8", 8, 2, 33, 136, 70, "swiglu_oai_mul", True, torch.float32),
    ("int8", 16, 4, 9, 64, 128, "silu_mul", False, torch.bfloat16),
    ("int8", 4, 2, 300, 40, 72, "silu_mul", True, torch.float32),
    ("int4", 8, 2, 33, 136, 70, "swiglu_oai_mul", True, torch.float32),
    ("int4", 16, 4, 9, 320, 128, "silu_mul", False, torch.bfloat16),
    ("int4", 4, 2, 70, 64, 192, "gelu_tanh_mul", False, torch.float16),
    ("fp8_g128", 8, 2, 33, 128, 256, "silu_mul", False, torch.bfloat16),
    ("w4_g32", 16, 4, 9, 320, 96, "silu_mul", False, torch.float32),
    ("mxfp4", 4, 2, 70, 96, 160, "swiglu_oai_mul", True, torch.bfloat16),
    ("q4_k", 4, 2, 9, 256, 256, "silu_mul", False, torch.bfloat16),
    ("q6_k", 4, 2, 9, 256, 256, "silu_mul", False, torch.float32),
    ("q8_0", 8, 2, 33, 96, 160, "silu_mul", False, torch.bfloat16),
]


@pytest.mark.parametrize("case", PACKED_MIXTURES, ids=lambda case: "-".join(map(str, case)))
def test_tokens_go_through_their_packed_experts(case):
    """Experts without tokens are not read: their scales are no numbers."""
    kind, num_experts, k, tokens, hidden, inner, activation, biased, dtype = case
    x = random(7, tokens, hidden, dtype=dtype, scale=2)
    gate_up, gate_up_bias, down, down_bias = mixture(8, num_experts, hidden, inner, torch.float32, biased)
    shares, chosen = routed(9, tokens, num_experts, k)
    chosen[chosen == 0] = 1
    if kind in BLOCKS:
        stored = [blocks(kind, *w.shape, seed) for seed, w in enumerate((gate_up, down))]
    else:
        stored = [(int8.quantize if kind == "int8" else quant.quantize)(w) for w in (gate_up, down)]
    expected = packed_experts(x, shares, chosen, stored, (gate_up_bias, down_bias), activation)
    for rows in () if kind in BLOCKS else stored:
        rows[1 if kind == "int8" else 0 : len(rows) // num_experts, -4:] = -1  # but for the sign of the first scale
    got = multiplied(x, shares, chosen, (stored[0], gate_up_bias, stored[1], down_bias), activation)
    rounding = max(1e-5, ROUNDING[dtype])
    # In int8, a value between two codes may be rounded either way after the first product.
    atol = 0.02 if kind == "int8" else 12 * rounding
    torch.testing.assert_close(got.double(), expected, atol=atol, rtol=4 * rounding)


def packed_experts(x, shares, chosen, stored, biases, activation):
    """One expert after the other, by the reference."""
    num_experts = stored[1].shape[0] // x.shape[1]
    total = torch.zeros(x.shape, dtype=torch.float64)

    def multiplied_by(inputs, which, e, activation):
        whole, bias = stored[which], biases[which]
        rows = (whole.data if isinstance(whole, BlockWeight) else whole).chunk(num_experts)[e]
        bias = None if bias is None else bias.chunk(num_experts)[e]
        if rows.dtype == torch.int8:
            return int8.linear(inputs, rows, bias, activation=activation)
        rows = replace(whole, data=rows) if isinstance(whole, BlockWeight) else rows
        numbers = dequantized(rows, inputs.shape[1], x.dtype).double()
        return plain_linear(inputs.double(), numbers, None if bias is None else bias.double(), None, activation)

    for e in chosen.unique().tolist():
        token, choice = (chosen == e).nonzero(as_tuple=True)
        made = multiplied_by(multiplied_by(x[token], 0, e, activation).to(x.dtype), 1, e, None)
        total.index_add_(0, token, made.double() * shares[token, choice].double()[:, None])
    return total


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    "counts", [(0, 0, 150, 0), (64, 0, 65, 63), (32, 31, 0, 33), (128, 64, 0, 1), (0, 0, 0, 1)], ids=str
)
def test_tiles_have_every_row_of_an_expert_and_no_other(counts, dtype):
    chosen = torch.repeat_interleave(torch.tensor(counts))
    chosen = chosen[torch.randperm(len(chosen), generator=torch.Generator().manual_seed(1))][:, None]
    x, weights = random(2, len(chosen), 24, dtype=dtype), mixture(3, len(counts), 24, 16, dtype, biased=True)
    shares = random(4, len(chosen), 1).abs()
    got = multiplied(x, shares, chosen, weights, "silu_mul")
    tolerance = {"atol": 12 * ROUNDING[dtype], "rtol": 4 * ROUNDING[dtype]}
    torch.testing.assert_close(got.double(), wide_experts(x, shares, chosen, weights, "silu_mul"), **tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_through_experts_does_not_depend_on_its_batch(dtype):
    x, weights = random(1, 90, 72, dtype=dtype), mixture(2, 4, 72, 40, dtype, biased=True)
    shares, chosen = routed(3, 90, 4, 2)
    together = multiplied(x, shares, chosen, weights, "swiglu_oai_mul")
    for some in (slice(0, 1), slice(41, 42), slice(89, 90), slice(3, 70)):
        assert torch.equal(multiplied(x[some], shares[some], chosen[some], weights, "swiglu_oai_mul"), together[some])


def test_choices_are_sorted_by_expert_and_stay_in_order():
    num_experts = 6
    for count in (1, 2048, 4500):  # several blocks of a program
        chosen = torch.randint(num_experts - 1, (count, 1), generator=torch.Generator().manual_seed(count)).to(DEVICE)
        x, total = torch.zeros(count, 8, device=DEVICE), torch.zeros(count, 8, device=DEVICE)
        weights = [None if w is None else w.to(DEVICE) for w in mixture(0, num_experts, 8, 8)]
        sort = grouped.launches(x, torch.ones(count, 1, device=DEVICE), chosen, *weights, "silu_mul", total)[0]
        sort()
        assert torch.equal(sort.args["order"].long(), chosen[:, 0].argsort(stable=True))
        starts = [0, *chosen[:, 0].bincount(minlength=num_experts).cumsum(0).tolist()]
        assert sort.args["starts"].tolist() == starts


def test_launches_of_experts_do_not_depend_on_routes():
    x, weights = torch.zeros(70, 24), mixture(1, 8, 24, 16)
    routes = [torch.zeros(70, 2, dtype=torch.int64) + torch.arange(2), routed(1, 70, 8, 2)[1]]
    made = [grouped.launches(x, torch.ones(70, 2), to, *weights, "silu_mul", x) for to in routes]
    assert [launch.grid for launch in made[0]] == [launch.grid for launch in made[1]]


@pytest.mark.parametrize("shared", [{}, {"shared_expert_intermediate_size": 56}], ids=["", "shared"])
def test_a_mixture_whose_experts_are_together_is_that_of_the_cpu(shared, monkeypatch):
    """Weights as a device has them, as `models/experts.py` hands them to the kernels."""
    config = config_of_hf({
        "architectures": [f"Qwen{2 if shared else 3}MoeForCausalLM"], "hidden_size": 40, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 4, "moe_intermediate_size": 24, "vocab_size": 8,
        "num_experts": 8,
        "num_experts_per_tok": 3,
    } | shared)  # fmt: skip
    gate_up, gate_up_bias, down, down_bias = mixture(1, 8, 40, 24, biased=True)
    tensors = {"router.weight": random(5, 8, 40), "gate_up.weight": gate_up, "down.weight": down}
    tensors |= {"gate_up.bias": gate_up_bias, "down.bias": down_bias}
    if shared:
        shapes = {"gate": (1, 40), "gate_up": (2 * 56, 40), "down": (40, 56)}
        tensors |= {f"shared_{name}.weight": random(6, *shape, scale=0.2) for name, shape in shapes.items()}
    x = random(9, 21, 40)
    expected = experts(config, split_experts(config, tensors, 0), x)
    if DEVICE.type == "cpu":
        monkeypatch.setattr(ops, "device_kernels", lambda device: triton_kernels)
    monkeypatch.setattr("batchgen.models.experts.chosen_experts", None)
    torch.backends.cuda.matmul.allow_tf32 = False
    got = experts(config, {name: tensor.to(DEVICE) for name, tensor in tensors.items()}, x.to(DEVICE))
    torch.testing.assert_close(got.cpu(), expected, atol=2e-5, rtol=2e-5)


def test_experts_are_grouped_where_their_weights_are_numbers_of_the_inputs_kind_or_packed(monkeypatch):
    monkeypatch.setattr(ops, "device_kernels", lambda device: triton_kernels)
    x, weight = torch.zeros(2, 64), torch.zeros(8, 64)
    assert ops.groups_experts(x, weight, weight)
    packed = torch.zeros(8, 72, dtype=torch.int8), torch.zeros(8, 36, dtype=torch.uint8)
    for other in (*packed, BlockWeight(torch.zeros(8, 72, dtype=torch.uint8), "fp8_g32")):
        assert ops.groups_experts(x, weight, other)
    for other in (weight.half(), ops.SplitWeight((weight,))):
        assert not ops.groups_experts(x, weight, other)
    monkeypatch.setattr(ops, "device_kernels", lambda device: None)
    assert not ops.groups_experts(x, weight, weight)


@pytest.mark.skipif(DEVICE.type != "cuda", reason="no CUDA device")
def test_a_captured_mixture_takes_other_routes():
    """And the host waits for nothing."""
    weights = [w.to(DEVICE) for w in mixture(2, 8, 40, 24, biased=True)]
    x, (shares, chosen) = random(1, 50, 40).to(DEVICE), (t.to(DEVICE) for t in routed(1, 50, 8, 2))
    operands = x, shares, chosen, *weights, "silu_mul"
    triton_kernels.grouped_experts(*operands)  # compiled
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        total = triton_kernels.grouped_experts(*operands)
    for seed in (4, 5):
        for held, new in zip((shares, chosen), routed(seed, 50, 8, 2), strict=True):
            held.copy_(new)
        if seed == 5:
            chosen.copy_(torch.tensor([6, 2], device=DEVICE).expand_as(chosen))
        total.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(total, triton_kernels.grouped_experts(*operands))
        expected = wide_experts(*(t.cpu() for t in (x, shares, chosen)), [w.cpu() for w in weights], "silu_mul")
        torch.testing.assert_close(total.cpu().double(), expected, atol=4e-5, rtol=2e-5)


# Packed rows.


@settings(max_examples=int(40 * MORE), deadline=None)
@given(
    st.integers(1, 9), st.integers(1, 300), st.sampled_from(DTYPES),
    st.sampled_from(["normal", "tiny", "huge", "flat"]),
    st.integers(0, 2**20),
)  # fmt: skip
def test_packed_groups_are_those_of_the_reference(rows, n, dtype, kind, seed):
    x = random(seed, rows, n)
    x = {"normal": x, "tiny": x * 1e-6, "huge": x * 1e5, "flat": torch.full_like(x, 0.37)}[kind].to(dtype)
    packed = triton_kernels.quantize(x.to(DEVICE))
    same_codes(packed.cpu(), quant.quantize(x), n, 4, 0.0)
    if n % 2 == 0 and n <= 256:  # heads of KV
        for bits in KV_CODE_BITS.values():
            same_codes(triton_kernels.quantize(x.to(DEVICE), bits).cpu(), quant.quantize(x, bits), n, bits, 0.0)
    for out_dtype in DTYPES:
        got = triton_kernels.dequantize(packed, n, torch.empty(rows, n, dtype=out_dtype, device=DEVICE)).cpu()
        meant = quant.dequantize(packed.cpu(), n, dtype=out_dtype)
        torch.testing.assert_close(got, meant, atol=1e-7, rtol=ROUNDING[out_dtype])


def test_dequantizing_writes_its_rows_and_nothing_else():
    for rows, n in ((37, 64), (3, 64 * 35), (5, 130)):
        packed = quant.quantize(random(0, rows, n))
        memory = torch.full((rows * n + 256,), 77.0, dtype=torch.bfloat16)
        here = memory.to(DEVICE)
        triton_kernels.dequantize(packed.to(DEVICE), n, here[128:-128].view(rows, n))
        memory[128:-128] = quant.dequantize(packed, n, dtype=torch.bfloat16).view(-1)
        assert torch.equal(here.cpu(), memory)


def test_rows_at_an_odd_address():
    packed = quant.quantize(random(0, 4, 128))
    memory = torch.zeros(packed.numel() + 1, dtype=torch.uint8)
    memory[1:] = packed.view(-1)
    odd = memory.to(DEVICE)[1:].view(packed.shape)
    got = triton_kernels.dequantize(odd, 128, torch.empty(4, 128, device=DEVICE))
    torch.testing.assert_close(got.cpu(), quant.dequantize(packed, 128))


def test_a_nan_spoils_its_group_and_nothing_else():
    x = random(0, 2, 200)
    x[1, 70] = float("nan")
    back = triton_kernels.dequantize(
        triton_kernels.quantize(x.to(DEVICE)), 200, torch.empty(2, 200, device=DEVICE)
    ).cpu()
    assert back[1, 64:128].isnan().all()
    assert back[0].isfinite().all() and back[1, :64].isfinite().all() and back[1, 128:].isfinite().all()


def test_nothing_to_do():
    x, weight = torch.empty(0, 64, device=DEVICE), torch.ones(64, device=DEVICE)
    assert triton_kernels.norm(x, weight, None, 1e-5).shape == (0, 64)
    assert triton_kernels.gate(x, "silu_mul").shape == (0, 32)
    routes = torch.empty(0, 2, device=DEVICE), torch.empty(0, 2, dtype=torch.int64, device=DEVICE)
    assert triton_kernels.grouped_experts(
        x, *routes, *(w if w is None else w.to(DEVICE) for w in mixture(0, 4, 64, 8)), "silu_mul"
    ).shape == (0, 64)
    assert triton_kernels.quantize(x).shape == (0, quant.row_bytes(64))
    assert triton_kernels.rotary_store(x, 2, 1, scale=1.0)[0].shape == (0, 2, 16)
    made = prepared(AttentionPlan((), (), ()), 2, 1, 16, 16, x.dtype)
    assert triton_kernels.paged_attention(x.view(0, 4, 16)[:, :2], x.new_zeros(1, 2, 1, 16, 16), made).shape == (
        0,
        2,
        16,
    )


# The dispatch to them, and to the reference where there is no Triton.

needs_card = pytest.mark.skipif(DEVICE.type != "cuda", reason="no CUDA device")


@needs_card
@pytest.mark.parametrize("with_triton", [True, False])
@pytest.mark.parametrize("kv_format", ["float32", *KV_CODE_BITS])
def test_ops_on_a_card_are_those_of_the_cpu(with_triton, kv_format, monkeypatch):
    heads, kv_heads, head_dim, kv_block_size = 8, 2, 64, 16
    slices, groups, num_blocks = laid_out(5, [(1, 300, True)] * 5 + [(30, 20, True), (40, 0, False)], kv_block_size, 0)
    plan = plan_attention(SweepTables.of(slices), groups, kv_block_size=kv_block_size, key_bytes=256)
    tokens = sum(s.num_queries for s in slices)
    slots = torch.from_numpy(
        np.concatenate(
            [
                s.blocks[p // kv_block_size] * kv_block_size + p % kv_block_size
                for s in slices
                for p in [np.arange(s.num_cached, s.num_keys)]
            ]
        ).astype(np.int64)
    )
    kv = random(0, num_blocks, 2, kv_heads, kv_block_size, head_dim)
    kv_format = KVFormat.of(kv_format)
    bits = kv_format.bits
    kv = quant.quantize(kv, bits) if bits else kv
    qkv = random(1, tokens, (heads + 2 * kv_heads) * head_dim)
    angles = torch.outer(torch.arange(400.0), 1.0 / 100 ** (torch.arange(32) / 32))
    positions = torch.arange(tokens) % 400
    weight = random(2, head_dim * heads, head_dim * heads, scale=0.04)
    if not with_triton:
        monkeypatch.setattr(ops, "_triton", lambda: None)

    def run(device):
        def there(x):
            return x.clone().to(device)

        here = there(kv)
        rope = there(angles.cos()), there(angles.sin())
        options = {"scale": 0.125, "rope": rope, "positions": there(positions)}
        q = ops.rotary_store(there(qkv), heads, here, there(slots), kv_format, **options)
        operands = AttentionOperands(heads, kv_heads, head_dim, kv_block_size, q.dtype, kv_format)
        made = ops.prepare_attention(plan, operands, torch.device(device))
        out = ops.paged_attention(q, here, made, bits=bits)
        y = ops.linear(out, there(weight), residual=out)
        y = ops.norm(y, there(weight[0]), None, 1e-5)
        return [t.cpu() for t in (q, out, y)]

    torch.backends.cuda.matmul.allow_tf32 = False
    tolerance = {4: 2e-2, 5: 1e-2, 8: 2e-3}.get(bits, 1e-4)  # a code at a tie may go to either side
    for got, meant in zip(run("cuda"), run("cpu"), strict=True):
        torch.testing.assert_close(got, meant, atol=tolerance, rtol=tolerance)


# Which card gets which kernels.


def properties(capability, **told):
    major, minor = divmod(capability, 10)
    return SimpleNamespace(major=major, minor=minor, multi_processor_count=40, **told)


@pytest.mark.parametrize(
    "found, shared_memory",
    [
        (properties(75, shared_memory_per_block_optin=65536), 64 << 10),
        (properties(75), 64 << 10),
        (properties(86), 99 << 10),
        (properties(103, shared_memory_per_block_optin=232448), 227 << 10),
        (properties(103), 64 << 10),
    ],
)
def test_shared_memory_is_what_the_card_says_or_else_the_table(found, shared_memory, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    card = launching.card.__wrapped__(torch.device("cuda"))
    assert (card.shared_memory, card.num_sms) == (shared_memory, 40)


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


def test_old_cards_leave_products_or_all_to_torch(monkeypatch):
    """Triton uses no tensor cores before 8.0, and does not run before 7.5."""
    there = torch.device("cuda")
    operands = AttentionOperands(2, 2, 64, 16, torch.float16, KVFormat("float16"))

    def on(capability):
        made = launching.Card(capability, 40, 64 << 10)
        for module in (attention, grouped, packed, rotary, triton_kernels):
            monkeypatch.setattr(module, "card", lambda device: made)
        kernels = ops.device_kernels(there)
        capture = ops.can_capture(operands, there)
        return (
            kernels,
            capture,
            kernels
            and (
                kernels.supports_attention(operands, there),
                kernels.supports_rotary(64, False, there),
                kernels.supports_rotary(64, True, there),
                ops.multiplies_packed(there),
            ),
        )

    assert on(70) == (None, False, None)
    assert on(75) == (triton_kernels, False, (False, True, False, False))
    for capability in (80, 86, 90, 120):
        assert on(capability) == (triton_kernels, True, (True, True, True, True))
    on(75)
    monkeypatch.setattr(torch_attention, "prepare_attention", lambda *a: "torch's")
    assert ops.prepare_attention(AttentionPlan((), (), ()), operands, there) == "torch's"


# Rows.


@settings(max_examples=int(20 * MORE), deadline=None)
@given(st.integers(1, 40), st.sampled_from([1, 6, 36, 64, 4000]), st.sampled_from(DTYPES), st.integers(0, 2**20))
def test_rows_go_where_the_index_says(count, width, dtype, seed):
    source = random(seed, 50, 2, width, dtype=dtype).to(DEVICE)
    order = np.random.default_rng(seed).permutation(50)[:count]
    index = torch.from_numpy(order).to(DEVICE)
    taken = torch.full((count + 1, 2, width), 7.0, dtype=dtype, device=DEVICE)
    triton_kernels.gather_rows(taken[:count], source, index)
    assert torch.equal(taken[:count], source[index]) and (taken[count] == 7).all()
    back = torch.full_like(source, 7.0)
    triton_kernels.scatter_rows(back, index, taken[:count])
    left = np.setdiff1d(np.arange(50), order)
    assert torch.equal(back[index], source[index]) and (back[torch.from_numpy(left).to(DEVICE)] == 7).all()


@pytest.mark.parametrize("count, width", [(700, 33), (3, 3000), (40, 2048)], ids=["small", "long", "whole tiles"])
def test_many_rows_go_in_few_programs(count, width):
    """Compute kernels are to find most of the card free while rows wait for the bus."""
    source = random(0, count, width, dtype=torch.float16).to(DEVICE)
    index = torch.from_numpy(np.random.default_rng(0).permutation(count)).to(DEVICE)
    taken, back = (torch.full_like(source, 7.0) for _ in range(2))
    launches = row_copies.gather_launch(taken, source, index), row_copies.scatter_launch(back, index, source[index])
    for launch in launches:
        assert 0 < math.prod(launch.grid) <= 16 and launch.warps <= 8
        launch()
    assert torch.equal(taken, source[index]) and torch.equal(back, source)


def test_rows_beyond_the_reach_of_32_bits():
    """Memory that is not touched takes none."""
    source = torch.empty(2**31 // 24 + 40, 25, dtype=torch.uint8, device=DEVICE)
    index = torch.tensor([len(source) - 1, 0, len(source) - 7], device=DEVICE)
    rows_meant = torch.arange(75, dtype=torch.uint8, device=DEVICE).view(3, 25)
    triton_kernels.scatter_rows(source, index, rows_meant)
    taken = torch.zeros_like(rows_meant)
    triton_kernels.gather_rows(taken, source, index)
    assert torch.equal(taken, rows_meant) and torch.equal(source[index], rows_meant)


# Logits.


@settings(max_examples=int(16 * MORE), deadline=None)
@given(st.one_of(st.integers(1, 600), st.integers(4097, 8000)), st.booleans(), st.integers(0, 2**20))
@example(195, False, 57401)  # the last token's weight is lost in the sum, and the draw is the largest there is
def test_draws_are_those_of_the_reference(columns, ties, seed):
    """Every row with its own parameters, among rows that are not drawn from."""
    rng = np.random.default_rng(seed)
    logits = random(seed, 7, columns + 3, scale=4)[:, 1:-2]
    logits = logits.round() if ties else logits
    logits[torch.from_numpy(rng.random((7, columns)) < rng.choice([0.0, 0.3]))] = -torch.inf
    logits[:, rng.integers(columns)] = 1.0  # the only one, perhaps
    rows = rng.permutation(7)[:5]
    uniform = rng.random(5)
    uniform[0], uniform[1] = 0.0, 1 - 2**-53
    given_ = draws(
        uniform,
        temperature=rng.choice([1e-6, 0.2, 1.0, 3.0], 5),
        top_k=rng.choice([0, 0, 1, 5, 40, 10**6], 5),
        top_p=rng.choice([1.0, 1.0, 0.95, 0.5, 1e-9], 5),
        min_p=rng.choice([0.0, 0.0, 0.01, 0.3, 1.0], 5),
    )
    before = logits.clone()
    got = drawn(triton_kernels, logits.to(DEVICE), given_, rows)
    assert (np.delete(got.numpy(), rows) == -1).all() and torch.equal(logits, before)
    assert check_draws(got[rows], logits[rows], given_) <= 1 or ties


def test_a_draw_from_a_large_vocabulary():
    logits = random(0, 2, LARGE_VOCABULARY, scale=2.5)
    logits[1] = logits[1].round()  # thousands of equal ones at every cut
    given_ = draws(np.array([0.7, 0.6]), temperature=[0.8, 1.0], top_k=[0, 3000], top_p=[0.9, 1.0])
    check_draws(drawn(triton_kernels, logits.to(DEVICE), given_), logits, given_)


def test_of_equal_logits_top_k_and_top_p_keep_the_first():
    logits = torch.zeros(3, 5000)
    logits[:, [17, 4500]] = 1.0
    uniform = (np.arange(3) + 0.5) / 3
    for given_, kept in (({"top_k": 3}, [0, 17, 4500]), ({"top_p": 5e-4}, [17]), ({"top_p": 1.2e-3}, [0, 17, 4500])):
        got = drawn(triton_kernels, logits.to(DEVICE), draws(uniform, **given_))
        assert set(got.tolist()) <= set(kept)
        assert torch.equal(got, drawn(reference, logits, draws(uniform, **given_)))


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_a_draw_is_a_token_whatever_the_logits(odd):
    logits = torch.cat((torch.full((1, 100), odd), random(1, 1, 100).index_fill(1, torch.tensor([17]), odd)))
    for chosen in ({}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.5}, {"temperature": 1e-50}):
        got = drawn(triton_kernels, logits.to(DEVICE), draws(np.array([0.999, 0.5]), **chosen))
        assert ((got >= 0) & (got < 100)).all()


@settings(max_examples=int(20 * MORE), deadline=None)
@given(
    st.integers(1, 4),
    st.one_of(st.integers(1, 70), st.just(5000)),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.integers(0, 2**20),
)
def test_tokens_are_forbidden_where_their_bit_is_not_set(rows, columns, share, seed):
    rng = np.random.default_rng(seed)
    words = -(-columns // 32) + rng.integers(0, 2)
    bits = rng.random((rows, words * 32)) < share
    allowed = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
    wide = random(seed, rows + 2, columns + 5)
    mine = rng.permutation(rows + 2)[:rows]
    expected = wide.clone()
    reference.forbid(expected[:, :columns], mine, allowed)
    got = wide.to(DEVICE)
    triton_kernels.forbid(got[:, :columns], mine, allowed)
    assert torch.equal(got.cpu(), expected)
    assert torch.equal(got.cpu()[mine, :columns] == -torch.inf, torch.from_numpy(~bits[:, :columns]))


@settings(max_examples=int(20 * MORE), deadline=None)
@given(st.integers(1, 3), st.one_of(st.integers(1, 70), st.just(9001)), st.booleans(), st.integers(0, 2**20))
def test_the_first_of_the_largest_and_the_sum_of_exponentials(rows, columns, ties, seed):
    logits = random(seed, rows, columns + 1, scale=3)[:, 1:]
    logits = logits.round() if ties else logits
    logits[:, ::3] = -torch.inf if columns > 3 else 0.0
    index, value, lse = (t.cpu() for t in triton_kernels.argmax(logits.to(DEVICE), want_lse=True))
    meant = torch.from_numpy(logits.numpy().argmax(1))
    assert torch.equal(index, meant) and torch.equal(value, logits.amax(-1))
    torch.testing.assert_close(lse.double(), logits.double().logsumexp(-1), atol=2e-6, rtol=1e-6)
    assert torch.equal(triton_kernels.argmax(logits.to(DEVICE))[0].cpu(), meant)


@settings(max_examples=int(20 * MORE), deadline=None)
@given(
    st.one_of(st.integers(1, 70), st.just(4097)),
    st.lists(st.sampled_from([torch.nan, torch.inf, -torch.inf, 3e38, -3e38, 0.0]), min_size=1, max_size=4),
    st.integers(0, 2**20),
)
def test_the_largest_of_rows_that_are_finite(columns, values, seed):
    logits = random(seed, 1 + len(values), columns, scale=3)
    for row, value in enumerate(values, 1):
        logits[row, seed % columns] = value
    index, marked = (t.cpu() for t in triton_kernels.argmax_if_finite(logits.to(DEVICE), -2))
    finite = logits.isfinite().all(1)
    assert torch.equal(index[finite], logits[finite].argmax(1)) and (index >= 0).all() and (index < columns).all()
    assert torch.equal(marked, index.where(finite, -2))
