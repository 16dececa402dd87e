"""The output matrix on disk: read in vocabulary chunks, one after the other, into buffers of the host, which computes.

Where the input embeddings are the same matrix, the rows of a sweep's tokens are read from its file too.
"""

from __future__ import annotations

import torch

from batchgen.core.direct_io import ALIGNMENT, aligned
from batchgen.core.file_version import FileVersion
from batchgen.core.plan import vocabulary_chunk_bytes, vocabulary_chunk_rows
from batchgen.models.as_weights import as_weights
from batchgen.models.layouts import Stored
from batchgen.models.store.layout import Extent, StoredTensor, StoreFile, find_tensor
from batchgen.models.store.weight_store import views
from batchgen.ops import dispatch as ops
from batchgen.runtime.memory.store_reader import StoreReader
from batchgen.runtime.memory.transfers import Arena
from batchgen.runtime.memory.weight_packing import WeightPacker
from batchgen.schedule.step_graph import HEAD_SLOTS


class DiskOutputMatrix:
    """The output matrix, of which two vocabulary chunks are in memory.

    Invariant: a buffer is touched by one Step at a time, as the schedule has it.

    Attributes:
        num_read_bytes: Bytes read since counts were reset.
    """

    def __init__(  # what is read, and for whom
        self, file: StoreFile, verified: FileVersion, name: str, stored: Stored, packer: WeightPacker, host: Arena
    ) -> None:
        """Open the matrix's file, and make the buffers.

        Args:
            file: File of the weight store that has the matrix.
            verified: Version of the file that had its checksums.
            name: Name of the matrix in it.
            stored: Form in which it is stored.
            packer: Makes chunks ready for the kernels that multiply them.
            host: Memory for the buffers.

        Raises:
            BatchgenError: The file cannot be opened, or memory does not suffice.
        """
        self.num_read_bytes = 0
        self._name, self._stored, self._packer = name, stored, packer
        self._tensor = find_tensor(file, name)
        self._num_rows = self._tensor.shape[0]
        self._row_bytes = self._tensor.num_bytes // self._num_rows
        self._chunk_rows = vocabulary_chunk_rows(self._num_rows)
        self._reader = StoreReader(file)
        self._reader.verified = verified
        most = vocabulary_chunk_bytes(self._num_rows, self._row_bytes, from_disk=True)
        self._buffers = [host.empty((most,), torch.uint8, "the output matrix in transit") for _ in range(HEAD_SLOTS)]

    def read(self, chunk: int, slot: int) -> None:
        """Read a vocabulary chunk into a buffer. Raises BatchgenError."""
        first, last = self._rows(chunk)
        if first == last:
            return
        start, stop = self._offset(first), self._offset(last)
        page = start // ALIGNMENT * ALIGNMENT
        pieces = [(page, 0, aligned(stop - page))]
        self.num_read_bytes += self._reader.fetch_part(self._buffers[slot], pieces)

    def chunk(self, chunk: int, slot: int) -> tuple[int, ops.Weight]:
        """(first row, rows) of a vocabulary chunk that has been read into a buffer."""
        first, last = self._rows(chunk)
        tensor, offset = self._tensor, self._offset(first)
        most = self._chunk_rows
        part = StoredTensor(tensor.name, tensor.dtype, (most, tensor.shape[1]), offset, most * self._row_bytes)
        place = Extent(self._name, offset // ALIGNMENT * ALIGNMENT, part.num_bytes, None, (part,))
        rows = views(place, self._buffers[slot])[self._name][: last - first]
        (weight,) = as_weights({self._name: self._stored}, {self._name: rows}).values()
        return first, self._packer.bind(weight, (self._num_rows, tensor.shape[1]))

    def close(self) -> None:
        """Close the file, and let go of the buffers."""
        self._reader.close()
        self._buffers.clear()

    def _rows(self, chunk: int) -> tuple[int, int]:
        """The first row of a chunk, and the one after its last."""
        return min(chunk * self._chunk_rows, self._num_rows), min((chunk + 1) * self._chunk_rows, self._num_rows)

    def _offset(self, row: int) -> int:
        return self._tensor.offset + row * self._row_bytes
