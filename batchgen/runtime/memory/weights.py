"""A model's weights over the tiers: resident on the compute device, or brought there layer by layer in every sweep.

A layer's tensors come in groups ("qkv", "out", "up", "down"), each in one of the tiers. What is in host memory is
copied to an accelerator; what is on disk is read from a weight store, straight into the buffers in use where the host
computes. 4-bit matrices are dequantized once per layer and sweep, of experts on the host only those that tokens are routed to;
matrices of 8 bits, and rows of blocks, are multiplied as they are, each in the format that it was found in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from batchgen.core.direct_io import DirectFile, aligned
from batchgen.core.dtypes import INT4, INT8, KEPT_FORMATS, PACKED_FORMATS
from batchgen.core.errors import BatchgenError
from batchgen.core.file_version import FileVersion
from batchgen.core.kernel_choice import PROCESS_SET, KernelChoice
from batchgen.core.plan import VOCABULARY_CHUNKS
from batchgen.models.as_weights import as_weights
from batchgen.models.checkpoint import Checkpoint
from batchgen.models.config import ModelConfig
from batchgen.models.experts import MATRICES, split_experts
from batchgen.models.layers import is_gated
from batchgen.models.layouts import Stored, Which, is_quantized, layer_layout, stored_tensors, tensor_shapes
from batchgen.models.store.layout import StoreFile, WeightStore, layer_groups
from batchgen.models.store.weight_store import has_checksums, read_extent, verify, views
from batchgen.models.tensor_files.block_packer import BlockPacker
from batchgen.models.tensor_files.rows_in_file import RowsInFile
from batchgen.ops import dispatch as ops
from batchgen.runtime.memory.expert_reads import ExpertReads, Piece, Stretch
from batchgen.runtime.memory.tiers import Tiers
from batchgen.runtime.memory.transfers import as_buffer
from batchgen.schedule.residency import WeightResidency
from batchgen.schedule.step_graph import HEAD_SLOTS, WEIGHT_SLOTS

Tensors = dict[str, ops.Weight]

OUTPUT_MATRIX = "lm_head.weight"
_EMBEDDINGS = "embed.weight"
_SINKS = "sinks.weight"


class Weights:
    """Tensors by name, as `models/checkpoint.py` names them: before the layers, of each layer, after the layers.

    Invariant: a buffer is touched by one Step at a time, as the schedule has it.
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
        kernels: KernelChoice = PROCESS_SET,
        on_layer: Callable[[int, int], None] | None = None,
    ) -> None:
        """Load what is resident, and make buffers for what passes through.

        Args:
            config: The model's.
            residency: Where each tensor is.
            dtype: To compute in.
            checkpoint: Where resident weights come from, read layer by layer, and given back matrix by matrix, so that memory
                peaks about one matrix above the result.
            store: Of `residency.weight_format`; needed for weights of int4 and what is on disk, and used for all if given.
            tiers: Their memories; None: the host's.
            dequantized_slots: Layers whose dequantized 4-bit weights are in use at once.
            kernels: What multiplies each shape on the CPU.
            on_layer: Called with (done, total) after each layer.

        Raises:
            BatchgenError: Memory does not suffice, or a file is not what it was.
        """
        self.config, self.residency, self.dtype = config, residency, dtype
        self._kernels = kernels
        self.disk_bytes_read = 0
        self._store, self._checkpoint = store, checkpoint
        tiers = tiers or Tiers()
        self._compute_tier, self.arenas = tiers.compute_tier, tiers.arenas
        self._h2d = tiers.links and tiers.links[0]
        self._device = tiers.device
        # Of each tensor of a layer with experts, and of one without.
        kinds = {config.has_experts(j): j for j in range(config.num_layers)}
        self._shapes = {kind: tensor_shapes(layer_layout(config, j)) for kind, j in kinds.items()}
        self._stored_as = [self._as_stored("layer", j) for j in range(config.num_layers)]
        self._sinks: dict[
            str, Tensor
        ] = {}  # of all layers, fp32 [layers, heads], by type of device: the host attends, too
        # Before the layers, while there is memory for an output matrix, or embeddings that are one, twice: as read, and as products read it.
        with BlockPacker(dtype) as self._packer:
            self.embeddings, self.head = self._load_ends(tiers.device)
            if self._is_packed_end("head"):
                self.head = self._packed(self.head)
            if self._is_packed_end("embeddings"):
                self.embeddings = self._packed_table(self.embeddings)
            self._resident: list[Tensors] = []
            self._on_host: list[Tensors] = []  # what an accelerator is sent in every sweep
            for j in range(config.num_layers):
                self._load_layer(j)
                if on_layer:
                    on_layer(j + 1, config.num_layers)
        self._make_slots()
        self._make_disk_buffers()
        self._dequantized = [
            self._dequantized_buffers() for _ in range(dequantized_slots if residency.weight_format == INT4 else 0)
        ]
        self._layers: dict[tuple[int, int | None], Tensors] = {}  # once they have been asked for

    @property
    def embeds_on_device(self) -> bool:
        """Whether the input embeddings are in the compute device's memory."""
        return self._embeddings_tier == self._compute_tier

    @property
    def num_bytes(self) -> int:
        """Bytes held in memory, all tiers together, without buffers."""
        parts = [self.embeddings, *self._resident, *self._on_host, self.head]
        return sum(map(_bytes_of, parts))

    def layer(self, layer: int, slot: int | None = None) -> Tensors:
        """A layer's tensors on the compute device, once its Steps have brought them there. slot: None: all of them are resident."""
        if (layer, slot) not in self._layers:  # buffers stay where they are
            brought = as_weights(self._stored_as[layer], self._slot_views(layer, slot))
            tensors = {**self._resident[layer], **brought}
            if self._dequantized:
                tensors |= self._dequantized_views(layer)
            found = split_experts(self.config, tensors, layer) if self._splits_experts else tensors
            self._layers[layer, slot] = {name: self._bound(tensor) for name, tensor in found.items()}
        return self._layers[layer, slot]

    def read(self, layer: int, slot: int) -> None:
        """What is on disk, into host memory. Raises BatchgenError, also where it is not what was written."""
        before = self._version(layer)
        for stretch in self._stretches[layer]:
            self._fetch(layer, slot, [(stretch.file_offset, stretch.start, stretch.stop)])
        # Hashed when it is first read in a job, and again where the file was written to since.
        if not before == self._version(layer) == self._verified.get(layer):
            for stretch in self._stretches[layer]:
                self._verify(stretch, self._disk_buffers[slot][stretch.start : stretch.stop])
            self._verified[layer] = before
        self._on_demand.pop(slot, None)

    def read_dense(self, layer: int, slot: int) -> None:
        """Read a layer, which has been read as a whole before, without its experts. Raises BatchgenError."""
        found = self._on_demand[slot] = ExpertReads(self._stretches[layer], self.config.num_experts)
        self._fetch_part(layer, slot, found.dense())

    def read_experts(self, layer: int, slot: int, experts: Sequence[int]) -> None:
        """Those of these experts that have not been read since `read_dense`. Raises BatchgenError."""
        self._fetch_part(layer, slot, self._on_demand[slot].experts(experts))

    def load(self, layer: int, slot: int) -> None:
        """What is in host memory or has been read there, to the accelerator."""
        target = self._slot_tensors(layer, slot)
        for name, tensor in {**self._on_host[layer], **self._disk_views(layer, slot)}.items():
            self._h2d.copy(target[name], tensor)

    def dequantize(self, layer: int, slot: int | None, *, experts: bool) -> None:
        """4-bit matrices of a layer into the compute format; of experts all that are there, or with `experts` False none."""
        left_out = MATRICES if self.config.has_experts(layer) and (slot in self._on_demand or not experts) else ()
        packed = {**self._resident[layer], **self._slot_views(layer, slot)}
        for name, target in self._dequantized_views(layer).items():
            if name not in left_out:
                ops.dequantize(packed[name], target)

    def dequantize_experts(self, layer: int, slot: int | None, experts: Sequence[int]) -> None:
        """4-bit matrices of some experts into the compute format."""
        if not self._dequantized:
            return
        packed, targets = {**self._resident[layer], **self._slot_views(layer, slot)}, self._dequantized_views(layer)
        for name in MATRICES:
            of_each = zip(
                packed[name].chunk(self.config.num_experts), targets[name].chunk(self.config.num_experts), strict=True
            )
            for expert, (stored, target) in enumerate(of_each):
                if expert in experts:
                    ops.dequantize(stored, target)

    def load_head(self, chunk: int, slot: int) -> None:
        """A chunk of the output matrix to the accelerator."""
        matrix = self._output_matrix()
        data = matrix if isinstance(matrix, Tensor) else matrix.data
        rows = data[chunk * self._chunk_rows : (chunk + 1) * self._chunk_rows]
        self._h2d.copy(self._head_slots[slot][: len(rows)], rows)

    def vocabulary_chunk(self, chunk: int, slot: int | None) -> tuple[int, ops.Weight]:
        """(first row, rows) of the output matrix on the compute device; the whole of it where it is resident."""
        whole = (self.config.vocab_size, self.config.embed_size)  # which its chunks run as
        if not self._head_slots:
            return 0, self._bound(self._output_matrix(), whole)
        start = chunk * self._chunk_rows
        stop = min(start + self._chunk_rows, self.config.vocab_size)
        rows, matrix = self._head_slots[slot][: max(0, stop - start)], self._output_matrix()
        return start, self._bound(replace(matrix, data=rows) if isinstance(matrix, ops.BlockWeight) else rows, whole)

    def sinks(self, layer: int, device: torch.device) -> Tensor | None:
        """Fp32 [heads] of a layer's attention, in memory of the host or of the compute device; None: the model has none."""
        return self._sinks[device.type][layer] if self._sinks else None

    def reset_counts(self) -> None:
        self.disk_bytes_read = 0

    def close(self) -> None:
        """Close files, and let go of all memory. Counts stay."""
        for file in self._files.values():
            file.close()
        for held in (
            self._resident, self._on_host, self._layers, self._views, self._slots, self._head_slots, self._disk_buffers,
            self._dequantized, self._sinks,
        ):  # fmt: skip
            held.clear()
        del self.embeddings, self.head, self._checkpoint

    # Loading.

    @property
    def _splits_experts(self) -> bool:
        """Whether products are made expert by expert; elsewhere kernels take the matrices of all experts as they lie."""
        return self._device.type == "cpu"

    @property
    def _packs_from_file(self) -> bool:
        """Whether rows of blocks are packed while they are read."""
        kept = self.residency.weight_format in KEPT_FORMATS
        return kept and self._store is None and self._compute_tier == "cpu" and self._checkpoint.load_unread is not None

    def _load_layer(self, layer: int) -> None:
        tiers = self.residency.layers[layer]
        kept = {group: tier for group, tier in tiers.items() if tier != "disk"}
        groups = self._read_groups(layer, kept)
        resident: Tensors = {}
        on_host: Tensors = {}
        for group, tier in kept.items():
            tensors = self.arenas[tier].keep(groups.pop(group), "the weights")
            if tier == self._compute_tier:
                weights = as_weights(self._stored_as[layer], tensors)
                tensors.clear()
                resident |= self._packed(weights, layer)
            else:
                on_host |= tensors
        self._resident.append(resident)
        self._on_host.append(on_host)

    def _read_groups(self, layer: int, groups: Collection[str]) -> dict[str, Tensors]:
        """Some groups of a layer's tensors as they are stored, by group."""
        of_model = self.config.first_layer + layer
        if self._store is not None:
            file = self._store.layers[of_model]
            return {group: read_extent(file, file.extents[group]) for group in groups}
        if not groups:
            return {}
        stored_format = self.residency.weight_format
        if self._packs_from_file:
            tensors = self._checkpoint.load_unread("layer", of_model, self.dtype)
        elif stored_format in PACKED_FORMATS:
            tensors = self._checkpoint.load_packed("layer", of_model, self.dtype, stored_format)
        else:
            tensors = self._checkpoint.load_layer(of_model, self.dtype)
        return {group: own for group, own in layer_groups(tensors).items() if group in groups}

    def _as_stored(self, which: Which, layer: int) -> dict[str, Stored]:
        dtype = str(self.dtype).removeprefix("torch.")
        return stored_tensors(self.config, which, layer, dtype, self.residency.weight_format)

    def _make_slots(self) -> None:
        """Buffers of an accelerator for all groups that any layer has elsewhere: of each tensor for the largest that a layer has."""
        self._slots: list[dict[str, Tensor]] = []
        away = {g for groups in self.residency.layers for g, tier in groups.items() if tier != self._compute_tier}
        if self._h2d is None or not away:
            return
        largest: dict[str, int] = {}  # bytes
        for stored in self._stored_as:
            of_groups = layer_groups(stored)
            for name, tensor in ((n, t) for group in of_groups if group in away for n, t in of_groups[group].items()):
                largest[name] = max(tensor.num_bytes, largest.get(name, 0))
        for _ in range(WEIGHT_SLOTS):
            arena = self.arenas["gpu"]
            self._slots.append(
                {name: arena.empty((size,), torch.uint8, "weights in transit") for name, size in largest.items()}
            )

    def _make_disk_buffers(self) -> None:
        self._stretches: list[list[Stretch]] = []
        self._on_demand: dict[int, ExpertReads] = {}  # by slot, of layers whose experts are read on demand
        self._files: dict[int, DirectFile] = {}
        self._verified: dict[int, FileVersion] = {}  # by layer, the version of its file whose checksums fit
        self._views: dict[tuple[int, int | None], Tensors] = {}
        for j, tiers in enumerate(self.residency.layers):
            stretches: list[Stretch] = []
            end = 0
            before = None
            if "disk" in tiers.values():
                file = self._store.layers[self.config.first_layer + j]
                self._files[j] = self._open(file)
                for group in file.extents:
                    if tiers[group] == "disk":
                        if before == "disk":
                            last = stretches.pop()
                            stretches.append(Stretch(file, (*last.groups, group), last.start))
                        else:
                            stretches.append(Stretch(file, (group,), end))
                        end = stretches[-1].stop
                    before = tiers[group]
            self._stretches.append(stretches)
        size = max((s.stop for stretches in self._stretches for s in stretches), default=0)
        self._disk_buffers = [
            self.arenas["cpu"].empty((aligned(size),), torch.uint8, "weights in transit")
            for _ in range(WEIGHT_SLOTS if size else 0)
        ]

    def _open(self, file: StoreFile) -> DirectFile:
        try:
            return DirectFile(file.path)
        except OSError as error:
            raise BatchgenError(f"cannot read {file.path}: {error.strerror}: convert the model again") from error

    def _dequantized_buffers(self) -> Tensors:
        largest: dict[str, tuple[int, ...]] = {}
        for shapes in self._shapes.values():
            for name, shape in ((n, s) for n, s in shapes.items() if is_quantized(n, s)):
                largest[name] = max(shape, largest.get(name, shape), key=math.prod)
        arena = self.arenas[self._compute_tier]
        return {name: arena.empty(shape, self.dtype, "expanded weights") for name, shape in largest.items()}

    def _load_ends(self, device: torch.device) -> tuple[Tensors, Tensors]:
        """Embeddings and head; the head's slots where it comes over in chunks."""
        config = self.config
        embeddings = self._load_embeddings() if config.has_embeddings else {}
        head = self._load_head() if config.has_head else self._load_sinks() if config.sinks else {}
        self._embeddings_tier = self.residency.tier_of_embeddings(config)
        embeddings = self.arenas[self._embeddings_tier].keep(embeddings, "the embeddings")
        self.arenas[self.residency.head].take(sum(t.nbytes for t in head.values()), "the output matrix")
        if config.sinks:
            of_model = head[_SINKS].to(torch.float32, copy=True).view(-1, config.num_heads)
            sinks = of_model[config.first_layer :][: config.num_layers]
            self._sinks = {place.type: sinks.to(place) for place in (torch.device("cpu"), device)}
        for name, tensor in head.items():  # what is small, where it is used
            tier = self.residency.head if name == OUTPUT_MATRIX else self._compute_tier
            head[name] = self.arenas[tier].memory.keep(tensor)
        self._head_slots: list[Tensor] = []
        self._chunk_rows = -(-self.config.vocab_size // VOCABULARY_CHUNKS)
        if self._h2d is not None and self.residency.head != "gpu" and config.has_head:
            matrix = embeddings[_EMBEDDINGS] if config.tied_embeddings else head[OUTPUT_MATRIX]
            shape = (self._chunk_rows, matrix.shape[1])
            self._head_slots = [
                self.arenas["gpu"].empty(shape, matrix.dtype, "the output matrix in transit") for _ in range(HEAD_SLOTS)
            ]
        return as_weights(self._as_stored("embeddings", 0), embeddings), as_weights(self._as_stored("head", 0), head)

    def _load_embeddings(self) -> Tensors:
        return self._load_end("embeddings") if self._store is None else _whole(self._store.embeddings)

    def _load_head(self) -> Tensors:
        return self._load_end("head") if self._store is None else _whole(self._store.head)

    def _load_end(self, which: Which) -> Tensors:
        if self._packs_from_file and self._is_packed_end(which):
            return self._checkpoint.load_unread(which, 0, self.dtype)
        if self.residency.weight_format in KEPT_FORMATS:
            return self._checkpoint.load_packed(which, 0, self.dtype, self.residency.weight_format)
        return self._checkpoint.load(which, 0, self.dtype)

    def _is_packed_end(self, which: Which) -> bool:
        """Whether what stands before or after the layers has the matrix that makes logits, packed for products."""
        packed = self.config.has_head and self.residency.head == self._compute_tier
        return packed and (which == "head" or self.config.tied_embeddings)

    def _load_sinks(self) -> Tensors:
        """Of a stage of a pipeline that does not make logits."""
        if self._store is not None:
            return {_SINKS: _whole(self._store.head)[_SINKS]}
        return {_SINKS: self._checkpoint.load_sinks(self.dtype)}

    def _output_matrix(self) -> ops.Weight:
        return self.embeddings[_EMBEDDINGS] if self.config.tied_embeddings else self.head[OUTPUT_MATRIX]

    # What has been brought over.

    def _slot_views(self, layer: int, slot: int | None) -> Tensors:
        if self._h2d is None:
            return self._disk_views(layer, slot)
        if not self._slots:
            return {}
        return self._slot_tensors(layer, slot)

    def _slot_tensors(self, layer: int, slot: int) -> dict[str, Tensor]:
        """Where an accelerator gets what a layer has elsewhere."""
        names = [*self._on_host[layer], *self._disk_names(layer)]
        return {name: _in_buffer(self._slots[slot][name], self._stored_as[layer][name]) for name in names}

    def _dequantized_views(self, layer: int) -> dict[str, Tensor]:
        buffers = self._dequantized[layer % len(self._dequantized)]
        shapes = self._shapes[self.config.has_experts(layer)]
        return {name: _first_of(buffers[name], shape) for name, shape in shapes.items() if is_quantized(name, shape)}

    def _disk_names(self, layer: int) -> Sequence[str]:
        return [tensor.name for stretch in self._stretches[layer] for tensor in stretch.tensors]

    def _disk_views(self, layer: int, slot: int | None) -> Tensors:
        if (layer, slot) in self._views:  # the buffers stay where they are
            return self._views[layer, slot]
        found: Tensors = {}
        for stretch in self._stretches[layer]:
            for extent in stretch.extents:
                found |= views(extent, self._disk_buffers[slot][stretch.place_of(extent.offset) :])
        self._views[layer, slot] = found
        return found

    # What multiplies them.

    def _isa(self, shape: tuple[int, int], dtype: torch.dtype) -> str:
        return self._kernels.linear_isa(*shape, str(dtype).removeprefix("torch."))

    def _packed(self, tensors: Tensors, layer: int | None = None) -> Tensors:
        """With matrices as products read them fastest; those of int4 are left as they are. layer: that they are of, if any.

        Takes them out of `tensors`, so that no more than one is in memory twice. Vectors are copied: they may be views of memory in which what is packed now was read, and would keep all of it.
        """
        is_dequantized = self.residency.weight_format == INT4  # before it is split
        if layer is not None and self._splits_experts and not is_dequantized:
            split = split_experts(self.config, tensors, layer)
            tensors.clear()
            tensors = split
        return {name: self._packed_weight(name, tensors.pop(name)) for name in list(tensors)}

    def _packed_weight(self, name: str, weight: ops.Weight) -> ops.Weight:
        if isinstance(weight, ops.SplitWeight):  # of which none is gated by itself
            return ops.SplitWeight(tuple(self._packed_weight("", part) for part in weight.parts))
        if isinstance(weight, ops.BlockWeight) and isinstance(weight.data, RowsInFile):
            return self._packer.pack(self._bound(weight), gated=is_gated(name))
        if isinstance(weight, ops.BlockWeight):
            return ops.pack_blocks(self._bound(weight), self.dtype, gated=is_gated(name))
        if not _is_matrix(weight):
            return weight.clone() if weight.ndim == 1 else weight
        return ops.pack_weight(weight, gated=is_gated(name), isa=self._isa(weight.shape, weight.dtype))

    def _packed_table(self, embeddings: Tensors) -> Tensors:
        """With the embeddings, which are the output matrix, as products read them fastest: rows are looked up there too.

        What is beside them is copied, as in `_packed`. Takes them out of `embeddings`.
        """
        table = self._packed_weight(_EMBEDDINGS, embeddings.pop(_EMBEDDINGS))
        rest = {name: t.clone() if isinstance(table, ops.PackedWeight) else t for name, t in embeddings.items()}
        return {_EMBEDDINGS: table, **rest}

    def _bound(self, weight: ops.Weight, shape: tuple[int, int] | None = None) -> ops.Weight:
        """A matrix that is not packed, for what its shape runs on. shape: of the whole that it is a part of."""
        if isinstance(weight, ops.SplitWeight):
            return ops.SplitWeight(tuple(map(self._bound, weight.parts)))
        if isinstance(weight, ops.BlockWeight):
            dtype = str(self.dtype).removeprefix("torch.")
            return replace(weight, isa=self._kernels.blocks_isa(weight.weight_format, dtype))
        return ops.bind_weight(weight, self._isa(shape or weight.shape, weight.dtype)) if _is_matrix(weight) else weight

    def _fetch(self, layer: int, slot: int, pieces: Sequence[Piece]) -> None:
        """Pieces of a layer's file into a buffer. Raises BatchgenError."""
        file, buffer = self._files[layer], self._disk_buffers[slot]
        try:
            count = file.read([(offset, as_buffer(buffer[start:stop])) for offset, start, stop in pieces])
        except OSError as error:
            raise _cannot_read(file, error) from error
        self.disk_bytes_read += count
        if count < sum(
            stop - start for _, start, stop in pieces
        ):  # what the buffer held before must not pass for weights
            raise BatchgenError(f"{file.path} is shorter than it was: convert the model again")

    def _fetch_part(self, layer: int, slot: int, pieces: Sequence[Piece]) -> None:
        """Pieces of a layer that was verified, which have no checksums of their own. Raises BatchgenError."""
        self._fetch(layer, slot, pieces)
        while (found := self._version(layer)) != self._verified[layer]:
            stretch = self._stretches[layer][0]
            try:
                intact = has_checksums(stretch.file, self._files[layer])
            except OSError as error:
                raise _cannot_read(self._files[layer], error) from error
            if not intact:
                raise BatchgenError(
                    f"{stretch.file.path} was changed while the job ran: convert the model again, and run the same command again"
                )
            self._verified[layer] = found
            self._fetch(layer, slot, pieces)

    def _version(self, layer: int) -> FileVersion | None:
        """The version of a layer's file now; None: nothing of it is on disk. Raises BatchgenError."""
        if layer not in self._files:
            return None
        try:
            return self._files[layer].version()
        except OSError as error:
            raise _cannot_read(self._files[layer], error) from error

    def _verify(self, stretch: Stretch, part: Tensor) -> None:
        for extent in stretch.extents:
            verify(stretch.file, extent, part[stretch.place_of(extent.offset) - stretch.start :])


def _cannot_read(file: DirectFile, error: OSError) -> BatchgenError:
    return BatchgenError(
        f"cannot read {file.path}: {error.strerror}: check the disk; the same command goes on from here"
    )


def _whole(file: StoreFile) -> Tensors:
    """All tensors of a file with one group, or none."""
    return {} if not file.extents else read_extent(file, next(iter(file.extents.values())))


def _is_matrix(weight: ops.Weight) -> bool:
    """Of numbers, or of rows of 8 bits. Not of bytes: 4-bit ones, and rows of a GGUF."""
    return isinstance(weight, Tensor) and weight.ndim == 2 and weight.dtype != torch.uint8


def _in_buffer(buffer: Tensor, stored: Stored) -> Tensor:
    """A tensor as it is stored, in the first bytes of a buffer."""
    kind = torch.int8 if stored.dtype == INT8 else torch.uint8 if stored.is_packed else getattr(torch, stored.dtype)
    return buffer[: stored.num_bytes].view(kind).view(stored.stored_shape)


def _first_of(buffer: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A tensor in the first part of a buffer that may be larger."""
    return buffer if buffer.shape == shape else buffer.view(-1)[: math.prod(shape)].view(shape)


def _bytes_of(tensors: Tensors) -> int:
    return sum(map(ops.weight_bytes, tensors.values()))
