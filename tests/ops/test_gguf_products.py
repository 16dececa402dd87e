"""Products with rows of blocks, of a GGUF or not, on every instruction set, of rows as they lie and of panels.

They are those of the unpacked weights, bit for bit; or, of bf16 on the sets that multiply codes
(csrc/matmul/quant_panels.h), those of the weights before these are rounded to bf16, but for the rounding of sums in
fp32 and, where x is split into bytes, of x (csrc/matmul/split_bytes.h).
"""

import itertools

import pytest
import torch
from gguf_blocks import random_rows

from batchgen.core.dtypes import BLOCK_FORMATS
from batchgen.ops import cpp as kernels
from batchgen.ops import dispatch as ops

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EVEN_PAIRS = ("zen4",)  # sets that multiply codes of 4 bits as pairs of bf16
PAIRS = ("avx512_bf16", "avx512_bf16_plain", *EVEN_PAIRS)  # those that multiply codes of FP8 so
CODES = (*PAIRS, "avx512_vnni", "avx_vnni")  # those that multiply codes that are integers in any way
OF_4_BITS = ("q4_0", "q4_1", "q4_k", "iq4_nl", "iq4_xs", "mxfp4", "w4_g32", "w4_g64", "w4_g128")
RUNS_OF_16 = ("q2_k", "q3_k", "q6_k")
_LOST = 2.0**-15  # of a number of x, at most, by the largest of its run
_FEW_ROUNDINGS = 2.0**-18  # of the sum of all terms' sizes; a minimum and its codes' part may cancel
ALL_SETS = [*kernels.instruction_sets(), *kernels.plain_twins()]


def multiplies_codes(isa, weight_format):
    return isa in (PAIRS if weight_format.startswith("fp8") else CODES)


def splits_x(isa, weight_format):
    return not weight_format.startswith("fp8") and not (isa in EVEN_PAIRS and weight_format in OF_4_BITS)


def both_ways(weight, dtype, gated):
    """The weight as it lies, as when it passes through memory, and as it stays there."""
    panels = kernels.pack_blocks(weight, dtype, gated=gated)
    assert panels.shape == weight.shape and panels.dtype == dtype
    return weight, panels


@pytest.mark.parametrize("isa", ALL_SETS)
@pytest.mark.parametrize("weight_format", BLOCK_FORMATS)
def test_products_are_those_of_the_unpacked_weights(weight_format, isa):
    """Bit for bit: of one block and of several depths that are worked on apart, of few rows and many, gated or not."""
    kind, (values, _) = weight_format.upper(), BLOCK_FORMATS[weight_format]
    generator = torch.Generator().manual_seed(0)
    dtypes = [dtype for dtype in DTYPES if not (dtype == torch.bfloat16 and multiplies_codes(isa, weight_format))]
    for dtype, depth in itertools.product(dtypes, (values, 2112 if values == 32 else 2304)):
        packed = torch.from_numpy(random_rows(kind, 40, depth, seed=depth))
        weight = kernels.BlockWeight(packed, weight_format, isa)
        assert weight.shape == (40, depth)
        numbers = kernels.unpack_blocks(kind, packed, torch.empty(40, depth, dtype=dtype))
        assert numbers.isfinite().all() and numbers.float().std() > 0.01
        x = torch.randn(70, depth, generator=generator).to(dtype)
        for rows, columns, activation in (
            (1, 37, None),
            (2, 40, None),
            (3, 40, "silu_mul"),
            (4, 39, None),
            (25, 40, "relu"),
            (25, 38, "gelu_tanh_mul"),
            (70, 37, None),
        ):
            gated = activation in kernels.GATED
            made = columns // 2 if gated else columns
            options = {
                "bias": torch.randn(columns, generator=generator).to(dtype),
                "residual": torch.randn(rows, made, generator=generator).to(dtype),
                "activation": activation,
            }
            expected = kernels.linear(x[:rows], kernels.BoundWeight(numbers[:columns], isa), **options)
            for some in both_ways(kernels.BlockWeight(packed[:columns], weight_format, isa), dtype, gated):
                assert torch.equal(kernels.linear(x[:rows], some, **options), expected)


@pytest.mark.parametrize(
    ("weight_format", "isa"),
    [(kind, isa) for kind in BLOCK_FORMATS for isa in ALL_SETS if multiplies_codes(isa, kind)],
)
def test_products_of_codes_are_those_of_the_weights_in_fp32(weight_format, isa):
    """Products are within rounding of sums, and a row's are the same bit for bit among any rows and in any layout."""
    kind, (values, _) = weight_format.upper(), BLOCK_FORMATS[weight_format]
    generator = torch.Generator().manual_seed(0)
    for depth in (values, 2112 if values == 32 else 2304):
        packed = torch.from_numpy(random_rows(kind, 40, depth, seed=depth))
        numbers = kernels.unpack_blocks(kind, packed, torch.empty(40, depth, dtype=torch.float32)).double()
        x = torch.randn(30, depth, generator=generator).bfloat16()
        for columns, gated in ((37, False), (40, True), (38, True)):
            weight, panels = both_ways(kernels.BlockWeight(packed[:columns], weight_format, isa), torch.bfloat16, gated)
            activation = "silu_mul" if gated else None
            options = {"activation": activation, "out_dtype": torch.float32}
            whole = kernels.linear(x, weight, **options)
            for rows in (1, 2, 3, 4, 5, 12, 13, 16, 25, 30):
                first = 30 - rows if rows % 2 else 0
                for some in (weight, panels):
                    assert torch.equal(
                        kernels.linear(x[first : first + rows], some, **options), whole[first : first + rows]
                    )
            if gated:
                continue
            expected = x.double() @ numbers[:columns].T
            sizes, run = x.double().abs(), 16 if weight_format in RUNS_OF_16 else 32
            allowed = _FEW_ROUNDINGS * sizes
            if splits_x(isa, weight_format):
                allowed += _LOST * sizes.view(len(x), -1, run).amax(2).repeat_interleave(run, 1)
            assert ((whole - expected).abs() <= allowed @ numbers[:columns].abs().T).all()
            rounded = x.double() @ numbers[:columns].bfloat16().double().T
            assert (whole - expected).abs().sum() <= (rounded - expected).abs().sum() or torch.equal(rounded, expected)


@pytest.mark.parametrize("isa", [isa for isa in ALL_SETS if isa in CODES])
@pytest.mark.parametrize("weight_format", ["q4_0", "q4_1", "q6_k"])
def test_products_of_unusual_rows(weight_format, isa):
    """Zeros, the least and the largest numbers, one beside which others are small.

    What is no finite number makes its row NaN where x is split, and else NaN or infinite.
    """
    depth = 512
    packed = torch.from_numpy(random_rows(weight_format.upper(), 40, depth, seed=7))
    numbers = kernels.unpack_blocks(weight_format.upper(), packed, torch.empty(40, depth, dtype=torch.float32)).double()
    x = torch.randn(8, depth, generator=torch.Generator().manual_seed(7))
    x[0], x[1], x[2] = 0, x[1] * 2.0**-120, x[2].sign() * torch.finfo(torch.bfloat16).max * 2.0**-60
    x[3], x[3, ::32] = 31 * 2.0**-15, 1  # halves of a unit, all rounded the same way
    x[4, ::16] = 255 / 128  # all bits of a mantissa
    x[5, 100], x[6, 3], x[7, 500] = torch.inf, torch.nan, -torch.inf
    x = x.bfloat16()
    for weight in both_ways(kernels.BlockWeight(packed, weight_format, isa), torch.bfloat16, False):
        made = kernels.linear(x, weight, out_dtype=torch.float32).double()
        assert (made[5:].isnan() if splits_x(isa, weight_format) else ~made[5:].isfinite()).all()
        sizes, run = x[:5].double().abs(), 16 if weight_format in RUNS_OF_16 else 32
        lost = 2.0**-113 + torch.zeros_like(sizes)
        if splits_x(isa, weight_format):
            lost += _LOST * sizes.view(5, -1, run).amax(2).repeat_interleave(run, 1)
        allowed = (_FEW_ROUNDINGS * sizes + lost) @ numbers.abs().T
        assert ((made[:5] - x[:5].double() @ numbers.T).abs() <= allowed).all()


@pytest.mark.parametrize("isa", kernels.instruction_sets())
@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_panels_unpacked_for_many_rows_are_the_same(dtype, isa):
    """More rows than are multiplied at once, of more panels than are unpacked at once."""
    depth, columns, rows = 2112, 1100, 520
    packed = torch.from_numpy(random_rows("Q4_1", columns, depth, seed=1))
    numbers = kernels.unpack_blocks("Q4_1", packed, torch.empty(columns, depth, dtype=dtype))
    x = torch.randn(rows, depth, generator=torch.Generator().manual_seed(1)).to(dtype)
    residual = torch.randn(rows, columns // 2, generator=torch.Generator().manual_seed(2)).to(dtype)
    options = {"activation": "silu_mul", "residual": residual}
    expected = kernels.linear(x, kernels.BoundWeight(numbers, isa), **options)
    if dtype == torch.bfloat16 and multiplies_codes(isa, "q4_1"):
        some = kernels.BlockWeight(packed, "q4_1", isa)
        expected = torch.cat(
            [
                kernels.linear(x[i : i + 8], some, activation="silu_mul", residual=residual[i : i + 8])
                for i in range(0, rows, 8)
            ]
        )
    for weight in both_ways(kernels.BlockWeight(packed, "q4_1", isa), dtype, True):
        assert torch.equal(kernels.linear(x, weight, **options), expected)
        few = kernels.linear(x[:3], weight, activation="silu_mul", residual=residual[:3])
        assert torch.equal(few, expected[:3])


@pytest.mark.parametrize("weight_format", BLOCK_FORMATS)
def test_panels_take_as_many_bytes(weight_format):
    """Of whole panels: the memory that is planned for."""
    kind, (values, num_bytes) = weight_format.upper(), BLOCK_FORMATS[weight_format]
    packed = torch.from_numpy(random_rows(kind, 64, 2 * values, seed=3))
    panels = kernels.pack_blocks(kernels.BlockWeight(packed, weight_format), torch.float32)
    assert panels.data.nbytes == packed.nbytes == 64 * 2 * num_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", [None, "relu", *kernels.GATED])
def test_products_in_parts_are_those_of_the_whole(activation, dtype):
    """Of a weight whose rows are in several formats; with a bias, into a result that is there."""
    rows, depth, tokens = 64, 256, 5
    kinds = ("q4_k", "q8_0") if activation in kernels.GATED else ("q4_k", "q6_k", "q8_0")
    packed = [torch.from_numpy(random_rows(kind.upper(), rows, depth, seed=i)) for i, kind in enumerate(kinds)]
    parts = [kernels.BlockWeight(data, kind) for data, kind in zip(packed, kinds, strict=True)]
    # Where codes are multiplied, weights are not rounded.
    exact = torch.float32 if kernels.instruction_set() in CODES else dtype
    numbers = torch.cat(
        [
            kernels.unpack_blocks(k.upper(), p, torch.empty(rows, depth, dtype=exact))
            for p, k in zip(packed, kinds, strict=True)
        ]
    )
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(tokens, depth, generator=draw).to(dtype)
    bias = torch.randn(rows * len(kinds), generator=draw).to(dtype)
    whole = kernels.linear(x.to(exact), numbers, bias.to(exact), activation=activation).to(dtype)
    residual = None if activation else torch.randn(tokens, rows * len(kinds), generator=draw).to(dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for split in (ops.SplitWeight(tuple(parts)), ops.SplitWeight(tuple(ops.pack_blocks(p, dtype) for p in parts))):
        assert split.shape == (rows * len(kinds), depth)
        torch.testing.assert_close(
            ops.linear(x, split, bias, activation=activation), whole, rtol=tolerance, atol=tolerance
        )
        out = torch.empty_like(whole)
        assert ops.linear(x, split, bias, activation=activation, out=out) is out
        torch.testing.assert_close(out, whole, rtol=tolerance, atol=tolerance)
        if residual is not None:
            added = ops.linear(x, split, bias, residual=residual)
            wanted = kernels.linear(x.to(exact), numbers, bias.to(exact), residual=residual.to(exact))
            torch.testing.assert_close(added, wanted.to(dtype), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("isa", ALL_SETS)
@pytest.mark.parametrize("weight_format", BLOCK_FORMATS)
def test_rows_of_panels_are_those_that_were_packed(weight_format, isa):
    """Products are equal bit for bit, signs of zeros too.

    That holds for every column of a panel, of a last panel that is not full, of one block and of many.
    """
    kind, (values, _) = weight_format.upper(), BLOCK_FORMATS[weight_format]
    ids = torch.cat([torch.randperm(75, generator=torch.Generator().manual_seed(0)), torch.tensor([74, 0, 31, 32, 0])])
    for dtype, depth in itertools.product(DTYPES, (values, 2112 if values == 32 else 2304)):
        packed = torch.from_numpy(random_rows(kind, 75, depth, seed=depth))
        table = kernels.unpack_blocks(kind, packed, torch.empty(75, depth, dtype=dtype))
        panels = ops.pack_blocks(kernels.BlockWeight(packed, weight_format, isa), dtype)
        found = ops.embedding(ids, panels, dtype)
        assert found.dtype == dtype
        bits = torch.int32 if dtype == torch.float32 else torch.int16
        assert torch.equal(found.view(bits), table[ids].view(bits))


@pytest.mark.parametrize("isa", ALL_SETS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_packed_numbers_are_those_that_were_packed(dtype, isa):
    """Whatever the depth; in whatever form `pack_weight` leaves them."""
    ids = torch.tensor([7, 0, 31, 32, 69, 7])
    for depth in (1, 37, 576, 1030):
        table = torch.randn(70, depth, generator=torch.Generator().manual_seed(depth)).to(dtype)
        for weight in (kernels.pack(table, isa=isa), ops.pack_weight(table, isa=isa), ops.bind_weight(table, isa)):
            assert torch.equal(ops.embedding(ids, weight, dtype), table[ids])
            assert torch.equal(ops.embedding(ids[::2], weight, dtype), table[ids[::2]])


def test_rows_that_a_packed_table_does_not_have_are_refused():
    panels = kernels.pack(torch.ones(40, 16))
    assert ops.embedding(torch.tensor([], dtype=torch.int64), panels, torch.float32).shape == (0, 16)
    for wrong in (40, -1):
        with pytest.raises(IndexError, match=f"no such row: {wrong}"):
            ops.embedding(torch.tensor([3, wrong]), panels, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_a_table_in_blocks_are_looked_up(dtype):
    packed = torch.from_numpy(random_rows("Q6_K", 40, 256, seed=3))
    table = kernels.unpack_blocks("Q6_K", packed, torch.empty(40, 256, dtype=dtype))
    ids = torch.tensor([7, 0, 39, 7])
    assert torch.equal(ops.embedding(ids, kernels.BlockWeight(packed, "q6_k"), dtype), table[ids])
    assert ops.embedding(ids[:0], kernels.BlockWeight(packed, "q6_k"), dtype).shape == (0, 256)
