"""Reading of a weight store: opening it, and reading and verifying groups of tensors.

A file's tensors are in groups (extents). A group is a range of whole 4096-byte blocks with a checksum. There is no gap
between groups. They can be read one by one, or several in one request. `batchgen/models/convert.py` writes stores.
docs/weight_store.md describes the format.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from batchgen.core.direct_io import ALIGNMENT, DirectFile, aligned_buffer
from batchgen.core.dtypes import BLOCK_FORMATS, INT4, INT8, PACKED_FORMATS
from batchgen.core.errors import BatchgenError, InputError, one_line
from batchgen.models.config import ModelConfig
from batchgen.models.store.layout import (
    EMBEDDINGS_FILE,
    HEAD_FILE,
    PER_LAYER_FILE,
    SAFETENSORS_DTYPES,
    Extent,
    StoreFile,
    WeightStore,
    file_from_json,
    find_tensor,
    layer_file_name,
)
from batchgen.models.store.manifest import STORE_MANIFEST, read_store_manifest
from batchgen.models.tensor_files.headers import TensorInfo

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from batchgen.models.tensor_files.table_rows import FileRows

_PIECE_BYTES = 4 << 20  # read, hashed and converted at a time
# A job makes anew what is missing in a store of its own, but does not look for what is damaged.
REPAIR = "delete this file, if it is there, and give the command that made the store again, batchgen convert or run"


def open_store(path: Path | str) -> WeightStore:
    """Open a weight store: read its manifest and check the sizes of its files.

    Args:
        path: Directory of the store.

    Raises:
        InputError: A file is missing, truncated or unreadable; the message names it.
    """
    path = Path(path)
    manifest = read_store_manifest(path / STORE_MANIFEST)
    try:
        files = {name: file_from_json(path / name, entry) for name, entry in manifest["files"].items()}
        config = ModelConfig.from_json(manifest["config"])
        layers = tuple(files[layer_file_name(j)] for j in range(config.num_layers))
        kinds = manifest["dtype"], manifest["weight_format"]
        table = files[PER_LAYER_FILE] if config.per_layer_size else None
        store = WeightStore(path, config, *kinds, layers, files[EMBEDDINGS_FILE], files[HEAD_FILE], table)
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
            raise InputError(f"cannot read {file.path}: {error.strerror}: {REPAIR}") from error
        if num_bytes != file.num_bytes:
            raise InputError(f"{file.path} has {num_bytes:,} bytes instead of {file.num_bytes:,}: {REPAIR}")
    return store


def open_rows(file: StoreFile, name: str) -> FileRows:
    """A table of a store, whose rows are read one by one, without a checksum of each.

    Args:
        file: File of the store that has the table.
        name: Name of the table.
    """
    from batchgen.models.tensor_files.table_rows import FileRows, unpack_numbers
    from batchgen.ops import cpp

    tensor = find_tensor(file, name)
    info = TensorInfo(file.path, tensor.dtype, tensor.shape, tensor.offset, tensor.num_bytes)

    def unpack_rows(packed: Tensor, out: Tensor) -> None:
        cpp.unpack_blocks(tensor.dtype.upper(), packed, out)

    of_blocks = tensor.dtype in BLOCK_FORMATS
    unpack = unpack_rows if of_blocks else unpack_numbers(SAFETENSORS_DTYPES[tensor.dtype])
    return FileRows(tensor.name, info, unpack, REPAIR)


def views(extent: Extent, buffer: Tensor) -> dict[str, Tensor]:
    """The tensors of a group as views of the bytes that were read.

    Args:
        extent: The group.
        buffer: Bytes, uint8, from the group's offset on; there may be more than those of the group.

    Returns:
        Tensors by name. Packed matrices [rows, n] are uint8 [rows, weight_row_bytes(n, format)]; for int8 rows, int8.
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
    """Raise BatchgenError if the bytes that were read for a group do not have its checksum.

    Args:
        file: File of the store.
        extent: The group.
        buffer: Bytes, uint8, from the group's offset on.
    """
    import xxhash

    if xxhash.xxh3_128_hexdigest(buffer[: extent.num_bytes].numpy()) != extent.checksum:
        raise _damaged(file, extent)


def read_extent(file: StoreFile, extent: Extent) -> dict[str, Tensor]:
    """Read one group past the page cache and verify its checksum.

    Returns:
        Tensors by name, as `views` of one buffer.

    Raises:
        BatchgenError: The group cannot be read, or its checksum is wrong.
    """
    import torch

    memory = aligned_buffer(extent.num_bytes)
    try:
        with contextlib.closing(DirectFile(file.path)) as direct:
            count = direct.read([(extent.offset, memoryview(memory)[: extent.num_bytes])])
    except OSError as error:
        raise BatchgenError(f"cannot read {file.path}: {error.strerror}: check the disk, or {REPAIR}") from error
    if count < extent.num_bytes:
        raise BatchgenError(f"{file.path} ends within group {extent.name}: {REPAIR}")
    buffer = torch.frombuffer(memory, dtype=torch.uint8)
    verify(file, extent, buffer)
    return views(extent, buffer)


def read_tensors(file: StoreFile, names: Collection[str]) -> dict[str, Tensor]:
    """Read some tensors of a file past the page cache, and nothing else of it; the checksums are not looked at.

    Args:
        file: File of the store.
        names: Names of the tensors.

    Returns:
        Tensors by name, in the forms of `views`.

    Raises:
        BatchgenError: The file cannot be read.
    """
    import torch

    tensors: dict[str, Tensor] = {}
    try:
        with contextlib.closing(DirectFile(file.path)) as direct:
            for tensor in (t for extent in file.extents.values() for t in extent.tensors if t.name in names):
                start = tensor.offset // ALIGNMENT * ALIGNMENT
                memory = aligned_buffer(tensor.offset + tensor.num_bytes - start)
                if direct.read([(start, memoryview(memory))]) < len(memory):
                    raise BatchgenError(f"{file.path} ends within tensor {tensor.name}: {REPAIR}")
                place = Extent(tensor.name, start, len(memory), None, (tensor,))
                tensors |= views(place, torch.frombuffer(memory, dtype=torch.uint8))
    except OSError as error:
        raise BatchgenError(f"cannot read {file.path}: {error.strerror}: check the disk, or {REPAIR}") from error
    return tensors


def load_extent(file: StoreFile, extent: Extent, dtype: torch.dtype) -> dict[str, Tensor]:
    """Read one group and verify its checksum. Its tensors become numbers; packed matrices are dequantized.

    Only a few MB of further memory are used meanwhile.

    Args:
        file: File of the store.
        extent: The group.
        dtype: Dtype of the tensors.

    Returns:
        Tensors by name, each in memory of its own.

    Raises:
        BatchgenError: The group cannot be read, or its checksum is wrong.
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
    """True if a file of a store is there and all its groups have their checksums.

    The file is read past the page cache.
    """
    try:
        if file.path.stat().st_size != file.num_bytes:
            return False
        with contextlib.closing(DirectFile(file.path)) as direct:
            return has_checksums(file, direct)
    except OSError:
        return False


def has_checksums(file: StoreFile, direct: DirectFile) -> bool:
    """True if all groups of an open file have their checksums.

    Args:
        file: File of the store.
        direct: That file, opened for direct I/O.

    Raises:
        OSError: The file cannot be read.
    """
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
    """Within a `with` block, a function that returns the next bytes of a group."""
    try:
        with file.path.open("rb", buffering=0) as raw_file:
            raw_file.seek(extent.offset)

            def read(count: int) -> bytearray:
                buffer = bytearray(count)
                done = 0
                while done < count:  # one call reads at most 2 GiB
                    step = raw_file.readinto(memoryview(buffer)[done:])
                    if not step:
                        raise BatchgenError(f"{file.path} ends within group {extent.name}: {REPAIR}")
                    done += step
                return buffer

            yield read
    except OSError as error:
        raise BatchgenError(f"cannot read {file.path}: {error.strerror}: check the disk, or {REPAIR}") from error


def _damaged(file: StoreFile, extent: Extent) -> BatchgenError:
    return BatchgenError(f"{file.path} is damaged: group {extent.name} does not have its checksum: {REPAIR}")
