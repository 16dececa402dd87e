"""Tokenizing of data in which the text of a special token, such as `<|im_start|>`, is plain text.

A copy of the tokenizer gets secret names for its special tokens. So their usual names in data are plain text, and
nothing else changes. A chat template writes the usual names, too. So usual names in messages are replaced by
placeholders before the template renders them. Afterwards, the usual names that the template wrote become secret names,
and placeholders become usual names.
"""

from __future__ import annotations

import json
import re
import secrets
from typing import Any

from tokenizers import Tokenizer as Backend

_MARK = "\ufdd0"  # no character: Unicode leaves it to programs
_HIDDEN = re.compile(f"{_MARK}(\\d+){_MARK}")


class SpecialTokensAsText:
    """A tokenizer for data in which the text of special tokens is plain text.

    Attributes:
        backend: Tokenizer with secret names of special tokens, which encodes the data.
    """

    def __init__(self, backend: Backend) -> None:
        state = json.loads(backend.to_str())
        key = secrets.token_hex(8)
        special = [token for token in state["added_tokens"] if token["special"]]
        self._names = {token["content"]: f"\ufdd1{key}:{token['id']}\ufdd1" for token in special}
        for token in special:
            token["content"] = self._names[token["content"]]
        _rename(state["model"], self._names)
        self.backend = Backend.from_str(json.dumps(state))
        self.backend.no_truncation()
        self.backend.no_padding()
        self._any = re.compile("|".join(map(re.escape, sorted(self._names, key=len, reverse=True))) or "(?!)")
        self._order = list(self._names)

    def hide(self, text: str) -> str:
        """The text of a message for the chat template, with placeholders for the names of special tokens."""
        text = text.replace(_MARK, "\ufffd")
        return self._any.sub(lambda match: f"{_MARK}{self._order.index(match[0])}{_MARK}", text)

    def rendered(self, text: str) -> str:
        """The text for `backend`, from the text that the chat template rendered from messages with placeholders."""
        text = self._any.sub(lambda match: self._names[match[0]], text)
        return _HIDDEN.sub(lambda match: self._order[int(match[1])], text)


def _rename(model: dict[str, Any], names: dict[str, str]) -> None:
    """Rename the special tokens that a model's own vocabulary has."""
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(token, token): token_id for token, token_id in vocabulary.items()}
    else:  # [token, score] each
        model["vocab"] = [[names.get(token, token), score] for token, score in vocabulary]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if "merges" in model:  # nothing is merged into a special token any more, nor is one merged with anything
        pairs = (pair.split(" ", 1) if isinstance(pair, str) else pair for pair in model["merges"])
        model["merges"] = [pair for pair in pairs if names.keys().isdisjoint((*pair, "".join(pair)))]
