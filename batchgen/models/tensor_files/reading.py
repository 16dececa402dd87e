"""Bytes and plain numbers of a tensor in a file, into memory that is there already."""

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
    """Bytes [start, start + count) of the tensor."""
    buffer = bytearray(count)
    read_into(name, info, start, memoryview(buffer))
    return buffer


def read_into(name: str, info: TensorInfo, start: int, buffer: memoryview) -> None:
    """Fill `buffer` with the tensor's bytes from `start` on. Raises InputError naming file and tensor."""
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
    """Raise InputError where a file is not the one whose header was read, or was written to since.

    It is called after reading.
    """
    if info.version is not None and any(version != info.version for version in versions):
        raise InputError(f"{info.path} was changed while it was read: run the same command again once it is whole")


def read_by_threads(name: str, info: TensorInfo, buffer: memoryview) -> None:
    """Fill `buffer` with the whole tensor, by several threads. Raises InputError naming file and tensor.

    One thread alone neither keeps a disk busy nor copies at memory speed. What is in the page cache comes from there.
    The rest goes around it, by direct I/O, and takes no memory for what is read once.
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
    """Memory of each thread's own."""

    def __init__(self) -> None:
        self._memory = memoryview(b"")

    def buffer(self, num_bytes: int) -> memoryview:
        """Memory of this thread for `SharedFile.fetch`; what it held before is lost."""
        if len(self._memory) < num_bytes + ALIGNMENT:
            self._memory = direct_buffer(num_bytes)
        return self._memory


def direct_buffer(num_bytes: int) -> memoryview:
    """Memory in which `SharedFile.fetch` can put so many bytes, wherever in the file they begin."""
    return memoryview(aligned_buffer(num_bytes + ALIGNMENT))


class SharedFile:
    """A file, opened once, that several threads read.

    What is in the page cache comes from there, the rest around it by direct I/O.
    """

    def __init__(self, path: Path) -> None:
        """Open the file. Raises OSError."""
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
        """The file's version as each of its two descriptors has it now. Raises OSError."""
        return version_of(self._file.fileno()), self._direct.version()

    def close(self) -> None:
        self._direct.close()
        self._file.close()

    def read(self, offset: int, buffer: memoryview, bounce: memoryview) -> bool:
        """Fill the buffer from a byte of the file on. Raises OSError.

        Args:
            offset: First byte.
            buffer: Memory to fill.
            bounce: Memory from `direct_buffer`, for as many bytes.

        Returns:
            False where this file system does neither, or the file ends too soon.
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
        """Bytes of the file, as a part of `bounce`. Raises OSError.

        Args:
            offset: First byte.
            num_bytes: Number of bytes.
            bounce: Memory from `direct_buffer`, for at least so many bytes.

        Returns:
            None where this file system does neither, or the file ends too soon.
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
        """Fill the buffer from the page cache; False: that has not all of it. None: it cannot be asked."""
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
    """Begin to bring bytes of a file into the page cache while others are worked on, where the system can."""
    with contextlib.suppress(OSError), Path(path).open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), start, stop - start, os.POSIX_FADV_WILLNEED)


def read_numbers(name: str, info: TensorInfo, out: Tensor, first: int = 0) -> None:
    """Fill `out`, contiguous and of any float dtype, with a tensor's numbers from the `first` on."""
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
    """Rows [start, stop) of a tensor as they are stored; numbers of 8 bits as bytes."""
    values = torch.empty(stop - start, *info.shape[1:], dtype=_STORED[info.dtype])
    first = start * math.prod(info.shape[1:]) * values.itemsize
    read_into(name, info, first, memoryview(values.view(-1).view(torch.uint8).numpy()))
    return values


def check_stored(name: str, info: TensorInfo, shape: tuple[int, ...], dtypes: tuple[str, ...] = tuple(NUMBERS)) -> None:
    """Raise InputError unless a tensor of safetensors has this shape, one of these dtypes, and bytes that fit them."""
    where = f"tensor {name} in {info.path}"
    if info.shape != shape:
        raise InputError(f"{where} is {list(info.shape)}, its config asks for {list(shape)}")
    if info.dtype not in dtypes:
        raise InputError(f"{where} is {info.dtype}; supported: {', '.join(dtypes)}")
    if info.num_bytes != math.prod(shape) * _STORED[info.dtype].itemsize:
        raise InputError(f"{where} has {info.num_bytes:,} bytes, which do not fit its shape")
