"""The identity of a model: values that show whether a resumed job has the same model, wherever its files are."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from batchgen.core.digest import file_sha256, json_sha256
from batchgen.core.file_version import FileVersion, version_of
from batchgen.models.files import ModelFiles, read_config, weight_paths, weight_tensors
from batchgen.models.formats.gguf.split import read_gguf
from batchgen.models.hf.config_files import read_config_json, read_json_object
from batchgen.models.lora import lora_files
from batchgen.models.store.manifest import STORE_MANIFEST, read_store_manifest
from batchgen.models.tensor_files.headers import TensorInfo

_READ_WHOLE_BYTES = 64 << 20
_MOST_SAMPLES = 1024  # tensors of all files together: a disk with heads takes ten seconds for them
# Keys of config.json that say nothing about the model's output.
_VOLATILE_KEYS = {"_name_or_path", "transformers_version", "use_cache"}


def model_identity(files: ModelFiles) -> dict[str, Any]:
    """The identity of a model as JSON values: two models are equal to a resumed job if their identities are equal.

    Weight files of more than 64 MiB are not read whole. Their first and last 64 KiB, 64 evenly spread blocks, and a
    block in the middle of each tensor are read. For a weight store only the manifest is read, because it has checksums
    of all files.

    Args:
        files: Files of the model.
    """
    identity = _identity_without_lora(files)
    if files.lora is None:
        return identity
    return identity | {"lora": [content_identity(path) for path in lora_files(files.lora)]}


def content_identity(path: Path) -> str:
    """The identity of the content of a file: its SHA-256, or of more than 64 MiB that of parts of it."""
    return _content_sha256(path, version_of(path), ())


def _identity_without_lora(files: ModelFiles) -> dict[str, Any]:
    if files.kind == "store":
        manifest = read_store_manifest(files.path / STORE_MANIFEST)
        return {name: json_sha256(manifest[name]) for name in ("config", "files")}
    if files.kind == "dummy":
        return {"config_sha256": json_sha256(read_config(files).to_json()), "weights": "dummy"}
    if files.kind == "gguf":
        header = read_gguf(files.path)
        config: list[Any] = [header.metadata, {name: info.shape for name, info in header.tensors.items()}]
    else:
        stated = read_config_json(files.path / "config.json")
        generation = files.path / "generation_config.json"
        ends = read_json_object(generation).get("eos_token_id") if generation.exists() else None
        config = [{key: value for key, value in stated.items() if key not in _VOLATILE_KEYS}, ends]
    return {
        "config_sha256": json_sha256(config),
        "weights": _weights_identity(weight_paths(files), weight_tensors(files)),
    }


def _weights_identity(paths: list[Path], tensors: Mapping[str, TensorInfo]) -> list[dict[str, Any]]:
    """The identity of each weight file: values that differ if its content differs.

    Args:
        paths: Weight files.
        tensors: All tensors of these files.
    """
    identities = []
    for path in paths:
        version = version_of(path)
        of_file = tuple(sorted(i.offset + i.num_bytes // 2 for i in tensors.values() if i.path == path))
        step = -(-len(of_file) * len(paths) // _MOST_SAMPLES) or 1
        identities.append(
            {
                "name": path.name,
                "size_bytes": version.size_bytes,
                "sha256": _content_sha256(path, version, of_file[::step]),
            }
        )
    return identities


@lru_cache(maxsize=256)  # files; a job asks several times
def _content_sha256(path: Path, version: FileVersion, middles: tuple[int, ...]) -> str:
    """sha256 of a small file, or of parts of a large one: its first and last 64 KiB, and blocks of 4 KiB.

    Args:
        path: The file.
        version: Version of the file; the digest is computed again if it has changed.
        middles: Offsets of blocks in the file, besides 64 evenly spread blocks.
    """
    size, edge, block, samples = version.size_bytes, 1 << 16, 1 << 12, 64
    with path.open("rb") as file:
        if size <= _READ_WHOLE_BYTES:
            return file_sha256(file)
        ranges = [(0, edge), (max(0, size - edge), edge)]
        ranges += [(size * i // samples, block) for i in range(samples)]
        ranges += [(middle, block) for middle in middles]
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        digest = hashlib.sha256()
        for offset, length in ranges:
            digest.update(os.pread(file.fileno(), length, offset))
    return digest.hexdigest()
