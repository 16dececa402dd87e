"""Reading of a weight store: a model's weights as they are streamed, one file a layer.

A file's tensors come in extents: contiguous stretches of whole 4096-byte blocks, one right after the other, that can be
read on their own or several in one request, each with its checksum. `batchgen/models/convert.py` writes stores;
docs/weight_store.md has the format.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from batchgen.core.direct_io import DirectFile, aligned_buffer
from batchgen.core.dtypes import BLOCK_FORMATS, INT4, INT8, PACKED_FORMATS
from batchgen.core.errors import BatchgenError, InputError, one_line
from batchgen.models.config import ModelConfig
from batchgen.models.store.layout import (
    EMBEDDINGS_FILE,
    HEAD_FILE,
    Extent,
    StoreFile,
    WeightStore,
    file_from_json,
    layer_file_name,
)
from batchgen.models.store.manifest import STORE_MANIFEST, read_store_manifest

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_PIECE_BYTES = 4 << 20  # read, hashed and converted at a time
_REPAIR = "convert the model again, which makes anew what is missing or damaged"


def open_store(path: Path | str) -> WeightStore:
    """A store by its manifest; of the weight files only the sizes are looked at.

    Raises InputError naming the file that is missing, truncated or unreadable.
    """
    path = Path(path)
    manifest = read_store_manifest(path / STORE_MANIFEST)
    try:
        files = {name: file_from_json(path / name, entry) for name, entry in manifest["files"].items()}
        config = ModelConfig.from_json(manifest["config"])
        layers = tuple(files[layer_file_name(j)] for j in range(config.num_layers))
        kinds = manifest["dtype"], manifest["weight_format"]
        store = WeightStore(path, config, *kinds, layers, files[EMBEDDINGS_FILE], files[HEAD_FILE])
    except (LookupError, ValueError) as error:
        what = f"it has no {error}" if isinstance(error, LookupError) else one_line(error)
        raise InputError(
            f"{path / STORE_MANIFEST} is of no weight store ({what}): convert the model again with --overwrite"
        ) from error
    for file in store.files:
        try:
            with file.path.open("rb"):
                num_bytes = file.path.stat().st_size
        except OSError as error:
            raise InputError(f"cannot read {file.path}: {error.strerror}: {_REPAIR}") from error
        if num_bytes != file.num_bytes:
            raise InputError(f"{file.path} has {num_bytes:,} bytes instead of {file.num_bytes:,}: {_REPAIR}")
    return store


def views(extent: Extent, buffer: Tensor) -> dict[str, Tensor]:
    """The extent's tensors, without a copy.

    Packed matrices [rows, n] come as they are stored: uint8 [rows, weight_row_bytes(n, format)], of int8 as int8.

    Args:
        extent: The group.
        buffer: uint8; its first byte is that at the extent's offset. It may be longer than the extent.
    """
    import torch

    tensors = {}
    for tensor in extent.tensors:
        raw = buffer[tensor.offset - extent.offset :][: tensor.num_bytes]
        if tensor.dtype in PACKED_FORMATS:
            dtype = torch.int8 if tensor.dtype == INT8 else torch.uint8
        else:
            dtype = getattr(torch, tensor.dtype)
        tensors[tensor.name] = raw.view(dtype).view(tensor.stored_shape)
    return tensors


def verify(file: StoreFile, extent: Extent, buffer: Tensor) -> None:
    """Raise BatchgenError where the buffer of `views` does not hold what was written."""
    import xxhash

    if xxhash.xxh3_128_hexdigest(buffer[: extent.num_bytes].numpy()) != extent.checksum:
        raise _damaged(file, extent)


def read_extent(file: StoreFile, extent: Extent) -> dict[str, Tensor]:
    """Read and verify one group past the page cache: its tensors as `views` gives them, in one stretch of memory.

    Raises BatchgenError.
    """
    import torch

    memory = aligned_buffer(extent.num_bytes)
    try:
        with contextlib.closing(DirectFile(file.path)) as direct:
            count = direct.read([(extent.offset, memoryview(memory)[: extent.num_bytes])])
    except OSError as error:
        raise BatchgenError(f"cannot read {file.path}: {error.strerror}: check the disk, or {_REPAIR}") from error
    if count < extent.num_bytes:
        raise BatchgenError(f"{file.path} ends within group {extent.name}: {_REPAIR}")
    buffer = torch.frombuffer(memory, dtype=torch.uint8)
    verify(file, extent, buffer)
    return views(extent, buffer)


def load_extent(file: StoreFile, extent: Extent, dtype: torch.dtype) -> dict[str, Tensor]:
    """Read and verify one group as numbers of `dtype`, packed ones dequantized, each tensor in memory of its own.

    Beside them only a few MB are held. Raises BatchgenError.
    """
    import torch
    import xxhash

    from batchgen.ops import cpp, int8, quant

    digest = xxhash.xxh3_128()
    tensors = {}
    with _reading(file, extent) as read:
        position = extent.offset
        for tensor in extent.tensors:
            digest.update(read(tensor.offset - position))
            target = torch.empty(tensor.shape, dtype=dtype)
            rows = target.view(-1, tensor.shape[-1])
            row_bytes = tensor.num_bytes // len(rows)
            for piece in rows.split(max(1, _PIECE_BYTES // row_bytes)):
                raw = read(len(piece) * row_bytes)
                digest.update(raw)
                values = torch.frombuffer(raw, dtype=torch.uint8).view(len(piece), row_bytes)
                if tensor.dtype == INT4:
                    quant.dequantize(values, tensor.shape[-1], out=piece)
                elif tensor.dtype == INT8:
                    int8.dequantize(values.view(torch.int8), tensor.shape[-1], out=piece)
                elif tensor.dtype in BLOCK_FORMATS:
                    cpp.unpack_blocks(tensor.dtype.upper(), values, piece)
                else:
                    piece.copy_(values.view(getattr(torch, tensor.dtype)))
            tensors[tensor.name] = target
            position = tensor.offset + tensor.num_bytes
        digest.update(read(extent.offset + extent.num_bytes - position))
    if digest.hexdigest() != extent.checksum:
        raise _damaged(file, extent)
    return tensors


def is_intact(file: StoreFile) -> bool:
    """True where a file is there and all its groups hold what was written. Its pages do not stay in the page cache."""
    try:
        if file.path.stat().st_size != file.num_bytes:
            return False
        with contextlib.closing(DirectFile(file.path)) as direct:
            return has_checksums(file, direct)
    except OSError:
        return False


def has_checksums(file: StoreFile, direct: DirectFile) -> bool:
    """True where all groups of an open file hold what was written. Raises OSError."""
    import xxhash

    memory = memoryview(aligned_buffer(_PIECE_BYTES))
    for extent in file.extents.values():
        digest = xxhash.xxh3_128()
        for start in range(0, extent.num_bytes, _PIECE_BYTES):
            piece = memory[: min(_PIECE_BYTES, extent.num_bytes - start)]
            if direct.read([(extent.offset + start, piece)]) < len(piece):
                return False
            digest.update(piece)
        if digest.hexdigest() != extent.checksum:
            return False
    return True


@contextlib.contextmanager
def _reading(file: StoreFile, extent: Extent) -> Iterator[Callable[[int], bytearray]]:
    """A function that reads the next bytes of an extent."""
    try:
        with file.path.open("rb", buffering=0) as raw_file:
            raw_file.seek(extent.offset)

            def read(count: int) -> bytearray:
                buffer = bytearray(count)
                done = 0
                while done < count:  # one call reads at most 2 GiB
                    step = raw_file.readinto(memoryview(buffer)[done:])
                    if not step:
                        raise BatchgenError(f"{file.path} ends within group {extent.name}: {_REPAIR}")
                    done += step
                return buffer

            yield read
    except OSError as error:
        raise BatchgenError(f"cannot read {file.path}: {error.strerror}: check the disk, or {_REPAIR}") from error


def _damaged(file: StoreFile, extent: Extent) -> BatchgenError:
    return BatchgenError(f"{file.path} is damaged: group {extent.name} does not have its checksum: {_REPAIR}")
