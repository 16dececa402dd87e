"""Access to input files, on local disks or at any URL that fsspec can read (`s3://`, `gs://`, `hf://`, ...)."""

from __future__ import annotations

import glob
import io
import os
from typing import Any, BinaryIO, cast

import pyarrow as pa

from batchgen.core.errors import InputError, one_line
from batchgen.core.text import without_credentials

_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
# What file systems say of a file's contents, and of when they were written; the surest first.
_CONTENT_TAGS = ("ETag", "etag", "md5Hash", "content_md5", "blob_id", "generation")
_TIME_TAGS = ("LastModified", "last_modified", "updated", "mtime", "created")


def is_url(name: object) -> bool:
    """True where a name is a URL for fsspec, not a local path."""
    return isinstance(name, str) and "://" in name


def file_system(url: str) -> tuple[Any, str]:
    """The fsspec filesystem of a URL, and the path in it. Raises InputError where fsspec has none for the URL."""
    import fsspec  # type: ignore[import-untyped]

    if url.startswith(("http://", "https://")):
        raise InputError(f"{url} is a web page's URL: download it and give the local file")
    try:
        return cast(tuple[Any, str], fsspec.core.url_to_fs(url))
    except ImportError as error:
        raise InputError(f"{url} needs a package that is not installed: {_reason(error, url)}") from error
    except Exception as error:  # an unknown protocol, no credentials: each file system has errors of its own
        raise InputError(f"{url} cannot be reached: {_reason(error, url)}") from error


def _reason(error: Exception, url: str) -> str:
    return one_line(without_credentials(str(error), url)) or type(error).__name__


def open_raw(path: str) -> BinaryIO:
    """Open a file or URL for reading bytes, with seek. Raises OSError."""
    if not is_url(path):
        return open(path, "rb")
    system, inner = file_system(path)
    return cast(BinaryIO, system.open(inner, "rb"))


def open_bytes(path: str) -> BinaryIO:
    """Open a file or URL for reading bytes, decompressed where it is gzip or Zstandard. Raises OSError.

    The returned file has `peek`, which shows the next bytes without reading them.
    """
    import gzip

    file = open_raw(path)
    magic = _magic(file)
    if magic.startswith(_GZIP):
        return cast(BinaryIO, gzip.open(file))
    if magic == _ZSTD:
        return cast(
            BinaryIO, io.BufferedReader(cast(Any, pa.CompressedInputStream(pa.PythonFile(file, mode="r"), "zstd")))
        )
    return file if hasattr(file, "peek") else cast(BinaryIO, io.BufferedReader(cast(Any, file)))


def is_compressed(file: BinaryIO) -> bool:
    """True where a file's content is gzip or Zstandard."""
    magic = _magic(file)
    return magic.startswith(_GZIP) or magic == _ZSTD


def _magic(file: BinaryIO) -> bytes:
    """The first four bytes of a file, which is then rewound to its beginning."""
    file.seek(0)
    magic = file.read(4)
    file.seek(0)
    return magic


def is_file(path: str) -> bool:
    """True where a path or URL is a file."""
    if not is_url(path):
        return os.path.isfile(path)
    system, inner = file_system(path)
    return bool(system.isfile(inner))


def is_folder(path: str) -> bool:
    """True where a path or URL is a directory."""
    if not is_url(path):
        return os.path.isdir(path)
    system, inner = file_system(path)
    return bool(system.isdir(inner))


def there(path: str) -> bool:
    """True where a local path exists and may be accessed; always True for a URL."""
    return is_url(path) or os.path.exists(path)


def _check_folders(pattern: str) -> None:
    """Raise OSError where a glob would silently skip a directory that may not be read."""
    while glob.has_magic(pattern):
        for folder in glob.glob(os.path.join(pattern, ""), recursive=True):
            if os.path.basename(os.path.dirname(folder)) != "lost+found":  # at the root of file systems
                os.listdir(folder)
        pattern = os.path.dirname(pattern)


def entries(folder: str) -> list[str]:
    """The names in a directory, sorted. Raises OSError."""
    if not is_url(folder):
        return sorted(os.listdir(folder))
    system, inner = file_system(folder)
    return sorted(os.path.basename(name.rstrip("/")) for name in system.ls(inner, detail=False))


def matches(pattern: str) -> list[str]:
    """The files that a glob finds, sorted by name. Raises OSError where a directory may not be read."""
    if not is_url(pattern):
        found = [path for path in glob.glob(pattern, recursive=True) if os.path.isfile(path) or not there(path)]
        _check_folders(os.path.dirname(pattern))
        return sorted(found)
    system, inner = file_system(pattern)
    return sorted(system.unstrip_protocol(name) for name in system.glob(inner) if system.isfile(name))


def content_tag(url: str) -> str | None:
    """The filesystem's tag of the content at a URL, such as an ETag; None where there is none."""
    return _tag(url, _CONTENT_TAGS)[1]


def version(url: str) -> str:
    """A text that changes when the file at a URL changes; "" where there is none. Raises the filesystem's errors."""
    size_bytes, tag = _tag(url, _CONTENT_TAGS + _TIME_TAGS)
    return "" if size_bytes is None else f"{size_bytes} {'' if tag is None else tag}"


def _tag(url: str, names: tuple[str, ...]) -> tuple[int | None, str | None]:
    """The size of the file at a URL, and the first known entry of the filesystem's information about it.

    Args:
        url: The URL.
        names: Names of the entries to look for, in order.

    Returns:
        The size in bytes and the entry; (None, None) where there is no file.
    """
    system, inner = file_system(url)
    system.invalidate_cache()
    if not system.exists(inner):
        return None, None
    info = system.info(inner)
    found = next((info[name] for name in names if info.get(name) is not None), None)
    return info.get("size"), None if found is None else str(found)
