"""Triton's kernels, but attention and products, against float64.

`test_triton.py` runs this file in processes of their own, under Triton's interpreter; `make gpu-check` runs it on a
card.
"""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from attention_cases import laid_out
from draw_cases import check_draws, drawn, draws
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kernel_cases import DTYPES, MORE, ROUNDING, random
from thorough import quick_or, some_of
from triton_device import DEVICE

from batchgen.core.dtypes import KV_CODE_BITS, KVFormat, code_bytes
from batchgen.ops import dispatch as ops
from batchgen.ops import quant, reference, torch_attention
from batchgen.ops import triton as triton_kernels
from batchgen.ops.attention_operands import AttentionOperands
from batchgen.ops.attention_plan import (
    AttentionPlan,
    SweepTables,
    plan_attention,
)
from batchgen.ops.triton import attention, grouped, packed, rotary
from batchgen.ops.triton import launch as launching
from batchgen.ops.triton import rows as row_copies

LARGE_VOCABULARY = quick_or(24_064, 152_064) if DEVICE.type == "cpu" else 152_064


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
    assert triton_kernels.quantize(x).shape == (0, quant.row_bytes(64))
    assert triton_kernels.rotary_store(x, 2, 1, scale=1.0)[0].shape == (0, 2, 16)


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
    assert ops.prepare_attention(AttentionPlan(()), operands, there) == "torch's"


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
