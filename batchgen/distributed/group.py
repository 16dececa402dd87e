"""A group of processes (ranks) that run one model together: rank 0 leads, and the other ranks follow.

Rank 0 alone reads the input, schedules, samples and writes the output. The other ranks know only what they receive.
Every two ranks have a connection, whose ends have authenticated each other. Once all ranks are connected, none accepts
further connections. Tensors in host memory are sent over these connections; tensors on a CUDA device by NCCL, through
torch.distributed.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
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
_STORE_TIMEOUT_S = 60.0  # for the ranks' entries in NCCL's file, which they write at the same time
_TOLD_WITHIN_S = 5.0  # between a transfer that breaks and the news which rank has ended
_REFUSED_S = 3.0  # for others to hear that rank 0 has refused the job, which may be starting
_POLL_S = 0.05
# What rank 0 says first: where ranks listen, and the name of a file for NCCL's start; or the exit code of a job that it
# has refused.
_ADDRESSES, _NCCL, _REFUSED = "addresses", "nccl", "refused"


class OthersLost(BatchgenError):
    """A rank other than 0 has lost its connections. Rank 0 finds out which rank has ended."""


class RankZeroRefused(BatchgenError):
    """Rank 0 has refused the job.

    Attributes:
        exit_code: The exit code of rank 0, with which this process ends too.
    """

    def __init__(self, place: Rank, exit_code: int) -> None:
        super().__init__(f"rank {place.rank} of {place.size} ends: rank 0 has refused the job, and says why")
        self.exit_code = exit_code


class Group:
    """This process's rank in a group, and its connections to the other ranks.

    Tensors are in host memory; those of `all_reduce` may be on the process's CUDA device.

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
        """Make a group from connections.

        Args:
            place: This process's place in the group.
            links: Connections for tensors.
            nccl_name: Name of the file by which the ranks of NCCL find each other, in this user's own folder.
            hub: Control connections of rank 0; None on other ranks.
            line: Control connection to rank 0; None on rank 0.
            processes: Processes that rank 0 has started; None: a launcher started them.
        """
        self.rank, self.size = place.rank, place.size
        self.undo = contextlib.ExitStack()  # of what was done to make the group
        self._on_one_host, self._nccl_name = place.on_one_host, nccl_name
        self._links, self._hub, self._line, self._processes = links, hub, line, processes
        self._nccl: Any = None  # once there is a sum on a CUDA device
        self._aborting, self._is_aborted = threading.Lock(), False

    # Tensors.

    def all_reduce(self, tensor: Tensor) -> None:
        """Replace a contiguous tensor by its sum over all ranks; the result is bitwise equal on all ranks.

        All ranks have their tensors on the same kind of device. On CUDA, the current stream waits for the sum; the call
        does not.

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
        """The process group of NCCL, which connects the ranks in their first sum.

        It is aborted where a rank is lost, since kernels would otherwise wait for ever. So would the start of NCCL for
        a rank that has ended, so all ranks first come together on the host. They exchange the addresses for NCCL in a
        file that only this user can read. Its sockets are on loopback, unless NCCL_SOCKET_IFNAME is set.
        """
        if self._nccl is None:
            import torch
            import torch.distributed as dist

            if not self._on_one_host:
                raise InputError("sums on CUDA devices are for the ranks of one host: start all of them there")
            self._links.all_reduce(torch.zeros(1))
            os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timedelta(seconds=SWEEP_TIMEOUT_S)
            path = runtime_folder() / self._nccl_name
            store = dist.FileStore(str(path), self.size)
            store.set_timeout(timedelta(seconds=_STORE_TIMEOUT_S))
            self._nccl = dist.ProcessGroupNCCL(store, self.rank, self.size, options)
            if self._hub is not None:
                self.undo.callback(path.unlink, missing_ok=True)
                self._hub.when_lost(self._abort_nccl)
        return self._nccl

    def _abort_nccl(self) -> None:
        """End the sums that are under way. Called by the thread that finds a rank lost, or by that of the sums."""
        with self._aborting:
            if self._nccl is not None and not self._is_aborted:
                self._is_aborted = True
                self._nccl.abort()

    def _end_nccl(self) -> None:
        """End NCCL, where no sum is under way, and threads of torch's with it.

        These threads read the ranks' file: without it, the end of the last of them would take as long as a file may
        take to come.
        """
        self._abort_nccl()
        self._nccl = None

    def check(self) -> None:
        """Raise BatchgenError where another rank has ended; for rank 0, as sums on a CUDA device do not raise it."""
        assert self._hub is not None
        self._hub.raise_ended(fate_of=self._fate_of)

    def send(self, tensor: Tensor, rank: int) -> None:
        """Send a contiguous tensor to a rank; returns when all bytes are handed to the kernel.

        Raises:
            BatchgenError: A rank has ended, or does not answer.
        """
        with self._naming_ranks():
            self._links.send(tensor, rank)

    def receive(self, tensor: Tensor, rank: int) -> None:
        """Receive a tensor from a rank into a contiguous tensor of the same size.

        Raises:
            BatchgenError: A rank has ended, or does not answer.
        """
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
        """Send a message, which is not empty, to all other ranks; called by rank 0.

        Raises:
            BatchgenError: A rank has ended.
        """
        assert self._hub is not None
        self._hub.raise_ended(fate_of=self._fate_of)
        self._hub.broadcast(message)

    def receive_broadcast(self) -> bytes:
        """Receive the next message of rank 0; called by the other ranks. Raises EOFError where the work is done."""
        assert self._line is not None
        return self._line.receive_broadcast()

    def ready(self) -> None:
        """Confirm that this rank has done what rank 0 asked for; rank 0 waits for all other ranks' confirmations.

        Raises:
            BatchgenError: A rank has ended. The message names the rank, and the reason where it is known.
        """
        if self._line is not None:
            return self._line.ready()
        assert self._hub is not None
        return self._hub.wait_until_ready(self._fate_of)

    def fail(self, error: BaseException) -> None:
        """Send rank 0 the error by which this rank ends."""
        assert self._line is not None
        self._line.fail(error)

    def end(self, peaks: Mapping[str, int]) -> None:
        """Send rank 0 the message that this rank has completed its work.

        Args:
            peaks: The most bytes that this rank has held in each tier.
        """
        assert self._line is not None
        self._end_nccl()  # before rank 0 removes the file
        self._line.end(peaks)

    def peaks(self) -> list[dict[str, int] | None]:
        """The most bytes that each other rank has held in each tier, in order of rank; called by rank 0.

        An entry is None where the rank has sent none. The values are complete after the group was closed with its work
        done.
        """
        assert self._hub is not None
        return [self._hub.peaks.get(rank) for rank in range(1, self.size)]

    def _fate_of(self, rank: int) -> str | None:
        return self._processes.fate_of(rank) if self._processes else None

    def close(self, *, done: bool = True) -> None:
        """Close the group.

        Args:
            done: True where the other ranks may complete their work; False where they end at once.
        """
        if self._line is not None:
            self._line.close()
        if self._hub is not None:
            self._hub.close(done=done)
        self._links.close()
        self._end_nccl()
        self.undo.close()


def lead(
    size: int,
    shares: list[set[int]] | None = None,
    *,
    work: str | None,
    timeout_s: float = START_TIMEOUT_S,
) -> Group:
    """Make a group that this process leads as rank 0.

    Args:
        size: Number of ranks, this one included.
        shares: CPU cores of each rank; this process is already pinned to its own. None: cores are divided here, until
            the group is closed.
        work: The function that the started ranks call with their group, as "module:function". None: a launcher such as
            torchrun has started the other ranks.
        timeout_s: Seconds in which all ranks must connect.

    Raises:
        InputError: A launcher has started another number of ranks, this process is not rank 0, or the ranks have no
            secret.
        BatchgenError: A rank has not connected in time, or has ended. The message names the rank.
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
    """Accept connections of the other ranks of a launcher, as rank 0, and publish the address. Raises BatchgenError."""
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
    """Make rank 0's group after all other ranks have connected, and send them each other's addresses.

    Args:
        place: This process's place in the group.
        listener: The socket at which the other ranks connect.
        processes: Processes that rank 0 has started; None: a launcher started them.
        timeout_s: Seconds in which all ranks must connect.
        undo: The stack that gets the functions that end what this function starts.
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
    """Lead the ranks of a launcher before this process knows whether it needs them, since they wait for it already.

    The ranks end with the block, however it ends. The value is None where there is one rank, or where this process
    starts the other ranks itself later.

    Args:
        size: Number of ranks, this one included.
        shares: CPU cores of each rank.

    Raises:
        InputError: A launcher has started another number of ranks, or the ranks have no secret.
        BatchgenError: A rank has not connected in time, or has ended.
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
    """End the ranks that a launcher has started where the block raises an exception, since they wait for rank 0.

    Args:
        size: Number of ranks.
    """
    try:
        yield
    except BatchgenError as error:
        with contextlib.suppress(BatchgenError):
            place = rank_of_environment() if size > 1 else None
            if place is not None and place.rank == 0:
                _refuse(place, error.exit_code)
        raise


def _refuse(place: Rank, exit_code: int) -> None:
    """Tell the other ranks that rank 0 has refused the job. Ranks that do not connect shortly are not waited for.

    Args:
        place: This process's place in the group.
        exit_code: The exit code with which all ranks end.
    """
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
    """Join, as another rank than 0, a group that rank 0 leads.

    Args:
        place: This process's place in the group.
        on_lost: The function that is called, in a thread, where rank 0 ends without a final message.
        timeout_s: Seconds in which rank 0 must accept the connection.

    Raises:
        RankZeroRefused: Rank 0 has refused the job.
        InputError: Ranks on several hosts have no secret.
        BatchgenError: Rank 0 or another rank has not connected in time.
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
    """Connect to rank 0 and authenticate both ends. Raises BatchgenError.

    Args:
        place: This process's place in the group.
        deadline_s: Time (time.monotonic) until which to try.
        timeout_s: Seconds of the whole wait, for the error message.

    Returns:
        The connection, and the address and secret of rank 0.
    """
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
    """Connect to all lower ranks, for tensors. Raises BatchgenError.

    Args:
        place: This process's place in the group.
        rank_zero: Host and port of rank 0.
        secret: The secret of the job.
        addresses: Addresses of the ranks other than 0, by rank.
        within_s: Seconds for each connection.

    Returns:
        The connections by rank.
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
