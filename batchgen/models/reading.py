"""Bytes and plain numbers of a tensor in a file, into memory that is there already."""

from __future__ import annotations

import contextlib
import math
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from batchgen.core.direct_io import ALIGNMENT, DirectFile, aligned, aligned_buffer
from batchgen.core.errors import InputError
from batchgen.models.headers import TensorInfo

# Of safetensors: numbers, and what codes are stored in.
NUMBERS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_STORED = {**NUMBERS, "I64": torch.int64, "I32": torch.int32, "U8": torch.uint8, "F8_E4M3": torch.uint8}
CHUNK_VALUES = 1 << 20  # values converted at a time
_PIECE_BYTES, _READERS = 4 << 20, 4  # of a tensor that several threads read


def read_bytes(name: str, info: TensorInfo, start: int, count: int) -> bytearray:
    """So many of the tensor's bytes, from `start` on."""
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
    except OSError as error:
        raise InputError(f"cannot read tensor {name} from {info.path}: {error.strerror}") from error


def read_by_threads(name: str, info: TensorInfo, buffer: memoryview) -> None:
    """As `read_into` of the whole tensor, by several threads: one alone neither keeps a disk busy nor copies at memory speed.

    What is in the page cache comes from there. The rest passes it by, which takes no memory for what is read once.
    """
    starts = range(0, len(buffer), _PIECE_BYTES)
    if len(starts) < 2:
        return read_into(name, info, 0, buffer)
    try:
        with contextlib.closing(DirectFile(info.path)) as direct, ThreadPoolExecutor(_READERS) as readers:
            pieces = [(start, buffer[start : start + _PIECE_BYTES]) for start in starts]
            passing = threading.local()
            list(readers.map(lambda piece: _read_piece(name, info, direct, passing, *piece), pieces))
    except OSError as error:
        raise InputError(f"cannot read tensor {name} from {info.path}: {error.strerror}") from error


def _read_piece(
    name: str, info: TensorInfo, direct: DirectFile, passing: threading.local, start: int, buffer: memoryview
) -> None:
    """passing: has the thread's own memory that a disk can write to."""
    first = info.offset + start
    if _read_cached(info.path, first, buffer):
        return
    if not hasattr(passing, "memory"):
        passing.memory = memoryview(aligned_buffer(_PIECE_BYTES + ALIGNMENT))
    skipped = first % ALIGNMENT
    stop = skipped + len(buffer)
    if direct.read([(first - skipped, passing.memory[: aligned(stop)])]) < stop:
        raise InputError(f"{info.path} ends within tensor {name}: fetch it again")
    buffer[:] = passing.memory[skipped:stop]


def _read_cached(path: str | Path, offset: int, buffer: memoryview) -> bool:
    """Fill the buffer from the page cache; False where it does not have all of it, or cannot tell."""
    with Path(path).open("rb", buffering=0) as file, contextlib.suppress(OSError):
        # Being asked for pages that it does not have, the system begins to read them: no more than these few.
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        for first in (offset, offset + len(buffer) - 1):
            os.preadv(file.fileno(), [bytearray(1)], first, os.RWF_NOWAIT)
        return os.preadv(file.fileno(), [buffer], offset, os.RWF_NOWAIT) == len(buffer)
    return False


def read_ahead(path: Path, start: int, stop: int) -> None:
    """Have the system bring bytes of a file into its page cache while others are worked on; not where it cannot."""
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
    """Raise InputError unless a tensor of safetensors has this shape and one of these dtypes, and bytes that fit them."""
    where = f"tensor {name} in {info.path}"
    if info.shape != shape:
        raise InputError(f"{where} is {list(info.shape)}, its config asks for {list(shape)}")
    if info.dtype not in dtypes:
        raise InputError(f"{where} is {info.dtype}; supported: {', '.join(dtypes)}")
    if info.num_bytes != math.prod(shape) * _STORED[info.dtype].itemsize:
        raise InputError(f"{where} has {info.num_bytes:,} bytes, which do not fit its shape")
