"""Messages and tensors over a connection whose other end is known."""

from __future__ import annotations

import json
import socket
import struct
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

_LENGTH = struct.Struct("<Q")
_MOST_SMALL_BYTES = 1 << 20  # of a message that says how another rank fares


def send_frame(connection: socket.socket, content: bytes) -> None:
    """Send `content` as one message: its length in 8 bytes, little-endian, and then its bytes. Raises OSError."""
    connection.sendall(_LENGTH.pack(len(content)))
    connection.sendall(content)


def send_json(connection: socket.socket, value: Any) -> None:
    """Send a small message. Raises OSError."""
    send_frame(connection, json.dumps(value).encode())


def read_frame(connection: socket.socket, most_bytes: int | None = None) -> bytes:
    """The next message.

    Raises EOFError where the other end has closed, ValueError where it says more than so much, and OSError.
    """
    buffer = bytearray(_LENGTH.size)
    fill(connection, memoryview(buffer))
    length = _LENGTH.unpack(buffer)[0]
    if most_bytes is not None and length > most_bytes:
        raise ValueError(f"{length} bytes")
    buffer = bytearray(length)
    fill(connection, memoryview(buffer))
    return bytes(buffer)


def read_json(connection: socket.socket) -> Any:
    """The next small message. Raises as `read_frame`, and ValueError where it is no JSON."""
    return json.loads(read_frame(connection, _MOST_SMALL_BYTES))


def fill(connection: socket.socket, buffer: memoryview) -> None:
    """Fill a buffer with what comes next. Raises EOFError where the other end has closed, and OSError."""
    done = 0
    while done < len(buffer):
        if not (count := connection.recv_into(buffer[done:])):
            raise EOFError("the connection was closed")
        done += count


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor in host memory, without a copy."""
    import torch

    assert tensor.is_contiguous() and tensor.device.type == "cpu"
    return memoryview(tensor.detach().view(-1).view(torch.uint8).numpy())
