"""Small files that a person writes or a command has written: job files, schemas, templates, plans, profiles."""

from __future__ import annotations

import errno
import io
import os
from pathlib import Path

_LARGEST_BYTES = 64 << 20


def read_text(path: str | Path, encoding: str = "utf-8") -> str:
    """The text of a file that a person or a command has written.

    Raises:
        OSError: It cannot be read, or is larger than 64 MiB: a device may have no end.
        UnicodeDecodeError: It is no text.
    """
    with open(path, "rb") as file:
        content = file.read(_LARGEST_BYTES + 1)
    if len(content) > _LARGEST_BYTES:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
    return io.TextIOWrapper(io.BytesIO(content), encoding).read()  # line ends as those of any text file
