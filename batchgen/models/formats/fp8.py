"""FP8 weights (E4M3: 4 bits of exponent, 3 of mantissa; Micikevicius et al., 2022) with scales.

A weight is an 8-bit number times a scale. There is one scale for the matrix, for each row, or for each block of rows
and columns (`weight_block_size`, of DeepSeek and Qwen). Activations are not quantized. Their scales (`input_scale`),
which some files have, are ignored.

In memory and in weight stores, FP8 matrices are block-quantized rows (`core.dtypes.FP8_FORMATS`, csrc/quant/fp8.h). A
block is a scale in fp32, followed by its 8-bit numbers.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from batchgen.core.dtypes import FP8_FORMATS, weight_row_bytes
from batchgen.core.errors import InputError
from batchgen.models.formats.base import NamedTensor, Scheme, StoredPart, Tensors
from batchgen.models.formats.blocks import block_columns, fitting_blocks, has_plain_matrices, largest_blocks
from batchgen.models.formats.stated import Stated, block_shape, refuse

if TYPE_CHECKING:
    from torch import Tensor

    from batchgen.models.tensor_files.headers import TensorInfo

_SCALE_NAMES = ("weight_scale_inv", "weight_scale")


@dataclass(frozen=True)
class Fp8(Scheme):
    """FP8 weights.

    Attributes:
        block: Rows and columns that have one scale; None: there is one scale for each row, or one for the matrix.
    """

    block: tuple[int, int] | None = None

    @classmethod
    def read(cls, config: Stated) -> Fp8:
        """The scheme that a `quantization_config` describes.

        Raises:
            InputError: A value is not supported; the message names it.
        """
        number = config.get("fmt", "e4m3")
        refuse("FP8", {"fmt": number != "e4m3" and (number or repr(number))})
        return cls(block_shape(config.get("weight_block_size")))

    def describe(self) -> str:
        return f"FP8, blocks of {self.block[0]} x {self.block[1]}" if self.block else "FP8"

    def packed_format(self, tensors: Tensors, columns: Collection[int]) -> str | None:
        shared = self.block[1] if self.block else None
        return None if has_plain_matrices(tensors) else largest_blocks(FP8_FORMATS, columns, shared)

    def find(self, tensors: Tensors, stem: str, shape: tuple[int, int], *, in_layer: bool) -> StoredPart | None:
        from batchgen.models.tensor_files.reading import check_stored

        name = f"{stem}.weight"
        if name not in tensors or not tensors[name].dtype.startswith("F8_"):
            return None
        info = tensors[name]
        check_stored(name, info, shape, ("F8_E4M3",))
        scale_name = next((f"{stem}.{suffix}" for suffix in _SCALE_NAMES if f"{stem}.{suffix}" in tensors), None)
        if scale_name is None:
            raise InputError(
                f"tensor {name} in {info.path} is in FP8 without scales (no {stem}.weight_scale): fetch the model "
                "again, or take "
                "one in bfloat16"
            )
        scales = tensors[scale_name]
        check_stored(scale_name, scales, scales.shape, ("F32", "BF16", "F16"))
        return Fp8Matrix(shape, self._block_of(scale_name, scales, shape), (name, info), (scale_name, scales))

    def _block_of(self, name: str, scales: TensorInfo, shape: tuple[int, int]) -> tuple[int, int]:
        """The number of rows and of columns of a matrix that have one scale.

        Raises:
            InputError: The shape of the scales does not fit the matrix.
        """
        if self.block is not None:
            rows, columns = self.block
            wanted = (-(-shape[0] // rows), -(-shape[1] // columns))
            if scales.shape == wanted:
                return self.block
            raise InputError(
                f"tensor {name} in {scales.path} is {list(scales.shape)}; blocks of {rows} x {columns} ask for "
                f"{list(wanted)}"
            )
        if math.prod(scales.shape) == 1:
            return shape
        if scales.shape in ((shape[0], 1), (shape[0],)):
            return 1, shape[1]
        raise InputError(
            f"tensor {name} in {scales.path} is {list(scales.shape)}: only a scale for a matrix of {list(shape)}, for "
            "each of its rows, or"
            " for blocks that config.json states (weight_block_size), is supported"
        )


@dataclass(frozen=True)
class Fp8Matrix(StoredPart):
    """A stored matrix of FP8 weights.

    Attributes:
        shape: Rows and columns.
        block: Rows and columns that have one scale.
        numbers: Name and place of the 8-bit numbers.
        scales: Name and place of the scales.
    """

    shape: tuple[int, int]
    block: tuple[int, int]
    numbers: NamedTensor
    scales: NamedTensor

    def fill(self, out: Tensor) -> None:
        """Fill a tensor with the matrix: with block-quantized rows if `out` is uint8, otherwise with numbers.

        Raises:
            InputError: A scale or a weight is NaN or infinite.
        """
        import torch

        from batchgen.models.tensor_files import reading
        from batchgen.ops import cpp as kernels

        (rows, n), (block_rows, columns) = self.shape, self.block
        scales = self._scales()
        row_scale, column_scale = torch.arange(rows) // block_rows, torch.arange(n) // columns
        step = max(1, reading.CHUNK_VALUES // n)
        block_format = next(iter(fitting_blocks(FP8_FORMATS, n, columns)), None)
        for start in range(0, rows, step):
            stop = min(rows, start + step)
            values, of_rows = self._values(start, stop), scales[row_scale[start:stop]]
            if out.dtype == torch.uint8:
                _to_blocks(values, of_rows, column_scale, out[start:stop])
            elif block_format:  # the kernels' threads are faster
                blocks = torch.empty(len(values), weight_row_bytes(n, block_format), dtype=torch.uint8)
                _to_blocks(values, of_rows, column_scale, blocks)
                kernels.unpack_blocks(block_format.upper(), blocks, out[start:stop])
            else:
                out[start:stop] = values.view(torch.float8_e4m3fn).float().mul_(of_rows[:, column_scale])

    def stored_scales(self) -> Tensor:
        """The scales, fp32 [blocks of rows, blocks of columns]."""
        import torch

        from batchgen.models.tensor_files.reading import read_numbers

        name, info = self.scales
        scales = torch.empty(math.prod(info.shape))
        read_numbers(name, info, scales)
        return scales.view(-(-self.shape[0] // self.block[0]), -1)

    def stored_rows(self, start: int, stop: int) -> Tensor:
        """The 8-bit numbers of rows [start, stop), uint8 [stop - start, columns]."""
        from batchgen.models.tensor_files.reading import read_rows

        return read_rows(*self.numbers, start, stop)

    def _scales(self) -> Tensor:
        scales = self.stored_scales()
        if not bool(scales.isfinite().all()):
            name, info = self.scales
            raise InputError(f"tensor {name} in {info.path} has scales that are no numbers: fetch the model again")
        return scales

    def _values(self, start: int, stop: int) -> Tensor:
        values = self.stored_rows(start, stop)
        if bool((values & 127 == 127).any()):
            name, info = self.numbers
            raise InputError(f"tensor {name} in {info.path} has weights that are no numbers: fetch the model again")
        return values


def _to_blocks(values: Tensor, scales: Tensor, column_scale: Tensor, out: Tensor) -> None:
    """Write rows of FP8 weights as block-quantized rows.

    Args:
        values: 8-bit numbers, uint8 [rows, n].
        scales: Scales of each row, fp32 [rows, scales of a row].
        column_scale: For each column, the index of its scale in the row, int64 [n].
        out: Tensor to fill, uint8 [rows, bytes of a row]. The number of bytes determines the block format.
    """
    import torch

    rows, n = values.shape
    size = block_columns(FP8_FORMATS, n, out.shape[1])
    blocks = out.view(rows, n // size, 4 + size)
    heads = scales[:, column_scale[::size]].contiguous()
    blocks[..., :4] = heads.view(torch.uint8).view(rows, n // size, 4)
    blocks[..., 4:] = values.view(rows, n // size, size)
