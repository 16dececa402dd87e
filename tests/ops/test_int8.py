"""Rows of 8 bits: what comes back of them, and what the reference in torch makes of them."""

import pytest
import torch
import torch.nn.functional as F

from batchgen.ops import dispatch as ops
from batchgen.ops import int8


def random(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n", [1, 3, 64, 577])
def test_numbers_come_back_within_half_a_step(dtype, n):
    x = (random(n, 40, n) * torch.logspace(-3, 3, 40)[:, None]).to(dtype)
    packed = int8.quantize(x)
    assert packed.dtype == torch.int8 and packed.shape == (40, int8.row_bytes(n)) == (40, (n + 3) // 4 * 4 + 4)
    codes, scale = int8.split(packed, n)
    rotated = int8.rotate(x)
    assert (codes.int().abs().amax(1) == 127).all()
    assert torch.equal(scale, -rotated.abs().amax(1, keepdim=True) / 127)
    assert ((codes * -scale - rotated).abs() <= -scale * (0.5 + 1e-5)).all()
    back = int8.dequantize(packed, n, torch.empty(40, n))
    assert torch.equal(back, int8.rotate(codes * -scale))
    error, bound = (back - x.float()).norm(dim=1), -scale.view(-1) * (0.5 + 1e-4) * n**0.5
    assert (error <= bound).all()
    rounded = int8.dequantize(packed, n, torch.empty(40, n, dtype=dtype))
    assert torch.equal(rounded, back.to(dtype))


def test_the_layout_is_as_documented():
    """docs/weight_store.md has this row: too short for a block, it is as it was, rotated."""
    packed = int8.quantize(torch.tensor([[-1.0, 0.5, 2.0, 0.0, 1.25, -0.25]]))
    assert packed.view(torch.uint8)[0].tolist() == list(bytes.fromhex("c0207f004ff00000" + "040281bc"))


@pytest.mark.parametrize("n", [5, 64, 200])
def test_rotating_is_hadamards_matrix(n):
    x = random(n, 3, n)
    matrix = torch.eye(n)
    for start in range(0, n // 64 * 64, 64):
        matrix[start : start + 64, start : start + 64] = ops.rotation(64)
    torch.testing.assert_close(int8.rotate(x), x @ matrix, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(int8.rotate(int8.rotate(x)), x, atol=1e-5, rtol=1e-5)


def test_a_large_value_costs_its_neighbours_little():
    """As some channels of activations have them: without rotation they would take all codes for themselves."""
    x, w = random(0, 9, 256), random(1, 30, 256) / 16
    x[:, 7] *= 300
    expected = x.double() @ w.double().T
    plain = int8.join(*int8.to_codes(w))
    errors = [(int8.linear(x, rows) - expected).norm() for rows in (int8.quantize(w), plain)]
    assert errors[0] < errors[1] / 2


@pytest.mark.parametrize("larger", [1, 30])
def test_fp8_rounds_activations_more_than_rows_of_8_bits_do(larger):
    """The figures of docs/cuda.md: errors of products with a matrix, by what their activations are rounded to."""
    columns = 4096
    x = random(1, 128, columns) * torch.where(torch.arange(columns) % 512 == 0, float(larger), 1.0)
    weight = random(2, 256, columns).to(torch.float8_e4m3fn)
    exact = x.double() @ weight.double().T

    def error(rounded):
        return ((rounded.double() @ weight.double().T - exact).norm() / exact.norm()).item()

    scale = x.abs().amax(1, keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
    eight = (x / scale).to(torch.float8_e4m3fn)
    product = torch._scaled_mm(
        eight, weight.T, scale_a=scale, scale_b=torch.ones(1, len(weight)), out_dtype=torch.float32
    )
    of_fp8, of_rows = (
        error(eight.double() * scale),
        error(int8.dequantize(int8.quantize(x), columns, torch.empty_like(x))),
    )
    assert (product - exact).norm() / exact.norm() == pytest.approx(of_fp8, rel=0.01)
    assert 0.02 < of_fp8 < 0.03 and of_rows < 0.6 * of_fp8 and error(x.bfloat16()) < 0.003


def test_joined_rows_are_split_into_what_they_were_made_of():
    codes = torch.randint(-128, 128, (9, 30), dtype=torch.int8, generator=torch.Generator().manual_seed(0))
    scale = random(1, 9, 1).abs()
    got = int8.split(int8.join(codes, scale), 30)
    assert torch.equal(got[0], codes) and torch.equal(got[1], scale)


def test_rows_without_numbers():
    x = torch.zeros(4, 8)
    x[1, 3], x[2, 0], x[3, 5] = torch.nan, torch.inf, 1e-35
    codes, scale = int8.to_codes(x)
    assert not codes.any()
    assert scale.view(-1).isnan().tolist() == [False, True, True, False] and not scale[[0, 3]].any()


@pytest.mark.parametrize(
    "activation", [None, "relu", "gelu", "gelu_tanh", "silu_mul", "gelu_tanh_mul", "swiglu_oai_mul", "gelu_mul"]
)
def test_linear_is_close_to_that_of_numbers(activation):
    x, w, bias = random(0, 33, 256), random(1, 80, 256) / 16, random(2, 80)
    got = int8.linear(x, int8.quantize(w), bias, activation=activation)
    rows, scales = int8.split(int8.quantize(w), 256)
    codes, scale = int8.to_codes(int8.rotate(x))
    y = (codes.double() * scale) @ (rows.double() * -scales).T + bias
    expected = {
        None: lambda y: y, "relu": F.relu, "gelu": F.gelu, "gelu_tanh": lambda y: F.gelu(y, approximate="tanh"),
        "silu_mul": lambda y: F.silu(y[:, :40]) * y[:, 40:],
        "gelu_tanh_mul": lambda y: F.gelu(y[:, :40], approximate="tanh") * y[:, 40:],
        "gelu_mul": lambda y: F.gelu(y[:, :40]) * y[:, 40:],
        "swiglu_oai_mul": lambda y: (
            y[:, :40].clamp(max=7) * torch.sigmoid(1.702 * y[:, :40].clamp(max=7)) * (y[:, 40:].clamp(-7, 7) + 1)
        ),
    }[activation](y)  # fmt: skip
    torch.testing.assert_close(got.double(), expected, atol=3e-6, rtol=3e-6)
    plain = x.double() @ w.double().T + bias
    if activation is None:
        assert (got - plain).abs().mean() < 0.01 * plain.abs().mean()


def test_parts_give_what_the_whole_gives(monkeypatch):
    x, w, residual = random(0, 70, 40), int8.quantize(random(1, 90, 40)), random(2, 70, 90)
    whole = int8.linear(x, w, residual=residual)
    monkeypatch.setattr(int8, "_VALUES", 100)
    assert torch.equal(int8.linear(x, w, residual=residual), whole)
    assert torch.equal(int8.quantize(x), torch.cat([int8.quantize(row[None]) for row in x]))


def test_other_devices_have_the_reference(monkeypatch):
    """Whatever kernels there are for their numbers."""
    x, w = torch.empty(3, 8, device="meta"), torch.empty(5, 12, dtype=torch.int8, device="meta")
    asked = []
    monkeypatch.setattr(int8, "linear", lambda *args, **options: asked.append(args[1]))
    ops.linear(x, w)
    assert asked == [w] and ops.pack_weight(w) is w
