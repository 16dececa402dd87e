"""Reads of a layer's file: all of it, or first what all tokens need, and then the experts that some are routed to.

Rows of one expert lie together in each tensor, though not on pages of their own, as direct I/O wants them. The buffer
is laid out like the file, so pages at the edges of what is wanted may be read too, and no page twice. Arithmetic only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from batchgen.core.direct_io import ALIGNMENT
from batchgen.models.experts import is_of_experts
from batchgen.models.store.layout import Extent, StoredTensor, StoreFile
from batchgen.runtime.memory.store_reader import Piece


@dataclass(frozen=True)
class Stretch:
    """Neighbouring groups of a store's file, which lie in a buffer from byte `start` on as they lie in the file."""

    file: StoreFile
    groups: tuple[str, ...]
    start: int

    @property
    def extents(self) -> list[Extent]:
        return [self.file.extents[group] for group in self.groups]

    @property
    def tensors(self) -> Iterator[StoredTensor]:
        return (tensor for extent in self.extents for tensor in extent.tensors)

    @property
    def file_offset(self) -> int:
        return self.extents[0].offset

    @property
    def stop(self) -> int:
        return self.start + sum(extent.num_bytes for extent in self.extents)

    def place_of(self, offset: int) -> int:
        """The place of a byte of the file in the buffer."""
        return self.start + offset - self.file_offset


class ExpertReads:
    """One reading of a layer whose experts are read on demand.

    Invariant: `_held` are the pages of the buffer that have been asked for.
    """

    def __init__(self, stretches: Sequence[Stretch], num_experts: int) -> None:
        """Begin a reading of which nothing has been asked for.

        Args:
            stretches: All that is on disk of a layer with experts.
            num_experts: Experts of the layer.
        """
        self._stretches, self._num_experts = stretches, num_experts
        self._held = np.zeros(max(stretch.stop for stretch in stretches) // ALIGNMENT, dtype=bool)

    def dense(self) -> list[Piece]:
        """Pieces to read of all tensors but the experts'."""
        wanted = [
            (stretch.place_of(tensor.offset), tensor.num_bytes)
            for stretch in self._stretches
            for tensor in stretch.tensors
            if not is_of_experts(tensor.name)
        ]
        return self._not_held(wanted)

    def experts(self, experts: Sequence[int]) -> list[Piece]:
        """Pieces to read of these experts, but for what has been read."""
        wanted = [
            (stretch.place_of(tensor.offset) + expert * size, size)
            for stretch in self._stretches
            for tensor in stretch.tensors
            if is_of_experts(tensor.name)
            for size in (tensor.num_bytes // self._num_experts,)
            for expert in experts
        ]
        return self._not_held(wanted)

    def _not_held(self, wanted: Sequence[tuple[int, int]]) -> list[Piece]:
        """Pieces for the pages of these (first byte, bytes) of the buffer, which are held from now on."""
        missing = np.zeros_like(self._held)
        for first, size in wanted:
            missing[first // ALIGNMENT : -(-(first + size) // ALIGNMENT)] = True
        missing &= ~self._held
        self._held |= missing
        return [piece for stretch in self._stretches for piece in _pieces(stretch, missing)]


def _pieces(stretch: Stretch, pages: np.ndarray) -> Iterator[Piece]:
    """Runs of the pages that are the stretch's."""
    first = stretch.start // ALIGNMENT
    edges = np.flatnonzero(np.diff(pages[first : stretch.stop // ALIGNMENT].astype(np.int8), prepend=0, append=0))
    for start, stop in (ALIGNMENT * (first + edges)).reshape(-1, 2).tolist():
        yield stretch.file_offset + start - stretch.start, start, stop
