"""Buffers on the compute device that 4-bit matrices are dequantized into, layer by layer."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from batchgen.models.config import ModelConfig
from batchgen.models.experts import MATRICES
from batchgen.models.layouts import is_quantized, layer_layout, tensor_shapes
from batchgen.ops import dispatch as ops
from batchgen.runtime.memory.transfers import Arena


class DequantizedWeights:
    """Buffers for the dequantized matrices of as many layers as are in use at once.

    Attributes:
        buffers: for each of these layers, a matrix for each name, as large as the largest that a layer has.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, num_layers: int, arena: Arena) -> None:
        """Make the buffers.

        Args:
            config: Configuration of the model.
            dtype: Compute dtype.
            num_layers: Layers that are in use at once; 0: no weights are dequantized.
            arena: Memory of the compute device.

        Raises:
            BatchgenError: Memory does not suffice.
        """
        self._config = config
        kinds = {config.kind_of(j): j for j in range(config.num_layers)}
        self._shapes = {
            kind: {n: s for n, s in tensor_shapes(layer_layout(config, j)).items() if is_quantized(n, s)}
            for kind, j in kinds.items()
        }
        largest: dict[str, tuple[int, ...]] = {}
        for shapes in self._shapes.values():
            for name, shape in shapes.items():
                largest[name] = max(shape, largest.get(name, shape), key=math.prod)
        self.buffers: list[dict[str, Tensor]] = [
            {name: arena.empty(shape, dtype, "expanded weights") for name, shape in largest.items()}
            for _ in range(num_layers)
        ]

    def views(self, layer: int) -> dict[str, Tensor]:
        """A layer's matrices, once they have been dequantized."""
        if not self.buffers:
            return {}
        buffers = self.buffers[layer % len(self.buffers)]
        shapes = self._shapes[self._config.kind_of(layer)]
        return {name: _first_of(buffers[name], shape) for name, shape in shapes.items()}

    def dequantize(self, layer: int, stored: Mapping[str, Tensor], left_out: Collection[str]) -> None:
        """Dequantize a layer's matrices, all but some. stored: its tensors as they are stored."""
        for name, target in self.views(layer).items():
            if name not in left_out:
                ops.dequantize(stored[name], target)

    def dequantize_experts(self, layer: int, stored: Mapping[str, Tensor], experts: Sequence[int]) -> None:
        """Dequantize the matrices of some experts of a layer. stored: its tensors as they are stored."""
        targets, count = self.views(layer), self._config.num_experts
        for name in MATRICES:
            for expert, (packed, target) in enumerate(
                zip(stored[name].chunk(count), targets[name].chunk(count), strict=True)
            ):
                if expert in experts:
                    ops.dequantize(packed, target)

    def close(self) -> None:
        """Let go of the buffers."""
        self.buffers.clear()


def _first_of(buffer: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A tensor in the first part of a buffer that may be larger."""
    return buffer if buffer.shape == shape else buffer.view(-1)[: math.prod(shape)].view(shape)
