"""Digests of values, which tell jobs, rows and files apart."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any, BinaryIO


def json_sha256(value: Any, *, default: Callable[[Any], Any] | None = None) -> str:
    """Hash a value by its JSON text with sorted keys, so that equal values have equal digests in every process.

    Cache files and folders are named by it: the text must not change.

    Args:
        value: A value that JSON has a form for.
        default: A function that turns anything else into such a value, as `json.dumps` takes it.

    Returns:
        The SHA-256, 64 hexadecimal digits.
    """
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=default).encode()).hexdigest()


def file_sha256(file: BinaryIO) -> str:
    """The hex digest of what an open file has from its position on."""
    digest = hashlib.sha256()
    while block := file.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()
