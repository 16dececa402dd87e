"""The conversion of a model into a weight store, one file at a time.

Each file is written under a temporary name, synced and renamed. Then it is added, with its checksums, to an unfinished
manifest. When the last file is written, the unfinished manifest is renamed to the manifest. So after an interruption
the next call keeps every finished file.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from batchgen._version import __version__
from batchgen.core.atomic_file import is_full, replace_durably, staged, storage_error, write_atomically
from batchgen.core.dtypes import INT4, NATIVE, PACKED_FORMATS, weight_format_of
from batchgen.core.errors import BatchgenError, InputError
from batchgen.core.file_lock import LockHeld, lock_file
from batchgen.core.units import format_bytes
from batchgen.models.config import DTYPES
from batchgen.models.files import ModelFiles, resolve_weights
from batchgen.models.identity import model_identity
from batchgen.models.model_versions import check_unchanged, model_versions
from batchgen.models.store.manifest import (
    RANK_KEY,
    STORE_FORMAT,
    STORE_MANIFEST,
    STORE_UNFINISHED,
    STORE_VERSION,
    read_store_manifest,
    store_manifest_checksum,
)
from batchgen.models.tokenizers.loading import save_tokenizer

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from batchgen.models.checkpoint import Checkpoint
    from batchgen.models.layouts import Stored, Which
    from batchgen.models.shard import Shard
    from batchgen.models.store.layout import Extent, StoredTensor, StoreFile, WeightStore
    from batchgen.models.tensor_files.table_rows import TableRows

    Tensors = dict[str, Tensor | Iterator[Tensor]]  # by name; a table comes some rows at a time

_LOCK = "convert.lock"
_OWN_NAMES = re.compile(r"(embeddings|layer-\d{5,}|head|per-layer-embeddings)\.safetensors|tokenizer")
# Bytes that manifest, tokenizer and the file system's own records may take beside the weights.
_SMALL_FILES_BYTES = 8 << 20
_TABLE_BYTES = 16 << 20  # of a table's rows, which are read and written together
_DIRTY_BYTES = 256 << 20  # written before it is pushed to the disk


def no_progress(done: int, total: int) -> None:
    """Ignore the progress of a conversion: `done` of `total` layers."""


def convert(
    files: ModelFiles,
    target: Path,
    *,
    dtype: str,
    weights: str = NATIVE,
    overwrite: bool = False,
    on_start: Callable[[], None] = lambda: None,
    on_layer: Callable[[int, int], None] = no_progress,
    shard: Shard | None = None,
    elsewhere: str = "convert into another directory",
) -> WeightStore:
    """Convert a model into a weight store, or complete a store whose conversion was interrupted.

    Files that are already in the directory are compared with their checksums. Only missing or damaged files are
    written. Peak memory is about the size of one layer, or of the embeddings.

    Args:
        files: Files of the model.
        target: Directory of the store.
        dtype: Compute dtype.
        weights: Format of the layers' matrices (`models.files.resolve_weights`). "int4" and "int8" quantize them.
            "native" keeps the model's own format. "dequantized" stores them in the compute dtype.
        overwrite: Whether a store of another model or format in `target` is replaced.
        on_start: Function that is called when this process has the lock of the directory.
        on_layer: Function that is called after each layer with the number of finished layers and of all layers.
        shard: Part of the model to be stored; None: the whole model. A part in int4 is cut out of a whole store.
        elsewhere: Advice for a directory that cannot be used, for messages.

    Returns:
        The finished store.

    Raises:
        InputError: The model is broken, or the directory has other files.
        BatchgenError: The disk is full, or another process converts into the directory.
    """
    from batchgen.models.checkpoint import open_checkpoint
    from batchgen.models.store.weight_store import open_store

    target = Path(target)
    if dtype not in DTYPES:
        raise InputError(f"dtype {dtype!r} is not supported: use {', '.join(DTYPES)}")
    _check_apart(files, target)
    versions = model_versions(files)
    weight_format = weight_format_of(dtype, resolve_weights(files, weights))
    checkpoint = open_checkpoint(files, shard=shard)
    header = {
        "format": STORE_FORMAT,
        "format_version": STORE_VERSION,
        "batchgen": __version__,
        "source": {"name": files.name, "identity": source_identity(files, shard)},
        "dtype": dtype,
        "weight_format": weight_format,
        "config": replace(checkpoint.config, dtype=dtype).to_json(),
    }
    check_unchanged(
        versions
    )  # else the identity might be another model's than the checkpoint, which holds files to its headers
    with _locked(target, elsewhere):
        on_start()
        work = _Conversion(target, header, _plan_files(checkpoint, target, dtype, weight_format))
        try:
            work.start(overwrite)
            work.check_space(elsewhere)
            save_tokenizer(files, target)
            work.run(checkpoint, on_layer)
        except OSError as error:
            missing = work.missing_bytes
            action = f"convert into {target} ({missing:,} bytes, {format_bytes(missing)}, are still to be written)"
            raise storage_error(error, action) from error
    return open_store(target)


def _check_apart(files: ModelFiles, target: Path) -> None:
    """Raise InputError if the store's directory is the model's, or one of the two is inside the other.

    Otherwise the conversion could overwrite files of the model that have the names of a store's files.
    """
    model, destination = files.path.resolve(), target.resolve()
    if destination == model or (target.exists() and target.samefile(model)):
        raise InputError(f"{target} is the model itself: give another directory for the store")
    if destination.is_relative_to(model) and files.kind == "store":
        raise InputError(f"{target} lies in the weight store {files.path}: give another directory")
    if model.is_relative_to(destination) and files.kind != "gguf":
        raise InputError(f"{target} has the model {files.path} in it: give another directory for the store")


def source_identity(files: ModelFiles, shard: Shard | None) -> dict[str, Any]:
    """The identity of what a store has: of the model, without its output matrix or not, or of a rank's part of it."""
    of_hidden = {"hidden_output": True} if files.hidden_output else {}
    return model_identity(files) | of_hidden | ({RANK_KEY: [shard.rank, shard.size]} if shard else {})


@dataclass(frozen=True)
class _PlannedFile:
    """A file of the store that is to be written.

    Attributes:
        which: "embeddings", "layer", "head" or "per_layer".
        layer: Number of the layer.
        layout: Offsets of its tensors, without checksums.
        header: Bytes of the file before the first tensor.
    """

    which: Which
    layer: int
    layout: StoreFile
    header: bytes

    @property
    def path(self) -> Path:
        return self.layout.path


def _plan_files(checkpoint: Checkpoint, target: Path, dtype: str, weight_format: str) -> list[_PlannedFile]:
    """All files of the store, in the order in which they are written."""
    from batchgen.models.layouts import stored_tensors
    from batchgen.models.store.layout import (
        EMBEDDINGS_FILE,
        HEAD_FILE,
        PER_LAYER_FILE,
        lay_out,
        layer_file_name,
        layer_groups,
    )

    config = checkpoint.config

    def planned(which: Which, layer: int, name: str, noted: str) -> _PlannedFile:
        stored = stored_tensors(config, which, layer, dtype, weight_format)
        groups: dict[str, dict[str, Stored]] = layer_groups(stored) if which == "layer" else {str(which): stored}
        return _PlannedFile(which, layer, *lay_out(target / name, groups, noted))

    layers = [planned("layer", j, layer_file_name(j), weight_format) for j in range(config.num_layers)]
    return [
        planned("embeddings", 0, EMBEDDINGS_FILE, dtype),
        *layers,
        planned("head", 0, HEAD_FILE, dtype),
        *([planned("per_layer", 0, PER_LAYER_FILE, dtype)] if config.per_layer_size else ()),
    ]


class _Conversion:
    """The state of a conversion in one directory.

    Attributes:
        target: Directory of the store.
        header: The manifest without its list of files.
        planned: All files, in the order in which they are written.
        finished: Files that the manifest on the disk lists, by name.
    """

    def __init__(self, target: Path, header: dict[str, Any], planned: list[_PlannedFile]) -> None:
        self.target = target
        self.header = json.loads(json.dumps(header))  # JSON values, to compare with those of a manifest
        self.planned = planned
        self.finished: dict[str, StoreFile] = {}

    @property
    def missing_bytes(self) -> int:
        """Number of bytes of the files that are not finished."""
        return sum(p.layout.num_bytes for p in self.planned if p.path.name not in self.finished)

    def start(self, overwrite: bool) -> None:
        """Find the finished files in the directory, and remove files that are of no use.

        These are temporary files and, with `overwrite`, the files of another store.

        Raises:
            InputError: The directory has other files, or a store of another model or format that is not to be replaced.
        """
        from batchgen.models.store.layout import file_from_json

        for leftover in self.target.glob("*.tmp"):
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        held = self._held_manifest(overwrite)
        if held is None:
            self._note()
            for path in self.target.iterdir():
                if _OWN_NAMES.fullmatch(path.name):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            return
        for planned in self.planned:
            if entry := held["files"].get(planned.path.name):
                with contextlib.suppress(ValueError):  # an entry of something else: its file is written again
                    file = file_from_json(planned.path, entry)
                    if _without_checksums(file) == planned.layout and planned.path.exists():
                        self.finished[planned.path.name] = file

    def check_space(self, elsewhere: str) -> None:
        """Raise BatchgenError if the missing files do not fit on the disk. elsewhere: Advice for messages."""
        missing, free = self.missing_bytes, shutil.disk_usage(self.target).free
        if missing and free < missing + _SMALL_FILES_BYTES:
            needed = missing + _SMALL_FILES_BYTES
            raise BatchgenError(
                f"converting into {self.target} needs {needed:,} bytes ({format_bytes(needed)}), {format_bytes(free)} "
                f"are free: free space and run the same command again, or {elsewhere}"
            )

    def run(self, checkpoint: Checkpoint, on_layer: Callable[[int, int], None]) -> None:
        """Compare finished files with their checksums, and write missing and damaged ones."""
        import torch

        from batchgen.models.store.weight_store import is_intact

        dtype = getattr(torch, self.header["dtype"])
        for planned in self.planned:
            name = planned.path.name
            if name in self.finished and not is_intact(self.finished[name]):
                del self.finished[name]
                self._note()
                planned.path.unlink(missing_ok=True)
        for planned, tensors, importance in self._read(checkpoint, dtype):
            if tensors is not None:
                self.finished[planned.path.name] = _write_file(planned, tensors, importance)
                self._note()
            if planned.which == "layer":
                on_layer(planned.layer + 1, checkpoint.config.num_layers)
        if not (self.target / STORE_MANIFEST).exists():
            replace_durably(self.target / STORE_UNFINISHED, self.target / STORE_MANIFEST)

    def _read(
        self, checkpoint: Checkpoint, dtype: torch.dtype
    ) -> Iterator[tuple[_PlannedFile, Tensors | None, dict[str, Tensor]]]:
        """Load the tensors of the store's files, one file after the other.

        Yields:
            A file; its tensors by name, or None if the file is finished; the importance of the columns of its 4-bit
                matrices.
        """
        from batchgen.models.importance import ChannelImportance, random_tokens
        from batchgen.models.layouts import PER_LAYER
        from batchgen.models.store.layout import find_tensor

        missing = [p.path.name not in self.finished for p in self.planned]
        measured_layers = 0  # all up to the last that is missing: each is measured on what those before it make
        if self.header["weight_format"] == INT4 and checkpoint.weight_format != INT4:
            layers = [
                p.layer + 1 for p, absent in zip(self.planned, missing, strict=True) if absent and p.which == "layer"
            ]
            measured_layers = max(layers, default=0)
        measured = None
        for planned, absent in zip(self.planned, missing, strict=True):
            measuring = planned.layer < measured_layers and planned.which in ("embeddings", "layer")
            tensors: Tensors = {}
            importance: dict[str, Tensor] = {}
            if absent and planned.which == "per_layer":
                opened = checkpoint.open_per_layer()
                assert opened is not None, "the model has per-layer embeddings"
                tensors = _in_pieces(opened, find_tensor(planned.layout, f"{PER_LAYER}.weight"), dtype)
            elif measuring:
                tensors = self._load(checkpoint, planned, dtype)
            elif absent:
                tensors = self._load_by_row(checkpoint, planned, dtype)
            if measuring and measured is not None:
                importance = measured.next_layer(tensors)
            elif measuring:
                tokens, sinks = random_tokens(checkpoint.config), checkpoint.load_sinks(dtype)
                measured = ChannelImportance(
                    checkpoint.config, tensors, tokens, sinks, per_layer=checkpoint.open_per_layer()
                )
            yield planned, tensors if absent else None, importance

    def _load_by_row(self, checkpoint: Checkpoint, planned: _PlannedFile, dtype: torch.dtype) -> Tensors:
        """The tensors of a file, of which embeddings or the output matrix come some rows at a time where they can."""
        from batchgen.models.layouts import EMBEDDINGS, OUTPUT_MATRIX

        tensors = [tensor for extent in planned.layout.extents.values() for tensor in extent.tensors]
        for stored in tensors:
            if stored.name in (EMBEDDINGS, OUTPUT_MATRIX) and (table := checkpoint.open_rows(stored.name)) is not None:
                return self._load(checkpoint, planned, dtype, stored.name) | _in_pieces(table, stored, dtype)
        return self._load(checkpoint, planned, dtype)

    def _load(
        self, checkpoint: Checkpoint, planned: _PlannedFile, dtype: torch.dtype, left_out: str | None = None
    ) -> Tensors:
        weight_format = self.header["weight_format"]
        as_stored = weight_format != INT4 or (planned.which == "layer" and checkpoint.weight_format == INT4)
        if weight_format in PACKED_FORMATS and as_stored:  # else it is packed as it is written
            return {**checkpoint.load_packed(planned.which, planned.layer, dtype, weight_format, left_out)}
        return {**checkpoint.load(planned.which, planned.layer, dtype, left_out)}

    def _held_manifest(self, overwrite: bool) -> dict[str, Any] | None:
        """The manifest of this store, finished or not, that the directory has; None: no file of it can be kept."""
        manifests = [self.target / name for name in (STORE_MANIFEST, STORE_UNFINISHED) if (self.target / name).exists()]
        if not manifests:
            others = [path.name for path in self.target.iterdir() if path.name != _LOCK]
            if others and not (overwrite and all(_OWN_NAMES.fullmatch(name) for name in others)):
                raise InputError(f"{self.target} is not empty and no weight store: give another directory")
            return None
        try:
            held = read_store_manifest(manifests[0])
        except InputError:
            if overwrite:
                return None
            raise
        same_source = held["source"]["identity"] == self.header["source"]["identity"]
        if same_source and all(held[key] == self.header[key] for key in ("dtype", "weight_format", "config")):
            return held
        if overwrite:
            return None
        what = f"holds {_describe(held)}, not {_describe(self.header)}"
        if _describe(held) == _describe(self.header):
            what = f"holds {_describe(held)} made from other files"
        raise InputError(f"{self.target} {what}: give another directory, or replace it with --overwrite")

    def _note(self) -> None:
        """Write the unfinished manifest with the list of finished files.

        Until `run` renames it, the directory is not a finished store.
        """
        from batchgen.models.store.layout import file_to_json

        names = [p.path.name for p in self.planned if p.path.name in self.finished]
        manifest = {**self.header, "files": {name: file_to_json(self.finished[name]) for name in names}}
        manifest["checksum"] = store_manifest_checksum(manifest)
        write_atomically(self.target / STORE_UNFINISHED, (json.dumps(manifest, indent=1) + "\n").encode(), mode=0o644)
        (self.target / STORE_MANIFEST).unlink(missing_ok=True)


def _describe(manifest: dict[str, Any]) -> str:
    """Model, weight format and dtype of a manifest, for messages: "SmolLM2 in int4 for bfloat16"."""
    dtype, weight_format = manifest["dtype"], manifest["weight_format"]
    return f"{manifest['source']['name']} in {dtype if dtype == weight_format else f'{weight_format} for {dtype}'}"


def _without_checksums(file: StoreFile) -> StoreFile:
    return replace(file, extents={name: replace(e, checksum=None) for name, e in file.extents.items()})


def _in_pieces(opened: TableRows, stored: StoredTensor, dtype: torch.dtype) -> Tensors:
    """A table of a file, some rows at a time, so that it is never in memory as a whole."""
    import numpy as np

    num_rows = stored.shape[0]
    step = max(1, _TABLE_BYTES * num_rows // stored.num_bytes)

    def pieces() -> Iterator[Tensor]:
        with contextlib.closing(opened) as table:
            for first in range(0, num_rows, step):
                count = min(step, num_rows - first)
                packed = stored.dtype in PACKED_FORMATS
                yield table.stored_rows(first, count) if packed else table.rows(np.arange(first, first + count), dtype)

    return {stored.name: pieces()}


def _write_file(planned: _PlannedFile, tensors: Tensors, importance: dict[str, Tensor]) -> StoreFile:
    """Write and sync one file of the store. Its name is only durable when the next manifest is written.

    Args:
        planned: The file.
        tensors: Its tensors, which are removed from the mapping one by one.
        importance: Importance of the columns of each 4-bit matrix, by name.

    Returns:
        The file with its checksums.

    Raises:
        OSError: The file cannot be written.
    """
    temporary = planned.path.with_name(f"{planned.path.name}.tmp")
    with staged(temporary, 0o644) as out:
        out.write(planned.header)
        extents = {}
        for name, extent in planned.layout.extents.items():
            extents[name] = replace(extent, checksum=_write_extent(out, extent, tensors, importance))
        _drop_behind(out)
    os.replace(temporary, planned.path)
    return replace(planned.layout, extents=extents)


def _drop_behind(out: BinaryIO) -> None:
    """Write a file's buffered bytes to the disk and drop them from the page cache, to leave it to other data."""
    out.flush()
    os.fdatasync(out.fileno())
    os.posix_fadvise(out.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _write_extent(out: BinaryIO, extent: Extent, tensors: Tensors, importance: dict[str, Tensor]) -> str:
    """Write one group of a file's tensors, with its padding.

    Returns:
        Checksum of the written bytes.
    """
    import torch
    import xxhash

    from batchgen.ops.dispatch import quantize

    digest = xxhash.xxh3_128()
    position = dropped = extent.offset

    def put(data: bytes | memoryview) -> None:
        nonlocal position, dropped
        for start in range(0, len(data), _DIRTY_BYTES):
            piece = data[start : start + _DIRTY_BYTES]
            digest.update(piece)
            out.write(piece)
            position += len(piece)
            if position - dropped >= _DIRTY_BYTES:
                _drop_behind(out)
                dropped = position

    for stored in extent.tensors:
        put(bytes(stored.offset - position))
        values = tensors.pop(stored.name)
        for piece in [values] if isinstance(values, torch.Tensor) else values:
            to_pack = stored.dtype == INT4 and piece.is_floating_point()
            packed = quantize(piece, importance=importance[stored.name]) if to_pack else piece
            put(memoryview(packed.view(-1).view(torch.uint8).numpy()))
    put(bytes(extent.offset + extent.num_bytes - position))
    return digest.hexdigest()


class AnotherConverts(BatchgenError):
    """The error that another process has the lock of a store's directory.

    Attributes:
        target: The directory.
        holder: Text that names the other process (`LockHeld.holder`).
    """

    def __init__(self, target: Path, holder: str) -> None:
        super().__init__(f"another batchgen is converting into {target} ({holder}): wait for it, or stop it")
        self.target, self.holder = target, holder


@contextlib.contextmanager
def _locked(target: Path, elsewhere: str) -> Iterator[None]:
    """Make the directory of a store, and hold its lock within a `with` block.

    Args:
        target: The directory.
        elsewhere: Advice for messages.

    Raises:
        InputError: The directory cannot be written.
        BatchgenError: The disk is full, or another process has the lock.
    """
    try:
        target.mkdir(mode=0o755, parents=True, exist_ok=True)
        descriptor = lock_file(target / _LOCK)
    except LockHeld as error:
        raise AnotherConverts(target, error.holder) from None
    except OSError as error:
        if is_full(error):
            raise storage_error(error, f"write {target}") from error
        raise InputError(f"cannot write {target}: {error.strerror}: {elsewhere}, which you can write to") from error
    try:
        yield
    finally:
        os.close(descriptor)
