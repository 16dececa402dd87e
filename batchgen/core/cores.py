"""CPU affinity: cores to which a process or a thread is pinned."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from batchgen.core.errors import InputError
from batchgen.core.file_lock import LockHeld, lock_file
from batchgen.core.private_files import open_regular, private_folder

_held: list[int] = []  # descriptors whose locks end with the process, however it ends


def take_cores(count: int, folder: Path | None = None) -> tuple[int, ...]:
    """Reserve CPU cores for this process and pin all its threads to them until the process ends.

    Processes that reserve cores with this function never share a core.

    Args:
        count: The number of cores.
        folder: The folder of the lock files, one per core, on a local disk; None: a folder of this user in the system's
            temporary directory.

    Returns:
        The core numbers in ascending order. Empty where fewer than `count` cores are free or the system has no CPU
        affinity; the process then keeps the cores that it had before.
    """
    if not hasattr(os, "sched_getaffinity"):
        return ()
    folder = folder or Path(tempfile.gettempdir(), f"batchgen-cores-{os.getuid()}")
    taken: dict[int, int] = {}  # core: its lock
    try:
        private_folder(folder)
        with open(
            open_regular(folder / "turn", os.O_WRONLY | os.O_CREAT), "wb"
        ) as turn:  # one looks at a time: two would each get a part of what one needs
            fcntl.flock(turn, fcntl.LOCK_EX)
            for core in sorted(os.sched_getaffinity(0)):
                if len(taken) == count:
                    break
                with contextlib.suppress(LockHeld):
                    taken[core] = lock_file(folder / f"core-{core}")
    except OSError:
        pass  # a temporary directory that is another user's, or without locks: as if none were free
    if len(taken) < count:
        for lock in taken.values():
            os.close(lock)
        return ()
    _held.extend(taken.values())
    _keep_process_to(taken)
    return tuple(taken)


def _keep_process_to(cores: Iterable[int]) -> None:
    """Pin all threads of this process, and all threads that they start later, to these cores."""
    wanted = set(cores)
    for thread in [*os.listdir("/proc/self/task"), "0"] if os.path.isdir("/proc/self/task") else ["0"]:
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            os.sched_setaffinity(int(thread), wanted)


def dedicated_core() -> tuple[frozenset[int], frozenset[int]]:
    """One core that computes for an emulated accelerator, and the remaining cores for CPU work.

    Returns:
        The set of the one core, and the set of the remaining cores.

    Raises:
        InputError: This process may use fewer than two cores.
    """
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if len(cores) < 2:
        raise InputError(
            "an emulated accelerator with a slowdown needs a core of its own, and this process has one core at most"
            " that it can"
            " keep to: leave out slowdown"
        )
    return frozenset(cores[-1:]), frozenset(cores[:-1])


@contextlib.contextmanager
def on_cores(cores: Iterable[int]) -> Iterator[None]:
    """Pin the calling thread to these cores while the block runs; threads started in it inherit the pinning."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
