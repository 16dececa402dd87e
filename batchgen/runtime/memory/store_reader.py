"""Reads of one file of a weight store, of bytes that fit the store's checksums: of groups, parts, rows of a table."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from batchgen.core.direct_io import DirectFile
from batchgen.core.errors import BatchgenError
from batchgen.core.file_version import FileVersion
from batchgen.models.store.layout import StoreFile
from batchgen.models.store.weight_store import REPAIR, has_checksums, open_rows
from batchgen.runtime.memory.transfers import as_buffer

Piece = tuple[int, int, int]  # offset in the file; first byte in the buffer, and the one after the last


class StoreReader:
    """An open file of a weight store, which is read past the page cache.

    Attributes:
        verified: Version of the file whose bytes had the store's checksums; None: they were not looked at.
    """

    def __init__(self, file: StoreFile) -> None:
        """Open the file. Raises BatchgenError."""
        self.verified: FileVersion | None = None
        self._file = file
        try:
            self._direct = DirectFile(file.path)
        except OSError as error:
            raise BatchgenError(f"cannot read {file.path}: {error.strerror}: {REPAIR}") from error

    def version(self) -> FileVersion:
        """The version of the file now. Raises BatchgenError."""
        try:
            return self._direct.version()
        except OSError as error:
            raise self.unreadable(error) from error

    def fetch(self, buffer: Tensor, pieces: Sequence[Piece]) -> int:
        """Read pieces of the file, whose checksums the caller looks at; returns the bytes read.

        Args:
            buffer: Memory to fill, uint8, aligned for direct I/O.
            pieces: Offset in the file of each piece, and its place in the buffer.

        Raises:
            BatchgenError: The file cannot be read.
        """
        try:
            count = self._direct.read([(offset, as_buffer(buffer[start:stop])) for offset, start, stop in pieces])
        except OSError as error:
            raise self.unreadable(error) from error
        if count < sum(stop - start for _, start, stop in pieces):  # what it held before must not pass for weights
            raise BatchgenError(f"{self._file.path} is shorter than it was: {REPAIR}")
        return count

    def fetch_part(self, buffer: Tensor, pieces: Sequence[Piece]) -> int:
        """Read pieces that have no checksums of their own; returns the bytes read.

        Where the file was written to since its checksums were looked at, they are looked at again.

        Args:
            buffer: Memory to fill, uint8, aligned for direct I/O.
            pieces: Offset in the file of each piece, and its place in the buffer.

        Raises:
            BatchgenError: The file cannot be read, or does not have its checksums any more.
        """
        count = self.fetch(buffer, pieces)
        while not self.is_verified(self.version()):
            count += self.fetch(buffer, pieces)
        return count

    def is_verified(self, version: FileVersion) -> bool:
        """Tell whether what was read is of the version of the file that had the store's checksums.

        Where it is not, the checksums are looked at again; then it is to be read again.

        Args:
            version: Version of the file, after the read.

        Raises:
            BatchgenError: The file cannot be read, or does not have its checksums any more.
        """
        if version == self.verified:
            return True
        if self.version() != version or not self._has_checksums():
            raise BatchgenError(f"{self._file.path} was changed while the job ran: {REPAIR}")
        self.verified = version
        return False

    def verify(self) -> FileVersion:
        """Compare all of the file with its checksums; returns its version. Raises BatchgenError if they differ."""
        version = self.version()
        if not self._has_checksums():
            raise BatchgenError(f"{self._file.path} is damaged: it does not have its checksums: {REPAIR}")
        self.verified = version
        return version

    def close(self) -> None:
        """Close the file."""
        self._direct.close()

    def _has_checksums(self) -> bool:
        try:
            return has_checksums(self._file, self._direct)
        except OSError as error:
            raise self.unreadable(error) from error

    def unreadable(self, error: OSError) -> BatchgenError:
        """The error that the file cannot be read."""
        return BatchgenError(
            f"cannot read {self._file.path}: {error.strerror}: check the disk; the same command goes on from here"
        )


class StoreRows:
    """A table of a weight store, whose rows are read one by one, through the page cache."""

    def __init__(self, file: StoreFile, verified: FileVersion, name: str) -> None:
        """Open the table's file.

        Args:
            file: File of the weight store that has the table.
            verified: Version of the file that had its checksums.
            name: Name of the table in it.

        Raises:
            BatchgenError: The file cannot be opened, or was changed.
        """
        self._reader, self._table = StoreReader(file), open_rows(file, name)
        self._reader.verified = verified
        self._is_verified()

    def rows(self, indices: np.ndarray, dtype: torch.dtype) -> Tensor:
        """Some rows of the table, [len(indices), columns].

        Args:
            indices: Numbers of the rows, int64; they may repeat.
            dtype: Dtype of the result.

        Raises:
            BatchgenError: The file cannot be read, or does not have its checksums any more.
        """
        rows = self._table.rows(indices, dtype)
        while not self._is_verified():
            rows = self._table.rows(indices, dtype)
        return rows

    def close(self) -> None:
        """Close the file."""
        self._table.close()
        self._reader.close()

    def _is_verified(self) -> bool:
        try:
            version = self._table.version()
        except OSError as error:
            raise self._reader.unreadable(error) from error
        return self._reader.is_verified(version)
