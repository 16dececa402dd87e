"""Transfer and summation of tensors in host memory between ranks, with one connection per pair of ranks."""

from __future__ import annotations

import select
import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING

from batchgen.distributed.frames import bytes_of, fill

if TYPE_CHECKING:
    from torch import Tensor

_BUFFER_BYTES = 4 << 20  # of the kernel's for each connection, as far as it grants that


class TensorLinks:
    """A rank's connections for tensors to all other ranks.

    One thread may send to a rank while another receives from it. All methods raise OSError where a connection breaks,
    TimeoutError where no byte moves for too long, and EOFError where the other end has closed the connection.
    """

    def __init__(self, rank: int, connections: Mapping[int, socket.socket], timeout_s: float) -> None:
        """Take over connections to all other ranks.

        Args:
            rank: Number of this rank.
            connections: Authenticated connections by rank.
            timeout_s: Seconds without any transfer after which a method raises TimeoutError.
        """
        self._rank, self._size, self._timeout_s = rank, len(connections) + 1, timeout_s
        self._connections = dict(connections)
        for connection in self._connections.values():
            for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                connection.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
            connection.settimeout(timeout_s)

    def send(self, tensor: Tensor, rank: int) -> None:
        """Send a contiguous tensor to a rank; returns when all bytes are handed to the kernel."""
        self._connections[rank].sendall(bytes_of(tensor))

    def receive(self, tensor: Tensor, rank: int) -> None:
        """Receive a tensor from a rank into a contiguous tensor of the same size."""
        fill(self._connections[rank], bytes_of(tensor))

    def all_reduce(self, tensor: Tensor) -> None:
        """Replace a contiguous tensor by its sum over all ranks; the result is bitwise equal on all ranks.

        Two ranks exchange their tensors and add them; a + b equals b + a in floating point too. More ranks form a ring:
        each part of the tensor is summed along the ring, ends at one rank, and is passed round to all others (Patarasuk
        and Yuan, 2009).
        """
        import torch

        if self._size == 1 or not tensor.numel():
            return
        if self._size == 2:
            (other,) = self._connections
            theirs = torch.empty_like(tensor)
            self._exchange(tensor, other, theirs, other)
            tensor.add_(theirs)
            return
        parts = list(tensor.view(-1).tensor_split(self._size))
        after, before = (self._rank + 1) % self._size, (self._rank - 1) % self._size
        theirs = torch.empty_like(parts[0])  # the first ones are the longest
        for step in range(self._size - 1):
            sent, added = parts[(self._rank - step) % self._size], parts[(self._rank - step - 1) % self._size]
            came = theirs[: len(added)]
            self._exchange(sent, after, came, before)
            added.add_(came)
        for step in range(self._size - 1):
            whole, filled = parts[(self._rank + 1 - step) % self._size], parts[(self._rank - step) % self._size]
            self._exchange(whole, after, filled, before)

    def _exchange(self, sent: Tensor, to: int, received: Tensor, source: int) -> None:
        """Send one tensor and receive another at the same time.

        Ranks that all sent first would wait for each other for ever.

        Args:
            sent: The contiguous tensor to send.
            to: The rank to send to.
            received: The contiguous tensor to receive into.
            source: The rank to receive from.
        """
        outward, inward = self._connections[to], self._connections[source]
        left, room = bytes_of(sent), bytes_of(received)
        while left or room:
            poll = select.poll()
            if left:
                poll.register(outward, select.POLLOUT)
            if room:
                both = left and outward is inward
                poll.register(inward, select.POLLIN | (select.POLLOUT if both else 0))
            if not poll.poll(self._timeout_s * 1e3):
                raise TimeoutError(f"nothing moved for {self._timeout_s:,.0f} s")
            left, room = _some_sent(outward, left), _some_received(inward, room)

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()


def _some_sent(connection: socket.socket, left: memoryview) -> memoryview:
    """Send as many bytes as the kernel takes at once; gives the bytes that are left to send."""
    if not left:
        return left
    try:
        return left[connection.send(left, socket.MSG_DONTWAIT) :]
    except BlockingIOError:
        return left


def _some_received(connection: socket.socket, room: memoryview) -> memoryview:
    """Receive the bytes that have arrived; gives the part of the buffer that is left to fill."""
    if not room:
        return room
    try:
        count = connection.recv_into(room, 0, socket.MSG_DONTWAIT)
    except BlockingIOError:
        return room
    if not count:
        raise EOFError("the connection was closed")
    return room[count:]
