"""Messages and tensors over a connection whose other end is known."""

from __future__ import annotations

import json
import socket
from typing import TYPE_CHECKING, Any

from batchgen.core import frames

if TYPE_CHECKING:
    from torch import Tensor

_MOST_SMALL_BYTES = 1 << 20  # of a message that says how another rank fares


def send_frame(connection: socket.socket, content: bytes) -> None:
    """Send `content` as one message: its length in 8 bytes, little-endian, and then its bytes. Raises OSError."""
    connection.sendall(frames.framed(content))


def send_json(connection: socket.socket, value: Any) -> None:
    """Send a small message. Raises OSError."""
    send_frame(connection, json.dumps(value).encode())


def read_frame(connection: socket.socket, most_bytes: int | None = None) -> bytes:
    """The next message.

    Raises EOFError where the other end has closed, ValueError where it says more than so much, and OSError.
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
    """The next small message. Raises as `read_frame`, and ValueError where it is no JSON."""
    return json.loads(read_frame(connection, _MOST_SMALL_BYTES))


def fill(connection: socket.socket, buffer: bytearray | memoryview) -> None:
    """Fill a buffer with what comes next. Raises EOFError where the other end has closed, and OSError."""
    if not frames.fill(buffer, connection.recv_into):
        raise EOFError("the connection was closed")


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor in host memory, without a copy."""
    import torch

    assert tensor.is_contiguous() and tensor.device.type == "cpu"
    return memoryview(tensor.detach().view(-1).view(torch.uint8).numpy())
