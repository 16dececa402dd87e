"""Memory and CPU cores that this process may use: those of the machine, or of its container."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
import os
import platform
from dataclasses import dataclass
from pathlib import Path

# Of malloc.h. Blocks of more than 32 MiB always come straight from the kernel.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_KEPT_BLOCK_BYTES, _KEPT_FREE_BYTES = 32 << 20, 256 << 20
# What the heap grows by, without pages until they are used: each time it waits for a thread that has pages provided.
_HEAP_STEP_BYTES = 64 << 20

_CGROUP = Path("/sys/fs/cgroup")
_most_resident_bytes: int | None = None


def keep_within(most_bytes: int) -> None:
    """Limit the result of `available_memory_bytes` as if this process could have at most `most_bytes` resident."""
    global _most_resident_bytes
    _most_resident_bytes = most_bytes


def available_memory_bytes() -> int:
    """Bytes of host memory that this process can still allocate.

    The number is the kernel's MemAvailable, or less where a cgroup or `keep_within` sets a limit.
    """
    available = _meminfo().get("MemAvailable")
    if available is None:  # not Linux
        available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    own = [] if _most_resident_bytes is None else [max(0, _most_resident_bytes - resident_bytes())]
    return min([available, *own, *_cgroup_headroom()])


def resident_bytes() -> int:
    """The resident memory of this process, in bytes; 0 where the system does not report it."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return 0


def peak_resident_bytes() -> int:
    """The highest resident memory that this process has had, in bytes."""
    try:
        status = Path("/proc/self/status").read_text()
        return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def keep_freed_memory() -> None:
    """Configure glibc to keep freed memory for later allocations instead of returning it to the kernel.

    Memory that was returned costs one page fault per page when it is allocated again. Nothing is done where the C
    library is not glibc.
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, _KEPT_BLOCK_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, _KEPT_FREE_BYTES)
        libc.mallopt(_M_TOP_PAD, _HEAP_STEP_BYTES)


def give_back_freed_memory() -> None:
    """Run Python's garbage collection, then return freed memory to the kernel. Called between kinds of work."""
    gc.collect()
    trim_freed_memory()


def trim_freed_memory() -> None:
    """Return freed memory to the kernel without garbage collection, which may take a second."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _meminfo() -> dict[str, int]:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return {}
    return {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}


def _cgroup_headroom() -> list[int]:
    """The unused memory under each cgroup limit that holds for this process, in bytes.

    The cgroups (version 1 or 2) are those of this process and all their parents. Page cache that the kernel would drop
    first (inactive_file) does not count as used.
    """
    try:
        groups = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    except OSError:
        return []
    headroom = []
    for _, controllers, path in groups:
        if controllers == "":
            root, limit_name, use_name, cache_key = _CGROUP, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            root, limit_name, use_name = _CGROUP / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            cache_key = "total_inactive_file"
        else:
            continue
        here = root / path.lstrip("/")
        for group in [here, *here.parents]:
            try:
                limit, used = (group / limit_name).read_text().strip(), int((group / use_name).read_text())
                stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            except (OSError, ValueError):
                limit = "max"  # not mounted here, or the root, which has no limit
            if limit != "max":
                headroom.append(max(0, int(limit) - used + int(stat.get(cache_key, 0))))
            if group == root:
                break
    return headroom


def available_cores() -> int:
    """The number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class CpuTime:
    """Seconds that the CPU cores of this process have spent since the machine started, added up over the cores.

    Attributes:
        total_s: All seconds, idle ones included.
        others_s: Seconds in which the cores ran other processes.
        stolen_s: Seconds in which the host of a virtual machine used the cores for something else.
    """

    total_s: float
    others_s: float
    stolen_s: float

    @classmethod
    def now(cls) -> CpuTime | None:
        """The current counters of the kernel; None where the kernel does not report them."""
        try:
            lines = [line.split() for line in Path("/proc/stat").read_text().splitlines()]
            cores = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        except (AttributeError, OSError):
            return None
        # user, nice, system, idle, waiting for I/O, interrupts (2), stolen
        times = [[int(ticks) for ticks in line[1:9]] for line in lines if line and line[0] in cores]
        if not times or any(len(ticks) < 8 for ticks in times):
            return None
        tick_s, own = 1 / os.sysconf("SC_CLK_TCK"), os.times()
        total_s = tick_s * sum(map(sum, times))
        idle_s = tick_s * sum(ticks[3] + ticks[4] for ticks in times)
        stolen_s = tick_s * sum(ticks[7] for ticks in times)
        return cls(total_s, total_s - idle_s - stolen_s - own.user - own.system, stolen_s)


# The periods of load averages, in seconds.
_LOAD_PERIODS_S = (60, 300, 900)


def load_average(seconds: float) -> float:
    """Mean number of threads that ran or waited for a core of the machine in the last so many seconds.

    It is that of the longest of the system's periods that is no longer; infinite where all are longer, or the system
    keeps none.
    """
    periods = [i for i, period_s in enumerate(_LOAD_PERIODS_S) if period_s <= seconds]
    if not periods:
        return math.inf
    try:
        return os.getloadavg()[periods[-1]]
    except (AttributeError, OSError):
        return math.inf


def cpu_name() -> str:
    """The model name of the CPU, or its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
