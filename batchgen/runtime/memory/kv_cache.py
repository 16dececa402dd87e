"""The KV tensors behind the block managers' numbers: a pool in each tier, and what passes between them.

KV of a layer is [blocks, 2, kv_heads, kv_block_size, width] (see `ops`); layers may differ in the number and size of
their heads. A layer that attends to the KV of an earlier one has that one's pool. A pool in the compute device's memory
is attended to in place. Sequences that live elsewhere pass through staging buffers of the compute device, but in layers
in which the host's pool lies on the device (`on_device`); those on disk through buffers in host memory too, in a file
in which each block starts on a direct-I/O boundary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from batchgen.core.direct_io import DirectFile, aligned
from batchgen.core.dtypes import KVFormat
from batchgen.core.errors import BatchgenError
from batchgen.core.plan import passing_bytes
from batchgen.core.units import format_bytes
from batchgen.models.config import ModelConfig
from batchgen.ops import dispatch as ops
from batchgen.ops.host_copy import upload
from batchgen.runtime.memory.tiers import Tiers
from batchgen.runtime.memory.transfers import Arena, Link, Prefault, as_buffer
from batchgen.schedule.staging import Run, Staging
from batchgen.schedule.step_graph import KV_SLOTS


@dataclass(frozen=True)
class KVShape:
    """The shape of a KV block of one layer.

    Attributes:
        kv_heads: Key and value heads.
        kv_block_size: Tokens of a block.
        head_dim: Numbers of a head.
        format: Format of K and V.
    """

    kv_heads: int
    kv_block_size: int
    head_dim: int
    format: KVFormat

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of KV tensors, whose elements are bytes where KV is packed."""
        return torch.uint8 if self.format.bits else getattr(torch, self.format.name)

    @property
    def width(self) -> int:
        """Elements of the K or V of a token and head."""
        return self.format.row_bytes(self.head_dim) // self.dtype.itemsize

    @property
    def block(self) -> tuple[int, ...]:
        return (2, self.kv_heads, self.kv_block_size, self.width)

    @property
    def block_bytes(self) -> int:
        return math.prod(self.block) * self.dtype.itemsize

    @property
    def disk_block_bytes(self) -> int:
        """Bytes of one block in the file."""
        return aligned(self.block_bytes)


@dataclass(frozen=True)
class KVShapes:
    """The shapes of the KV blocks of a model's layers.

    Attributes:
        kv_block_size: Tokens of a block.
        format: Format of K and V.
        by_window: Shape of a block in layers of each sliding window; None: layers without one.
    """

    kv_block_size: int
    format: KVFormat
    by_window: Mapping[int | None, KVShape]

    @property
    def largest_block_bytes(self) -> int:
        """Bytes of the largest block."""
        return max(shape.block_bytes for shape in self.by_window.values())

    @property
    def largest_disk_block_bytes(self) -> int:
        """Bytes of the largest block in the file."""
        return max(shape.disk_block_bytes for shape in self.by_window.values())

    @property
    def is_padded_on_disk(self) -> bool:
        """True where blocks of some layers take more bytes in the file than in memory."""
        return any(shape.block_bytes != shape.disk_block_bytes for shape in self.by_window.values())


def kv_shapes(config: ModelConfig, kv_block_size: int, kv_format: str) -> KVShapes:
    """The shapes of a model's KV blocks. kv_format: name of a `KVFormat`."""
    stored, by_window = KVFormat.of(kv_format), {}
    for window in dict.fromkeys(config.windows):
        attention = config.attention_within(window)
        by_window[window] = KVShape(attention.num_kv_heads, kv_block_size, attention.head_dim, stored)
    return KVShapes(kv_block_size, stored, by_window)


@dataclass(frozen=True)
class Moves:
    """The indices of a `Staging` as tensors, made once per sweep and used by every layer.

    Attributes:
        staging: The staging.
        host_blocks: Blocks of the host's pool to bring, int64.
        new_rows: Rows of K and V of new tokens in the staging buffer, int64.
        host_rows: Their rows in the host's pool, int64.
        dirty: Staging blocks that go to disk, int64.
        writes: Runs of the dirty blocks, which `staged` counts.
    """

    staging: Staging
    host_blocks: Tensor
    new_rows: Tensor
    host_rows: Tensor
    dirty: Tensor
    writes: tuple[Run, ...]


class KVCache:
    """Pools and buffers. Invariant: a staging buffer is touched by one Step at a time, as the schedule has it."""

    def __init__(
        self,
        config: ModelConfig,
        shapes: KVShapes,
        blocks: Mapping[str, int],
        *,
        tiers: Tiers | None = None,
        staging_blocks: int = 0,
        offload_dir: Path | None = None,
        on_device: Sequence[bool] = (),
        window_blocks: Mapping[str, int] | None = None,
    ) -> None:
        """Make the pools and buffers.

        Args:
            config: Configuration of the model.
            shapes: Shapes of the layers' KV.
            blocks: Blocks of each tier's pool.
            tiers: Tiers with their memories; None: host memory alone.
            staging_blocks: Blocks of each staging buffer.
            offload_dir: Directory of the file on disk.
            on_device: For each layer, whether the host's pool lies on the device there; empty: in none.
            window_blocks: Blocks of each tier's pool in layers with a sliding window; None: as many as in the others.

        Raises:
            BatchgenError: Memory or disk do not suffice.
        """
        self.shapes = shapes
        self._shapes = [shapes.by_window[window] for window in config.windows]
        self.disk_bytes_read = self.disk_bytes_written = 0
        # Blocks of a layer in the file follow those of the layers before it.
        self._layer_offsets = dict(zip(config.kv_layers, _starts(self._shapes, config.kv_layers), strict=True))
        self._disk_block_bytes = sum(self._shapes[j].disk_block_bytes for j in config.kv_layers)
        self.on_device = tuple(on_device)
        tiers = tiers or Tiers()
        arenas, self._tiers = tiers.arenas, tiers
        device = arenas[tiers.compute_tier]

        def arena(tier: str, layer: int) -> Arena:
            return device if tier == "cpu" and self.on_device and self.on_device[layer] else arenas[tier]

        def pool(tier: str, layer: int) -> Tensor:
            shape, count = self._shapes[layer], (blocks if config.windows[layer] is None else in_windows)[tier]
            return arena(tier, layer).empty((count, *shape.block), shape.dtype, "the KV pool")

        in_windows = window_blocks or blocks
        self.pools: dict[str, list[Tensor]] = {}  # by layer; empty in state layers
        for tier, count in blocks.items():
            if tier != "disk" and count and in_windows[tier]:
                made = {j: pool(tier, j) for j in config.kv_layers}
                sources = (None if config.has_state(j) else config.kv_source(j) for j in range(config.num_layers))
                self.pools[tier] = [torch.empty(0) if j is None else made[j] for j in sources]
        self._file: DirectFile | None = None
        self._prefault: Prefault | None = None
        self._num_disk_blocks = blocks.get("disk", 0)
        self._staging: list[Tensor] = []
        self._reads: list[Tensor] = []
        self._writes: list[Tensor] = []
        # Beside each link, (to, from): for rows that do not lie as they are copied. None: all do.
        self._passing: list[Tensor | None] = [None, None]
        if staging_blocks:
            # Where the host computes and blocks have a size for direct I/O, the disk's buffers are the staging buffers.
            direct = tiers.links is None and not shapes.is_padded_on_disk
            raw = (staging_blocks * shapes.largest_block_bytes,)
            self._staging += [device.empty(raw, torch.uint8, "KV in transit") for _ in range(KV_SLOTS)]
            if self._num_disk_blocks and not direct:
                raw = (staging_blocks * shapes.largest_disk_block_bytes,)
                for buffers in (self._reads, self._writes):
                    buffers += [arenas["cpu"].empty(raw, torch.uint8, "KV in transit") for _ in range(KV_SLOTS)]
            if self._num_disk_blocks and direct:
                self._reads = self._writes = self._staging
            if tiers.links is not None:
                size = passing_bytes(shapes.largest_disk_block_bytes, staging_blocks)
                padded = self._num_disk_blocks and shapes.is_padded_on_disk
                for way in (0, 1) if padded else (1,):
                    self._passing[way] = device.empty((size,), torch.uint8, "KV in transit")
        if self._num_disk_blocks:
            assert offload_dir is not None, "KV on disk needs a directory"
            self._file = self._make_file(offload_dir)

    @property
    def disk_bytes(self) -> int:
        """Bytes of the file."""
        return self._num_disk_blocks * self._disk_block_bytes

    def prepare(self, staging: Staging, window: int | None = None, device: torch.device = ops.CPU) -> Moves:
        """The moves of a staging, with indices on the device that copies rows which are not neighbours.

        Args:
            staging: The staging.
            window: Sliding window of the layers whose KV moves; None: layers without one.
            device: The device.
        """
        shape = self.shapes.by_window[window]
        behind = shape.kv_heads * shape.kv_block_size  # V's rows lie this far behind K's

        def rows(slots) -> Tensor:
            keys = ops.kv_rows(slots, shape.kv_heads, shape.kv_block_size)
            return upload(torch.cat((keys, keys + behind)).numpy(), device)

        dirty: list[int] = []
        writes: list[Run] = []
        for run in staging.writes:
            writes.append(Run(run.block, len(dirty), run.count))
            dirty += range(run.staged, run.staged + run.count)
        return Moves(
            staging,
            upload(staging.host_blocks, device),
            rows(staging.new_slots),
            rows(staging.host_slots),
            upload(np.array(dirty, dtype=np.int64), device),
            tuple(writes),
        )

    def staging(self, layer: int, slot: int) -> Tensor:
        """A staging buffer as KV of a layer."""
        shape = self._shapes[layer]
        raw = self._staging[slot]
        count = len(raw) // shape.block_bytes
        return raw[: count * shape.block_bytes].view(shape.dtype).view(count, *shape.block)

    def read(self, layer: int, slot: int, moves: Moves) -> None:
        """Read KV of earlier sweeps from disk into host memory. Raises BatchgenError."""
        staging, raw = moves.staging, self._raw(self._reads, layer, slot)
        first = 0 if self._in_place else staging.disk_start
        self._transfer("read", layer, raw, staging.reads, first)
        if self._tiers.links is None and not self._in_place:
            self._unpad(self.staging(layer, slot)[staging.disk_start : staging.disk_stop], raw)

    def load(self, layer: int, slot: int, moves: Moves) -> None:
        """Copy KV of earlier sweeps from host memory to the accelerator."""
        staging, target, h2d = moves.staging, self.staging(layer, slot), self._tiers.h2d
        if len(moves.host_blocks):
            h2d.gather(target[: len(moves.host_blocks)], self.pools["cpu"][layer], moves.host_blocks)
        if staging.reads:
            part = target[staging.disk_start : staging.disk_stop]
            raw = self._raw(self._reads, layer, slot)[: len(part), : self._shapes[layer].block_bytes]
            self._copy_blocks(h2d, part.view(torch.uint8).view(len(part), -1), raw, self._passing[0])

    def store(self, layer: int, slot: int, moves: Moves) -> None:
        """Copy new KV from the accelerator to host memory, for good or on its way to disk."""
        source, d2h, shape = self.staging(layer, slot), self._tiers.d2h, self._shapes[layer]
        assert self._passing[1] is not None, "there is no staging buffer"
        gathered, padded = self._passing[1].chunk(2)
        if len(moves.new_rows):
            flat = source.view(-1, shape.width)
            pool = self.pools["cpu"][layer].view(-1, shape.width)
            d2h.borrow(moves.new_rows)
            # Kernels are compiled for indices at multiples of 16 bytes.
            count = len(gathered) // flat[0].nbytes // 2 * 2
            for rows, host_rows in zip(moves.new_rows.split(count), moves.host_rows.split(count), strict=True):
                d2h.scatter(pool, host_rows, _gathered(flat, rows, gathered))
        if len(moves.dirty):
            d2h.borrow(moves.dirty)
            blocks = source.view(torch.uint8).view(len(source), -1)
            count = len(gathered) // shape.disk_block_bytes
            raw = self._raw(self._writes, layer, slot)[: len(moves.dirty), : shape.block_bytes]
            for target, dirty in zip(raw.split(count), moves.dirty.split(count), strict=True):
                self._copy_blocks(d2h, target, _gathered(blocks, dirty, gathered), padded)

    def write(self, layer: int, slot: int, moves: Moves) -> None:
        """Write new KV to disk, in whole blocks. Raises BatchgenError."""
        raw = self._raw(self._writes, layer, slot)
        if self._in_place:
            self._transfer("write", layer, raw, moves.staging.writes)
            return
        if self._tiers.links is None:
            blocks = self.staging(layer, slot).flatten(1).view(torch.uint8)
            raw[: len(moves.dirty), : blocks.shape[1]] = blocks.index_select(0, moves.dirty)
        self._transfer("write", layer, raw, moves.writes)

    def prefault(self, most_bytes: int) -> None:
        """Begin to have pages provided for the pool that attention reads in place. most_bytes: bytes of all layers."""
        if pool := self.pools.get(self._tiers.compute_tier):
            self._prefault = Prefault([pool[j] for j in self._layer_offsets], most_bytes)

    def reset_counts(self) -> None:
        self.disk_bytes_read = self.disk_bytes_written = 0

    def close(self) -> None:
        """Close the file, and let go of all memory. Counts stay."""
        if self._prefault:
            self._prefault.close()
        if self._file:
            self._file.close()
        for held in (*self.pools.values(), self._staging, self._reads, self._writes):
            held.clear()
        self._prefault, self._passing = None, [None, None]

    @property
    def _in_place(self) -> bool:
        """Tell whether the disk's buffers are the staging buffers."""
        return bool(self._reads) and self._reads is self._writes

    def _raw(self, buffers: list[Tensor], layer: int, slot: int) -> Tensor:
        """A buffer of the disk's as blocks of a layer in the file, uint8 [blocks, bytes of a block]."""
        stride = self._shapes[layer].disk_block_bytes
        count = len(buffers[slot]) // stride
        return buffers[slot][: count * stride].view(count, stride)

    def _copy_blocks(self, link: Link, target: Tensor, source: Tensor, passing: Tensor | None) -> None:
        """Copy between a staging buffer's blocks and the disk's buffers, rows of which may have padding behind them."""
        if target.is_contiguous() and source.is_contiguous():
            link.copy(target, source)
        else:
            assert passing is not None, "padded blocks need a buffer to pass through"
            link.copy_rows(target, source, passing)

    def _unpad(self, target: Tensor, raw: Tensor) -> None:
        blocks = target.flatten(1).view(torch.uint8)
        blocks.copy_(raw[: len(blocks), : blocks.shape[1]])

    def _transfer(self, verb: str, layer: int, raw: Tensor, runs: Sequence[Run], first: int = 0) -> None:
        """Read or write runs of blocks of a layer.

        Args:
            verb: "read" or "write".
            layer: The layer.
            raw: Buffer in host memory, uint8 [blocks, bytes].
            runs: Runs of blocks.
            first: Block of their `staged` numbers that the buffer begins with.
        """
        stride = self._shapes[layer].disk_block_bytes
        start, buffer = self._layer_offsets[layer] * self._num_disk_blocks, as_buffer(raw)
        extents = [
            (start + run.block * stride, buffer[(run.staged - first) * stride :][: run.count * stride]) for run in runs
        ]
        assert self._file is not None, "there is no KV on disk"
        try:
            if verb == "read":
                self.disk_bytes_read += self._file.read(extents)
            else:
                self.disk_bytes_written += self._file.write(extents)
        except OSError as error:
            raise BatchgenError(
                f"cannot {verb} KV at {self._file.path}: {error.strerror}: check the disk of --offload-dir; the"
                " same command goes on from here"
            ) from error

    def _make_file(self, offload_dir: Path) -> DirectFile:
        """Make a file without a name: nothing of it is left however the process ends."""
        try:
            return DirectFile(offload_dir, size_bytes=self.disk_bytes)
        except OSError as error:
            raise BatchgenError(
                f"--offload-dir {offload_dir} does not take {format_bytes(self.disk_bytes)} of KV: {error.strerror};"
                " free space, name another, or give less --disk-memory"
            ) from error


def _starts(shapes: Sequence[KVShape], layers: Sequence[int]) -> list[int]:
    """Bytes that one block of each layer before it takes in the file, for each layer."""
    ends = list(accumulate(shapes[j].disk_block_bytes for j in layers))
    return [0, *ends][: len(layers)]


def _gathered(source: Tensor, index: Tensor, memory: Tensor) -> Tensor:
    """source[index[i]], along the first of two dimensions, in uint8 memory that is there."""
    width = source.shape[1]
    found = memory[: len(index) * width * source.element_size()].view(source.dtype).view(len(index), width)
    return torch.index_select(source, 0, index, out=found)
