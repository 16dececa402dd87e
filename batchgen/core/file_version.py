"""A file's version: what tells that it was written to, or that another is in its place, without reading it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple


class FileVersion(NamedTuple):
    """The properties of a file that change with its content.

    Times of files are those of their system, mostly of a few milliseconds.
    """

    device: int
    inode: int
    size_bytes: int
    mtime_ns: int


def version_of(file: int | Path) -> FileVersion:
    """The version of an open file, by its descriptor, or of what is at a path now. Raises OSError."""
    found = os.stat(file)
    return FileVersion(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
