"""Reading of the bytes or numbers of a tensor in a file into allocated memory."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from batchgen.core.direct_io import ALIGNMENT, DirectFile, aligned, aligned_buffer
from batchgen.core.errors import InputError
from batchgen.core.file_version import FileVersion, version_of
from batchgen.models.tensor_files.headers import TensorInfo

# Dtypes of safetensors: those of numbers, and all that tensors are stored in.
NUMBERS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_STORED = {**NUMBERS, "I64": torch.int64, "I32": torch.int32, "U8": torch.uint8, "F8_E4M3": torch.uint8}
CHUNK_VALUES = 1 << 20  # values converted at a time
_PIECE_BYTES, _READERS = 1 << 20, 4  # several threads read a tensor in pieces of so many bytes


def read_bytes(name: str, info: TensorInfo, start: int, count: int) -> bytearray:
    """Bytes [start, start + count) of the tensor `name`, which is at `info` in a file.

    Raises:
        InputError: They cannot be read; the message names file and tensor.
    """
    buffer = bytearray(count)
    read_into(name, info, start, memoryview(buffer))
    return buffer


def read_into(name: str, info: TensorInfo, start: int, buffer: memoryview) -> None:
    """Fill `buffer` with the bytes of the tensor `name` from byte `start` on.

    Raises:
        InputError: They cannot be read; the message names file and tensor.
    """
    try:
        with Path(info.path).open("rb", buffering=0) as file:
            file.seek(info.offset + start)
            done = 0
            while done < len(buffer):  # one call reads at most 2 GiB
                count = file.readinto(buffer[done:])
                if not count:
                    raise InputError(f"{info.path} ends within tensor {name}: fetch it again")
                done += count
            check_version(info, version_of(file.fileno()))
    except OSError as error:
        raise InputError(f"cannot read tensor {name} from {info.path}: {error.strerror}") from error


def check_version(info: TensorInfo, *versions: FileVersion) -> None:
    """Raise InputError if a file has changed since its header was read. It is called after reading.

    Args:
        info: Place of a tensor in the file, with the file's version when its header was read.
        versions: Versions of the file that was read, from its open descriptors.
    """
    if info.version is not None and any(version != info.version for version in versions):
        raise InputError(f"{info.path} was changed while it was read: run the same command again once it is whole")


def read_by_threads(name: str, info: TensorInfo, buffer: memoryview) -> None:
    """Fill `buffer` with the whole tensor `name`, by several threads.

    One thread neither keeps a disk busy nor copies at the speed of memory. Bytes in the page cache are copied from
    there. Other bytes are read by direct I/O, so that weights that are read once do not fill the page cache.

    Raises:
        InputError: The tensor cannot be read; the message names file and tensor.
    """
    starts = range(0, len(buffer), _PIECE_BYTES)
    if len(starts) < 2:
        return read_into(name, info, 0, buffer)
    of_thread = OfThread()

    def read(part: tuple[int, memoryview]) -> bool:
        return file.read(info.offset + part[0], part[1], of_thread.buffer(_PIECE_BYTES))

    try:
        with SharedFile(info.path) as file, ThreadPoolExecutor(_READERS) as readers:
            parts = [(start, buffer[start : start + _PIECE_BYTES]) for start in starts]
            done = list(readers.map(read, parts))
            check_version(info, *file.versions())
    except OSError as error:
        raise InputError(f"cannot read tensor {name} from {info.path}: {error.strerror}") from error
    for (start, part), was_read in zip(parts, done, strict=True):
        if not was_read:
            read_into(name, info, start, part)


class OfThread(threading.local):
    """Buffers for reading, one for each thread."""

    def __init__(self) -> None:
        self._memory = memoryview(b"")

    def buffer(self, num_bytes: int) -> memoryview:
        """This thread's buffer, large enough for `SharedFile.fetch` of num_bytes bytes. Its former content is lost."""
        if len(self._memory) < num_bytes + ALIGNMENT:
            self._memory = direct_buffer(num_bytes)
        return self._memory


def direct_buffer(num_bytes: int) -> memoryview:
    """Allocate a buffer that is large enough for `SharedFile.fetch` of num_bytes bytes at any offset."""
    return memoryview(aligned_buffer(num_bytes + ALIGNMENT))


class SharedFile:
    """An open file that several threads may read at the same time.

    Bytes in the page cache are copied from there. Other bytes are read by direct I/O.
    """

    def __init__(self, path: Path) -> None:
        """Open the file at `path`. Raises OSError."""
        self._file = Path(path).open("rb", buffering=0)  # noqa: SIM115 - closed by `close`
        try:
            self._direct = DirectFile(path)
        except BaseException:
            self._file.close()
            raise
        # Being asked for pages that it does not have, the system begins to read them, and no more than these.
        os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)

    def __enter__(self) -> SharedFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def versions(self) -> tuple[FileVersion, FileVersion]:
        """The current version of the file, once for each of the two open descriptors. Raises OSError."""
        return version_of(self._file.fileno()), self._direct.version()

    def close(self) -> None:
        self._direct.close()
        self._file.close()

    def read(self, offset: int, buffer: memoryview, bounce: memoryview) -> bool:
        """Fill `buffer` with bytes of the file.

        Args:
            offset: Offset of the first byte.
            buffer: Memory to fill.
            bounce: Result of `direct_buffer` for at least as many bytes.

        Returns:
            True if the buffer is filled. False if the file system supports neither way of reading, or the file is too
                short.

        Raises:
            OSError: The file cannot be read.
        """
        cached = self._read_cached(offset, buffer)
        if cached is None:
            return False
        if not cached:
            read = self._read_direct(offset, len(buffer), bounce)
            if read is None:
                return False
            # Unlike a slice's, a copy without the GIL.
            np.copyto(np.frombuffer(buffer, np.uint8), np.frombuffer(read, np.uint8))
        return True

    def fetch(self, offset: int, num_bytes: int, bounce: memoryview) -> memoryview | None:
        """Read bytes of the file into `bounce`.

        Args:
            offset: Offset of the first byte.
            num_bytes: Number of bytes.
            bounce: Result of `direct_buffer` for at least as many bytes.

        Returns:
            The bytes, a part of `bounce`. None if the file system supports neither way of reading, or the file is too
                short.

        Raises:
            OSError: The file cannot be read.
        """
        cached = self._read_cached(offset, bounce[:num_bytes])
        if cached is None:
            return None
        return bounce[:num_bytes] if cached else self._read_direct(offset, num_bytes, bounce)

    def _read_direct(self, offset: int, num_bytes: int, bounce: memoryview) -> memoryview | None:
        skipped = offset % ALIGNMENT
        stop = skipped + num_bytes
        try:
            if self._direct.read([(offset - skipped, bounce[: aligned(stop)])]) < stop:
                return None
        except OSError as error:
            if error.errno == errno.EINVAL:  # blocks larger than ours
                return None
            raise
        # The pages that were asked for have come after all.
        os.posix_fadvise(self._file.fileno(), offset - skipped, aligned(stop), os.POSIX_FADV_DONTNEED)
        return bounce[skipped:stop]

    def _read_cached(self, offset: int, buffer: memoryview) -> bool | None:
        """Fill `buffer` from the page cache.

        Returns:
            True if it is filled. False if the page cache has only a part. None if the system does not support the
                question.
        """
        no_wait = getattr(os, "RWF_NOWAIT", None)
        if no_wait is None:
            return None
        try:
            for first in (offset, offset + len(buffer) - 1):
                os.preadv(self._file.fileno(), [bytearray(1)], first, no_wait)
            return os.preadv(self._file.fileno(), [buffer], offset, no_wait) == len(buffer)
        except BlockingIOError:
            return False
        except OSError:
            return None


def read_ahead(path: Path, start: int, stop: int) -> None:
    """Start reading bytes [start, stop) of a file into the page cache, if the system supports this."""
    with contextlib.suppress(OSError), Path(path).open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), start, stop - start, os.POSIX_FADV_WILLNEED)


def read_numbers(name: str, info: TensorInfo, out: Tensor, first: int = 0) -> None:
    """Fill `out` with numbers of the tensor `name`, from number `first` on.

    Args:
        name: Name of the tensor, for messages.
        info: Place of the tensor in a file.
        out: Contiguous tensor of any float dtype.
        first: Index of the first number, in the flattened tensor.
    """
    stored = NUMBERS[info.dtype]
    start = first * stored.itemsize
    if stored == out.dtype:
        read_into(name, info, start, memoryview(out.view(-1).view(torch.uint8).numpy()))
        return
    for piece in out.view(-1).split(CHUNK_VALUES):
        values = torch.empty(len(piece), dtype=stored)
        read_into(name, info, start, memoryview(values.view(torch.uint8).numpy()))
        piece.copy_(values)
        start += len(values) * stored.itemsize


def read_rows(name: str, info: TensorInfo, start: int, stop: int) -> Tensor:
    """Rows [start, stop) of the tensor `name` in their stored dtype; FP8 numbers are returned as uint8."""
    values = torch.empty(stop - start, *info.shape[1:], dtype=_STORED[info.dtype])
    first = start * math.prod(info.shape[1:]) * values.itemsize
    read_into(name, info, first, memoryview(values.view(-1).view(torch.uint8).numpy()))
    return values


def check_stored(name: str, info: TensorInfo, shape: tuple[int, ...], dtypes: tuple[str, ...] = tuple(NUMBERS)) -> None:
    """Raise InputError unless a tensor of a safetensors file has a shape, one of some dtypes, and the size of both.

    Args:
        name: Name of the tensor, for messages.
        info: Place of the tensor in the file.
        shape: Shape that the tensor must have.
        dtypes: Dtypes that it may have.
    """
    where = f"tensor {name} in {info.path}"
    if info.shape != shape:
        raise InputError(f"{where} is {list(info.shape)}, its config asks for {list(shape)}")
    if info.dtype not in dtypes:
        raise InputError(f"{where} is {info.dtype}; supported: {', '.join(dtypes)}")
    if info.num_bytes != math.prod(shape) * _STORED[info.dtype].itemsize:
        raise InputError(f"{where} has {info.num_bytes:,} bytes, which do not fit its shape")
