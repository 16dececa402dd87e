"""Messages between two processes: eight bytes that say the length, and as many bytes."""

from __future__ import annotations

import struct
from typing import IO, Any

_LENGTH = struct.Struct(">Q")


def framed(message: bytes) -> bytes:
    """The message behind its length."""
    return _LENGTH.pack(len(message)) + message


def read_frame(file: IO[bytes]) -> bytes | None:
    """The next message; None where the file ends before it is whole."""
    header = file.read(_LENGTH.size)
    if len(header) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(header)
    message = file.read(length)
    return message if len(message) == length else None


def write_frame(file: Any, message: bytes) -> None:
    """Write a message, however many writes an unbuffered file takes for it."""
    view = memoryview(framed(message))
    while view:
        view = view[file.write(view) :]
