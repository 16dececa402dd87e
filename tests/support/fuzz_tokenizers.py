"""Damaged tokenizers of every kind: what is left of one is read and used, or refused in one line."""

from __future__ import annotations

import io
import json
import os
import random
import resource
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf_vocabularies import byte_level, sentencepiece, write
from tiny_tokenizers import CHAT_TEMPLATE, TEXT, make_tiny_sentencepiece_tokenizer, make_tiny_tokenizer

from batchgen.core.errors import InputError, RowError
from batchgen.models.files import ModelFiles
from batchgen.models.tokenizers.loading import load_tokenizer

CPU_LIMIT_S = 10
GROWTH_LIMIT_BYTES = 1 << 30
TEXTS = ["The ferry left.", "  two\n\n<|im_end|> é🦊<s>", "a" * 300]


@dataclass(frozen=True)
class Kind:
    """One kind of file. file: of the folder of `prepare`; text: JSON."""

    folder: str
    file: str
    text: bool = False


KINDS = {
    "tokenizer.json": Kind("bytes", "tokenizer.json", text=True),
    "tokenizer.json of SentencePiece": Kind("pieces", "tokenizer.json", text=True),
    "tokenizer_config.json": Kind("bytes", "tokenizer_config.json", text=True),
    "special_tokens_map.json": Kind("bytes", "special_tokens_map.json", text=True),
    "tokenizer.model": Kind("model", "tokenizer.model"),
    "tokenizer.model and config": Kind("model", "tokenizer_config.json", text=True),
    "tokenizer.model and more tokens": Kind("model", "added_tokens.json", text=True),
    "gguf of bytes": Kind("bytes.gguf", "bytes.gguf"),
    "gguf of SentencePiece": Kind("pieces.gguf", "pieces.gguf"),
    "gguf pairs": Kind("bytes.gguf", "bytes.gguf"),
    "gguf pairs of SentencePiece": Kind("pieces.gguf", "pieces.gguf"),
}
_OF_GGUFS = {
    "bytes.gguf": lambda: byte_level("llama-bpe") | {"tokenizer.chat_template": CHAT_TEMPLATE},
    "pieces.gguf": lambda: sentencepiece(random.Random(1), "abc", 20),
}


def prepare(folder: Path) -> None:
    """Write a whole tokenizer of every kind into a folder."""
    make_tiny_tokenizer(folder / "bytes")
    special = {"bos_token": "<|endoftext|>", "eos_token": {"content": "<|endoftext|>", "lstrip": False}}
    (folder / "bytes" / "special_tokens_map.json").write_text(json.dumps(special))
    make_tiny_sentencepiece_tokenizer(folder / "pieces")
    for name, pairs in _OF_GGUFS.items():
        (folder / name).mkdir()
        write(folder / name / name, pairs())
    (folder / "model").mkdir()
    (folder / "model" / "tokenizer.model").write_bytes(_trained())
    added = {"400": {"content": "<|user|>", "special": True}}
    stated = {"tokenizer_class": "LlamaTokenizer", "legacy": False, "added_tokens_decoder": added}
    (folder / "model" / "tokenizer_config.json").write_text(json.dumps(stated))
    (folder / "model" / "added_tokens.json").write_text(json.dumps({"<|user|>": 400}))


def _trained() -> bytes:
    """A SentencePiece model, or nothing where the package is not installed."""
    try:
        import sentencepiece as package
    except ImportError:
        return b""
    made = io.BytesIO()
    package.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT.split("\n")), model_writer=made, vocab_size=400, hard_vocab_limit=False,
        minloglevel=2, num_threads=1, model_type="bpe", byte_fallback=True,
    )  # fmt: skip
    return made.getvalue()


def try_case(prepared: Path, name: str, seed: int, folder: Path, damage: Callable) -> tuple[str, str | None]:
    """Damage a file of a kind and read it; returns what came of it, and what does not hold or None.

    prepared: the folder of `prepare`. folder: of this case, made anew. damage: As `fuzz.damage`.
    """
    kind, rng = KINDS[name], random.Random(f"{name} {seed}")
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(prepared / kind.folder, folder)
    path, is_gguf = folder / kind.file, kind.file.endswith(".gguf")
    if name.startswith("gguf pairs"):
        write(path, _changed(_OF_GGUFS[kind.file](), rng))
    else:
        path.write_bytes(damage(path.read_bytes(), kind.text, is_gguf, rng))
    os.environ["BATCHGEN_CACHE"] = str(folder / "cache")
    before_s, before = time.process_time(), _peak_bytes()
    try:
        _use(ModelFiles(path, "gguf", "x") if is_gguf else ModelFiles(folder, "hf", "x"))
        outcome, wrong = "read", None
    except (InputError, RowError) as error:
        outcome, wrong = "refused", f"more than a line: {error}" if "\n" in str(error) else None
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return "raised", f"{type(error).__name__}: {error}"
    if time.process_time() - before_s > CPU_LIMIT_S:
        wrong = f"computed for {time.process_time() - before_s:.0f} s"
    if _peak_bytes() - before > GROWTH_LIMIT_BYTES:
        wrong = f"took {(_peak_bytes() - before) >> 20} MiB"
    return outcome, wrong


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _use(files: ModelFiles) -> None:
    tokenizer = load_tokenizer(files)
    for ids in tokenizer.encode_batch(TEXTS):
        tokenizer.decode(ids)
        for token_id in ids[:3]:
            tokenizer.token_text(token_id)
    tokenizer.identity()
    tokenizer.least_tokens("a" * 70_000)
    if tokenizer.has_chat_template:
        tokenizer.encode_chat([{"role": "user", "content": "hi"}])


_ODD: list[Any] = [
    True,
    0,
    2**31,
    2**32 - 1,
    "",
    "x",
    "\x00",
    "a" * 5000,
    "llama",
    "gpt2",
    (1, 2),
    ("a", "b"),
    (0.5,),
    (True,),
]


def _changed(pairs: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Pairs of which one or two are others, shorter, longer, in disorder or missing."""
    more = ["add_space_prefix", "add_eos_token", "unknown_token_id", "fim_pad_token_id", "eot_token_id"]
    keys = [*pairs, *(f"tokenizer.ggml.{key}" for key in more)]
    for _ in range(rng.choice((1, 1, 2))):
        key = rng.choice(keys)
        value = pairs.pop(key, None)
        if isinstance(value, tuple) and rng.random() < 0.7:
            at = rng.randrange(len(value))
            pairs[key] = rng.choice([
                value[:at] or value[:1], value[:at] + value[at + 1 :], (*value, value[at]),
                tuple(rng.sample(value, len(value))),
                tuple(map(str, value)), tuple(rng.randrange(5) for _ in value),
                (*value[:at], value[0], *value[at + 1 :]),
            ])  # fmt: skip
        elif rng.random() < 0.8:
            pairs[key] = rng.choice(_ODD)
    return pairs
