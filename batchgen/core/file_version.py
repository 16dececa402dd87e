"""The version of a file: it tells, without reading the file, that it was written to or that another is in its place."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple


class FileVersion(NamedTuple):
    """The properties of a file that change with its content.

    Times of files have the resolution of their system's clock, mostly a few milliseconds.
    """

    device: int
    inode: int
    size_bytes: int
    mtime_ns: int


def version_of(file: int | Path) -> FileVersion:
    """The version of an open file, given by its descriptor, or of the file at a path. Raises OSError."""
    found = os.stat(file)
    return FileVersion(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
