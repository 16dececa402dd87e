"""The states of sequences behind the numbers of slots: a pool in each tier, and what passes between them.

A pool of a layer is [slots, bytes of a state row] (`models.state_layers.StateRow`), which kernels see as tensors whose
slots lie apart. A state in the compute device's memory, or one that the CPU updates in the host's, is updated in place.
Others pass through staging buffers of the compute device, whole, both ways in every sweep; those on disk through
buffers in host memory too. With states on disk, rows everywhere begin at multiples of the unit of direct I/O.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from batchgen.core.direct_io import aligned
from batchgen.models.config import ModelConfig
from batchgen.models.state import StateViews
from batchgen.models.state_layers import StateRow
from batchgen.ops import dispatch as ops
from batchgen.ops.host_copy import upload
from batchgen.runtime.memory.disk_pool import DiskPool
from batchgen.runtime.memory.tiers import Tiers
from batchgen.runtime.memory.transfers import Arena
from batchgen.schedule.state_rows import StateStaging
from batchgen.schedule.step_graph import KV_SLOTS


@dataclass(frozen=True)
class StateMoves:
    """The slots of a `StateStaging` as tensors, made once per sweep and used by every layer.

    Attributes:
        staging: The staging.
        host_sources: Slots of the host's pool to bring, int64.
        host_targets: Slots that rows go to, int64.
    """

    staging: StateStaging
    host_sources: Tensor
    host_targets: Tensor


class StateCache:
    """Pools and buffers. Invariant: a staging buffer is touched by one Step at a time, as the schedule has it.

    Attributes:
        pools: State rows in each tier but the disk, uint8 [slots, bytes], by state layer.
        row_bytes: Bytes from one row to the next.
    """

    def __init__(
        self,
        config: ModelConfig,
        row: StateRow,
        slots: Mapping[str, int],
        *,
        tiers: Tiers | None = None,
        staging_rows: int = 0,
        offload_dir: Path | None = None,
        on_device: Sequence[bool] = (),
    ) -> None:
        """Make the pools and buffers.

        Args:
            config: Configuration of a model with state layers.
            row: Layout of a state row.
            slots: Slots of each tier's pool.
            tiers: Tiers with their memories; None: host memory alone.
            staging_rows: Rows of each staging buffer.
            offload_dir: Directory of the file on disk.
            on_device: For each layer, whether the host's pool lies on the device there; empty: in none.

        Raises:
            BatchgenError: Memory or disk do not suffice.
        """
        self._row, self._tiers = row, tiers or Tiers()
        self.row_bytes = aligned(row.num_bytes) if slots.get("disk") else row.num_bytes
        arenas = self._tiers.arenas
        device = arenas[self._tiers.compute_tier]

        def arena(tier: str, layer: int) -> Arena:
            return device if tier == "cpu" and on_device and on_device[layer] else arenas[tier]

        self.pools: dict[str, dict[int, Tensor]] = {
            tier: {
                layer: arena(tier, layer).empty((count, self.row_bytes), torch.uint8, "the states")
                for layer in config.state_layers
            }
            for tier, count in slots.items()
            if tier != "disk" and count
        }
        self._staging: list[Tensor] = []
        self._reads: list[Tensor] = []
        self._writes: list[Tensor] = []
        self._disk: DiskPool | None = None
        if staging_rows:
            shape = staging_rows, self.row_bytes
            self._staging = [device.empty(shape, torch.uint8, "states in transit") for _ in range(KV_SLOTS)]
        if slots.get("disk"):
            assert offload_dir is not None, "states on disk need a directory"
            row_bytes = dict.fromkeys(config.state_layers, self.row_bytes)
            self._disk = DiskPool(row_bytes, slots["disk"], offload_dir, "states")
            self._reads = self._writes = self._staging
            if self._tiers.links is not None:
                host = arenas["cpu"]
                self._reads, self._writes = (
                    [host.empty(shape, torch.uint8, "states in transit") for _ in range(KV_SLOTS)] for _ in range(2)
                )

    @property
    def disk_bytes(self) -> int:
        """Bytes of the file."""
        return self._disk.size_bytes if self._disk else 0

    @property
    def disk_bytes_read(self) -> int:
        """Bytes read from disk since counts were reset."""
        return self._disk.num_read_bytes if self._disk else 0

    @property
    def disk_bytes_written(self) -> int:
        """Bytes written to disk since counts were reset."""
        return self._disk.num_written_bytes if self._disk else 0

    def in_pool(self, tier: str, layer: int) -> StateViews:
        """The states of a layer in a tier's pool, by slot."""
        return self._views(self.pools[tier][layer])

    def in_staging(self, slot: int) -> StateViews:
        """The states in a staging buffer, by row."""
        return self._views(self._staging[slot])

    def prepare(self, staging: StateStaging, device: torch.device = ops.CPU) -> StateMoves:
        """The moves of a staging, with slots on the device that copies rows which are not neighbours."""
        return StateMoves(staging, upload(staging.host_sources, device), upload(staging.host_targets, device))

    def read(self, layer: int, slot: int, moves: StateMoves) -> None:
        """Read states of earlier sweeps from disk into host memory. Raises BatchgenError."""
        self._on_disk.read(layer, self._reads[slot], moves.staging.reads)

    def load(self, layer: int, slot: int, moves: StateMoves) -> None:
        """Copy states of earlier sweeps from host memory to the accelerator."""
        target, h2d = self._staging[slot], self._tiers.h2d
        if count := len(moves.host_sources):
            h2d.gather(_words(target[:count]), _words(self.pools["cpu"][layer]), moves.host_sources)
        for run in moves.staging.reads:
            rows = slice(run.staged, run.staged + run.count)
            h2d.copy(target[rows], self._reads[slot][rows])

    def store(self, layer: int, slot: int, moves: StateMoves) -> None:
        """Copy new states from the staging buffer to host memory, for good or on their way to disk."""
        source, d2h = self._staging[slot], self._tiers.d2h
        if count := len(moves.host_targets):
            d2h.borrow(moves.host_targets)
            d2h.scatter(_words(self.pools["cpu"][layer]), moves.host_targets, _words(source[:count]))
        rows = slice(moves.staging.disk_start, moves.staging.num_rows)
        if moves.staging.writes:
            d2h.copy(self._writes[slot][rows], source[rows])

    def write(self, layer: int, slot: int, moves: StateMoves) -> None:
        """Write new states to disk. Raises BatchgenError."""
        self._on_disk.write(layer, self._writes[slot], moves.staging.writes)

    def reset_counts(self) -> None:
        if self._disk:
            self._disk.reset_counts()

    def close(self) -> None:
        """Close the file, and let go of all memory. Counts stay."""
        if self._disk:
            self._disk.close()
        for pool in self.pools.values():
            pool.clear()
        for buffers in (self._staging, self._reads, self._writes):
            buffers.clear()

    @property
    def _on_disk(self) -> DiskPool:
        assert self._disk is not None, "there are no states on disk"
        return self._disk

    def _views(self, rows: Tensor) -> StateViews:
        """State rows, uint8 [rows, bytes], as the tensors that kernels take."""
        row = self._row
        start, inputs = row.matrix_bytes, row.inputs_shape
        dtype = getattr(torch, row.compute_dtype)
        stop = start + inputs[0] * inputs[1] * dtype.itemsize
        matrices = None
        if start:
            matrix_dtype = getattr(torch, row.state_dtype)
            matrices = rows[:, :start].view(matrix_dtype).unflatten(1, row.shape.matrix_shape)
        return StateViews(rows[:, start:stop].view(dtype).unflatten(1, inputs), matrices)


def _words(rows: Tensor) -> Tensor:
    """State rows in units that are copied faster than bytes."""
    return rows.view(torch.int64)
