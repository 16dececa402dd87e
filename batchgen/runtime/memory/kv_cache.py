"""The KV tensors behind the block managers' numbers: a pool in each tier, and what passes between them.

KV of a layer is [blocks, 2, kv_heads, kv_block_size, width] (see `ops`). A pool in the compute device's memory is
attended to in place. Sequences that live elsewhere pass through staging buffers of the compute device, but in layers in
which the host's pool lies on the device (`on_device`); those on disk through buffers in host memory too, in a file in
which each block starts on a direct-I/O boundary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from batchgen.core.direct_io import aligned
from batchgen.core.dtypes import KVFormat
from batchgen.core.kv_expansion import KVExpansion, Recut
from batchgen.core.plan import passing_bytes
from batchgen.models.config import ModelConfig
from batchgen.ops import dispatch as ops
from batchgen.ops.host_copy import upload
from batchgen.runtime.memory.disk_pool import DiskPool
from batchgen.runtime.memory.layered_pool import LayeredPool
from batchgen.runtime.memory.tiers import Tiers
from batchgen.runtime.memory.transfers import Arena, Link, Prefault
from batchgen.schedule.staging import Run, Staging, merged_runs
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
    def summary(self) -> tuple[int, ...]:
        """The shape of the summary of a block's keys: of each channel the smallest and the largest number."""
        return (self.kv_heads, 2, self.head_dim)

    @property
    def summary_dtype(self) -> torch.dtype:
        return getattr(torch, self.format.summary_format)

    @property
    def disk_block_bytes(self) -> int:
        """Bytes of one block in the file."""
        return aligned(self.block_bytes)


def kv_shapes(config: ModelConfig, kv_block_size: int, kv_format: str) -> dict[int, KVShape]:
    """The shapes of KV blocks of a model, by layer that has keys and values of its own.

    Args:
        config: Configuration of the model.
        kv_block_size: Tokens of a block.
        kv_format: Name of a `KVFormat`.
    """
    attention = {layer: config.attention_of(layer) for layer in config.kv_layers}
    return {
        layer: KVShape(shape.num_kv_heads, kv_block_size, shape.head_dim, KVFormat.of(kv_format))
        for layer, shape in attention.items()
    }


@dataclass(frozen=True)
class Moves:
    """The indices of a `Staging` as tensors, made once per sweep and used by every layer.

    Attributes:
        staging: The staging.
        host_blocks: Blocks of the host's pool to bring, int64.
        all_host_blocks: Blocks to bring in layers that reuse KV, int64; empty where no layer does.
        new_rows: Rows of K and V of new tokens in the staging buffer, int64.
        host_rows: Their rows in the host's pool, int64.
        dirty: Staging blocks that go to disk, int64.
        writes: Runs of the dirty blocks, which `staged` counts.
    """

    staging: Staging
    host_blocks: Tensor
    all_host_blocks: Tensor
    new_rows: Tensor
    host_rows: Tensor
    dirty: Tensor
    writes: tuple[Run, ...]


class KVCache:
    """Pools and buffers. Invariant: a staging buffer is touched by one Step at a time, as the schedule has it.

    Attributes:
        kv_block_size: Tokens of a block.
        format: Format of K and V.
        pools: Blocks in each tier but the disk, by layer that has KV of its own.
        on_device: For each layer, whether the host's pool lies on the device there; empty: in none. A `recut` changes
            it.
    """

    def __init__(
        self,
        config: ModelConfig,
        kv_block_size: int,
        kv_format: str,
        blocks: Mapping[str, int],
        *,
        tiers: Tiers | None = None,
        staging_blocks: int = 0,
        offload_dir: Path | None = None,
        on_device: Sequence[bool] = (),
        window_blocks: Mapping[str, int] | None = None,
        summaries_in: str | None = None,
        expansion: KVExpansion | None = None,
    ) -> None:
        """Make the pools and buffers.

        Args:
            config: Configuration of the model.
            kv_block_size: Tokens of a block.
            kv_format: Name of a `KVFormat`.
            blocks: Blocks of each tier's pool.
            tiers: Tiers with their memories; None: host memory alone.
            staging_blocks: Blocks of each staging buffer.
            offload_dir: Directory of the file on disk.
            on_device: For each layer, whether the host's pool lies on the device there; empty: in none.
            window_blocks: Blocks of each tier's pool in layers with a sliding window; None: as many as in the others.
            summaries_in: Tier of the summaries of pages that are not in the compute device's own memory; None: no layer
                chooses pages.
            expansion: Division of the layers of the host's pool, which may be changed; None: it stays as it is.

        Raises:
            BatchgenError: Memory or disk do not suffice.
        """
        self.kv_block_size, self.format = kv_block_size, KVFormat.of(kv_format)
        self._config, self._shapes = config, kv_shapes(config, kv_block_size, kv_format)
        self.on_device = tuple(on_device)
        tiers = tiers or Tiers()
        arenas, self._tiers = tiers.arenas, tiers
        device = arenas[tiers.compute_tier]

        def arena(tier: str, layer: int) -> Arena:
            return device if tier == "cpu" and self.on_device and self.on_device[layer] else arenas[tier]

        def pool(tier: str, layer: int) -> Tensor:
            counts = blocks if config.windows[layer] is None else window_blocks or blocks
            shape = self._shapes[layer]
            return arena(tier, layer).empty((counts[tier], *shape.block), shape.dtype, "the KV pool")

        self._layered: LayeredPool | None = None
        if expansion is not None:
            blocks_of = {layer: (shape.block, shape.dtype) for layer, shape in self._shapes.items()}
            self._layered = LayeredPool(expansion, blocks_of, device, arenas["cpu"])
        self.pools: dict[str, dict[int, Tensor]] = {
            tier: self._layered.tensors
            if self._layered and tier == "cpu"
            else {layer: pool(tier, layer) for layer in self._shapes}
            for tier, count in blocks.items()
            if tier != "disk" and (window_blocks or blocks)[tier] and count
        }
        self._summaries: dict[str, dict[int, Tensor]] = {}
        if summaries_in is not None:
            self._make_summaries(blocks, summaries_in)
        self._disk: DiskPool | None = None
        self._prefault: Prefault | None = None
        # Buffers of bytes, in which each layer has blocks of its own shape.
        self._staging_blocks = staging_blocks
        self._staging: list[Tensor] = []
        self._reads: list[Tensor] = []
        self._writes: list[Tensor] = []
        # Beside each link, (to, from): for rows that do not lie as they are copied. None: all do.
        self._passing: list[Tensor | None] = [None, None]
        has_disk = bool(blocks.get("disk") and self._shapes)
        if staging_blocks and self._shapes:
            self._make_buffers(device, arenas["cpu"], has_disk)
        if has_disk:
            assert offload_dir is not None, "KV on disk needs a directory"
            block_bytes = {layer: shape.block_bytes for layer, shape in self._shapes.items()}
            self._disk = DiskPool(block_bytes, blocks["disk"], offload_dir, "KV")

    def _make_summaries(self, blocks: Mapping[str, int], summaries_in: str) -> None:
        """Allocate the summaries of pages: of the device's own pool, and of the host's pool and those on disk."""
        here = blocks.get(self._tiers.compute_tier, 0) if self._tiers.links else 0
        elsewhere = blocks.get("cpu", 0) + blocks.get("disk", 0)
        for pool, tier, count in (("gpu", "gpu", here), ("cpu", summaries_in, elsewhere)):
            self._summaries[pool] = {
                layer: self._tiers.arenas[tier].empty((count, *s.summary), s.summary_dtype, "page summaries")
                for layer, s in self._shapes.items()
                if count and self._config.chooses_pages(layer)
            }

    def _make_buffers(self, device: Arena, host: Arena, has_disk: bool) -> None:
        shapes, count = self._shapes.values(), self._staging_blocks
        most, most_on_disk = max(s.block_bytes for s in shapes), max(s.disk_block_bytes for s in shapes)
        padded = any(s.block_bytes != s.disk_block_bytes for s in shapes)
        # Where the host computes and blocks have a size for direct I/O, the disk's buffers are the staging buffers.
        direct = self._tiers.links is None and not padded
        if self._layered:
            self._staging = self._layered.staging_buffers(KV_SLOTS)
        else:
            self._staging = [device.empty((count * most,), torch.uint8, "KV in transit") for _ in range(KV_SLOTS)]
        if has_disk and not direct:
            raw = (count * most_on_disk,)
            for buffers in (self._reads, self._writes):
                buffers += [host.empty(raw, torch.uint8, "KV in transit") for _ in range(KV_SLOTS)]
        if has_disk and direct:
            self._reads = self._writes = self._staging
        if self._tiers.links is not None:
            size = passing_bytes(most_on_disk, count)
            for way in (0, 1) if has_disk and padded else (1,):
                self._passing[way] = device.empty((size,), torch.uint8, "KV in transit")

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

    def pool(self, tier: str, layer: int) -> Tensor:
        """The pool that a layer attends to, [blocks, 2, kv_heads, kv_block_size, width]: its own, or another one's."""
        return self.pools[tier][self._config.kv_source(layer)]

    def shape_of(self, layer: int) -> KVShape:
        """The shape of the blocks that a layer attends to."""
        return self._shapes[self._config.kv_source(layer)]

    def shape_in(self, window: int | None) -> KVShape:
        """The shape of blocks in layers with a sliding window, or in those without (None or CHOSEN_PAGES)."""
        window = window or None
        return next(shape for layer, shape in self._shapes.items() if self._config.windows[layer] == window)

    def summaries(self, tier: str, layer: int) -> Tensor:
        """The summaries of pages that a layer chooses from, [blocks, kv_heads, 2, head_dim] (`ops.page_choice`).

        Those of "cpu" are of the blocks of the host's pool, and then of those on disk, wherever they lie themselves.
        """
        return self._summaries[tier][self._config.kv_source(layer)]

    def prepare(self, staging: Staging, window: int | None = None, device: torch.device = ops.CPU) -> Moves:
        """The moves of a staging, with indices on the device that copies rows which are not neighbours.

        Args:
            staging: The staging.
            window: Sliding window of the layers that it is for.
            device: The device.
        """
        shape = self.shape_in(window)
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
            upload(staging.all_host_blocks[: None if self._config.shared_kv_layers else 0], device),
            rows(staging.new_slots),
            rows(staging.host_slots),
            upload(np.array(dirty, dtype=np.int64), device),
            tuple(writes),
        )

    def chosen_on_host(self, layer: int, moves: Moves, table: Tensor) -> Tensor:
        """Blocks of the host's pool to bring in a layer whose pages have been chosen, int64.

        Args:
            layer: The layer.
            moves: Moves of layers that choose pages.
            table: Chosen blocks, int64 [n, pages].
        """
        blocks = self._host_blocks(layer, moves)
        return torch.where(blocks < 0, table.view(-1)[(-1 - blocks).clamp(min=0)], blocks) if len(blocks) else blocks

    def reads_chosen(self, layer: int, moves: Moves) -> bool:
        """Tell whether any chosen blocks are to be read from disk in a layer."""
        return len(self._page_reads(layer, moves)) > 0

    def staging(self, slot: int, layer: int) -> Tensor:
        """A staging buffer as blocks of a layer, [blocks, 2, kv_heads, kv_block_size, width]."""
        shape, count = self.shape_of(layer), self._staging_blocks
        return self._staging[slot][: count * shape.block_bytes].view(shape.dtype).view(count, *shape.block)

    def read(self, layer: int, slot: int, moves: Moves, table: Tensor | None = None) -> None:
        """Read KV of earlier sweeps from disk into host memory.

        Args:
            layer: The layer.
            slot: Staging buffer.
            moves: Moves of the layer.
            table: Chosen blocks in host memory, int64 [n, pages]; None: none are on disk.

        Raises:
            BatchgenError: The disk fails.
        """
        staging, raw = moves.staging, self._raw(self._reads[slot], layer)
        first = 0 if self._in_place else staging.disk_start
        runs = [*self._reads_of(layer, moves), *self._chosen_reads(layer, moves, table)]
        self._on_disk.read(self._config.kv_source(layer), raw, runs, first)
        if self._tiers.links is None and not self._in_place:
            target = self.staging(slot, layer)[staging.disk_start : staging.disk_stop]
            target.view(torch.uint8).view(len(target), -1).copy_(raw[: len(target), : self.shape_of(layer).block_bytes])

    def load(self, layer: int, slot: int, moves: Moves, chosen: Tensor | None = None) -> None:
        """Copy KV of earlier sweeps from host memory to the accelerator.

        Args:
            layer: The layer.
            slot: Staging buffer.
            moves: Moves of the layer.
            chosen: Result of `chosen_on_host`; None: no pages are chosen in the layer.
        """
        staging, target, h2d = moves.staging, self.staging(slot, layer), self._tiers.h2d
        blocks = self._host_blocks(layer, moves) if chosen is None else chosen
        if len(blocks):
            h2d.gather(target[: len(blocks)], self.pool("cpu", layer), blocks)
        if self._reads_of(layer, moves) or self.reads_chosen(layer, moves):
            part = target[staging.disk_start : staging.disk_stop]
            raw = self._raw(self._reads[slot], layer)[: len(part), : self.shape_of(layer).block_bytes]
            self._copy_blocks(h2d, part.view(torch.uint8).view(len(part), -1), raw, self._passing[0])

    def swap_in(self, layer: int, runs: Sequence[Run]) -> None:
        """Copy blocks from the host's pool to the device's, with the summaries of their pages where there are some."""
        for of_tier in self._with_summaries(layer):
            _copy_runs(self._tiers.h2d, of_tier[self._tiers.compute_tier], of_tier["cpu"], runs)

    def swap_out(self, layer: int, runs: Sequence[Run]) -> None:
        """Copy blocks from the device's pool to the host's, with the summaries of their pages where there are some."""
        for of_tier in self._with_summaries(layer):
            _copy_runs(self._tiers.d2h, of_tier["cpu"], of_tier[self._tiers.compute_tier], runs)

    def _with_summaries(self, layer: int) -> Sequence[Mapping[str, Tensor]]:
        """The pools of a layer by tier, and the summaries of their pages where there are some."""
        tiers = ("cpu", self._tiers.compute_tier)
        of_layer = [{tier: self.pool(tier, layer) for tier in tiers}]
        if layer in self._summaries.get("cpu", {}):
            of_layer.append({tier: self.summaries(tier, layer) for tier in tiers})
        return of_layer

    def _reads_of(self, layer: int, moves: Moves) -> Sequence[Run]:
        """Runs of blocks to read in a layer: those of earlier sweeps, and where KV is reused those of this one too."""
        return moves.staging.reads if self._config.owns_kv(layer) else moves.staging.all_reads

    def _host_blocks(self, layer: int, moves: Moves) -> Tensor:
        """Blocks of the host's pool to bring in a layer."""
        return moves.host_blocks if self._config.owns_kv(layer) else moves.all_host_blocks

    def _page_reads(self, layer: int, moves: Moves) -> np.ndarray:
        """(number in the table of chosen blocks, staging block) of the chosen blocks on disk to read in a layer."""
        return moves.staging.page_reads if self._config.owns_kv(layer) else moves.staging.all_page_reads

    def _chosen_reads(self, layer: int, moves: Moves, table: Tensor | None) -> Sequence[Run]:
        """Runs of chosen blocks to read in a layer."""
        places = self._page_reads(layer, moves)
        return () if table is None else merged_runs(table.view(-1).numpy()[places[:, 0]], places[:, 1])

    def store(self, layer: int, slot: int, moves: Moves) -> None:
        """Copy new KV from the accelerator to host memory, for good or on its way to disk."""
        source, d2h, shape = self.staging(slot, layer), self._tiers.d2h, self.shape_of(layer)
        assert self._passing[1] is not None, "there is no staging buffer"
        gathered, padded = self._passing[1].chunk(2)
        if len(moves.new_rows):
            flat = source.view(-1, shape.width)
            pool = self.pool("cpu", layer).view(-1, shape.width)
            d2h.borrow(moves.new_rows)
            # Kernels are compiled for indices at multiples of 16 bytes.
            count = len(gathered) // flat[0].nbytes // 2 * 2
            for rows, host_rows in zip(moves.new_rows.split(count), moves.host_rows.split(count), strict=True):
                d2h.scatter(pool, host_rows, _gathered(flat, rows, gathered))
        if len(moves.dirty):
            d2h.borrow(moves.dirty)
            blocks = source.view(torch.uint8).view(len(source), -1)
            count = len(gathered) // shape.disk_block_bytes
            raw = self._raw(self._writes[slot], layer)[: len(moves.dirty), : shape.block_bytes]
            for target, dirty in zip(raw.split(count), moves.dirty.split(count), strict=True):
                self._copy_blocks(d2h, target, _gathered(blocks, dirty, gathered), padded)

    def write(self, layer: int, slot: int, moves: Moves) -> None:
        """Write new KV to disk, in whole blocks. Raises BatchgenError."""
        raw = self._raw(self._writes[slot], layer)
        if self._in_place:
            self._on_disk.write(layer, raw, moves.staging.writes)
            return
        if self._tiers.links is None:
            source = self.staging(slot, layer)
            blocks = source.view(torch.uint8).view(len(source), -1)
            raw[: len(moves.dirty), : self.shape_of(layer).block_bytes] = blocks.index_select(0, moves.dirty)
        self._on_disk.write(layer, raw, moves.writes)

    def recut(self, recut: Recut) -> None:
        """Cut the host's pool anew between layers on the device and in host memory. Nothing may be under way."""
        assert self._layered is not None, "no layer can be moved"
        self.pools["cpu"] = self._layered.recut(recut, self._tiers)
        self.on_device = recut.after.on_device

    def prefault(self, most_bytes: int) -> None:
        """Begin to have pages provided for the pool that attention reads in place. most_bytes: bytes of all layers."""
        if pool := self.pools.get(self._tiers.compute_tier):
            self._prefault = Prefault(list(pool.values()), most_bytes)

    def reset_counts(self) -> None:
        if self._disk:
            self._disk.reset_counts()

    def close(self) -> None:
        """Close the file, and let go of all memory. Counts stay."""
        if self._prefault:
            self._prefault.close()
        if self._disk:
            self._disk.close()
        for pool in (*self.pools.values(), *self._summaries.values()):
            pool.clear()
        for buffers in (self._staging, self._reads, self._writes):
            buffers.clear()
        self._prefault, self._layered, self._passing = None, None, [None, None]

    @property
    def _in_place(self) -> bool:
        """Tell whether the disk's buffers are the staging buffers."""
        return bool(self._reads) and self._reads is self._staging

    @property
    def _on_disk(self) -> DiskPool:
        assert self._disk is not None, "there is no KV on disk"
        return self._disk

    def _raw(self, buffer: Tensor, layer: int) -> Tensor:
        """A buffer of the disk as blocks of a layer, uint8 [blocks, bytes]."""
        size = self.shape_of(layer).disk_block_bytes
        return buffer[: self._staging_blocks * size].view(self._staging_blocks, size)

    def _copy_blocks(self, link: Link, target: Tensor, source: Tensor, passing: Tensor | None) -> None:
        """Copy between a staging buffer's blocks and the disk's buffers, [blocks, bytes] each."""
        if target.stride(0) == source.stride(0):
            link.copy(target, source)
        else:
            assert passing is not None, "padded blocks need a buffer to pass through"
            link.copy_rows(target, source, passing)


def _copy_runs(link: Link, target: Tensor, source: Tensor, runs: Sequence[Run]) -> None:
    """Copy runs of blocks from one pool of a layer to another one."""
    for run in runs:
        link.copy(target[run.staged : run.staged + run.count], source[run.block : run.block + run.count])


def _gathered(source: Tensor, index: Tensor, memory: Tensor) -> Tensor:
    """source[index[i]], along the first of two dimensions, in uint8 memory that is there."""
    width = source.shape[1]
    found = memory[: len(index) * width * source.element_size()].view(source.dtype).view(len(index), width)
    return torch.index_select(source, 0, index, out=found)
