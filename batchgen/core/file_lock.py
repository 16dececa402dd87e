"""A lock on a directory that one process at a time holds, and that the system releases when the process ends."""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path

from batchgen.core.private_files import is_ours_alone, open_regular


class LockHeld(Exception):
    """Another process holds the lock.

    Attributes:
        holder: The process that holds the lock, such as "process 123 on host".
    """

    def __init__(self, holder: str) -> None:
        super().__init__(holder)
        self.holder = holder


def lock_file(path: Path, *, shared: bool = False) -> int:
    """Lock a file (flock), create it where it does not exist, and write this process's name into it.

    Symbolic links are not followed. Nothing is written to a file of another user, or to one with several hard links.

    Args:
        path: The path of the lock file.
        shared: True for a lock that several processes may hold at the same time. Nothing is then written to the file.

    Returns:
        A file descriptor. Closing it releases the lock.

    Raises:
        LockHeld: Another process holds the lock.
        OSError: The file cannot be created or locked.
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
