"""KV by layer: the layers that keep their KV on the device, and the KV blocks that each number of them leaves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class KVExpansion:
    """The division of a KV pool's layers between device and host, which a running job changes (Pie section 3.4).

    Layers come to the device in a fixed order, and leave it in the opposite one. So the layers that are there depend on
    their number alone, and each keeps its place among them.

    Attributes:
        planned: For each layer of the model, whether the plan keeps what it has of sequences on the device. It stays
            there, and states stay as planned everywhere.
        order: Layers with KV of their own, in the order in which they come to the device; planned ones first.
        block_bytes: Bytes of a KV block in each layer of the model.
        device_bytes: Device memory for the pool, in bytes.
        staging_bytes: Bytes of all staging buffers behind it, which the pool takes over where no layer streams.
        most_blocks: KV blocks that host memory holds of each layer that may stream.
        least_blocks: KV blocks that the longest row needs.
        num_on_device: Layers of `order` that are on the device.
    """

    planned: tuple[bool, ...]
    order: tuple[int, ...]
    block_bytes: tuple[int, ...]
    device_bytes: int
    staging_bytes: int
    most_blocks: int
    least_blocks: int
    num_on_device: int

    @property
    def least_on_device(self) -> int:
        """The layers with KV that the plan keeps on the device."""
        return sum(self.planned[layer] for layer in self.order)

    @property
    def num_streamed(self) -> int:
        """The layers whose KV streams."""
        return len(self.order) - self.num_on_device

    @property
    def on_device(self) -> tuple[bool, ...]:
        """For each layer of the model, True where what it has of sequences is on the device."""
        there = set(self.order[: self.num_on_device])
        return tuple(stays or layer in there for layer, stays in enumerate(self.planned))

    @property
    def num_blocks(self) -> int:
        """KV blocks of the pool."""
        return self.blocks_with(self.num_on_device)

    def blocks_with(self, num_on_device: int) -> int:
        """KV blocks of the pool with so many layers on the device."""
        size = sum(self.block_bytes[layer] for layer in self.order[:num_on_device])
        memory = self.device_bytes + (self.staging_bytes if num_on_device == len(self.order) else 0)
        return min(self.most_blocks, memory // size) if size else self.most_blocks

    @property
    def choices(self) -> list[int]:
        """The numbers of layers that may be on the device, ascending: with each of them the longest row fits."""
        numbers = range(self.least_on_device, len(self.order) + 1)
        return [number for number in numbers if self.blocks_with(number) >= self.least_blocks]

    def streamed_frac(self, num_on_device: int) -> float:
        """The part of a block's bytes that streams with so many layers on the device."""
        whole = sum(self.block_bytes[layer] for layer in self.order)
        return sum(self.block_bytes[layer] for layer in self.order[num_on_device:]) / whole if whole else 0.0


def coming_order(layers: Sequence[int]) -> list[int]:
    """Layers in an order in which any number of the first ones is spread evenly over all.

    Each comes as far as possible from those before it, and of the equally far ones the first.

    Args:
        layers: Numbers of layers, ascending.
    """
    order: list[int] = []
    waiting = list(range(len(layers)))
    while waiting:
        chosen = max(waiting, key=lambda i: (min((abs(i - j) for j in order), default=len(layers)), -i))
        waiting.remove(chosen)
        order.append(chosen)
    return [layers[i] for i in order]


@dataclass(frozen=True)
class Recut:
    """A pool that is cut anew, between sweeps: another number of layers on the device, and of KV blocks.

    Attributes:
        before: Division of the layers before it.
        after: Division of the layers after it.
        moved: New numbers of KV blocks that get another one, by number.
        num_blocks: KV blocks from the first one to the last one that holds something afterwards.
    """

    before: KVExpansion
    after: KVExpansion
    moved: dict[int, int]
    num_blocks: int

    @property
    def coming(self) -> tuple[int, ...]:
        """Layers that come to the device."""
        return self.after.order[self.before.num_on_device : self.after.num_on_device]

    @property
    def leaving(self) -> tuple[int, ...]:
        """Layers that leave the device."""
        return self.after.order[self.after.num_on_device : self.before.num_on_device]

    def bytes_of(self, layers: Sequence[int]) -> int:
        """Bytes of the KV blocks that hold something, in some layers."""
        return self.num_blocks * sum(self.after.block_bytes[layer] for layer in layers)
