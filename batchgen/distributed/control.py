"""Connections of every rank to rank 0, which keep a group's processes together beside their tensors.

Rank 0 broadcasts over them what is to be done, and either end learns from them, at once, that the other has ended: the
kernel closes the connections of a process however it dies.
"""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress

from batchgen.core.errors import BatchgenError, one_line
from batchgen.distributed.frames import read_frame, read_json, send_frame, send_json

_LISTENS, _READY, _FAILED, _PEAKS = "listens", "ready", "failed", "peaks"
END = b""  # instead of a message: all is done
_PEAKS_S = 5.0  # for the others to come to their end, once they have been told that all is done
_TOLD_AGAIN = "the same command goes on from there"

Address = tuple[str, int]  # a host and a port


class Hub:
    """Rank 0's end."""

    def __init__(self, size: int, connections: Mapping[int, socket.socket]) -> None:
        """connections: of all other ranks, which have proved who they are."""
        self._size = size
        self._connections = dict(connections)
        self._addresses: dict[int, Address | None] = {}
        self._ready: set[int] = set()
        self._ended: dict[int, str] = {}  # rank -> what became of it
        # Rank -> the most bytes of each tier that it held, once it has come to its end.
        self.peaks: dict[int, dict[str, int]] = {}
        self._changed = threading.Condition()
        self._closing = False
        self._on_lost: Callable[[], None] = lambda: None
        for rank in self._connections:
            threading.Thread(target=self._listen, args=(rank,), name=f"rank-{rank}", daemon=True).start()

    def _listen(self, rank: int) -> None:
        """Record what a rank sends, until it ends; then all end, so that no rank waits for one that waits for it."""
        fate = "ended"
        with suppress(Exception):  # a rank that says what is no message is as good as one that has ended
            while True:
                kind, said = read_json(self._connections[rank])
                if kind == _FAILED:
                    fate = f"failed: {said}"
                    break
                with self._changed:
                    if kind == _PEAKS:
                        self.peaks[rank] = said
                    elif kind == _LISTENS:
                        self._addresses[rank] = said and (str(said[0]), int(said[1]))
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
        """Register a call, in a thread, for when another rank ends before all is done; at once where one has ended."""
        with self._changed:
            self._on_lost = on_lost
            lost = bool(self._ended) and not self._closing
        if lost:
            on_lost()

    def ended(self) -> dict[int, str]:
        """The ranks that have ended and what became of them, as far as their connections say so."""
        with self._changed:
            return dict(self._ended)

    def addresses(self, within_s: float) -> dict[int, Address]:
        """Addresses by rank at which ranks listen to those above them, once all have given theirs.

        Raises:
            BatchgenError: A rank has ended, or does not give its address in time.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._ended or len(self._addresses) == len(self._connections), within_s)
        self.raise_ended()
        if silent := self._connections.keys() - self._addresses.keys():
            raise BatchgenError(f"rank {min(silent)} of {self._size} has come and says nothing; {_TOLD_AGAIN}")
        return {rank: address for rank, address in self._addresses.items() if address is not None}

    def broadcast(self, message: bytes) -> None:
        """Say something to all other ranks. Raises BatchgenError where one of them has ended."""
        for connection in self._connections.values():
            try:
                send_frame(connection, message)
            except OSError as error:
                self.raise_ended(within_s=1.0)
                raise BatchgenError(f"rank 0 of {self._size} cannot reach another one: {error}") from error

    def wait_until_ready(self, fate_of: Callable[[int], str | None]) -> None:
        """Return when every other rank has said that it is ready, however long that takes.

        Args:
            fate_of: Gives the reason why a rank has ended; None: it has not.

        Raises:
            BatchgenError: A rank has ended.
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
        """End the connections. done: True where the others go on to their end; otherwise they end at once."""
        if self._closing:
            return
        self._closing = True
        if done:
            for connection in self._connections.values():
                with suppress(OSError):
                    send_frame(connection, END)
            with self._changed:
                self._changed.wait_for(
                    lambda: self.peaks.keys() | self._ended.keys() >= self._connections.keys(), _PEAKS_S
                )
        for connection in self._connections.values():
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()


class Line:
    """The end of any other rank."""

    def __init__(self, connection: socket.socket, on_lost: Callable[[], None]) -> None:
        """connection: to rank 0, which has proved who it is.

        on_lost: called, in a thread, where it ends without having said so.
        """
        self._connection = connection
        self._messages: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._on_lost = on_lost
        self._sending = threading.Lock()
        threading.Thread(target=self._listen, name="rank-0", daemon=True).start()

    def _send(self, kind: str, said: object) -> None:
        with suppress(OSError), self._sending:  # that rank 0 has ended is found by who listens
            send_json(self._connection, [kind, said])

    def _listen(self) -> None:
        try:
            while frame := read_frame(self._connection):
                self._messages.put(frame)
            self._messages.put(None)
        except Exception:  # its end, or what is no message
            self._messages.put(None)
            self._on_lost()

    def receive_broadcast(self) -> bytes:
        """The next message of rank 0. Raises EOFError where all is done."""
        frame = self._messages.get()
        if frame is None:
            self._messages.put(None)
            raise EOFError
        return frame

    def listens(self, address: Address | None) -> None:
        """Tell rank 0 where this one listens to the ranks above it; None: there are none."""
        self._send(_LISTENS, address)

    def ready(self) -> None:
        """Tell rank 0 that what it asked for is done."""
        self._send(_READY, "")

    def end(self, peaks: Mapping[str, int]) -> None:
        """Tell rank 0 that this rank has come to its end. peaks: the most bytes of each tier that it held."""
        self._send(_PEAKS, dict(peaks))

    def fail(self, error: BaseException) -> None:
        """Tell rank 0 why this one ends."""
        self._send(_FAILED, one_line(str(error) or type(error).__name__))

    def close(self) -> None:
        self._connection.close()
