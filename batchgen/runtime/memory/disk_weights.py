"""Weights on disk: read from a weight store into buffers in host memory, whole layers or experts on demand."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from batchgen.core.direct_io import aligned
from batchgen.models.config import ModelConfig
from batchgen.models.store.layout import StoreFile, WeightStore
from batchgen.models.store.weight_store import verify, views
from batchgen.runtime.memory.expert_forecast import ExpertForecast
from batchgen.runtime.memory.expert_reads import ExpertReads, Stretch
from batchgen.runtime.memory.store_reader import Piece, StoreReader
from batchgen.runtime.memory.transfers import Arena
from batchgen.schedule.residency import WeightResidency
from batchgen.schedule.step_graph import WEIGHT_SLOTS


class DiskWeights:
    """The weights of a model that are on disk, and the buffers that they pass through.

    Invariant: a buffer is touched by one Step at a time, as the schedule has it.

    Attributes:
        num_read_bytes: bytes read since counts were reset.
    """

    def __init__(self, config: ModelConfig, residency: WeightResidency, store: WeightStore | None, host: Arena) -> None:
        """Open the files, and make the buffers.

        Args:
            config: Configuration of the model.
            residency: Tiers of the weights.
            store: Weight store; None: no weights are on disk.
            host: Memory for the buffers.

        Raises:
            BatchgenError: A file cannot be opened, or memory does not suffice.
        """
        self.num_read_bytes = 0
        self._num_experts = config.num_experts
        self._on_demand: dict[int, ExpertReads] = {}  # by slot, of layers whose experts are read on demand
        self._forecast = ExpertForecast(len(residency.layers), config.num_experts)
        self._readers: dict[int, StoreReader] = {}  # by layer
        self._views: dict[tuple[int, int | None], dict[str, Tensor]] = {}
        self._stretches: list[list[Stretch]] = []
        for layer, tiers in enumerate(residency.layers):
            stretches: list[Stretch] = []
            if "disk" in tiers.values():
                assert store is not None, "weights on disk are in a weight store"
                file = store.layers[config.first_layer + layer]
                self._readers[layer] = StoreReader(file)
                stretches = _stretches(file, [group for group in file.extents if tiers[group] == "disk"])
            self._stretches.append(stretches)
        size = max((s.stop for stretches in self._stretches for s in stretches), default=0)
        num_buffers = WEIGHT_SLOTS if size else 0
        self._buffers = [host.empty((aligned(size),), torch.uint8, "weights in transit") for _ in range(num_buffers)]

    def names(self, layer: int) -> list[str]:
        """Names of a layer's tensors that are on disk."""
        return [tensor.name for stretch in self._stretches[layer] for tensor in stretch.tensors]

    def views(self, layer: int, slot: int | None) -> dict[str, Tensor]:
        """A layer's tensors in a buffer, once they have been read there. slot: buffer; None: none is on disk."""
        if (layer, slot) not in self._views:  # the buffers stay where they are
            tensors: dict[str, Tensor] = {}
            for stretch in self._stretches[layer]:
                assert slot is not None, "what is on disk needs a buffer"
                for extent in stretch.extents:
                    tensors |= views(extent, self._buffers[slot][stretch.place_of(extent.offset) :])
            self._views[layer, slot] = tensors
        return self._views[layer, slot]

    def has_experts_on_demand(self, slot: int | None) -> bool:
        """Tell whether a buffer has a layer whose experts are read on demand."""
        return slot in self._on_demand

    def read(self, layer: int, slot: int) -> None:
        """Read a layer. Raises BatchgenError, also where its checksums do not fit."""
        reader, stretches, buffer = self._readers[layer], self._stretches[layer], self._buffers[slot]
        before = reader.version()
        for stretch in stretches:
            self.num_read_bytes += reader.fetch(buffer, [(stretch.file_offset, stretch.start, stretch.stop)])
        # Hashed when it is first read in a job, and again where the file was written to since.
        if not before == reader.version() == reader.verified:
            for stretch in stretches:
                _verify(stretch, buffer[stretch.start : stretch.stop])
            reader.verified = before
        self._on_demand.pop(slot, None)

    def read_dense(self, layer: int, slot: int) -> None:
        """Read a layer, which has been read as a whole before, with the experts alone that it will probably need.

        Raises:
            BatchgenError: It cannot be read.
        """
        reads = self._on_demand[slot] = ExpertReads(self._stretches[layer], self._num_experts)
        self._read_part(layer, slot, [*reads.dense(), *reads.experts(self._forecast.likely(layer))])

    def read_experts(self, layer: int, slot: int, experts: Sequence[int]) -> None:
        """Read those of these experts that have not been read since `read_dense`. Raises BatchgenError."""
        self._forecast.add(layer, experts)
        self._read_part(layer, slot, self._on_demand[slot].experts(experts))

    def close(self) -> None:
        """Close the files, and let go of the buffers."""
        for reader in self._readers.values():
            reader.close()
        self._views.clear()
        self._buffers.clear()

    def _read_part(self, layer: int, slot: int, pieces: Sequence[Piece]) -> None:
        self.num_read_bytes += self._readers[layer].fetch_part(self._buffers[slot], pieces)


def _stretches(file: StoreFile, groups: Sequence[str]) -> list[Stretch]:
    """The groups as runs of neighbours in a file, one after the other in a buffer. groups: in the file's order."""
    stretches: list[Stretch] = []
    order = list(file.extents)
    for group in groups:
        if stretches and order.index(group) == order.index(stretches[-1].groups[-1]) + 1:
            last = stretches.pop()
            stretches.append(Stretch(file, (*last.groups, group), last.start))
        else:
            stretches.append(Stretch(file, (group,), stretches[-1].stop if stretches else 0))
    return stretches


def _verify(stretch: Stretch, part: Tensor) -> None:
    for extent in stretch.extents:
        verify(stretch.file, extent, part[stretch.place_of(extent.offset) - stretch.start :])
