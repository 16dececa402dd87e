"""Reading of small text files: job files, schemas, templates, plans and hardware profiles."""

from __future__ import annotations

import errno
import io
import os
from pathlib import Path

_LARGEST_BYTES = 64 << 20


def read_text(path: str | Path, encoding: str = "utf-8") -> str:
    """Read a text file of at most 64 MiB. The limit guards against devices that never end.

    Raises:
        OSError: The file cannot be read, or is too large.
        UnicodeDecodeError: The file is not text in this encoding.
    """
    with open(path, "rb") as file:
        content = file.read(_LARGEST_BYTES + 1)
    if len(content) > _LARGEST_BYTES:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
    return io.TextIOWrapper(io.BytesIO(content), encoding).read()  # line ends as those of any text file
