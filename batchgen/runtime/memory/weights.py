"""A model's weights over the tiers: resident on the compute device, or brought there layer by layer in every sweep.

A layer's tensors come in groups ("qkv", "out", "up", "down"), each in one of the tiers. What is in host memory is
copied to an accelerator; what is on disk is read from a weight store, straight into the buffers in use where the host
computes. 4-bit matrices are dequantized once per layer and sweep, of experts on the host only those that tokens are
routed to; in small sweeps a GPU multiplies them as they are. Matrices of 8 bits, and block-quantized ones, are always
multiplied as they are, each in the format that it was found in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from batchgen.core.dtypes import INT4
from batchgen.core.kernel_choice import PROCESS_SET, KernelChoice
from batchgen.models.as_weights import as_weights
from batchgen.models.checkpoint import Checkpoint
from batchgen.models.config import ModelConfig
from batchgen.models.experts import MATRICES, split_experts
from batchgen.models.layouts import EMBEDDINGS, OUTPUT_MATRIX
from batchgen.models.state import CONVOLUTION, STATE_TENSORS
from batchgen.models.store.layout import WeightStore
from batchgen.models.tensor_files.block_packer import BlockPacker
from batchgen.ops import dispatch as ops
from batchgen.runtime.memory.dequantized_weights import DequantizedWeights
from batchgen.runtime.memory.disk_output_matrix import DiskOutputMatrix
from batchgen.runtime.memory.disk_weights import DiskWeights
from batchgen.runtime.memory.output_matrix import OutputMatrix
from batchgen.runtime.memory.tiers import Tiers
from batchgen.runtime.memory.weight_packing import Tensors, WeightPacker
from batchgen.runtime.memory.weight_slots import WeightSlots
from batchgen.runtime.memory.weight_source import SINKS, WeightSource
from batchgen.schedule.residency import WeightResidency

OUTPUT_BIAS = "lm_head.bias"


class Weights:
    """Tensors by name, as `models/checkpoint.py` names them: before the layers, of each layer, after the layers.

    Invariant: a buffer is touched by one Step at a time, as the schedule has it.

    Attributes:
        config: configuration of the model.
        residency: tiers and format of the weights.
        dtype: compute dtype.
        arenas: memories of the tiers.
        embeddings: tensors before the layers.
        head: tensors after the layers.
        per_layer: table of per-layer embeddings, whose rows are read from its file; None: the model has none.
        embedding_rows: table of the input embeddings, where its rows are read from its file; None: it is in memory.
    """

    def __init__(  # what is loaded, from where, and for whom
        self,
        config: ModelConfig,
        residency: WeightResidency,
        dtype: torch.dtype,
        *,
        checkpoint: Checkpoint | None = None,
        store: WeightStore | None = None,
        tiers: Tiers | None = None,
        dequantized_slots: int = 1,
        updates_on_host: bool = False,
        kernels: KernelChoice = PROCESS_SET,
        on_layer: Callable[[int, int], None] | None = None,
    ) -> None:
        """Load what is resident, and make buffers for what passes through.

        Args:
            config: Configuration of the model.
            residency: Tiers and format of the weights.
            dtype: Compute dtype.
            checkpoint: Checkpoint that resident weights come from, read layer by layer, and freed matrix by matrix, so
                that memory peaks about one matrix above the result.
            store: Weight store of `residency.weight_format`; needed for weights of int4 and those on disk, and used for
                all if given.
            tiers: Memories of the tiers; None: host memory alone.
            dequantized_slots: Layers whose dequantized 4-bit weights are in use at once.
            updates_on_host: Whether the CPU updates states for an accelerator.
            kernels: Instruction set of each shape on the CPU.
            on_layer: Function that is called with (done, total) after each layer.

        Raises:
            BatchgenError: Memory does not suffice, or a file is not what it was.
        """
        tiers = tiers or Tiers()
        if not ops.multiplies_packed(tiers.device):
            residency = replace(residency, packed_tokens=0)
        self.config, self.residency, self.dtype = config, residency, dtype
        self._compute_tier, self.arenas = tiers.compute_tier, tiers.arenas
        self._tiers = tiers
        self.source = WeightSource(config, residency, dtype, tiers.compute_tier, checkpoint, store)
        self.per_layer, self.embedding_rows = self.source.per_layer_rows(), self.source.embedding_rows()
        self._packer = WeightPacker(config, residency.weight_format, dtype, tiers, kernels)
        self.output_matrix = OutputMatrix(config, self._packer)
        self._disk_matrix = self._open_disk_matrix()
        # fp32 [layers, heads] by type of device: the host attends, too.
        self._sinks: dict[str, Tensor] = {}
        self._of_states: dict[int, Tensors] | None = {} if updates_on_host else None
        self._resident: list[Tensors] = []
        self._on_host: list[Tensors] = []  # what an accelerator is sent in every sweep
        with BlockPacker(dtype) as blocks:
            # First the ends, while there is memory for an output matrix twice: as it is read, and prepacked.
            self.embeddings, self.head = self._load_ends(tiers.device)
            if self.source.is_packed_end("head"):
                self.head = self._packer.pack(self.head, blocks)
            if self.source.is_packed_end("embeddings"):
                self.embeddings = self._packer.pack_table(self.embeddings, EMBEDDINGS, blocks)
            for j in range(config.num_layers):
                self._load_layer(j, blocks)
                if on_layer:
                    on_layer(j + 1, config.num_layers)
        away = {g for groups in residency.layers for g, tier in groups.items() if tier != self._compute_tier}
        self.slots = WeightSlots(self.source.layers, away if tiers.links is not None else (), self.arenas["gpu"])
        self.disk = DiskWeights(config, residency, store, self.arenas["cpu"])
        num_dequantized = dequantized_slots if residency.weight_format == INT4 else 0
        self.dequantized = DequantizedWeights(config, dtype, num_dequantized, self.arenas[self._compute_tier])
        self._layers: dict[tuple[int, int | None, bool], Tensors] = {}  # once they have been asked for

    @property
    def embeds_on_device(self) -> bool:
        """Tell whether the input embeddings are in the compute device's memory."""
        return self.residency.tier_of_embeddings(self.config) == self._compute_tier

    @property
    def num_bytes(self) -> int:
        """Bytes held in memory, all tiers together, without buffers."""
        parts = [self.embeddings, *self._resident, *self._on_host, self.head]
        return sum(map(_bytes_of, parts))

    @property
    def disk_bytes_read(self) -> int:
        """Bytes read from disk since counts were reset."""
        return self.disk.num_read_bytes + (self._disk_matrix.num_read_bytes if self._disk_matrix else 0)

    def layer(self, layer: int, slot: int | None = None, *, expanded: bool = True) -> Tensors:
        """A layer's tensors on the compute device, once its Steps have brought them there.

        Args:
            layer: Number of the layer.
            slot: Buffer that its Steps have filled; None: all of its tensors are resident.
            expanded: Whether 4-bit matrices are those that have been dequantized, or as they are stored.
        """
        key = layer, slot, expanded
        if key not in self._layers:  # buffers stay where they are
            brought = as_weights(self.source.layers[layer], self._brought(layer, slot))
            tensors = {**self._resident[layer], **brought}
            if expanded:
                tensors |= self.dequantized.views(layer)
            if self._packer.splits_experts:
                tensors = split_experts(self.config, tensors, layer)
            self._layers[key] = {
                name: tensor if name == CONVOLUTION else self._packer.bind(tensor) for name, tensor in tensors.items()
            }
        return self._layers[key]

    def read(self, layer: int, slot: int) -> None:
        """Read what a layer has on disk into host memory. Raises BatchgenError, also where its checksums do not fit."""
        self.disk.read(layer, slot)

    def read_dense(self, layer: int, slot: int) -> None:
        """Read a layer, but only the experts that it will probably need. Raises BatchgenError.

        It has been read as a whole before.
        """
        self.disk.read_dense(layer, slot)

    def read_experts(self, layer: int, slot: int, experts: Sequence[int]) -> None:
        """Read those of these experts that have not been read since `read_dense`. Raises BatchgenError."""
        self.disk.read_experts(layer, slot, experts)

    def load(self, layer: int, slot: int) -> None:
        """Copy what is in host memory, or has been read there, to the accelerator."""
        target = self._brought(layer, slot)
        for name, tensor in {**self._on_host[layer], **self.disk.views(layer, slot)}.items():
            self._tiers.h2d.copy(target[name], tensor)

    def dequantize(self, layer: int, slot: int | None, *, experts: bool) -> None:
        """Dequantize the 4-bit matrices of a layer. experts: whether those of experts that are there are among them."""
        on_demand = self.disk.has_experts_on_demand(slot) or not experts
        left_out = MATRICES if self.config.has_experts(layer) and on_demand else ()
        self.dequantized.dequantize(layer, self._stored(layer, slot), left_out)

    def dequantize_experts(self, layer: int, slot: int | None, experts: Sequence[int]) -> None:
        """Dequantize the 4-bit matrices of some experts."""
        if self.dequantized.buffers:
            self.dequantized.dequantize_experts(layer, self._stored(layer, slot), experts)

    def embedding_rows_of(self, token_ids: np.ndarray) -> Tensor | None:
        """The rows of the input embeddings' table for tokens, where it is on disk; None: it is in memory.

        Args:
            token_ids: Token ids, int64 [tokens]; those of type t are raised by t * vocab_size.

        Raises:
            InputError: The file cannot be read, or was changed.
        """
        table = self.embedding_rows
        return None if table is None else table.rows(token_ids % self.config.vocab_size, self.dtype)

    def read_head(self, chunk: int, slot: int) -> None:
        """Read a chunk of the output matrix into host memory. Raises BatchgenError."""
        assert self._disk_matrix is not None, "the output matrix is in memory"
        self._disk_matrix.read(chunk, slot)

    def load_head(self, chunk: int, slot: int) -> None:
        """Copy a chunk of the output matrix to the accelerator."""
        self.output_matrix.load(self._logits_matrix(), chunk, slot, self._tiers.h2d)

    def head_bias(self, start: int, stop: int) -> Tensor | None:
        """The bias of rows [start, stop) of the output matrix; None: it has none."""
        if not self.config.head_bias:
            return None
        bias = self.head[OUTPUT_BIAS]
        assert isinstance(bias, Tensor)
        return bias[start:stop]

    def vocabulary_chunk(self, chunk: int, slot: int | None) -> tuple[int, ops.Weight]:
        """(first row, rows) of the output matrix on the compute device; the whole of it where it is resident."""
        if self._disk_matrix is not None:
            assert slot is not None, "a chunk needs a buffer"
            return self._disk_matrix.chunk(chunk, slot)
        return self.output_matrix.chunk(self._logits_matrix(), chunk, slot)

    def sinks(self, layer: int, device: torch.device) -> Tensor | None:
        """Attention sinks of a layer, fp32 [heads], in the memory of a device; None: the model has none."""
        return self._sinks[device.type][layer] if self._sinks else None

    def of_states(self, layer: int) -> Tensors:
        """The tensors of a state layer that the CPU updates states with for an accelerator, in host memory."""
        assert self._of_states is not None, "the accelerator updates all states"
        return self._of_states[layer]

    def reset_counts(self) -> None:
        """Count from now on."""
        self.disk.num_read_bytes = 0
        if self._disk_matrix is not None:
            self._disk_matrix.num_read_bytes = 0

    def close(self) -> None:
        """Close files, and let go of all memory. Counts stay."""
        self.disk.close()
        for opened in (self.per_layer, self.embedding_rows, self._disk_matrix):
            if opened is not None:
                opened.close()
        self.dequantized.close()
        self.output_matrix.close()
        self.source.close()
        for held in (self._resident, self._on_host, self._layers, self.slots.buffers, self._sinks, self._of_states):
            if held is not None:
                held.clear()
        del self.embeddings, self.head

    def _load_layer(self, layer: int, blocks: BlockPacker) -> None:
        """Load what a layer has in memory: prepacked on the compute device, as it is stored in host memory."""
        in_memory = {group: tier for group, tier in self.residency.layers[layer].items() if tier != "disk"}
        groups = self.source.groups(layer, in_memory)
        if self._of_states is not None and self.config.has_state(layer):
            mixing = groups["qkv"] if "qkv" in groups else self.source.groups(layer, ["qkv"])["qkv"]
            self._of_states[layer] = {name: mixing[name].clone() for name in STATE_TENSORS if name in mixing}
        resident: Tensors = {}
        on_host: Tensors = {}
        for group, tier in in_memory.items():
            tensors = self.arenas[tier].keep(groups.pop(group), "the weights")
            if tier == self._compute_tier:
                weights = as_weights(self.source.layers[layer], tensors)
                tensors.clear()
                resident |= self._packer.pack_layer(weights, layer, blocks)
            else:
                on_host |= tensors
        self._resident.append(resident)
        self._on_host.append(on_host)

    def _load_ends(self, device: torch.device) -> tuple[Tensors, Tensors]:
        """Embeddings and head, and buffers for the output matrix where it comes over in chunks."""
        config, source = self.config, self.source
        embeddings = source.embeddings() if config.has_embeddings else {}
        head = source.head() if config.has_head else source.sinks() if config.sinks else {}
        embeddings_tier, head_tier = map(_in_memory, (self.residency.tier_of_embeddings(config), self.residency.head))
        embeddings = self.arenas[embeddings_tier].keep(embeddings, "the embeddings")
        self.arenas[head_tier].take(sum(t.nbytes for t in head.values()), "the output matrix")
        if config.sinks:
            of_model = head[SINKS].to(torch.float32, copy=True).view(-1, config.num_heads)
            sinks = of_model[config.first_layer :][: config.num_layers]
            self._sinks = {place.type: sinks.to(place) for place in (torch.device("cpu"), device)}
        for name, tensor in head.items():  # small tensors lie where they are used
            tier = head_tier if name == OUTPUT_MATRIX else self._compute_tier
            head[name] = self.arenas[tier].memory.keep(tensor)
        brings_head = self._tiers.links is not None and self.residency.head != "gpu" and config.has_head
        if brings_head and not config.hidden_output:
            matrix = embeddings[EMBEDDINGS] if config.tied_embeddings else head[OUTPUT_MATRIX]
            self.output_matrix.make_buffers(matrix, self.arenas["gpu"])
        return as_weights(source.stored("embeddings", 0), embeddings), as_weights(source.stored("head", 0), head)

    def _open_disk_matrix(self) -> DiskOutputMatrix | None:
        """The output matrix on disk; None: it is in memory, or not here."""
        config, source = self.config, self.source
        if self.residency.head != "disk" or not config.has_head or config.hidden_output:
            return None
        assert source.store is not None, "weights on disk are in a weight store"
        tied = config.tied_embeddings
        file, name = (source.store.embeddings, EMBEDDINGS) if tied else (source.store.head, OUTPUT_MATRIX)
        stored = source.stored("embeddings" if tied else "head", 0)[name]
        return DiskOutputMatrix(file, source.verified_version(file), name, stored, self._packer, self.arenas["cpu"])

    def _logits_matrix(self) -> ops.Weight:
        return self.embeddings[EMBEDDINGS] if self.config.tied_embeddings else self.head[OUTPUT_MATRIX]

    def _stored(self, layer: int, slot: int | None) -> Tensors:
        """A layer's tensors on the compute device as they are stored."""
        return {**self._resident[layer], **self._brought(layer, slot)}

    def _brought(self, layer: int, slot: int | None) -> Tensors:
        """The tensors of a layer that have been brought to the compute device."""
        if self._tiers.links is None:
            return self.disk.views(layer, slot)
        if not self.slots.buffers:
            return {}
        return self.slots.views(layer, slot, [*self._on_host[layer], *self.disk.names(layer)])


def _in_memory(tier: str) -> str:
    """The tier of what lies beside a table: host memory, where the table is on disk."""
    return "cpu" if tier == "disk" else tier


def _bytes_of(tensors: Tensors) -> int:
    return sum(map(ops.weight_bytes, tensors.values()))
