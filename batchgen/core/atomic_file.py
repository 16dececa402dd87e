"""Files that are either absent or whole, whatever happens while they are written."""

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
    """A new file that is on stable storage when the block ends, and is removed when the block raises.

    Removing it at once gives a full disk its space back. A killed process leaves it behind: callers give it a name
    (`*.tmp`) that only the next start's cleaning looks at, and rename it when it is whole. A file of that name is
    removed first and not written to, since it may be a link where others may write to the folder.

    Args:
        path: The path of the new file.
        mode: The permissions of the new file, less what the umask takes.
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
    """Rename `source` over `target` on the same filesystem; the change is on stable storage on return."""
    os.replace(source, target)
    sync_directory(target.parent)


@contextlib.contextmanager
def written_atomically(path: Path, *, contended: bool = False, mode: int = 0o666) -> Iterator[BinaryIO]:
    """A file to write, which is at `path` when the block ends: readers see the old file or the new one, never a piece.

    Args:
        path: The file's path, in a directory that exists.
        contended: True where other processes, of any machine, may write the same file at the same time: each has a
            temporary file of its own, and the last one's content stays.
        mode: The permissions of the file, less what the umask takes.

    Raises:
        OSError: The file cannot be written; nothing is left of the new content.
    """
    temporary = path.with_name(path.name + (f".{socket.gethostname()}.{os.getpid()}.tmp" if contended else ".tmp"))
    with staged(temporary, mode) as file:
        yield file
    replace_durably(temporary, path)


def write_atomically(path: Path, content: bytes, *, contended: bool = False, mode: int = 0o666) -> None:
    """Put bytes into a file in one step: readers see the old file or the new one, never a piece.

    Args:
        path: The file's path, in a directory that exists.
        content: All bytes of the file.
        contended: True where other processes may write the same file at the same time.
        mode: The permissions of the file, less what the umask takes.

    Raises:
        OSError: The file cannot be written; nothing is left of the new content.
    """
    with written_atomically(path, contended=contended, mode=mode) as file:
        file.write(content)


def sync_directory(path: Path) -> None:
    """Make the names in a directory survive a power cut, where the filesystem can do that."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network and FUSE filesystems cannot
            raise
    finally:
        os.close(descriptor)


def storage_error(error: OSError, action: str, rows_safe: int | None = None) -> BatchgenError:
    """The error for a disk that failed in `action` ("write X"); `rows_safe`: rows that are on it, where known."""
    what = error.strerror or " ".join(str(error).split())
    if error.filename is not None and str(error.filename) not in action:
        what += f" ({error.filename})"
    fix = _FIX.get(error.errno or 0, "check the disk")
    gone = error.errno == errno.ENOENT  # and what was in it, perhaps
    safe = "" if rows_safe is None or gone else f"; {rows_safe} finished rows are safe on disk"
    return BatchgenError(f"cannot {action}: {what}{safe}: {fix} and run the same command again")
