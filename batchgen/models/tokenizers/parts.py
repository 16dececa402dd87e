"""The parts that a model's tokenizer is made of, from whatever files it was loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend


@dataclass(frozen=True)
class TokenizerParts:
    """The parts of a model's tokenizer.

    Attributes:
        backend: Tokenizer of the library `tokenizers`, which turns text into tokens and back.
        special_tokens: Texts of the special tokens that have a name, such as "bos_token".
        chat_template: The chat template, or templates by name; None: the model has none.
        prepare: Function that changes a text before it is tokenized; None: texts are not changed.
        digest: SHA-256 of the file that the backend was loaded from; None: it was made of several files.
    """

    backend: Backend
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    chat_template: str | dict[str, str] | None = None
    prepare: Callable[[str], str] | None = None
    digest: str | None = None

    def special_id(self, name: str) -> int | None:
        """The id of the special token of a name, such as "eos_token"; None: the tokenizer has no such token.

        The token for unknown text stands in for a token that is not in the vocabulary, as in transformers.
        """
        if (token := self.special_tokens.get(name)) is None:
            return None
        token_id: int | None = self.backend.token_to_id(token)
        if token_id is None and (unknown := self.special_tokens.get("unk_token")) is not None:
            token_id = self.backend.token_to_id(unknown)
        return token_id

    @classmethod
    def of_transformers(cls, hf: Any) -> TokenizerParts:
        """The parts of a fast tokenizer of transformers."""
        return cls(hf.backend_tokenizer, hf.special_tokens_map, hf.chat_template)
