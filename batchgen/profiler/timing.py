"""Timing of work on a device: grid points and time limits, operands larger than the caches, and medians of runs."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from batchgen.core.machine import available_memory_bytes, keep_freed_memory

if TYPE_CHECKING:
    import torch

_DEFAULT_CACHE_BYTES = 64 << 20
_CPU_POOL_BYTES = 256 << 20
_GPU_POOL_BYTES = 2 << 30


@dataclass(frozen=True)
class Effort:
    """Grid points, sizes and time limits of a measurement. The defaults take about 15 s on two cores.

    Attributes:
        widths: Hidden sizes of GEMMs.
        tokens: Numbers of tokens of GEMMs.
        elementwise_tokens: Numbers of tokens of element-wise work.
        groups: Numbers of query heads per KV head in decode attention.
        batches: Numbers of sequences in decode attention.
        contexts: Context lengths of decode attention, in tokens.
        prefill_contexts: Prompt lengths of prefill attention, in tokens.
        point_s: Seconds for one grid point, warm-up not included.
        call_s: The most seconds of a single run; grid points that are expected to take longer are not measured.
        sample_s: Least seconds of one timed sample; shorter runs are repeated in a sample.
        disk_s: Seconds for reads and as many for writes of the disk.
        disk_bytes: The most bytes of the file that is written to measure the disk.
        touch_bytes: The most bytes of fresh memory that are written to measure first use.
        pool_bytes: Bytes that operands are spread over; None: several times the caches.
        until_s: Time of time.perf_counter after which each point has only two runs, the first a warm-up.
    """

    widths: tuple[int, ...] = (512, 2048, 4096)
    tokens: tuple[int, ...] = (1, 4, 16, 64, 256, 1024, 2048, 8192)
    elementwise_tokens: tuple[int, ...] = (256, 1024, 4096, 16384)
    groups: tuple[int, ...] = (1, 4, 8)
    batches: tuple[int, ...] = (1, 8, 64)
    contexts: tuple[int, ...] = (64, 256, 1024, 4096)
    prefill_contexts: tuple[int, ...] = (16, 64, 256, 512, 2048)
    point_s: float = 0.1
    call_s: float = 0.3
    sample_s: float = 0.002
    disk_s: float = 1.5
    disk_bytes: int = 256 << 20
    touch_bytes: int = 512 << 20
    pool_bytes: int | None = None
    until_s: float = math.inf

    @property
    def late(self) -> bool:
        """True after the time `until_s`."""
        return time.perf_counter() > self.until_s


FULL = Effort()


@dataclass(frozen=True)
class Trial:
    """A piece of work to be timed.

    Attributes:
        work: Bytes or FLOPs of a run.
        run: Function of i that does the i-th run, on operands that have left the caches since they were last used.
    """

    work: float
    run: Callable[[int], object]


@dataclass(frozen=True)
class Device:
    """A device that measurements allocate memory on and time: kind "cpu" or "cuda"."""

    kind: str

    def seconds(self, run: Callable[[int], object], first: int, count: int) -> float:
        """Seconds that `count` runs take together: run(first) to run(first + count - 1)."""
        if self.kind == "cpu":
            started = time.perf_counter()
            for i in range(first, first + count):
                run(i)
            return time.perf_counter() - started
        import torch

        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for i in range(first, first + count):
            run(i)
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) / 1000

    def rate(self, trial: Trial, effort: Effort) -> float:
        """Work per second of a trial.

        The rate is the median of at least three samples after a warm-up. When `effort.late` is true, it is that of one
        run.
        """
        self.seconds(trial.run, 0, 1)
        once = self.seconds(trial.run, 1, 1)
        if effort.late:
            return trial.work / max(once, 1e-7)
        count = max(1, math.ceil(effort.sample_s / max(once, 1e-7)))
        samples: list[float] = []
        done = 2
        deadline = time.perf_counter() + effort.point_s
        while len(samples) < 3 or time.perf_counter() < deadline:
            samples.append(self.seconds(trial.run, done, count) / count)
            done += count
        return trial.work / statistics.median(samples)

    def rising_rates(self, sizes: Iterable[int], trial: Callable[[int], Trial], effort: Effort) -> tuple:
        """The rate of a trial at each of several ascending sizes, as (size, rate).

        A size whose run would take longer than `effort.call_s` at the last rate is not measured: it gets the last rate,
        as rates have levelled off by then.

        Args:
            sizes: Sizes, ascending.
            trial: Function from a size to the work to time.
            effort: Time limits.
        """
        points: list[tuple[int, float]] = []
        for size in sizes:
            attempt = trial(size)
            too_long = points and attempt.work / points[-1][1] > effort.call_s
            points.append((size, points[-1][1] if too_long else self.rate(attempt, effort)))
        return tuple(points)

    def pool_bytes(self, effort: Effort) -> int:
        """Bytes to spread operands over: several times the last-level cache, but at most a part of the free memory."""
        if effort.pool_bytes is not None:
            return effort.pool_bytes
        if self.kind == "cpu":
            wanted, free = max(_CPU_POOL_BYTES, 4 * last_level_cache_bytes()), available_memory_bytes()
        else:
            import torch

            wanted, free = _GPU_POOL_BYTES, torch.cuda.mem_get_info()[0]
        return min(wanted, free // 8)

    def pool(self, dtype: torch.dtype, effort: Effort) -> torch.Tensor:
        """Normally distributed numbers [pool_bytes / itemsize], in a repeated pattern, as drawing all takes long."""
        import torch

        keep_freed_memory()  # as jobs do
        pattern = torch.randn(1 << 18, device=self.kind).to(dtype)
        count = max(1, self.pool_bytes(effort) // dtype.itemsize // pattern.numel())
        return pattern.repeat(count)


def pieces(pool: torch.Tensor, *shape: int) -> list[torch.Tensor]:
    """Tensors of one shape that lie in the pool one after the other, as many as fit, at least one."""
    size = math.prod(shape)
    count = pool.numel() // size
    assert count, f"{shape} does not fit a pool of {pool.numel()} numbers"
    return [pool[i * size : (i + 1) * size].view(shape) for i in range(count)]


def last_level_cache_bytes() -> int:
    """Bytes of the last-level caches of this process's cores; a usual size where the system does not report it."""
    sizes: dict[tuple[int, str], int] = {}  # by level and the cores that share it
    try:
        for core in os.sched_getaffinity(0):
            for cache in Path(f"/sys/devices/system/cpu/cpu{core}/cache").glob("index*"):
                level, sharing, size = ((cache / name).read_text() for name in ("level", "shared_cpu_list", "size"))
                sizes[int(level), sharing] = int(size.strip().removesuffix("K")) << 10
    except (AttributeError, OSError, ValueError):  # no Linux, or no such files in this container
        sizes = {}
    last = max((level for level, _ in sizes), default=0)
    return sum(size for (level, _), size in sizes.items() if level == last) or _DEFAULT_CACHE_BYTES
