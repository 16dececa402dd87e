"""A GGUF's tensors: where each part of a model lies in its files, and its numbers or its rows as they are."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from batchgen.core.errors import InputError
from batchgen.models.config import ModelConfig
from batchgen.models.formats.gguf.fields import place_of
from batchgen.models.rope import rotates_part
from batchgen.models.tensor_files import reading
from batchgen.models.tensor_files.headers import TensorInfo
from batchgen.models.tensor_files.reading import read_ahead, read_by_threads, read_into
from batchgen.models.tensor_files.rows_in_file import FilePart
from batchgen.ops import cpp as kernels

Get = Callable[[str], TensorInfo]


def find(config: ModelConfig, get: Get, part: str, layer: int) -> tuple[str, TensorInfo]:
    """The name of a part's tensor, and where the part lies, which may be one expert's or one of several matrices in it.

    get: gives a tensor by name. Raises InputError.
    """
    place = place_of(config, part, layer)
    info = get(place.name)
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


def read_layer_ahead(tensors: Mapping[str, TensorInfo], layer: int) -> None:
    """Begin to bring a layer's tensors into memory; they lie one behind the other, in a split GGUF perhaps in two files.

    Nothing where there is no such layer.
    """
    by_file: dict[Path, list[TensorInfo]] = {}
    for name, info in tensors.items():
        if name.startswith(f"blk.{layer}."):
            by_file.setdefault(info.path, []).append(info)
    for path, own in by_file.items():
        start, stop = min(info.offset for info in own), max(info.offset + info.num_bytes for info in own)
        if stop - start <= 2 * sum(info.num_bytes for info in own):  # of files that are written in another order
            read_ahead(path, start, stop)


def check(name: str, info: TensorInfo, shape: tuple[int, ...]) -> None:
    """Raise InputError unless a tensor has this shape and a type that can be read."""
    where = f"tensor {name} in {info.path}"
    if _without_ones(info.shape) != _without_ones(shape):
        raise InputError(f"{where} is {list(info.shape)}, its config asks for {list(shape)}")
    if info.dtype not in kernels.GGUF_TYPES and not _gguf_package_reads(info.dtype):
        raise InputError(f"{where} has the unsupported type {info.dtype}")


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """GGUFs do not tell a row from a matrix of one row."""
    return shape[1:] if len(shape) > 1 and shape[0] == 1 else shape


def fill(config: ModelConfig, name: str, info: TensorInfo, part: str, out: Tensor) -> None:
    """Dequantize whole rows, or where `out` has bytes take them as they are."""
    _fill(name, info, _permuted_head_dim(config, part), out)


def in_file(config: ModelConfig, name: str, info: TensorInfo, part: str) -> FilePart:
    """Where the rows are that `fill` would take as they are, and their order."""
    order = None
    if dim := _permuted_head_dim(config, part):
        order = (*range(0, dim, 2), *range(1, dim, 2))
    elif rotates_part(config.rope, part):  # `fill` leaves them in the file's order
        order = config.rope.row_order(config.head_dim)
    return FilePart(name, info, math.prod(info.shape[:-1]), order)


def _permuted_head_dim(config: ModelConfig, part: str) -> int | None:
    """llama.cpp's converter reorders the rows of q and k within each head, of the llama architecture only."""
    return config.head_dim if config.family in ("llama", "mixtral") and _is_of_queries_or_keys(part) else None


def _is_of_queries_or_keys(part: str) -> bool:
    return part.split(".")[0] in ("q", "k")


def _fill(name: str, info: TensorInfo, permuted_head_dim: int | None, out: Tensor) -> None:
    """Of a permuted tensor, whole heads: one holds its two halves' rows in turn: 0, d/2, 1, d/2 + 1, ..."""
    if out.dtype == torch.uint8:
        read_by_threads(name, info, memoryview(out.view(-1).numpy()))
        if permuted_head_dim:
            out.copy_(_halves_apart(out, permuted_head_dim))
        return
    unit = permuted_head_dim or 1
    rows = out.view(-1, out.shape[-1] if out.ndim > 1 or not permuted_head_dim else 1)
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
        if info.dtype in kernels.GGUF_TYPES:
            kernels.unpack_blocks(info.dtype, packed, piece, permuted_head_dim or 0)
        else:
            _unpack_by_gguf(info, packed, permuted_head_dim, piece)
        start += packed.nbytes


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


def _unpack_by_gguf(info: TensorInfo, packed: Tensor, permuted_head_dim: int | None, out: Tensor) -> None:
    """What the kernels do not know, by the gguf package."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    values = torch.from_numpy(dequantize(packed.numpy(), GGMLQuantizationType[info.dtype])).view(out.shape)
    out.copy_(_halves_apart(values, permuted_head_dim) if permuted_head_dim else values)


def _halves_apart(rows: Tensor, head_dim: int) -> Tensor:
    """Rows of whole heads, each half's one after the other; a copy."""
    return rows.view(-1, head_dim // 2, 2, rows.shape[1]).transpose(1, 2).reshape(rows.shape)
