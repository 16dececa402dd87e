"""Messages between two processes: eight bytes with the length, and then the message."""

from __future__ import annotations

import struct
from typing import Any

_LENGTH = struct.Struct(">Q")
NO_MEMORY = 3  # exit code of a process that has no memory for a message


def framed(message: bytes) -> bytes:
    """The message with its length before it."""
    return _LENGTH.pack(len(message)) + message


def read_frame(file: Any) -> bytearray | None:
    """The next message, however many reads it takes; None where the file ends before the message is whole."""
    header = _read(file, _LENGTH.size)
    return None if header is None else _read(file, _LENGTH.unpack(header)[0])


def _read(file: Any, count: int) -> bytearray | None:
    content, done = bytearray(count), 0
    while done < count:
        if not (read := file.readinto(memoryview(content)[done:])):
            return None
        done += read
    return content


def write_frame(file: Any, message: bytes) -> None:
    """Write a message, however many writes an unbuffered file takes for it."""
    view = memoryview(framed(message))
    while view:
        view = view[file.write(view) :]
