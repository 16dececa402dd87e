"""The launch of kernels: block shapes by data type and card, and a launch as data, so that it can be compiled ahead."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch

# Shared memory that one block may use, in bytes, by compute capability (CUDA C++ Programming Guide, table of technical
# specifications): for compiling ahead, and where torch does not tell it.
SHARED_MEMORY = {
    75: 64 << 10, 80: 163 << 10, 86: 99 << 10, 87: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10,
    120: 99 << 10,
}  # fmt: skip
_LEAST_SHARED_MEMORY = min(SHARED_MEMORY.values())
# Triton makes no use of tensor cores before 8.0 (since 3.3): a matrix product there is spilled registers and a
# hundredth of the speed, and cuBLAS does it. What is older than 7.5 it is not built for.
_LEAST_CAPABILITY, _PRODUCTS_CAPABILITY = 75, 80
# Streaming multiprocessors that plans are cut for where there is no card: those of an H100 or H200.
_DEFAULT_SMS = 132


class Launch(NamedTuple):
    """One call of a kernel."""

    kernel: Any
    grid: tuple[int, ...]
    args: dict[str, Any]  # tensors and numbers
    constants: dict[str, Any]  # compiled in
    warps: int = 4
    stages: int = 1

    def __call__(self) -> None:
        if 0 not in self.grid:
            self.kernel[self.grid](**self.args, **self.constants, num_warps=self.warps, num_stages=self.stages)


@dataclass(frozen=True)
class Tile:
    """The tile of an attention program: `rows` of queries (tokens x heads of a KV head) and `keys`."""

    rows: int
    keys: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Card:
    """Properties of a card that launches depend on.

    Attributes:
        capability: Compute capability, major * 10 + minor.
        num_sms: Streaming multiprocessors.
        shared_memory: Bytes that one block may use.
    """

    capability: int
    num_sms: int
    shared_memory: int

    @property
    def has_kernels(self) -> bool:
        return self.capability >= _LEAST_CAPABILITY

    @property
    def has_products(self) -> bool:
        """True where matmul kernels are worth their launch."""
        return self.capability >= _PRODUCTS_CAPABILITY


@lru_cache
def card(device: torch.device) -> Card:
    """The card of a device. On the CPU, under Triton's interpreter: an H200's."""
    if device.type != "cuda":
        return Card(90, _DEFAULT_SMS, SHARED_MEMORY[90])
    found = torch.cuda.get_device_properties(device)
    capability = 10 * found.major + found.minor
    told = getattr(found, "shared_memory_per_block_optin", None)  # not in every torch
    shared_memory = told or SHARED_MEMORY.get(capability, _LEAST_SHARED_MEMORY)
    return Card(capability, found.multi_processor_count, shared_memory)


def power_of_two(n: int, least: int = 1) -> int:
    """The smallest power of two that is at least n and `least`."""
    return max(least, 1 << max(0, n - 1).bit_length())


@lru_cache
def attention_tiles(group: int, head_dim: int, dtype: torch.dtype, bits: int, shared_memory: int) -> tuple[Tile, Tile]:
    """The tiles of programs with few rows (decode) and with many (prefill, shared prefixes).

    Decode is bound by memory: a tile of 16 rows, and stages enough to keep loads under way. Prefill is bound by
    products: as many rows as registers hold.

    Args:
        group: Query heads of a KV head.
        head_dim: Numbers of a head.
        dtype: Dtype of queries, and of KV that is not packed.
        bits: Bits of a quantized value of packed KV; 0: KV is numbers.
        shared_memory: Bytes that a block may take.
    """
    dim = power_of_two(head_dim, 16)
    wide = dim > 128
    few_rows = power_of_two(group, 16)
    if dtype == torch.float32:  # products without tensor cores, whose operands take many registers
        few = Tile(few_rows, 16 if wide else 32, 4 if dim <= 64 else 8, 2)
        many = Tile(max(few_rows, 16 if wide else 32), 16 if dim > 64 else 32, 8, 2)
    else:
        few = Tile(few_rows, 32 if wide else 64, 4, 5)
        stages = 3 if bits else 5
        many = Tile(max(few_rows, 64), 32, 4, 3) if wide else Tile(max(few_rows, 128), 64, 8, stages)

    def fitting(tile: Tile) -> Tile:
        # Q and softmax weights once; K and V in as many buffers as stages, less the two that fetch blocks' numbers.
        left = shared_memory - tile.rows * (dim + tile.keys) * dtype.itemsize
        buffers = left // (2 * tile.keys * dim * dtype.itemsize)
        if buffers < 1 and tile.keys > 16:
            return fitting(replace(tile, keys=tile.keys // 2))
        if buffers < 1 and tile.rows > few_rows:
            return fitting(replace(tile, rows=tile.rows // 2))
        return replace(tile, stages=max(2, min(tile.stages, 2 + buffers)))

    return fitting(few), fitting(many)
