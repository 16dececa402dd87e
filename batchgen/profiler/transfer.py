"""Measuring of transfer rates: disk reads and writes, reads of host memory, copies between host and GPU."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from batchgen.core.async_io import READ, WRITE, of_this_thread
from batchgen.core.direct_io import aligned_buffer, offload_errors
from batchgen.core.errors import InputError
from batchgen.core.machine import available_memory_bytes
from batchgen.core.private_files import open_unnamed
from batchgen.profiler.timing import FULL, Device, Effort, Trial

_REQUEST_BYTES, _BUFFERS_BYTES = 8 << 20, 64 << 20
_IN_FLIGHT = 4
# A rate is the median over runs of this many requests.
_STRETCH_REQUESTS = 8
# Small requests, which show the fixed time of a request.
_SMALL_BYTES, _SMALL_REQUESTS = 16 << 10, 32
_READ_PASSES = 3
_COPY_BYTES = 64 << 20
# A probe's files, each written once and read three times with small requests beside, and a disk that is taken for slow.
_PROBE_BYTES, _FILE_PASSES, _SLOW_DISK_BYTES_PER_S = (8 << 20, 64 << 20), 5, 100e6
_LEAST_READ_BYTES = 8 << 20  # however little memory is left


@dataclass(frozen=True)
class _File:
    """An open file without a name, with aligned buffers of _REQUEST_BYTES for its requests.

    Attributes:
        descriptor: The file's descriptor.
        direct: Whether I/O bypasses the page cache. A filesystem may not support that; then the file's pages are
            dropped from the cache.
        buffers: Aligned buffers, together larger than most caches; requests in flight use different ones.
    """

    descriptor: int
    direct: bool
    buffers: Sequence[mmap.mmap]

    def write(self, worker: int, offset: int, num_bytes: int = _REQUEST_BYTES) -> None:
        if os.pwritev(self.descriptor, [self._buffer(worker, offset)[:num_bytes]], offset) < num_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def read(self, worker: int, offset: int, num_bytes: int = _REQUEST_BYTES) -> None:
        os.preadv(self.descriptor, [self._buffer(worker, offset)[:num_bytes]], offset)

    def move_small(self, operation: int, offsets: Sequence[int]) -> float:
        """Seconds of small requests, at most `_SMALL_REQUESTS`, that the kernel gets together."""
        kernel, buffer = of_this_thread(), memoryview(self.buffers[0])
        assert kernel is not None
        pieces = [(offset, buffer[i * _SMALL_BYTES :][:_SMALL_BYTES]) for i, offset in enumerate(offsets)]
        started = time.perf_counter()
        kernel.transfer(self.descriptor, operation, pieces)
        return time.perf_counter() - started

    def _buffer(self, worker: int, offset: int) -> memoryview:
        """The buffer of a worker thread for a request at an offset of the file."""
        buffers = self.buffers[worker::_IN_FLIGHT]
        return memoryview(buffers[offset // _REQUEST_BYTES // _IN_FLIGHT % len(buffers)])


@dataclass(frozen=True)
class DiskRates:
    """Rates of a disk with several requests in flight, and fixed times of a request.

    Attributes:
        read_bytes_per_s: Bytes per second of large reads.
        write_bytes_per_s: Bytes per second of large writes.
        read_overhead_s: Fixed seconds of a read.
        write_overhead_s: Fixed seconds of a write.
        cpu_overhead_s: Seconds of CPU time that a small request takes.
        call_overhead_s: Seconds in which a thread gives requests to the disk and is woken when they are done, while
            all cores compute.
    """

    read_bytes_per_s: float
    write_bytes_per_s: float
    read_overhead_s: float
    write_overhead_s: float
    cpu_overhead_s: float
    call_overhead_s: float


def disk_rates(directory: Path, effort: Effort) -> DiskRates:
    """Measure the disk of a directory with direct I/O.

    The measurement writes an unnamed file of at most `effort.disk_bytes`, which does not remain.

    Args:
        directory: The directory.
        effort: Time limits and size of the file.

    Raises:
        InputError: The directory cannot be written.
    """
    with offload_errors(directory), _open_file(directory) as file, ThreadPoolExecutor(_IN_FLIGHT) as workers:

        def seconds(transfer: Callable[[int, int], None], offsets: Sequence[int]) -> float:
            def transfer_all(worker: int) -> None:
                for offset in offsets[worker::_IN_FLIGHT]:
                    transfer(worker, offset)

            started = time.perf_counter()
            for part in [workers.submit(transfer_all, worker) for worker in range(_IN_FLIGHT)]:
                part.result()
            return time.perf_counter() - started

        def write(offsets: Sequence[int], num_bytes: int = _REQUEST_BYTES) -> float:
            taken = seconds(partial(file.write, num_bytes=num_bytes), offsets)
            if file.direct:
                return taken
            started = time.perf_counter()
            os.fsync(file.descriptor)
            return taken + time.perf_counter() - started

        def read(offsets: Sequence[int], num_bytes: int = _REQUEST_BYTES) -> float:
            if not file.direct:
                for offset in offsets:
                    os.posix_fadvise(file.descriptor, offset, num_bytes, os.POSIX_FADV_DONTNEED)
            return seconds(partial(file.read, num_bytes=num_bytes), offsets)

        stretches = _stretches(effort.disk_bytes)
        writes = _timed_stretches(write, stretches, effort.disk_s)
        reads = _timed_stretches(read, stretches[: len(writes)] * _READ_PASSES, effort.disk_s)
        rates = statistics.median(reads), statistics.median(writes)
        # Small requests all over the file, not in order.
        written = len(writes) * len(stretches[0]) * _REQUEST_BYTES // _SMALL_BYTES
        small = [i * 7919 % written * _SMALL_BYTES for i in range(2 * _SMALL_REQUESTS)]
        chunks = [small[:_SMALL_REQUESTS], small[_SMALL_REQUESTS:]] * 8
        overheads = []
        cpu_s, requests, small_moves = time.process_time(), 0, []
        for transfer, operation, rate in ((read, READ, rates[0]), (write, WRITE, rates[1])):
            small_transfer = partial(transfer, num_bytes=_SMALL_BYTES)
            if file.direct and of_this_thread():  # as jobs move them
                small_transfer = partial(file.move_small, operation)
            small_moves.append(small_transfer)
            small_rates = _timed_stretches(small_transfer, chunks, effort.disk_s / 4, _SMALL_BYTES)
            requests += len(small_rates) * _SMALL_REQUESTS
            overheads.append(max(0.0, _SMALL_BYTES / statistics.median(small_rates) - _SMALL_BYTES / rate))
        cpu_overhead_s = (time.process_time() - cpu_s) / requests
        call_s = _beside_products(workers, partial(_call_s, small_moves, small, effort.disk_s / 4))
        call_overhead_s = max(0.0, call_s - statistics.mean(_SMALL_BYTES / rate for rate in rates))
    (read_rate, write_rate), (read_overhead_s, write_overhead_s) = rates, overheads
    return DiskRates(read_rate, write_rate, read_overhead_s, write_overhead_s, cpu_overhead_s, call_overhead_s)


def _call_s(moves: Sequence[Callable[[Sequence[int]], float]], offsets: Sequence[int], limit_s: float) -> float:
    """Mean seconds of a call with one small request: those that take long are among those that a job has to wait for.

    Args:
        moves: Functions that give the seconds of small requests at some offsets, which take turns.
        offsets: Offsets of small requests.
        limit_s: Seconds after which no other calls are made.
    """
    calls, deadline = [], time.perf_counter() + limit_s
    for offset in offsets:
        calls += [move([offset]) for move in moves]
        if time.perf_counter() > deadline:
            break
    return statistics.mean(calls)


def _beside_products(workers: ThreadPoolExecutor, measure: Callable[[], float]) -> float:
    """The result of a measurement that is made while all cores compute."""
    import torch

    done, matrix = threading.Event(), torch.ones(1024, 1024)

    def multiply() -> None:
        while not done.is_set():
            torch.mm(matrix, matrix)

    multiplying = workers.submit(multiply)
    try:
        return measure()
    finally:
        done.set()
        multiplying.result()


def probe_disk(directory: Path, seconds: float) -> DiskRates | None:
    """Measure the disk of a directory in a given time; None where the time or the space is too small.

    Args:
        directory: The directory.
        seconds: Seconds that the probe may take.
    """
    started, rates = time.perf_counter(), None
    for file_bytes in _PROBE_BYTES:
        left_s = seconds - (time.perf_counter() - started)
        expected_s = _FILE_PASSES * file_bytes / (rates.write_bytes_per_s if rates else _SLOW_DISK_BYTES_PER_S)
        if expected_s > left_s:
            break
        try:
            rates = disk_rates(directory, replace(FULL, disk_s=left_s / _FILE_PASSES, disk_bytes=file_bytes))
        except InputError:
            break
    return rates


@contextlib.contextmanager
def _open_file(directory: Path) -> Iterator[_File]:
    descriptor = open_unnamed(directory)
    try:
        pattern = os.urandom(1 << 20)  # not zeros, which some disks do not really store
        # Buffers like those of jobs: into scattered small pages the same disk reads half as fast.
        most_bytes = min(_BUFFERS_BYTES, available_memory_bytes() // 8)
        rounds = max(1, most_bytes // (_IN_FLIGHT * _REQUEST_BYTES))
        buffers = [aligned_buffer(_REQUEST_BYTES) for _ in range(rounds * _IN_FLIGHT)]
        for buffer in buffers:
            buffer[:] = pattern * (_REQUEST_BYTES // len(pattern))
        yield _File(descriptor, _make_direct(descriptor, buffers[0]), buffers)
    finally:
        os.close(descriptor)


def _make_direct(descriptor: int, buffer: mmap.mmap) -> bool:
    """Switch a file to direct I/O; returns whether its filesystem supports it. The test request also warms it up."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
        os.pwritev(descriptor, [buffer], 0)
        return True
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
        return False


def _stretches(file_bytes: int) -> list[list[int]]:
    """Offsets of the requests that cover a file of `file_bytes` bytes, grouped in timed runs."""
    offsets = list(range(0, max(1, file_bytes // _REQUEST_BYTES) * _REQUEST_BYTES, _REQUEST_BYTES))
    return [offsets[i : i + _STRETCH_REQUESTS] for i in range(0, len(offsets), _STRETCH_REQUESTS)]


def _timed_stretches(
    transfer: Callable[[Sequence[int]], float],
    stretches: Sequence[Sequence[int]],
    limit_s: float,
    request_bytes: int = _REQUEST_BYTES,
) -> list[float]:
    """Bytes per second of each timed run of requests, as many runs as the time limit allows and at least one."""
    rates: list[float] = []
    deadline = time.perf_counter() + limit_s
    for offsets in stretches:
        if rates and time.perf_counter() > deadline:
            break
        rates.append(len(offsets) * request_bytes / transfer(offsets))
    return rates


def dram_read_rate(effort: Effort) -> float:
    """Bytes per second that all threads together read from host memory."""
    import torch

    device = Device("cpu")
    numbers = torch.ones(max(_LEAST_READ_BYTES, device.pool_bytes(effort)) // 8, dtype=torch.int64)
    return device.rate(Trial(numbers.nbytes, lambda i: numbers.sum()), effort)


def first_touch_rate(effort: Effort) -> float:
    """Bytes per second of writing to memory for the first time, as happens to KV pools.

    The kernel clears each page first, and a virtual machine may have to get it from its host.
    """
    size = min(effort.touch_bytes, max(1 << 20, available_memory_bytes() // 4) // mmap.PAGESIZE * mmap.PAGESIZE)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError, AttributeError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    pages = np.frombuffer(memory, dtype=np.uint8)[:: mmap.PAGESIZE]
    started = time.perf_counter()
    pages[:] = 1
    return size / (time.perf_counter() - started)


def copy_rates(device: Device, effort: Effort, copy_bytes: int = _COPY_BYTES) -> tuple[float, float]:
    """Bytes per second of copies from host to device, and from device to host, in large pieces of pinned memory."""
    import torch

    pinned = device.kind == "cuda"
    hosts = [torch.ones(copy_bytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(4)]
    there = torch.ones(copy_bytes, dtype=torch.uint8, device=device.kind)
    h2d = Trial(copy_bytes, lambda i: there.copy_(hosts[i % len(hosts)], non_blocking=True))
    d2h = Trial(copy_bytes, lambda i: hosts[i % len(hosts)].copy_(there, non_blocking=True))
    return device.rate(h2d, effort), device.rate(d2h, effort)
