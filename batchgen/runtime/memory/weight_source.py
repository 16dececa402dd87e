"""The weights of a model as they are stored: in a weight store, or in a checkpoint."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from pathlib import Path

import torch
from torch import Tensor

from batchgen.core.dtypes import NATIVE_FORMATS, PACKED_FORMATS
from batchgen.core.file_version import FileVersion
from batchgen.models.checkpoint import Checkpoint
from batchgen.models.config import ModelConfig
from batchgen.models.layouts import EMBEDDINGS, OUTPUT_MATRIX, PER_LAYER, Stored, Which, stored_tensors
from batchgen.models.store.layout import StoreFile, WeightStore, layer_groups
from batchgen.models.store.weight_store import open_rows, read_extent, read_tensors
from batchgen.models.tensor_files.table_rows import TableRows
from batchgen.runtime.memory.store_reader import StoreReader, StoreRows
from batchgen.schedule.residency import WeightResidency

Tensors = dict[str, Tensor]  # as they are stored

SINKS = "sinks.weight"


class WeightSource:
    """The weights of a model as they are stored.

    Attributes:
        store: weight store, which is used for all if there is one.
        layers: for each layer, the stored form of its tensors.
    """

    def __init__(
        self,
        config: ModelConfig,
        residency: WeightResidency,
        dtype: torch.dtype,
        compute_tier: str,
        checkpoint: Checkpoint | None,
        store: WeightStore | None,
    ) -> None:
        """Read nothing yet.

        Args:
            config: Configuration of the model.
            residency: Tiers and format of the weights.
            dtype: Compute dtype.
            compute_tier: Tier of the compute device's own memory.
            checkpoint: Checkpoint of the model.
            store: Weight store of `residency.weight_format`.
        """
        self.store = store
        self._config, self._residency, self._dtype, self._compute_tier = config, residency, dtype, compute_tier
        self._checkpoint: Checkpoint | None = checkpoint
        self._verified: dict[Path, FileVersion] = {}
        self.layers = [self.stored("layer", j) for j in range(config.num_layers)]

    def stored(self, which: Which, layer: int) -> dict[str, Stored]:
        """The stored form of tensors. which: "embeddings", "layer" or "head"."""
        dtype = str(self._dtype).removeprefix("torch.")
        return stored_tensors(self._config, which, layer, dtype, self._residency.weight_format)

    def groups(self, layer: int, groups: Collection[str]) -> dict[str, Tensors]:
        """Some groups of a layer's tensors, by group."""
        layer_of_model = self._config.first_layer + layer
        if self.store is not None:
            file = self.store.layers[layer_of_model]
            return {group: read_extent(file, file.extents[group]) for group in groups}
        if not groups:
            return {}
        stored_format = self._residency.weight_format
        if self._packs_from_file:
            tensors = self._load_unread("layer", layer_of_model)
        elif stored_format in PACKED_FORMATS:
            tensors = self._loader.load_packed("layer", layer_of_model, self._dtype, stored_format)
        else:
            tensors = self._loader.load_layer(layer_of_model, self._dtype)
        return {group: of_group for group, of_group in layer_groups(tensors).items() if group in groups}

    def embeddings(self) -> Tensors:
        """The tensors before the layers, but for an embedding table that stays on disk."""
        if self.store is None:
            return self._end("embeddings")
        on_disk = self._residency.tier_of_embeddings(self._config) == "disk"
        return self._all_but(self.store.embeddings, EMBEDDINGS if on_disk else None)

    def head(self) -> Tensors:
        """The tensors after the layers, but for an output matrix that stays on disk, or that nobody asks for."""
        if self.store is None:
            return self._end("head")
        in_memory = OUTPUT_MATRIX in self.stored("head", 0) and self._residency.head != "disk"
        return self._all_but(self.store.head, None if in_memory else OUTPUT_MATRIX)

    def sinks(self) -> Tensors:
        """The attention sinks of all layers, for a stage of a pipeline that does not make logits."""
        if self.store is not None:
            return {SINKS: self._all_but(self.store.head, OUTPUT_MATRIX)[SINKS]}
        return {SINKS: self._loader.load_sinks(self._dtype)}

    def per_layer_rows(self) -> TableRows | None:
        """The table of per-layer embeddings, which stays in its file; None: the model has none."""
        if not self._config.per_layer_size:
            return None
        if self.store is None:
            return self._loader.open_per_layer()
        assert self.store.per_layer is not None, "the model has per-layer embeddings"
        return open_rows(self.store.per_layer, f"{PER_LAYER}.weight")

    def embedding_rows(self) -> StoreRows | None:
        """The table of the input embeddings, where it stays on disk; else None. Raises BatchgenError."""
        if self._residency.tier_of_embeddings(self._config) != "disk" or not self._config.embeds:
            return None
        assert self.store is not None, "weights on disk are in a weight store"
        file = self.store.embeddings
        return StoreRows(file, self.verified_version(file), EMBEDDINGS)

    def verified_version(self, file: StoreFile) -> FileVersion:
        """The version of a file of the store that had its checksums, which are looked at once. Raises BatchgenError."""
        if file.path not in self._verified:
            with contextlib.closing(StoreReader(file)) as reader:
                self._verified[file.path] = reader.verify()
        return self._verified[file.path]

    def is_packed_end(self, which: Which) -> bool:
        """Tell whether "embeddings" or "head" have the output matrix, and it is prepacked."""
        packed = self._config.has_head and self._residency.head == self._compute_tier
        return packed and (which == "head" or self._config.tied_embeddings)

    def close(self) -> None:
        """Let go of the checkpoint."""
        self._checkpoint = None

    @property
    def _loader(self) -> Checkpoint:
        assert self._checkpoint is not None, "weights come from a checkpoint where there is no weight store"
        return self._checkpoint

    @property
    def _packs_from_file(self) -> bool:
        """Tell whether block-quantized weights are packed while they are read."""
        kept = self._residency.weight_format in NATIVE_FORMATS
        return kept and self.store is None and self._compute_tier == "cpu" and self._loader.load_unread is not None

    def _load_unread(self, which: Which, layer: int) -> Tensors:
        load_unread = self._loader.load_unread
        assert load_unread is not None, "the places of rows in files are known (`_packs_from_file`)"
        return load_unread(which, layer, self._dtype)

    def _end(self, which: Which) -> Tensors:
        if self._packs_from_file and self.is_packed_end(which):
            return self._load_unread(which, 0)
        if self._residency.weight_format in NATIVE_FORMATS:
            return self._loader.load_packed(which, 0, self._dtype, self._residency.weight_format)
        return self._loader.load(which, 0, self._dtype)

    def _all_but(self, file: StoreFile, left: str | None) -> Tensors:
        """The tensors of a file with one group, or none. left: the name of one that is not held in memory."""
        if not file.extents:
            return {}
        (extent,) = file.extents.values()
        names = [tensor.name for tensor in extent.tensors]
        if left not in names:
            return read_extent(file, extent)
        self.verified_version(file)
        return read_tensors(file, {*names} - {left})
