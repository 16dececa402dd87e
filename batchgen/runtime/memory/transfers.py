"""Memory with a budget, and links between memories."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from batchgen.core.direct_io import aligned_buffer
from batchgen.core.errors import BatchgenError
from batchgen.core.units import format_bytes
from batchgen.runtime.sleeps import Sleeps

_MADV_POPULATE_WRITE = 23  # linux/mman.h; not in Python's mmap
_PREFAULT_BYTES = 2 << 20  # a huge page


def untouched(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros, page-aligned, whose pages the kernel provides at first use.

    So a generous pool costs nothing until it is needed; torch.zeros would write all of it. Huge pages where there are
    any: a page fault costs ten times as long as copying the 4 KiB it is for.
    """
    return tensor_over(aligned_buffer(math.prod(shape) * dtype.itemsize), shape, dtype)


def tensor_over(memory: mmap.mmap, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor at the start of the memory, which lives as long as the tensor or any view of it."""
    count = math.prod(shape)
    return torch.frombuffer(memory, dtype=dtype, count=count).view(shape) if count else torch.empty(shape, dtype=dtype)


class Prefault:
    """A thread that has the kernel provide the pages of pools of one size while other things happen.

    A virtual machine may have to ask its host for them, which takes longer than what is then written there. The first
    pages of all pools come first.

    Where the kernel cannot do it (before Linux 5.14), pages come at first use, as without this.
    """

    def __init__(self, pools: Sequence[Tensor], most_bytes: int) -> None:
        """Start the thread.

        Args:
            pools: Pools of one size.
            most_bytes: Most bytes to have provided, of all pools together.
        """
        self._ranges = [(pool.data_ptr(), min(pool.nbytes, most_bytes // len(pools))) for pool in pools]
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="batchgen-prefault", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Return when no page is asked for any more: pools may be freed."""
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        madvise = ctypes.CDLL(None, use_errno=True).madvise
        madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        longest = max((size for _, size in self._ranges), default=0)
        for offset in range(0, longest, _PREFAULT_BYTES):
            for start, size in self._ranges:
                first = -(-(start + offset) // mmap.PAGESIZE) * mmap.PAGESIZE
                count = min(start + offset + _PREFAULT_BYTES, start + size) - first
                if self._closed.is_set() or (count > 0 and madvise(first, count, _MADV_POPULATE_WRITE) != 0):
                    return


class Memory(Protocol):
    """The memory that a tier's tensors are in."""

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor: ...

    def keep(self, tensor: Tensor) -> Tensor:
        """The tensor in this memory: itself, if it is there already."""
        ...

    def close(self) -> None: ...


class HostMemory:
    """Pages that are provided at first use."""

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return untouched(shape, dtype)

    def keep(self, tensor: Tensor) -> Tensor:
        return tensor

    def close(self) -> None: ...


class Arena:
    """One tier's memory. Invariant: what is allocated never exceeds the budget."""

    def __init__(self, flag: str, budget_bytes: int | None = None, memory: Memory | None = None) -> None:
        """Start with nothing allocated.

        Args:
            flag: Option that sets the budget, for the error.
            budget_bytes: The budget; None: memory is only counted.
            memory: Memory that tensors are in; None: the host's.
        """
        self.flag, self.budget_bytes = flag, budget_bytes
        self.memory = memory or HostMemory()
        self.allocated_bytes = 0
        self._lock = threading.Lock()

    def take(self, num_bytes: int, what: str) -> None:
        """Count memory that is held from now on. Raises BatchgenError where it does not fit."""
        with self._lock:
            if self.budget_bytes is not None and self.allocated_bytes + num_bytes > self.budget_bytes:
                raise BatchgenError(
                    f"{self.flag} {format_bytes(self.budget_bytes)} does not hold {what}:"
                    f" {format_bytes(self.allocated_bytes)}"
                    f" are allocated, {format_bytes(num_bytes)} more are needed; raise it"
                )
            self.allocated_bytes += num_bytes

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, what: str) -> Tensor:
        """Zeros in the tier's memory, untouched. Raises BatchgenError where they do not fit."""
        self.take(math.prod(shape) * dtype.itemsize, what)
        return self.memory.zeros(shape, dtype)

    def keep(self, tensors: Mapping[str, Tensor], what: str) -> dict[str, Tensor]:
        """The tensors in the tier's memory, held from now on. Raises BatchgenError where they do not fit."""
        self.take(sum(t.nbytes for t in tensors.values()), what)
        return {name: self.memory.keep(t) for name, t in tensors.items()}


class Link:
    """Copies from one memory to another, in the thread that asks for it; throttled where the link is to be slower."""

    def __init__(self, bytes_per_s: float | None = None) -> None:
        self.bytes_per_s = bytes_per_s
        self.moved_bytes = 0
        self._sleeps = Sleeps()

    def copy(self, target: Tensor, source: Tensor) -> Tensor:
        """target[...] = source."""
        with self._throttled(source):
            target.copy_(source)
        return target

    def copy_rows(self, target: Tensor, source: Tensor, passing: Tensor) -> None:
        """target[...] = source, two-dimensional uint8, where the rows of the host's side lie apart.

        What lies between the host's rows may be copied too, in both directions.

        Args:
            target: Rows to fill.
            source: Rows to copy.
            passing: A uint8 buffer of the accelerator for at least one row of the host's side with the gap after it; in
                use until the copy is done.
        """
        self.copy(target, source)

    def bring(self, source: Tensor) -> Tensor:
        """Copy a tensor of the host, which may change at once, for a Step of `compute`."""
        return self.copy(torch.empty_like(source, memory_format=torch.contiguous_format), source)

    def borrow(self, tensor: Tensor) -> None:
        """Note that work of this link reads a tensor that belongs to the compute lane."""

    def gather(self, target: Tensor, source: Tensor, index: Tensor) -> None:
        """target[i] = source[index[i]], along the first dimension."""
        with self._throttled(target):
            torch.index_select(source, 0, index, out=target)

    def scatter(self, target: Tensor, index: Tensor, source: Tensor) -> None:
        """target[index[i]] = source[i], along the first dimension."""
        with self._throttled(source):
            target.index_copy_(0, index, source)

    def reset_counts(self) -> None:
        self.moved_bytes = 0

    @contextlib.contextmanager
    def _throttled(self, moved: Tensor):
        num_bytes = moved.numel() * moved.element_size()
        self.moved_bytes += num_bytes
        started = time.perf_counter()
        yield
        if self.bytes_per_s:
            self._sleeps.until(started + num_bytes / self.bytes_per_s)


def as_buffer(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, for direct I/O."""
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())
