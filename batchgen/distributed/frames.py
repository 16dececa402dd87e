"""Framed messages and tensors over an authenticated connection."""

from __future__ import annotations

import json
import socket
from typing import TYPE_CHECKING, Any

from batchgen.core import frames

if TYPE_CHECKING:
    from torch import Tensor

_MOST_SMALL_BYTES = 1 << 20  # of a message that says how another rank fares


def send_frame(connection: socket.socket, content: bytes) -> None:
    """Send a message: its length in 8 bytes, little-endian, then its bytes. Raises OSError."""
    connection.sendall(frames.framed(content))


def send_json(connection: socket.socket, value: Any) -> None:
    """Send a value as a JSON message. Raises OSError."""
    send_frame(connection, json.dumps(value).encode())


def read_frame(connection: socket.socket, most_bytes: int | None = None) -> bytes:
    """Receive the next message.

    Args:
        connection: The connection.
        most_bytes: The longest message that is accepted, in bytes; None: no limit.

    Raises:
        EOFError: The other end has closed the connection.
        ValueError: The message is longer than `most_bytes`.
        OSError: The connection is broken.
    """
    header = bytearray(frames.LENGTH.size)
    fill(connection, header)
    length = frames.LENGTH.unpack(header)[0]
    if most_bytes is not None and length > most_bytes:
        raise ValueError(f"{length} bytes")
    content = bytearray(length)
    fill(connection, content)
    return bytes(content)


def read_json(connection: socket.socket) -> Any:
    """Receive the next message as a JSON value.

    Raises:
        EOFError: The other end has closed the connection.
        ValueError: The message is too long, or is not JSON.
        OSError: The connection is broken.
    """
    return json.loads(read_frame(connection, _MOST_SMALL_BYTES))


def fill(connection: socket.socket, buffer: bytearray | memoryview) -> None:
    """Receive bytes until a buffer is full.

    Raises:
        EOFError: The other end has closed the connection.
        OSError: The connection is broken.
    """
    if not frames.fill(buffer, connection.recv_into):
        raise EOFError("the connection was closed")


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor in host memory, without a copy."""
    import torch

    assert tensor.is_contiguous() and tensor.device.type == "cpu"
    return memoryview(tensor.detach().view(-1).view(torch.uint8).numpy())
