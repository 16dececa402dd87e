"""Rows of a table in a file, read when they are asked for: the table of per-layer embeddings is never held whole."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from batchgen.core.errors import InputError
from batchgen.core.file_version import FileVersion, version_of
from batchgen.models.tensor_files.headers import TensorInfo
from batchgen.models.tensor_files.reading import NUMBERS, check_version

# (stored rows, uint8 [rows, bytes of a row]; numbers to fill, [rows, columns])
Unpack = Callable[[Tensor, Tensor], None]


class TableRows(Protocol):
    """A table whose rows are read one by one."""

    def rows(self, indices: np.ndarray, dtype: torch.dtype) -> Tensor:
        """Some rows of the table, [len(indices), columns].

        Args:
            indices: Numbers of the rows, int64; they may repeat.
            dtype: Dtype of the result.

        Raises:
            InputError: The file cannot be read, or was changed.
        """

    def stored_rows(self, first: int, count: int) -> Tensor:
        """Consecutive rows as they are stored, uint8 [count, bytes of a row]. Raises InputError."""

    def close(self) -> None:
        """Close the file."""


class FileRows:
    """A table in a file, open while its rows are asked for."""

    def __init__(self, name: str, info: TensorInfo, unpack: Unpack, repair: str = "fetch it again") -> None:
        """Note where the table is; the file is opened when its version or the first row is asked for.

        Args:
            name: Name of the table, for messages.
            info: Place of the table, whose shape is [rows, columns].
            unpack: Function that turns stored rows into numbers.
            repair: Advice about a file that is short or cannot be read, for messages.
        """
        self._name, self._info, self._unpack, self._repair = name, info, unpack, repair
        self._num_rows, self._columns = info.shape
        self._row_bytes = info.num_bytes // self._num_rows
        self._descriptor: int | None = None

    def rows(self, indices: np.ndarray, dtype: torch.dtype) -> Tensor:
        distinct, place = np.unique(indices, return_inverse=True)
        numbers = (
            _host_memory(len(distinct) * self._columns * dtype.itemsize).view(dtype).view(len(distinct), self._columns)
        )
        if len(distinct):
            self._unpack(self._read(list(_runs(distinct))), numbers)
        return numbers[torch.from_numpy(place)]

    def stored_rows(self, first: int, count: int) -> Tensor:
        return self._read([(first, count)])

    def version(self) -> FileVersion:
        """The version of the open file now. Raises OSError."""
        return version_of(self._open())

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = None

    def _read(self, runs: list[tuple[int, int]]) -> Tensor:
        """Runs of rows, each with its first row and its number of rows, one after the other."""
        num_rows = sum(count for _, count in runs)
        packed = _host_memory(num_rows * self._row_bytes).view(num_rows, self._row_bytes)
        target, info = memoryview(packed.view(-1).numpy()), self._info
        try:
            descriptor = self._open()
            places = [(info.offset + first * self._row_bytes, count * self._row_bytes) for first, count in runs]
            for offset, size in places:  # so that the disk has them all before it at once
                os.posix_fadvise(descriptor, offset, size, os.POSIX_FADV_WILLNEED)
            for offset, size in places:
                if not _fill(descriptor, offset, target[:size]):
                    raise InputError(f"{info.path} ends within tensor {self._name}: {self._repair}")
                target = target[size:]
            check_version(info, version_of(descriptor))
        except OSError as error:
            raise InputError(
                f"cannot read tensor {self._name} from {info.path}: {error.strerror}: check the disk, or {self._repair}"
            ) from error
        return packed

    def _open(self) -> int:
        if self._descriptor is None:
            self._descriptor = os.open(self._info.path, os.O_RDONLY | os.O_CLOEXEC)
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        return self._descriptor


def _host_memory(num_bytes: int) -> Tensor:
    """Memory of the host, uint8 [num_bytes], whichever device computes meanwhile."""
    return torch.from_numpy(np.empty(max(1, num_bytes), dtype=np.uint8))[:num_bytes]


def unpack_numbers(dtype: str) -> Unpack:
    """A function that converts stored rows of numbers.

    Args:
        dtype: Dtype of the numbers in the spelling of safetensors: "BF16".
    """

    def unpack(stored: Tensor, numbers: Tensor) -> None:
        numbers.copy_(stored.view(NUMBERS[dtype]))

    return unpack


def _fill(descriptor: int, offset: int, target: memoryview) -> bool:
    """Fill memory with bytes of a file; False: the file ends before."""
    while len(target):  # one call reads at most 2 GiB
        if not (count := os.preadv(descriptor, [target], offset)):
            return False
        offset, target = offset + count, target[count:]
    return True


def _runs(rows: np.ndarray) -> Iterator[tuple[int, int]]:
    """The runs of consecutive numbers among ascending ones: the first one of each, and their number."""
    breaks = np.flatnonzero(np.diff(rows) != 1) + 1
    for run in np.split(rows, breaks):
        yield int(run[0]), len(run)
