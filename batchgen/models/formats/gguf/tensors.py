"""The tensors of a GGUF as parts of a model, read as numbers or as block-quantized rows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from batchgen.core.errors import InputError
from batchgen.models.config import ModelConfig
from batchgen.models.families import GRANITE_MIXTURES
from batchgen.models.formats.base import Change, NamedTensor, StoredPart, Tensors, unchanged
from batchgen.models.formats.gguf.fields import Place, place_of
from batchgen.models.formats.head_order import by_group, in_head_order, in_sections
from batchgen.models.layouts import Shape, all_parts
from batchgen.models.state_layers import DeltaNet
from batchgen.models.tensor_files import reading
from batchgen.models.tensor_files.headers import TensorInfo
from batchgen.models.tensor_files.reading import read_ahead, read_by_threads, read_into
from batchgen.models.tensor_files.rows_in_file import FilePart
from batchgen.models.tensor_files.table_rows import FileRows
from batchgen.ops import cpp as kernels


def gguf_parts(config: ModelConfig, tensors: Tensors, change: Change = unchanged) -> dict[tuple[str, int], StoredPart]:
    """Every part of a model in a GGUF, by name and layer.

    Args:
        config: Configuration of the model.
        tensors: All tensors of the GGUF.
        change: Change of each part.

    Raises:
        InputError: A tensor is missing, or has another shape than required or a type that is not supported.
    """
    parts: dict[tuple[str, int], StoredPart] = {}
    for part in all_parts(config, unfused=True):
        name, info = _find(config, tensors, part.name, part.layer)
        _check(name, info, part.shape)
        stored: StoredPart = GgufPart(name, info, _interleaved_head_dim(config, part.name))
        if isinstance(config.state, DeltaNet) and config.state.out_by_member:
            stored = by_group(config.state, part.name, stored)
        if part.name == "linear_attn.A_log":
            stored = _LogOfRate(stored)
        stored = in_sections(config, part.name, change(part, stored))
        parts[part.name, part.layer] = in_head_order(config, part.name, stored)
    return parts


def _find(config: ModelConfig, tensors: Tensors, part: str, layer: int) -> NamedTensor:
    """The name of the tensor that has a part, and the place of the part.

    The part may be one expert of the tensor, or one of several fused matrices.
    """
    place = place_of(config, part, layer)
    if place.fused is not None and place.name not in tensors and place.fused[0] in tensors:
        return _half_of_expert(tensors, place, *place.fused)
    info = tensors[place.name]
    if place.of is None:
        return place.name, info
    first, stop, total = place.of
    if not info.shape or info.shape[0] != total:
        what = "experts first" if place.is_expert else "rows"
        raise InputError(
            f"tensor {place.name} in {info.path} is {list(info.shape)}, its config asks for {total} {what}"
        )
    shape = info.shape[1:] if place.is_expert else (stop - first, *info.shape[1:])
    size = info.num_bytes // total
    return place.name, replace(info, shape=shape, offset=info.offset + first * size, num_bytes=(stop - first) * size)


def _half_of_expert(tensors: Tensors, place: Place, name: str, which: int) -> NamedTensor:
    """The name of the tensor that has gate and up of all experts, and the place of one of them in it."""
    assert place.of is not None, "the part belongs to an expert"
    (expert, _, total), info = place.of, tensors[name]
    if len(info.shape) != 3 or info.shape[0] != total or info.shape[1] % 2:
        raise InputError(
            f"tensor {name} in {info.path} is {list(info.shape)}, its config asks for {total} experts first"
        )
    size = info.num_bytes // (2 * total)
    shape = (info.shape[1] // 2, info.shape[2])
    return name, replace(info, shape=shape, offset=info.offset + (2 * expert + which) * size, num_bytes=size)


def _check(name: str, info: TensorInfo, shape: Shape) -> None:
    """Raise InputError unless a tensor has a given shape and a supported type."""
    where = f"tensor {name} in {info.path}"
    if _without_ones(info.shape) != _without_ones(shape):
        raise InputError(f"{where} is {list(info.shape)}, its config asks for {list(shape)}")
    if info.dtype not in kernels.GGUF_TYPES and not _gguf_package_reads(info.dtype):
        raise InputError(f"{where} has the unsupported type {info.dtype}")


_INTERLEAVED = ("llama", "mixtral", "granite", "smollm3", "ministral3", *GRANITE_MIXTURES)


def _interleaved_head_dim(config: ModelConfig, part: str) -> int | None:
    """The number of rows of a head, if llama.cpp's converter has interleaved the rows of this part; otherwise None.

    It does so for queries and keys of the families that it converts as it converts Llama.
    """
    return config.head_dim if config.family in _INTERLEAVED and part.split(".")[0] in ("q", "k") else None


@dataclass(frozen=True)
class GgufPart(StoredPart):
    """A stored part of a model in a GGUF.

    Attributes:
        name: Name of the tensor that has the part.
        info: Place of the part.
        interleaved: Number d of rows of a head if the file has them in the order 0, d/2, 1, d/2 + 1, ...; None: they
            are in order.
    """

    name: str
    info: TensorInfo
    interleaved: int | None

    def fill(self, out: Tensor) -> None:
        """Fill a tensor with the part: with its stored rows if `out` is uint8, otherwise with numbers."""
        name, info, head_dim = self.name, self.info, self.interleaved
        if out.dtype == torch.uint8:
            read_by_threads(name, info, memoryview(out.view(-1).numpy()))
            if head_dim:
                out.copy_(_halves_apart(out, head_dim))
            return
        unit = head_dim or 1
        rows = out.view(-1, out.shape[-1] if out.ndim > 1 or not head_dim else 1)
        row_bytes = info.num_bytes // len(rows)
        if row_bytes * len(rows) != info.num_bytes:
            raise InputError(
                f"tensor {name} in {info.path} has {info.dtype} blocks across its rows, which is not supported"
            )
        count = max(1, reading.CHUNK_VALUES // max(1, rows.shape[1]) // unit) * unit
        buffer = torch.empty(min(count, len(rows)), row_bytes, dtype=torch.uint8)
        start = 0
        for piece in rows.split(count):
            packed = buffer[: len(piece)]
            read_into(name, info, start, memoryview(packed.view(-1).numpy()))
            self._unpack(packed, piece)
            start += packed.nbytes

    def table_rows(self) -> FileRows:
        return FileRows(self.name, self.info, self._unpack)

    def _unpack(self, packed: Tensor, out: Tensor) -> None:
        """Dequantize stored rows, uint8 [rows, bytes of a row], to numbers [rows, columns]."""
        if self.info.dtype in kernels.GGUF_TYPES:
            kernels.unpack_blocks(self.info.dtype, packed, out, self.interleaved or 0)
        else:
            _unpack_by_gguf(self.info, packed, self.interleaved, out)

    def in_file(self) -> FilePart:
        dim = self.interleaved
        order = (*range(0, dim, 2), *range(1, dim, 2)) if dim else None
        return FilePart(self.name, self.info, math.prod(self.info.shape[:-1]), order)


@dataclass(frozen=True)
class _LogOfRate(StoredPart):
    """The logarithms of rates of decay, of which the file has the rates, below 0."""

    part: StoredPart

    def fill(self, out: Tensor) -> None:
        self.part.fill(rates := torch.empty(out.shape))
        if not bool((rates < 0).all()):
            raise InputError("the GGUF has rates of decay (ssm_a) that are not below 0: fetch it again")
        out.copy_((-rates).log())


def read_layer_ahead(tensors: Mapping[str, TensorInfo], layer: int) -> None:
    """Start reading a layer's tensors into the page cache. Nothing happens if there is no such layer.

    The tensors of a layer are neighbours; in a split GGUF they may be in two files.
    """
    by_file: dict[Path, list[TensorInfo]] = {}
    for name, info in tensors.items():
        if name.startswith(f"blk.{layer}."):
            by_file.setdefault(info.path, []).append(info)
    for path, infos in by_file.items():
        start, stop = min(info.offset for info in infos), max(info.offset + info.num_bytes for info in infos)
        if stop - start <= 2 * sum(info.num_bytes for info in infos):  # else the file has another order
            read_ahead(path, start, stop)


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape without dimensions of size 1, because a GGUF does not distinguish a vector from a matrix of one row."""
    return shape[1:] if len(shape) > 1 and shape[0] == 1 else shape


@lru_cache
def _gguf_package_reads(kind: str) -> bool:
    import numpy as np
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    number = GGMLQuantizationType[kind]
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[number][1]), dtype=np.uint8), number)
    except NotImplementedError:
        return False
    return True


def _unpack_by_gguf(info: TensorInfo, packed: Tensor, head_dim: int | None, out: Tensor) -> None:
    """Dequantize rows of a type that the kernels do not support, by the package gguf."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    values = torch.from_numpy(dequantize(packed.numpy(), GGMLQuantizationType[info.dtype])).view(out.shape)
    out.copy_(_halves_apart(values, head_dim) if head_dim else values)


def _halves_apart(rows: Tensor, head_dim: int) -> Tensor:
    """A copy of rows of whole heads with the two halves of each head no longer interleaved."""
    return rows.view(-1, head_dim // 2, 2, rows.shape[1]).transpose(1, 2).reshape(rows.shape)
