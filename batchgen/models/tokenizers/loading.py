"""Loading of a model's tokenizer from its files or its GGUF, and copying of it into a weight store."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from batchgen.core.cache_folder import cache_dir, is_trusted
from batchgen.core.digest import json_sha256
from batchgen.core.errors import InputError, reason_of
from batchgen.models.files import ModelFiles
from batchgen.models.formats.gguf.header import gguf_pairs_sha256, read_gguf_header, read_gguf_vocabulary
from batchgen.models.tokenizers.parts import TokenizerParts
from batchgen.models.tokenizers.tokenizer import Tokenizer
from batchgen.models.tokenizers.tokenizer_config import (
    CONFIG,
    read_chat_template,
    read_special_tokens,
    write_tokenizer_config,
)

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")
# Files of a Hugging Face directory that a tokenizer, with its chat template, is loaded from.
_COPIED_FILES = (
    *_TOKENIZER_FILES, "merges.txt", CONFIG, "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja", "chat_template.json", "config.json", "generation_config.json",
)  # fmt: skip
_STORE_FOLDER = "tokenizer"  # folder of a weight store
_CONVERSION = 3  # version of the conversion: tokenizers in the cache that have another are made again


def load_tokenizer(files: ModelFiles, special_tokens: str = "parse", chat_template: str | None = None) -> Tokenizer:
    """Load the tokenizer of a model.

    Args:
        files: Files of the model.
        special_tokens: Meaning of the text of special tokens in prompts: "parse" or "text" (`Tokenizer`).
        chat_template: Jinja text of a chat template that replaces the model's; None: the model's.

    Raises:
        InputError: The tokenizer is missing or broken.
    """
    parts = load_parts(files)
    if chat_template is not None:
        parts = replace(parts, chat_template=chat_template)
    return Tokenizer(parts, special_tokens)


def load_parts(files: ModelFiles) -> TokenizerParts:
    """Load the parts of a model's tokenizer.

    Raises:
        InputError: The tokenizer is missing or broken.
    """
    if files.kind == "gguf":
        return _load_from_gguf(files)
    directory = files.path / _STORE_FOLDER if files.kind == "store" else files.path
    if not any((directory / name).exists() for name in _TOKENIZER_FILES):
        raise InputError(f"{directory} has no tokenizer: copy the model's there, one of {', '.join(_TOKENIZER_FILES)}")
    return _load(directory)


def save_tokenizer(files: ModelFiles, store: Path) -> None:
    """Save the tokenizer of a model in a weight store, completely or not at all.

    Nothing happens if the store has it already, or if the model has none.

    Raises:
        InputError: The tokenizer is broken.
        OSError: The store cannot be written.
    """
    folder, scratch = store / _STORE_FOLDER, store / f"{_STORE_FOLDER}.tmp"
    if folder.exists():
        return
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(mode=0o755)
    if files.kind == "gguf":
        if "tokenizer.ggml.model" in read_gguf_header(files.path).metadata:
            _save(_load_from_gguf(files), scratch)
    else:
        source = files.path / _STORE_FOLDER if files.kind == "store" else files.path
        for name in _COPIED_FILES:
            if (source / name).exists():
                shutil.copyfile(source / name, scratch / name)
    for path in scratch.iterdir():
        path.chmod(0o644)  # whatever the umask is, nobody else is to write to it
        with path.open("rb") as file:
            os.fsync(file.fileno())
    os.rename(scratch, folder)


def _load(directory: Path) -> TokenizerParts:
    """Load the tokenizer of a directory from its tokenizer.json, whatever class the other files name."""
    path = directory / "tokenizer.json"
    with _refusing(path if path.exists() else directory):
        if not path.exists():
            return _converted(directory)
        from tokenizers import Tokenizer as Backend

        backend = Backend.from_file(str(path))
        # A file may ask for both; prompts are cut or refused elsewhere, and never padded.
        backend.no_truncation()
        backend.no_padding()
        return TokenizerParts(backend, read_special_tokens(directory), read_chat_template(directory))


def _converted(directory: Path) -> TokenizerParts:
    """The tokenizer of a directory without a tokenizer.json, converted from its other files."""
    if (directory / "tokenizer.model").exists():
        from batchgen.models.tokenizers.sentencepiece_model import convert_model

        path = directory / CONFIG
        stated = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        converted = convert_model(directory, stated)
        names = {**converted.names, **read_special_tokens(directory)}
        return TokenizerParts(converted.backend, names, read_chat_template(directory), converted.prepare)
    if not (directory / "vocab.json").exists():
        raise InputError("a tekken.json alone is not read: fetch the model's tokenizer.json")
    from batchgen.models.tokenizers.transformers_tokenizer import load_with_transformers

    return load_with_transformers(directory)


def _load_from_gguf(files: ModelFiles) -> TokenizerParts:
    """Load the tokenizer of a GGUF.

    Building it takes seconds. So it is kept in the cache directory, under a digest of the file's key-value pairs.
    """
    key = json_sha256([_CONVERSION, gguf_pairs_sha256(files.path)])
    cached = cache_dir() / "tokenizers" / key[:32]
    if all(is_trusted(path, "the kept tokenizer") for path in (cached, *cached.glob("*"))):
        try:
            return _load(cached)
        except InputError:  # damaged in any way: make it again
            pass
    shutil.rmtree(cached, ignore_errors=True)
    with _refusing(files.path):
        parts = _taken_out(files.path)
    try:
        cached.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cached.parent) as scratch:
            saved = Path(scratch, "saved")
            saved.mkdir()
            _save(parts, saved)
            for path in (saved, *saved.iterdir()):  # whatever the umask is, nobody else is to write there
                path.chmod(0o700 if path is saved else 0o600)
            os.rename(saved, cached)  # fails where another process was first
    except OSError:
        pass  # only slower next time
    return parts


def _taken_out(path: Path) -> TokenizerParts:
    """Build the tokenizer that a GGUF describes. Raises InputError."""
    from batchgen.models.tokenizers.gguf_tokenizer import backend_of, names_of

    pairs = read_gguf_vocabulary(path)
    template = pairs.get("tokenizer.chat_template")
    return TokenizerParts(backend_of(pairs), names_of(pairs), template if isinstance(template, str) else None)


def _save(parts: TokenizerParts, directory: Path) -> None:
    """Write the files of a tokenizer that `_load` reads. Raises OSError."""
    write_tokenizer_config(directory, parts.special_tokens, parts.chat_template)
    parts.backend.save(str(directory / "tokenizer.json"))


@contextmanager
def _refusing(path: Path) -> Iterator[None]:
    """Within a `with` block, turn any error of reading tokenizer files into an InputError with a one-line message."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # files broken in any way, packages that are not installed, panics of `tokenizers`
        raise InputError(f"cannot load the tokenizer of {path}: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    """The first line of an error's text; if it has no text, the name of its class."""
    if "trust_remote_code" in str(error):
        return "it needs Python code of the model's directory, which is never run: save it as a tokenizer.json"
    return reason_of(error)
