"""Framed messages between two processes: each message follows its length, a number of eight bytes."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

LENGTH = struct.Struct("<Q")
NO_MEMORY = 3  # exit code of a process that has no memory for a message


def framed(message: bytes) -> bytes:
    """The bytes of a frame: the length of the message, then the message."""
    return LENGTH.pack(len(message)) + message


def read_frame(file: Any) -> bytearray | None:
    """Read the next frame's message from a binary file; None where the file ends before the message is complete.

    A message may take several reads of the file.
    """
    header = bytearray(LENGTH.size)
    if not fill(header, file.readinto):
        return None
    content = bytearray(LENGTH.unpack(header)[0])
    return content if fill(content, file.readinto) else None


def fill(buffer: bytearray | memoryview, read_into: Callable[[memoryview], int]) -> bool:
    """Fill a buffer from a source that may give fewer bytes than asked for.

    Args:
        buffer: The buffer to fill.
        read_into: The function that reads bytes to the beginning of a view and returns their number; 0 at the end.

    Returns:
        True where the buffer is full; False where the source ended before.
    """
    view = memoryview(buffer)
    while view:
        if not (count := read_into(view)):
            return False
        view = view[count:]
    return True


def write_frame(file: Any, message: bytes) -> None:
    """Write a message as a frame to a binary file. An unbuffered file may need several writes."""
    view = memoryview(framed(message))
    while view:
        view = view[file.write(view) :]
