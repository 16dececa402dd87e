"""A lower bound of the number of a text's tokens, without tokenizing it.

The bound is the text's bytes divided by the bytes of the longest token. It is computed only for tokenizers whose steps
are all known.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from functools import cache
from itertools import chain
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

# Composed characters, and those that stand for others, have at least a quarter of the bytes that were there before.
_COMPOSED = 4
_KEEPING = {"Prepend": 1, "NFC": _COMPOSED, "NFD": _COMPOSED}  # normalizer -> times that a text may become shorter
_CUTTING = {"ByteLevel", "Digits", "Metaspace", "UnicodeScripts", "FixedLength"}  # pre-tokenizers that lose nothing
_BYTES_OF_UTF8 = [byte for byte in range(256) if byte not in (0xC0, 0xC1) and byte < 0xF5]


def state_of(backend: Backend) -> dict[str, Any]:
    """The parts of a tokenizer's state that `TokenBound` reads, without merges: as JSON they may take 100 MiB."""
    model = backend.model
    kind = type(model).__name__
    steps = {"normalizer": backend.normalizer, "pre_tokenizer": backend.pre_tokenizer}
    added = [
        {"content": token.content, "lstrip": token.lstrip, "rstrip": token.rstrip}
        for token in backend.get_added_tokens_decoder().values()
    ]
    return {
        "added_tokens": added,
        **{name: None if step is None else json.loads(step.__getstate__()) for name, step in steps.items()},
        "model": _state_of_bpe(backend) if kind == "BPE" else {"type": kind} | json.loads(model.__getstate__()),
    }


def _state_of_bpe(backend: Backend) -> dict[str, Any]:
    """The state of a model of the kind BPE, without its merges."""
    fields = ("byte_fallback", "unk_token", "fuse_unk")
    vocabulary = backend.get_vocab(with_added_tokens=False)
    return {"type": "BPE", "vocab": vocabulary} | {name: getattr(backend.model, name) for name in fields}


class TokenBound:
    """The lower bound of the number of tokens, for one tokenizer."""

    def __init__(self, state: dict[str, Any]) -> None:
        """Read a tokenizer's state: the JSON values that Hugging Face's `tokenizers` writes."""
        added = state.get("added_tokens") or []
        longest = _longest(state, [token["content"] for token in added])
        # Some tokens take the spaces around them as well, however many.
        self._takes_spaces = any(token.get("lstrip") or token.get("rstrip") for token in added)
        shrinks = _shrinks(state.get("normalizer"))
        cuts = all(_loses_nothing(step) for step in _steps(state.get("pre_tokenizer"), "pretokenizers"))
        self._bytes_per_token = longest * shrinks if longest and shrinks and cuts else 0

    def least(self, text: str) -> int:
        """The least number of tokens that a text may have. 0: no bound is known."""
        if not self._bytes_per_token:
            return 0
        size = len(text.encode("utf-8", "replace"))
        if self._takes_spaces:
            size -= sum(text.count(space) * len(space.encode()) for space in _spaces())
        return -(-size // self._bytes_per_token)


def _longest(state: dict[str, Any], added: Iterable[str]) -> int:
    """The largest number of a text's bytes that one token stands for.

    0: there is no bound, because characters that are not in the vocabulary may be dropped.
    """
    model = state["model"]
    vocabulary = model["vocab"]
    known = vocabulary if isinstance(vocabulary, dict) else {token for token, _ in vocabulary}
    steps = _steps(state.get("pre_tokenizer"), "pretokenizers") + _steps(state.get("normalizer"), "normalizers")
    of_bytes = any(step.get("type") == "ByteLevel" for step in steps)
    if model.get("type") not in ("BPE", "Unigram"):
        return 0
    if of_bytes:
        if not all(character in known for character in _byte_characters()):
            return 0
        return max(max(map(len, known)), *(len(text.encode()) for text in added), 1)
    has_bytes = model.get("byte_fallback") and all(f"<0x{byte:02X}>" in known for byte in _BYTES_OF_UTF8)
    unknown_apart = model["type"] == "BPE" and model.get("unk_token") and not model.get("fuse_unk")
    if not (has_bytes or unknown_apart):
        return 0
    return max(4, *(len(token.encode()) for token in chain(known, added)))


@cache
def _spaces() -> list[str]:
    """All characters that are white space."""
    return [chr(code) for code in range(sys.maxunicode + 1) if chr(code).isspace()]


def _byte_characters() -> list[str]:
    """The characters by which byte-level vocabularies write the bytes that occur in UTF-8."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in seen]
    written = {byte: chr(byte) for byte in seen} | {byte: chr(256 + i) for i, byte in enumerate(rest)}
    return [written[byte] for byte in _BYTES_OF_UTF8]


def _steps(part: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    """The steps of a sequence of normalizers or pre-tokenizers; nested sequences are flattened."""
    if part is None:
        return []
    if part.get("type") != "Sequence":
        return [part]
    return [step for inner in part[key] for step in _steps(inner, key)]


def _shrinks(normalizer: dict[str, Any] | None) -> int:
    """The factor by which a normalizer may shorten a text. 0: there is no bound."""
    times = 1
    for step in _steps(normalizer, "normalizers"):
        kind = step.get("type")
        if kind == "Replace":
            pattern = step["pattern"].get("String")
            keeps = pattern is not None and 0 < len(pattern.encode()) <= len(step["content"].encode())
            times *= 1 if keeps else 0
        elif kind == "ByteLevel":
            continue
        else:
            times *= _KEEPING.get(kind or "", 0)
    return times


def _loses_nothing(step: dict[str, Any]) -> bool:
    kind = step.get("type")
    return kind in _CUTTING or (kind in ("Split", "Punctuation") and step.get("behavior") not in ("Removed", None))
