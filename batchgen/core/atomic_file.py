"""Writing of files in one step: after a crash or a power cut, a file is either absent or complete."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from batchgen.core.errors import BatchgenError

_FIX = {
    errno.ENOSPC: "free space",
    errno.EDQUOT: "free space or raise the quota",
    errno.EACCES: "make it writable",
    errno.EPERM: "make it writable",
    errno.EROFS: "make it writable",
    errno.ENOENT: "somebody removed it; leave it there",
}


@contextlib.contextmanager
def staged(path: Path, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Create a file for writing in binary mode: durable after the block, removed when the block raises.

    The file is removed at once on an exception, so that a full disk gets its space back. A killed process leaves the
    file behind. So callers choose a temporary name (`*.tmp`) that the next start removes, and rename the file when it
    is complete. An existing file of that name is removed first and not written to, since it may be a link that another
    user has made.

    Args:
        path: The path of the new file.
        mode: The permission bits of the new file, before the umask is applied.

    Yields:
        The open file.
    """
    try:
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
        with open(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        with contextlib.suppress(OSError):
            path.unlink()
        raise


def replace_durably(source: Path, target: Path) -> None:
    """Rename `source` to `target`, replacing it; the change is on stable storage on return.

    Both paths are on the same filesystem.
    """
    os.replace(source, target)
    sync_directory(target.parent)


@contextlib.contextmanager
def written_atomically(path: Path, *, contended: bool = False, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces the file at `path` when the block ends.

    Readers of `path` see either the old content or the whole new content.

    Args:
        path: The path of the file to replace or create, in a directory that exists.
        contended: True where other processes, on any machine, may write the same file at the same time. Each process
            then has a temporary file of its own, and the process that ends last decides the content.
        mode: The permission bits of the file, before the umask is applied.

    Yields:
        The temporary file, open for writing in binary mode.

    Raises:
        OSError: The file cannot be written. The temporary file is removed, and `path` has its old content.
    """
    temporary = path.with_name(path.name + (f".{socket.gethostname()}.{os.getpid()}.tmp" if contended else ".tmp"))
    with staged(temporary, mode) as file:
        yield file
    replace_durably(temporary, path)


def write_atomically(path: Path, content: bytes, *, contended: bool = False, mode: int = 0o666) -> None:
    """Write bytes to a file in one step: readers see either the old content or the whole new content.

    Args:
        path: The path of the file, in a directory that exists.
        content: All bytes of the file.
        contended: True where other processes may write the same file at the same time.
        mode: The permission bits of the file, before the umask is applied.

    Raises:
        OSError: The file cannot be written. The file at `path` has its old content.
    """
    with written_atomically(path, contended=contended, mode=mode) as file:
        file.write(content)


def sync_directory(path: Path) -> None:
    """Flush a directory's entries to stable storage (fsync), where the filesystem supports that."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network and FUSE filesystems cannot
            raise
    finally:
        os.close(descriptor)


def is_full(error: OSError) -> bool:
    """True where the system's error is that a disk has no more room."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def storage_error(error: OSError, action: str, rows_safe: int | None = None) -> BatchgenError:
    """The error to report when writing to a disk fails.

    Args:
        error: The system's error.
        action: The failed action, such as "write X".
        rows_safe: The number of finished rows that are on the disk; None where it is not known.
    """
    what = error.strerror or " ".join(str(error).split())
    if error.filename is not None and str(error.filename) not in action:
        what += f" ({error.filename})"
    fix = _FIX.get(error.errno or 0, "check the disk")
    gone = error.errno == errno.ENOENT  # and what was in it, perhaps
    safe = "" if rows_safe is None or gone else f"; {rows_safe} finished rows are safe on disk"
    return BatchgenError(f"cannot {action}: {what}{safe}: {fix} and run the same command again")
