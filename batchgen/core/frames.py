"""Framed messages between two processes: each message follows its length, a number of eight bytes."""

from __future__ import annotations

import struct
from typing import Any

_LENGTH = struct.Struct(">Q")
NO_MEMORY = 3  # exit code of a process that has no memory for a message


def framed(message: bytes) -> bytes:
    """The bytes of a frame: the length of the message, then the message."""
    return _LENGTH.pack(len(message)) + message


def read_frame(file: Any) -> bytearray | None:
    """Read the next frame's message from a binary file; None where the file ends before the message is complete.

    A message may take several reads of the file.
    """
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
    """Write a message as a frame to a binary file. An unbuffered file may need several writes."""
    view = memoryview(framed(message))
    while view:
        view = view[file.write(view) :]
