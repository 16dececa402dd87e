"""The output matrix in memory: whole on the compute device, or sent there in vocabulary chunks, one after the other."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from batchgen.core.plan import vocabulary_chunk_rows
from batchgen.models.config import ModelConfig
from batchgen.ops import dispatch as ops
from batchgen.ops.cpp import BlockWeight
from batchgen.runtime.memory.transfers import Arena, Link
from batchgen.runtime.memory.weight_packing import WeightPacker
from batchgen.schedule.step_graph import HEAD_SLOTS


class OutputMatrix:
    """The output matrix on its way to the compute device.

    Attributes:
        buffers: buffers on an accelerator, a vocabulary chunk in each; empty: the matrix is there as a whole.
    """

    def __init__(self, config: ModelConfig, packer: WeightPacker) -> None:
        """Have the matrix as a whole until buffers are made."""
        self._config, self._packer = config, packer
        self._chunk_rows = vocabulary_chunk_rows(config.vocab_size)
        self.buffers: list[Tensor] = []

    def make_buffers(self, matrix: Tensor, gpu: Arena) -> None:
        """Make buffers for chunks of a matrix that is stored elsewhere. Raises BatchgenError where memory is short."""
        shape = self._chunk_rows, matrix.shape[1]
        self.buffers = [gpu.empty(shape, matrix.dtype, "the output matrix in transit") for _ in range(HEAD_SLOTS)]

    def load(self, matrix: ops.Weight, chunk: int, slot: int, h2d: Link) -> None:
        """Copy a chunk of the matrix to the accelerator."""
        assert not isinstance(matrix, ops.SplitWeight), "an output matrix is in one part"
        data = matrix if isinstance(matrix, Tensor) else matrix.data
        rows = data[chunk * self._chunk_rows : (chunk + 1) * self._chunk_rows]
        h2d.copy(self.buffers[slot][: len(rows)], rows)

    def chunk(self, matrix: ops.Weight, chunk: int, slot: int | None) -> tuple[int, ops.Weight]:
        """(first row, rows) of a vocabulary chunk on the compute device; the whole of the matrix where it is there."""
        config, buffers = self._config, self.buffers
        whole = (config.vocab_size, config.embed_size)  # which its chunks run as
        if not buffers:
            return 0, self._packer.bind(matrix, whole)
        assert slot is not None, "a chunk needs a buffer"
        start = chunk * self._chunk_rows
        rows = buffers[slot][: max(0, min(start + self._chunk_rows, config.vocab_size) - start)]
        part = replace(matrix, data=rows) if isinstance(matrix, BlockWeight) else rows
        return start, self._packer.bind(part, whole)

    def close(self) -> None:
        """Let go of the buffers."""
        self.buffers.clear()
