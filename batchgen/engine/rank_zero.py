"""What an engine is told of sweeps that several processes run: what rank 0 counts itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchgen.core.routing import RoutingCounts

if TYPE_CHECKING:
    from batchgen.engine.parts import SweepRunner


class RankZeroCounts:
    """The counts of a `SweepRunner`, as rank 0's own executor has them. executor: rank 0's."""

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
