"""Weights in FP8 (E4M3: 4 bits of exponent, 3 of mantissa; Micikevicius et al., 2022), as weights only: activations stay as they are.

A weight is its number of 8 bits times a scale: one for the matrix, for each row, or for each block of rows and columns
(`weight_block_size`, as DeepSeek and Qwen have them). Scales of activations, which files may have too (`input_scale`), are not used.

In memory and in weight stores they are rows of blocks (`FP8_FORMATS`, csrc/quant/fp8.h): a scale in fp32, and the numbers that it is for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from batchgen.core.dtypes import FP8_FORMATS, weight_row_bytes
from batchgen.core.errors import InputError
from batchgen.models.formats.quantization import Scheme, fitting_blocks
from batchgen.models.tensor_files import reading
from batchgen.models.tensor_files.headers import TensorInfo
from batchgen.models.tensor_files.reading import check_stored, read_numbers, read_rows
from batchgen.ops import cpp as kernels

_NUMBERS = ("F8_E4M3",)
_SCALE_NAMES = ("weight_scale_inv", "weight_scale")


@dataclass(frozen=True)
class Fp8Numbers:
    """A matrix [rows, columns]. block: rows and columns that have one scale."""

    shape: tuple[int, int]
    block: tuple[int, int]
    numbers: tuple[str, TensorInfo]
    scales: tuple[str, TensorInfo]

    def fill(self, out: Tensor) -> None:
        """Fill `out` with numbers, [rows, columns] of any float dtype, or with rows of blocks, uint8 [rows, bytes of a row].

        Raises InputError where scales or weights are no numbers.
        """
        (rows, n), (block_rows, block_columns) = self.shape, self.block
        name, info = self.scales
        scales = torch.empty(math.prod(info.shape))
        read_numbers(name, info, scales)
        if not bool(scales.isfinite().all()):
            raise InputError(f"tensor {name} in {info.path} has scales that are no numbers: fetch the model again")
        scales = scales.view(-(-rows // block_rows), -1)
        of_row, of_column = torch.arange(rows) // block_rows, torch.arange(n) // block_columns
        step = max(1, reading.CHUNK_VALUES // n)
        kind = next(iter(fitting_blocks(FP8_FORMATS, n, block_columns)), None)
        for start in range(0, rows, step):
            stop = min(rows, start + step)
            values, each = read_rows(*self.numbers, start, stop), scales[of_row[start:stop]]
            if bool((values & 127 == 127).any()):
                name, info = self.numbers
                raise InputError(f"tensor {name} in {info.path} has weights that are no numbers: fetch the model again")
            if out.dtype == torch.uint8:
                _to_blocks(values, each, of_column, out[start:stop])
            elif kind:  # the kernels' threads are faster
                blocks = torch.empty(len(values), weight_row_bytes(n, kind), dtype=torch.uint8)
                _to_blocks(values, each, of_column, blocks)
                kernels.unpack_blocks(kind.upper(), blocks, out[start:stop])
            else:
                out[start:stop] = values.view(torch.float8_e4m3fn).float().mul_(each[:, of_column])


def find(tensors: Mapping[str, TensorInfo], stem: str, shape: tuple[int, int], scheme: Scheme) -> Fp8Numbers | None:
    """The matrix that a file calls `stem`, checked; None: it is not in 8 bits.

    Raises InputError where its scales are missing, or tensors are not what scheme and shape ask for.
    """
    name = f"{stem}.weight"
    if name not in tensors or not tensors[name].dtype.startswith("F8_"):
        return None
    info = tensors[name]
    check_stored(name, info, shape, _NUMBERS)
    found = next((f"{stem}.{suffix}" for suffix in _SCALE_NAMES if f"{stem}.{suffix}" in tensors), None)
    if found is None:
        raise InputError(
            f"tensor {name} in {info.path} is in FP8 without scales (no {stem}.weight_scale): fetch the model again, or take one in bfloat16"
        )
    scales = tensors[found]
    check_stored(found, scales, scales.shape, ("F32", "BF16", "F16"))
    return Fp8Numbers(shape, _block(found, scales, shape, scheme), (name, info), (found, scales))


def _block(name: str, scales: TensorInfo, shape: tuple[int, int], scheme: Scheme) -> tuple[int, int]:
    if scheme.block is not None:
        rows, columns = scheme.block
        wanted = (-(-shape[0] // rows), -(-shape[1] // columns))
        if scales.shape == wanted:
            return scheme.block
        raise InputError(
            f"tensor {name} in {scales.path} is {list(scales.shape)}; blocks of {rows} x {columns} ask for {list(wanted)}"
        )
    if math.prod(scales.shape) == 1:
        return shape
    if scales.shape in ((shape[0], 1), (shape[0],)):
        return 1, shape[1]
    raise InputError(
        f"tensor {name} in {scales.path} is {list(scales.shape)}: only a scale for a matrix of {list(shape)}, for each of its rows, or"
        " for blocks that config.json states (weight_block_size), is supported"
    )


def _to_blocks(values: Tensor, scales: Tensor, of_column: Tensor, out: Tensor) -> None:
    """Rows of numbers uint8 [rows, n], whose column i has the scale of_column[i] of its row, as blocks in `out`."""
    rows, n = values.shape
    (size,) = (size for size, num_bytes in FP8_FORMATS.values() if n // size * num_bytes == out.shape[1])
    blocks = out.view(rows, n // size, 4 + size)
    heads = scales[:, of_column[::size]].contiguous()
    blocks[..., :4] = heads.view(torch.uint8).view(rows, n // size, 4)
    blocks[..., 4:] = values.view(rows, n // size, size)
