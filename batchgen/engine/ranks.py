"""The interface of the group of processes that run one model together, and rank 0's counts of their sweeps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from batchgen.core.errors import InputError
from batchgen.core.kv_expansion import Recut
from batchgen.core.routing import RoutingCounts
from batchgen.distributed.launch import ranks_of_host

if TYPE_CHECKING:
    from torch import Tensor

    from batchgen.engine.parts import SweepRunner


def check_cards(flag: str, size: int) -> None:
    """Raise InputError where this host has fewer GPUs than ranks of a job.

    Args:
        flag: The option that asks for the ranks.
        size: Number of ranks on all hosts.
    """
    import torch

    here = ranks_of_host(size)
    if here > (count := torch.cuda.device_count()):
        raise InputError(f"{flag} {size} needs {here} GPUs here, one for each rank, and torch sees {count}")


class RankGroup(Protocol):
    """The part of `distributed.group.Group` that tensor parallelism and pipelines use.

    Attributes:
        rank: This process's number in the group.
        size: Number of processes, this one included.
    """

    rank: int
    size: int

    def all_reduce(self, tensor: Tensor) -> None:
        """Replace a tensor by the sum of the tensors of all ranks."""

    def send(self, tensor: Tensor, rank: int) -> None:
        """Send a contiguous tensor to a rank."""

    def receive(self, tensor: Tensor, rank: int) -> None:
        """Fill a contiguous tensor with the one that a rank sends."""

    def check(self) -> None:
        """Raise BatchgenError where another rank has ended. Only rank 0 calls it."""

    def broadcast(self, message: bytes) -> None:
        """Send a message to all other ranks, without waiting until they have got it. Only rank 0 calls it."""

    def receive_broadcast(self) -> bytes:
        """The next message of rank 0. Raises EOFError where rank 0 has ended the group."""

    def ready(self) -> None:
        """Report to rank 0 that the last message was carried out; as rank 0, wait for all these reports."""

    def fail(self, error: BaseException) -> None:
        """Report to rank 0 the error that ends this rank."""

    def peaks(self) -> list[dict[str, int] | None]:
        """Peak bytes of each tier of each other rank, after the group was closed; None: a rank has not reported."""

    def close(self, *, done: bool = True) -> None:
        """End the group. done: whether all work is complete; otherwise the other ranks are stopped at once."""


class RankZeroCounts:
    """The counts (bytes, seconds, routed tokens) of a `SweepRunner` over several processes: those of rank 0 alone."""

    def __init__(self, executor: SweepRunner) -> None:
        self._executor = executor

    def recut(self, recut: Recut) -> None:
        """Raise AssertionError: ranks' memory plans have no expansion."""
        raise AssertionError("ranks keep each layer's KV where it is")

    @property
    def bytes_moved(self) -> dict[str, int]:
        return self._executor.bytes_moved

    @property
    def busy_s(self) -> dict[str, float]:
        return self._executor.busy_s

    @property
    def routing(self) -> RoutingCounts:
        return self._executor.routing

    @property
    def stalled_s(self) -> dict[str, float]:
        return self._executor.stalled_s

    @property
    def peak_bytes(self) -> dict[str, int]:
        return self._executor.peak_bytes
