"""Tiny random encoders, classifiers and embedding models on disk, with the transformers models that were saved."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from model_tables import FIELDS, VOCAB_SIZE
from safetensors.torch import save_file
from tiny_models import randomize
from tiny_tokenizers import make_tiny_tokenizer

# Class of a model in transformers -> class of its configuration.
ENCODERS = {
    "BertModel": "BertConfig",
    "RobertaModel": "RobertaConfig",
    "XLMRobertaModel": "XLMRobertaConfig",
    "CamembertModel": "CamembertConfig",
    "DistilBertModel": "DistilBertConfig",
    "GteModel": "GteConfig",
    "ModernBertModel": "ModernBertConfig",
    "NomicBertModel": "NomicBertConfig",
    "Gemma3TextModel": "Gemma3TextConfig",
}
CLASSIFIERS = {
    "BertForSequenceClassification": "BertConfig",
    "RobertaForSequenceClassification": "RobertaConfig",
    "DistilBertForSequenceClassification": "DistilBertConfig",
    "GteForSequenceClassification": "GteConfig",
    "ModernBertForSequenceClassification": "ModernBertConfig",
    "NomicBertForSequenceClassification": "NomicBertConfig",
    "LlamaForSequenceClassification": "LlamaConfig",
    "Qwen3ForSequenceClassification": "Qwen3Config",
}


def make_encoder(name: str, path: Path, *, seed: int = 0, **overrides):
    """A random model of a class of transformers, saved with a tokenizer that puts special tokens around texts."""
    import transformers

    family = ENCODERS.get(name, CLASSIFIERS.get(name, "")).removesuffix("Config").removesuffix("Text").lower()
    sizes = {
        "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
        "num_attention_heads": 4, "max_position_embeddings": 260, "pad_token_id": 3, "initializer_range": 0.2,
    }  # fmt: skip
    if family == "modernbert":  # windows of 4 tokens on both sides, in layers 1 and 2
        sizes |= {"local_attention": 8, "bos_token_id": None, "eos_token_id": None}
    elif family == "distilbert":
        sizes["hidden_dim"] = sizes.pop("intermediate_size")
    elif family not in ("bert", "roberta", "xlmroberta", "camembert", "gte", "nomicbert"):
        sizes |= {"num_key_value_heads": 2, **FIELDS.get(family, {})}
    if family == "gemma3":
        sizes |= {"use_bidirectional_attention": True, "layer_types": ["sliding_attention"] * 2 + ["full_attention"]}
    config_class = getattr(transformers, ENCODERS.get(name) or CLASSIFIERS[name])
    torch.manual_seed(seed)
    model = getattr(transformers, name)(config_class(**{**sizes, **overrides})).eval()
    randomize(model, family)
    model.save_pretrained(path)
    add_special_tokens(path)
    return model.float()


def add_special_tokens(path: Path) -> None:
    """Save a tokenizer that puts special tokens before and after texts, and gives the second of a pair type 1."""
    make_tiny_tokenizer(path, chat_template=None)
    file = path / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    ids = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    begin, end = "<|im_start|>", "<|im_end|>"

    def token(name: str, kind: int = 0) -> dict:
        return {"SpecialToken": {"id": name, "type_id": kind}}

    def text(name: str, kind: int = 0) -> dict:
        return {"Sequence": {"id": name, "type_id": kind}}

    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [token(begin), text("A"), token(end)],
        "pair": [token(begin), text("A"), token(end), text("B", 1), token(end, 1)],
        "special_tokens": {name: {"id": name, "ids": [ids[name]], "tokens": [name]} for name in (begin, end)},
    }
    file.write_text(json.dumps(tokenizer))


def into_transformer_folder(path: Path, name: str = "0_Transformer") -> None:
    """Move a model with modules into a subdirectory of its own, as sentence-transformers had it before version 2.3."""
    (path / name).mkdir()
    for file in [file for file in path.iterdir() if file.is_file() and file.name not in AT_ROOT]:
        file.rename(path / name / file.name)
    modules = json.loads((path / "modules.json").read_text())
    modules[0]["path"] = name
    (path / "modules.json").write_text(json.dumps(modules))


AT_ROOT = ("modules.json", "config_sentence_transformers.json")


def write_router(path: Path, routes: dict[str, list[str]], default: str, **parameters) -> None:
    """Write a Router as the only module of a model: the directories of each route's modules, NAME_Kind."""
    listed = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Router"}]
    (path / "modules.json").write_text(json.dumps(listed))
    places = dict.fromkeys(place for of_route in routes.values() for place in of_route)
    types = {place: f"sentence_transformers.models.{place.rpartition('_')[2]}" for place in places}
    stated = {"types": types, "structure": routes, "parameters": {"default_route": default, **parameters}}
    (path / "router_config.json").write_text(json.dumps(stated))


def write_modules(path: Path, pooling: str, *, dense: tuple[int, int] | None = None, **config) -> dict:
    """Write sentence-transformers' files of pooling, a Dense module and normalisation; returns Dense's tensors.

    Args:
        path: Directory of the model.
        pooling: Mode of the pooling, such as "mean_tokens".
        dense: Number of values before and after a Dense module; None: there is none.
        config: Values of config_sentence_transformers.json.
    """
    modules = [("", "Transformer"), ("1_Pooling", "Pooling")]
    modules += [("2_Dense", "Dense")] if dense else []
    modules.append(("3_Normalize", "Normalize"))
    listed = [
        {"idx": i, "name": str(i), "path": where, "type": f"sentence_transformers.models.{kind}"}
        for i, (where, kind) in enumerate(modules)
    ]
    (path / "modules.json").write_text(json.dumps(listed))
    (path / "1_Pooling").mkdir(exist_ok=True)
    (path / "1_Pooling" / "config.json").write_text(json.dumps({f"pooling_mode_{pooling}": True}))
    (path / "config_sentence_transformers.json").write_text(json.dumps(config))
    if dense is None:
        return {}
    generator = torch.Generator().manual_seed(1)
    tensors = {
        "linear.weight": torch.randn(dense[1], dense[0], generator=generator) * 0.2,
        "linear.bias": torch.randn(dense[1], generator=generator),
    }
    (path / "2_Dense").mkdir(exist_ok=True)
    stated = {"in_features": dense[0], "out_features": dense[1], "activation_function": "torch.nn.Tanh"}
    (path / "2_Dense" / "config.json").write_text(json.dumps(stated))
    save_file(tensors, path / "2_Dense" / "model.safetensors")
    return tensors
