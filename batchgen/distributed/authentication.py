"""Mutual authentication of two ranks of one job, before either reads anything else from the other.

Both ranks know a secret. Each sends a fresh random number. Each answers with an HMAC-SHA256 of both numbers, of the
call (which rank calls which, and for which channel), and of the address that was called. So a recorded answer cannot be
replayed, an answer cannot be reflected to its sender, and a relay at another address is detected. The caller
authenticates first, so a stranger who calls learns nothing by which to guess the secret.

Messages are authenticated in this way, not encrypted: between hosts, encryption is up to the network.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets
import socket
import struct
import time
from dataclasses import dataclass
from typing import Any

_MAGIC = b"batchgen ranks 1"
_NONCE_BYTES = _PROOF_BYTES = 32
_CALL = struct.Struct("<16sIIIB")  # the magic, who calls, whom, of how many ranks, and for which channel
_CALLER, _CALLED = b"caller", b"called"
CONTROL, TENSORS = 1, 2  # channels: what a connection is for


class NotAuthenticated(Exception):
    """The other end of a connection has not proved in time that it knows the secret."""


@dataclass(frozen=True)
class Call:
    """The purpose of a connection: which rank calls which, and for which channel.

    Attributes:
        rank, called: The rank that connects, and the rank that it connects to.
        size: Number of ranks of the group.
        channel: CONTROL or TENSORS.
    """

    rank: int
    called: int
    size: int
    channel: int

    def to_bytes(self) -> bytes:
        return _CALL.pack(_MAGIC, self.rank, self.called, self.size, self.channel)


def authenticate_as_caller(connection: socket.socket, secret: bytes, call: Call, within_s: float) -> None:
    """Authenticate both ends of a connection, as the rank that called.

    Args:
        connection: The connection to the rank that was called.
        secret: The secret of the job.
        call: The purpose of the connection.
        within_s: Seconds for the whole exchange.

    Raises:
        NotAuthenticated: The other end has not proved that it knows the secret.
    """
    deadline_s = time.monotonic() + within_s
    own = secrets.token_bytes(_NONCE_BYTES)
    try:
        _send(connection, call.to_bytes() + own, deadline_s)
        other = _receive(connection, _NONCE_BYTES, deadline_s)
        said = call.to_bytes() + own + other + _endpoint(connection.getpeername())
        _send(connection, _proof(secret, _CALLER, said), deadline_s)
        proof = _receive(connection, _PROOF_BYTES, deadline_s)
    except OSError as error:
        raise NotAuthenticated(str(error)) from error
    if not hmac.compare_digest(proof, _proof(secret, _CALLED, said)):
        raise NotAuthenticated("it does not know the secret")


def authenticate_caller(connection: socket.socket, secret: bytes, rank: int, size: int, within_s: float) -> Call:
    """Authenticate both ends of a connection, as the rank that was called.

    Args:
        connection: The connection of the caller.
        secret: The secret of the job.
        rank: Number of this rank.
        size: Number of ranks of the group.
        within_s: Seconds for the whole exchange.

    Returns:
        The purpose of the connection, as the caller states it.

    Raises:
        NotAuthenticated: The caller has not proved that it knows the secret.
    """
    deadline_s = time.monotonic() + within_s
    own = secrets.token_bytes(_NONCE_BYTES)
    try:
        said = _receive(connection, _CALL.size + _NONCE_BYTES, deadline_s)
        magic, caller, called, said_size, channel = _CALL.unpack_from(said)
        if magic != _MAGIC or (called, said_size) != (rank, size) or not rank < caller < size:
            raise NotAuthenticated("it is no other rank of this job")
        if channel not in (CONTROL, TENSORS):
            raise NotAuthenticated("it wants a channel that is not there")
        _send(connection, own, deadline_s)
        said = said + own + _endpoint(connection.getsockname())
        proof = _receive(connection, _PROOF_BYTES, deadline_s)
        if not hmac.compare_digest(proof, _proof(secret, _CALLER, said)):
            raise NotAuthenticated("it does not know the secret")
        _send(connection, _proof(secret, _CALLED, said), deadline_s)
    except OSError as error:
        raise NotAuthenticated(str(error)) from error
    return Call(caller, called, said_size, channel)


def _proof(secret: bytes, role: bytes, said: bytes) -> bytes:
    return hmac.new(secret, role + said, hashlib.sha256).digest()


def _endpoint(address: tuple[Any, ...]) -> bytes:
    """The bytes for a socket's address that both ends of a connection compute alike."""
    host = ipaddress.ip_address(address[0].partition("%")[0])
    mapped = getattr(host, "ipv4_mapped", None)
    return f"{mapped or host} {address[1]}".encode()


def _send(connection: socket.socket, content: bytes, deadline_s: float) -> None:
    _leave(connection, deadline_s)
    connection.sendall(content)


def _receive(connection: socket.socket, count: int, deadline_s: float) -> bytes:
    content = b""
    while len(content) < count:
        _leave(connection, deadline_s)
        if not (part := connection.recv(count - len(content))):
            raise NotAuthenticated("it closed the connection")
        content += part
    return content


def _leave(connection: socket.socket, deadline_s: float) -> None:
    """Set the timeout of a connection to the time that is left until a deadline (time.monotonic)."""
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise NotAuthenticated("it did not say who it is in time")
    connection.settimeout(left_s)
