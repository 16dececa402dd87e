"""Loading of a model's tokenizer from its files or its GGUF, and copying of it into a weight store."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from batchgen.core.cache_folder import cache_dir, is_trusted
from batchgen.core.digest import file_sha256, json_sha256
from batchgen.core.errors import InputError, reason_of
from batchgen.core.scratch_folder import ScratchFolder
from batchgen.models.files import ModelFiles
from batchgen.models.formats.gguf.header import gguf_pairs, read_gguf_header
from batchgen.models.tokenizers.gguf_process import save_apart, save_here
from batchgen.models.tokenizers.loading_errors import refusing
from batchgen.models.tokenizers.parts import TokenizerParts
from batchgen.models.tokenizers.tokenizer import Tokenizer
from batchgen.models.tokenizers.tokenizer_config import (
    CONFIG,
    read_chat_template,
    read_special_tokens,
)

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")
# Files of a Hugging Face directory that a tokenizer, with its chat template, is loaded from.
_COPIED_FILES = (
    *_TOKENIZER_FILES, "merges.txt", CONFIG, "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja", "chat_template.json", "config.json", "generation_config.json",
)  # fmt: skip
_SCRATCH = "tokenizer"
_STORE_FOLDER = "tokenizer"  # folder of a weight store
_CONVERSION = 4  # version of the conversion: tokenizers in the cache that have another are made again
_DIGEST = "sha256"  # file of a kept tokenizer with the digest of the others
# Key-value pairs of a GGUF with some 100,000 tokens: of larger ones another process builds the tokenizer.
_LARGE_PAIRS_BYTES = 4 << 20


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
    try:
        scratch.mkdir(mode=0o755)
        _copy_tokenizer(files, scratch)
        for path in scratch.iterdir():
            path.chmod(0o644)  # whatever the umask is, nobody else is to write to it
            with path.open("rb") as file:
                os.fsync(file.fileno())
        os.rename(scratch, folder)
    except BaseException:  # a full disk gets its space back
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def _copy_tokenizer(files: ModelFiles, directory: Path) -> None:
    """Copy the files of a model's tokenizer into a directory, where the model has one."""
    if files.kind != "gguf":
        _copy_files(files.path / _STORE_FOLDER if files.kind == "store" else files.path, directory)
    elif "tokenizer.ggml.model" in read_gguf_header(files.path).metadata:
        # Copied, as loading it once more takes hundreds of MiB for a large vocabulary.
        with _saved_from_gguf(files) as source:
            _copy_files(source, directory)


def _copy_files(source: Path, directory: Path) -> None:
    """Copy the files of a tokenizer."""
    for name in _COPIED_FILES:
        if (source / name).exists():
            shutil.copyfile(source / name, directory / name)


def _load(directory: Path) -> TokenizerParts:
    """Load the tokenizer of a directory from its tokenizer.json, whatever class the other files name."""
    path = directory / "tokenizer.json"
    with refusing(path if path.exists() else directory):
        if not path.exists():
            return _converted(directory)
        from tokenizers import Tokenizer as Backend

        text = path.read_bytes()
        backend = Backend.from_buffer(text)
        # A file may ask for both; prompts are cut or refused elsewhere, and never padded.
        backend.no_truncation()
        backend.no_padding()
        names, template = read_special_tokens(directory), read_chat_template(directory)
        return TokenizerParts(backend, names, template, digest=hashlib.sha256(text).hexdigest())


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
    """Load the tokenizer of a GGUF."""
    try:
        with _saved_from_gguf(files) as folder:
            return _load(folder)
    except OSError as error:
        raise InputError(f"cannot save the tokenizer of {files.path}: {reason_of(error)}") from error


@contextmanager
def _saved_from_gguf(files: ModelFiles) -> Iterator[Path]:
    """Within a `with` block, a folder that has the tokenizer of a GGUF in the files that `_load` reads.

    Building it takes seconds. So it is kept in the cache directory, under a digest of the file's key-value pairs.

    Raises:
        InputError: The tokenizer is broken.
        OSError: Neither the cache directory nor that of temporary files can be written.
    """
    digest, num_bytes = gguf_pairs(files.path)
    kept = cache_dir() / "tokenizers" / json_sha256([_CONVERSION, digest])[:32]
    save = save_apart if num_bytes > _LARGE_PAIRS_BYTES else save_here
    intact = _is_intact(kept)
    if not intact:
        shutil.rmtree(kept, ignore_errors=True)
        try:
            kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with ScratchFolder(_SCRATCH, kept.parent) as scratch:
                saved = scratch / "saved"
                saved.mkdir()
                save(files.path, saved)
                (saved / _DIGEST).write_text(_digest_of(saved))
                for path in (saved, *saved.iterdir()):  # whatever the umask is, nobody else is to write there
                    path.chmod(0o700 if path is saved else 0o600)
                os.rename(saved, kept)  # fails where another process was first
        except OSError:
            pass  # only slower next time
        intact = _is_intact(kept)
    if intact:
        yield kept
        return
    with ScratchFolder(_SCRATCH) as scratch:
        save(files.path, scratch)
        yield scratch


def _is_intact(kept: Path) -> bool:
    """Tell whether a folder of the cache has a tokenizer that this user wrote, and that is not damaged."""
    if not all(is_trusted(path, "the kept tokenizer") for path in (kept, *kept.glob("*"))):
        return False
    try:
        return (kept / _DIGEST).read_text() == _digest_of(kept)
    except (OSError, ValueError):
        return False


def _digest_of(folder: Path) -> str:
    """The digest of the files of a folder, with their names."""
    digests = {}
    for path in folder.iterdir():
        if path.name != _DIGEST:
            with path.open("rb") as file:
                digests[path.name] = file_sha256(file)
    return json_sha256(digests)
