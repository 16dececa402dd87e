"""Prepacking of block-quantized rows while they are read from a file, without memory for the rows themselves.

Each thread reads a piece of a matrix into a buffer of its own and prepacks it while it is in the core's cache. Only the
memory of the result grows. There are more threads than cores, up to a limit, so that some wait for the disk while
others prepack.
"""

from __future__ import annotations

import math
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from batchgen.core.direct_io import aligned_buffer
from batchgen.core.errors import InputError
from batchgen.models.tensor_files.headers import TensorInfo
from batchgen.models.tensor_files.reading import OfThread, SharedFile, check_version, read_into
from batchgen.models.tensor_files.rows_in_file import FilePart, RowsInFile
from batchgen.ops import cpp as kernels

_PIECE_BYTES = 2 << 20  # packed at once by a thread
_PENDING = 64  # pieces: an error is told, and progress, before much more has been asked for
_WAITING, _MOST_THREADS = 2, 16  # threads beyond those that compute, and of all
_MEMORY_BYTES = 64 << 20  # asked for at once: small matrices are in huge pages too
_ALIGNMENT = 64


class BlockPacker:
    """A context manager that prepacks block-quantized matrices in background threads.

    The matrices are complete when the `with` block has ended without an error.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        """Create a packer for products in compute dtype `dtype`. No file is opened."""
        self._dtype = dtype
        self._threads: ThreadPoolExecutor | None = None
        self._files: dict[Path, tuple[SharedFile, TensorInfo]] = {}  # with a tensor that is read from it
        self._pending: deque[Future[None]] = deque()
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._bounce, self._rows = OfThread(), OfThread()

    def __enter__(self) -> BlockPacker:
        return self

    def __exit__(self, failed: type[BaseException] | None, *error: object) -> None:
        try:
            self._wait(0 if failed is None else len(self._pending))
        finally:
            try:
                if self._threads is not None:
                    self._threads.shutdown(cancel_futures=True)
                if failed is None:
                    for file, info in self._files.values():
                        check_version(info, *file.versions())
            finally:
                for file, _ in self._files.values():
                    file.close()

    def pack(self, weight: kernels.BlockWeight, *, gated: bool = False) -> kernels.PackedWeight:
        """Start prepacking a block-quantized weight whose rows are in files.

        Args:
            weight: The weight; its data are `RowsInFile`.
            gated: Whether it is for a gated activation.

        Returns:
            The prepacked weight, whose panels are filled in the background.

        Raises:
            InputError: The rows of this or of an earlier weight cannot be read.
        """
        rows = weight.data
        for part in rows.parts:
            self._open(part)
        memory = self._take(kernels.block_panels_bytes(weight, gated=gated))
        panels = kernels.block_panels(weight, self._dtype, memory, gated=gated)
        if self._threads is None:
            count = min(_MOST_THREADS, kernels.num_threads() + _WAITING)
            self._threads = ThreadPoolExecutor(count, "batchgen-pack", initializer=kernels.run_alone)
        size = kernels.rows_of_panel(panels.isa)
        whole = math.lcm(size, *(part.head_dim for part in rows.parts))
        step = max(1, _PIECE_BYTES // (whole * rows.row_bytes)) * (whole // size)
        for first in range(0, len(memory) // (size * rows.row_bytes), step):
            self._wait(_PENDING)
            self._pending.append(self._threads.submit(self._pack, panels, rows, first, step, size))
        return panels

    def _take(self, num_bytes: int) -> Tensor:
        if len(self._memory) < num_bytes:
            self._memory = torch.frombuffer(aligned_buffer(max(num_bytes, _MEMORY_BYTES)), dtype=torch.uint8)
        taken, self._memory = self._memory[:num_bytes], self._memory[-(-num_bytes // _ALIGNMENT) * _ALIGNMENT :]
        return taken

    def _open(self, part: FilePart) -> None:
        if part.info.path not in self._files:
            try:
                self._files[part.info.path] = SharedFile(part.info.path), part.info
            except OSError as error:
                raise _unreadable(part, error) from error

    def _wait(self, most: int) -> None:
        """Wait until at most `most` pieces are unfinished. An exception of a finished piece is raised again."""
        while len(self._pending) > most:
            self._pending.popleft().result()

    # On the threads.

    def _pack(self, panels: kernels.PackedWeight, rows: RowsInFile, first: int, count: int, size: int) -> None:
        """Read the rows of some panels, and prepack them.

        Args:
            panels: The prepacked weight.
            rows: All rows of the weight.
            first: Number of the first panel.
            count: Largest number of panels.
            size: Number of rows in a panel.
        """
        if panels.gated:  # gates, and what they are multiplied with
            half, size = len(rows) // 2, size // 2
            start, stop = first * size, min(half, (first + count) * size)
            stretches = [*rows.stretches(start, stop), *rows.stretches(half + start, half + stop)]
        else:
            stretches = [*rows.stretches(first * size, min(len(rows), (first + count) * size))]
        kernels.fill_panels(panels, first, self._read(stretches, rows.row_bytes))

    def _read(self, stretches: list[tuple[FilePart, int, int]], row_bytes: int) -> np.ndarray:
        """Read ranges of rows, each of one tensor, into this thread's buffer, one after the other."""
        if len(stretches) == 1 and stretches[0][0].is_as_stored:
            return self._fetch(*stretches[0], row_bytes)
        count = sum(stop - start for _, start, stop in stretches)
        gathered = np.frombuffer(self._rows.buffer(count * row_bytes), np.uint8, count * row_bytes).reshape(count, -1)
        done = 0
        for part, start, stop in stretches:
            for first, last, order in part.reads(start, stop):
                target = gathered[done : done + (last - first if order is None else len(order))]
                stored = self._fetch(part, first, last, row_bytes)
                if order is None:
                    np.copyto(target, stored)
                else:
                    np.take(stored, order, axis=0, out=target, mode="clip")  # others than "clip" copy once more
                done += len(target)
        return gathered

    def _fetch(self, part: FilePart, start: int, stop: int, row_bytes: int) -> np.ndarray:
        """Read rows [start, stop) in the order of the file. They are valid until this thread's next call."""
        first, num_bytes = start * row_bytes, (stop - start) * row_bytes
        bounce = self._bounce.buffer(num_bytes)
        try:
            fetched = self._files[part.info.path][0].fetch(part.info.offset + first, num_bytes, bounce)
        except OSError as error:
            raise _unreadable(part, error) from error
        if fetched is None:
            read_into(part.name, part.info, first, fetched := bounce[:num_bytes])
        return np.frombuffer(fetched, np.uint8).reshape(-1, row_bytes)


def _unreadable(part: FilePart, error: OSError) -> InputError:
    return InputError(f"cannot read tensor {part.name} from {part.info.path}: {error.strerror}")
