"""A group of processes that run one model together: rank 0, which leads, and others that follow it.

Rank 0 has the job: it alone reads the input, schedules, samples and writes the output. The others know nothing but what
they receive. Every two ranks have a connection, over which each has proved to the other that it belongs to the job;
nobody listens once all have come. Tensors of host memory go over these connections, those of a CUDA device by
torch.distributed's NCCL.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from batchgen.core.errors import BatchgenError, InputError
from batchgen.core.private_files import runtime_folder
from batchgen.distributed.authentication import CONTROL, TENSORS, Call, NotAuthenticated
from batchgen.distributed.control import END, Hub, Line
from batchgen.distributed.frames import send_frame, send_json
from batchgen.distributed.launch import (
    LOOPBACK,
    Processes,
    Rank,
    own_share,
    rank_of_environment,
)
from batchgen.distributed.listener import HELLO_S, Listener, call_rank, listen_as_rank_zero
from batchgen.distributed.meeting import Found, Meeting, new_secret
from batchgen.distributed.tensors import TensorLinks

if TYPE_CHECKING:
    from torch import Tensor

START_TIMEOUT_S = 120.0  # for all ranks to come: importing torch from a cold disk takes half a minute
# For the others to come to the same place of a sweep. That a process has ended is noticed at once; this is for one
# that hangs.
SWEEP_TIMEOUT_S = 900.0
_TOLD_WITHIN_S = 5.0  # between a transfer that breaks and the news which rank has ended
_REFUSED_S = 3.0  # for others to hear that rank 0 has refused the job, which may be starting
_POLL_S = 0.05
# What rank 0 says first: where ranks listen, and the name of a file for NCCL's start; or the exit code of a job that it
# has refused.
_ADDRESSES, _NCCL, _REFUSED = "addresses", "nccl", "refused"


class OthersLost(BatchgenError):
    """A rank other than 0 has lost the group: rank 0 finds out which one has ended."""


class RankZeroRefused(BatchgenError):
    """Rank 0 has refused the job, and ends with the same exit code."""

    def __init__(self, place: Rank, exit_code: int) -> None:
        super().__init__(f"rank {place.rank} of {place.size} ends: rank 0 has refused the job, and says why")
        self.exit_code = exit_code


class Group:
    """This process's place among the ranks, and its connections to them.

    Tensors are in host memory; those of an all-reduce may be on the process's CUDA device.

    Attributes:
        rank: Number of this process.
        size: Number of ranks.
    """

    def __init__(
        self,
        place: Rank,
        links: TensorLinks,
        nccl_name: str,
        *,
        hub: Hub | None = None,
        line: Line | None = None,
        processes: Processes | None = None,
    ) -> None:
        """nccl_name: of the file by which NCCL's ranks find one another, in this user's own folder."""
        self.rank, self.size = place.rank, place.size
        self.undo = contextlib.ExitStack()  # of what was done to make the group
        self._on_one_host, self._nccl_name = place.on_one_host, nccl_name
        self._links, self._hub, self._line, self._processes = links, hub, line, processes
        self._nccl: Any = None  # once there is a sum on a CUDA device

    # Tensors.

    def all_reduce(self, tensor: Tensor) -> None:
        """Replace a contiguous tensor by the sum of those of all ranks, which is the same everywhere to the last bit.

        All ranks have theirs on the same kind of device. On CUDA the current stream waits for the sum, not the caller.

        Raises:
            BatchgenError: A rank has ended, or does not answer.
        """
        with self._naming_ranks():
            if tensor.is_cuda:
                self._on_cuda().allreduce([tensor], self._sum_options()).wait()
            else:
                self._links.all_reduce(tensor)

    def _sum_options(self) -> Any:
        import torch.distributed as dist

        options = dist.AllreduceOptions()
        options.timeout = timedelta(seconds=SWEEP_TIMEOUT_S)
        return options

    def _on_cuda(self) -> Any:
        """NCCL, which connects the ranks in their first sum.

        It is ended where a rank is lost, or kernels would wait for it for ever.

        What they have to know for that goes through a file that this user alone can read, and their sockets are those
        of loopback, unless NCCL_SOCKET_IFNAME says otherwise.
        """
        if self._nccl is None:
            import torch.distributed as dist

            if not self._on_one_host:
                raise InputError("sums on CUDA devices are for the ranks of one host: start all of them there")
            os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timedelta(seconds=SWEEP_TIMEOUT_S)
            path = runtime_folder() / self._nccl_name
            self.undo.callback(path.unlink, missing_ok=True)
            store = dist.FileStore(str(path), self.size)
            self._nccl = dist.ProcessGroupNCCL(store, self.rank, self.size, options)
            if self._hub is not None:
                self._hub.when_lost(self._nccl.abort)
        return self._nccl

    def check(self) -> None:
        """Raise BatchgenError where another rank has ended, as rank 0: sums on a CUDA device do not say so."""
        assert self._hub is not None
        self._hub.raise_ended(fate_of=self._fate_of)

    def send(self, tensor: Tensor, rank: int) -> None:
        """Send a contiguous tensor; returns when it is on its way. Raises BatchgenError as `all_reduce`."""
        with self._naming_ranks():
            self._links.send(tensor, rank)

    def receive(self, tensor: Tensor, rank: int) -> None:
        """Fill a contiguous tensor with what a rank sends. Raises BatchgenError as `all_reduce`."""
        with self._naming_ranks():
            self._links.receive(tensor, rank)

    @contextlib.contextmanager
    def _naming_ranks(self) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, OSError, EOFError) as error:  # the first is NCCL's
            if self._hub is not None:
                self._hub.raise_ended(_TOLD_WITHIN_S, self._fate_of)
            kind = BatchgenError if self._hub is not None else OthersLost
            raise kind(
                f"rank {self.rank} of {self.size} lost the others ({_first_line(error)}): all of them have to be"
                " started again; the same command goes on from there"
            ) from error

    # What is to be done.

    def broadcast(self, message: bytes) -> None:
        """Say something to all other ranks, which is not empty; for rank 0.

        Raises BatchgenError where one has ended.
        """
        assert self._hub is not None
        self._hub.raise_ended(fate_of=self._fate_of)
        self._hub.broadcast(message)

    def receive_broadcast(self) -> bytes:
        """The next message of rank 0, for the others. Raises EOFError where all is done."""
        assert self._line is not None
        return self._line.receive_broadcast()

    def ready(self) -> None:
        """Say, or as rank 0 wait until all others have said, that what was asked for is done.

        Raises:
            BatchgenError: A rank has ended; it names it, and says why where that is known.
        """
        if self._line is not None:
            return self._line.ready()
        assert self._hub is not None
        return self._hub.wait_until_ready(self._fate_of)

    def fail(self, error: BaseException) -> None:
        """Tell rank 0 why this one ends."""
        assert self._line is not None
        self._line.fail(error)

    def end(self, peaks: Mapping[str, int]) -> None:
        """Tell rank 0 that this one has come to its end. peaks: the most bytes of each tier that it held."""
        assert self._line is not None
        self._line.end(peaks)

    def peaks(self) -> list[dict[str, int] | None]:
        """The most bytes of each tier that the other ranks held, in order, for rank 0; None: a rank has not said so.

        They are there once the group is closed and all has come to its end.
        """
        assert self._hub is not None
        return [self._hub.peaks.get(rank) for rank in range(1, self.size)]

    def _fate_of(self, rank: int) -> str | None:
        return self._processes.fate_of(rank) if self._processes else None

    def close(self, *, done: bool = True) -> None:
        """End the group. done: what was under way has come to its end; otherwise the others end at once."""
        if self._line is not None:
            self._line.close()
        if self._hub is not None:
            self._hub.close(done=done)
        self._links.close()
        self.undo.close()


def lead(
    size: int,
    shares: list[set[int]] | None = None,
    *,
    work: str | None,
    timeout_s: float = START_TIMEOUT_S,
) -> Group:
    """Make a group that this process leads; the others are started, unless a launcher such as torchrun has done so.

    Args:
        size: Ranks, this one included.
        shares: Cores of each rank, of which this process keeps to its own already; None: they are shared out here,
            until the group is closed.
        work: Function of the started ranks, as "module:function", which is called with their group. None: a launcher
            has started them.
        timeout_s: Seconds in which all must have come.

    Raises:
        InputError: A launcher has started another number of ranks, or this is not rank 0 of them; or they have no
            secret.
        BatchgenError: A rank has not come in time, or has ended; it names it.
    """
    place = rank_of_environment()
    if place is not None and place.size != size:
        raise InputError(
            f"the launcher has started {place.size} ranks, the job is for {size}: give both the same number"
        )
    if place is not None and place.rank != 0:
        raise InputError(
            f"this is rank {place.rank}: only rank 0 runs a job, the others are started by the command line"
        )
    processes = None
    with contextlib.ExitStack() as undo, contextlib.ExitStack() as start:
        if shares is None:
            shares = undo.enter_context(own_share(size))
        if place is None:
            assert work is not None
            secret = new_secret()
            listener = start.enter_context(contextlib.closing(listen_as_rank_zero(size, secret, (LOOPBACK, 0))))
            place = Rank(0, size, *listener.address, False, (0, size))
            processes = Processes(size, place.port, secret, work, shares)
            undo.callback(processes.end)
        else:
            listener = start.enter_context(_meet(place, timeout_s))
        group = _made(place, listener, processes, timeout_s, undo)
        group.ready()  # all have all their connections
        group.undo = undo.pop_all()
    return group


@contextlib.contextmanager
def _meet(place: Rank, within_s: float) -> Iterator[Listener]:
    """Listen to the others, as rank 0 under a launcher, which find this process meanwhile. Raises BatchgenError."""
    meeting = Meeting(place)
    with contextlib.closing(listen_as_rank_zero(place.size, meeting.secret, meeting.address)) as listener:
        try:
            meeting.announce(listener.address[1], within_s)
            yield listener
        finally:
            meeting.end()


def _made(
    place: Rank, listener: Listener, processes: Processes | None, timeout_s: float, undo: contextlib.ExitStack
) -> Group:
    """Rank 0's group, once all have come and know where the others listen.

    undo: told how to end what has been begun.
    """
    others, deadline_s = range(1, place.size), time.monotonic() + timeout_s
    gone = processes.gone if processes else dict
    hub = Hub(place.size, listener.wait_for(CONTROL, others, timeout_s, gone))
    undo.callback(hub.close, done=False)
    nccl_name = f"nccl-{secrets.token_hex(16)}"
    hub.broadcast(
        json.dumps({_ADDRESSES: list(hub.addresses(deadline_s - time.monotonic()).items()), _NCCL: nccl_name}).encode()
    )
    left_s = deadline_s - time.monotonic()
    connections = listener.wait_for(TENSORS, others, left_s, lambda: gone() or hub.ended())
    links = TensorLinks(0, connections, SWEEP_TIMEOUT_S)
    undo.callback(links.close)
    return Group(place, links, nccl_name, hub=hub, processes=processes)


@contextlib.contextmanager
def early_group(size: int, shares: list[set[int]]) -> Iterator[Group | None]:
    """Lead the group of a launcher's ranks before this process knows whether it needs them: they wait for it already.

    They end with the block, however it ends. The value is None where there is one rank, or where this process starts
    the others itself, which it does once there is work for them.

    Args:
        size: Ranks, this one included.
        shares: Cores of each rank.

    Raises:
        InputError: A launcher has started another number of ranks, or they have no secret.
        BatchgenError: A rank has not come in time, or has ended.
    """
    if size <= 1 or rank_of_environment() is None:
        yield None
        return
    group = lead(size, shares, work=None)
    try:
        yield group
    except BaseException:
        group.close(done=False)
        raise
    finally:
        group.close(done=True)  # nothing happens where it is closed


@contextlib.contextmanager
def dismissing(size: int) -> Iterator[None]:
    """End the ranks that a launcher has started where the block raises, since they wait for this one. size: ranks."""
    try:
        yield
    except BatchgenError as error:
        with contextlib.suppress(BatchgenError):
            place = rank_of_environment() if size > 1 else None
            if place is not None and place.rank == 0:
                _refuse(place, error.exit_code)
        raise


def _refuse(place: Rank, exit_code: int) -> None:
    """Tell the other ranks that there is nothing to do; those that have not come shortly after are not waited for."""
    heard: set[int] = set()
    deadline_s = time.monotonic() + _REFUSED_S
    with _meet(place, _REFUSED_S) as listener:
        while len(heard) < place.size - 1 and time.monotonic() < deadline_s:
            for rank, connection in listener.arrived(CONTROL).items():
                with contextlib.closing(connection), contextlib.suppress(OSError):
                    send_json(connection, {_REFUSED: exit_code})
                    send_frame(connection, END)
                heard.add(rank)
            time.sleep(_POLL_S)


def follow(place: Rank, on_lost: Callable[[], None], *, timeout_s: float = START_TIMEOUT_S) -> Group:
    """Join a group that another process leads.

    Args:
        place: This process's.
        on_lost: Called, in a thread, where rank 0 ends without having said so.
        timeout_s: In which rank 0 must have come.

    Raises:
        RankZeroRefused: It has come, and there is nothing to do.
        InputError: Ranks on several hosts have no secret.
        BatchgenError: It has not come, or another rank has not.
    """
    deadline_s = time.monotonic() + timeout_s
    connection, found = _find_rank_zero(place, deadline_s, timeout_s)
    above = range(place.rank + 1, place.size)
    with contextlib.ExitStack() as undo:
        line = Line(connection, on_lost)
        undo.callback(line.close)
        listener = None
        if above:
            own_host = connection.getsockname()[0]  # by which this one reaches rank 0, so that others reach it there
            listener = undo.enter_context(
                contextlib.closing(Listener(place.rank, place.size, found.secret, (own_host, 0)))
            )
        line.listens(listener.address if listener else None)
        try:
            said = json.loads(line.receive_broadcast())
        except EOFError:
            raise BatchgenError(
                f"rank {place.rank} of {place.size} ends: rank 0 has ended before all had come"
            ) from None
        if _REFUSED in said:
            raise RankZeroRefused(place, int(said[_REFUSED]))
        left_s = max(1.0, deadline_s - time.monotonic())
        connections = _connections(place, connection.getpeername()[:2], found.secret, dict(said[_ADDRESSES]), left_s)
        for one in connections.values():
            undo.callback(one.close)
        if listener:
            connections |= listener.wait_for(TENSORS, above, left_s)
            listener.close()
        undo.pop_all()
    group = Group(place, TensorLinks(place.rank, connections, SWEEP_TIMEOUT_S), str(said[_NCCL]), line=line)
    group.ready()
    return group


def _find_rank_zero(place: Rank, deadline_s: float, timeout_s: float) -> tuple[socket.socket, Found]:
    """A connection to rank 0, both ends of which have proved who they are. Raises BatchgenError."""
    meeting, call = Meeting(place), Call(place.rank, 0, place.size, CONTROL)
    stranger = ""
    while (left_s := deadline_s - time.monotonic()) > 0:
        if (found := meeting.find(left_s)) is not None:
            try:
                return call_rank((found.host, found.port), found.secret, call, min(HELLO_S, left_s)), found
            except NotAuthenticated as error:
                stranger = f"; who answers at {found.host}:{found.port} does not share this rank's secret ({error})"
            except OSError:
                pass  # it does not listen yet
        time.sleep(_POLL_S)
    raise BatchgenError(
        f"rank 0 of {place.size} did not come to {place.host}:{place.port} within {timeout_s:,.0f} s{stranger}:"
        f" start it, and see that rank {place.rank} reaches it" + (" and has the same secret" if stranger else "")
    )


def _connections(
    place: Rank, rank_zero: tuple[str, int], secret: bytes, addresses: Mapping[int, Any], within_s: float
) -> dict[int, socket.socket]:
    """Connections for tensors to all ranks below this one.

    addresses: where others than rank 0 listen. Raises BatchgenError.
    """
    found: dict[int, socket.socket] = {}
    try:
        for rank in range(place.rank):
            address = tuple(addresses[rank]) if rank else rank_zero
            found[rank] = call_rank(address, secret, Call(place.rank, rank, place.size, TENSORS), within_s)
    except (OSError, NotAuthenticated) as error:
        for connection in found.values():
            connection.close()
        raise BatchgenError(
            f"rank {place.rank} of {place.size} cannot reach rank {rank} at {address[0]}: {error}"
        ) from error
    return found


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0]
