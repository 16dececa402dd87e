"""A file with a pool of rows for each layer, which are read and written by direct I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from batchgen.core.direct_io import DirectFile, aligned
from batchgen.core.errors import BatchgenError
from batchgen.core.units import format_bytes
from batchgen.runtime.memory.transfers import as_buffer
from batchgen.schedule.staging import Run


class DiskPool:
    """Rows of each layer in a file without a name: nothing of it is left however the process ends.

    Attributes:
        row_bytes: Bytes of a row of each layer, multiples of the unit of direct I/O.
        size_bytes: Bytes of the file.
        num_read_bytes: Bytes read since counts were reset.
        num_written_bytes: Bytes written since then.
    """

    def __init__(self, row_bytes: Mapping[int, int], num_rows: int, offload_dir: Path, what: str) -> None:
        """Make the file.

        Args:
            row_bytes: Bytes of a row of each layer; they are rounded up to the unit of direct I/O.
            num_rows: Rows of each layer.
            offload_dir: Directory of the file.
            what: Name for people of what it holds.

        Raises:
            BatchgenError: The disk does not take it.
        """
        self.row_bytes = {layer: aligned(size) for layer, size in row_bytes.items()}
        self._what = what
        self._starts: dict[int, int] = {}
        self.size_bytes = 0
        for layer, size in self.row_bytes.items():
            self._starts[layer] = self.size_bytes
            self.size_bytes += num_rows * size
        self.num_read_bytes = self.num_written_bytes = 0
        try:
            self._file = DirectFile(offload_dir, size_bytes=self.size_bytes)
        except OSError as error:
            raise BatchgenError(
                f"--offload-dir {offload_dir} does not take {format_bytes(self.size_bytes)} of {what}:"
                f" {error.strerror}; free space, name another, or give less --disk-memory"
            ) from error

    def read(self, layer: int, raw: Tensor, runs: Sequence[Run], first: int = 0) -> None:
        """Read runs of rows of a layer. Raises BatchgenError.

        Args:
            layer: The layer.
            raw: Buffer in host memory, uint8 [rows, bytes of a row].
            runs: Runs of rows: in the file from `block`, in the buffer from `staged`.
            first: Row of their `staged` numbers that the buffer begins with.
        """
        try:
            self.num_read_bytes += self._file.read(self._extents(layer, raw, runs, first))
        except OSError as error:
            raise self._failed("read", error) from error

    def write(self, layer: int, raw: Tensor, runs: Sequence[Run], first: int = 0) -> None:
        """Write runs of rows of a layer, as `read` reads them. Raises BatchgenError."""
        try:
            self.num_written_bytes += self._file.write(self._extents(layer, raw, runs, first))
        except OSError as error:
            raise self._failed("write", error) from error

    def reset_counts(self) -> None:
        self.num_read_bytes = self.num_written_bytes = 0

    def close(self) -> None:
        """Close the file. Counts stay."""
        self._file.close()

    def _extents(self, layer: int, raw: Tensor, runs: Sequence[Run], first: int) -> list[tuple[int, memoryview]]:
        size, buffer = self.row_bytes[layer], as_buffer(raw)
        start = self._starts[layer]
        return [(start + run.block * size, buffer[(run.staged - first) * size :][: run.count * size]) for run in runs]

    def _failed(self, verb: str, error: OSError) -> BatchgenError:
        return BatchgenError(
            f"cannot {verb} {self._what} at {self._file.path}: {error.strerror}: check the disk of --offload-dir; the"
            " same command goes on from here"
        )
