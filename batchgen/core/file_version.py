"""The version of a file: file properties that differ once the file was written to or replaced."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple


class FileVersion(NamedTuple):
    """The properties of a file, other than its content, that change when the file is written to or replaced.

    The modification time has the resolution of the system's clock, mostly a few milliseconds. So two writes within that
    time may go unnoticed where the size stays equal.

    Attributes:
        device: Number of the device that the filesystem is on.
        inode: Number of the file within the filesystem.
        size_bytes: Size in bytes.
        mtime_ns: Time of the last modification, in nanoseconds since 1970.
    """

    device: int
    inode: int
    size_bytes: int
    mtime_ns: int


def version_of(file: int | Path) -> FileVersion:
    """The current version of a file, given by its path or by the descriptor of an open file. Raises OSError."""
    found = os.stat(file)
    return FileVersion(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
