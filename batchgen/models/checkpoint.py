"""A model's weights under one set of names, whatever file they come from, a layer at a time.

A layout (`layouts.py`) says which parts make up each tensor; a format only has to fill one part.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from batchgen.core.dtypes import BLOCK_FORMATS, INT8, KEPT_FORMATS, PACKED_FORMATS
from batchgen.core.errors import InputError
from batchgen.models.config import ModelConfig
from batchgen.models.cutting import Fill, FillCut, cut_tensors, cut_while_filling
from batchgen.models.families import GEMMA
from batchgen.models.files import ModelFiles, read_config, stated_scheme, stored_weights, weight_tensors
from batchgen.models.formats import fp8, fused_experts, group_codes
from batchgen.models.formats.fp8 import Fp8Numbers
from batchgen.models.formats.gguf import tensors as gguf_tensors
from batchgen.models.formats.group_codes import GroupCodes
from batchgen.models.formats.quantization import FP8, GROUP_LAYOUTS, Scheme
from batchgen.models.hf.tensor_names import tensor_names
from batchgen.models.hf.weight_files import missing_tensor
from batchgen.models.layouts import (
    Layout,
    Stored,
    is_quantized,
    layout_of,
    packed_layout,
    stored_tensors,
    tensor_shapes,
)
from batchgen.models.rope import rotates_part
from batchgen.models.shard import Cut, Shard
from batchgen.models.store.layout import StoreFile
from batchgen.models.store.weight_store import load_extent, open_store, read_extent
from batchgen.models.tensor_files import reading
from batchgen.models.tensor_files.headers import TensorInfo
from batchgen.models.tensor_files.reading import (
    CHUNK_VALUES,
    NUMBERS,
    check_stored,
    read_bytes,
    read_into,
    read_numbers,
)
from batchgen.models.tensor_files.rows_in_file import FilePart, RowsInFile
from batchgen.ops import int8

# (part, layer) -> the name of its tensor, and where that lies
_Find = Callable[[str, int], tuple[str, TensorInfo]]
_Load = Callable[[str, int, torch.dtype], dict[str, Tensor]]  # as of `Checkpoint`
_LoadUnread = Callable[[str, int, torch.dtype], dict[str, Tensor | RowsInFile]]

_DUMMY_VALUES = (1 << 22) + 3  # odd, so that rows of a power-of-two width all differ


@dataclass(frozen=True)
class Checkpoint:
    """Weights to be loaded piece by piece; each call reads anew and keeps nothing.

    Tensors come back contiguous, in the dtype asked for, in memory of their own; beside them only a few MB are held.
    Calls raise InputError naming file and tensor where reading fails; of a weight store BatchgenError naming file and
    group, also where a checksum does not fit.
    """

    config: ModelConfig
    load: _Load  # ("embeddings", "layer", "head" or "sinks", layer, dtype)
    # Of one whose matrices are packed: the layers' format, and what `load` gives as it is stored.
    weight_format: str | None = None
    load_stored: _Load | None = None
    # As `load_stored`, but that rows of blocks are not read; of one that can say where in its files they are.
    load_unread: _LoadUnread | None = None

    def load_embeddings(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """What stands before the layers, by name.

        "embed.weight" [vocab, embed]; where the model has them "positions.weight" [max_position + offset, hidden] and
        "embed_proj.weight" [hidden, embed].
        """
        return self.load("embeddings", 0, dtype)

    def load_layer(self, layer: int, dtype: torch.dtype) -> dict[str, Tensor]:
        """One layer's tensors, by name.

        "input_norm", "qkv" [(heads + 2 kv_heads) head_dim, hidden] (q, k, v),
        "q_norm" and "k_norm" [head_dim], "out", "out_norm" and "down_norm" where `output_norms`, "post_norm", "gate_up" [2 intermediate, hidden] (gate, up) or
        "up", and "down"; of experts those of all in the rows, and "router" [experts, hidden]; of the one that all tokens share
        "shared_gate" [1, hidden], "shared_gate_up" and "shared_down". Each has ".weight" and, where the model has it, ".bias".
        """
        return self.load("layer", layer, dtype)

    def load_packed(self, which: str, layer: int, dtype: torch.dtype, weight_format: str) -> dict[str, Tensor]:
        """As `load`, packed matrices as `layouts.stored_tensors` has them.

        weight_format: "int8", or the checkpoint's own.
        """
        if weight_format == INT8:
            return self.load_int8_layer(layer, dtype) if which == "layer" else self.load(which, layer, dtype)
        assert self.load_stored is not None and weight_format == self.weight_format
        return self.load_stored(which, layer, dtype)

    def load_int8_layer(self, layer: int, dtype: torch.dtype) -> dict[str, Tensor]:
        """As `load_layer`, matrices in rows of 8 bits (`ops.int8`): as they are stored, or else quantized."""
        if self.load_stored is not None and self.weight_format == INT8:
            return self.load_stored("layer", layer, dtype)
        tensors = self.load_layer(layer, dtype)
        return {name: int8.quantize(t) if is_quantized(name, tuple(t.shape)) else t for name, t in tensors.items()}

    def load_head(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """What stands after the layers, by name.

        Those the model has of "final_norm.weight" and ".bias" [hidden], "head_proj.weight" [embed, hidden],
        "sinks.weight" [layers * heads] and "lm_head.weight" [vocab, embed]; where it is tied, the embedding stands in for the last.
        """
        return self.load("head", 0, dtype)

    def load_sinks(self, dtype: torch.dtype) -> Tensor | None:
        """Of the attention of all layers [layers * heads]; None: the model has none."""
        return self.load("sinks", 0, dtype)["sinks.weight"] if self.config.sinks else None


def open_checkpoint(files: ModelFiles, config: ModelConfig | None = None, shard: Shard | None = None) -> Checkpoint:
    """The model's weights. Every tensor's presence and shape is checked here, before any is read.

    Of a weight store, only that its files have their sizes. config: where it has been read already. shard: the part of each layer
    that is wanted, packed in a format that it `divides`; None: the whole. Raises InputError where the model is not supported, or a
    file is missing, corrupt or of another shape.
    """
    if files.kind == "store":
        return _store_checkpoint(files, shard)
    config = shard.whole if shard else config or read_config(files)
    if files.kind == "dummy":
        return dummy_checkpoint(config, shard=shard)
    tensors = weight_tensors(files)

    def get(name: str) -> TensorInfo:
        if name not in tensors:
            raise missing_tensor(files.path, tensors, name)
        return tensors[name]

    if files.kind == "gguf":
        return _gguf_checkpoint(config, files, tensors, get, shard)
    return _hf_checkpoint(config, files, tensors, get, shard)


def _hf_checkpoint(
    config: ModelConfig,
    files: ModelFiles,
    tensors: dict[str, TensorInfo],
    get: Callable[[str], TensorInfo],
    shard: Shard | None,
) -> Checkpoint:
    names = _part_names(config, files, tensors)

    def find(part: str, layer: int) -> tuple[str, TensorInfo]:
        stem, suffix = part.rsplit(".", 1)
        name = f"{names[stem].format(layer)}.{suffix}"
        return name, get(name)

    def find_fused(part: str, layer: int) -> fused_experts.Source:
        in_blocks = f"{names['experts'].format(layer)}.{part.split('.')[1]}_blocks" in tensors
        suffixes = ("_blocks", "_scales") if in_blocks else ("",)
        return fused_experts.Source(part, tuple(find(f"{part}{suffix}", layer) for suffix in suffixes))

    stored_format = stored_weights(files)
    coded = _coded_parts(config, stated_scheme(files), names, tensors)
    for part, shape, layer, in_layer in _all_parts(config):
        if fused_experts.is_fused(part):
            fused_experts.check(config, files.path, find_fused(part, layer))
        elif stored_format == INT8 and in_layer and len(shape) == 2:
            _check_codes(*find(part, layer), *find(f"{part}_scale", layer), shape)
        elif (part, layer) not in coded:
            check_stored(*find(part, layer), shape)
    _refuse_unread(config, names, tensors)
    if config.tied_embeddings and f"{names['lm_head']}.weight" in tensors:
        _check_tied(tensors, f"{names['embed']}.weight", f"{names['lm_head']}.weight")

    def fill(part: str, layer: int, out: Tensor) -> None:
        if fused_experts.is_fused(part):
            return fused_experts.fill(config, find_fused(part, layer), read_into, out)
        if found := coded.get((part, layer)):
            found.fill(out)
        else:
            _fill(config, find, part, layer, out)
        if rotates_part(config.rope, part):
            _order_heads(config, out)

    return _part_checkpoint(config, fill, stored_format, shard, partial(_fill_cut, config, find, coded))


def _gguf_checkpoint(
    config: ModelConfig,
    files: ModelFiles,
    tensors: dict[str, TensorInfo],
    get: Callable[[str], TensorInfo],
    shard: Shard | None,
) -> Checkpoint:
    for part, shape, layer, _ in _all_parts(config, unfused=True):
        gguf_tensors.check(*gguf_tensors.find(config, get, part, layer), shape)

    def fill(part: str, layer: int, out: Tensor) -> None:
        gguf_tensors.fill(config, *gguf_tensors.find(config, get, part, layer), part, out)
        if rotates_part(config.rope, part):
            _order_heads(config, out)

    def in_file(part: str, layer: int) -> FilePart:
        return gguf_tensors.in_file(config, *gguf_tensors.find(config, get, part, layer), part)

    stored_format = stored_weights(files)
    made = _part_checkpoint(config, fill, stored_format, shard, in_file=None if shard else in_file, unfused=True)

    def ahead(load: _Load) -> _Load:
        def loading(which: str, layer: int, dtype: torch.dtype) -> dict[str, Tensor]:
            for j in range(layer, layer + 2) if which == "layer" else ():
                gguf_tensors.read_layer_ahead(tensors, j)
            return load(which, layer, dtype)

        return loading

    load_stored = made.load_stored
    if config.num_experts and load_stored:  # experts are too small to be read by several threads around the page cache
        load_stored = ahead(load_stored)
    return replace(made, load=ahead(made.load), load_stored=load_stored)


def _fill_cut(
    config: ModelConfig, find: _Find, coded: Collection, part: str, layer: int, out: Tensor, cut: Cut
) -> bool:
    """Fills what a rank has of a part, reading not much more than that; False where the part has to be read whole.

    coded: parts in codes.
    """
    if fused_experts.is_fused(part) or (part, layer) in coded:
        return False
    name, info = find(part, layer)
    if info.dtype not in NUMBERS or not (cut.is_stretch or cut.by_columns):
        return False
    if cut.by_columns:
        _fill_columns(name, info, out, cut.rank * out.shape[1])
        return True
    read_numbers(name, info, out, first=cut.rank * out.numel())
    if rotates_part(config.rope, part):
        _order_heads(config, out)
    return True


def _coded_parts(
    config: ModelConfig, scheme: Scheme | None, names: dict[str, str], tensors: dict[str, TensorInfo]
) -> dict[tuple[str, int], GroupCodes | Fp8Numbers]:
    """(part, layer) -> the matrix, of those that are in groups of codes or in FP8; they are checked."""
    found: dict[tuple[str, int], GroupCodes | Fp8Numbers] = {}
    if scheme is None or scheme.layout not in (*GROUP_LAYOUTS, FP8):
        return found
    find: Callable[..., GroupCodes | Fp8Numbers | None] = fp8.find if scheme.layout == FP8 else group_codes.find
    for part, shape, layer, _ in _all_parts(config):
        stem, suffix = part.rsplit(".", 1)
        if (
            suffix == "weight"
            and len(shape) == 2
            and (coded := find(tensors, names[stem].format(layer), shape, scheme))
        ):
            found[part, layer] = coded
    return found


def _all_parts(config: ModelConfig, *, unfused: bool = False) -> Iterator[tuple[str, tuple[int, ...], int, bool]]:
    """Each part of a model, its shape, its layer, and whether it is of a layer."""
    layouts = [(layout_of(config, which, 0), 0, False) for which in ("embeddings", "head")]
    of_layers = range(config.num_layers)
    layouts += [(layout_of(config, "layer", layer, unfused=unfused), layer, True) for layer in of_layers]
    for layout, layer, in_layer in layouts:
        for parts in layout.values():
            for part, shape in parts:
                yield part, shape, layer, in_layer


def _fill(config: ModelConfig, find: _Find, part: str, layer: int, out: Tensor) -> None:
    """Fills a part as its file has it."""
    name, info = find(part, layer)
    if info.dtype == "I8":
        _fill_from_codes((name, info), find(f"{part}_scale", layer), out)
    elif config.family in GEMMA and part.endswith("norm.weight"):
        read_numbers(name, info, weight := torch.empty(out.shape))
        out.copy_(weight.add_(1))  # they hold w of (1 + w) x / rms(x)
    else:
        read_numbers(name, info, out)


def _order_heads(config: ModelConfig, rows: Tensor) -> None:
    """Puts rows of queries and keys [heads * head_dim, ...] in the order that whole heads are rotated in; values stay.

    Scores are sums over a head's values, whose order is free.
    """
    dim = config.head_dim
    order = torch.tensor(config.rope.row_order(dim))
    turned = min(len(rows), (config.num_heads + config.num_kv_heads) * dim)
    for head in rows[:turned].split(dim):
        head.copy_(head[order])


def dummy_checkpoint(config: ModelConfig, seed: int = 0, shard: Shard | None = None) -> Checkpoint:
    """Dummy weights of any shape, for benchmarks: normal with standard deviation 0.02, norms 1. shard: as of `open_checkpoint`.

    Every tensor is a stretch of one pool of random numbers, so that even a large model is made at memory
    speed; seed, layer and name decide which stretch.
    """
    pool = torch.randn(_DUMMY_VALUES, generator=torch.Generator().manual_seed(seed)) * 0.02

    def fill(part: str, layer: int, out: Tensor) -> None:
        if part.endswith("norm.weight"):
            out.fill_(1.0)
            return
        flat = out.view(-1)
        start = int.from_bytes(hashlib.sha256(f"{part} {layer}".encode()).digest()[:8], "little") % len(pool)
        done = 0
        while done < len(flat):
            stretch = pool[start : start + len(flat) - done]
            flat[done : done + len(stretch)].copy_(stretch)
            done, start = done + len(stretch), 0

    return _part_checkpoint(config, fill, shard=shard)


def _part_checkpoint(
    config: ModelConfig,
    fill: Fill,
    stored_format: str | None = None,
    shard: Shard | None = None,
    fill_cut: FillCut = lambda part, layer, out, cut: False,
    *,
    in_file: Callable[[str, int], FilePart] | None = None,
    unfused: bool = False,
) -> Checkpoint:
    """A checkpoint put together of its parts.

    Args:
        config: Of the whole model.
        fill: Fills a part, whole.
        stored_format: It fills rows packed in this format too.
        shard: What is wanted of each layer.
        fill_cut: Fills what of a part is wanted without the rest of it, if it can; says whether it could.
        in_file: Where a part in rows of blocks is, if they are as `fill` would take them.
        unfused: As of `layouts.layer_layout`.
    """
    if shard is not None:
        config = shard.config
        stored_format = stored_format if stored_format in KEPT_FORMATS else None  # a row of int8 has one scale
        fill = cut_while_filling(shard, lambda layer: _places(shard.whole, layer, unfused), fill, fill_cut)

    def load(which: str, layer: int, dtype: torch.dtype) -> dict[str, Tensor]:
        layout = layout_of(config, which, layer, unfused=unfused)
        spaces = {name: torch.empty(shape, dtype=dtype) for name, shape in tensor_shapes(layout).items()}
        return filled(layout, layer, spaces)

    def load_stored(which: str, layer: int, dtype: torch.dtype) -> dict[str, Tensor]:
        stored = stored_tensors(config, which, layer, str(dtype).removeprefix("torch."), stored_format)
        layout = packed_layout(config, which, layer, stored_format, unfused=unfused)
        return filled(layout, layer, {name: _space(stored[name]) for name in layout})

    def load_unread(which: str, layer: int, dtype: torch.dtype) -> dict[str, Tensor | RowsInFile]:
        stored = stored_tensors(config, which, layer, str(dtype).removeprefix("torch."), stored_format)
        layout = packed_layout(config, which, layer, stored_format, unfused=unfused)
        read = {name: parts for name, parts in layout.items() if stored[name].dtype not in BLOCK_FORMATS}
        tensors = filled(read, layer, {name: _space(stored[name]) for name in read})
        unread = {
            name: RowsInFile(tuple(in_file(part, layer) for part, _ in layout[name]), stored[name].stored_shape[1])
            for name in layout
            if name not in read
        }
        return {name: tensors[name] if name in read else unread[name] for name in layout}

    def filled(layout: Layout, layer: int, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        for name, parts in layout.items():
            pieces = tensors[name].split([shape[0] for _, shape in parts])
            for (part, _), piece in zip(parts, pieces, strict=True):
                fill(part, layer, piece)
        return tensors

    if not stored_format:
        return Checkpoint(config, load)
    return Checkpoint(config, load, stored_format, load_stored, load_unread if in_file else None)


def _space(stored: Stored) -> Tensor:
    """Memory for a tensor as it is stored; between the codes of int8 and their scales there are zeros."""
    if not stored.is_packed:
        return torch.empty(stored.shape, dtype=getattr(torch, stored.dtype))
    if stored.dtype == INT8:
        return torch.zeros(stored.stored_shape, dtype=torch.int8)
    return torch.empty(stored.stored_shape, dtype=torch.uint8)


def _places(config: ModelConfig, layer: int, unfused: bool) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Of each part of a layer, or before or after the layers: the tensor that it is of, and its shape."""
    layouts = [layout_of(config, which, layer, unfused=unfused) for which in ("embeddings", "layer", "head")]
    return {part: (name, shape) for layout in layouts for name, parts in layout.items() for part, shape in parts}


def _store_checkpoint(files: ModelFiles, shard: Shard | None = None) -> Checkpoint:
    store = open_store(files.path)

    def file_of(which: str, layer: int) -> StoreFile:
        files = {"embeddings": store.embeddings, "layer": store.layers[layer], "head": store.head, "sinks": store.head}
        return files[which]

    def load(which: str, layer: int, dtype: torch.dtype) -> dict[str, Tensor]:
        file = file_of(which, layer)
        groups = [load_extent(file, extent, dtype) for extent in file.extents.values()]
        tensors = {name: tensor for group in groups for name, tensor in group.items()}
        layout = layout_of(store.config, "head" if which == "sinks" else which, layer)
        return {
            name: tensors[name] if name in tensors else joined(store.config, layer, name, tensors) for name in layout
        }

    def load_own(which: str, layer: int, dtype: torch.dtype) -> dict[str, Tensor]:
        layout = layout_of(shard.whole, "head" if which == "sinks" else which, layer)  # which are stored together
        return cut_tensors(shard, layout, load(which, layer, dtype))

    def load_own_stored(which: str, layer: int, dtype: torch.dtype) -> dict[str, Tensor]:
        layout = layout_of(shard.whole, which, layer)
        return cut_tensors(shard, layout, load_stored(which, layer, dtype), store.weight_format)

    def load_stored(which: str, layer: int, dtype: torch.dtype) -> dict[str, Tensor]:
        file = file_of(which, layer)
        groups = [read_extent(file, extent) for extent in file.extents.values()]
        tensors = {name: tensor for group in groups for name, tensor in group.items()}
        return {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}

    kept = store.weight_format if store.weight_format in PACKED_FORMATS else None
    if shard is not None:
        kept = kept if kept != INT8 else None
        return Checkpoint(shard.config, load_own, kept, load_own_stored if kept else None)
    return Checkpoint(store.config, load, kept, load_stored if kept else None)


def joined(config: ModelConfig, layer: int, name: str, tensors: Mapping[str, Tensor]) -> Tensor:
    """The tensor of a layer that was stored in several, by role (`layouts.packed_layout`); of experts, one after the other again."""
    stem = name.removesuffix("weight")
    parts = [tensor for own, tensor in tensors.items() if own.startswith(stem) and own.endswith(".weight")]
    if stem != "gate_up." or not config.has_experts(layer):
        return torch.cat(parts)
    return torch.cat(
        [each for pair in zip(*(p.chunk(config.num_experts) for p in parts), strict=True) for each in pair]
    )


# What names of tensors begin with: all of them, and that of an output matrix of its own. Checkpoints differ.
_PREFIXES = {
    "opt": (("model.decoder.", ""), ("decoder.", "")),
    "gemma3": (("model.", ""), ("", ""), ("model.language_model.", ""), ("language_model.model.", "language_model.")),
}


def _part_names(config: ModelConfig, files: ModelFiles, tensors: dict[str, TensorInfo]) -> dict[str, str]:
    """Part -> name in the file, with {} for the layer."""
    prefixes = _PREFIXES.get(config.family, (("model.", ""), ("", "")))
    found = [(prefix, of_head) for prefix, of_head in prefixes if f"{prefix}embed_tokens.weight" in tensors]
    if not found:
        raise missing_tensor(files.path, tensors, f"{prefixes[0][0]}embed_tokens.weight")
    (prefix, of_head), table = found[0], tensor_names(config)
    return {part: prefix + name for part, name in table.items()} | {"lm_head": f"{of_head}lm_head"}


def _refuse_unread(config: ModelConfig, names: dict[str, str], tensors: dict[str, TensorInfo]) -> None:
    """Raises InputError for weights of a model with more layers, biases or norms than its config.json says.

    GPTQ's files have biases that are all zero, and change nothing.
    """
    read = {f"{names['lm_head']}.weight"}  # of a tied model it is checked apart
    for part, _, layer, _ in _all_parts(config):
        stem, _, suffix = part.rpartition(".")
        if stem in names:
            read.add(f"{names[stem].format(layer)}.{suffix}")
    known = set(names.values())
    for name, info in tensors.items():
        stem, _, suffix = name.rpartition(".")
        found = re.search(r"(?<=layers\.)\d+(?=\.)", stem)
        whole = f"{stem[: found.start()]}{{}}{stem[found.end() :]}" if found else stem
        if name in read or suffix not in ("weight", "bias") or whole not in known:
            continue
        if found and int(found[0]) >= config.num_layers:
            raise InputError(
                f"{info.path} has a layer {found[0]} ({name}), and its config.json says that there are {config.num_layers}, counted "
                "from 0: take the config.json of these weights"
            )
        if suffix == "weight" or not _is_zero(name, info):
            raise InputError(
                f"{info.path} has the tensor {name}, which the model that its config.json describes does not use: "
                "take the config.json of these weights"
            )


def _is_zero(name: str, info: TensorInfo) -> bool:
    """Tell whether a bias changes nothing."""
    if info.dtype not in NUMBERS:
        return False
    read_numbers(name, info, bias := torch.empty(info.shape))
    return not bias.any()


def _check_codes(name: str, info: TensorInfo, scale_name: str, scale: TensorInfo, shape: tuple[int, ...]) -> None:
    """A matrix of 8 bits with a scale for each of its rows."""
    where = f"tensor {name} in {info.path}"
    if info.dtype != "I8":
        raise InputError(
            f"{where} is {info.dtype}, but its config.json says that all layers have weights of 8 bits (I8)"
        )
    if info.shape != shape:
        raise InputError(f"{where} is {list(info.shape)}, its config asks for {list(shape)}")
    if info.num_bytes != math.prod(shape):
        raise InputError(f"{where} has {info.num_bytes:,} bytes, which do not fit its shape")
    if scale.shape not in ((shape[0], 1), (shape[0],)):
        raise InputError(
            f"tensor {scale_name} in {scale.path} is {list(scale.shape)}: only a scale for each output channel is supported"
        )
    check_stored(scale_name, scale, scale.shape)


def _check_tied(tensors: dict[str, TensorInfo], embed: str, lm_head: str) -> None:
    """A file with an output matrix that a tied model would leave unused must hold the embedding there."""
    first, second = tensors[embed], tensors[lm_head]
    same = first.dtype == second.dtype and first.shape == second.shape
    step = max(1, first.num_bytes // 64)
    for offset in range(0, first.num_bytes if same else 0, step):
        count = min(4096, first.num_bytes - offset)
        same = same and read_bytes(embed, first, offset, count) == read_bytes(lm_head, second, offset, count)
    if not same:
        raise InputError(
            f"{second.path} holds a {lm_head} of its own though its config ties it to the embedding: "
            'set "tie_word_embeddings": false in config.json'
        )


def _fill_columns(name: str, info: TensorInfo, out: Tensor, first: int) -> None:
    """Fills `out` with columns of a matrix from the `first` on; its rows are read whole, some at a time."""
    rows, columns = info.shape
    step = max(1, CHUNK_VALUES // columns)
    for start in range(0, rows, step):
        count = min(step, rows - start)
        values = torch.empty(count, columns, dtype=NUMBERS[info.dtype])
        read_numbers(name, info, values, start * columns)
        out[start : start + count].copy_(values[:, first : first + out.shape[1]])


def _fill_from_codes(codes: tuple[str, TensorInfo], scale: tuple[str, TensorInfo], out: Tensor) -> None:
    """Fills rows of 8 bits, or of numbers."""
    name, info = codes
    rows, n = info.shape
    scales = torch.empty(rows, dtype=torch.float32)
    read_numbers(*scale, scales)
    if not bool(
        (scales.isfinite() & ~scales.signbit()).all()
    ):  # a sign would say that the row is rotated (ops/int8.py)
        raise InputError(
            f"tensor {scale[0]} in {scale[1].path} has scales that are negative or no numbers: fetch the model again"
        )
    step = max(1, reading.CHUNK_VALUES // n)
    for start in range(0, rows, step):
        some = slice(start, min(rows, start + step))
        values = torch.empty(some.stop - start, n, dtype=torch.int8)
        read_into(name, info, start * n, memoryview(values.view(-1).view(torch.uint8).numpy()))
        packed = int8.join(values, scales[some, None])
        if out.dtype == torch.int8:
            out[some] = packed
        else:
            int8.dequantize(packed, n, out[some])
