"""Files of an input, on this machine's disks or wherever fsspec reaches (`s3://`, `gs://`, `hf://`, ...), opened in one way."""

from __future__ import annotations

import glob
import io
import os
from typing import Any, BinaryIO, cast

import pyarrow as pa

from batchgen.core.errors import InputError, one_line

_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"


def is_url(name: object) -> bool:
    """Whether a name is a URL of fsspec's, rather than a path."""
    return isinstance(name, str) and "://" in name


def file_system(url: str) -> tuple[Any, str]:
    """The file system that fsspec has for a URL, and the path there. Raises InputError where there is none for it."""
    import fsspec  # type: ignore[import-untyped]

    if url.startswith(("http://", "https://")):
        raise InputError(f"{url} is a web page's URL: download it and give the local file")
    try:
        return cast(tuple[Any, str], fsspec.core.url_to_fs(url))
    except ImportError as error:
        raise InputError(f"{url} needs a package that is not installed: {one_line(error)}") from error
    except Exception as error:  # an unknown protocol, no credentials: each file system has errors of its own
        raise InputError(f"{url} cannot be reached: {one_line(error) or type(error).__name__}") from error


def open_raw(path: str) -> BinaryIO:
    """The bytes of a file, which can seek. Raises OSError."""
    if not is_url(path):
        return open(path, "rb")
    system, inner = file_system(path)
    return cast(BinaryIO, system.open(inner, "rb"))


def open_bytes(path: str) -> BinaryIO:
    """The bytes of a file, decompressed if they are gzip or Zstandard, which the first ones tell. Raises OSError."""
    import gzip

    file = open_raw(path)
    magic = _magic(file)
    if magic.startswith(_GZIP):
        return cast(BinaryIO, gzip.open(file))
    if magic == _ZSTD:
        return cast(
            BinaryIO, io.BufferedReader(cast(Any, pa.CompressedInputStream(pa.PythonFile(file, mode="r"), "zstd")))
        )
    return file


def is_compressed(file: BinaryIO) -> bool:
    """Whether bytes are gzip or Zstandard."""
    magic = _magic(file)
    return magic.startswith(_GZIP) or magic == _ZSTD


def _magic(file: BinaryIO) -> bytes:
    """The first four bytes, after which the file is at its beginning."""
    file.seek(0)
    magic = file.read(4)
    file.seek(0)
    return magic


def is_file(path: str) -> bool:
    """Whether there is a file."""
    if not is_url(path):
        return os.path.isfile(path)
    system, inner = file_system(path)
    return bool(system.isfile(inner))


def is_folder(path: str) -> bool:
    """Whether there is a directory."""
    if not is_url(path):
        return os.path.isdir(path)
    system, inner = file_system(path)
    return bool(system.isdir(inner))


def entries(folder: str) -> list[str]:
    """The names in a directory, in order. Raises OSError."""
    if not is_url(folder):
        return sorted(os.listdir(folder))
    system, inner = file_system(folder)
    return sorted(os.path.basename(name.rstrip("/")) for name in system.ls(inner, detail=False))


def matches(pattern: str) -> list[str]:
    """The files that a glob finds, by name."""
    if not is_url(pattern):
        return sorted(path for path in glob.glob(pattern, recursive=True) if os.path.isfile(path))
    system, inner = file_system(pattern)
    return sorted(system.unstrip_protocol(name) for name in system.glob(inner) if system.isfile(name))
