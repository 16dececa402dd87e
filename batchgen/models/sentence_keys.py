"""The configuration of each module of sentence-transformers, and the refusal of what is not understood in it.

A key of a module is read, or changes no vector, or has to have a value that batchgen computes with. Any other key that
states something is refused: it may be other mathematics, and nobody would notice. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any, Literal

from batchgen.core.errors import InputError, one_line
from batchgen.models.hf.config_files import read_json_object
from batchgen.models.sentence_modules import MODULES, Module
from batchgen.models.stated_numbers import is_count, shown

# Purpose of a Transformer, as its file states it: vectors of tokens, labels of a text, or logits of the next token.
Purpose = Literal["feature-extraction", "sequence-classification", "text-generation"]
# Purpose -> what the module hands on, and the output of the model's class that it is.
_OUTPUTS: dict[Purpose, tuple[str, str]] = {
    "feature-extraction": ("token_embeddings", "last_hidden_state"),
    "sequence-classification": ("scores", "logits"),
    "text-generation": ("causal_logits", "logits"),
}
OF_TEXT = "sentence_embedding"  # the vector that modules after a Pooling take and give
# Kind of a module -> keys that are read, or that change no vector.
_KNOWN: dict[str, set[str]] = {
    "Transformer": {"max_seq_length", "do_lower_case", "unpad_inputs"},
    "Pooling": {
        *("word_embedding_dimension", "embedding_dimension", "pooling_mode", "include_prompt"),
        *("pooling_mode_cls_token", "pooling_mode_max_tokens", "pooling_mode_mean_tokens", "pooling_mode_lasttoken"),
        *("pooling_mode_mean_sqrt_len_tokens", "pooling_mode_weightedmean_tokens"),
    },
    "Dense": {"in_features", "out_features", "bias", "activation_function"},
    "Normalize": set(),
    "Dropout": {"dropout"},
    "LogitScore": {"true_token_id", "false_token_id"},
}
_OVER_TEXTS = {"module_input_name": (None, OF_TEXT), "module_output_name": (None, OF_TEXT)}
# Kind of a module -> keys that have to have one of these values.
_FIXED: dict[str, dict[str, tuple[Any, ...]]] = {
    "Dense": {**_OVER_TEXTS, "use_residual": (None, False)},
    "Normalize": _OVER_TEXTS,
    "LogitScore": {"module_input_name": (None, "causal_logits")},
}
# Keys of a Transformer with arguments for transformers, by both of their names, and the arguments that change nothing.
_OF_MODEL, _OF_TOKENIZER, _OF_CONFIG = (
    ("model_args", "model_kwargs"),
    ("tokenizer_args", "processor_kwargs"),
    ("config_args", "config_kwargs"),
)
_LOADING = frozenset(("trust_remote_code", "revision", "code_revision", "token", "cache_dir", "local_files_only"))
_ARGUMENTS = {
    **dict.fromkeys(
        _OF_MODEL,
        _LOADING
        | {
            "dtype", "torch_dtype", "attn_implementation", "add_pooling_layer", "low_cpu_mem_usage",
            "use_safetensors", "device_map", "unpad_inputs", "use_memory_efficient_attention",
        },
    ),
    **dict.fromkeys(_OF_TOKENIZER, _LOADING | {"model_max_length", "padding_side", "use_fast"}),
    **dict.fromkeys(_OF_CONFIG, _LOADING | {"use_cache", "unpad_inputs", "use_memory_efficient_attention"}),
}  # fmt: skip
_FILES_OF_TEXTS = tuple(
    f"sentence_{name}_config.json" for name in ("bert", "roberta", "distilbert", "camembert", "xlm-roberta")
)


def refuse_foreign(folder: Path, modules: Sequence[Module]) -> None:
    """Raise InputError for a module whose class is not one of sentence-transformers: its name says nothing then."""
    for module in modules:
        if not module.type.startswith("sentence_transformers."):
            raise InputError(
                f"{folder / MODULES}: {one_line(module.type or 'a module without a type')} is no module of"
                " sentence-transformers: give a model that has only these"
            )


def read_module(module: Module) -> Mapping[str, Any]:
    """The values of the configuration of a module that is no Transformer; empty: there is none.

    Raises:
        InputError: A key is not known, or its value is not supported.
    """
    path = module.place / "config.json"
    if module.kind in ("Normalize", "Dropout") and not path.exists():
        return {}
    stated = read_json_object(path)
    _check(path, stated, _KNOWN[module.kind], _FIXED.get(module.kind, {}))
    return stated


def read_transformer(place: Path, purpose: Purpose) -> tuple[int | None, bool]:
    """The most tokens of a text by a Transformer's file, or None, and whether texts are put in lower case.

    Args:
        place: Directory of the module.
        purpose: Purpose that the module has to have.

    Raises:
        InputError: A key is not known, or its value is not supported.
    """
    path = next((place / name for name in _FILES_OF_TEXTS if (place / name).exists()), None)
    if path is None:
        return None, False
    stated = read_json_object(path)
    output, of_class = _OUTPUTS[purpose]
    fixed = {"transformer_task": (None, purpose), "module_output_name": (None, output)}
    _check(path, stated, {*_KNOWN["Transformer"], *_ARGUMENTS, "modality_config", "processing_kwargs"}, fixed)
    for name, known in _ARGUMENTS.items():
        _check(path, _object(path, name, stated.get(name)), known, {})
    if purpose != "text-generation":  # whose template says how texts become a chat
        _check(path, _object(path, "processing_kwargs", stated.get("processing_kwargs")), set(), {})
        ways = _object(path, "modality_config", stated.get("modality_config"))
        if "message" in ways:
            raise InputError(
                f"{path}: texts in a chat template (modality_config 'message') are not supported: remove it, if the"
                " model takes plain texts, or give the texts in that template"
            )
        way = _object(path, "modality_config", ways.get("text"))
        _check(path, way, set(), {"method": (None, "forward"), "method_output_name": (None, of_class)})
    most = next(
        (most for name in _OF_TOKENIZER if is_count(most := (stated.get(name) or {}).get("model_max_length"))),
        stated.get("max_seq_length"),
    )
    return most if is_count(most) else None, stated.get("do_lower_case") is True


def _object(path: Path, name: str, value: Any) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise InputError(f"{path}: {name} must be an object, not {shown(value)}: fetch it again")
    return value


def _check(path: Path, stated: Mapping[str, Any], known: Set[str], fixed: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise InputError for a key that is not known and states something, and for a value that is not supported."""
    for name, value in stated.items():
        if name in fixed and value not in fixed[name]:
            supported = ", ".join(shown(each) for each in fixed[name] if each is not None)
            raise InputError(
                f"{path}: {name} {one_line(shown(value))} is not supported; supported: {supported}: give another model"
            )
        if value and name not in known and name not in fixed:
            raise InputError(
                f"{path}: {one_line(name)} {one_line(shown(value))} is a key that is not known: if it changes no"
                " vector, remove it"
            )
