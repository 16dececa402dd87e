"""What keeps a group's processes together beside their tensors: a connection of every rank to rank 0.

Rank 0 says over it what is to be done, and either end learns from it, at once, that the other has ended: the kernel closes the
connections of a process however it dies.
"""

from __future__ import annotations

import hmac
import json
import pickle
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

from batchgen.core.errors import BatchgenError, one_line

_LENGTH = struct.Struct("<Q")
_READY, _FAILED, _PEAKS = "ready", "failed", "peaks"
_MOST_HELLO_BYTES = 4096  # whoever it is that calls
_END = b""  # instead of a message: all is done
_HELLO_S = 5.0  # for a rank that is connected to say who it is
_POLL_S = 0.1  # how often rank 0 looks whether a process that it started has ended before it came
_PEAKS_S = 5.0  # for the others to come to their end, once they have been told that all is done
_TOLD_AGAIN = "the same command goes on from there"


class Hub:
    """Rank 0's end."""

    def __init__(self, size: int, host: str, secret: str) -> None:
        """host: on which others are listened to. secret: what they must say first."""
        self._size, self._secret = size, secret
        self._server = socket.create_server((host, 0), backlog=size)
        self._connections: dict[int, socket.socket] = {}
        self._ready: set[int] = set()
        self._ended: dict[int, str] = {}  # rank -> what became of it
        # Rank -> the most bytes of each tier that it held, once it has come to its end.
        self.peaks: dict[int, dict[str, int]] = {}
        self._changed = threading.Condition()
        self._closing = False
        self._on_lost: Callable[[], None] = lambda: None

    @property
    def port(self) -> int:
        return self._server.getsockname()[1]

    def wait_for_ranks(self, timeout_s: float, gone: Callable[[], Mapping[int, str]]) -> None:
        """Return when every other rank is connected.

        Args:
            timeout_s: For all of them.
            gone: Gives what became of ranks that have ended already.

        Raises:
            BatchgenError: A rank has ended, or has not come in time; it names them.
        """
        deadline_s = time.monotonic() + timeout_s
        self._server.settimeout(_POLL_S)
        while missing := [rank for rank in range(1, self._size) if rank not in self._connections]:
            if ended := [fate for rank, fate in gone().items() if rank in missing]:
                why = ": its own message says why" if "exit code" in ended[0] else f"; {_TOLD_AGAIN}"
                raise BatchgenError(f"{ended[0]} before it had begun{why}")
            if time.monotonic() > deadline_s:
                raise BatchgenError(
                    f"{_ranks(missing, self._size)} did not come within {timeout_s:,.0f} s: start all {self._size} of them,"
                    " and see that they reach rank 0"
                )
            with suppress(TimeoutError):
                self._accept(deadline_s)

    def _accept(self, deadline_s: float) -> None:
        connection, _ = self._server.accept()
        connection.settimeout(max(_POLL_S, min(_HELLO_S, deadline_s - time.monotonic())))
        try:
            hello = json.loads(_read_frame(connection, _MOST_HELLO_BYTES))
            rank, secret = int(hello["rank"]), str(hello["secret"])
        except (OSError, EOFError, ValueError, LookupError, TypeError):
            return connection.close()  # somebody else
        expected = 0 < rank < self._size and rank not in self._connections
        if not expected or not hmac.compare_digest(secret, self._secret):
            return connection.close()
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connections[rank] = connection
        threading.Thread(target=self._listen, args=(rank,), name=f"rank-{rank}", daemon=True).start()
        return None

    def _listen(self, rank: int) -> None:
        """Notes what a rank says, until it ends; then all of them end, so that nobody waits for one that waits for it."""
        fate = "ended"
        with suppress(OSError, EOFError, ValueError):
            while True:
                kind, said = json.loads(_read_frame(self._connections[rank]))
                if kind == _FAILED:
                    fate = f"failed: {said}"
                    break
                with self._changed:
                    if kind == _PEAKS:
                        self.peaks[rank] = said
                    else:
                        self._ready.add(rank)
                    self._changed.notify_all()
        with self._changed:
            self._ended.setdefault(rank, f"rank {rank} of {self._size} {fate}")
            on_lost = self._on_lost
            self._changed.notify_all()
        if not self._closing:
            for connection in list(self._connections.values()):
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            on_lost()

    def when_lost(self, on_lost: Callable[[], None]) -> None:
        """Has this called where another rank ends before all is done: in a thread then, or at once where one has ended."""
        with self._changed:
            self._on_lost = on_lost
            lost = bool(self._ended) and not self._closing
        if lost:
            on_lost()

    def tell(self, message: Any) -> None:
        """Say something to all other ranks. Raises BatchgenError where one of them has ended."""
        frame = _frame(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))
        for connection in self._connections.values():
            try:
                connection.sendall(frame)
            except OSError as error:
                self.raise_ended(within_s=1.0)
                raise BatchgenError(f"rank 0 of {self._size} cannot reach another one: {error}") from error

    def wait_until_ready(self, fate_of: Callable[[int], str | None] = lambda rank: None) -> None:
        """Return when every other rank has said that it is ready, however long that takes.

        Raises BatchgenError where one has ended. fate_of: as of `raise_ended`.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._ended or len(self._ready) == len(self._connections))
            self._ready.clear()
        self.raise_ended(fate_of=fate_of)

    def raise_ended(self, within_s: float = 0.0, fate_of: Callable[[int], str | None] = lambda rank: None) -> None:
        """Raise BatchgenError naming a rank that has ended, if any has or does within so many seconds.

        fate_of: says what became of one that did not say so itself, if that is known.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._ended, within_s)
            if not self._ended or self._closing:
                return
            rank, fate = next(iter(self._ended.items()))
        if ": " not in fate:  # it did not say why
            fate = fate_of(rank) or fate
        raise BatchgenError(f"{fate}; {_TOLD_AGAIN}")

    def close(self, *, done: bool) -> None:
        """End the connections. done: the others go on to their end; otherwise they end at once, whatever they are at."""
        if self._closing:
            return
        self._closing = True
        if done:
            for connection in self._connections.values():
                with suppress(OSError):
                    connection.sendall(_frame(_END))
            with self._changed:
                self._changed.wait_for(
                    lambda: self.peaks.keys() | self._ended.keys() >= self._connections.keys(), _PEAKS_S
                )
        for connection in self._connections.values():
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        self._server.close()


class Line:
    """The end of any other rank."""

    def __init__(
        self, rank: int, host: str, port: int, secret: str, timeout_s: float, on_lost: Callable[[], None]
    ) -> None:
        """Connect to rank 0. on_lost: called, in a thread, where it ends without having said so. Raises BatchgenError."""
        try:
            self._connection = socket.create_connection((host, port), timeout=timeout_s)
        except OSError as error:
            raise BatchgenError(f"rank {rank} cannot reach rank 0 at {host}:{port}: {error}") from error
        self._connection.settimeout(None)
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._messages: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._on_lost = on_lost
        self._send(json.dumps({"rank": rank, "secret": secret}))
        threading.Thread(target=self._listen, name="rank-0", daemon=True).start()

    def _send(self, text: str) -> None:
        with suppress(OSError):  # that rank 0 has ended is found by who listens
            self._connection.sendall(_frame(text.encode()))

    def _listen(self) -> None:
        try:
            while frame := _read_frame(self._connection):
                self._messages.put(frame)
            self._messages.put(None)
        except (OSError, EOFError):
            self._messages.put(None)
            self._on_lost()

    def told(self) -> Any:
        """What rank 0 says next. Raises EOFError where all is done."""
        frame = self._messages.get()
        if frame is None:
            self._messages.put(None)
            raise EOFError
        return pickle.loads(frame)

    def ready(self) -> None:
        """Tell rank 0 that what it asked for is done."""
        self._send(json.dumps([_READY, ""]))

    def end(self, peaks: Mapping[str, int]) -> None:
        """Tell rank 0, which waits for it, that this one has come to its end. peaks: the most bytes of each tier that it held."""
        self._send(json.dumps([_PEAKS, dict(peaks)]))

    def fail(self, error: BaseException) -> None:
        """Tell rank 0 why this one ends."""
        self._send(json.dumps([_FAILED, one_line(str(error) or type(error).__name__)]))

    def close(self) -> None:
        self._connection.close()


def _ranks(ranks: Iterable[int], size: int) -> str:
    names = ", ".join(map(str, ranks))
    return f"{'ranks' if ',' in names else 'rank'} {names} of {size}"


def _frame(content: bytes) -> bytes:
    return _LENGTH.pack(len(content)) + content


def _read_frame(connection: socket.socket, most_bytes: int | None = None) -> bytes:
    """Raises EOFError where the other end has closed, ValueError where it says more than so much."""
    length = _LENGTH.unpack(_read(connection, _LENGTH.size))[0]
    if most_bytes is not None and length > most_bytes:
        raise ValueError(f"{length} bytes")
    return bytes(_read(connection, length))


def _read(connection: socket.socket, count: int) -> bytearray:
    buffer = bytearray(count)
    done = 0
    while done < count:
        step = connection.recv_into(memoryview(buffer)[done:])
        if not step:
            raise EOFError
        done += step
    return buffer
