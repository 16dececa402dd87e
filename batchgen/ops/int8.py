"""Int8 rows, the format of weights of 8 bits: their layout, and a reference in torch.

Results of the reference equal those of the kernels bit for bit.

A weight matrix [rows, n] is stored as int8 [rows, row_bytes(n)]. A row has n codes, zeros up to a multiple of four, and
a scale (little-endian fp32). A weight is code * scale, and scale = largest / 127, where `largest` is the largest
absolute value in the row. If scales are negative, the rows were rotated (`rotate`) before they were quantized, and the
scale is |scale|. Either all rows of a matrix are rotated or none.

`linear` quantizes each row of x in the same way, and rotates it first if the weight is rotated. Products of codes are
summed as integers, so sums are exact in any order. All later operations are in fp32, each rounded to nearest even, in
the order of `_finished`. The kernels do the same on every instruction set (csrc/matmul/int8.h). So a result depends
neither on the machine nor on other rows of x.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from batchgen.core.dtypes import INT8, weight_row_bytes
from batchgen.ops.long_steps import note

_LARGEST = 127.0
_LEAST = 2.0**-100  # a row of smaller numbers counts as zeros
# Values of an operand or a result that are worked on at a time, and on a GPU of a weight, so that there are fewer
# launches: for memory that the planner counts on (planner/sizes.py).
_VALUES, _GPU_WEIGHT_VALUES = 1 << 21, 1 << 23
_FEWEST_ROWS = 16
# Operations of one part on a GPU, at most: of the rows of activations, of a weight.
_LINEAR_OPERATIONS, _PRODUCT_OPERATIONS = 120, 8
_BLOCK = 64  # values that are rotated together


def row_bytes(n: int) -> int:
    """Bytes of an int8 row of `n` weights, its scale included."""
    return weight_row_bytes(n, INT8)


def to_codes(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize rows symmetrically to 8 bits.

    A code is x * (127 / largest), rounded to nearest even. A row with a NaN or an infinity gets codes of zero and the
    scale NaN.

    Args:
        x: Numbers [rows, n] of any float dtype.

    Returns:
        Codes, int8 [rows, n]; scales, fp32 [rows, 1].
    """
    x = x.float()
    largest = x.abs().amax(-1, keepdim=True)
    finite = largest.isfinite()
    counts = finite & (largest >= _LEAST)
    whole = torch.full_like(largest, _LARGEST)
    steps = torch.where(counts, whole / largest, 0.0)
    scale = torch.where(counts, largest / whole, torch.where(finite, 0.0, torch.nan))
    return torch.where(counts, x * steps, 0.0).round_().to(torch.int8), scale


def join(codes: Tensor, scale: Tensor) -> Tensor:
    """Int8 rows, [rows, row_bytes(n)], from codes, int8 [rows, n], and scales, fp32 [rows, 1]."""
    n = codes.shape[1]
    rows = codes.new_zeros(len(codes), row_bytes(n))
    rows[:, :n] = codes
    rows[:, -4:] = scale.float().contiguous().view(torch.int8)
    return rows


def split(rows: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Codes, a view int8 [rows, n], and scales, fp32 [rows, 1], of int8 rows of n weights."""
    return rows[:, :n], rows[:, -4:].clone(memory_format=torch.contiguous_format).view(torch.float32)


def rotate(x: Tensor) -> Tensor:
    """Multiply each whole block of 64 values of x's last dimension by the Hadamard matrix / 8, in fp32.

    Values after the last whole block do not change. The product of two rotated rows equals the product of the rows. A
    value far larger than its neighbours is spread over 64 values, so it no longer determines the scale of the row alone
    (QuaRot: Ashkboos et al., 2024). The matrix is its own inverse.
    """
    x = x.float()
    whole = x.shape[-1] // _BLOCK * _BLOCK
    y = x[..., :whole].unflatten(-1, (-1, _BLOCK))
    apart = 1
    while apart < _BLOCK:
        first, second = y.unflatten(-1, (-1, 2, apart)).unbind(-2)
        y = torch.stack((first + second, first - second), -2).flatten(-3)
        apart *= 2
    return torch.cat((y.flatten(-2) * (1 / 8), x[..., whole:]), -1)


def is_rotated(rows: Tensor) -> Tensor:
    """Tell whether int8 rows were rotated before they were quantized: bool []. Their scales are then negative."""
    return rows[0, -1] < 0  # the byte with the sign


def quantize(x: Tensor) -> Tensor:
    """Rotate and quantize a matrix [rows, n] of any float dtype to int8 rows, [rows, row_bytes(n)]."""
    packed = torch.empty(len(x), row_bytes(x.shape[1]), dtype=torch.int8, device=x.device)
    for some in _parts(len(x), x.shape[1]):
        codes, scale = to_codes(rotate(x[some]))
        packed[some] = join(codes, -scale)
    return packed


def dequantize(rows: Tensor, n: int, out: Tensor) -> Tensor:
    """Dequantize int8 rows, [rows, row_bytes(n)], into `out` [rows, n] of any float dtype. A rotation is reversed."""
    for some in _parts(len(rows), n):
        codes, scale = split(rows[some], n)
        values = codes * scale.abs()
        out[some] = torch.where(is_rotated(rows), rotate(values), values)
    return out


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute activation(x weightᵀ + bias) + residual for a weight of int8 rows. Sums of products are exact.

    Args:
        x: Activations [M, K].
        weight: Int8 rows [N, row_bytes(K)].
        bias: Bias [N], or None.
        activation: Name of an activation of `dispatch.linear`, or None.
        residual: Tensor of the result's shape, which is added last; or None.
        out: Tensor for the result. None: a new tensor.
        out_dtype: Dtype of a new result. None: x's dtype.
    """
    columns = len(weight) // 2 if activation in _GATES else len(weight)
    if out is None:
        out = torch.empty(len(x), columns, dtype=out_dtype or x.dtype, device=x.device)
    rotated = is_rotated(weight)
    for some in _parts(len(x), max(x.shape[1], len(weight))):
        values = x[some].float()
        codes, scale = to_codes(torch.where(rotated, rotate(values), values))
        y = _scaled_sums(codes, weight) * scale
        out[some] = _finished(y, bias, activation, None if residual is None else residual[some])
        note(_LINEAR_OPERATIONS)
    return out


def _scaled_sums(codes: Tensor, weight: Tensor) -> Tensor:
    """Sums of products of codes, rounded to fp32 and multiplied by the scales of the weight's rows.

    On the CPU sums are in fp64, so exact. On a GPU, where fp64 has a fraction of the rate, codes are exact in fp16 and
    sums are in fp32, by tensor cores where torch gives such sums out.
    """
    depth, on_gpu = codes.shape[1], codes.is_cuda
    dtype = (torch.float16 if gives_wide_sums() else torch.float32) if on_gpu else torch.float64
    wide_sums = {"out_dtype": torch.float32} if dtype == torch.float16 else {}
    wide = codes.to(dtype)
    scaled = torch.empty(len(codes), len(weight), device=codes.device)
    for some in _parts(len(weight), depth, _GPU_WEIGHT_VALUES if on_gpu else _VALUES):
        w, scale = split(weight[some], depth)
        scaled[:, some] = torch.mm(wide, w.to(dtype).T, **wide_sums).float() * scale.abs().view(-1)
        note(_PRODUCT_OPERATIONS)
    return scaled


def gives_wide_sums() -> bool:
    """Tell whether torch gives products of 16-bit matrices on a GPU out in fp32."""
    return tuple(int(n) for n in torch.__version__.split(".")[:2]) >= (2, 8)


def _finished(y: Tensor, bias: Tensor | None, activation: str | None, residual: Tensor | None) -> Tensor:
    y = y + (0.0 if bias is None else bias.float())
    if activation in _GATES:
        gate, up = y.chunk(2, dim=-1)
        y = _GATES[activation](gate, up)
    elif activation is not None:
        y = _ACTIVATIONS[activation](y)
    return y if residual is None else y + residual.float()


def _parts(rows: int, width: int, values: int | None = None) -> Iterator[slice]:
    step = max(_FEWEST_ROWS, (values or _VALUES) // max(1, width))
    return (slice(start, min(rows, start + step)) for start in range(0, rows, step))


# Functions as csrc/simd/numeric.h has them (`Apart`).


def _polynomial(x: Tensor, first: float, *others: float) -> Tensor:
    p = torch.full_like(x, first)
    for coefficient in others:
        p = p * x + coefficient
    return p


def _exp(x: Tensor) -> Tensor:
    """The exponential function of x, where x is limited to [-87, 87], with the operations of the kernels."""
    bounded = x.clamp(-87.0, 87.0)
    n = (bounded * 1.44269504).round_()
    r = n * 2.12194440e-4 + (n * -0.693359375 + bounded)
    p = _polynomial(r, 1 / 5040, 1 / 720, 1 / 120, 1 / 24, 1 / 6, 0.5, 1.0, 1.0)
    return p * (n.nan_to_num().int() + 127 << 23).view(torch.float32)


def _sigmoid(x: Tensor) -> Tensor:
    return torch.ones_like(x) / (_exp(0.0 - x) + 1.0)


# Coefficients of erf(a) / a in s = 2 (a / 3.9)^2 - 1.
_ERF = (
    0.00165119988,
    -0.00409022067,
    0.00280105066,
    -0.00334578869,
    0.0124268159,
    -0.022294879,
    0.029866837,
    -0.041713018,
    0.0576697476,
    -0.0740148872,
    0.0907058865,
    -0.109513976,
    0.134689063,
    -0.181011543,
    0.362583995,
)


def _erf(x: Tensor) -> Tensor:
    """The error function by a polynomial, with the operations of the kernels."""
    a = x.clamp(-3.9, 3.9)
    p = _polynomial(a * a * 0.131492436 - 1.0, *_ERF)
    return (p * a).clamp(-1.0, 1.0)


def _gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (_erf(x * 0.70710678) + 1.0)


def _gelu_tanh(x: Tensor) -> Tensor:
    inner = (0.044715 * (x * x) * x + x) * 0.79788456
    tanh = 2.0 * _sigmoid(inner + inner) - 1.0
    return 0.5 * x * (tanh + 1.0)


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": torch.relu, "gelu": _gelu, "gelu_tanh": _gelu_tanh}


def _swiglu_oai(gate: Tensor, up: Tensor) -> Tensor:
    bounded = gate.clamp(max=7.0)
    return bounded * _sigmoid(bounded * 1.702) * (up.clamp(-7.0, 7.0) + 1.0)


_GATES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "silu_mul": lambda gate, up: gate * _sigmoid(gate) * up,
    "gelu_tanh_mul": lambda gate, up: _gelu_tanh(gate) * up,
    "swiglu_oai_mul": _swiglu_oai,
    "gelu_mul": lambda gate, up: _gelu(gate) * up,
}
