"""A group of processes that run one model together: rank 0, which leads, and others that do what it says.

Rank 0 has the job: it alone reads the input, schedules, samples and writes the output. The others know nothing but what they are
told. Tensors go by torch.distributed's gloo, those of a CUDA device by its NCCL.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from batchgen.core.errors import BatchgenError, InputError
from batchgen.distributed.control import Hub, Line
from batchgen.distributed.launch import (
    LOOPBACK,
    Processes,
    Rank,
    own_share,
    rank_of_environment,
)

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import Store

START_TIMEOUT_S = 120.0  # for all ranks to come: importing torch from a cold disk takes half a minute
# For the others to come to the same place of a sweep. That a process has ended is noticed at once; this is for one that hangs.
SWEEP_TIMEOUT_S = 900.0
_TOLD_WITHIN_S = 5.0  # between a transfer that breaks and the news which rank has ended
# In the store: where rank 0 is, or that it has refused the job; and how many others have read that.
_WHERE, _REFUSED, _HEARD = "batchgen/rank-0", "refused", "batchgen/heard"
_REFUSED_S = 3.0  # for others to read it, which may be starting
_POLL_S = 0.05


class OthersLost(BatchgenError):
    """A rank other than 0 has lost the group: rank 0 finds out which one has ended."""


class RankZeroRefused(BatchgenError):
    """Rank 0 has refused the job, and ends with the same exit code."""

    def __init__(self, place: Rank, exit_code: int) -> None:
        super().__init__(f"rank {place.rank} of {place.size} ends: rank 0 has refused the job, and says why")
        self.exit_code = exit_code


class Group:
    """This process's place among the ranks, and how it reaches them.

    Tensors are in host memory, or of a sum on the process's CUDA device.

    Attributes:
        rank, size: of this process, and of the group.
    """

    def __init__(
        self,
        place: Rank,
        store: Store,
        *,
        on_loopback: bool,
        hub: Hub | None = None,
        line: Line | None = None,
        processes: Processes | None = None,
    ) -> None:
        import torch.distributed as dist

        self.rank, self.size = place.rank, place.size
        self.undo = contextlib.ExitStack()  # of what was done to make the group
        self._hub, self._line, self._processes, self._store = hub, line, processes, store
        devices, options = dist.ProcessGroupGloo, dist.ProcessGroupGloo._Options()
        device = devices.create_device(hostname=LOOPBACK) if on_loopback else devices.create_default_device()
        options._devices, options._timeout = [device], timedelta(seconds=START_TIMEOUT_S)
        with self._naming_ranks():
            prefix = dist.PrefixStore("batchgen/gloo", store)
            self._gloo = dist.ProcessGroupGloo(prefix, place.rank, place.size, options)
        self._options = dist.AllreduceOptions()
        self._options.timeout = timedelta(seconds=SWEEP_TIMEOUT_S)
        self._nccl: Any = None  # once there is a sum on a CUDA device

    # Tensors.

    def all_reduce(self, tensor: Tensor) -> None:
        """Replace a contiguous tensor by the sum of those of all ranks, which is the same everywhere to the last bit.

        All ranks have theirs on the same kind of device. On CUDA the current stream waits for the sum, not the caller.

        Raises:
            BatchgenError: A rank has ended, or does not answer.
        """
        with self._naming_ranks():
            backend = self._on_cuda() if tensor.is_cuda else self._gloo
            backend.allreduce([tensor], self._options).wait()

    def _on_cuda(self) -> Any:
        """NCCL, which connects the ranks in their first sum. It is ended where a rank is lost, or kernels would wait for it for ever."""
        if self._nccl is None:
            import torch.distributed as dist

            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timedelta(seconds=SWEEP_TIMEOUT_S)
            store = dist.PrefixStore("batchgen/nccl", self._store)
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
            self._gloo.send([tensor], rank, 0).wait(timedelta(seconds=SWEEP_TIMEOUT_S))

    def receive(self, tensor: Tensor, rank: int) -> None:
        """Fill a contiguous tensor with what a rank sends. Raises BatchgenError as `all_reduce`."""
        with self._naming_ranks():
            self._gloo.recv([tensor], rank, 0).wait(timedelta(seconds=SWEEP_TIMEOUT_S))

    @contextlib.contextmanager
    def _naming_ranks(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if self._hub is not None:
                self._hub.raise_ended(_TOLD_WITHIN_S, self._fate_of)
            kind = BatchgenError if self._hub is not None else OthersLost
            raise kind(
                f"rank {self.rank} of {self.size} lost the others ({_first_line(error)}): all of them have to be"
                " started again; the same command goes on from there"
            ) from error

    # What is to be done.

    def tell(self, message: Any) -> None:
        """Say something that can be pickled to all other ranks; for rank 0. Raises BatchgenError where one has ended."""
        assert self._hub is not None
        self._hub.raise_ended(fate_of=self._fate_of)
        self._hub.tell(message)

    def told(self) -> Any:
        """What rank 0 says next, for the others. Raises EOFError where all is done."""
        assert self._line is not None
        return self._line.told()

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
        """Of the other ranks, in order, the most bytes of each tier that they held, for rank 0; None: it has not said so.

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
        self.undo.close()


def lead(size: int, shares: list[set[int]] | None = None, *, timeout_s: float = START_TIMEOUT_S) -> Group:
    """Make a group that this process leads; the others are started, unless a launcher such as torchrun has done so.

    Args:
        size: Ranks, this one included.
        shares: The cores of each, of which this process keeps to its own already; None: they are shared out here, until the
            group is closed.
        timeout_s: In which all must have come.

    Raises:
        InputError: A launcher has started another number of ranks, or this is not rank 0 of them.
        BatchgenError: A rank has not come in time, or has ended; it names it.
    """
    import torch.distributed as dist

    place = rank_of_environment()
    if place is not None and place.size != size:
        raise InputError(
            f"the launcher has started {place.size} ranks, the job is for {size}: give both the same number"
        )
    if place is not None and place.rank != 0:
        raise InputError(
            f"this is rank {place.rank}: only rank 0 runs a job, the others are started by the command line"
        )
    secret, timeout = secrets.token_hex(16), timedelta(seconds=timeout_s)
    processes = None
    with contextlib.ExitStack() as undo:
        if shares is None:
            shares = undo.enter_context(own_share(size))
        hub = Hub(size, "" if place else LOOPBACK, secret)
        undo.callback(hub.close, done=False)
        if place is None:
            store = dist.TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False, timeout=timeout)
            place = Rank(0, size, LOOPBACK, store.port, True, (0, size))
            processes = Processes(size, store.port, shares)
            undo.callback(processes.end)
            undo.callback(hub.close, done=False)  # before they are waited for
        else:
            try:
                store = _store_of(place, timeout)
            except RuntimeError as error:
                raise BatchgenError(
                    f"rank 0 cannot reach the launcher's store at {place.host}:{place.port}: {_first_line(error)}"
                ) from error
        store.set(_WHERE, f"{place.host} {hub.port} {secret}")
        hub.wait_for_ranks(timeout_s, processes.gone if processes else dict)
        group = Group(place, store, on_loopback=processes is not None, hub=hub, processes=processes)
        group.ready()  # none of them needs the store from here on, which ends with this process
        group.undo = undo.pop_all()
    return group


@contextlib.contextmanager
def early_group(size: int, shares: list[set[int]]) -> Iterator[Group | None]:
    """Under a launcher, the group that this process leads, before it knows whether it needs the others: they wait for it already.

    They end with the block, however it ends. None where there is one rank, or where this process starts the others itself, which
    it does once there is work for them.

    Args:
        size, shares: As of `lead`.

    Raises:
        BatchgenError: As `lead`.
    """
    if size <= 1 or rank_of_environment() is None:
        yield None
        return
    group = lead(size, shares)
    try:
        yield group
    except BaseException:
        group.close(done=False)
        raise
    finally:
        group.close(done=True)  # nothing happens where it is closed


@contextlib.contextmanager
def dismissing(size: int) -> Iterator[None]:
    """What is refused inside ends the ranks that a launcher has started too, which wait for this one. size: of the group."""
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
    try:
        store = _store_of(place, timedelta(seconds=_REFUSED_S))
        store.set(_WHERE, f"{_REFUSED} {exit_code}")
        deadline_s = time.monotonic() + _REFUSED_S
        while store.add(_HEARD, 0) < place.size - 1 and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
    except RuntimeError as error:  # the store is torch's
        raise BatchgenError(f"cannot tell the other ranks: {error}") from error


def follow(
    place: Rank, on_lost: Callable[[], None], *, on_loopback: bool = False, timeout_s: float = START_TIMEOUT_S
) -> Group:
    """Join a group that another process leads.

    Args:
        place: This process's.
        on_lost: Called, in a thread, where rank 0 ends without having said so.
        on_loopback: Whether rank 0 has started this process.
        timeout_s: In which rank 0 must have come.

    Raises:
        RankZeroRefused: It has come, and there is nothing to do.
        BatchgenError: It has not.
    """
    try:
        store = _store_of(place, timedelta(seconds=timeout_s))
        host, port, *secret = store.get(_WHERE).decode().split()
        if host == _REFUSED:
            store.add(_HEARD, 1)
            raise RankZeroRefused(place, int(port))
    except RuntimeError as error:
        raise BatchgenError(
            f"rank 0 of {place.size} did not come to {place.host}:{place.port} within {timeout_s:,.0f} s: start it, and see that"
            f" rank {place.rank} reaches it"
        ) from error
    line = Line(place.rank, host, int(port), secret[0], timeout_s, on_lost)
    group = Group(place, store, on_loopback=on_loopback, line=line)
    group.ready()
    return group


def _store_of(place: Rank, timeout: timedelta) -> Store:
    """The store in which ranks find one another. Raises BatchgenError where this one cannot open it, RuntimeError where it cannot reach it."""
    import torch.distributed as dist

    try:
        return dist.TCPStore(
            place.host, place.port, is_master=place.hosts_store, wait_for_workers=False, timeout=timeout
        )
    except RuntimeError as error:
        if not place.hosts_store:
            raise
        why = "is taken on this host" if "EADDRINUSE" in str(error) else f"cannot be listened on ({_first_line(error)})"
        raise BatchgenError(f"MASTER_PORT {place.port} {why}: give all ranks another one") from error


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0]
