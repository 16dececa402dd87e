"""The launch of a Triton kernel as data, and the tiles of attention by dtype and GPU.

A launch as data can also be compiled ahead (`compile_ahead.py`).
"""

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
_LEAST_KEYS = 16  # of a tile of attention
_LEAST_SHARED_MEMORY = min(SHARED_MEMORY.values())
# Triton makes no use of tensor cores before 8.0 (since 3.3): a matrix product there is spilled registers and a
# hundredth of the speed, and cuBLAS does it. What is older than 7.5 it is not built for.
_LEAST_CAPABILITY, _PRODUCTS_CAPABILITY = 75, 80
# Streaming multiprocessors that plans are cut for where there is no card: those of an H100 or H200.
_DEFAULT_SMS = 132


class Launch(NamedTuple):
    """One launch of a Triton kernel.

    Attributes:
        kernel: The kernel.
        grid: Number of programs in each dimension.
        args: Tensors and numbers by the name of their argument.
        constants: Compile-time constants by the name of their argument.
        warps: Number of warps of a program.
        stages: Number of stages of Triton's pipeline.
    """

    kernel: Any
    grid: tuple[int, ...]
    args: dict[str, Any]  # tensors and numbers
    constants: dict[str, Any]  # compiled in
    warps: int = 4
    stages: int = 1

    def __call__(self) -> None:
        if 0 in self.grid:
            return
        args, constants = self.args, self.constants
        # Not the kernel itself, whose hash Triton looks up behind a lock.
        kernel, numbers = id(self.kernel), tuple(constants.values())
        variant = kernel, self.warps, self.stages, numbers, *map(_specialization, args.values())
        if (direct := _compiled.get(variant)) is not None:
            compiled, names, _ = direct
            values = args | constants
            compiled[(*self.grid, 1, 1)[:3]](*[values[name] for name in names])
            return
        compiled = self.kernel[self.grid](**args, **constants, num_warps=self.warps, num_stages=self.stages)
        if compiled is not None:  # the interpreter compiles nothing
            _compiled[variant] = compiled, tuple(self.kernel.arg_names), self.kernel


# Compiled kernels, with the names of their arguments in order, and the kernels whose `id` is in the key. Triton looks
# for them anew in every launch.
_compiled: dict[tuple[Any, ...], tuple[Any, tuple[str, ...], Any]] = {}


def _specialization(value: Any) -> tuple[Any, ...]:
    """The properties of an argument that Triton may compile a kernel for, or finer ones.

    These are a tensor's dtype and alignment, a number's width and divisibility.
    """
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if value is None or isinstance(value, bool | float):
        return (type(value),)
    return type(value), value == 1, value % 16 == 0, int(value).bit_length() > 31


@dataclass(frozen=True)
class Tile:
    """The tile that one program of attention computes at a time.

    Attributes:
        rows: Number of pairs of a token and a query head of one KV head.
        keys: Number of keys.
        warps: Number of warps of a program.
        stages: Number of stages of Triton's pipeline.
    """

    rows: int
    keys: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Card:
    """The properties of a GPU that launches depend on.

    Attributes:
        capability: Compute capability, major * 10 + minor.
        num_sms: Number of streaming multiprocessors.
        shared_memory: Shared memory that one block may use, in bytes.
    """

    capability: int
    num_sms: int
    shared_memory: int

    @property
    def has_kernels(self) -> bool:
        return self.capability >= _LEAST_CAPABILITY

    @property
    def has_products(self) -> bool:
        """True if the Triton kernels for matrix products are fast enough on this GPU."""
        return self.capability >= _PRODUCTS_CAPABILITY


@lru_cache
def card(device: torch.device) -> Card:
    """The properties of a device's GPU. For the CPU (Triton's interpreter), those of an H200."""
    if device.type != "cuda":
        return Card(90, _DEFAULT_SMS, SHARED_MEMORY[90])
    found = torch.cuda.get_device_properties(device)
    capability = 10 * found.major + found.minor
    told = getattr(found, "shared_memory_per_block_optin", None)  # not in every torch
    shared_memory = told or SHARED_MEMORY.get(capability, _LEAST_SHARED_MEMORY)
    return Card(capability, found.multi_processor_count, shared_memory)


def power_of_two(n: int, least: int = 1) -> int:
    """The smallest power of two that is at least n and at least `least`."""
    return max(least, 1 << max(0, n - 1).bit_length())


def warps_of(values: int) -> int:
    """Warps of a program that keeps so many values in registers: about 16 values a thread."""
    return min(16, max(4, values // 512))


def fits_attention(group: int, head_dim: int, shared_memory: int) -> bool:
    """Tell whether the smallest tile of attention fits the shared memory of a GPU, in any dtype of queries and KV."""
    dim, keys = power_of_two(head_dim, 16), _LEAST_KEYS
    return (power_of_two(group, 16) * (dim + keys) + 2 * keys * dim) * torch.float32.itemsize <= shared_memory


@lru_cache
def attention_tiles(group: int, head_dim: int, dtype: torch.dtype, bits: int, shared_memory: int) -> tuple[Tile, Tile]:
    """The tiles of attention programs: for items with few rows (decode) and with many (prefill, shared prefixes).

    The time of decode is that of reading KV: a tile has 16 rows, and enough stages to load ahead. The time of prefill
    is that of products: a tile has as many rows as fit into registers.

    Args:
        group: Number of query heads that share a KV head.
        head_dim: Number of values in one head.
        dtype: Dtype of queries, and of KV that is stored as numbers.
        bits: Bits of each quantized value of packed KV. 0: KV is stored as numbers.
        shared_memory: Shared memory that one block may use, in bytes.
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
        many = (
            Tile(max(few_rows, 64), 32, 8 if dim > 256 else 4, 3) if wide else Tile(max(few_rows, 128), 64, 8, stages)
        )

    def fitting(tile: Tile) -> Tile:
        # Q and softmax weights once; K and V in as many buffers as stages, less the two that fetch blocks' numbers.
        left = shared_memory - tile.rows * (dim + tile.keys) * dtype.itemsize
        buffers = left // (2 * tile.keys * dim * dtype.itemsize)
        if buffers < 1 and tile.keys > _LEAST_KEYS:
            return fitting(replace(tile, keys=tile.keys // 2))
        if buffers < 1 and tile.rows > few_rows:
            return fitting(replace(tile, rows=tile.rows // 2))
        return replace(tile, stages=max(2, min(tile.stages, 2 + buffers)))

    return fitting(few), fitting(many)
