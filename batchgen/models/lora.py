"""LoRA adapters (Hu et al., 2021) as PEFT saves them: what they add to a model's matrices (`lora_merging.py`).

A matrix W [rows, columns] becomes W + s B A, with A [rank, columns], B [rows, rank] and the adapter's factor s.

transformers has the matrices of all experts of a layer in one parameter, [experts, rows, columns]. PEFT adapts it where
`target_parameters` names it: A [experts * rank, columns] has the rows of one expert after those of the other, and B
[rows, rank * experts] has the experts alternate in its columns. The file names the module alone: the wrappers of its
parameters lie within one another, the first parameter innermost.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchgen.core.errors import InputError, one_line
from batchgen.models.formats.base import NamedTensor
from batchgen.models.hf.config_files import read_json_object
from batchgen.models.tensor_files.headers import TensorInfo, read_safetensors_header

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_PICKLE = "adapter_model.bin"  # of PEFT before 0.7
ROOT = "base_model.model."  # of every name in the file
OUTPUT = "lm_head"
# What class a model was trained in decides where its text model is: names count from there.
_PREFIXES = (
    "model.language_model.",
    "language_model.model.",
    "language_model.",
    "model.decoder.",
    "decoder.",
    "model.",
    "bert.",
    "roberta.",
    "distilbert.",
    "nomic_bert.",
    "gte.",
)
# Keys of adapter_config.json that say how the file's matrices are merged.
_READ = ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "peft_type", "target_parameters")
# Keys whose values say how the adapter was trained, or which modules it has: the file's names say the latter better.
_TRAINING = {
    "auto_mapping", "base_model_name_or_path", "corda_config",
    "ensure_weight_tying", "eva_config", "exclude_modules", "inference_mode", 
    "layers_pattern", "layers_to_transform", "loftq_config", "lora_dropout", "lora_ga_config", "megatron_config",
    "megatron_core", "modules_to_save", "peft_version", "qalora_group_size", "revision", "runtime_config",
    "target_modules", "task_type",
}  # fmt: skip
# Keys that must be unset: what they stand for is not the sum above.
_MUST_BE_UNSET = (
    "alora_invocation_tokens", "arrow_config", "fan_in_fan_out", "layer_replication", "lora_bias",
    "trainable_token_indices", "use_bdlora", "use_dora", "use_qalora", "velora_config", "kasa_config",
    "monteclora_config",
)  # fmt: skip
# Initializations that change the base model's matrices, which a file of this form leaves out.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
MERGE = "merge it into its base model first (merge_and_unload of peft), and pass what that saves"
_MATRICES = re.compile(r"(.+)\.lora_(A|B)\.weight")
_EXPERTS = re.compile(r"(.+\.layers\.(\d+)\.(?:\w+\.)?experts)((?:\.base_layer)*)")
# Parameters of a layer's experts, in their order in transformers.
GATE_UP, DOWN = "gate_up_proj", "down_proj"
_PARAMETERS = (GATE_UP, "gate_up_proj_bias", DOWN, "down_proj_bias")


@dataclass(frozen=True)
class Delta:
    """The product of two matrices that an adapter adds to a matrix.

    Attributes:
        a: Name and place of A, [rank, columns].
        b: Name and place of B, [rows, rank].
        factor: Factor s of B A.
        rank: Rank of the product; for experts of each one's.
    """

    a: NamedTensor
    b: NamedTensor
    factor: float
    rank: int


@dataclass(frozen=True)
class Lora:
    """An adapter whose weights have not been read.

    Attributes:
        path: Directory of the adapter.
        deltas: The addition to each linear layer, by the layer's name in transformers within the text model, such as
            "layers.0.self_attn.q_proj", or "lm_head".
        experts: The addition to the matrices of all experts of a layer, by the layer's number and the parameter:
            `GATE_UP` or `DOWN`.
        replaced: Tensors that take the place of the model's own (`modules_to_save`), by the same names with ".weight"
            or ".bias".
    """

    path: Path
    deltas: Mapping[str, Delta]
    experts: Mapping[tuple[int, str], Delta]
    replaced: Mapping[str, TensorInfo]


def read_lora(path: Path) -> Lora:
    """Open an adapter without reading its weights.

    Args:
        path: Directory with adapter_config.json and adapter_model.safetensors.

    Raises:
        InputError: A file is missing or broken, or the adapter is more than a sum of products of two matrices.
    """
    if (path / _PICKLE).is_file() and not (path / WEIGHTS_FILE).exists():
        raise InputError(
            f"--lora {path}: {_PICKLE} is a pickle, which may run any code and is not read: load it with peft, and pass"
            " what its save_pretrained then writes"
        )
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (path / name).is_file():
            raise InputError(f"--lora {path} has no {name}: give the directory that PEFT's save_pretrained has written")
    config = read_json_object(path / CONFIG_FILE)
    _check_config(path / CONFIG_FILE, config)
    matrices: dict[str, dict[str, tuple[str, TensorInfo]]] = {}
    replaced: dict[str, TensorInfo] = {}
    for name, info in read_safetensors_header(path / WEIGHTS_FILE).items():
        # PEFT saves the matrix that a LoRA is added to with it where that is an embedding or the output matrix.
        within = within_text_model(name).replace(".base_layer.", ".")
        if found := _MATRICES.fullmatch(name.removeprefix(ROOT)):
            matrices.setdefault(found[1], {})[found[2]] = name, info
        elif within.endswith((".weight", ".bias")) and ".lora_" not in within:
            _check_new(within, replaced, info)
            replaced[within] = info
        else:
            raise InputError(f"{info.path} has the tensor {name}, which is no LoRA of a linear layer: {MERGE}")
    deltas: dict[str, Delta] = {}
    experts: dict[tuple[int, str], Delta] = {}
    depths = {found[1]: 0 for module in matrices if (found := _EXPERTS.fullmatch(module))}
    for module, of_module in matrices.items():
        if len(of_module) < 2:
            raise InputError(f"{path / WEIGHTS_FILE} has only one of the two matrices of {module}: fetch it again")
        if found := _EXPERTS.fullmatch(module):
            parameters = _parameters_of(path, config, found[1])
            depth = found[3].count(".")
            depths[found[1]] += 1
            if depth >= len(parameters):
                raise _other_experts(path, found[1])
            parameter = parameters[-1 - depth]
            experts[int(found[2]), parameter] = _delta(path, config, f"{found[1]}.{parameter}", of_module, stacked=True)
            continue
        within = within_text_model(module)
        _check_new(within, deltas, of_module["A"][1])
        deltas[within] = _delta(path, config, module, of_module, stacked=False)
    for module, depth in depths.items():
        if depth != len(_parameters_of(path, config, module)):
            raise _other_experts(path, module)
    if not deltas and not experts:
        raise InputError(f"{path / WEIGHTS_FILE} has no LoRA matrices: give another --lora")
    return Lora(path, deltas, experts, replaced)


def _delta(
    path: Path, config: Mapping[str, Any], name: str, matrices: Mapping[str, NamedTensor], *, stacked: bool
) -> Delta:
    """The addition of an adapter to one matrix, or to those of all experts of a layer.

    Args:
        path: Directory of the adapter.
        config: Its configuration.
        name: Name of the layer, or of the parameter.
        matrices: Name and place of "A" and "B".
        stacked: Whether A has the rows of several experts.
    """
    rank, factor = _rank_and_factor(config, name)
    (rows, *_), a = matrices["A"][1].shape or (0,), matrices["A"][1]
    if rows % rank if stacked else rows != rank:
        raise InputError(
            f"{path / WEIGHTS_FILE} has {name} with matrices {list(a.shape)}, and its {CONFIG_FILE} states rank"
            f" {rank}: fetch both again"
        )
    return Delta(matrices["A"], matrices["B"], factor, rank)


def _parameters_of(path: Path, config: Mapping[str, Any], module: str) -> list[str]:
    """The parameters of a layer's experts that the configuration names, in their order.

    Args:
        path: Directory of the adapter.
        config: Its configuration.
        module: Name of the module of the experts.
    """
    targets = config.get("target_parameters")
    targets = targets if isinstance(targets, list) else []
    named = [p for p in _PARAMETERS if any(f".{module}.{p}".endswith(f".{target}") for target in targets)]
    if bias := next((p for p in named if p not in (GATE_UP, DOWN)), None):
        raise InputError(f"{path} has a LoRA of {bias}, the biases of experts, which is not merged: {MERGE}")
    return named


def _other_experts(path: Path, module: str) -> InputError:
    return InputError(
        f"{path / WEIGHTS_FILE} has other matrices of {module} than the target_parameters of its {CONFIG_FILE} name:"
        f" fetch both again, or {MERGE}"
    )


def lora_files(path: Path) -> list[Path]:
    """The files that decide what an adapter is."""
    return [path / CONFIG_FILE, path / WEIGHTS_FILE]


def within_text_model(name: str) -> str:
    """A tensor's name without what the class that was trained puts before the names of the text model."""
    bare = name.removeprefix(ROOT)
    return next((bare.removeprefix(prefix) for prefix in _PREFIXES if bare.startswith(prefix)), bare)


def _check_new(within: str, known: Mapping[str, Any], info: TensorInfo) -> None:
    """Raise InputError if a matrix or tensor of the text model is known by another name in the file already."""
    if within in known:
        raise InputError(f"{info.path} has {within} twice, by two names: {MERGE}")


def _check_config(path: Path, config: Mapping[str, Any]) -> None:
    if config.get("peft_type") != "LORA":
        raise InputError(f"{path} is of {one_line(repr(config.get('peft_type')))}, and only LORA is merged: {MERGE}")
    if name := next((name for name in _MUST_BE_UNSET if config.get(name)), None):
        raise InputError(f"{path} has {name}, which is more than LoRA's sum: {MERGE}")
    if config.get("bias") not in (None, "none"):
        raise InputError(f"{path} has trained biases (bias {one_line(repr(config['bias']))}): {MERGE}")
    initial = str(config.get("init_lora_weights", "")).lower()
    if initial.startswith(_CHANGES_BASE):
        raise InputError(f"{path} has init_lora_weights {initial!r}, by which the base model was changed too: {MERGE}")
    known = {*_READ, *_TRAINING, *_MUST_BE_UNSET, "bias", "init_lora_weights"}
    if unknown := next(
        (name for name in config if name not in known and config[name] not in (None, False, {}, [])), None
    ):
        raise InputError(f"{path} has the key {one_line(unknown)}, which is not known: {MERGE}")


def _rank_and_factor(config: Mapping[str, Any], module: str) -> tuple[int, float]:
    """The rank of a module's matrices, and its factor s: alpha / rank, or alpha / sqrt(rank) with rsLoRA.

    rsLoRA: Kalajdzievski, 2023.
    """
    rank = _of_module(config.get("rank_pattern"), module, config.get("r"))
    alpha = _of_module(config.get("alpha_pattern"), module, config.get("lora_alpha"))
    largest = 1 << 31
    if type(rank) is not int or not 1 <= rank < largest or type(alpha) not in (int, float) or abs(alpha) > largest:
        raise InputError(
            f"{CONFIG_FILE} states r {one_line(repr(rank))} and lora_alpha {one_line(repr(alpha))} for {module}: fetch"
            " it again"
        )
    return rank, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _of_module(pattern: Any, module: str, default: Any) -> Any:
    """A module's own value, as PEFT finds it: of the first key, a regular expression, that its name ends with."""
    keys = pattern.items() if isinstance(pattern, Mapping) else ()
    try:
        return next((value for key, value in keys if re.match(rf"(.*\.)?({key})$", module)), default)
    except re.error as error:
        raise InputError(
            f"{CONFIG_FILE} has a pattern that is no regular expression ({error}): fetch it again"
        ) from error
