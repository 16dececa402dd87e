"""A model's weights under one set of names, whatever file they come from, a layer at a time.

A layout (`layouts.py`) says which parts make up each tensor; a format (`formats/`) only has to fill one part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from batchgen.core.dtypes import BLOCK_FORMATS, INT4, INT8, NATIVE_FORMATS, PACKED_FORMATS, dtype_name
from batchgen.models.config import ModelConfig
from batchgen.models.cutting import cut_tensors, fill_share
from batchgen.models.files import ModelFiles, read_config, stated_scheme, stored_weights, weight_tensors
from batchgen.models.formats.base import StoredPart
from batchgen.models.formats.dummy import dummy_parts
from batchgen.models.formats.gguf.tensors import gguf_parts, read_layer_ahead
from batchgen.models.hf.weight_files import ModelTensors
from batchgen.models.hf.weights import hf_parts
from batchgen.models.layouts import (
    Layout,
    Stored,
    Which,
    is_quantized,
    layout_of,
    packed_layout,
    stored_tensors,
    tensor_shapes,
)
from batchgen.models.shard import Shard
from batchgen.models.store.layout import StoreFile, WeightStore
from batchgen.models.store.weight_store import load_extent, open_store, read_extent
from batchgen.models.tensor_files.rows_in_file import RowsInFile
from batchgen.ops import int8

# (tensors to load, layer, compute dtype) -> tensors by name
_Load = Callable[[Which, int, torch.dtype], dict[str, Tensor]]
_LoadUnread = Callable[[Which, int, torch.dtype], dict[str, Tensor | RowsInFile]]


@dataclass(frozen=True)
class Checkpoint:
    """Weights to be loaded piece by piece; each call reads again and keeps nothing.

    Tensors come back contiguous, in the dtype asked for, in memory of their own; beside them only a few MB are held.
    Calls raise InputError naming file and tensor where reading fails; of a weight store BatchgenError naming file and
    group, also where a checksum does not fit.

    Attributes:
        config: Configuration of the model, or of the rank's part of it.
        load: Loads tensors in the compute dtype.
        weight_format: Format of the layers' matrices, where they can be had as they are stored.
        load_stored: Loads tensors, matrices in `weight_format`.
        load_unread: Loads tensors, but gives block-quantized rows as places in files; None where these are not known.
    """

    config: ModelConfig
    load: _Load  # ("embeddings", "layer", "head" or "sinks", layer, dtype)
    weight_format: str | None = None
    load_stored: _Load | None = None
    load_unread: _LoadUnread | None = None

    def load_embeddings(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Tensors before the layers, by name.

        "embed.weight" [vocab, embed]; where the model has them "positions.weight" [max_position + offset, hidden] and
        "embed_proj.weight" [hidden, embed].
        """
        return self.load("embeddings", 0, dtype)

    def load_layer(self, layer: int, dtype: torch.dtype) -> dict[str, Tensor]:
        """One layer's tensors, by name.

        "input_norm", "qkv" [(heads + 2 kv_heads) head_dim, hidden] (q, k, v), "q_norm" and "k_norm" [head_dim], "out",
        "out_norm" and "down_norm" where `output_norms`, "post_norm", "gate_up" [2 intermediate, hidden] (gate, up) or
        "up", and "down". With experts their rows follow each other, and there is "router" [experts, hidden]; of the
        expert that all tokens share "shared_gate" [1, hidden], "shared_gate_up" and "shared_down". Each has ".weight"
        and, where the model has it, ".bias".
        """
        return self.load("layer", layer, dtype)

    def load_packed(self, which: Which, layer: int, dtype: torch.dtype, weight_format: str) -> dict[str, Tensor]:
        """Tensors of a layer, or of those before or after the layers, with packed matrices (`layouts.stored_tensors`).

        Args:
            which: "embeddings", "layer" or "head".
            layer: Number of the layer.
            dtype: Compute dtype.
            weight_format: "int8", or the checkpoint's own.
        """
        if weight_format == INT8:
            return self.load_int8_layer(layer, dtype) if which == "layer" else self.load(which, layer, dtype)
        assert self.load_stored is not None and weight_format == self.weight_format
        return self.load_stored(which, layer, dtype)

    def load_int8_layer(self, layer: int, dtype: torch.dtype) -> dict[str, Tensor]:
        """One layer's tensors, matrices in rows of 8 bits (`ops.int8`): as they are stored, or else quantized."""
        if self.load_stored is not None and self.weight_format == INT8:
            return self.load_stored("layer", layer, dtype)
        tensors = self.load_layer(layer, dtype)
        return {name: int8.quantize(t) if is_quantized(name, tuple(t.shape)) else t for name, t in tensors.items()}

    def load_head(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Tensors after the layers, by name.

        Those that the model has of "final_norm.weight" and ".bias" [hidden], "head_proj.weight" [embed, hidden],
        "sinks.weight" [layers * heads] and "lm_head.weight" [vocab, embed]; where it is tied, the embedding stands in
        for the last.
        """
        return self.load("head", 0, dtype)

    def load_sinks(self, dtype: torch.dtype) -> Tensor | None:
        """Sinks of the attention of all layers, [layers * heads]; None: the model has none."""
        return self.load("sinks", 0, dtype)["sinks.weight"] if self.config.sinks else None


def open_checkpoint(files: ModelFiles, config: ModelConfig | None = None, shard: Shard | None = None) -> Checkpoint:
    """The model's weights, opened but not read.

    Every tensor's presence and shape is checked here, and of a weight store the sizes of its files.

    Args:
        files: Files of the model.
        config: Its configuration, where that has been read already.
        shard: The part of each layer that is wanted; None: all of it. Packed weights can be loaded for a shard only in
            a format for which `shard.divides` is true.

    Raises:
        InputError: The model is not supported, or a file is missing, corrupt or of another shape.
    """
    if files.kind == "store":
        return _store_checkpoint(open_store(files.path), shard)
    config = shard.whole if shard else config or read_config(files)
    if files.kind == "dummy":
        return dummy_checkpoint(config, shard=shard)
    tensors = ModelTensors(files.path, weight_tensors(files))
    stored_format = stored_weights(files)
    if files.kind == "gguf":
        ahead = partial(read_layer_ahead, tensors)
        return _checkpoint_of(_Parts(config, gguf_parts(config, tensors), stored_format, shard, True, ahead))
    parts = hf_parts(config, files.path, tensors, stated_scheme(files))
    return _checkpoint_of(_Parts(config, parts, stored_format, shard))


def dummy_checkpoint(config: ModelConfig, seed: int = 0, shard: Shard | None = None) -> Checkpoint:
    """Dummy weights of any shape, for benchmarks (`formats/dummy.py`).

    Args:
        config: Configuration of the whole model.
        seed: Seed of the weights.
        shard: Part of each layer that is wanted; None: the whole.
    """
    return _checkpoint_of(_Parts(config, dummy_parts(config, seed), shard=shard))


@dataclass(frozen=True)
class _Parts:
    """The parts of a model, put together into tensors.

    Attributes:
        whole: Configuration of the whole model.
        parts: Every part, by name and layer.
        stored_format: Format in which rows can be taken as they are.
        shard: Part of each layer that is wanted; None: the whole.
        of_gguf: Whether parts are single matrices, whose block-quantized rows can be left in the file.
        read_ahead: Begins to bring a layer's tensors into memory.
    """

    whole: ModelConfig
    parts: Mapping[tuple[str, int], StoredPart]
    stored_format: str | None = None
    shard: Shard | None = None
    of_gguf: bool = False
    read_ahead: Callable[[int], None] | None = None

    @property
    def config(self) -> ModelConfig:
        return self.shard.config if self.shard else self.whole

    @property
    def packed_format(self) -> str | None:
        """`stored_format`, of a rank's part only where its rows can be cut: a row of int8 has one scale."""
        return self.stored_format if self.shard is None or self.stored_format in NATIVE_FORMATS else None

    def load(self, which: Which, layer: int, dtype: torch.dtype) -> dict[str, Tensor]:
        self._prefetch(which, layer)
        layout = layout_of(self.config, which, layer, unfused=self.of_gguf)
        tensors = {name: torch.empty(shape, dtype=dtype) for name, shape in tensor_shapes(layout).items()}
        return self._filled(which, layout, layer, tensors)

    def load_stored(self, which: Which, layer: int, dtype: torch.dtype) -> dict[str, Tensor]:
        if self.config.num_experts:  # too small to be read by several threads around the page cache
            self._prefetch(which, layer)
        layout, stored = self._packed(which, layer, dtype)
        return self._filled(which, layout, layer, {name: _space(stored[name]) for name in layout})

    def load_unread(self, which: Which, layer: int, dtype: torch.dtype) -> dict[str, Tensor | RowsInFile]:
        layout, stored = self._packed(which, layer, dtype)
        read = {name: parts for name, parts in layout.items() if stored[name].dtype not in BLOCK_FORMATS}
        tensors = self._filled(which, read, layer, {name: _space(stored[name]) for name in read})
        return {
            name: tensors[name]
            if name in read
            else RowsInFile(tuple(self.parts[part, layer].in_file() for part, _ in parts), stored[name].stored_shape[1])
            for name, parts in layout.items()
        }

    def _packed(self, which: Which, layer: int, dtype: torch.dtype) -> tuple[Layout, dict[str, Stored]]:
        """The parts of each tensor where layers stay in `packed_format`, and the form in which it is stored."""
        weight_format = self.packed_format
        assert weight_format is not None
        stored = stored_tensors(self.config, which, layer, dtype_name(dtype), weight_format)
        return packed_layout(self.config, which, layer, weight_format, unfused=self.of_gguf), stored

    def _prefetch(self, which: Which, layer: int) -> None:
        """Begin to read this layer and the next one."""
        if self.read_ahead and which == "layer":
            self.read_ahead(layer)
            self.read_ahead(layer + 1)

    def _filled(self, which: Which, layout: Layout, layer: int, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors, each part of which is read into its rows."""
        whole = layout_of(self.whole, which, layer, unfused=self.of_gguf) if self.shard else {}
        for name, parts in layout.items():
            pieces = tensors[name].split([shape[0] for _, shape in parts])
            for i, ((part, _), piece) in enumerate(zip(parts, pieces, strict=True)):
                stored = self.parts[part, layer]
                if self.shard:
                    fill_share(self.shard.cut(name, part), stored, whole[name][i][1][0], piece)
                else:
                    stored.fill(piece)
        return tensors


def _checkpoint_of(parts: _Parts) -> Checkpoint:
    if not parts.packed_format:
        return Checkpoint(parts.config, parts.load)
    unread = parts.load_unread if parts.of_gguf and not parts.shard else None
    return Checkpoint(parts.config, parts.load, parts.packed_format, parts.load_stored, unread)


def _space(stored: Stored) -> Tensor:
    """Memory for a tensor as it is stored; between the codes of int8 and their scales there are zeros."""
    if not stored.is_packed:
        return torch.empty(stored.shape, dtype=getattr(torch, stored.dtype))
    if stored.dtype == INT8:
        return torch.zeros(stored.stored_shape, dtype=torch.int8)
    return torch.empty(stored.stored_shape, dtype=torch.uint8)


@dataclass(frozen=True)
class _StoreTensors:
    """The tensors of a weight store.

    Attributes:
        store: The store.
        shard: Part of each layer that is wanted; None: the whole.
    """

    store: WeightStore
    shard: Shard | None

    @property
    def packed_format(self) -> str | None:
        """Format of packed matrices, of a rank's part only where its rows can be cut: a row of int8 has one scale."""
        packed = (INT4, *NATIVE_FORMATS) if self.shard else PACKED_FORMATS
        return self.store.weight_format if self.store.weight_format in packed else None

    def load(self, which: Which, layer: int, dtype: torch.dtype) -> dict[str, Tensor]:
        file = self._file(which, layer)
        groups = [load_extent(file, extent, dtype) for extent in file.extents.values()]
        stored = {name: tensor for group in groups for name, tensor in group.items()}
        layout = self._layout("head" if which == "sinks" else which, layer)  # sinks are stored with the head
        config = self.store.config
        tensors = {name: stored[name] if name in stored else joined(config, layer, name, stored) for name in layout}
        return cut_tensors(self.shard, layout, tensors) if self.shard else tensors

    def load_stored(self, which: Which, layer: int, dtype: torch.dtype) -> dict[str, Tensor]:
        file = self._file(which, layer)
        groups = [read_extent(file, extent) for extent in file.extents.values()]
        stored = {name: tensor for group in groups for name, tensor in group.items()}
        tensors = {name: t.to(dtype) if t.is_floating_point() else t for name, t in stored.items()}
        if self.shard is None:
            return tensors
        return cut_tensors(self.shard, self._layout(which, layer), tensors, self.store.weight_format)

    def _file(self, which: Which, layer: int) -> StoreFile:
        if which == "layer":
            return self.store.layers[layer]
        return self.store.embeddings if which == "embeddings" else self.store.head

    def _layout(self, which: Which, layer: int) -> Layout:
        return layout_of(self.shard.whole if self.shard else self.store.config, which, layer)


def _store_checkpoint(store: WeightStore, shard: Shard | None) -> Checkpoint:
    tensors = _StoreTensors(store, shard)
    config, packed_format = shard.config if shard else store.config, tensors.packed_format
    return Checkpoint(config, tensors.load, packed_format, tensors.load_stored if packed_format else None)


def joined(config: ModelConfig, layer: int, name: str, tensors: Mapping[str, Tensor]) -> Tensor:
    """The tensor of a layer that is stored in several, by role (`layouts.packed_layout`).

    Rows of experts follow each other again.
    """
    stem = name.removesuffix("weight")
    parts = [tensor for other, tensor in tensors.items() if other.startswith(stem) and other.endswith(".weight")]
    if stem != "gate_up." or not config.has_experts(layer):
        return torch.cat(parts)
    return torch.cat(
        [each for pair in zip(*(p.chunk(config.num_experts) for p in parts), strict=True) for each in pair]
    )
