"""What lies where in a weight store, and its manifest. docs/weight_store.md describes the format. No torch here."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from batchgen.core.direct_io import aligned
from batchgen.core.dtypes import INT8, PACKED_FORMATS, weight_row_bytes
from batchgen.models.config import ModelConfig

EMBEDDINGS_FILE, HEAD_FILE = "embeddings.safetensors", "head.safetensors"
TENSOR_ALIGNMENT = 64
# The tensors of a layer by the group they are stored in, named and ordered as in `ModelConfig.layer_tensors`.
_LAYER_GROUPS = {
    "qkv": ("qkv", "input_norm", "post_norm", "q_norm", "k_norm", "out_norm", "down_norm"),
    "out": ("out",),
    "up": ("gate_up", "up", "router", "shared_gate_up", "shared_gate"),
    "down": ("down", "shared_down"),
}
_SAFETENSORS_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"} | {
    name: "I8" if name == INT8 else "U8" for name in PACKED_FORMATS
}
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

Shape = tuple[int, ...]


def is_quantized(name: str, shape: Shape) -> bool:
    """Whether a layer's tensor is one of those that formats of few bits are for: matrices, but for what chooses and weighs experts."""
    return len(shape) == 2 and name not in ("router.weight", "shared_gate.weight")


@dataclass(frozen=True)
class StoredTensor:
    """A tensor and where it lies.

    dtype: "float32", "bfloat16", "float16", "int4", "int8" or one of `BLOCK_FORMATS`. shape: the weights', however they are packed.

    offset: bytes from the start of the file.
    """

    name: str
    dtype: str
    shape: Shape
    offset: int
    num_bytes: int

    @property
    def stored_shape(self) -> Shape:
        """The shape in the file: of packed rows, that of their bytes."""
        return (self.shape[0], self.num_bytes // self.shape[0]) if self.dtype in PACKED_FORMATS else self.shape


@dataclass(frozen=True)
class Extent:
    """A group of tensors that is read as one. offset and num_bytes: multiples of 4096; padding at the end counts.

    checksum: xxh3_128 of exactly these bytes, in hex; None as long as they are not written.
    """

    name: str
    offset: int
    num_bytes: int
    checksum: str | None
    tensors: tuple[StoredTensor, ...]


@dataclass(frozen=True)
class StoreFile:
    """One file. extents: by name, in the order in which they lie, without gaps, up to the end of the file."""

    path: Path
    num_bytes: int
    extents: Mapping[str, Extent]


@dataclass(frozen=True)
class WeightStore:
    """A whole store.

    dtype: what it computes in, and `config.dtype`. weight_format: that, or one of `PACKED_FORMATS`, of the layers' matrices.
    """

    path: Path
    config: ModelConfig
    dtype: str
    weight_format: str
    layers: tuple[StoreFile, ...]
    embeddings: StoreFile
    head: StoreFile

    @property
    def files(self) -> tuple[StoreFile, ...]:
        return (self.embeddings, *self.layers, self.head)

    @property
    def num_bytes(self) -> int:
        """Bytes of all weight files."""
        return sum(file.num_bytes for file in self.files)


def layer_file_name(layer: int) -> str:
    return f"layer-{layer:05d}.safetensors"


def layer_groups(shapes: Mapping[str, Shape]) -> dict[str, dict[str, Shape]]:
    """A layer's tensors by the group they are stored in, in order."""
    return {
        group: {name: shapes[name] for stem in stems for name in (f"{stem}.weight", f"{stem}.bias") if name in shapes}
        for group, stems in _LAYER_GROUPS.items()
    }


def lay_out(
    path: Path, groups: Mapping[str, Mapping[str, Shape]], dtype: str, weight_format: str
) -> tuple[StoreFile, bytes]:
    """Where the tensors of one file come to lie, and the bytes before the first of them.

    groups: each group's tensors and their shapes, in order. weight_format: of matrices; all else is in `dtype`.
    """
    entries: dict[str, dict] = {}
    extents = []  # of (group, begin, end, tensors), counted from the first tensor's byte
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

    for group, shapes in groups.items():
        begin, tensors = end, []
        for name, shape in shapes.items():
            pad_to(-(-end // TENSOR_ALIGNMENT) * TENSOR_ALIGNMENT)
            stored_dtype = weight_format if is_quantized(name, shape) else dtype
            if stored_dtype in PACKED_FORMATS:
                num_bytes = shape[0] * weight_row_bytes(shape[1], stored_dtype)
            else:
                num_bytes = math.prod(shape) * _ITEM_BYTES[stored_dtype]
            tensor = StoredTensor(name, stored_dtype, shape, end, num_bytes)
            put(name, _SAFETENSORS_DTYPES[stored_dtype], tensor.stored_shape, num_bytes)
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
    """A file's entry in the manifest."""
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


def file_from_json(path: Path, entry: Mapping[str, Any]) -> StoreFile:
    """The file of a manifest's entry. Raises LookupError or TypeError where it is something else."""
    extents = {
        name: Extent(
            name,
            group["offset"],
            group["bytes"],
            group["xxh3_128"],
            tuple(
                StoredTensor(t["name"], t["dtype"], tuple(t["shape"]), t["offset"], t["bytes"])
                for t in group["tensors"]
            ),
        )
        for name, group in sorted(entry["groups"].items(), key=lambda item: item[1]["offset"])
    }
    return StoreFile(path, entry["bytes"], extents)
