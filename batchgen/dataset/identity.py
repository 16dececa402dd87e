"""Whether files are the same as before, or the same with more after them, told by their names, sizes and contents."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any, BinaryIO

from batchgen.dataset.partitions import Partitions
from batchgen.dataset.source import naming
from batchgen.dataset.storage import is_compressed, open_raw

_HASH_WHOLE_BYTES = 64 << 20
_HASH_SAMPLE_BYTES = 64 << 10
_HASH_SAMPLES = 64


def sizes_of(paths: list[str]) -> list[int]:
    """Bytes of each file; to be taken before rows are counted, so that what comes meanwhile is taken for rows to come."""
    return [_size_of(path) for path in paths]


def files_identity(
    paths: list[str], partitions: Partitions | None = None, sizes: list[int] | None = None
) -> dict[str, Any]:
    """What tells these files from others, wherever they lie: see `Dataset.identity`.

    sizes: How many bytes of each count; None: all that there are now.
    """
    lengths = sizes_of(paths) if sizes is None else sizes
    identity: dict[str, Any] = {"files": [_file_identity(*file) for file in zip(paths, lengths, strict=True)]}
    if partitions is not None and partitions.fields:
        identity["partitions"] = [partitions.row(path) for path in paths]
    return identity


def files_begin_with(
    paths: list[str], now: dict[str, Any], was: dict[str, Any], *, may_get_lines: bool = False
) -> bool:
    """Whether the first rows of files are all those that they had before.

    That is so where more files come after those, in the order of names; and where the last of those has got more lines.

    Args:
        paths: The files.
        now: Their `files_identity`.
        was: That of before.
        may_get_lines: Whether they are files of text, which may be appended to.
    """
    old, new = was["files"], now["files"]
    if len(old) > len(new) or old[:-1] != new[: len(old) - 1]:
        return False
    if was.get("partitions", []) != now.get("partitions", [])[: len(old)]:
        return False
    last = len(old) - 1
    return old[last] == new[last] or (may_get_lines and _got_lines(paths[last], old[last]))


def _got_lines(path: str, was: dict[str, Any]) -> bool:
    """Whether a file has what it had, and then whole lines; of a compressed file that cannot be told."""
    size_bytes = was["size_bytes"]
    with naming(path), open_raw(path) as file:
        if Path(path).name != was["name"] or is_compressed(file) or file.seek(0, os.SEEK_END) < size_bytes:
            return False
        file.seek(max(0, size_bytes - 1))
        before, after = file.read(min(1, size_bytes)), file.read(1)
        return (before in b"\n" or after in b"\r\n") and _sha256(file, size_bytes) == was["sha256"]


def _size_of(path: str) -> int:
    with naming(path), open_raw(path) as file:
        return file.seek(0, os.SEEK_END)


def _file_identity(path: str, size_bytes: int) -> dict[str, Any]:
    """Name, size and SHA-256; of a file over 64 MiB, of its head, its tail and 64 evenly spaced samples."""
    with naming(path), open_raw(path) as file:
        return {"name": Path(path).name, "size_bytes": size_bytes, "sha256": _sha256(file, size_bytes)}


def _sha256(file: BinaryIO, size_bytes: int) -> str:
    """Of a file's first bytes: see `_file_identity`."""
    digest = hashlib.sha256()
    file.seek(0)
    if size_bytes <= _HASH_WHOLE_BYTES:
        left = size_bytes
        while block := file.read(min(1 << 20, left)):
            digest.update(block)
            left -= len(block)
    else:
        last = _HASH_SAMPLES + 1
        for sample in range(last + 1):
            file.seek(sample * (size_bytes - _HASH_SAMPLE_BYTES) // last)
            digest.update(file.read(_HASH_SAMPLE_BYTES))
    return digest.hexdigest()
