"""The layout of a weight store's files, and their entries in the manifest (docs/weight_store.md). No torch here."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from batchgen.core.direct_io import ALIGNMENT, aligned
from batchgen.core.dtypes import INT8, PACKED_FORMATS, weight_row_bytes
from batchgen.core.typed_json import read_typed
from batchgen.models.config import ModelConfig
from batchgen.models.layouts import Shape, Stored

EMBEDDINGS_FILE, HEAD_FILE = "embeddings.safetensors", "head.safetensors"
PER_LAYER_FILE = "per-layer-embeddings.safetensors"
TENSOR_ALIGNMENT = 64
# The tensors of a layer by the group they are stored in, named and ordered as in `ModelConfig.layer_tensors`.
_LAYER_GROUPS = {
    "qkv": (
        *("qkv", "input_norm", "post_norm", "q_norm", "k_norm", "out_norm", "down_norm"),
        *("layer_scale", "per_layer_norm"),
        *("ba", "conv", "a_log", "dt_bias", "state_norm"),
    ),
    "out": ("out",),
    "up": (
        *("gate_up", "up", "router", "expert_bias", "shared_gate_up", "shared_gate", "per_layer_up"),
        *("router_norm", "expert_scale", "experts_norm", "experts_out_norm", "shared_out_norm"),
    ),
    "down": ("down", "shared_down", "per_layer_down"),
}
SAFETENSORS_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"} | {
    name: "I8" if name == INT8 else "U8" for name in PACKED_FORMATS
}

T = TypeVar("T")


@dataclass(frozen=True)
class StoredTensor:
    """A tensor and its place in a file of a weight store.

    Attributes:
        name: Name of the tensor.
        dtype: "float32", "bfloat16", "float16", "int4", "int8" or one of `BLOCK_FORMATS`.
        shape: Shape of the tensor as numbers, also if it is packed.
        offset: Offset from the start of the file, in bytes.
        num_bytes: Size of the tensor, in bytes.
    """

    name: str
    dtype: str
    shape: Shape
    offset: int
    num_bytes: int

    @property
    def stored_shape(self) -> Shape:
        """Shape of the stored tensor. If it is packed, the last dimension is the bytes of a row."""
        return (self.shape[0], self.num_bytes // self.shape[0]) if self.dtype in PACKED_FORMATS else self.shape


@dataclass(frozen=True)
class Extent:
    """A group of tensors in a file of a weight store that are read together.

    Attributes:
        name: Name of the group.
        offset: Offset from the start of the file, in bytes; a multiple of 4096.
        num_bytes: Size of the group with its padding, in bytes; a multiple of 4096.
        checksum: xxh3_128 of all these bytes, in hex; None before they are written.
        tensors: Tensors of the group, in order.
    """

    name: str
    offset: int
    num_bytes: int
    checksum: str | None
    tensors: tuple[StoredTensor, ...]


@dataclass(frozen=True)
class StoreFile:
    """One file of a weight store.

    Attributes:
        path: Path of the file.
        num_bytes: Size of the file, in bytes.
        extents: Groups of tensors by name, in the order of the file. There are no gaps between them or after them.
    """

    path: Path
    num_bytes: int
    extents: Mapping[str, Extent]


@dataclass(frozen=True)
class WeightStore:
    """A weight store: a directory with the weights of a model, one file for each layer.

    Attributes:
        path: Directory of the store.
        config: Configuration of the model.
        dtype: Compute dtype, which is also `config.dtype`.
        weight_format: Format of the layers' matrices: the compute dtype, or one of `PACKED_FORMATS`.
        layers: Files of the layers, in order.
        embeddings: File of the tensors before the first layer.
        head: File of the tensors after the last layer.
        per_layer: File of the table of per-layer embeddings, which is read by row; None: the model has none.
    """

    path: Path
    config: ModelConfig
    dtype: str
    weight_format: str
    layers: tuple[StoreFile, ...]
    embeddings: StoreFile
    head: StoreFile
    per_layer: StoreFile | None = None

    @property
    def files(self) -> tuple[StoreFile, ...]:
        table = () if self.per_layer is None else (self.per_layer,)
        return (self.embeddings, *self.layers, self.head, *table)

    @property
    def num_bytes(self) -> int:
        """Size of all weight files together, in bytes."""
        return sum(file.num_bytes for file in self.files)


def find_tensor(file: StoreFile, name: str) -> StoredTensor:
    """The tensor of a file by its name. Raises LookupError where it has none of that name."""
    for extent in file.extents.values():
        for tensor in extent.tensors:
            if tensor.name == name:
                return tensor
    raise LookupError(f"{file.path} has no tensor {name}")


def layer_file_name(layer: int) -> str:
    return f"layer-{layer:05d}.safetensors"


def layer_groups(tensors: Mapping[str, T]) -> dict[str, dict[str, T]]:
    """The tensors of a layer by the group in which a store has them: "qkv", "out", "up" and "down".

    Args:
        tensors: A value for each tensor of the layer, by its name.

    Returns:
        For each group, the values of its tensors by name, in the order of the store.
    """
    return {
        group: {name: tensors[name] for stem in stems for name in tensors if name.split(".")[0] == stem}
        for group, stems in _LAYER_GROUPS.items()
    }


def lay_out(path: Path, groups: Mapping[str, Mapping[str, Stored]], weight_format: str) -> tuple[StoreFile, bytes]:
    """Assign offsets to the tensors of one file of a store.

    Args:
        path: Path of the file.
        groups: Tensors of each group, in order.
        weight_format: Format of the layers' matrices, which is written in the file's header.

    Returns:
        The file, without checksums; the bytes before its first tensor.
    """
    entries: dict[str, dict[str, Any]] = {}
    extents = []  # (group, begin, end, tensors) each, counted from the first tensor's byte
    end = pads = 0

    def put(name: str, kind: str, shape: Shape, num_bytes: int) -> None:
        nonlocal end
        entries[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [end, end + num_bytes]}
        end += num_bytes

    def pad_to(position: int) -> None:  # safetensors allows no holes
        nonlocal pads
        if position > end:
            put(f"_pad.{pads}", "U8", (position - end,), position - end)
            pads += 1

    for group, of_group in groups.items():
        begin, tensors = end, []
        for name, stored in of_group.items():
            pad_to(-(-end // TENSOR_ALIGNMENT) * TENSOR_ALIGNMENT)
            tensor = StoredTensor(name, stored.dtype, stored.shape, end, stored.num_bytes)
            put(name, SAFETENSORS_DTYPES[stored.dtype], stored.stored_shape, stored.num_bytes)
            tensors.append(tensor)
        pad_to(aligned(end))
        extents.append((group, begin, end, tensors))
    header = json.dumps({"__metadata__": {"weight_format": weight_format}, **entries}, separators=(",", ":")).encode()
    start = aligned(8 + len(header))
    header = (start - 8).to_bytes(8, "little") + header.ljust(start - 8)
    placed = {
        group: Extent(
            group,
            start + begin,
            end - begin,
            None,
            tuple(replace(tensor, offset=start + tensor.offset) for tensor in tensors),
        )
        for group, begin, end, tensors in extents
    }
    return StoreFile(path, start + end, placed), header


def file_to_json(file: StoreFile) -> dict[str, Any]:
    """The entry of a file in the manifest, as JSON values."""
    groups = {
        extent.name: {
            "offset": extent.offset,
            "bytes": extent.num_bytes,
            "xxh3_128": extent.checksum,
            "tensors": [
                {
                    "name": tensor.name,
                    "dtype": tensor.dtype,
                    "shape": list(tensor.shape),
                    "stored_shape": list(tensor.stored_shape),
                    "offset": tensor.offset,
                    "bytes": tensor.num_bytes,
                }
                for tensor in extent.tensors
            ],
        }
        for extent in file.extents.values()
    }
    return {"bytes": file.num_bytes, "groups": groups}


def file_from_json(path: Path, entry: Any) -> StoreFile:
    """The file that an entry of the manifest describes.

    Args:
        path: Path of the file.
        entry: The entry, as JSON values.

    Raises:
        ValueError: The entry does not describe a file of a store.
    """
    stated = read_typed(_FileEntry, entry, path.name)
    extents = {
        name: Extent(
            name,
            group.offset,
            group.bytes,
            group.xxh3_128,
            tuple(StoredTensor(t.name, t.dtype, t.shape, t.offset, t.bytes) for t in group.tensors),
        )
        for name, group in sorted(stated.groups.items(), key=lambda item: item[1].offset)
    }
    end = None
    for extent in extents.values():
        begins = extent.offset > 0 and extent.offset % ALIGNMENT == 0 if end is None else extent.offset == end
        if not begins or extent.num_bytes < 0 or extent.num_bytes % ALIGNMENT:
            raise ValueError(f"{path.name} has group {extent.name} out of place")
        end = extent.offset + extent.num_bytes
        _check_tensors(path, extent)
    if end is not None and end != stated.bytes:
        raise ValueError(f"{path.name} has {stated.bytes} bytes for groups that end at {end}")
    return StoreFile(path, stated.bytes, extents)


def _check_tensors(path: Path, extent: Extent) -> None:
    """Raise ValueError unless tensors are in order within their group, each with the size that its shape requires."""
    end = extent.offset
    for tensor in extent.tensors:
        known = tensor.dtype in SAFETENSORS_DTYPES and tensor.shape and min(tensor.shape) > 0
        if not known or tensor.num_bytes != math.prod(tensor.shape[:-1]) * weight_row_bytes(
            tensor.shape[-1], tensor.dtype
        ):
            raise ValueError(f"{path.name} has tensor {tensor.name} in bytes that do not fit its shape")
        if tensor.offset < end:
            raise ValueError(f"{path.name} has tensor {tensor.name} out of place")
        end = tensor.offset + tensor.num_bytes
    if end > extent.offset + extent.num_bytes:
        raise ValueError(f"{path.name} has tensors beyond group {extent.name}")


# Entries of a manifest, as JSON has them.


@dataclass(frozen=True)
class _TensorEntry:
    name: str
    dtype: str
    shape: tuple[int, ...]
    stored_shape: tuple[int, ...]
    offset: int
    bytes: int


@dataclass(frozen=True)
class _GroupEntry:
    offset: int
    bytes: int
    xxh3_128: str
    tensors: tuple[_TensorEntry, ...]


@dataclass(frozen=True)
class _FileEntry:
    bytes: int
    groups: Mapping[str, _GroupEntry]
