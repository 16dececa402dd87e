"""The group of processes that run one model together, as the engine sees it, and rank 0's counts of their sweeps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from batchgen.core.routing import RoutingCounts

if TYPE_CHECKING:
    from torch import Tensor

    from batchgen.engine.parts import SweepRunner


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
        """Raise BatchgenError where another rank has ended; for rank 0."""

    def broadcast(self, message: bytes) -> None:
        """Send a message to all other ranks without waiting for them; for rank 0."""

    def receive_broadcast(self) -> bytes:
        """Return the next message of rank 0. Raises EOFError where all is done."""

    def ready(self) -> None:
        """Report that the last message was carried out; rank 0 waits here for the reports of all others."""

    def fail(self, error: BaseException) -> None:
        """Report to rank 0 why this rank ends."""

    def peaks(self) -> list[dict[str, int] | None]:
        """Return the peak bytes of each tier of the other ranks, once the group is closed."""

    def close(self, *, done: bool = True) -> None:
        """End the group; with `done` false the others end at once."""


class RankZeroCounts:
    """The counts of a `SweepRunner` that several processes carry out: those of rank 0's own executor."""

    def __init__(self, executor: SweepRunner) -> None:
        self._executor = executor

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
