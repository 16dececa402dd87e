"""Commands run inside a memory limit: a cgroup (version 1) of their own, in which page cache counts."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_MEMORY = Path("/sys/fs/cgroup/memory")
_DROP_CACHES = Path("/proc/sys/vm/drop_caches")


@dataclass(frozen=True)
class LimitedRun:
    """How a command ended.

    Attributes:
        cpu_s: seconds of all its threads; far below wall_s times the cores, it waited for the disk or others had the
        cores. peak_bytes: the group's highest use, page cache and kernel memory included. limit_hits: how often the
        kernel had to reclaim memory to stay within the limit. oom_kills: processes that the kernel killed because that
        was not enough.
    """

    wall_s: float
    cpu_s: float
    exit_code: int
    peak_bytes: int
    limit_hits: int
    peak_resident_bytes: int
    oom_kills: int


def run_limited(
    command: Sequence[str], limit_bytes: int, log: Path, *, timeout_s: float, env: dict[str, str] | None = None
) -> LimitedRun:
    """Runs a command with all its memory, page cache included, within the limit; its output goes to the log.

    A command still running after timeout_s is killed.

    Raises:
        SystemExit: no such limit can be set.
    """
    with memory_group(limit_bytes) as group, log.open("wb") as output:
        # The shell joins the group, then becomes the command: no byte of it is counted elsewhere.
        joined = ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(group / "cgroup.procs"), *command]
        started = time.perf_counter()
        process = subprocess.Popen(
            joined, stdout=output, stderr=output, stdin=subprocess.DEVNULL, env=env, start_new_session=True
        )
        killer = threading.Timer(timeout_s, lambda: os.killpg(process.pid, signal.SIGKILL))
        killer.start()
        try:
            _, status, usage = os.wait4(process.pid, 0)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        finally:
            killer.cancel()
        process.returncode = os.waitstatus_to_exitcode(status)  # waited for: Popen need not
        return LimitedRun(
            wall_s=time.perf_counter() - started,
            cpu_s=usage.ru_utime + usage.ru_stime,
            exit_code=process.returncode,
            peak_bytes=int((group / "memory.max_usage_in_bytes").read_text()),
            limit_hits=int((group / "memory.failcnt").read_text()),
            peak_resident_bytes=usage.ru_maxrss * 1024,
            oom_kills=_oom_kills(group),
        )


def empty_page_cache(files: Sequence[Path]) -> None:
    """Drops these files from the page cache, and all others where that is permitted."""
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    with contextlib.suppress(OSError):
        os.sync()
        _DROP_CACHES.write_text("1")


@contextlib.contextmanager
def memory_group(limit_bytes: int) -> Iterator[Path]:
    """A new group below the one this process is in, whose own limit goes on holding.

    At the end this process is put back, and others that are still in the group are killed.

    Raises:
        SystemExit: no memory limit can be set.
    """
    group = _own_group() / f"benchmark-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        raise SystemExit(
            f"no memory limit can be set: {group} cannot be made ({error.strerror}), needs root and cgroup v1"
        ) from error
    try:
        (group / "memory.limit_in_bytes").write_text(str(limit_bytes))
        yield group
    finally:
        while left := (group / "cgroup.procs").read_text().split():  # what the command started and left behind
            for pid in left:
                if int(pid) == os.getpid():
                    (group.parent / "cgroup.procs").write_text(pid)
                    continue
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            time.sleep(0.1)
        group.rmdir()


def _own_group() -> Path:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(",") and (_MEMORY / path.lstrip("/")).is_dir():
            return _MEMORY / path.lstrip("/")
    return _MEMORY


def _oom_kills(group: Path) -> int:
    values = dict(line.split() for line in (group / "memory.oom_control").read_text().splitlines())
    return int(values.get("oom_kill", 0))
