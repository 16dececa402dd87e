"""Triton's products with packed weights and through experts against float64, as triton_checks.py does for others."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from gguf_blocks import random_rows
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kernel_cases import DTYPES, MORE, ROUNDING, random
from triton_device import DEVICE

from batchgen.core.dtypes import BLOCK_FORMATS
from batchgen.models.experts import experts, split_experts
from batchgen.models.hf.config import config_of_hf
from batchgen.ops import cpp as kernels
from batchgen.ops import dispatch as ops
from batchgen.ops import int8, quant, reference
from batchgen.ops import triton as triton_kernels
from batchgen.ops.cpp import BlockWeight
from batchgen.ops.triton import grouped, grouped_many, int8_rows, product
from batchgen.ops.triton import launch as launching
from batchgen.ops.triton.blocks import BLOCK_CODINGS

BLOCKS = tuple(BLOCK_FORMATS)


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


@pytest.mark.parametrize("num_experts, k, tokens", [(4, 1, 1), (8, 2, 150), (6, 5, 90)])
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
        alone = multiplied(x[some], shares[some], chosen[some], weights, "swiglu_oai_mul")
        if DEVICE.type == "cpu":  # interpreted: numpy's products add up in another order where a tile has other rows
            torch.testing.assert_close(alone, together[some], atol=4 * ROUNDING[dtype], rtol=2 * ROUNDING[dtype])
        else:
            assert torch.equal(alone, together[some])


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


def test_no_token_at_all():
    x, chosen = torch.empty(0, 64, device=DEVICE), torch.empty(0, 2, dtype=torch.int64, device=DEVICE)
    weights = [w if w is None else w.to(DEVICE) for w in mixture(0, 4, 64, 8)]
    assert triton_kernels.grouped_experts(x, chosen.float(), chosen, *weights, "silu_mul").shape == (0, 64)
