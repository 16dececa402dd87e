"""The weights of a model, loaded a layer at a time under one set of tensor names, whatever files they are in.

A layout (`layouts.py`) names the parts of each tensor. A file format (`formats/`) only has to fill one part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from batchgen.core.dtypes import BLOCK_FORMATS, INT4, INT8, NATIVE_FORMATS, PACKED_FORMATS, dtype_name
from batchgen.models.config import ModelConfig
from batchgen.models.cutting import cut_tensors, fill_share
from batchgen.models.files import ModelFiles, read_config, stated_scheme, stored_weights, weight_tensors
from batchgen.models.formats.base import StoredPart, unchanged
from batchgen.models.formats.dummy import dummy_parts
from batchgen.models.formats.gguf.tensors import gguf_parts, read_layer_ahead
from batchgen.models.hf.weight_files import ModelTensors
from batchgen.models.hf.weights import hf_parts
from batchgen.models.layouts import (
    PER_LAYER,
    Layout,
    Stored,
    Which,
    is_quantized,
    layout_of,
    packed_layout,
    stored_tensors,
    tensor_shapes,
)
from batchgen.models.lora import read_lora
from batchgen.models.lora_merging import merging
from batchgen.models.shard import Shard
from batchgen.models.store.layout import StoreFile, WeightStore
from batchgen.models.store.weight_store import load_extent, open_rows, open_store, read_extent
from batchgen.models.tensor_files.headers import TensorInfo
from batchgen.models.tensor_files.rows_in_file import RowsInFile
from batchgen.models.tensor_files.table_rows import TableRows
from batchgen.ops import int8


class _Load(Protocol):
    """A function that loads tensors by name."""

    def __call__(self, which: Which, layer: int, dtype: torch.dtype, left_out: str | None = None) -> dict[str, Tensor]:
        """Load tensors.

        Args:
            which: "embeddings", "layer", "head" or "sinks".
            layer: Number of the layer.
            dtype: Compute dtype.
            left_out: Name of a tensor that is not loaded: a table that `open_rows` opens.
        """


_LoadUnread = Callable[[Which, int, torch.dtype], dict[str, Tensor | RowsInFile]]


@dataclass(frozen=True)
class Checkpoint:
    """The weights of a model, loaded piece by piece. Each call reads the files again and keeps nothing.

    Loaded tensors are contiguous and have memory of their own. While a tensor is loaded, only a few MB of further
    memory are used.

    Attributes:
        config: Configuration of the model, or of the shard of a tensor-parallel rank.
        load: Function that loads tensors in the compute dtype.
        weight_format: Format of the layers' matrices, if `load_stored` can load them without a conversion; None
            otherwise.
        load_stored: Function that loads tensors with matrices in `weight_format`, or None.
        load_unread: Function that returns block-quantized rows as places in files (`RowsInFile`) and all other tensors
            loaded; None: the rows cannot be left in the files.
        open_rows: Function that opens a table before or after the layers by its name, to read its rows one by one; its
            result is None where its rows cannot be read so.

    Raises:
        InputError: A tensor cannot be read; the message names file and tensor.
        BatchgenError: A group of a weight store cannot be read, or its checksum is wrong; the message names file and
            group.
    """

    config: ModelConfig
    load: _Load
    weight_format: str | None = None
    load_stored: _Load | None = None
    load_unread: _LoadUnread | None = None
    open_rows: Callable[[str], TableRows | None] = lambda _: None

    def load_embeddings(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """The tensors before the first layer, by name.

        "embed.weight" is [vocab, embed]. If the model has them, "positions.weight" is [max_position + offset, hidden]
        and "embed_proj.weight" is [hidden, embed].

        Args:
            dtype: Dtype of the loaded tensors.
        """
        return self.load("embeddings", 0, dtype)

    def load_layer(self, layer: int, dtype: torch.dtype) -> dict[str, Tensor]:
        """The tensors of one layer, by name.

        A name is one of the following with ".weight", and, if the model has a bias, with ".bias". Tensors that the
        model does not have are left out.

            input_norm, post_norm     [hidden]
            qkv                       [(heads + 2 kv_heads) head_dim, hidden]: rows of queries, keys, values, and before
                                      them those of the output gate, if there is one; in a Gated DeltaNet
                                      [projected_size, hidden]: queries, keys, values and the gate z
            ba                        [2 value_heads, hidden]: rows of a Gated DeltaNet's gates b, then a
            conv                      [channels, kernel]
            a_log, dt_bias            [value_heads], named without ".weight"
            state_norm                [value_dim]
            q_norm, k_norm            [head_dim], or [heads head_dim] and [kv_heads head_dim]
            out                       [hidden, heads head_dim]
            out_norm, down_norm       [hidden], with `output_norms`
            gate_up                   [2 intermediate, hidden]: rows of gate, up
            up                        [intermediate, hidden], without a gate
            down                      [hidden, intermediate]
            router                    [experts, hidden]
            layer_scale               [1]: factor of the layer's output
            per_layer_up              [per_layer_size, hidden], before the layer's per-layer embeddings are multiplied
            per_layer_down            [hidden, per_layer_size], after it
            per_layer_norm            [hidden]
            shared_gate               [1, hidden]: gate of the shared expert
            shared_gate_up            matrix of the shared expert, as gate_up
            shared_down               matrix of the shared expert, as down
            router_norm, expert_scale [hidden], [experts]: norm of the router's input, factors of the experts' results
            experts_norm, experts_out_norm, shared_out_norm
                                      [hidden]: norms of the experts' input, and of both results

        Layers that reuse the KV of another one have no keys and values, and some have values alone that are the keys.
        With experts, the rows of gate_up and of down are those of all experts, one expert after the other.

        Args:
            layer: Number of the layer.
            dtype: Dtype of the loaded tensors.
        """
        return self.load("layer", layer, dtype)

    def load_packed(
        self, which: Which, layer: int, dtype: torch.dtype, weight_format: str, left_out: str | None = None
    ) -> dict[str, Tensor]:
        """The tensors of a layer, or before or after the layers, with packed matrices (`layouts.stored_tensors`).

        Args:
            which: "embeddings", "layer" or "head".
            layer: Number of the layer.
            dtype: Compute dtype, in which all other tensors are loaded.
            weight_format: Format of the matrices: "int8", or the checkpoint's own format.
            left_out: Name of a tensor that is not loaded: a table that `open_rows` opens.
        """
        if weight_format == INT8:
            return self.load_int8_layer(layer, dtype) if which == "layer" else self.load(which, layer, dtype, left_out)
        assert self.load_stored is not None and weight_format == self.weight_format
        return self.load_stored(which, layer, dtype, left_out)

    def load_int8_layer(self, layer: int, dtype: torch.dtype) -> dict[str, Tensor]:
        """The tensors of one layer, with matrices as int8 rows (`ops.int8`).

        Matrices that the checkpoint stores as int8 are loaded without a conversion. Others are quantized.

        Args:
            layer: Number of the layer.
            dtype: Dtype of all other tensors.
        """
        if self.load_stored is not None and self.weight_format == INT8:
            return self.load_stored("layer", layer, dtype)
        tensors = self.load_layer(layer, dtype)
        return {name: int8.quantize(t) if is_quantized(name, tuple(t.shape)) else t for name, t in tensors.items()}

    def open_per_layer(self) -> TableRows | None:
        """The table of per-layer embeddings, whose rows are read one by one; None: the model has none."""
        return self.open_rows(f"{PER_LAYER}.weight") if self.config.per_layer_size else None

    def load_head(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """The tensors after the last layer, by name.

        "lm_head.weight" is the output matrix [vocab, embed]; it is the token embedding if that is tied. If the model
        has them, "final_norm.weight" and "final_norm.bias" are [hidden], "head_proj.weight" is [embed, hidden], and
        "sinks.weight" is [layers * heads].

        Args:
            dtype: Dtype of the loaded tensors.
        """
        return self.load("head", 0, dtype)

    def load_sinks(self, dtype: torch.dtype) -> Tensor | None:
        """Attention sinks of all layers, [layers * heads] of dtype `dtype`; None: the model has none."""
        return self.load("sinks", 0, dtype)["sinks.weight"] if self.config.sinks else None


def open_checkpoint(files: ModelFiles, config: ModelConfig | None = None, shard: Shard | None = None) -> Checkpoint:
    """Open the weights of a model without reading them.

    The presence and shape of every tensor are checked; for a weight store, also the sizes of its files.

    Args:
        files: Files of the model.
        config: Configuration of the model, if it has been read already. None: it is read.
        shard: Part of each layer that a tensor-parallel rank needs; None: the whole layer. Packed weights can be loaded
            for a shard only in a format for which `shard.divides` is true.

    Raises:
        InputError: The model is not supported, or a file is missing, corrupt or has tensors of a wrong shape.
    """
    if files.kind == "store":
        return _store_checkpoint(open_store(files.path), shard)
    config = shard.whole if shard else config or read_config(files)
    if files.kind == "dummy":
        return dummy_checkpoint(config, shard=shard)
    tensors = ModelTensors(files.path, weight_tensors(files))
    stored_format = stored_weights(files)
    of_gguf = files.kind == "gguf"
    change = merging(config, read_lora(files.lora), unfused=of_gguf) if files.lora else unchanged
    if of_gguf:
        ahead = partial(read_layer_ahead, tensors)
        return _checkpoint_of(_Parts(config, gguf_parts(config, tensors, change), stored_format, shard, True, ahead))
    parts = hf_parts(config, files.path, tensors, stated_scheme(files), change)
    return _checkpoint_of(_Parts(config, parts, stored_format, shard))


def open_hf(config: ModelConfig, files: ModelFiles, tensors: Mapping[str, TensorInfo]) -> Checkpoint:
    """Open a part of a Hugging Face directory as a model of its own.

    Args:
        config: Configuration of that model.
        files: Files of the whole model.
        tensors: The part's tensors, under the names that such a model would have.

    Raises:
        InputError: A tensor is missing or has a wrong shape.
    """
    parts = hf_parts(config, files.path, ModelTensors(files.path, dict(tensors)), stated_scheme(files))
    return _checkpoint_of(_Parts(config, parts))


def dummy_checkpoint(config: ModelConfig, seed: int = 0, shard: Shard | None = None) -> Checkpoint:
    """Pseudorandom weights for a model of any shape, for benchmarks (`formats/dummy.py`).

    Args:
        config: Configuration of the whole model.
        seed: Seed of the weights.
        shard: Part of each layer that a tensor-parallel rank needs; None: the whole layer.
    """
    return _checkpoint_of(_Parts(config, dummy_parts(config, seed), shard=shard))


@dataclass(frozen=True)
class _Parts:
    """The stored parts of a model, and the methods that join them to tensors.

    Attributes:
        whole: Configuration of the whole model.
        parts: Every stored part, by name and layer.
        stored_format: Format in which rows of matrices can be loaded without a conversion; None: there is none.
        shard: Part of each layer that a tensor-parallel rank needs; None: the whole layer.
        of_gguf: Whether each part is a single matrix of a GGUF, whose block-quantized rows can be left in the file.
        read_ahead: Function that starts reading a layer's tensors into the page cache, or None.
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
        """The format in which matrices are loaded without a conversion; None: there is none.

        For a tensor-parallel rank it is `stored_format` only if the rank's part can be cut out of packed rows.
        """
        return self.stored_format if self.shard is None or self.stored_format in NATIVE_FORMATS else None

    def load(self, which: Which, layer: int, dtype: torch.dtype, left_out: str | None = None) -> dict[str, Tensor]:
        self._prefetch(which, layer)
        layout = _without(left_out, layout_of(self.config, which, layer, unfused=self.of_gguf))
        tensors = {name: torch.empty(shape, dtype=dtype) for name, shape in tensor_shapes(layout).items()}
        return self._filled(which, layout, layer, tensors)

    def load_stored(
        self, which: Which, layer: int, dtype: torch.dtype, left_out: str | None = None
    ) -> dict[str, Tensor]:
        if self.config.num_experts:  # too small to be read by several threads around the page cache
            self._prefetch(which, layer)
        layout, stored = self._packed(which, layer, dtype)
        layout = _without(left_out, layout)
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

    def open_rows(self, name: str) -> TableRows | None:
        """A table by its name, if it can be read by row. A rank's share of embeddings or output matrix cannot."""
        part = None if self.shard and not name.startswith(PER_LAYER) else self.parts.get((name, 0))
        try:
            return part.table_rows() if part is not None else None
        except NotImplementedError:
            return None

    def _packed(self, which: Which, layer: int, dtype: torch.dtype) -> tuple[Layout, dict[str, Stored]]:
        """The parts of each tensor, and the form in which it is stored, if matrices stay in `packed_format`."""
        weight_format = self.packed_format
        assert weight_format is not None
        stored = stored_tensors(self.config, which, layer, dtype_name(dtype), weight_format)
        return packed_layout(self.config, which, layer, weight_format, unfused=self.of_gguf), stored

    def _prefetch(self, which: Which, layer: int) -> None:
        """Start reading this layer and the next one into the page cache."""
        if self.read_ahead and which == "layer":
            self.read_ahead(layer)
            self.read_ahead(layer + 1)

    def _filled(self, which: Which, layout: Layout, layer: int, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Fill allocated tensors: read each part into its rows of the tensor.

        Args:
            which: "embeddings", "layer", "head" or "sinks".
            layout: Parts of each tensor.
            layer: Number of the layer.
            tensors: Allocated tensors, by name.

        Returns:
            `tensors`.
        """
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
        return Checkpoint(parts.config, parts.load, open_rows=parts.open_rows)
    unread = parts.load_unread if parts.of_gguf and not parts.shard else None
    packed = parts.packed_format, parts.load_stored, unread
    return Checkpoint(parts.config, parts.load, *packed, open_rows=parts.open_rows)


def _without(name: str | None, layout: Layout) -> Layout:
    return {other: parts for other, parts in layout.items() if other != name}


def _space(stored: Stored) -> Tensor:
    """Memory for a tensor in its stored form.

    The memory of int8 rows is zeroed, because a row has padding before its scale.
    """
    if not stored.is_packed:
        return torch.empty(stored.shape, dtype=getattr(torch, stored.dtype))
    if stored.dtype == INT8:
        return torch.zeros(stored.stored_shape, dtype=torch.int8)
    return torch.empty(stored.stored_shape, dtype=torch.uint8)


@dataclass(frozen=True)
class _StoreTensors:
    """The methods that load tensors from a weight store.

    Attributes:
        store: The weight store.
        shard: Part of each layer that a tensor-parallel rank needs; None: the whole layer.
    """

    store: WeightStore
    shard: Shard | None

    @property
    def packed_format(self) -> str | None:
        """The format in which matrices are loaded without a conversion; None: there is none.

        For a tensor-parallel rank it is the store's format only if the rank's part can be cut out of packed rows.
        """
        packed = (INT4, *NATIVE_FORMATS) if self.shard else PACKED_FORMATS
        return self.store.weight_format if self.store.weight_format in packed else None

    def load(self, which: Which, layer: int, dtype: torch.dtype, left_out: str | None = None) -> dict[str, Tensor]:
        assert left_out is None, "`open_rows` opens no table of embeddings or output matrix"
        file = self._file(which, layer)
        groups = [load_extent(file, extent, dtype) for extent in file.extents.values()]
        stored = {name: tensor for group in groups for name, tensor in group.items()}
        layout = self._layout("head" if which == "sinks" else which, layer)  # sinks are stored with the head
        config = self.store.config
        tensors = {name: stored[name] if name in stored else joined(config, layer, name, stored) for name in layout}
        return cut_tensors(self.shard, layout, tensors) if self.shard else tensors

    def load_stored(
        self, which: Which, layer: int, dtype: torch.dtype, left_out: str | None = None
    ) -> dict[str, Tensor]:
        assert left_out is None, "`open_rows` opens no table of embeddings or output matrix"
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
    load_stored = tensors.load_stored if packed_format else None

    def rows(name: str) -> TableRows | None:
        return open_rows(store.per_layer, name) if store.per_layer and name.startswith(PER_LAYER) else None

    return Checkpoint(config, tensors.load, packed_format, load_stored, open_rows=rows)


def joined(config: ModelConfig, layer: int, name: str, tensors: Mapping[str, Tensor]) -> Tensor:
    """A tensor of a layer, joined from the tensors of its roles that are stored one by one (`layouts.packed_layout`).

    The rows of each expert become contiguous again.

    Args:
        config: Configuration of the model.
        layer: Number of the layer.
        name: Name of the joined tensor: "gate_up.weight".
        tensors: The stored tensors, by name: "gate_up.gate.weight" and "gate_up.up.weight".
    """
    stem = name.removesuffix("weight")
    parts = [tensor for other, tensor in tensors.items() if other.startswith(stem) and other.endswith(".weight")]
    if stem != "gate_up." or not config.has_experts(layer):
        return torch.cat(parts)
    return torch.cat(
        [each for pair in zip(*(p.chunk(config.num_experts) for p in parts), strict=True) for each in pair]
    )
