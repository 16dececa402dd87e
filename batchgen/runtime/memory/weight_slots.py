"""Buffers on an accelerator that weights are copied into in every sweep, a layer in each."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from batchgen.core.dtypes import INT8
from batchgen.models.layouts import Stored
from batchgen.models.store.layout import layer_groups
from batchgen.runtime.memory.transfers import Arena
from batchgen.schedule.step_graph import WEIGHT_SLOTS


class WeightSlots:
    """Buffers on an accelerator for the groups of tensors that any layer has elsewhere.

    Attributes:
        buffers: for each slot, bytes for each tensor, as many as the largest that a layer has.
    """

    def __init__(self, layers: Sequence[Mapping[str, Stored]], groups: Collection[str], gpu: Arena) -> None:
        """Make the buffers.

        Args:
            layers: For each layer, the stored form of its tensors.
            groups: Groups that any layer has elsewhere.
            gpu: Memory of the accelerator.

        Raises:
            BatchgenError: Memory does not suffice.
        """
        self._layers = layers
        largest: dict[str, int] = {}  # bytes
        for stored in layers:
            of_groups = layer_groups(stored)
            for name, tensor in ((n, t) for group in of_groups if group in groups for n, t in of_groups[group].items()):
                largest[name] = max(tensor.num_bytes, largest.get(name, 0))
        self.buffers: list[dict[str, Tensor]] = [
            {name: gpu.empty((size,), torch.uint8, "weights in transit") for name, size in largest.items()}
            for _ in range(WEIGHT_SLOTS if groups else 0)
        ]

    def views(self, layer: int, slot: int | None, names: Iterable[str]) -> dict[str, Tensor]:
        """These tensors of a layer in a slot, in the form that they are stored in."""
        tensors: dict[str, Tensor] = {}
        for name in names:
            assert slot is not None, "what is not resident needs a buffer"
            tensors[name] = _in_buffer(self.buffers[slot][name], self._layers[layer][name])
        return tensors


def _in_buffer(buffer: Tensor, stored: Stored) -> Tensor:
    """A tensor as it is stored, in the first bytes of a buffer."""
    kind = torch.int8 if stored.dtype == INT8 else torch.uint8 if stored.is_packed else getattr(torch, stored.dtype)
    return buffer[: stored.num_bytes].view(kind).view(stored.stored_shape)
