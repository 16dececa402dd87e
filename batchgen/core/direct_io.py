"""Files that are read and written with direct I/O: past the page cache, in large pieces.

So cached pages do not count against a memory limit, and measured rates are those of the disk. Where a filesystem has no
direct I/O (tmpfs), the page cache is used, and the file's pages are dropped from it after each transfer.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from batchgen.core.async_io import READ, WRITE, of_this_thread
from batchgen.core.errors import InputError
from batchgen.core.file_version import FileVersion, version_of
from batchgen.core.private_files import open_unnamed

ALIGNMENT = 4096
# A transfer of this size keeps a disk busy by itself; smaller ones are issued several at a time, by threads where the
# kernel does not take them all at once.
_LARGE_BYTES = 16 << 20
_IN_FLIGHT = 4


def aligned(num_bytes: int) -> int:
    """Round a size in bytes up to a multiple of `ALIGNMENT`, the unit of direct I/O."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def aligned_buffer(num_bytes: int, kind: type[mmap.mmap] = mmap.mmap) -> mmap.mmap:
    """Allocate private memory that is aligned for direct I/O; its size is rounded up to a multiple of `ALIGNMENT`.

    Pages are allocated on first use; huge pages are used where the kernel has them.

    Args:
        num_bytes: The least size of the memory, in bytes.
        kind: The subclass of `mmap.mmap` to return.
    """
    buffer = kind(-1, max(ALIGNMENT, aligned(num_bytes)), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError, AttributeError):
        buffer.madvise(mmap.MADV_HUGEPAGE)
    return buffer


class DirectFile:
    """An open file for direct I/O: file offsets, sizes and buffer addresses are multiples of `ALIGNMENT`."""

    def __init__(self, path: Path | str, *, size_bytes: int | None = None) -> None:
        """Open an existing file for reading, or create an unnamed file for reading and writing.

        Args:
            path: The path of the existing file; with `size_bytes`, the folder in which the unnamed file is created. The
                unnamed file disappears when the process ends, also when it is killed.
            size_bytes: The size of the new unnamed file, in bytes; None: the existing file at `path` is opened.

        Raises:
            OSError: The file cannot be opened or created.
        """
        self.path = Path(path)
        try:
            self._fd, self._direct = self._open(os.O_DIRECT, size_bytes is not None), True
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._fd, self._direct = self._open(0, size_bytes is not None), False
        if size_bytes is not None:
            try:
                os.posix_fallocate(self._fd, 0, max(1, size_bytes))  # a full disk shows now, not in mid-job
            except BaseException:
                os.close(self._fd)
                raise
        self._workers: ThreadPoolExecutor | None = None

    def _open(self, flags: int, is_new: bool) -> int:
        return open_unnamed(self.path, flags) if is_new else os.open(self.path, os.O_RDONLY | flags)

    def read(self, pieces: Iterable[tuple[int, memoryview]]) -> int:
        """Fill each buffer with the file's bytes from an offset on.

        Args:
            pieces: Pairs of an offset in the file, in bytes, and the buffer to fill. A buffer is filled only in part
                where the file ends.

        Returns:
            The number of bytes read.

        Raises:
            OSError: The file cannot be read.
        """
        return self._all(READ, self._read_one, pieces)

    def write(self, pieces: Iterable[tuple[int, memoryview]]) -> int:
        """Write each buffer to the file at an offset.

        Args:
            pieces: Pairs of an offset in the file, in bytes, and the buffer to write.

        Returns:
            The number of bytes written.

        Raises:
            OSError: The file cannot be written.
        """
        return self._all(WRITE, self._write_one, pieces)

    def version(self) -> FileVersion:
        """The current version of the open file (`FileVersion`). Raises OSError."""
        return version_of(self._fd)

    def close(self) -> None:
        if self._workers:
            self._workers.shutdown()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _all(
        self, operation: int, transfer: Callable[[int, memoryview], int], pieces: Iterable[tuple[int, memoryview]]
    ) -> int:
        pieces = list(pieces)
        if len(pieces) < 2 or len(pieces[0][1]) >= _LARGE_BYTES:
            return _each(transfer, pieces)
        if self._direct and (requests := of_this_thread()):
            moved = requests.transfer(self._fd, operation, pieces)
            # Whatever was not moved in one go: at the end of a file nothing more is.
            rest = [(o + n, b[n:]) for (o, b), n in zip(pieces, moved, strict=True) if n < len(b) and not n % ALIGNMENT]
            return sum(moved) + _each(transfer, rest)
        if self._workers is None:
            self._workers = ThreadPoolExecutor(_IN_FLIGHT, thread_name_prefix="batchgen-disk")
        parts = [self._workers.submit(_each, transfer, pieces[w::_IN_FLIGHT]) for w in range(_IN_FLIGHT)]
        return sum(part.result() for part in parts)

    def _read_one(self, offset: int, buffer: memoryview) -> int:
        done = 0
        while done < len(buffer):  # one call moves less than 2 GiB
            count = os.preadv(self._fd, [buffer[done:]], offset + done)
            done += count
            if count == 0 or count % ALIGNMENT:
                break  # the end of the file
        if not self._direct:
            os.posix_fadvise(self._fd, offset, done, os.POSIX_FADV_DONTNEED)
        return done

    def _write_one(self, offset: int, buffer: memoryview) -> int:
        done = 0
        while done < len(buffer):
            count = os.pwritev(self._fd, [buffer[done:]], offset + done)
            if count == 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
            done += count
        return done


def _each(transfer: Callable[[int, memoryview], int], pieces: list[tuple[int, memoryview]]) -> int:
    """Call `transfer` for each pair of offset and buffer, and add up the bytes that it moved."""
    return sum(transfer(offset, buffer) for offset, buffer in pieces)


@contextlib.contextmanager
def offload_errors(directory: Path) -> Iterator[None]:
    """Turn an OSError that the block raises into an InputError that names the directory of --offload-dir."""
    try:
        yield
    except OSError as error:
        what = error.strerror or str(error)
        raise InputError(
            f"--offload-dir {directory}: {what}; name a directory with free space that you may write to"
        ) from error


def make_offload_dir(directory: Path) -> Path:
    """Create the directory of `--offload-dir` where it does not exist; gives its resolved path. Raises InputError."""
    with offload_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
        return directory.resolve()
