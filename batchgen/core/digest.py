"""SHA-256 digests of values and files, by which jobs, rows and files are identified."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any, BinaryIO


def json_sha256(value: Any, *, default: Callable[[Any], Any] | None = None) -> str:
    """Hash a value by its JSON text with sorted keys, so that equal values have equal digests in every process.

    Cache files and folders are named by the digest, so the JSON text of a value must not change between versions.

    Args:
        value: A value that can be written as JSON, perhaps with the help of `default`.
        default: The function that converts an object that JSON cannot hold; `json.dumps` takes the same argument.

    Returns:
        The SHA-256 digest, 64 hexadecimal digits.
    """
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=default).encode()).hexdigest()


def file_sha256(file: BinaryIO) -> str:
    """The SHA-256 digest, as 64 hexadecimal digits, of an open file from its current position to its end."""
    digest = hashlib.sha256()
    while block := file.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()
