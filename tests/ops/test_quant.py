"""Packed groups: the layout byte by byte, and how far a number may come back from where it was."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.core.dtypes import CODE_BITS, CODE_GROUP, FORMAT_BYTES, INT4, INT8, code_bytes
from batchgen.ops import quant
from batchgen.ops.quant import dequantize, quantize, row_bytes

FP16_MAX = 65504.0


PACKINGS = pytest.mark.parametrize("packing", CODE_BITS)


def by_hand(row: np.ndarray, packing: str) -> bytes:
    """One packed row, value by value, as docs/weight_store.md describes it; of 8 bits a byte for each value."""
    most = 2 ** CODE_BITS[packing] - 1
    codes, table = bytearray(), bytearray()
    for start in range(0, len(row), CODE_GROUP):
        group = np.clip(row[start : start + CODE_GROUP].astype(np.float32), -FP16_MAX, FP16_MAX)
        minimum = np.float16(group.min())
        scale = np.float16(max(np.float32(0), (group.max() - np.float32(minimum)) / np.float32(most)))
        if np.float32(minimum) + most * np.float32(scale) > FP16_MAX:
            scale = np.nextafter(scale, np.float16(0))
        place = bytearray(code_bytes(len(group), CODE_BITS[packing]))
        for i, x in enumerate(group):
            steps = (x - np.float32(minimum)) * (np.float32(1) / np.float32(scale)) if scale else 0
            place[i % len(place)] |= min(most, max(0, round(float(steps)))) << (4 * (i // len(place)))
        codes += place
        table += scale.tobytes() + minimum.tobytes()
    return bytes(codes + table)


def bounds(x: torch.Tensor, packing: str = INT4) -> torch.Tensor:
    """How far each value may be off: half a step, and the rounding of minimum and scale to fp16."""
    bound, most = torch.empty_like(x), 2 ** CODE_BITS[packing] - 1
    for start in range(0, x.shape[-1], CODE_GROUP):
        group = x[..., start : start + CODE_GROUP]
        low, high = group.amin(-1, keepdim=True), group.amax(-1, keepdim=True)
        rounding = (low.abs() * 2**-10).clamp(min=2**-25) + ((high - low) * 2**-10).clamp(min=most * 2**-25)
        bound[..., start : start + CODE_GROUP] = (high - low) / (2 * most) + rounding
    return bound


@PACKINGS
@pytest.mark.parametrize("n", [1, 2, 3, 63, 64, 65, 96, 127, 128, 200])
def test_the_layout_is_as_documented(n, packing):
    x = torch.randn(5, n, generator=torch.Generator().manual_seed(n)) * 3
    packed = quantize(x, packing)
    assert packed.shape == (5, row_bytes(n, packing)) and packed.dtype == quant.PACKED_DTYPES[packing]
    assert quant.packing_of(packed.dtype) == packing and quant.packing_of(torch.float32) is None
    for row, values in zip(packed.view(torch.uint8), x, strict=True):
        assert bytes(row.tolist()) == by_hand(values.numpy(), packing)


@pytest.mark.parametrize("n", [3, 64, 96, 576])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 2e4])
@pytest.mark.parametrize("uneven", [False, True])
def test_a_fit_has_the_smaller_squared_error_in_every_group(n, scale, uneven):
    draw = torch.Generator().manual_seed(n)
    x = torch.randn(300, n, generator=draw) * scale
    x[:100] = x[:100].pow(3)  # long tails
    x.clamp_(-FP16_MAX, FP16_MAX)
    x[-1] = 5.0  # nothing to fit
    importance = torch.rand(n, generator=draw).pow(4) + 1e-3 if uneven else torch.ones(n)
    plain, fitted = (
        torch.stack([(importance * (dequantize(packed, n) - x).square())[:, i : i + CODE_GROUP].sum(-1)
                     for i in range(0, n, CODE_GROUP)])
        for packed in (quantize(x), quantize(x, importance=importance))
    )  # fmt: skip
    assert (fitted <= plain * (1 + 1e-5) + 1e-12).all()
    assert fitted.sum() < (0.95 if n >= CODE_GROUP else 1.0) * plain.sum()


def test_row_bytes():
    assert row_bytes(64) == 36 and row_bytes(128) == 72
    assert row_bytes(4096) == 4096 * FORMAT_BYTES["int4"]
    assert row_bytes(1) == 5 and row_bytes(65) == 36 + 5 and row_bytes(96) == 48 + 8
    assert row_bytes(64, INT8) == 68 and row_bytes(4096, INT8) == 4096 + 4 * 64
    assert row_bytes(1, INT8) == 5 and row_bytes(65, INT8) == 68 + 5


@settings(deadline=None, max_examples=150)
@given(
    n=st.integers(1, 200),
    rows=st.integers(1, 4),
    magnitude=st.integers(-9, 4),
    shift=st.sampled_from([0.0, 1.0, -3.0, 1000.0]),
    seed=st.integers(0, 2**31),
    packing=st.sampled_from(list(CODE_BITS)),
)
def test_a_value_comes_back_within_half_a_step(n, rows, magnitude, shift, seed, packing):
    x = torch.randn(rows, n, generator=torch.Generator().manual_seed(seed)) * 10.0**magnitude + shift
    x = x.clamp(-FP16_MAX, FP16_MAX)
    error, bound = (dequantize(quantize(x, packing), n) - x).abs(), bounds(x, packing)
    assert (error <= bound).all(), (error / bound).max()


@settings(deadline=None, max_examples=100)
@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=130), st.sampled_from(list(CODE_BITS)))
def test_any_finite_numbers_stay_finite(values, packing):
    x = torch.tensor([values])
    packed = quantize(x, packing)
    assert x[0].tolist() == values
    inside = x.clamp(-FP16_MAX, FP16_MAX)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert dequantize(packed, len(values), dtype=dtype).isfinite().all()
    assert ((dequantize(packed, len(values)) - inside).abs() <= bounds(inside, packing)).all()


@PACKINGS
def test_infinities_count_as_the_ends_of_the_range_and_a_nan_spoils_its_group_alone(packing):
    x = torch.ones(1, 192)
    x[0, 0], x[0, 5], x[0, 100] = math.inf, -math.inf, math.nan
    back = dequantize(quantize(x, packing), 192)
    assert back[0, 5] == -FP16_MAX and back[0, 0] == pytest.approx(FP16_MAX, rel=0.002)
    assert back[0, 64:128].isnan().all()
    assert (back[0, 128:] == 1).all()


@pytest.mark.parametrize("value", [0.0, -1.0, 0.1, 65504.0, -65504.0, 6e-8, 3.14159e-5])
@PACKINGS
def test_equal_numbers_come_back_as_close_as_fp16(value, packing):
    x = torch.full((3, 70), value)
    back = dequantize(quantize(x, packing), 70)
    assert (back == back[0, 0]).all()
    assert ((back - x).abs() <= (x.half().float() - x).abs()).all()


def test_sixteen_evenly_spaced_values_are_exact():
    x = torch.arange(64).remainder(16).float().mul(0.25).sub(2).view(1, 64)
    assert torch.equal(dequantize(quantize(x), 64), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n", [64, 72])
@PACKINGS
def test_shapes_dtypes_and_places(dtype, n, packing):
    """KV as [tokens, heads, head_dim], a slice of something larger, into a slice of something larger."""
    x = torch.randn(7, 6, n, generator=torch.Generator().manual_seed(0)).to(dtype)
    packed = quantize(x[:, 1:4], packing)
    assert packed.shape == (7, 3, row_bytes(n, packing))
    assert torch.equal(packed, quantize(x[:, 1:4].float(), packing))
    plain = dequantize(packed, n, dtype=dtype)
    assert plain.dtype == dtype and torch.equal(plain, dequantize(packed, n).to(dtype))
    place = torch.zeros(7, 5, n, dtype=dtype)
    assert dequantize(packed, n, out=place[:, 2:]) is not None
    assert torch.equal(place[:, 2:], plain) and (place[:, :2] == 0).all()
    whole = torch.empty(7, 3, n, dtype=dtype)
    assert dequantize(packed, n, out=whole) is whole and torch.equal(whole, plain)
    wide = torch.zeros(7, 3, row_bytes(n, packing) + 5, dtype=packed.dtype)
    wide[..., 3:-2] = packed
    assert torch.equal(dequantize(wide[..., 3:-2], n, dtype=dtype), plain)
    assert quantize(x[:0], packing).shape == (0, 6, row_bytes(n, packing)) and dequantize(packed[:0], n).shape == (
        0,
        3,
        n,
    )


@PACKINGS
def test_rows_do_not_depend_on_each_other(packing, monkeypatch):
    x = torch.randn(50, 100, generator=torch.Generator().manual_seed(0))
    whole = quantize(x, packing)
    back = dequantize(whole, 100)
    monkeypatch.setattr(quant, "_THREAD_VALUES", 1)
    assert torch.equal(quantize(x, packing), whole)
    assert torch.equal(dequantize(whole, 100), back)
    assert torch.equal(quantize(x[7:8], packing), whole[7:8])


def test_the_example_in_the_documentation():
    packed = quantize(torch.tensor([-1, 0.5, 2, 0, 1.25, -0.25]))
    assert bytes(packed.tolist()).hex(" ") == "50 b8 4f 66 32 00 bc"
    back = dequantize(packed, 6).tolist()
    assert back == pytest.approx([-1, 0.59961, 1.99927, -0.00024, 1.19946, -0.20020], abs=1e-5)
