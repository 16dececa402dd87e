"""Every kernel against float64, on every instruction set of this machine and on plain twins of those it lacks."""

import functools
import itertools
import math
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from attention_cases import attended, laid_out, paged
from draw_cases import check_draws, drawn, draws
from hypothesis import given, settings
from hypothesis import strategies as st
from thorough import covering, some_draws, some_of

from batchgen.core.dtypes import KV_CODE_BITS, KVFormat, code_bytes
from batchgen.ops import cpp as kernels
from batchgen.ops import int8, quant, reference, torch_attention
from batchgen.ops.attention_operands import AttentionOperands
from batchgen.ops.attention_plan import (
    AttentionPlan,
    DecodeGroup,
    SequenceItems,
    SequenceSlice,
    SharedItem,
    SweepTables,
    plan_attention,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Largest error of a result of size 1, for products made in fp32 and rounded to the type once.
ROUNDING = {torch.float32: 3e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}

pytestmark = pytest.mark.filterwarnings("error")


@pytest.fixture(params=kernels.instruction_sets() + kernels.plain_twins(), autouse=True)
def instruction_set(request):
    with kernels.using(request.param):
        yield request.param


def examples(count, *strategies):
    """Draws `count` cases for a check, a quarter of that for the plain twins, which are slow."""

    def test_of(check):
        def test(instruction_set):
            drawn = some_draws(count // 4 if instruction_set in kernels.plain_twins() else count)
            settings(max_examples=drawn, deadline=None)(given(*strategies)(check))()

        test.__name__, test.__doc__ = check.__name__, check.__doc__
        return test

    return test_of


# For what has nothing to do with products of bf16, which the plain twins are there for.
real_sets = pytest.mark.parametrize("instruction_set", kernels.instruction_sets(), indirect=True)
# For what does not run kernels in this process.
any_set = pytest.mark.parametrize("instruction_set", kernels.instruction_sets()[:1], indirect=True)


def random(seed, *shape, dtype=torch.float32, scale=1.0):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


# Attention.


@st.composite
def sweeps(draw):
    """Sequences (queries, cached tokens, shared with the common prefix?), the prefix's blocks, and shapes."""
    prefix_blocks = draw(st.sampled_from([0, 0, 5, 9]))
    sequences = draw(
        st.lists(
            st.tuples(
                st.sampled_from([1, 1, 1, 1, 2, 7, 24, 130]),
                st.one_of(st.sampled_from([0, 15, 16, 17, 63, 64]), st.integers(0, 300)),
                st.booleans() if prefix_blocks else st.just(False),
            ),
            min_size=1,
            max_size=8,
        )
    )
    kv_heads = draw(st.sampled_from([1, 2, 3, 5, 9]))
    group = draw(st.sampled_from([1, 2, 3, 4, 7, 8, 16]))
    return (
        prefix_blocks,
        sequences,
        draw(st.sampled_from([None, None, None, 1, 20, 100])),
        (kv_heads * group, kv_heads),
        draw(st.sampled_from([8, 16, 32, 40, 64, 80, 96, 128, 256, 512])),
        draw(st.sampled_from([16, 16, 16, 8, 32])),
        draw(st.integers(0, 2**20)),
    )


@pytest.fixture(autouse=True)
def known_cases(request):
    """Keeps a test's cases of attention for all instruction sets: results in float64 take far longer than the kernels.

    Those of all tests would be a gigabyte.
    """
    if request.function not in _KNOWN_CASES:
        _KNOWN_CASES.clear()
        _KNOWN_CASES[request.function] = {}
    return _KNOWN_CASES[request.function]


_KNOWN_CASES = {}


def check_attention(case, dtype, kv_format, tolerance):
    (cases,) = _KNOWN_CASES.values()
    key = repr((case, dtype, kv_format))
    if key not in cases:
        cases[key] = attention_case(case, dtype, kv_format)
    q, stored, plan, softcap, sinks, expected = cases[key]
    (heads, kv_heads), kv_block_size = case[3], case[5]
    row_bytes = stored.shape[-1] * stored.element_size()
    made = kernels.attention_plan(plan, kv_heads, heads // kv_heads, kv_block_size, row_bytes)
    got = kernels.attention(q, stored, made, bits=KV_CODE_BITS.get(kv_format, 0), softcap=softcap, sinks=sinks)
    assert torch.isfinite(got).all()
    torch.testing.assert_close(got.double(), expected, atol=tolerance, rtol=tolerance)


def attention_case(case, dtype, kv_format):
    """(queries, stored KV, plan, softcap, sinks, result in float64); KV that no query may see is NaN or odd codes."""
    prefix_blocks, sequences, window, (heads, kv_heads), head_dim, kv_block_size, seed = case
    slices, groups, num_blocks = laid_out(prefix_blocks, sequences, kv_block_size, seed)
    plan = plan_attention(
        SweepTables.of(slices), groups, kv_block_size=kv_block_size, key_bytes=kv_heads * head_dim * 2, window=window
    )
    q = random(seed, sum(s.num_queries for s in slices), heads, head_dim, dtype=dtype, scale=1.5 * head_dim**-0.5)
    stored, meant = paged(random(seed + 1, num_blocks, 2, kv_heads, kv_block_size, head_dim), kv_format)
    spare = torch.ones(num_blocks, dtype=torch.bool)
    for s in slices:
        spare[torch.from_numpy(s.blocks.astype(np.int64))] = False
        tail = s.num_keys % kv_block_size
        if tail and stored.is_floating_point():
            stored[int(s.blocks[(s.num_keys - 1) // kv_block_size]), :, :, tail:] = float("nan")
    stored[spare] = float("nan") if stored.is_floating_point() else 255
    softcap = 2.0 if seed % 3 == 1 else 0.0
    sinks = random(seed + 2, heads, scale=3) if seed % 2 else None
    return q, stored, plan, softcap, sinks, attended(q, meant.nan_to_num(), slices, window, softcap, sinks)


@real_sets
@settings(max_examples=some_draws(60), deadline=None)
@given(sweeps())
def test_attention_fp32(case):
    check_attention(case, torch.float32, "float32", 2e-5)


@real_sets
@pytest.mark.parametrize("window", [None, 1, 7, 40])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(12, 12, 32), (4, 1, 64)])
def test_tokens_of_whole_texts_see_keys_on_both_sides(heads, kv_heads, head_dim, window, instruction_set):
    """The C++ kernels and torch agree where some keys of the last block belong to no token."""
    sequences = [(1, 0, False), (2, 0, False), (16, 0, False), (77, 0, False), (130, 0, False), (33, 0, False)]
    slices, _, num_blocks = laid_out(0, sequences, 16, 3)
    plan = plan_attention(SweepTables.of(slices), [], kv_block_size=16, key_bytes=64, window=window, causal=False)
    q = random(1, sum(count for count, *_ in sequences), heads, head_dim, scale=1.5 * head_dim**-0.5)
    kv = random(2, num_blocks, 2, kv_heads, 16, head_dim)
    expected = attended(q, kv, slices, window, causal=False)
    made = kernels.attention_plan(plan, kv_heads, heads // kv_heads, 16, head_dim * 4, instruction_set)
    torch.testing.assert_close(kernels.attention(q, kv, made).double(), expected, atol=2e-5, rtol=2e-5)
    operands = AttentionOperands(heads, kv_heads, head_dim, 16, torch.float32, KVFormat.of("float32"))
    prepared = torch_attention.prepare_attention(plan, operands, torch.device("cpu"))
    of_torch = torch_attention.paged_attention(q, kv, prepared)
    torch.testing.assert_close(of_torch.double(), expected, atol=2e-5, rtol=2e-5)


def test_keys_of_blocks_that_only_seem_to_lie_together():
    """From the first key to the sixteenth it is as far as if all lay one after the other."""
    heads, head_dim, kv_block_size, window = 8, 64, 8, 20
    table = np.array([4, 9, 1, 5, 8, 6], dtype=np.int32)
    for first in range(1, 7):  # where the window begins in a block
        slices = [SequenceSlice(1, kv_block_size * len(table) - 1 - first, table)]
        plan = plan_attention(
            SweepTables.of(slices), [], kv_block_size=kv_block_size, key_bytes=head_dim * 2, window=window
        )
        q = random(first, 1, heads, head_dim, dtype=torch.bfloat16, scale=1.5 * head_dim**-0.5)
        stored, meant = paged(random(9, 10, 2, 1, kv_block_size, head_dim), "bfloat16")
        got = kernels.attention(q, stored, kernels.attention_plan(plan, 1, heads, kv_block_size, head_dim * 2))
        torch.testing.assert_close(got.double(), attended(q, meant, slices, window), atol=0.015, rtol=0.015)


# Heads of Gemma 4: 256 values in layers with a window and 512 in the others, and its numbers of heads.
@pytest.mark.parametrize("kv_format", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "window"),
    [(8, 1, 256, 40), (8, 1, 512, None), (16, 8, 256, 40), (16, 2, 512, None), (32, 4, 512, None), (16, 1, 512, None)],
)
def test_attention_of_large_heads(heads, kv_heads, head_dim, window, kv_format, instruction_set):
    slow = instruction_set in kernels.plain_twins()
    if slow and kv_format == "float32":
        pytest.skip("the plain twins are for products of bf16")
    dtype = torch.float32 if kv_format == "float32" else torch.bfloat16
    prompt = 20 if slow else 130
    sequences = [(1, 200, False), (1, 15, False), (40, 33, False), (1, 64, True), (7, 0, True), (prompt, 0, False)]
    case = (5, sequences, window, (heads, kv_heads), head_dim, 16, 5)
    check_attention(case, dtype, kv_format, 2e-5 if dtype == torch.float32 else 0.02)


@examples(60, sweeps())
def test_attention_bf16(case):
    # Softmax weights are rounded to bf16 where pairs are multiplied, and so is the result.
    check_attention(case, torch.bfloat16, "bfloat16", 0.015)


@real_sets
@settings(max_examples=some_draws(25), deadline=None)
@given(sweeps())
def test_attention_fp16(case):
    check_attention(case, torch.float16, "float16", 2e-3)


PACKINGS = tuple(KV_CODE_BITS)


@real_sets
@settings(max_examples=some_draws(30), deadline=None)
@given(sweeps(), st.sampled_from(PACKINGS))
def test_attention_over_packed_kv_in_fp32(case, packing):
    check_attention(case, torch.float32, packing, 5e-5)


@examples(60, sweeps(), st.sampled_from(PACKINGS))
def test_attention_over_packed_kv_in_bf16(case, packing):
    # Codes are exact; softmax weights times scales are rounded to bf16, and minimums come on top in fp32.
    check_attention(case, torch.bfloat16, packing, 0.03)


@pytest.mark.parametrize("kv_format", ["float32", "bfloat16", *PACKINGS])
def test_a_long_context_is_cut_into_parts_and_put_together(kv_format):
    dtype = torch.float32 if kv_format == "float32" else torch.bfloat16
    case = (0, [(1, 5000, False), (1, 1024, False), (1, 1023, False), (1, 0, False)], None, (8, 2), 64, 16, 3)
    check_attention(case, dtype, kv_format, 2e-5 if dtype == torch.float32 else 0.01)


@pytest.mark.parametrize(
    ("packing", "head_dim", "group", "window"),
    some_of(
        itertools.product(PACKINGS, (64, 128, 192, 256, 512), (1, 3, 4, 7, 8), (None, 40)), 12, "decode over packed KV"
    ),
)
def test_decode_over_packed_kv(packing, head_dim, group, window, instruction_set):
    """One query a sequence, and few rows of a tail after a shared prefix; nothing but the result is rounded to bf16."""
    if instruction_set in kernels.plain_twins() and head_dim % 128 == 0:
        pytest.skip("some of them are enough for the slow ones")
    lengths = [0, 1, 15, 16, 31, 62, 63, 64, 65, 200, 1100]
    sequences = [(1, cached, i % 2 == 1) for i, cached in enumerate(lengths)]
    for prefix_blocks, chosen in ((0, [(q, c, False) for q, c, _ in sequences]), (5, sequences)):
        case = (prefix_blocks, chosen, window, (3 * group, 3), head_dim, 16, head_dim + group)
        check_attention(case, torch.bfloat16, packing, 0.008)


@pytest.mark.parametrize("kv_format", ["float32", "bfloat16", *PACKINGS])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("what", ["scale", "minimum", "both"])
def test_what_is_no_number_stays_in_its_sequence(kv_format, head_dim, part, what):
    """Of one key's K or V: packed, of one group of it."""
    dtype = torch.float32 if kv_format == "float32" else torch.bfloat16
    slices, _, num_blocks = laid_out(0, [(1, 90, False), (1, 70, False), (1, 130, False)], 16, 5)
    kv, _ = paged(random(1, num_blocks, 2, 2, 16, head_dim), kv_format)
    q = random(2, 3, 8, head_dim, dtype=dtype, scale=head_dim**-0.5)
    plan = plan_attention(SweepTables.of(slices), [], kv_block_size=16, key_bytes=256)
    made = kernels.attention_plan(plan, 2, 4, 16, kv.shape[-1] * kv.element_size())
    bits = KVFormat.of(kv_format).bits
    before = kernels.attention(q, kv, made, bits=bits)
    row = kv[int(slices[1].blocks[2]), part, 0, 3]
    if kv_format in PACKINGS:
        table = row[code_bytes(head_dim, bits) :].view(torch.float16)  # (scale, minimum) of each group
        table[:2][{"scale": slice(0, 1), "minimum": slice(1, 2), "both": slice(0, 2)}[what]] = math.nan
    else:
        row[0] = math.nan
    got = kernels.attention(q, kv, made, bits=bits)
    assert got[1, :4, : min(head_dim, 64) if part and kv_format in PACKINGS else 1].isnan().all()
    if not part:
        assert got[1, :4].isnan().all()
    assert torch.equal(got[1, 4:], before[1, 4:])
    assert torch.equal(got[[0, 2]], before[[0, 2]])


@pytest.mark.parametrize("packing", PACKINGS)
def test_decode_over_packed_kv_with_numbers_of_any_size(packing):
    """Queries that are zero, shares that are far apart, groups that are one value repeated."""
    slices, _, num_blocks = laid_out(0, [(1, 200, False)] * 4, 16, 5)
    kv = random(1, num_blocks, 2, 1, 16, 128)
    kv[:, 1, :, ::3, 64:] *= 1e-4
    kv[:, 1, :, 1::3, :64] = 0.5
    kv[int(slices[2].blocks[5]), 0] *= 40
    stored, meant = paged(kv, packing)
    q = random(2, 4, 4, 128, dtype=torch.bfloat16, scale=0.1)
    q[0] = 0
    q[1, :, 1:] *= 1e-30
    q[3] *= 100
    plan = plan_attention(SweepTables.of(slices), [], kv_block_size=16, key_bytes=256)
    made = kernels.attention_plan(plan, 1, 4, 16, stored.shape[-1])
    got = kernels.attention(q, stored, made, bits=KV_CODE_BITS[packing])
    torch.testing.assert_close(got.double(), attended(q, meant, slices, None), atol=0.008, rtol=0.008)


@real_sets
@pytest.mark.parametrize("kv_format", ["float32", "bfloat16", "float16"])
def test_few_heads_of_a_group_have_the_bits_of_many(kv_format):
    """Up to eight rows are multiplied from the rows of K and V as they lie, more of them from packed tiles."""
    lengths = (1, 65, 300)
    for head_dim, group in ((64, 1), (64, 7), (128, 4), (96, 8), (40, 5)):
        kv = random(head_dim, 30, 2, 2, 16, head_dim, dtype=getattr(torch, kv_format))
        q = random(group, len(lengths), 2, 16, head_dim, scale=head_dim**-0.5)
        slices = [SequenceSlice(1, n - 1, np.arange(-(-n // 16), dtype=np.int32) + i) for i, n in enumerate(lengths)]
        plan = plan_attention(
            SweepTables.of(slices), [], kv_block_size=16, key_bytes=2 * head_dim * kv.element_size(), window=None
        )

        def attention(heads, plan=plan, kv=kv, q=q, head_dim=head_dim):
            made = kernels.attention_plan(plan, 2, heads, 16, head_dim * kv.element_size())
            rows = q[:, :, :heads].reshape(len(lengths), 2 * heads, head_dim).contiguous()
            return kernels.attention(rows, kv, made).view(len(lengths), 2, heads, head_dim)

        assert torch.equal(attention(group), attention(16)[:, :, :group])


def test_a_result_does_not_depend_on_the_batch_nor_on_threads():
    """Bit by bit: what a resumed job computes is what it would have computed."""
    slices, _, num_blocks = laid_out(0, [(1, 1500, False), (1, 70, False), (90, 300, False)], 16, 5)
    kv = random(1, num_blocks, 2, 2, 16, 64, dtype=torch.bfloat16)
    q = random(2, 92, 8, 64, dtype=torch.bfloat16)

    def attention(chosen, queries):
        plan = plan_attention(SweepTables.of(chosen), [], kv_block_size=16, key_bytes=256)
        return kernels.attention(queries, kv, kernels.attention_plan(plan, 2, 4, 16, 128))

    together = attention(slices, q)
    before = kernels._kernels.num_threads()
    try:
        for threads in (1, 2, 3):
            kernels._kernels.set_num_threads(threads)
            assert torch.equal(attention(slices, q), together)
            row = 0
            for s in slices:
                queries = q[row : row + s.num_queries]
                assert torch.equal(attention([s], queries), together[row : row + s.num_queries])
                row += s.num_queries
    finally:
        kernels._kernels.set_num_threads(before)


def test_no_key_in_sight_gives_zeros():
    plan = AttentionPlan((), (DecodeGroup(0, 1, np.zeros((1, 1), np.int32), np.array([3]), np.array([3])),))
    kv = random(0, 1, 2, 1, 16, 32)
    got = kernels.attention(random(1, 1, 1, 32), kv, kernels.attention_plan(plan, 1, 1, 16, 128))
    assert torch.equal(got, torch.zeros_like(got))


@real_sets
def test_very_large_scores():
    """The softmax carries its maximum along: one key takes all."""
    kv = random(0, 8, 2, 1, 16, 64)
    q = kv[4, 0, 0, 7].reshape(1, 1, 64) * 1000
    plan = plan_attention(
        SweepTables.of([SequenceSlice(1, 127, np.arange(8, dtype=np.int32))]), [], kv_block_size=16, key_bytes=256
    )
    got = kernels.attention(q, kv, kernels.attention_plan(plan, 1, 1, 16, 128))
    torch.testing.assert_close(got[0, 0], kv[4, 1, 0, 7])


@real_sets
def test_queries_may_be_a_view():
    kv = random(0, 2, 2, 2, 16, 32)
    whole = random(1, 20, 6, 32)
    plan = AttentionPlan((), sequences=SequenceItems.of_one(0, 20, np.arange(2, dtype=np.int32), 4))
    made = kernels.attention_plan(plan, 2, 2, 16, 128)
    assert torch.equal(kernels.attention(whole[:, :4], kv, made), kernels.attention(whole[:, :4].clone(), kv, made))


def test_a_shared_prefix_with_many_rows():
    blocks = np.arange(6, dtype=np.int32)
    tail = np.arange(6, 9, dtype=np.int32)[:, None]
    plan = AttentionPlan(
        (SharedItem(0, 3, blocks),),
        (DecodeGroup(0, 3, tail, np.array([1, 16, 5]), np.zeros(3, np.int64)),),
    )
    kv = random(0, 9, 2, 1, 16, 64)
    q = random(1, 3, 16, 64, scale=0.2)
    got = kernels.attention(q, kv, kernels.attention_plan(plan, 1, 16, 16, 256))
    slices = [SequenceSlice(1, 96 + n - 1, np.append(blocks, t)) for n, t in zip((1, 16, 5), tail[:, 0], strict=True)]
    torch.testing.assert_close(got.double(), attended(q, kv, slices, None), atol=2e-5, rtol=2e-5)


# Linear layers.

linear_shapes = st.tuples(
    st.one_of(st.integers(1, 30), st.sampled_from([64, 97, 600])),
    st.one_of(st.sampled_from([1, 31, 32, 33, 64, 200]), st.integers(1, 130)),
    st.one_of(st.sampled_from([1, 31, 32, 64, 576, 2100]), st.integers(1, 200)),
)


@examples(
    60,
    linear_shapes,
    st.sampled_from(DTYPES),
    st.sampled_from([None, "relu", "gelu", "gelu_tanh", *kernels.GATED]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.integers(0, 2**20),
)
def test_linear(shape, dtype, activation, with_bias, with_residual, packed, seed):
    rows, columns, depth = shape
    out_columns = columns
    if activation in kernels.GATED:
        columns *= 2
    x = random(seed, rows, depth, dtype=dtype)
    w = random(seed + 1, columns, depth, dtype=dtype, scale=depth**-0.5)
    bias = random(seed + 2, columns, dtype=dtype) if with_bias else None
    residual = random(seed + 3, rows, out_columns, dtype=dtype) if with_residual else None
    expected = x.double() @ w.double().T
    if with_bias:
        expected += bias.double()
    slack = gated_slack(expected) if activation in kernels.GATED else 1.0
    expected = activated(expected, activation)
    if with_residual:
        expected += residual.double()
    weight = kernels.pack(w, gated=activation in kernels.GATED) if packed else w
    got = kernels.linear(x, weight, bias, activation=activation, residual=residual)
    assert got.dtype == dtype
    off = (got.double() - expected).abs()
    assert (off <= ROUNDING[dtype] * (4 * slack + 2 * expected.abs())).all(), off.max()


def gated_slack(sums):
    """By how much more the product of two sums may be off than one sum [rows, 2 * columns].

    The error of each, times the other.

    An activation passes on at most 1.13 times the error of its argument (the steepest slope of GELU) and is itself at
    most |gate|.
    """
    gate, up = sums.abs().chunk(2, dim=-1)
    return 2 + 1.13 * up + gate  # gpt-oss's adds 1 to what the gate is multiplied with


def activated(x, activation):
    """In torch, of x [rows, columns]."""
    gelu_tanh = functools.partial(F.gelu, approximate="tanh")
    gate, up = x.chunk(2, dim=-1) if activation in kernels.GATED else (x, None)
    if activation == "swiglu_oai_mul":
        gate, up = gate.clamp(max=7), up.clamp(-7, 7) + 1
        return gate * torch.sigmoid(1.702 * gate) * up
    gate = {None: lambda y: y, "relu": F.relu, "gelu": F.gelu, "gelu_tanh": gelu_tanh, "silu_mul": F.silu,
            "gelu_tanh_mul": gelu_tanh, "gelu_mul": F.gelu}[activation](gate)  # fmt: skip
    return gate if up is None else gate * up


def test_linear_of_views_into_views():
    x, w = random(0, 9, 100)[:, 10:74], random(1, 50, 80)[:, 5:69]
    out = torch.full((9, 70), 7.0)
    kernels.linear(x, w, out=out[:, 3:53])
    torch.testing.assert_close(out[:, 3:53].double(), x.double() @ w.double().T, atol=1e-4, rtol=1e-5)
    assert (out[:, :3] == 7).all() and (out[:, 53:] == 7).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_those_beside_it(dtype):
    x, w = random(0, 300, 576, dtype=dtype), random(1, 130, 576, dtype=dtype)
    packed = kernels.pack(w)
    whole = kernels.linear(x, packed)
    for rows in (slice(0, 1), slice(7, 12), slice(100, 230)):
        assert torch.equal(kernels.linear(x[rows], packed), whole[rows])
        assert torch.equal(kernels.linear(x[rows], w), whole[rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("depth", [40, 96, 2120])
def test_a_row_is_the_same_alone_and_in_any_number(depth, dtype):
    x, w = random(0, 70, depth, dtype=dtype), random(1, 48, depth, dtype=dtype, scale=depth**-0.5)
    packed = kernels.pack(w)
    whole = kernels.linear(x, packed)
    for rows in range(1, 71):
        assert torch.equal(kernels.linear(x[:rows], packed), whole[:rows])
        assert torch.equal(kernels.linear(x[rows - 1 : rows], packed if rows % 2 else w), whole[rows - 1 : rows])


@pytest.mark.parametrize("few", [0, 33, 70])
def test_fp32_has_all_its_bits_with_weights_of_16_bits_too(few, instruction_set):
    """Errors are those of sums in fp32, of numbers of very different sizes, whichever columns have 16 bits.

    There are enough rows for a thread to multiply all columns, some of which it prepares beside others.
    """
    x, w = random(0, 64 * kernels.num_threads() + 5, 1100), random(1, 70, 1100)
    x *= 2.0 ** torch.randint(-40, 40, x.shape, generator=torch.Generator().manual_seed(2))
    w[:few] = w[:few].bfloat16().float()
    for weight in (w, kernels.pack(w)):
        got = kernels.linear(x, weight)
        size = x.abs().double() @ w.abs().double().T
        assert ((got.double() - x.double() @ w.double().T).abs() <= 8e-7 * size).all()


def test_what_is_no_number_in_fp32_stays_in_its_row_and_its_column(instruction_set):
    x, w = random(0, 40, 100), random(1, 70, 100)
    expected = kernels.linear(x, w)
    x[3, 99], x[30, 0], w[5, 7], w[60, 50] = torch.nan, torch.inf, torch.nan, -torch.inf
    rows, columns = torch.ones(40, dtype=bool), torch.ones(70, dtype=bool)
    rows[[3, 30]], columns[[5, 60]] = False, False
    for weight in (w, kernels.pack(w)):
        got = kernels.linear(x, weight)
        assert torch.equal(got[rows][:, columns], expected[rows][:, columns])
        assert not got[~rows].isfinite().any() and not got[:, ~columns].isfinite().any()


@examples(
    40,
    st.tuples(st.integers(1, 100), st.integers(1, 70), st.one_of(st.integers(1, 200), st.integers(1000, 1300))),
    st.sampled_from([*DTYPES, torch.int8]),
    st.tuples(st.integers(0, 99), st.integers(1, 30)),
    st.sampled_from([0, 1, 2, 7]),
    st.booleans(),
    st.integers(1, 3),
    st.integers(0, 2**20),
)
def test_rows_in_tiles(shape, dtype, part, apart, packed, threads, seed):
    """Any number of rows of x, alone or among others, has the right results, whatever tiles they are put into."""
    rows, columns, depth = shape
    x_dtype = torch.float32 if dtype == torch.int8 else dtype
    x = random(seed, rows, depth + apart, dtype=x_dtype)[:, :depth]
    w = random(seed + 1, columns, depth, dtype=x_dtype, scale=depth**-0.5)
    w = int8.quantize(w) if dtype == torch.int8 else w
    weight = kernels.pack(w) if packed else w
    some = slice(part[0] % rows, part[0] % rows + part[1])
    before = kernels.num_threads()
    try:
        kernels._kernels.set_num_threads(threads)
        whole = kernels.linear(x, weight)
        kernels._kernels.set_num_threads(1)
        assert torch.equal(kernels.linear(x[some], weight), whole[some])
    finally:
        kernels._kernels.set_num_threads(before)
    if dtype == torch.int8:
        assert torch.equal(whole, int8.linear(x, w))
    else:
        expected = x.double() @ w.double().T
        torch.testing.assert_close(whole.double(), expected, atol=4 * ROUNDING[dtype], rtol=2 * ROUNDING[dtype])


@pytest.mark.parametrize("stride", [576, 580, 2048])
def test_rows_may_lie_apart(stride):
    """By a multiple of a page, for one: they are put in order first then."""
    x = random(0, 50, stride, dtype=torch.bfloat16)[:, :576]
    w = kernels.pack(random(1, 40, 576, dtype=torch.bfloat16, scale=1 / 24))
    assert torch.equal(kernels.linear(x, w), kernels.linear(x.contiguous(), w))


def test_many_rows_of_a_large_depth():
    """More than are put in order at once."""
    x, w = random(0, 4300, 2080, dtype=torch.bfloat16), random(1, 8, 2080, dtype=torch.bfloat16, scale=2080**-0.5)
    residual, out = random(2, 4300, 20)[:, :8].bfloat16(), torch.zeros(4300, 11, dtype=torch.bfloat16)
    kernels.linear(x, kernels.pack(w), residual=residual, out=out[:, :8])
    expected = (x.float() @ w.float().T).double() + residual.double()
    torch.testing.assert_close(out[:, :8].double(), expected, atol=0.02, rtol=2**-7)
    assert not out[:, 8:].any()


@pytest.mark.parametrize(
    "dtype, depth", [(torch.float32, 520), (torch.float32, 2120), (torch.bfloat16, 1040), (torch.int8, 2080)]
)
@pytest.mark.parametrize("threads", [1, 3])
def test_rows_that_go_in_parts_have_the_bits_of_few(dtype, depth, threads):
    """A thread packs a mebibyte of rows at a time, or fewer that fit in its cache."""
    x_dtype = torch.float32 if dtype == torch.int8 else dtype
    x, w = random(0, 1100, depth, dtype=x_dtype), random(1, 8, depth, dtype=x_dtype, scale=depth**-0.5)
    residual = random(2, 1100, 8, dtype=x_dtype)
    packed = kernels.pack(int8.quantize(w) if dtype == torch.int8 else w)
    before = kernels.num_threads()
    try:
        kernels._kernels.set_num_threads(threads)
        whole = kernels.linear(x, packed, residual=residual)
        for some in (slice(0, 20), slice(470, 600), slice(1080, 1100)):
            assert torch.equal(kernels.linear(x[some], packed, residual=residual[some]), whole[some])
    finally:
        kernels._kernels.set_num_threads(before)


@pytest.mark.parametrize("kind", ["bf16", "i8", "u8"])
@pytest.mark.parametrize("rows", [1, 7, 16])
def test_products_in_tile_registers(kind, rows, instruction_set):
    """The product that the kernels above take an instruction to do: C [rows, 16] += a [rows, depth] b [depth, 16].

    b is in pairs or fours.
    """
    together = {"bf16": 2, "i8": 4, "u8": 4}[kind]
    rng = np.random.default_rng(rows)
    if kind == "bf16":
        a, b = (torch.from_numpy(rng.standard_normal((n, 32))).bfloat16() for n in (rows, 16))
        before = torch.from_numpy(rng.standard_normal((17, 16))).float()
    else:
        low, high = (0, 256) if kind == "u8" else (-128, 128)
        a = torch.from_numpy(rng.integers(low, high, (rows, 64))).to(torch.uint8 if kind == "u8" else torch.int8)
        b = torch.from_numpy(rng.integers(-128, 128, (16, 64))).to(torch.int8)
        before = torch.from_numpy(rng.integers(-1000, 1000, (17, 16))).int()
    c = before.clone()
    number = ["bf16", "i8", "u8"].index(kind)
    if not kernels._kernels.tile_dot(number, rows, a.data_ptr(), b.data_ptr(), c.data_ptr()):
        assert "amx" not in instruction_set
        return
    columns = b.double().view(16, 16, together).transpose(1, 2).reshape(16 * together, 16)
    expected = before[:rows].double() + a.double() @ columns
    tolerance = 1e-5 if kind == "bf16" else 0
    torch.testing.assert_close(c[:rows].double(), expected, atol=tolerance, rtol=tolerance)
    assert torch.equal(c[rows:], before[rows:])


@pytest.mark.parametrize("sizes", ["all", "tiny products", "tiny operands", "tiny sums", "huge products", "not finite"])
def test_products_in_tile_registers_are_those_of_the_plain_twin(sizes, instruction_set):
    """Bit for bit, whatever the numbers: both take what is below 2^-126 for zero, and round a sum once."""
    if instruction_set != "amx_plain" or "amx" not in kernels.instruction_sets():
        pytest.skip("compares the hardware with its twin")
    a, b, c = random(1, 16, 32), random(2, 16, 32), random(3, 16, 16)
    if sizes == "all":
        a, b, c = (x * torch.exp(20 * random(seed, *x.shape)) for seed, x in enumerate((a, b, c), 4))
    elif sizes == "tiny products":
        a, b, c = a * 1e-20, b * 1e-20, c * 1e-39
    elif sizes == "tiny operands":
        a, b, c = a * 1e-39, b * 1e30, c * 1e-39
    elif sizes == "tiny sums":
        a, b, c = a * 1e-19, b * 1e-19, c * 1e-38
    elif sizes == "huge products":
        a, b = a * 1e20, b * 1e20
    else:
        a[0, 3], a[1, 4], a[2, 5], b[3, 7], c[4, 4], c[5, 5] = (
            math.inf,
            math.nan,
            -math.inf,
            math.inf,
            math.nan,
            math.inf,
        )
        a[6] = 0
    a, b = a.bfloat16(), b.bfloat16()
    of_each = []
    for name in ("amx", "amx_plain"):
        out = c.clone()
        with kernels.using(name):
            assert kernels._kernels.tile_dot(0, 16, a.data_ptr(), b.data_ptr(), out.data_ptr())
        of_each.append(out)
    numbers = [out.masked_fill(out.isnan(), 0).view(torch.int32) for out in of_each]
    assert torch.equal(of_each[0].isnan(), of_each[1].isnan())
    assert torch.equal(*numbers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_in_tile_registers_have_the_bits_of_the_plain_twin(dtype, instruction_set):
    if instruction_set != "amx_plain" or "amx" not in kernels.instruction_sets():
        pytest.skip("compares the hardware with its twin")
    x, weight = random(1, 70, 1100, dtype=dtype), random(2, 40, 1100, dtype=dtype)
    of_each = []
    for name in ("amx", "amx_plain"):
        with kernels.using(name):
            of_each.append(kernels.linear(x, weight, out_dtype=torch.float32))
    assert torch.equal(*of_each)


# Weights of 8 bits: bit for bit what torch makes of them, on every instruction set.

ACTIVATIONS = [None, "relu", "gelu", "gelu_tanh", *kernels.GATED]


@examples(
    40,
    linear_shapes,
    st.sampled_from(DTYPES),
    st.sampled_from(ACTIVATIONS),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.integers(0, 2**20),
)
def test_linear_of_8_bits(shape, dtype, activation, with_bias, with_residual, packed, wide, seed):
    rows, columns, depth = shape
    gated = activation in kernels.GATED
    x = random(seed, rows, depth, dtype=dtype)
    w = int8.quantize(random(seed + 1, columns * (1 + gated), depth, scale=2 * depth**-0.5))
    bias = random(seed + 2, len(w), dtype=dtype) if with_bias else None
    residual = random(seed + 3, rows, columns, dtype=dtype) if with_residual else None
    weight = kernels.pack(w, gated=gated) if packed else w
    options = {"activation": activation, "residual": residual, "out_dtype": torch.float32 if wide else dtype}
    got, expected = kernels.linear(x, weight, bias, **options), int8.linear(x, w, bias, **options)
    assert got.dtype == options["out_dtype"] and torch.equal(got, expected)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_of_8_bits_at_all_sizes(activation, instruction_set):
    """Of results from tiny to large, and of both signs."""
    w = int8.quantize(torch.eye(64).repeat(2, 1) if activation in kernels.GATED else torch.eye(64))
    x = torch.cat([random(i, 8, 64, scale=4.0**i) for i in range(-6, 7)])
    got = kernels.linear(x, kernels.pack(w, gated=activation in kernels.GATED), activation=activation)
    assert torch.equal(got, int8.linear(x, w, activation=activation))
    assert got.isfinite().all()


def test_rows_of_8_bits_that_are_no_numbers_are_alone():
    x, w = random(0, 9, 70), int8.quantize(random(1, 40, 70))
    expected = int8.linear(x, w)
    x[2, 69], x[3, 0], x[5] = torch.nan, -torch.inf, 0
    x[7] *= 1e-36  # smaller than what is told from zero
    for weight in (w, kernels.pack(w)):
        got = kernels.linear(x, weight)
        assert got[[2, 3]].isnan().all() and not got[[5, 7]].any()
        assert torch.equal(got[[0, 1, 4, 6, 8]], expected[[0, 1, 4, 6, 8]])


@pytest.mark.parametrize("codes", [-128, -127, 127])
def test_sums_of_8_bits_do_not_overflow(codes):
    """Nothing is cut off where all products are as large as they get; a checkpoint may have codes of -128."""
    depth = 4096
    x = torch.ones(17, depth) * torch.tensor([1.0, -1.0]).repeat(9)[:17, None]
    w = int8.join(torch.full((40, depth), codes, dtype=torch.int8), torch.full((40, 1), 0.5))
    expected = x[:, :1] * (127 * codes * depth * 0.5 / 127)
    for weight in (w, kernels.pack(w)):
        torch.testing.assert_close(kernels.linear(x, weight), expected.expand(17, 40), rtol=1e-6, atol=0)


@pytest.mark.parametrize("depth", [40, 96, 1120])
def test_a_row_of_8_bits_is_the_same_alone_and_in_any_number(depth):
    x, w = random(0, 70, depth, dtype=torch.bfloat16), int8.quantize(random(1, 48, depth, scale=depth**-0.5))
    packed = kernels.pack(w)
    whole = int8.linear(x, w)
    for rows in (1, 2, 15, 16, 17, 33, 70):
        assert torch.equal(kernels.linear(x[:rows], packed), whole[:rows])
        assert torch.equal(kernels.linear(x[rows - 1 : rows], packed if rows % 2 else w), whole[rows - 1 : rows])


def test_linear_of_8_bits_of_views_into_views():
    """More rows of a large depth than are made codes at once, too."""
    x, w = random(0, 2100, 2110)[:, 10:2088], int8.quantize(random(1, 8, 2078))
    residual, out = random(2, 2100, 20)[:, :8], torch.zeros(2100, 11)
    kernels.linear(x, kernels.pack(w), residual=residual, out=out[:, :8])
    assert torch.equal(out[:, :8], int8.linear(x, w, residual=residual)) and not out[:, 8:].any()


def test_nothing_to_do():
    w = kernels.pack(random(0, 8, 16))
    eight = kernels.pack(int8.quantize(random(0, 8, 16)))
    assert kernels.linear(torch.empty(0, 16), eight).shape == (0, 8)
    assert kernels.linear(torch.empty(0, 16), w).shape == (0, 8)
    assert kernels.norm(torch.empty(0, 16), torch.ones(16), None, 1e-5).shape == (0, 16)
    assert kernels.argmax(torch.empty(0, 16))[0].shape == (0,)


def test_logits_are_fp32():
    x, w = random(0, 5, 64, dtype=torch.bfloat16), random(1, 1000, 64, dtype=torch.bfloat16)
    got = kernels.linear(x, w, out_dtype=torch.float32)
    torch.testing.assert_close(got.double(), x.double() @ w.double().T, atol=1e-4, rtol=1e-5)


# Around them.


@real_sets
@settings(max_examples=some_draws(40), deadline=None)
@given(
    st.integers(1, 40), st.one_of(st.integers(1, 70), st.just(576)), st.sampled_from(DTYPES), st.booleans(),
    st.integers(0, 2**20),
)  # fmt: skip
def test_norms(rows, columns, dtype, layer_norm, seed):
    x, weight = random(seed, rows, columns, dtype=dtype, scale=3) + 1, random(seed + 1, columns, dtype=dtype)
    bias = random(seed + 2, columns, dtype=dtype) if layer_norm else None
    got = kernels.norm(x, weight, bias, 1e-5)
    wide = x.double()
    if layer_norm:
        expected = F.layer_norm(wide, (columns,), weight.double(), bias.double(), 1e-5)
    else:
        expected = F.rms_norm(wide, (columns,), weight.double(), 1e-5)
    # One column has a variance of zero: what is left of the mean is multiplied by 1 / sqrt(eps).
    slack = 3e-4 if layer_norm and columns < 4 else 4e-6
    torch.testing.assert_close(got.double(), expected, atol=2 * ROUNDING[dtype] + slack, rtol=2 * ROUNDING[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_of_some_columns_is_in_place(dtype):
    """Norms write into some columns of a wider tensor, as queries lie within queries, keys and values."""
    x, weight = random(1, 5, 96, dtype=dtype), random(2, 40, dtype=dtype)
    expected = x.clone()
    expected[:, 16:56] = kernels.norm(x[:, 16:56].contiguous(), weight, None, 1e-5)
    kernels.norm(x[:, 16:56], weight, None, 1e-5, x[:, 16:56])
    assert torch.equal(x, expected)


@real_sets
@pytest.mark.parametrize(
    ("dtype", "head_dim", "kv_format", "family"),
    covering(
        itertools.product(
            DTYPES,
            (8, 40, 64, 256, 512),
            ("own", *PACKINGS, "none", "none, rotated"),
            ("rope", "learned", "qk_norm"),
        ),
        60,
        "rotary and store",
    ),
)
def test_rotary_and_store(dtype, head_dim, kv_format, family):
    tokens, heads, kv_heads, kv_block_size, scale = 21, 6, 2, 16, head_dim**-0.5
    qkv = random(0, tokens, (heads + 2 * kv_heads) * head_dim + 3, dtype=dtype)[:, :-3]
    positions = torch.from_numpy(np.random.default_rng(0).integers(0, 50, tokens))
    angles = torch.outer(torch.arange(50.0), 1.0 / 100 ** (torch.arange(head_dim // 2) / head_dim))
    rope = None if family == "learned" else (angles.cos(), angles.sin())
    norms = tuple(random(i, head_dim, dtype=dtype) for i in (5, 6)) if family == "qk_norm" else None
    rotated = kv_format in ("int4", "int5", "none, rotated")
    rotation = torch.linalg.qr(random(9, head_dim, head_dim))[0].contiguous() if rotated else None
    slots = torch.from_numpy(np.random.default_rng(1).permutation(4 * kv_block_size)[:tokens])
    kv, bits = None, KV_CODE_BITS.get(kv_format, 0)
    if kv_format == "own":
        kv = torch.zeros(4, 2, kv_heads, kv_block_size, head_dim, dtype=dtype)
    elif bits:
        width = KVFormat.of(kv_format).row_bytes(head_dim)
        kv = torch.zeros(4, 2, kv_heads, kv_block_size, width, dtype=torch.uint8)
    q, k, v = kernels.rotary_store(
        qkv, heads, kv_heads, head_dim, scale=scale, rope=rope, positions=positions, norms=norms, eps=1e-6,
        rotation=rotation, kv=kv, slots=slots, bits=bits,
    )  # fmt: skip

    wide = (
        qkv.double().view(tokens, -1, head_dim) if qkv.is_contiguous() else qkv.double().reshape(tokens, -1, head_dim)
    )
    parts = list(wide.split((heads, kv_heads, kv_heads), 1))
    for i in range(2):
        if norms:
            parts[i] = F.rms_norm(parts[i], (head_dim,), norms[i].double(), 1e-6)
        if rope:
            cos, sin = (t.double()[positions][:, None] for t in rope)
            a, b = parts[i].chunk(2, -1)
            parts[i] = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
        if rotation is not None:
            parts[i] = parts[i] @ rotation.double()
    parts[0] = parts[0] * scale
    tolerance = {"atol": 4 * ROUNDING[dtype], "rtol": 2 * ROUNDING[dtype]}
    torch.testing.assert_close(q.double(), parts[0], **tolerance)
    if kv is not None:
        stored = kv.transpose(2, 3)  # [blocks, 2, kv_block_size, kv_heads, width]
        k, v = (
            stored[slots // kv_block_size, 0, slots % kv_block_size],
            stored[slots // kv_block_size, 1, slots % kv_block_size],
        )
        assert int((stored != 0).any(-1).any(-1).sum()) == 2 * tokens
    if bits:
        steps = 2**bits - 1
        for got, meant in ((k, parts[1]), (v, parts[2])):
            groups = meant.split(64, -1)
            bound = torch.cat([(g.amax(-1, True) - g.amin(-1, True)).expand_as(g) / (2 * steps) for g in groups], -1)
            assert (
                (quant.dequantize(got.contiguous(), head_dim, bits=bits).double() - meant).abs() <= bound * 1.05 + 0.01
            ).all()
    else:
        torch.testing.assert_close(k.double(), parts[1], **tolerance)
        assert torch.equal(v.double(), parts[2])


@real_sets
@settings(max_examples=some_draws(60), deadline=None)
@given(
    st.integers(1, 9), st.integers(1, 300), st.sampled_from(DTYPES),
    st.sampled_from(["normal", "tiny", "huge", "flat"]),
    st.integers(0, 2**20),
)  # fmt: skip
def test_packed_groups_are_those_of_the_reference(rows, n, dtype, kind, seed):
    x = random(seed, rows, n)
    x = {"normal": x, "tiny": x * 1e-6, "huge": x * 1e5, "flat": torch.full_like(x, 0.37)}[kind].to(dtype)
    for bits in (4, 5, 8):
        packed, expected = kernels.quantize(x, bits), quant.quantize(x, bits)
        # A code halfway between two may fall to either side.
        same = (packed != expected).float().mean() < 0.02 or (packed != expected).sum() <= 2
        assert same and packed.dtype == expected.dtype
    packed, expected = kernels.quantize(x), quant.quantize(x)
    for out_dtype in DTYPES:
        got = kernels.dequantize(packed, n, torch.empty(rows, n, dtype=out_dtype))
        torch.testing.assert_close(
            got, quant.dequantize(packed, n, dtype=out_dtype), atol=1e-7, rtol=ROUNDING[out_dtype]
        )
    back = kernels.dequantize(packed, n, torch.empty(rows, n)).double()
    meant = x.double().clamp(-65504, 65504)
    for group, b in zip(meant.split(64, -1), back.split(64, -1), strict=True):
        low, high = group.amin(-1, True), group.amax(-1, True)
        bound = (high - low) / 30 + low.abs() * 2**-10 + (high - low) * 2**-10 + 16 * 2**-25
        assert ((b - group).abs() <= bound * 1.001).all()


def groups_of_every_kind(rows, n, seed):
    """Name and numbers [rows, n] of weights that a fit may meet."""
    x = random(seed, rows, n)
    outliers, infinite, spoilt = x.clone(), x.clone(), x.clone()
    outliers[:, ::17] *= 1e3
    infinite[0, 0], infinite[-1, -1] = torch.inf, -torch.inf
    spoilt[rows // 2, n // 2] = torch.nan
    return {
        "normal": x, "long tails": x.pow(3), "outliers": outliers, "tiny": x * 1e-7, "huge": x * 1e5,
        "zeros": torch.zeros(rows, n), "zeros of both signs": torch.where(x > 0, 0.0, -0.0),
        "constant": torch.full((rows, n), 0.37), "ties": x.mul(8).round().mul(0.125),
        "infinities": infinite, "a NaN": spoilt,
    }  # fmt: skip


@real_sets
@settings(max_examples=some_draws(4), deadline=None)
@given(
    st.integers(1, 40), st.integers(1, 200), st.sampled_from(DTYPES),
    st.sampled_from(["equal", "uneven", "one channel"]), st.integers(0, 2**20),
)  # fmt: skip
def test_fitted_groups_are_those_of_the_reference_bit_for_bit(rows, n, dtype, shape, seed):
    importance = {"equal": torch.ones(n), "uneven": random(seed, n).pow(4) + 1e-3, "one channel": torch.ones(n)}[shape]
    if shape == "one channel":
        importance[n // 3] = 1e6
    for name, x in groups_of_every_kind(rows, n, seed).items():
        packed = kernels.quantize(x.to(dtype), importance=importance)
        assert torch.equal(packed, quant.quantize(x.to(dtype), importance=importance)), name


@real_sets
def test_fitted_groups_do_not_depend_on_the_threads():
    x, importance = random(0, 300, 192), random(1, 192).square() + 0.1
    packed = kernels.quantize(x, importance=importance)
    assert torch.equal(packed, torch.cat([kernels.quantize(row, importance=importance) for row in x.split(7)]))


@real_sets
@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_too_large_for_a_cache_are_dequantized_to_the_same_values(dtype):
    rows, n = (17 << 20) // (2048 * dtype.itemsize), 2048
    packed = kernels.quantize(random(0, rows, n))
    memory = torch.zeros(rows * n + 3 * 64, dtype=dtype)
    few = torch.cat([kernels.dequantize(p, n, torch.empty(len(p), n, dtype=dtype)) for p in packed.split(100)])
    for start in (64, 67):  # a whole number of lines of memory into it, and not
        out = memory[start : start + rows * n].view(rows, n)
        assert torch.equal(kernels.dequantize(packed, n, out), few)
        assert not memory[:start].any() and not memory[start + rows * n :].any()
        memory.zero_()


def test_a_nan_spoils_its_group_and_nothing_else():
    x = random(0, 2, 200)
    x[1, 70] = float("nan")
    back = kernels.dequantize(kernels.quantize(x), 200, torch.empty(2, 200))
    assert back[1, 64:128].isnan().all()
    assert back[0].isfinite().all() and back[1, :64].isfinite().all() and back[1, 128:].isfinite().all()


@real_sets
@settings(max_examples=some_draws(40), deadline=None)
@given(
    st.integers(1, 12), st.one_of(st.integers(1, 100), st.integers(1000, 3000), st.just(49152)), st.integers(0, 2**20)
)
def test_argmax(rows, columns, seed):
    logits = random(seed, rows, columns, scale=4)
    logits[0] = logits[0].round()  # ties: the first counts
    logits[-1, : columns // 2] = -torch.inf
    finite = logits.isfinite().all(1)
    index, maximum, lse = kernels.argmax(logits, want_lse=True)
    assert torch.equal(index, torch.from_numpy(logits.numpy().argmax(1)))
    assert torch.equal(maximum[finite], logits.amax(1)[finite]) and maximum[~finite].isnan().all()
    torch.testing.assert_close(lse.double(), logits.double().logsumexp(1), atol=1e-5, rtol=1e-6)
    bad = seed % columns
    logits[0, bad] = [torch.nan, torch.inf, -torch.inf][seed % 3]
    finite[0] = False
    chosen, marked = kernels.argmax_if_finite(logits, -2)
    assert torch.equal(chosen[finite], index[finite]) and (chosen >= 0).all() and (chosen < columns).all()
    assert torch.equal(marked, chosen.where(finite, -2))
    assert torch.equal(reference.argmax_if_finite(logits, -2)[1] == -2, ~finite)


@real_sets
@settings(max_examples=some_draws(40), deadline=None)
@given(st.integers(1, 9), st.integers(1, 700), st.sampled_from([0.01, 0.5, 0.99]), st.integers(0, 2**20))
def test_forbid(rows, columns, share, seed):
    rng = np.random.default_rng(seed)
    words = -(-columns // 32) + int(rng.integers(2))  # masks may go on past the logits
    bits = rng.random((rows, words * 32)) < share
    bits[0, ::2], bits[-1] = True, rng.random() < 0.5
    allowed = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
    wide = random(seed, rows + 2, columns + 5)
    mine = rng.permutation(rows + 2)[:rows]
    expected = wide.clone()
    expected[mine, :columns] = torch.where(
        torch.from_numpy(bits[:, :columns]), wide[mine, :columns], torch.tensor(-torch.inf)
    )
    for compute in (kernels, reference):
        got = wide.clone()
        compute.forbid(got[:, :columns], mine, allowed)
        assert torch.equal(got, expected)


@real_sets
def test_what_is_forbidden_is_never_drawn():
    rng = np.random.default_rng(0)
    allowed = np.zeros((64, 4992), dtype=bool)
    for row in allowed:
        row[rng.choice(4992, rng.integers(1, 5), replace=False)] = True
    logits = random(0, 64, 4992, scale=4) - 60 * torch.from_numpy(allowed)  # by far the least likely ones
    kernels.forbid(logits, np.arange(64), np.packbits(allowed, axis=1, bitorder="little").view(np.int32))
    uniform = rng.random(64)
    uniform[:2] = 0.0, 1 - 2**-53
    for given_ in ({}, {"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.1}, {"temperature": 0.01}, {"temperature": 100.0}):
        for compute in (kernels, reference):
            got = drawn(compute, logits, draws(uniform, **given_))
            assert allowed[np.arange(64), got.numpy()].all(), given_
    assert allowed[np.arange(64), kernels.argmax(logits)[0].numpy()].all()


@real_sets
@settings(max_examples=some_draws(60), deadline=None)
@given(
    st.one_of(st.integers(1, 600), st.just(49152)),
    st.sampled_from([0.2, 1.0, 3.0]),
    st.sampled_from([0, 1, 5, 40, 10**6]),
    st.sampled_from([1.0, 0.95, 0.5, 1e-9]),
    st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    st.booleans(),
    st.integers(0, 2**20),
)
def test_draws_are_those_of_the_reference(columns, temperature, top_k, top_p, min_p, ties, seed):
    rows = 3 if columns > 600 else 9
    logits = random(seed, rows, columns, scale=4)
    if ties:
        logits = logits.round()
    uniform = np.random.default_rng(seed).random(rows)
    uniform[0] = 0.0
    given = draws(uniform, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    differing = check_draws(drawn(kernels, logits, given), logits, given)
    assert differing <= 1 or ties


@real_sets
def test_draws_follow_the_probabilities():
    probs = torch.tensor([0.5, 0.0, 0.25, 0.125, 0.125])
    uniform = (np.arange(8000) + 0.5) / 8000
    logits = probs.log().expand(8000, 5)
    counts = torch.bincount(drawn(kernels, logits, draws(uniform)), minlength=5)
    assert counts.tolist() == [4000, 0, 2000, 1000, 1000]
    counts = torch.bincount(drawn(kernels, logits, draws(uniform, top_k=3)), minlength=5)
    assert counts[4] == 0 and counts[3] > 0  # of equal ones the first
    counts = torch.bincount(drawn(kernels, logits, draws(uniform, top_p=0.6)), minlength=5)
    assert counts[[1, 3, 4]].sum() == 0 and abs(counts[0].item() - 8000 * 2 / 3) < 2


@real_sets
@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_a_draw_is_a_token_whatever_the_logits(odd):
    for logits in (torch.full((1, 100), odd), random(1, 1, 100).index_fill(1, torch.tensor([17]), odd)):
        for chosen in ({}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.5}):
            assert 0 <= drawn(kernels, logits, draws(np.array([0.999]), **chosen)).item() < 100


@pytest.mark.parametrize(
    "value", [0.0, -0.0, 1e-8, 6e-8, 6.1e-5, 65504.0, 65519.0, 65520.0, 1e9, math.inf, -math.inf, 1 / 3]
)
def test_conversions_to_16_bits(value):
    """Through a linear layer of one number."""
    for dtype in (torch.float16, torch.bfloat16):
        x = torch.tensor([[value]]).to(dtype)
        got = kernels.linear(x, torch.ones(1, 1, dtype=dtype))
        assert got.item() == x.item() or math.isnan(x.item())
        wide = kernels.norm(torch.tensor([[value]]).to(dtype), torch.ones(1, dtype=dtype), None, 1.0)
        assert wide.dtype == dtype


def in_a_process(code, **environment):
    environment = os.environ | environment
    environment.pop("LD_PRELOAD", None)
    environment.pop("BATCHGEN_KERNELS", None)
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)


@any_set
def test_an_instruction_set_that_is_not_there():
    code = "from batchgen.ops.instruction_set import instruction_set; print(instruction_set())"
    slowest = kernels.instruction_sets()[-1]
    assert in_a_process(code, BATCHGEN_ISA=slowest).stdout.strip() == slowest
    refused = in_a_process(code, BATCHGEN_ISA="mmx").stderr.splitlines()[-1]
    assert "InputError: BATCHGEN_ISA=mmx is not there; this machine has" in refused and slowest in refused


@any_set
def test_plain_twins_are_used_by_name_only():
    twins = kernels.plain_twins()
    assert twins == [name for name in kernels.built() if name.endswith("_plain")]
    assert not set(twins) & set(kernels.instruction_sets())
    code = "from batchgen.ops.instruction_set import instruction_set; print(instruction_set())"
    for name in twins:
        assert in_a_process(code, BATCHGEN_ISA=name).stdout.strip() == name


@any_set
@pytest.mark.skipif(not {"amx", "amx_plain"} <= set(kernels.built()), reason="built without AMX or what stands for it")
@pytest.mark.parametrize(
    ("without", "reason"),
    [
        ("system", "the operating system does not keep tile registers"),
        ("permission", "the kernel refused permission for tile registers"),
        ("check", "products in tile registers came out wrong at the check at start"),
    ],
)
def test_tile_registers_that_cannot_be_used(without, reason):
    """The next best set is taken, and the reason can be asked for."""
    code = (
        "from batchgen.ops import _kernels, instruction_set as i; sets = _kernels.instruction_sets();"
        "print(sets); print(i.instruction_set() == sets[0]); print(i.unavailable())"
    )
    sets, best, unavailable = in_a_process(code, BATCHGEN_ISA="", BATCHGEN_AMX_WITHOUT=without).stdout.splitlines()
    assert "'amx'" not in sets and best == "True"
    assert unavailable == str({"amx": reason})
    refused = in_a_process(code, BATCHGEN_ISA="amx", BATCHGEN_AMX_WITHOUT=without).stderr.splitlines()[-1]
    assert f"BATCHGEN_ISA=amx is not there ({reason}); this machine has" in refused


@pytest.mark.skipif(not shutil.which("valgrind"), reason="valgrind stands in for a CPU without AVX-512")
def test_a_library_of_all_sets_starts_on_a_cpu_that_lacks_most_of_them():
    """valgrind knows no AVX-512: it says so to who asks for the CPU's sets, and ends a program that runs any of it."""
    code = "from batchgen.ops import _kernels; print(_kernels.instruction_sets(), _kernels.active())"
    run = subprocess.run(
        ["valgrind", "--tool=none", "--quiet", sys.executable, "-c", code],
        capture_output=True, text=True, env=os.environ | {"BATCHGEN_ISA": ""},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert "avx512" not in run.stdout and "scalar" in run.stdout
