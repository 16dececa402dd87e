"""Unpacked GGUF rows against the gguf package's own numpy, on every instruction set that this machine has."""

import gguf
import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.ops import cpp as kernels

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(params=kernels.instruction_sets(), autouse=True, scope="module")
def instruction_set(request):
    with kernels.using(request.param):
        yield request.param


def expected(kind: str, packed: np.ndarray) -> torch.Tensor:
    with np.errstate(all="ignore"):
        return torch.from_numpy(gguf.quants.dequantize(packed, GGMLQuantizationType[kind]).copy())


def unpacked(kind: str, packed: np.ndarray, dtype: torch.dtype, interleaved: int = 0) -> torch.Tensor:
    values, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    out = torch.full((len(packed), packed.shape[1] // block_bytes * values), 7.0, dtype=dtype)
    return kernels.unpack_blocks(kind, torch.from_numpy(packed), out, interleaved)


def assert_same_bits(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Signs of zeros too; of what is no number only that it is none."""
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(found.nan_to_num(nan=7.0).view(torch.int32), wanted.nan_to_num(nan=7.0).view(torch.int32))


@pytest.mark.parametrize("kind", kernels.GGUF_TYPES)
@settings(max_examples=15, deadline=None)
@given(rows=st.integers(1, 5), blocks=st.integers(1, 4), seed=st.integers(0, 2**20))
def test_any_bytes_are_unpacked_as_by_the_gguf_package(kind, rows, blocks, seed):
    """Random bytes have scales of every size, none, infinite ones and such as are no numbers."""
    block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1]
    packed = np.random.default_rng(seed).integers(0, 256, (rows, blocks * block_bytes), dtype=np.uint8)
    wanted = expected(kind, packed)
    assert_same_bits(unpacked(kind, packed, torch.float32), wanted)
    for dtype in DTYPES[1:]:  # instructions that round to bfloat16 may take what is below 2^-126 for nothing
        torch.testing.assert_close(
            unpacked(kind, packed, dtype), wanted.to(dtype), rtol=0, atol=2.0**-126, equal_nan=True
        )


@pytest.mark.parametrize("kind", kernels.GGUF_TYPES)
@pytest.mark.parametrize("byte", [0x00, 0x80, 0xFF, 0x7B, 0x01])
def test_blocks_of_one_byte_repeated(kind, byte):
    block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1]
    packed = np.full((2, 3 * block_bytes), byte, dtype=np.uint8)
    assert_same_bits(unpacked(kind, packed, torch.float32), expected(kind, packed))


@pytest.mark.parametrize("kind", ["F32", "BF16", "Q4_1", "Q6_K"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [2, 8, 64])
def test_interleaved_rows_are_put_into_order(kind, dtype, head_dim):
    """Enough rows for all threads."""
    values = np.random.default_rng(0).standard_normal((4 * head_dim, 256), dtype=np.float32)
    if kind == "Q6_K":  # the package does not pack these
        packed = np.random.default_rng(0).integers(0, 60, (4 * head_dim, 210), dtype=np.uint8)
    else:
        packed = gguf.quants.quantize(values, GGMLQuantizationType[kind]).view(np.uint8)
    in_file = expected(kind, packed).to(dtype)
    ordered = in_file.view(4, head_dim // 2, 2, 256).transpose(1, 2).reshape(in_file.shape)
    assert torch.equal(unpacked(kind, packed, dtype, interleaved=head_dim), ordered)


@pytest.mark.parametrize("columns", [1, 3, 31, 33])
def test_plain_rows_may_have_any_length(columns):
    values = torch.randn(5, columns, generator=torch.Generator().manual_seed(0))
    for kind, stored in (("F32", torch.float32), ("F16", torch.float16), ("BF16", torch.bfloat16)):
        packed = values.to(stored).view(torch.uint8)
        for dtype in DTYPES:
            out = kernels.unpack_blocks(kind, packed, torch.empty(5, columns, dtype=dtype))
            assert torch.equal(out, values.to(stored).to(dtype))
