"""The rest of a model of vectors after its layers, as its files state it: pooling, further modules, prompts.

The files of embedding models are those of sentence-transformers: `modules.json`, `1_Pooling/config.json`, `2_Dense/`,
`2_Normalize/`, `sentence_bert_config.json` and `config_sentence_transformers.json`; newer ones have the longest text in
`tokenizer_config.json`. Nothing here imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from batchgen.core.errors import InputError
from batchgen.models.config import ModelConfig
from batchgen.models.files import ModelFiles
from batchgen.models.hf.config_files import read_json_object
from batchgen.models.identity import content_identity
from batchgen.models.lora import Delta
from batchgen.models.sentence_keys import read_module, read_transformer, refuse_foreign
from batchgen.models.sentence_modules import MODULES, Module, read_routes
from batchgen.models.stated_numbers import is_count
from batchgen.models.tensor_files.headers import read_safetensors_header

Pooling = Literal["mean", "cls", "last"]
LabelFunction = Literal["softmax", "sigmoid", "identity"]
POOLINGS: tuple[Pooling, ...] = get_args(Pooling)
# Names of the modes in 1_Pooling/config.json.
_MODES: dict[str, Pooling] = {"mean": "mean", "cls": "cls", "lasttoken": "last"}
_FLAGS = {"mean_tokens": "mean", "cls_token": "cls", "lasttoken": "lasttoken", "max_tokens": "max"}
_FLAGS |= {"mean_sqrt_len_tokens": "mean_sqrt_len_tokens", "weightedmean_tokens": "weightedmean"}
# Activation of a Dense module, by the last part of its name in torch.
_ACTIVATIONS = ("Identity", "Tanh", "ReLU", "GELU", "Sigmoid", "SiLU")
_MODULES = ("Transformer", "Pooling", "Dense", "Normalize", "Dropout", "Router")
INSTRUCTION = "Instruct: {}\nQuery:"  # of Qwen3-Embedding
_STATED = "config_sentence_transformers.json"


@dataclass(frozen=True)
class Dense:
    """A linear layer over pooled vectors.

    Attributes:
        weights: Path of the safetensors file with its weight.
        prefix: Prefix of the names of its weight and bias in the file.
        activation: Name of the activation after it, one of torch.nn's classes.
        rows: Rows of the weight that are its own; empty: all.
        norm: Prefix of the weight of a LayerNorm after the activation; empty: there is none.
        norm_eps: Number that this norm adds to the variance.
        added: Product that an adapter adds to the weight; None: there is none.
    """

    weights: Path
    prefix: str = "linear."
    activation: str = "Identity"
    rows: tuple[int, ...] = ()
    norm: str = ""
    norm_eps: float = 1e-5
    added: Delta | None = None


@dataclass(frozen=True)
class VectorSpec:
    """All that turns the hidden states of a text into its vector: an embedding, or probabilities of labels.

    Attributes:
        pooling: "mean" of all tokens, "cls" (the first one) or "last".
        dense: Linear layers over the pooled vector, in order.
        normalize: Whether the vector is divided by its length.
        dimensions: Number of first values that are kept (Matryoshka); None: all.
        truncated: Whether these are kept of the normalised vector, which then has a length below 1; else they are
            normalised.
        prompt: Text before each text.
        max_tokens: The most tokens of a text by the model's files; None: they do not say.
        size: Number of values of the vector.
        labels: Label of each value, of a classifier; empty: the vector is an embedding.
        of_labels: Function of the values of a classifier: "softmax", "sigmoid" or "identity".
        lowercases: Whether texts are in lower case before they are tokenized.
        pair_texts: Texts before, between and after the two texts of a pair, which are one text then; None: the
            tokenizer puts pairs together.
        pair_offset: Number by which token ids of the second text of a pair are raised (`ModelConfig.token_types`).
        padding: Token id that is left out at the end of a text, where transformers takes it for padding; None: none is.
        largest: The largest absolute value that the format of the vectors has.
        notice: A line for the user about the model; empty: there is nothing to say.
    """

    pooling: Pooling
    dense: tuple[Dense, ...] = ()
    normalize: bool = True
    dimensions: int | None = None
    truncated: bool = False
    prompt: str = ""
    max_tokens: int | None = None
    size: int = 0
    labels: tuple[str, ...] = ()
    of_labels: LabelFunction = "identity"
    lowercases: bool = False
    pair_texts: tuple[str, str, str] | None = None
    pair_offset: int = 0
    padding: int | None = None
    largest: float = math.inf
    notice: str = ""

    def identity(self) -> dict[str, Any]:
        """All that decides vectors beside the model's layers, as JSON values."""
        dense = [[content_identity(module.weights), module.activation] for module in self.dense]
        pooled = {"pooling": self.pooling, "dense": dense, "normalize": self.normalize}
        head = {**pooled, "dimensions": self.dimensions, "prompt": self.prompt, "lowercases": self.lowercases}
        head |= {"truncated": True} if self.truncated else {}
        labels = {"labels": self.labels, "of_labels": self.of_labels, "pair_texts": self.pair_texts}
        return {**head, **labels} if self.labels else head


def read_head(
    files: ModelFiles,
    config: ModelConfig,
    *,
    pooling: str | None = None,
    normalize: bool | None = None,
    dimensions: int | None = None,
    prompt_name: str | None = None,
    instruction: str | None = None,
) -> VectorSpec:
    """The head of a model of embeddings, by its files and by the options that replace what they state.

    Without a `modules.json` decoders pool the last token and encoders the mean, as sentence-transformers does it, and
    vectors are normalised.

    Args:
        files: The model's files.
        config: The model's configuration.
        pooling: Pooling that replaces that of the files; None: theirs.
        normalize: Whether vectors are normalised; None: as the files say.
        dimensions: Number of first values that are kept; None: all.
        prompt_name: Name of a prompt in `config_sentence_transformers.json`, or of a Router's route; None: its default
            prompt, and the default route.
        instruction: Task that the texts are queries of, in the words that Qwen3-Embedding was trained with; None: none.

    Raises:
        InputError: A module is not supported, or an option does not fit the model.
    """
    folder = (files.modules or files.path) if files.kind == "hf" else None
    head = VectorSpec("last" if config.causal else "mean", size=config.embed_size)
    stated: Mapping[str, Any] = {}
    routes = modules = None
    if folder is not None:
        if (folder / MODULES).exists():
            routes = read_routes(folder)
            modules = routes.of(prompt_name)
        stated = stated_by_sentence_transformers(folder)
    head = replace(head, prompt=_prompt(stated, prompt_name, instruction, routes.by_name if routes else ()))
    if folder is not None:
        if modules is not None:
            head = _of_modules(folder / MODULES, modules, head, pools=pooling is None)
        head = replace(head, max_tokens=head.max_tokens or longest_text(files.path))
    if pooling is not None:
        if pooling not in POOLINGS:
            raise InputError(f"--pooling must be one of {', '.join(POOLINGS)}, not {pooling!r}")
        head = replace(head, pooling=pooling)
    if normalize is not None:
        head = replace(head, normalize=normalize)
    if dimensions is not None:
        if not 1 <= dimensions <= head.size:
            raise InputError(f"--dimensions must be between 1 and the {head.size} of the model, not {dimensions}")
        head = replace(head, dimensions=dimensions, size=dimensions)
    elif isinstance(cut := stated.get("truncate_dim"), int) and 1 <= cut < head.size:
        head = replace(head, dimensions=cut, size=cut, truncated=True)
    return head


def longest_text(folder: Path) -> int | None:
    """The most tokens of a text by a tokenizer's configuration; None: it does not say."""
    path = folder / "tokenizer_config.json"
    most = read_json_object(path).get("model_max_length") if path.exists() else None
    return most if is_count(most) else None


def stated_by_sentence_transformers(folder: Path) -> Mapping[str, Any]:
    """The values of config_sentence_transformers.json; empty: there is none."""
    path = folder / _STATED
    return read_json_object(path) if path.exists() else {}


def _of_modules(path: Path, modules: Sequence[Module], head: VectorSpec, *, pools: bool) -> VectorSpec:
    """The head that modules describe. Raises InputError.

    Args:
        path: The modules.json, for messages.
        modules: The modules in order.
        head: The head as far as it is known without them.
        pools: Whether a Pooling has to be among them.
    """
    head = replace(head, normalize=False)
    refuse_foreign(path.parent, modules)
    if pools and not any(module.kind == "Pooling" for module in modules):
        raise InputError(f"{path} has no Pooling, so it gives no vector of a text: give another model, or --pooling")
    for module in modules:
        kind = module.kind
        if kind == "Transformer":
            most, lowercases = read_transformer(module.place, "feature-extraction")
            head = replace(head, max_tokens=most, lowercases=lowercases)
        elif kind == "Pooling":
            if head.normalize or head.dense:
                raise InputError(f"{path}: a Pooling after Dense or Normalize is not supported: give another model")
            head = replace(head, pooling=_pooling(module, head.prompt))
        elif kind == "Normalize":
            read_module(module)
            head = replace(head, normalize=True)
        elif kind == "Dense":
            if head.normalize:
                raise InputError(f"{path}: a Dense module after Normalize is not supported")
            dense, size = _dense(module, head.size)
            head = replace(head, dense=(*head.dense, dense), size=size)
        elif kind != "Dropout":
            raise InputError(
                f"{path}: modules of type {kind or 'unknown'} are not supported, only {', '.join(_MODULES)}: give a"
                " model of these"
            )
    return head


def _pooling(module: Module, prompt: str) -> Pooling:
    stated, path = read_module(module), module.place / "config.json"
    modes = stated.get("pooling_mode")
    if modes is None:
        modes = [mode for flag, mode in _FLAGS.items() if stated.get(f"pooling_mode_{flag}")]
    modes = [modes] if isinstance(modes, str) else modes
    if not isinstance(modes, list) or len(modes) != 1 or modes[0] not in _MODES:
        raise InputError(f"{path}: pooling {modes!r} is not supported; supported: {', '.join(_MODES)}")
    if prompt and stated.get("include_prompt") is False:
        raise InputError(
            f"{path}: a prompt that is left out of the pooling is not supported: leave out --prompt-name and"
            " --instruction, or give another model"
        )
    return _MODES[modes[0]]


def _dense(module: Module, taken: int) -> tuple[Dense, int]:
    """A Dense module that takes `taken` values, and the number of values that it gives."""
    place = module.place
    stated, weights = read_module(module), place / "model.safetensors"
    activation = str(stated.get("activation_function", "torch.nn.modules.activation.Tanh")).rpartition(".")[2]
    if activation not in _ACTIVATIONS:
        raise InputError(f"{place / 'config.json'}: activation {activation} is not supported")
    if not weights.exists():
        raise InputError(f"{place} has no model.safetensors: convert its weights to safetensors")
    size = stated.get("out_features")
    if not isinstance(size, int) or size < 1:
        raise InputError(f"{place / 'config.json'} has no out_features: fetch it again")
    tensors = read_safetensors_header(weights)
    if (stored := tensors.get("linear.weight")) is None or stored.shape != (size, taken):
        raise InputError(f"{weights} has no linear.weight of {size} rows and {taken} columns: fetch the model again")
    if (stated.get("bias", True) is True) != ("linear.bias" in tensors):
        raise InputError(f"{weights} and the bias that {place / 'config.json'} states differ: fetch the model again")
    return Dense(weights, activation=activation), size


def default_prompt(stated: Mapping[str, Any]) -> str:
    """The text that a model's files put before each text without being asked. Raises InputError."""
    return _prompt(stated, None, None, ())


def _prompt(stated: Mapping[str, Any], name: str | None, instruction: str | None, routes: Collection[str]) -> str:
    """The text before each text. Raises InputError where the model has no prompt, and no route, of this name."""
    if instruction is not None:
        if name is not None:
            raise InputError("--instruction and --prompt-name exclude each other: leave out one")
        return INSTRUCTION.format(instruction)
    prompts = stated.get("prompts") or {}
    chosen = stated.get("default_prompt_name") if name is None else name
    if chosen is None or (chosen in routes and chosen not in prompts):
        return ""
    if not isinstance(prompts, dict) or not isinstance(prompts.get(chosen), str):
        known = f"its prompts: {', '.join(prompts)}" if prompts else "it has no prompts"
        raise InputError(f"--prompt-name {chosen}: the model has no such prompt, {known}")
    prompt: str = prompts[chosen]
    return prompt
