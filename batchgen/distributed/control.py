"""Control connections of every rank to rank 0, separate from the connections for tensors.

Rank 0 broadcasts messages over them. When a process ends, however it dies, the kernel closes its connections, and the
other end learns of it at once.
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
    """Rank 0's ends of the control connections to all other ranks."""

    def __init__(self, size: int, connections: Mapping[int, socket.socket]) -> None:
        """Start to listen to the other ranks.

        Args:
            size: Number of ranks.
            connections: Authenticated connections to all other ranks, by rank.
        """
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
        """Record the messages of a rank until it ends; then close all connections, so that no rank waits for ever."""
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
        """Register a function that is called, in a thread, when another rank ends before the work is done.

        Where a rank has ended already, the function is called at once.
        """
        with self._changed:
            self._on_lost = on_lost
            lost = bool(self._ended) and not self._closing
        if lost:
            on_lost()

    def ended(self) -> dict[int, str]:
        """The ranks that have ended, each with a description of its end, as far as the control connections tell."""
        with self._changed:
            return dict(self._ended)

    def addresses(self, within_s: float) -> dict[int, Address]:
        """Wait for the addresses at which ranks accept connections of higher ranks.

        Args:
            within_s: Seconds to wait.

        Returns:
            The addresses by rank.

        Raises:
            BatchgenError: A rank has ended, or does not send its address in time.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._ended or len(self._addresses) == len(self._connections), within_s)
        self.raise_ended()
        if silent := self._connections.keys() - self._addresses.keys():
            raise BatchgenError(f"rank {min(silent)} of {self._size} has come and says nothing; {_TOLD_AGAIN}")
        return {rank: address for rank, address in self._addresses.items() if address is not None}

    def broadcast(self, message: bytes) -> None:
        """Send a message to all other ranks. Raises BatchgenError where one of them has ended."""
        for connection in self._connections.values():
            try:
                send_frame(connection, message)
            except OSError as error:
                self.raise_ended(within_s=1.0)
                raise BatchgenError(f"rank 0 of {self._size} cannot reach another one: {error}") from error

    def wait_until_ready(self, fate_of: Callable[[int], str | None]) -> None:
        """Wait without limit until every other rank has sent that it is ready.

        Args:
            fate_of: The function that describes how a rank's process has ended; None: it has not ended.

        Raises:
            BatchgenError: A rank has ended.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._ended or len(self._ready) == len(self._connections))
            self._ready.clear()
        self.raise_ended(fate_of=fate_of)

    def raise_ended(self, within_s: float = 0.0, fate_of: Callable[[int], str | None] = lambda rank: None) -> None:
        """Raise BatchgenError, which names the rank, where another rank has ended or ends soon.

        Args:
            within_s: Seconds to wait for a rank to end.
            fate_of: The function that describes how a rank's process has ended, for ranks that sent no reason.
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
        """Close the control connections.

        Args:
            done: True where the other ranks may complete their work; False where they end at once.
        """
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
    """The end of a control connection at any rank but 0."""

    def __init__(self, connection: socket.socket, on_lost: Callable[[], None]) -> None:
        """Start to listen to rank 0.

        Args:
            connection: The authenticated connection to rank 0.
            on_lost: The function that is called, in a thread, where the connection ends without a final message of rank
                0.
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
            self._on_lost()  # first: whoever waits for a message would take what comes next for the end of the work
            self._messages.put(None)

    def receive_broadcast(self) -> bytes:
        """Receive the next message of rank 0. Raises EOFError where the work is done."""
        frame = self._messages.get()
        if frame is None:
            self._messages.put(None)
            raise EOFError
        return frame

    def listens(self, address: Address | None) -> None:
        """Send rank 0 the address at which this rank accepts connections of higher ranks; None: it accepts none."""
        self._send(_LISTENS, address)

    def ready(self) -> None:
        """Send rank 0 the message that this rank has done what rank 0 asked for."""
        self._send(_READY, "")

    def end(self, peaks: Mapping[str, int]) -> None:
        """Send rank 0 the message that this rank has completed its work.

        Args:
            peaks: The most bytes that this rank has held in each tier.
        """
        self._send(_PEAKS, dict(peaks))

    def fail(self, error: BaseException) -> None:
        """Send rank 0 the error by which this rank ends."""
        self._send(_FAILED, one_line(str(error) or type(error).__name__))

    def close(self) -> None:
        self._connection.close()
