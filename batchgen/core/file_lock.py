"""A lock that one process at a time holds on a directory, and that ends with the process, however it ends."""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path

from batchgen.core.private_files import is_ours_alone, open_regular


class LockHeld(Exception):
    """Another process has the lock.

    Attributes:
        holder: The process that has it: "process 123 on host".
    """

    def __init__(self, holder: str) -> None:
        super().__init__(holder)
        self.holder = holder


def lock_file(path: Path, *, shared: bool = False) -> int:
    """Take the lock (flock) of a file, which is made where it does not exist, and write into it who has it.

    A link is not followed, and nothing is written to a file that another user has put there, or that has another name
    elsewhere.

    Args:
        path: The file's path.
        shared: True for a lock that others may hold at the same time, where nothing is written.

    Returns:
        A file descriptor; closing it releases the lock.

    Raises:
        LockHeld: Another process has it.
        OSError: The file cannot be made or locked.
    """
    descriptor = open_regular(path, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        if not shared and is_ours_alone(os.fstat(descriptor)):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
    except BlockingIOError:
        holder = os.pread(descriptor, 300, 0).decode(errors="replace") or "a process"
        os.close(descriptor)
        raise LockHeld(holder) from None
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
