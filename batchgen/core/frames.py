"""Messages between two processes: eight bytes with the length, and then the message."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

LENGTH = struct.Struct("<Q")
NO_MEMORY = 3  # exit code of a process that has no memory for a message


def framed(message: bytes) -> bytes:
    """The message with its length before it."""
    return LENGTH.pack(len(message)) + message


def read_frame(file: Any) -> bytearray | None:
    """The next message, however many reads it takes; None where the file ends before the message is whole."""
    header = bytearray(LENGTH.size)
    if not fill(header, file.readinto):
        return None
    content = bytearray(LENGTH.unpack(header)[0])
    return content if fill(content, file.readinto) else None


def fill(buffer: bytearray | memoryview, read_into: Callable[[memoryview], int]) -> bool:
    """Fill a buffer, however many reads it takes.

    Args:
        buffer: The buffer.
        read_into: Function that reads into the beginning of a view and returns the bytes read; 0 at the end.

    Returns:
        True where the buffer is full; False where there was less to read.
    """
    view = memoryview(buffer)
    while view:
        if not (count := read_into(view)):
            return False
        view = view[count:]
    return True


def write_frame(file: Any, message: bytes) -> None:
    """Write a message, however many writes an unbuffered file takes for it."""
    view = memoryview(framed(message))
    while view:
        view = view[file.write(view) :]
