"""Heads of classifiers and rerankers: the linear layers of `*ForSequenceClassification`, and yes or no of a decoder.

Such a head is a `VectorSpec` whose values have labels. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchgen.core.errors import InputError
from batchgen.models.config import ModelConfig
from batchgen.models.families import ROBERTAS, TYPED_PAIRS
from batchgen.models.files import ModelFiles, weight_tensors
from batchgen.models.hf.config_files import read_json_object
from batchgen.models.lora import MERGE, OUTPUT, Lora, read_lora, within_text_model
from batchgen.models.pooling import (
    Dense,
    LabelFunction,
    Pooling,
    VectorSpec,
    default_prompt,
    longest_text,
    stated_by_sentence_transformers,
)
from batchgen.models.sentence_keys import Purpose, read_module, read_transformer, refuse_foreign
from batchgen.models.sentence_modules import MODULES, read_routes
from batchgen.models.stated_numbers import is_count, is_index, shown
from batchgen.models.tensor_files.headers import TensorInfo, read_safetensors_header

if TYPE_CHECKING:
    from batchgen.models.tokenizers.tokenizer import Tokenizer

_CLASSIFIES = "ForSequenceClassification"
_CROSS_ENCODER = "CrossEncoder"  # model_type in config_sentence_transformers.json
# Family of a decoder -> its padding token in transformers, where a config.json states none; others have none then.
_USUAL_PADDING = {
    **dict.fromkeys(("opt", "seed_oss", "olmo2", "olmo3"), 1),
    **dict.fromkeys(("gemma2", "gemma3"), 0),
    "phi3": 32000,
    "smollm3": 128004,
    "ministral3": 11,
}
# Family of an encoder -> (prefix of a linear layer over the first token, activation after it), in order.
_ENCODER_HEADS = {
    **{
        family: ((f"{family}.pooler.dense.", "Tanh"), ("classifier.", "Identity"))
        for family in ("bert", "nomic_bert", "gte")
    },
    "distilbert": (("pre_classifier.", "ReLU"), ("classifier.", "Identity")),
    **dict.fromkeys(ROBERTAS, (("classifier.dense.", "Tanh"), ("classifier.out_proj.", "Identity"))),
}
# Activations of ModernBERT's head that are computed: name in config.json -> torch's.
_MODERNBERT_ACTIVATIONS = {"gelu": "GELU", "relu": "ReLU", "silu": "SiLU", "tanh": "Tanh"}
_DECODER_HEAD = (("score.", "Identity"),)
# The template that Qwen3-Reranker was trained with.
_SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. Note that the"
    ' answer can only be "yes" or "no".'
)
_BEFORE = "<|im_start|>system\n" + _SYSTEM + "<|im_end|>\n<|im_start|>user\n<Instruct>: {}\n<Query>: "
_BETWEEN = "\n<Document>: "
_AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
_USUAL_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
NO_YES = ("no", "yes")
_RERANKS = "qwen3"  # family of Qwen3-Reranker, whose files are those of a chat model
_MAYBE_NO_RERANKER = (
    "neither the model's files nor its name say that it is a reranker: the scores are its probability of 'yes' after"
    " Qwen3-Reranker's template, and mean little if it was not trained for that"
)


def is_classifier(files: ModelFiles) -> bool:
    """Tell whether the model is a `*ForSequenceClassification`."""
    return any(name.endswith(_CLASSIFIES) for name in _stated(files).get("architectures") or [])


def read_classifier(files: ModelFiles, config: ModelConfig) -> VectorSpec:
    """The head of a `*ForSequenceClassification`: its linear layers, and its labels.

    Several labels exclude each other (softmax), unless `problem_type` is multi_label_classification (sigmoid). A single
    number is the one of the last layer, as of a reward model, unless the file states an activation.

    Args:
        files: The model's files.
        config: The model's configuration.

    Raises:
        InputError: The model is no classifier.
    """
    stated = _stated(files)
    if not is_classifier(files):
        raise InputError(f"{files.name} is no *{_CLASSIFIES}: --task classify needs one")
    tensors, labels = weight_tensors(files), _labels(stated)
    adapter = None if files.lora is None else read_lora(files.lora)
    if len(labels) > 1 and stated.get("problem_type") == "regression":
        raise InputError(
            f"config.json: {len(labels)} labels of problem_type 'regression' are not supported: a model that gives"
            " numbers has one label"
        )
    modern, encoder = config.family == "modernbert", config.family in _ENCODER_HEADS
    layers = _modernbert_head(stated) if modern else _ENCODER_HEADS[config.family] if encoder else _DECODER_HEAD
    dense = tuple(Dense(_path(tensors, f"{prefix}weight", files), prefix, activation) for prefix, activation in layers)
    if adapter is not None:
        dense = tuple(adapted(layer, adapter) for layer in dense)
    if modern:
        dense = (replace(dense[0], norm="head.norm.", norm_eps=config.norm_eps), *dense[1:])
    most, lowercases = _of_cross_encoder(files, "sequence-classification", ["Transformer"])
    last = dense[-1]
    rows = read_safetensors_header(last.weights)[f"{last.prefix}weight"].shape[0]
    if rows != len(labels):
        raise InputError(f"config.json names {len(labels)} labels, and {last.prefix}weight has {rows}: correct it")
    return VectorSpec(
        _pooling(stated) if modern else "cls" if encoder else "last",
        dense,
        normalize=False,
        size=len(labels),
        labels=labels,
        of_labels=_function(files.modules or files.path, stated, len(labels)),
        prompt=default_prompt(_stated_of_cross_encoder(files)),
        max_tokens=most,
        lowercases=lowercases,
        padding=None if modern or encoder else _padding(stated, config.family),
        pair_offset=config.vocab_size if config.family in TYPED_PAIRS and config.token_types > 1 else 0,
    )


def _padding(stated: Mapping[str, Any], family: str) -> int | None:
    """The token id of a decoder's padding that its `config.json` states, or transformers' default; None: none."""
    token = stated.get("pad_token_id", _USUAL_PADDING.get(family))
    return token if is_index(token) else None


def _stated_of_cross_encoder(files: ModelFiles) -> Mapping[str, Any]:
    """The values of config_sentence_transformers.json, where it is a cross-encoder's; empty: it is not."""
    stated = stated_by_sentence_transformers(files.modules or files.path)
    return stated if stated.get("model_type") == _CROSS_ENCODER else {}


def _of_cross_encoder(files: ModelFiles, purpose: Purpose, kinds: list[str]) -> tuple[int | None, bool]:
    """The most tokens of a text, or None, and whether texts are put in lower case, by a cross-encoder's modules.

    Args:
        files: The model's files.
        purpose: Purpose of its Transformer.
        kinds: Kinds of the modules that are supported, in order.

    Raises:
        InputError: The modules are others.
    """
    folder = files.modules or files.path
    if not _stated_of_cross_encoder(files) or not (folder / MODULES).exists():
        return None, False
    modules = read_routes(folder).of(None)
    refuse_foreign(folder, modules)
    if (stated := [module.kind for module in modules]) != kinds:
        raise InputError(
            f"{folder / MODULES} has {', '.join(stated) or 'no modules'}; supported for this model: {', '.join(kinds)}"
        )
    return read_transformer(modules[0].place, purpose)


def adapted(layer: Dense, adapter: Lora, name: str | None = None) -> Dense:
    """A layer of a head with what an adapter adds to it, or the layer that takes its place (`modules_to_save`).

    Args:
        layer: The layer.
        adapter: The adapter.
        name: Name of the layer in the model; None: that of its tensors.

    Raises:
        InputError: The addition is one to a matrix of another shape, or the other layer has another shape.
    """
    module = within_text_model(name or layer.prefix.removesuffix("."))
    stored = read_safetensors_header(layer.weights)[f"{layer.prefix}weight"].shape
    if (other := adapter.replaced.get(f"{module}.weight")) is not None:
        if other.shape[1:] != stored[1:] or (layer.rows and other.shape != stored):
            raise InputError(
                f"{adapter.path} has a {module} of {list(other.shape)}, which is {list(stored)} in this model: give the"
                " model that the adapter was trained on"
            )
        in_file = next(
            each for each, info in read_safetensors_header(other.path).items() if info.offset == other.offset
        )
        layer, stored = replace(layer, weights=other.path, prefix=in_file.removesuffix("weight")), other.shape
    if (delta := adapter.deltas.get(module)) is None:
        return layer
    shapes = delta.b[1].shape, delta.a[1].shape
    if shapes != ((stored[0], delta.rank), (delta.rank, *stored[1:])):
        raise InputError(
            f"{adapter.path} adds a product of {list(shapes[0])} and {list(shapes[1])} to {module}, which is"
            f" {list(stored)} in this model: give the model that the adapter was trained on"
        )
    return replace(layer, added=delta)


def refuse_tied(adapter: Lora, embedding: str) -> None:
    """Raise InputError if an adapter changes an embedding that the model ties to its output matrix.

    Args:
        adapter: The adapter.
        embedding: Name of the embedding in the model.
    """
    if {within_text_model(embedding), within_text_model(f"{embedding}.weight")} & {*adapter.deltas, *adapter.replaced}:
        raise InputError(f"{adapter.path} changes the embedding, which this model ties to its output matrix: {MERGE}")


def head_modules(family: str) -> set[str]:
    """Names, as in an adapter, of the layers after the hidden states, which no model of hidden states has."""
    layers = _modernbert_head({}) if family == "modernbert" else _ENCODER_HEADS.get(family, _DECODER_HEAD)
    return {OUTPUT, *(within_text_model(prefix.removesuffix(".")) for prefix, _ in layers)}


def _modernbert_head(stated: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """The linear layers of ModernBERT's head: prefix and activation of each. A norm follows the first one."""
    name = stated.get("classifier_activation", "gelu")
    if name not in _MODERNBERT_ACTIVATIONS:
        raise InputError(
            f"classifier_activation {shown(name)} is not supported; supported: {', '.join(_MODERNBERT_ACTIVATIONS)}"
        )
    return ("head.dense.", _MODERNBERT_ACTIVATIONS[name]), ("classifier.", "Identity")


def _pooling(stated: Mapping[str, Any]) -> Pooling:
    """The pooling before ModernBERT's head."""
    name = stated.get("classifier_pooling", "cls")
    if name not in ("cls", "mean"):
        raise InputError(f"classifier_pooling {shown(name)} is not supported; supported: cls, mean")
    return "mean" if name == "mean" else "cls"


def read_reranker(
    files: ModelFiles, config: ModelConfig, tokenizer: Callable[[], Tokenizer], instruction: str | None
) -> VectorSpec:
    """The head that scores pairs of a query and a document: a cross-encoder's, or yes and no of Qwen3-Reranker.

    The score of a decoder is the probability of "yes" against "no" after its template.

    Args:
        files: The model's files.
        config: The model's configuration.
        tokenizer: Function that returns the model's tokenizer.
        instruction: Task that the documents are judged by; None: that of a web search.

    Raises:
        InputError: The model is no reranker.
    """
    if is_classifier(files):
        if instruction is not None:
            raise InputError("--instruction is for decoders that answer yes or no, and the model is a cross-encoder")
        spec = read_classifier(files, config)
        if len(spec.labels) > 1:
            raise InputError(f"{files.name} has {len(spec.labels)} labels: give --task classify, a reranker has one")
        return replace(spec, max_tokens=spec.max_tokens or longest_text(files.path))
    ids = [tokenizer().token_id(word) for word in NO_YES]
    if files.kind != "hf" or config.family != _RERANKS or None in ids or tokenizer().token_id("<|im_start|>") is None:
        raise InputError(f"{files.name} is neither a cross-encoder nor a Qwen3-Reranker in safetensors: give one")
    rows = tuple(token for token in ids if token is not None)
    stated = _instruction_of_files(files, rows)
    tensors = weight_tensors(files)
    ends = (f"{OUTPUT}.", "model.embed_tokens.", "embed_tokens.")
    prefix = next((end for end in ends if f"{end}weight" in tensors), ends[1])
    dense = Dense(_path(tensors, f"{prefix}weight", files), prefix, rows=rows)
    if files.lora is not None:
        adapter = read_lora(files.lora)
        if prefix != ends[0]:
            refuse_tied(adapter, prefix.removesuffix("."))
        dense = adapted(dense, adapter, OUTPUT)
    before = _BEFORE.format(instruction or stated or _USUAL_INSTRUCTION)
    return VectorSpec(
        "last",
        (dense,),
        normalize=False,
        size=len(NO_YES),
        labels=NO_YES,
        of_labels="softmax",
        pair_texts=(before, _BETWEEN, _AFTER),
        notice="" if "rerank" in files.name.lower() or _stated_of_cross_encoder(files) else _MAYBE_NO_RERANKER,
    )


def _instruction_of_files(files: ModelFiles, rows: tuple[int, ...]) -> str:
    """The instruction that the files of a decoder as a cross-encoder state; empty: they state none.

    Args:
        files: The model's files.
        rows: Token ids of "no" and "yes".

    Raises:
        InputError: The files state another score than one of "yes" against "no".
    """
    folder = files.modules or files.path
    if _stated_of_cross_encoder(files) and (folder / MODULES).exists():
        _of_cross_encoder(files, "text-generation", ["Transformer", "LogitScore"])
        score = read_module(read_routes(folder).of(None)[1])
        if (score.get("false_token_id"), score.get("true_token_id")) != rows:
            raise InputError(
                f"{folder / MODULES}: a LogitScore of other tokens than {' and '.join(NO_YES)} is not supported: give a"
                " Qwen3-Reranker"
            )
    return default_prompt(_stated_of_cross_encoder(files))


def _stated(files: ModelFiles) -> Mapping[str, Any]:
    return read_json_object(files.path / "config.json") if files.kind == "hf" else {}


def _labels(stated: Mapping[str, Any]) -> tuple[str, ...]:
    """The name of each label, in order. Raises InputError."""
    names = stated.get("id2label")
    if not isinstance(names, Mapping):
        count = stated.get("num_labels", 2)
        if names is not None or not is_count(count):
            raise InputError(
                f"config.json has num_labels {shown(count)} and id2label {shown(names)}, which name no labels: correct"
                " them"
            )
        return tuple(f"LABEL_{i}" for i in range(count))
    numbers = [str(i) for i in range(len(names))]
    if set(names) != set(numbers):
        raise InputError("id2label in config.json must have the numbers from 0 on as keys: correct it")
    ordered = tuple(str(names[number]) for number in numbers)
    if len(set(ordered)) < len(ordered):
        raise InputError("id2label in config.json has the same name twice: rename one")
    return ordered


def _function(folder: Path, stated: Mapping[str, Any], count: int) -> LabelFunction:
    """The function of a classifier's values that its files state, or the usual one."""
    if count > 1:
        return "sigmoid" if stated.get("problem_type") == "multi_label_classification" else "softmax"
    of_file = stated_by_sentence_transformers(folder)  # of a cross-encoder of sentence-transformers 6
    nested = stated.get("sentence_transformers")  # of earlier ones
    stating = [each for each in (of_file, nested) if isinstance(each, Mapping)]
    named = next((each["activation_fn"] for each in stating if each.get("activation_fn")), None)
    named = str(named or stated.get("sbert_ce_default_activation_function") or "").rpartition(".")[2]
    if not named and (nested in stating or of_file.get("model_type") == _CROSS_ENCODER):
        return "sigmoid"
    if named not in ("", "Identity", "Sigmoid"):
        raise InputError(f"{folder}: activation {named} of the label is not supported; supported: Identity, Sigmoid")
    return "sigmoid" if named == "Sigmoid" else "identity"


def _path(tensors: Mapping[str, TensorInfo], name: str, files: ModelFiles) -> Path:
    if name not in tensors:
        raise InputError(f"{files.path} has no tensor {name}: fetch the model again")
    return tensors[name].path
