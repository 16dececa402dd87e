"""The weights of a Hugging Face directory: the stored parts of a model in its safetensors files.

All parts are found, and their shapes checked, before any is read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from batchgen.core.errors import InputError
from batchgen.models.config import ModelConfig
from batchgen.models.families import NORMS_LESS_ONE, ROBERTAS
from batchgen.models.formats import fused_experts
from batchgen.models.formats.base import Change, Scheme, StoredPart, Tensors, unchanged
from batchgen.models.formats.head_order import in_head_order, in_sections
from batchgen.models.formats.numbers import Numbers, Zeros
from batchgen.models.hf.stacked_experts import StackedExpert, either_way_stacked, found_expert, single_experts
from batchgen.models.hf.tensor_names import EXPERTS_OF_QWEN3_VL, stacked_experts, tensor_names
from batchgen.models.hf.weight_files import ModelTensors, missing_tensor
from batchgen.models.layouts import Part, all_parts
from batchgen.models.tensor_files.headers import TensorInfo
from batchgen.models.tensor_files.reading import NUMBERS, check_stored, read_bytes, read_numbers

# Prefixes of all names of tensors, and of an output matrix's: of a text model alone, and within a wrapper.
_ANY_PREFIX = (("model.", ""), ("", ""), ("model.language_model.", ""), ("language_model.model.", "language_model."))
# Family -> prefixes of all names of tensors, and of an output matrix's; checkpoints differ.
_PREFIXES = {
    "opt": (("model.decoder.", ""), ("decoder.", "")),
    "bert": (("bert.", ""), ("", "")),
    "distilbert": (("distilbert.", ""), ("", "")),
    "modernbert": (("model.", ""), ("", "")),
    "nomic_bert": (("nomic_bert.", ""), ("", "")),
    "gte": (("gte.", ""), ("new.", ""), ("", "")),
    **dict.fromkeys(ROBERTAS, (("roberta.", ""), ("", ""))),
}


# Parts that are no linear layers, and that no scheme quantizes.
_CONVOLUTIONS = ("conv.weight", "short_conv.weight")


def hf_parts(
    config: ModelConfig, model: Path, tensors: Tensors, scheme: Scheme | None, change: Change = unchanged
) -> dict[tuple[str, int], StoredPart]:
    """Every stored part of a model, by name and layer.

    Args:
        config: Configuration of the model.
        model: Path of the directory.
        tensors: All tensors of the safetensors files.
        scheme: Quantization scheme that config.json states; None: weights are plain numbers.
        change: Change of each part.

    Raises:
        InputError: A tensor is missing, has a wrong shape or dtype, or is not used by the model.
    """
    names = _part_names(config, model, tensors)
    stem = names.get("experts.0.gate", "").removesuffix(".0.gate_proj")
    if stacked := stacked_experts(config):
        tensors = ModelTensors(model, {**tensors, **single_experts(config, tensors, stem, stacked)})
    of_qwen3_vl = EXPERTS_OF_QWEN3_VL if config.family == "qwen3_moe" else {}
    stacked_either_way = either_way_stacked(config, tensors, stem, of_qwen3_vl) if of_qwen3_vl else {}
    parts: dict[tuple[str, int], StoredPart] = {}
    for part in all_parts(config):
        stored = change(part, _find(config, model, names, tensors, stacked_either_way, scheme, part))
        parts[part.name, part.layer] = in_head_order(config, part.name, in_sections(config, part.name, stored))
    _refuse_unread(config, names, tensors)
    if config.tied_embeddings and not config.hidden_output and f"{names['lm_head']}.weight" in tensors:
        _check_tied(tensors, f"{names['embed']}.weight", f"{names['lm_head']}.weight")
    return parts


def _part_names(config: ModelConfig, model: Path, tensors: Tensors) -> dict[str, str]:
    """For each part of a layout, its name in the files of this checkpoint, with {} for the number of the layer."""
    prefixes, table = _PREFIXES.get(config.family, _ANY_PREFIX), tensor_names(config)
    present = [(prefix, of_head) for prefix, of_head in prefixes if f"{prefix}{table['embed']}.weight" in tensors]
    if not present:
        raise missing_tensor(model, tensors, f"{prefixes[0][0]}{table['embed']}.weight")
    prefix, of_head = present[0]
    return {part: prefix + name for part, name in table.items()} | {"lm_head": f"{of_head}lm_head"}


def _find(
    config: ModelConfig,
    model: Path,
    names: dict[str, str],
    tensors: Tensors,
    stacked_either_way: Mapping[str, StackedExpert],
    scheme: Scheme | None,
    part: Part,
) -> StoredPart:
    stem, suffix = part.name.rsplit(".", 1)
    stem = names[stem].format(part.layer)
    name = f"{stem}.{suffix}"
    if (expert := stacked_either_way.get(name)) is not None:
        rows, columns = part.shape
        return found_expert(expert, tensors, scheme, config.num_experts, (rows, columns))
    if fused_experts.is_fused(part.name):
        return fused_experts.find(config, model, tensors, part.name, name)
    is_convolution = part.name in _CONVOLUTIONS
    if scheme and suffix == "weight" and len(part.shape) == 2 and not is_convolution:
        rows, columns = part.shape
        if matrix := scheme.find(tensors, stem, (rows, columns), in_layer=part.in_layer):
            return matrix
    is_norm = part.name.endswith("norm.weight") and part.name != "state_norm.weight"
    if (config.family, part.name) == ("gte", "gate_up.bias") or (
        config.family == "modernbert" and part.name.endswith("norm.bias")
    ):
        return Zeros()
    info = tensors[name]
    # [channels, 1, kernel], as torch's convolutions have it
    if is_convolution and len(info.shape) == 3:
        info = replace(info, shape=(info.shape[0], *info.shape[2:]))
    check_stored(name, info, part.shape)
    less_one = is_norm and config.family in NORMS_LESS_ONE
    return Numbers(name, info, added=1 if less_one else 0)


def _refuse_unread(config: ModelConfig, names: dict[str, str], tensors: Tensors) -> None:
    """Raise InputError for weights that the configuration does not use, such as further layers, biases or norms.

    Biases that are all zero, as GPTQ's files have them, are allowed.
    """
    read = {f"{names['lm_head']}.weight"}  # `_check_tied` checks a tied model's
    if config.hidden_output:
        read.add(f"{names['lm_head']}.bias")
    for part in all_parts(config):
        stem, _, suffix = part.name.rpartition(".")
        if stem in names:
            read.add(f"{names[stem].format(part.layer)}.{suffix}")
    known = set(names.values())
    reusing = [layer for layer in range(config.num_layers) if config.kv_source(layer) != layer]
    read |= {f"{names[part].format(layer)}.weight" for part in ("k", "v", "k_norm") for layer in reusing}
    for name, info in tensors.items():
        stem, _, suffix = name.rpartition(".")
        layer = re.search(r"(?:(?<=layers\.)|(?<=layer\.))\d+(?=\.)", stem)
        whole = f"{stem[: layer.start()]}{{}}{stem[layer.end() :]}" if layer else stem
        if name in read or suffix not in ("weight", "bias") or whole not in known:
            continue
        if layer and int(layer[0]) >= config.num_layers:
            raise InputError(
                f"{info.path} has a layer {layer[0]} ({name}), and its config.json says that there are "
                f"{config.num_layers}, counted "
                "from 0: take the config.json of these weights"
            )
        if suffix == "weight" or not _is_zero(name, info):
            raise InputError(
                f"{info.path} has the tensor {name}, which the model that its config.json describes does not use: "
                "take the config.json of these weights"
            )


def _is_zero(name: str, info: TensorInfo) -> bool:
    """True if all numbers of a bias are zero."""
    if info.dtype not in NUMBERS:
        return False
    read_numbers(name, info, bias := torch.empty(info.shape))
    return not bias.any()


def _check_tied(tensors: Tensors, embed: str, lm_head: str) -> None:
    """Raise InputError if a tied model has an output matrix of its own that differs from the embedding."""
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
