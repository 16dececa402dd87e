"""Packed groups: the layout byte by byte, and how far a number may come back from where it was."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from thorough import some_draws

from batchgen.core.dtypes import CODE_GROUP, FORMAT_BYTES, KV_CODE_BITS, KVFormat, code_bytes
from batchgen.ops import quant
from batchgen.ops.quant import dequantize, quantize, row_bytes

FP16_MAX = 65504.0


CODE_BITS = (4, 5, 8)
BITS = pytest.mark.parametrize("bits", CODE_BITS)


def by_hand(row: np.ndarray, bits: int) -> bytes:
    """One packed row, value by value: with 4 bits as docs/weight_store.md describes it."""
    most = 2**bits - 1
    codes, table = bytearray(), bytearray()
    for start in range(0, len(row), CODE_GROUP):
        group = np.clip(row[start : start + CODE_GROUP].astype(np.float32), -FP16_MAX, FP16_MAX)
        minimum = np.float16(group.min())
        scale = np.float16(max(np.float32(0), (group.max() - np.float32(minimum)) / np.float32(most)))
        if np.float32(minimum) + most * np.float32(scale) > FP16_MAX:
            scale = np.nextafter(scale, np.float16(0))
        place, half = bytearray(code_bytes(len(group), bits)), -(-len(group) // 2)
        for i, x in enumerate(group):
            steps = (x - np.float32(minimum)) * (np.float32(1) / np.float32(scale)) if scale else 0
            code = min(most, max(0, round(float(steps))))
            if bits == 8:
                place[i] = code
                continue
            part, i_of_half = divmod(i, half)
            place[i_of_half] |= (code & 15) << (4 * part)
            if bits == 5:
                place[half + part * -(-half // 8) + i_of_half // 8] |= (code >> 4) << (i_of_half % 8)
        codes += place
        table += scale.tobytes() + minimum.tobytes()
    return bytes(codes + table)


def bounds(x: torch.Tensor, bits: int = 4) -> torch.Tensor:
    """How far each value may be off: half a step, and the rounding of minimum and scale to fp16."""
    bound, most = torch.empty_like(x), 2**bits - 1
    for start in range(0, x.shape[-1], CODE_GROUP):
        group = x[..., start : start + CODE_GROUP]
        low, high = group.amin(-1, keepdim=True), group.amax(-1, keepdim=True)
        rounding = (low.abs() * 2**-10).clamp(min=2**-25) + ((high - low) * 2**-10).clamp(min=most * 2**-25)
        bound[..., start : start + CODE_GROUP] = (high - low) / (2 * most) + rounding
    return bound


@BITS
@pytest.mark.parametrize("n", [1, 2, 3, 63, 64, 65, 96, 127, 128, 200])
def test_the_layout_is_as_documented(n, bits):
    x = torch.randn(5, n, generator=torch.Generator().manual_seed(n)) * 3
    packed = quantize(x, bits)
    assert packed.shape == (5, row_bytes(n, bits)) and packed.dtype == torch.uint8
    for row, values in zip(packed.view(torch.uint8), x, strict=True):
        assert bytes(row.tolist()) == by_hand(values.numpy(), bits)


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
    assert row_bytes(64, 8) == 68 and row_bytes(128, 8) == 136 and row_bytes(65, 8) == 68 + 5
    assert row_bytes(64, 5) == 44 and row_bytes(128, 5) == 88 and row_bytes(65, 5) == 44 + 1 + 2 + 4


def test_kv_takes_the_bytes_of_its_codes():
    for name, bits in KV_CODE_BITS.items():
        assert KVFormat.of(name) == KVFormat(name, bits) and KVFormat.of(name).row_bytes(80) == row_bytes(80, bits)
    assert [KVFormat.of(name).rotates_keys for name in KV_CODE_BITS] == [False, True, True]
    numbers = KVFormat.of("bfloat16")
    assert numbers.row_bytes(80) == 160 and numbers.bits == 0 and not numbers.rotates_keys


@settings(deadline=None, max_examples=some_draws(150))
@given(
    n=st.integers(1, 200),
    rows=st.integers(1, 4),
    magnitude=st.integers(-9, 4),
    shift=st.sampled_from([0.0, 1.0, -3.0, 1000.0]),
    seed=st.integers(0, 2**31),
    bits=st.sampled_from(CODE_BITS),
)
def test_a_value_comes_back_within_half_a_step(n, rows, magnitude, shift, seed, bits):
    x = torch.randn(rows, n, generator=torch.Generator().manual_seed(seed)) * 10.0**magnitude + shift
    x = x.clamp(-FP16_MAX, FP16_MAX)
    error, bound = (dequantize(quantize(x, bits), n, bits=bits) - x).abs(), bounds(x, bits)
    assert (error <= bound).all(), (error / bound).max()


@settings(deadline=None, max_examples=some_draws(100))
@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=130), st.sampled_from(CODE_BITS))
def test_any_finite_numbers_stay_finite(values, bits):
    x = torch.tensor([values])
    packed = quantize(x, bits)
    assert x[0].tolist() == values
    inside = x.clamp(-FP16_MAX, FP16_MAX)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert dequantize(packed, len(values), dtype=dtype, bits=bits).isfinite().all()
    assert ((dequantize(packed, len(values), bits=bits) - inside).abs() <= bounds(inside, bits)).all()


@BITS
def test_infinities_count_as_the_ends_of_the_range_and_a_nan_spoils_its_group_alone(bits):
    x = torch.ones(1, 192)
    x[0, 0], x[0, 5], x[0, 100] = math.inf, -math.inf, math.nan
    back = dequantize(quantize(x, bits), 192, bits=bits)
    assert back[0, 5] == -FP16_MAX and back[0, 0] == pytest.approx(FP16_MAX, rel=0.002)
    assert back[0, 64:128].isnan().all()
    assert (back[0, 128:] == 1).all()


@pytest.mark.parametrize("value", [0.0, -1.0, 0.1, 65504.0, -65504.0, 6e-8, 3.14159e-5])
@BITS
def test_equal_numbers_come_back_as_close_as_fp16(value, bits):
    x = torch.full((3, 70), value)
    back = dequantize(quantize(x, bits), 70, bits=bits)
    assert (back == back[0, 0]).all()
    assert ((back - x).abs() <= (x.half().float() - x).abs()).all()


def test_sixteen_evenly_spaced_values_are_exact():
    x = torch.arange(64).remainder(16).float().mul(0.25).sub(2).view(1, 64)
    assert torch.equal(dequantize(quantize(x), 64), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n", [64, 72])
@BITS
def test_shapes_dtypes_and_places(dtype, n, bits):
    """KV as [tokens, heads, head_dim], a slice of something larger, into a slice of something larger."""
    x = torch.randn(7, 6, n, generator=torch.Generator().manual_seed(0)).to(dtype)
    packed = quantize(x[:, 1:4], bits)
    assert packed.shape == (7, 3, row_bytes(n, bits))
    assert torch.equal(packed, quantize(x[:, 1:4].float(), bits))
    plain = dequantize(packed, n, dtype=dtype, bits=bits)
    assert plain.dtype == dtype and torch.equal(plain, dequantize(packed, n, bits=bits).to(dtype))
    place = torch.zeros(7, 5, n, dtype=dtype)
    assert dequantize(packed, n, out=place[:, 2:], bits=bits) is not None
    assert torch.equal(place[:, 2:], plain) and (place[:, :2] == 0).all()
    whole = torch.empty(7, 3, n, dtype=dtype)
    assert dequantize(packed, n, out=whole, bits=bits) is whole and torch.equal(whole, plain)
    wide = torch.zeros(7, 3, row_bytes(n, bits) + 5, dtype=packed.dtype)
    wide[..., 3:-2] = packed
    assert torch.equal(dequantize(wide[..., 3:-2], n, dtype=dtype, bits=bits), plain)
    assert quantize(x[:0], bits).shape == (0, 6, row_bytes(n, bits)) and dequantize(packed[:0], n, bits=bits).shape == (
        0,
        3,
        n,
    )


@BITS
def test_rows_do_not_depend_on_each_other(bits, monkeypatch):
    x = torch.randn(50, 100, generator=torch.Generator().manual_seed(0))
    whole = quantize(x, bits)
    back = dequantize(whole, 100, bits=bits)
    monkeypatch.setattr(quant, "_THREAD_VALUES", 1)
    assert torch.equal(quantize(x, bits), whole)
    assert torch.equal(dequantize(whole, 100, bits=bits), back)
    assert torch.equal(quantize(x[7:8], bits), whole[7:8])


def test_the_example_in_the_documentation():
    packed = quantize(torch.tensor([-1, 0.5, 2, 0, 1.25, -0.25]))
    assert bytes(packed.tolist()).hex(" ") == "50 b8 4f 66 32 00 bc"
    back = dequantize(packed, 6).tolist()
    assert back == pytest.approx([-1, 0.59961, 1.99927, -0.00024, 1.19946, -0.20020], abs=1e-5)
