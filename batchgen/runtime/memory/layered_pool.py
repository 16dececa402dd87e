"""The host's KV pool where some layers lie on the device: cut anew as their number changes (Pie section 4.1).

The device's layers are parts of one allocation, one behind the other, each as long as the pool has blocks; staging
buffers are behind them. Where no layer streams, the layers have that memory too. Each layer that may stream has its
place in host memory for good.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from batchgen.core.kv_expansion import KVExpansion, Recut
from batchgen.runtime.memory.tiers import Tiers
from batchgen.runtime.memory.transfers import Arena

# Shape and dtype of a block.
Block = tuple[tuple[int, ...], torch.dtype]


class LayeredPool:
    """The tensors of a pool whose layers lie in two memories.

    Attributes:
        tensors: Blocks of each layer with KV of its own, [blocks, *shape of a block].
    """

    def __init__(self, expansion: KVExpansion, blocks: Mapping[int, Block], device: Arena, host: Arena) -> None:
        """Allocate the pool.

        Args:
            expansion: Division of the layers to begin with.
            blocks: Shape and dtype of a block, by layer.
            device: The device's memory.
            host: The host's memory.

        Raises:
            BatchgenError: Memory does not suffice.
        """
        self._blocks = blocks
        size = expansion.device_bytes + expansion.staging_bytes
        self._memory = device.empty((size,), torch.uint8, "the KV pool")
        self._num_staging_bytes = expansion.staging_bytes
        self._on_host = {
            layer: host.empty((expansion.most_blocks, *blocks[layer][0]), blocks[layer][1], "the KV pool")
            for layer in expansion.order[expansion.least_on_device :]
        }
        self.tensors = self._cut(expansion)

    def staging_buffers(self, count: int) -> list[Tensor]:
        """The memory of the staging buffers, uint8, in so many equal parts. In use only where a layer streams."""
        return list(self._memory[len(self._memory) - self._num_staging_bytes :].chunk(count))

    def recut(self, recut: Recut, tiers: Tiers) -> dict[int, Tensor]:
        """Cut the pool anew, and move what its blocks hold. Nothing may be under way.

        Args:
            recut: The division before and after.
            tiers: Tiers with the links between them.

        Returns:
            The tensors of the layers from now on.
        """
        before, after, count = self.tensors, self._cut(recut.after), recut.num_blocks
        for blocks in before.values():
            _renumber(blocks, recut.moved)
        for layer in recut.leaving:
            if count:
                tiers.d2h.copy(after[layer][:count], before[layer][:count])
        self._slide(recut, before, after)
        for layer in recut.coming:
            if count:
                tiers.h2d.copy(after[layer][:count], before[layer][:count])
        self.tensors = after
        return after

    def _cut(self, expansion: KVExpansion) -> dict[int, Tensor]:
        """The tensors of a division: those on the device lie where its layers' order and its blocks have them."""
        tensors = {layer: blocks[: expansion.num_blocks] for layer, blocks in self._on_host.items()}
        start = 0
        for layer in expansion.order[: expansion.num_on_device]:
            shape, dtype = self._blocks[layer]
            stop = start + expansion.num_blocks * math.prod(shape) * dtype.itemsize
            tensors[layer] = self._memory[start:stop].view(dtype).view(-1, *shape)
            start = stop
        return tensors

    def _slide(self, recut: Recut, before: Mapping[int, Tensor], after: Mapping[int, Tensor]) -> None:
        """Move layers that stay on the device to their new places, in an order in which none is overwritten."""
        staying = recut.after.order[: min(recut.before.num_on_device, recut.after.num_on_device)]
        downwards = recut.after.num_blocks < recut.before.num_blocks
        for layer in staying if downwards else reversed(staying):
            source, target = (tensors[layer][: recut.num_blocks].view(torch.uint8) for tensors in (before, after))
            _move(target.view(-1), source.view(-1))


def _renumber(blocks: Tensor, moved: Mapping[int, int]) -> None:
    """Give blocks that hold something other places, which hold nothing."""
    for first, target, count in _runs(moved):
        blocks[target : target + count].copy_(blocks[first : first + count])


def _runs(moved: Mapping[int, int]) -> list[tuple[int, int, int]]:
    """(first block, its new place, number) of neighbouring blocks that stay neighbours."""
    runs: list[tuple[int, int, int]] = []
    for old, new in sorted(moved.items()):
        if runs and (old, new) == (runs[-1][0] + runs[-1][2], runs[-1][1] + runs[-1][2]):
            runs[-1] = (*runs[-1][:2], runs[-1][2] + 1)
        else:
            runs.append((old, new, 1))
    return runs


def _move(target: Tensor, source: Tensor) -> None:
    """target[...] = source, parts of one allocation that may overlap, piece by piece so that no piece does.

    Args:
        target: Bytes to fill.
        source: Bytes to move, as many.
    """
    distance = target.data_ptr() - source.data_ptr()
    if not distance or not len(source):
        return
    step = abs(distance)
    starts = range(0, len(source), step)
    for start in starts if distance < 0 else reversed(starts):
        target[start : start + step].copy_(source[start : start + step])
