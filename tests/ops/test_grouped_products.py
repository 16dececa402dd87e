"""Products of several weights, each with rows of its own, in one loop: those of each by itself, bit for bit."""

import pytest
import torch
from gguf_blocks import random_rows

from batchgen.core.dtypes import BLOCK_FORMATS
from batchgen.core.kernel_choice import TORCH
from batchgen.ops import cpp as kernels
from batchgen.ops import dispatch as ops
from batchgen.ops import int8

ALL_SETS = [*kernels.instruction_sets(), *kernels.plain_twins()]
FORMATS = ("float32", "bfloat16", "float16", "int8", *BLOCK_FORMATS)
COUNTS = (3, 1, 0, 40, 13, 1)
COLUMNS, DEPTH = 40, 256


def weights_of(weight_format, dtype, isa, *, gated):
    """One for each of COUNTS, as they lie and as products read them fastest."""
    generator = torch.Generator().manual_seed(0)
    as_they_lie, packed = [], []
    for i in range(len(COUNTS)):
        if weight_format in BLOCK_FORMATS:
            rows = torch.from_numpy(random_rows(weight_format.upper(), COLUMNS, DEPTH, seed=i))
            as_they_lie.append(ops.BlockWeight(rows, weight_format, isa))
            packed.append(ops.pack_blocks(as_they_lie[-1], dtype, gated=gated))
        else:
            numbers = torch.randn(COLUMNS, DEPTH, generator=generator).to(dtype)
            numbers = int8.quantize(numbers) if weight_format == "int8" else numbers
            as_they_lie.append(ops.bind_weight(numbers, isa))
            packed.append(ops.pack_weight(numbers, gated=gated, isa=isa))
    return as_they_lie, packed


def one_by_one(x, weights, biases, activation, columns):
    out, start = torch.empty(len(x), columns, dtype=x.dtype), 0
    for weight, count, bias in zip(weights, COUNTS, biases, strict=True):
        rows = slice(start, start := start + count)
        ops.linear(x[rows], weight, bias, activation=activation, out=out[rows])
    return out


@pytest.mark.parametrize("isa", ALL_SETS)
@pytest.mark.parametrize("weight_format", FORMATS)
def test_products_are_those_of_each_by_itself(weight_format, isa):
    """Of one row and of more than one block of rows, of a weight without any, gated or not, with biases or without."""
    numbers = weight_format in ("float32", "bfloat16", "float16")
    generator = torch.Generator().manual_seed(0)
    for dtype in [getattr(torch, weight_format)] if numbers else [torch.float32, torch.bfloat16]:
        x = torch.randn(sum(COUNTS), DEPTH, generator=generator).to(dtype)
        for activation in (None, "silu_mul"):
            columns = COLUMNS // 2 if activation else COLUMNS
            biases = [torch.randn(COLUMNS, generator=generator).to(dtype) if activation else None for _ in COUNTS]
            for weights in weights_of(weight_format, dtype, isa, gated=activation is not None):
                assert kernels.lie_alike(weights)
                found = torch.full((len(x), columns), float("nan"), dtype=dtype)
                assert kernels.grouped_linear(x, weights, COUNTS, biases, activation=activation, out=found) is found
                assert torch.equal(found, one_by_one(x, weights, biases, activation, columns))


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_more_rows_than_are_put_in_order_at_once(threads):
    """Weights are worked on in several loops then, and one with very many rows by itself."""
    counts = (900, 30, 2, 5000, 700, 1, 600)
    generator = torch.Generator().manual_seed(0)
    weights = [ops.pack_weight(torch.randn(24, 512, generator=generator).bfloat16()) for _ in counts]
    blocks = [torch.from_numpy(random_rows("Q4_0", 24, 512, seed=i)) for i, _ in enumerate(counts)]
    packed = [ops.pack_blocks(ops.BlockWeight(rows, "q4_0"), torch.bfloat16) for rows in blocks]
    x = torch.randn(sum(counts), 512, generator=generator).bfloat16()
    before = kernels.num_threads()
    kernels.set_num_threads(threads)
    try:
        for some in (weights, packed):
            found = ops.grouped_linear(
                x, some, counts, [None] * len(counts), out=torch.empty(len(x), 24, dtype=torch.bfloat16)
            )
            parts = [ops.linear(rows, weight) for rows, weight in zip(x.split(counts), some, strict=True)]
            assert torch.equal(found, torch.cat(parts))
    finally:
        kernels.set_num_threads(before)


def test_what_does_not_lie_alike_goes_one_by_one():
    """Parts in formats of their own, torch's linear, or one for another instruction set."""
    generator = torch.Generator().manual_seed(0)
    numbers = [torch.randn(COLUMNS, DEPTH, generator=generator) for _ in COUNTS]
    x, biases = torch.randn(sum(COUNTS), DEPTH, generator=generator), [None] * len(COUNTS)
    split = [ops.SplitWeight((w[:8], ops.pack_weight(w[8:]))) for w in numbers]
    by_torch = [ops.bind_weight(w, TORCH) for w in numbers]
    other_sets = [ops.bind_weight(w, "scalar" if i == 2 else "") for i, w in enumerate(numbers)]
    for weights in (split, by_torch, other_sets):
        found = ops.grouped_linear(x, weights, COUNTS, biases, out=torch.empty(len(x), COLUMNS))
        assert torch.equal(found, one_by_one(x, weights, biases, None, COLUMNS))
    assert not kernels.lie_alike(other_sets)


def test_no_weights_at_all():
    out = torch.empty(0, COLUMNS)
    assert ops.grouped_linear(torch.empty(0, DEPTH), [], [], [], out=out) is out


def test_tokens_are_sorted_by_expert():
    """Of one expert in their own order; with experts that have none, and no tokens at all."""
    generator = torch.Generator().manual_seed(0)
    for tokens, choices, experts in ((50, 3, 7), (1, 8, 128), (9, 1, 1), (0, 2, 4)):
        chosen = torch.rand(tokens, experts, generator=generator).topk(choices).indices
        token_of_row, row_of_choice, counts = kernels.sort_by_expert(chosen, experts)
        order = chosen.view(-1).argsort(stable=True)
        assert torch.equal(token_of_row, order // choices)
        assert torch.equal(row_of_choice.view(-1)[order], torch.arange(len(order)))
        assert counts == chosen.view(-1).bincount(minlength=experts).tolist()


@pytest.mark.parametrize("wrong", [-1, 4])
def test_an_expert_that_is_not_there_is_refused(wrong):
    with pytest.raises(IndexError, match=f"no such expert: {wrong}"):
        kernels.sort_by_expert(torch.tensor([[0, 3], [1, wrong]]), 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_are_gathered(dtype):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(30, 70, generator=generator).to(dtype)
    rows = torch.randint(30, (200,), generator=generator)
    for some in (x, x[:, :33]):
        out = torch.empty(200, some.shape[1], dtype=dtype)
        assert kernels.gather_rows(some, rows, out) is out and torch.equal(out, some[rows])
    assert not len(kernels.gather_rows(x, rows[:0], x[:0]))


@pytest.mark.parametrize("isa", ALL_SETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_results_of_experts_are_weighted_and_added(dtype, isa):
    """As in fp64 but for rounding; a token has the same bits alone."""
    generator = torch.Generator().manual_seed(0)
    made = torch.randn(60, 45, generator=generator).to(dtype)
    rows = torch.randint(60, (20, 3), generator=generator)
    shares = torch.rand(20, 3, generator=generator)
    terms = made.double()[rows] * shares.double()[..., None]
    rounding = {torch.float32: 2**-23, torch.bfloat16: 2**-8, torch.float16: 2**-11}
    with kernels.using(isa):
        for out_dtype in {dtype, torch.float32}:
            found = kernels.weighted_sums(made, rows, shares, out_dtype)
            assert found.dtype == out_dtype
            most = 3 * 2**-23 * terms.abs().sum(1) + rounding[out_dtype] * terms.sum(1).abs()
            assert ((found.double() - terms.sum(1)).abs() <= most).all()
            assert torch.equal(kernels.weighted_sums(made, rows[7:8], shares[7:8], out_dtype), found[7:8])


@pytest.mark.parametrize("activation", kernels.GATED)
def test_a_gate_in_parts_is_made_some_rows_at_a_time(monkeypatch, activation):
    """And so are the rows, bit for bit, that are made at once."""
    generator = torch.Generator().manual_seed(0)
    gate, up = torch.randn(2, 24, 64, generator=generator).bfloat16()
    weight = ops.SplitWeight((ops.pack_weight(gate), up))
    x, residual = (
        torch.randn(11, 64, generator=generator).bfloat16(),
        torch.randn(11, 24, generator=generator).bfloat16(),
    )
    options = {"activation": activation, "residual": residual}
    bias = torch.randn(48, generator=generator).bfloat16()
    whole = ops.linear(x, weight, bias, **options)
    monkeypatch.setattr(ops, "_GATED_ROWS", 4)
    out = torch.empty_like(whole)
    assert torch.equal(ops.linear(x, weight, bias, **options), whole)
    assert ops.linear(x, weight, bias, out=out, **options) is out and torch.equal(out, whole)
