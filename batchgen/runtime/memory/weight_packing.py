"""Matrices made ready for the kernels that multiply them: prepacked, or bound to an instruction set."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from batchgen.core.direct_io import ALIGNMENT
from batchgen.core.dtypes import INT4
from batchgen.core.kernel_choice import KernelChoice
from batchgen.models.config import ModelConfig
from batchgen.models.experts import split_experts
from batchgen.models.layers import is_gated
from batchgen.models.state import CONVOLUTION
from batchgen.models.store.layout import TENSOR_ALIGNMENT
from batchgen.models.tensor_files.block_packer import BlockPacker
from batchgen.models.tensor_files.rows_in_file import RowsInFile
from batchgen.ops import dispatch as ops
from batchgen.ops.cpp import BlockWeight, BoundWeight
from batchgen.runtime.memory.tiers import Tiers

Tensors = dict[str, ops.Weight]


class WeightPacker:
    """Makes matrices ready for the kernels that multiply them.

    Attributes:
        tiers: tiers, with the device that computes.
    """

    def __init__(
        self, config: ModelConfig, weight_format: str, dtype: torch.dtype, tiers: Tiers, kernels: KernelChoice
    ) -> None:
        """Choose for a model.

        Args:
            config: Configuration of the model.
            weight_format: Stored format of its weights.
            dtype: Compute dtype.
            tiers: Tiers, with the device that computes.
            kernels: Instruction set of each shape on the CPU.
        """
        self.tiers = tiers
        self._config, self._dtype, self._kernels = config, dtype, kernels
        self._is_dequantized = weight_format == INT4

    @property
    def splits_experts(self) -> bool:
        """Tell whether experts are multiplied one by one; elsewhere kernels take the matrices of all together."""
        return self.tiers.device.type == "cpu"

    def pack_layer(self, tensors: Tensors, layer: int, blocks: BlockPacker) -> Tensors:
        """A layer's tensors, its experts split, with matrices prepacked; those of int4 are left as they are.

        Tensors are taken out of `tensors`, so that no more than one is in memory twice.
        """
        if self.splits_experts and not self._is_dequantized:
            split = split_experts(self._config, tensors, layer)
            tensors.clear()
            tensors = split
        return self.pack(tensors, blocks)

    def pack(self, tensors: Tensors, blocks: BlockPacker) -> Tensors:
        """Tensors with matrices prepacked.

        Tensors are taken out of `tensors`, so that no more than one is in memory twice.
        """
        return self._apart({name: self._packed(name, tensors.pop(name), blocks) for name in list(tensors)})

    def pack_table(self, embeddings: Tensors, table: str, blocks: BlockPacker) -> Tensors:
        """Embeddings with their token table prepacked; the table is also the output matrix.

        Embeddings are looked up in the prepacked table too. The table is taken out of `embeddings`.

        Args:
            embeddings: Tensors before the layers, by name.
            table: Name of the token table among them.
            blocks: Packs matrices whose rows are still in the file.
        """
        packed = self._packed(table, embeddings.pop(table), blocks)
        return self._apart({table: packed, **embeddings})

    def bind(self, weight: ops.Weight, shape: tuple[int, int] | None = None) -> ops.Weight:
        """A matrix that is not prepacked, bound to the instruction set of its shape.

        Args:
            weight: A tensor; what is no matrix comes back as it is.
            shape: Shape of the whole matrix that it is a part of; None: its own.
        """
        if isinstance(weight, ops.SplitWeight):
            return ops.SplitWeight(tuple(map(self.bind, weight.parts)))
        if isinstance(weight, BlockWeight):
            return self._bind_blocks(weight)
        return ops.bind_weight(weight, self._isa(shape or weight.shape, weight.dtype)) if _is_matrix(weight) else weight

    def _apart(self, weights: Tensors) -> Tensors:
        """The weights; those are copied that are views of a buffer a part of which nothing else uses any more.

        What is read together lies in one buffer, which is held as long as any view of it: a router that is left as it
        is would keep the experts as they were read, beside those that are prepacked.
        """
        if self.tiers.device.type != "cpu":
            return weights
        used: Counter[int] = Counter()
        padding = ALIGNMENT + TENSOR_ALIGNMENT * len(weights)  # between and after them

        def count(tensor: Tensor) -> Tensor:
            used[tensor.untyped_storage().data_ptr()] += tensor.nbytes
            return tensor

        def apart(tensor: Tensor) -> Tensor:
            buffer = tensor.untyped_storage()
            idle = buffer.nbytes() - used[buffer.data_ptr()]
            return tensor.clone() if idle >= padding else tensor

        for weight in weights.values():
            _with_tensors(weight, count)
        return {name: _with_tensors(weight, apart) for name, weight in weights.items()}

    def _bind_blocks(self, weight: BlockWeight) -> BlockWeight:
        dtype = str(self._dtype).removeprefix("torch.")
        return replace(weight, isa=self._kernels.blocks_isa(weight.weight_format, dtype))

    def _isa(self, shape: tuple[int, int], dtype: torch.dtype) -> str:
        return self._kernels.linear_isa(*shape, str(dtype).removeprefix("torch."))

    def _packed(self, name: str, weight: ops.Weight, blocks: BlockPacker) -> ops.Weight:
        if isinstance(weight, ops.SplitWeight):  # of which none is gated by itself
            return ops.SplitWeight(tuple(self._packed("", part, blocks) for part in weight.parts))
        if isinstance(weight, BlockWeight) and isinstance(weight.data, RowsInFile):
            return blocks.pack(self._bind_blocks(weight), gated=is_gated(name))
        if isinstance(weight, BlockWeight):
            return ops.pack_blocks(self._bind_blocks(weight), self._dtype, gated=is_gated(name))
        if not isinstance(weight, Tensor) or not _is_matrix(weight) or name == CONVOLUTION:
            return weight
        return ops.pack_weight(weight, gated=is_gated(name), isa=self._isa(weight.shape, weight.dtype))


def _with_tensors(weight: ops.Weight, change: Callable[[Tensor], Tensor]) -> ops.Weight:
    """A weight with another tensor in place of each that it has as it was read; one that is prepacked has none."""
    if isinstance(weight, ops.SplitWeight):
        return ops.SplitWeight(tuple(_with_tensors(part, change) for part in weight.parts))
    if isinstance(weight, BoundWeight | BlockWeight):
        return replace(weight, data=change(weight.data)) if isinstance(weight.data, Tensor) else weight
    return change(weight) if isinstance(weight, Tensor) else weight


def _is_matrix(weight: ops.Weight) -> bool:
    """Tell whether a weight is a matrix of numbers, or of rows of 8 bits; bytes are 4-bit rows or rows of a GGUF."""
    return isinstance(weight, Tensor) and weight.ndim == 2 and weight.dtype != torch.uint8
