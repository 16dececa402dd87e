"""Files that are read and written past the page cache, in large pieces.

So a memory limit is a limit, and rates are the disk's. Where a filesystem cannot do direct I/O (tmpfs), the cache is
used, and emptied of the file after each transfer.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from batchgen.core.errors import InputError
from batchgen.core.file_version import FileVersion, version_of
from batchgen.core.private_files import open_unnamed

ALIGNMENT = 4096
# A transfer of this size keeps a disk busy by itself; smaller ones are issued several at a time.
_LARGE_BYTES = 16 << 20
_IN_FLIGHT = 4


def aligned(num_bytes: int) -> int:
    """`num_bytes` rounded up to a multiple of what direct I/O moves."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def aligned_buffer(num_bytes: int, kind: type[mmap.mmap] = mmap.mmap) -> mmap.mmap:
    """New memory that direct I/O can use, private to this process, its size rounded up.

    Pages are allocated on first use, huge ones where the kernel has them.
    """
    buffer = kind(-1, max(ALIGNMENT, aligned(num_bytes)), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError, AttributeError):
        buffer.madvise(mmap.MADV_HUGEPAGE)
    return buffer


class DirectFile:
    """An open file for direct I/O: offsets and sizes are multiples of ALIGNMENT, and buffers begin at such ones."""

    def __init__(self, path: Path | str, *, size_bytes: int | None = None) -> None:
        """Open a file, or make one.

        Args:
            path: The path of the file; or with `size_bytes` the folder of a new file without a name, of which nothing
                is left however the process ends.
            size_bytes: Bytes of a new file that is to be written and read; None: an existing file is opened to be read.

        Raises:
            OSError: The file cannot be opened or made.
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
        """Fill each buffer from its offset; only the end of the file may cut one short.

        Returns:
            Bytes read.

        Raises:
            OSError: The file cannot be read.
        """
        return self._all(self._read_one, pieces)

    def write(self, pieces: Iterable[tuple[int, memoryview]]) -> int:
        """Write each buffer at its offset.

        Returns:
            Bytes written.

        Raises:
            OSError: The file cannot be written.
        """
        return self._all(self._write_one, pieces)

    def version(self) -> FileVersion:
        """The file's version as it is now. Raises OSError."""
        return version_of(self._fd)

    def close(self) -> None:
        if self._workers:
            self._workers.shutdown()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _all(self, transfer: Callable[[int, memoryview], int], pieces: Iterable[tuple[int, memoryview]]) -> int:
        pieces = list(pieces)
        if len(pieces) < 2 or len(pieces[0][1]) >= _LARGE_BYTES:
            return _each(transfer, pieces)
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
    """Bytes moved by one transfer after the other."""
    return sum(transfer(offset, buffer) for offset, buffer in pieces)


@contextlib.contextmanager
def offload_errors(directory: Path) -> Iterator[None]:
    """Turn an OSError within the block into an InputError that names the directory of --offload-dir."""
    try:
        yield
    except OSError as error:
        what = error.strerror or str(error)
        raise InputError(
            f"--offload-dir {directory}: {what}; name a directory with free space that you may write to"
        ) from error


def make_offload_dir(directory: Path) -> Path:
    """The directory's resolved path; it is made where it does not exist. Raises InputError."""
    with offload_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
        return directory.resolve()
