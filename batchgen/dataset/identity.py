"""Whether files are the same as before, told by their names, sizes and contents."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

from batchgen.dataset.partitions import Partitions
from batchgen.dataset.source import naming
from batchgen.dataset.storage import open_raw

_HASH_WHOLE_BYTES = 64 << 20
_HASH_SAMPLE_BYTES = 64 << 10
_HASH_SAMPLES = 64


def files_identity(paths: list[str], partitions: Partitions | None = None) -> dict[str, Any]:
    """What tells these files from others, wherever they lie: see `Dataset.identity`."""
    identity: dict[str, Any] = {"files": [_file_identity(path) for path in paths]}
    if partitions is not None and partitions.fields:
        identity["partitions"] = [partitions.row(path) for path in paths]
    return identity


def _file_identity(path: str) -> dict[str, Any]:
    """Name, size and SHA-256; of a file over 64 MiB, of its head, its tail and 64 evenly spaced samples."""
    digest = hashlib.sha256()
    with naming(path), open_raw(path) as file:
        size_bytes = file.seek(0, os.SEEK_END)
        file.seek(0)
        if size_bytes <= _HASH_WHOLE_BYTES:
            while block := file.read(1 << 20):
                digest.update(block)
        else:
            last = _HASH_SAMPLES + 1
            for sample in range(last + 1):
                file.seek(sample * (size_bytes - _HASH_SAMPLE_BYTES) // last)
                digest.update(file.read(_HASH_SAMPLE_BYTES))
    return {"name": Path(path).name, "size_bytes": size_bytes, "sha256": digest.hexdigest()}
