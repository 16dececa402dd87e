"""A model's special tokens in data as plain text: `<|im_start|>` in a row begins no message.

The tokenizer is copied, and in the copy special tokens have secret names. The usual names in data are then text like
any other, and all else of the tokenizer is as it was. A chat template writes the usual names, too: so those in messages
are replaced before it is rendered, and put back after those that it wrote have become secret ones.
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
    """A tokenizer for data whose special tokens are text.

    Attributes:
        backend: Encodes the data.
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
        """A message's text, for the chat template."""
        text = text.replace(_MARK, "\ufffd")
        return self._any.sub(lambda match: f"{_MARK}{self._order.index(match[0])}{_MARK}", text)

    def rendered(self, text: str) -> str:
        """Text for `backend`, from what the template made of messages with hidden special tokens."""
        text = self._any.sub(lambda match: self._names[match[0]], text)
        return _HIDDEN.sub(lambda match: self._order[int(match[1])], text)


def _rename(model: dict[str, Any], names: dict[str, str]) -> None:
    """Special tokens that a model's vocabulary has as well."""
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
