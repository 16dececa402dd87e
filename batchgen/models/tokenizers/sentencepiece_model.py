"""The tokenizer of a directory that has a tokenizer.model (SentencePiece) and no tokenizer.json.

The packages sentencepiece and protobuf read the file.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from batchgen.core.errors import InputError
from batchgen.core.installer import install_command
from batchgen.models.formats.gguf.header import VOCABULARY
from batchgen.models.tokenizers.gguf_tokenizer import SPACE, backend_of, names_of

_UNIGRAM, _BPE = 1, 2  # kinds of models
# Classes whose texts begin with BOS and end without EOS unless the files say otherwise.
_CLASSES = ("Llama", "CodeLlama", "Gemma", "PreTrainedTokenizer")
FETCH = "fetch the model's tokenizer.json"


@dataclass(frozen=True)
class Converted:
    """A tokenizer that was converted from a tokenizer.model.

    Attributes:
        backend: The tokenizer.
        names: Special tokens by their name in transformers, such as "bos_token".
        prepare: Function that changes a text before it is tokenized; None: texts are not changed.
    """

    backend: Backend
    names: dict[str, str]
    prepare: Callable[[str], str] | None


def convert_model(directory: Path, stated: dict[str, Any]) -> Converted:
    """Convert the tokenizer.model of a directory.

    Args:
        directory: The directory, which may also have an added_tokens.json.
        stated: Values of its tokenizer_config.json; empty if there is none.

    Raises:
        InputError: A package is not installed, or the file is not supported.
        OSError: A file cannot be read.
    """
    name = stated.get("tokenizer_class")
    if name is not None and not str(name).startswith(_CLASSES):
        raise InputError(f"a tokenizer.model of the class {name} is not supported: {FETCH}")
    proto = _read(directory / "tokenizer.model")
    pairs = _pairs(proto, directory, stated)
    spec = proto.normalizer_spec
    if proto.trainer_spec.model_type not in (_UNIGRAM, _BPE) or proto.trainer_spec.treat_whitespace_as_suffix:
        raise InputError(f"its kind of model ({proto.trainer_spec.model_type}) is not supported: {FETCH}")
    model = _unigram(pairs, proto) if proto.trainer_spec.model_type == _UNIGRAM else None
    backend = backend_of(pairs, model)
    # With "legacy" a space stands before the text behind each special token; without it before the first alone.
    once = spec.add_dummy_prefix and stated.get("legacy") is False
    prefix = [normalizers.Prepend(SPACE)] if spec.add_dummy_prefix and not once else []
    backend.normalizer = normalizers.Sequence([*_cleaning(spec), *prefix, normalizers.Replace(" ", SPACE)])
    if once:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme="first", split=False)
    last = [decoders.Strip(" ", 1, 0)] if spec.add_dummy_prefix else []
    backend.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *last])
    prepare = (_strip if spec.remove_extra_whitespaces else _widen) if once else None
    return Converted(backend, names_of(pairs), prepare)


def _widen(text: str) -> str:
    """A text whose own first space is kept: `Metaspace` takes it for the one that is to stand there."""
    return f" {text}" if text.startswith((" ", SPACE)) else text


def _strip(text: str) -> str:
    """A text that `Metaspace` knows to be the first, which it does not where a normalizer strips it."""
    return text.lstrip(" ")


def _read(path: Path) -> Any:
    try:
        from sentencepiece import sentencepiece_model_pb2
    except ImportError as error:
        raise InputError(
            f"{path.name} without a tokenizer.json needs the packages sentencepiece and protobuf: "
            + install_command("sentencepiece>=0.2", "protobuf>=4")
        ) from error
    messages: Any = sentencepiece_model_pb2  # its classes are made as it is imported
    proto = messages.ModelProto()
    try:
        proto.ParseFromString(path.read_bytes())
    except OSError:
        raise
    except Exception as error:  # protobuf's own, of several kinds
        raise InputError(f"{path.name} is not of SentencePiece, or damaged: {FETCH}") from error
    if not proto.pieces:
        raise InputError(f"{path.name} is not of SentencePiece, or damaged: {FETCH}")
    return proto


def _pairs(proto: Any, directory: Path, stated: dict[str, Any]) -> dict[str, Any]:
    """The tokenizer's values as the key-value pairs that a GGUF of the model would have."""
    tokens = [piece.piece for piece in proto.pieces]
    scores = [piece.score for piece in proto.pieces]
    kinds = [piece.type for piece in proto.pieces]
    for token_id, token in sorted(_added(directory, stated).items()):
        if token_id < len(tokens):
            if tokens[token_id] != token.content:
                raise InputError(
                    f"token {token_id} is {tokens[token_id]!r}, and {token.content!r} is to be added: {FETCH}"
                )
            kinds[token_id] = 3 if token.special else 4
        elif token_id == len(tokens):
            tokens.append(token.content)
            scores.append(0.0)
            kinds.append(3 if token.special else 4)
        else:
            raise InputError(f"token {token_id} is to be added to {len(tokens)}: {FETCH}")
    ids = {name: getattr(proto.trainer_spec, f"{name}_id") for name in ("bos", "eos", "unk")}
    for name in ids:
        text = stated.get(f"{name}_token")
        text = text.get("content") if isinstance(text, dict) else text
        if text in tokens:
            ids[name] = tokens.index(text)
    pairs = {"model": "llama", "tokens": tuple(tokens), "scores": tuple(scores), "token_type": tuple(kinds)}
    pairs |= {"bos_token_id": ids["bos"], "eos_token_id": ids["eos"], "unknown_token_id": ids["unk"]}
    pairs |= {
        "add_bos_token": stated.get("add_bos_token", ids["bos"] >= 0),
        "add_eos_token": stated.get("add_eos_token", False),
    }
    return {VOCABULARY + key: value for key, value in pairs.items() if value is not None}


def _added(directory: Path, stated: dict[str, Any]) -> dict[int, AddedToken]:
    """The tokens, by id, that other files of the directory add to the vocabulary."""
    added: dict[int, AddedToken] = {}
    path = directory / "added_tokens.json"
    more = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    for content, token_id in more.items():
        added[int(token_id)] = AddedToken(content, special=True)
    for token_id, token in (stated.get("added_tokens_decoder") or {}).items():
        added[int(token_id)] = AddedToken(token["content"], special=bool(token.get("special", False)))
    return added


def _cleaning(spec: Any) -> list[normalizers.Normalizer]:
    """The normalizers that clean a text before spaces are replaced."""
    steps: list[normalizers.Normalizer] = []
    if spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    return steps


def _unigram(pairs: dict[str, Any], proto: Any) -> models.Unigram:
    vocab = list(zip(pairs[f"{VOCABULARY}tokens"], pairs[f"{VOCABULARY}scores"], strict=True))
    has_bytes = proto.trainer_spec.byte_fallback
    return models.Unigram(vocab, pairs[f"{VOCABULARY}unknown_token_id"], byte_fallback=has_bytes)
