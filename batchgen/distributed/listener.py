"""A listening socket, at which a rank accepts connections of other ranks until all of them have connected."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping

from batchgen.core.errors import BatchgenError, InputError
from batchgen.distributed.authentication import (
    Call,
    NotAuthenticated,
    authenticate_as_caller,
    authenticate_caller,
)

HELLO_S = 5.0  # for whoever calls to prove who it is
_MOST_STRANGERS = (
    64  # calls of which it is not known yet who they are; ranks need milliseconds for that, so the oldest is given up
)
_POLL_S = 0.1  # how often rank 0 looks whether a process that it started has ended before it came


class Listener:
    """A listening socket at one address, and the authenticated connections of other ranks.

    Connections that fail authentication are closed. They cannot delay other ranks, even if they stay silent.
    """

    def __init__(self, rank: int, size: int, secret: bytes, address: tuple[str, int]) -> None:
        """Open the listening socket. Raises OSError.

        Args:
            rank: Number of this rank.
            size: Number of ranks of the group.
            secret: The secret of the job.
            address: Host, of which the first address is taken, and port; port 0 is any free port.
        """
        self.rank, self.size = rank, size
        self._secret = secret
        family, *_, bound = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
        self._server = socket.create_server(bound[:2], family=family, backlog=2 * _MOST_STRANGERS)
        self._arrived: dict[tuple[int, int], socket.socket] = {}  # (channel, rank): its connection
        self._strangers: dict[socket.socket, None] = {}  # in the order in which they came
        self._changed = threading.Condition()
        self._closed = self._has_warned = False
        threading.Thread(target=self._accept_all, name="accept-ranks", daemon=True).start()

    @property
    def address(self) -> tuple[str, int]:
        host, port = self._server.getsockname()[:2]
        return host, port

    def _accept_all(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(_POLL_S)  # too many files are open, perhaps
                continue
            with self._changed:
                if len(self._strangers) >= _MOST_STRANGERS:
                    oldest = next(iter(self._strangers))
                    del self._strangers[oldest]
                    _hang_up(oldest)
                self._strangers[connection] = None
            threading.Thread(target=self._admit, args=(connection,), name="admit-rank", daemon=True).start()

    def _admit(self, connection: socket.socket) -> None:
        try:
            call = authenticate_caller(connection, self._secret, self.rank, self.size, HELLO_S)
        except NotAuthenticated as error:
            self._turn_away(connection, str(error))
            return
        with self._changed:
            self._strangers.pop(connection, None)
            unwanted: socket.socket | None = connection
            if not self._closed:  # a rank calls again where it has heard no answer
                unwanted = self._arrived.pop((call.channel, call.rank), None)
                self._arrived[call.channel, call.rank] = connection
                self._changed.notify_all()
        if unwanted is not None:
            unwanted.close()

    def _turn_away(self, connection: socket.socket, why: str) -> None:
        with self._changed:
            self._strangers.pop(connection, None)
            is_first, self._has_warned = not self._has_warned and not self._closed, True
        if is_first:  # of a flood one line is enough
            line = f"batchgen: rank {self.rank} of {self.size} closed a connection from {_caller(connection)}: {why}"
            with contextlib.suppress(OSError, ValueError):  # nobody may be there to read it
                print(line, file=sys.stderr)
        connection.close()

    def wait_for(
        self,
        channel: int,
        ranks: Iterable[int],
        timeout_s: float,
        gone: Callable[[], Mapping[int, str]] = dict,
    ) -> dict[int, socket.socket]:
        """Wait for connections of other ranks.

        Args:
            channel: The channel of the connections, CONTROL or TENSORS.
            ranks: Numbers of the ranks to wait for.
            timeout_s: Seconds to wait for all of them.
            gone: The function that gives the ranks that have ended, each with a description of its end.

        Returns:
            The connections by rank.

        Raises:
            BatchgenError: A rank has ended, or has not connected in time. The message names the ranks.
        """
        ranks, deadline_s = list(ranks), time.monotonic() + timeout_s
        while True:
            with self._changed:
                self._changed.wait_for(lambda: not self._missing(channel, ranks), _POLL_S)
                if not (missing := self._missing(channel, ranks)):
                    return {rank: _ready(self._arrived.pop((channel, rank))) for rank in ranks}
            if ended := [fate for rank, fate in gone().items() if rank in missing]:
                why = (
                    ": its own message says why" if "exit code" in ended[0] else "; the same command goes on from there"
                )
                raise BatchgenError(f"{ended[0]} before it had begun{why}")
            if time.monotonic() > deadline_s:
                raise BatchgenError(
                    f"{_ranks(missing, self.size)} did not come within {timeout_s:,.0f} s: start all {self.size} of"
                    f" them, and see that they reach rank {self.rank}"
                )

    def arrived(self, channel: int) -> dict[int, socket.socket]:
        """The connections for a channel, by rank, that were accepted since the last call."""
        with self._changed:
            ranks = [rank for kind, rank in self._arrived if kind == channel]
            return {rank: _ready(self._arrived.pop((channel, rank))) for rank in ranks}

    def _missing(self, channel: int, ranks: list[int]) -> list[int]:
        return [rank for rank in ranks if (channel, rank) not in self._arrived]

    def close(self) -> None:
        """Close the listening socket, and all accepted connections that were not taken."""
        with self._changed:
            self._closed = True
            left = [*self._strangers, *self._arrived.values()]
            self._arrived.clear()
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._server.close()
        for connection in left:
            _hang_up(connection)


def call_rank(address: tuple[str, int], secret: bytes, call: Call, within_s: float) -> socket.socket:
    """Connect to a rank and authenticate both ends. Raises OSError or NotAuthenticated.

    Args:
        address: Host and port of the rank.
        secret: The secret of the job.
        call: The purpose of the connection.
        within_s: Seconds for connecting and authenticating.
    """
    connection = socket.create_connection(address, timeout=within_s)
    try:
        authenticate_as_caller(connection, secret, call, within_s)
    except BaseException:
        connection.close()
        raise
    return _ready(connection)


def listen_as_rank_zero(size: int, secret: bytes, address: tuple[str, int]) -> Listener:
    """Open rank 0's listening socket at the address that MASTER_ADDR and MASTER_PORT name.

    Args:
        size: Number of ranks of the group.
        secret: The secret of the job.
        address: Host and port; port 0 is any free port.

    Raises:
        InputError: The host is not known.
        BatchgenError: The socket cannot be opened at this address.
    """
    host, port = address
    try:
        return Listener(0, size, secret, address)
    except socket.gaierror as error:
        raise InputError(
            f"MASTER_ADDR {host} is no host that is known here ({error.strerror}): give rank 0's"
        ) from error
    except OSError as error:
        if port and "in use" in str(error):
            raise BatchgenError(f"MASTER_PORT {port} is taken on this host: give all ranks another one") from error
        raise BatchgenError(
            f"rank 0 cannot listen at {host}:{port} ({error.strerror}): MASTER_ADDR must be an address of rank 0's host"
        ) from error


def _ready(connection: socket.socket) -> socket.socket:
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _hang_up(connection: socket.socket) -> None:
    """Shut down a connection that another thread may be reading from; that thread closes it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _caller(connection: socket.socket) -> str:
    with contextlib.suppress(OSError):
        return str(connection.getpeername()[0])
    return "somebody"


def _ranks(ranks: Iterable[int], size: int) -> str:
    names = ", ".join(map(str, ranks))
    return f"{'ranks' if ',' in names else 'rank'} {names} of {size}"
