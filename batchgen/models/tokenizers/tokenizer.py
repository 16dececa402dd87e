"""The tokenizer of a model: text to tokens, conversations to prompts, tokens to text."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from batchgen.core.errors import InputError, RowError
from batchgen.core.request import PLAIN_CHAT, ChatOptions
from batchgen.core.text import repair_surrogates
from batchgen.models.tokenizers.chat_template import Chat, ChatTemplate
from batchgen.models.tokenizers.parts import TokenizerParts
from batchgen.models.tokenizers.token_bound import TokenBound, state_of

_SHORT = 1 << 16  # characters that take a fraction of a second
_TOGETHER = 1 << 18  # characters tokenized at once: each takes more than a hundred bytes meanwhile


class Tokenizer:
    """The tokenizer and chat template of a model. Its methods do not change it, so threads may share it."""

    def __init__(self, parts: TokenizerParts, special_tokens: str = "parse") -> None:
        """Make a tokenizer of its parts.

        Args:
            parts: The parts.
            special_tokens: Meaning of the text of a special token in prompts and messages. "parse": it is the special
                token. "text": it is text like any other.
        """
        self._parts = parts
        self._backend = parts.backend
        self._as_text = None
        if special_tokens == "text":
            from batchgen.models.tokenizers.special_tokens import SpecialTokensAsText

            self._as_text = SpecialTokensAsText(self._backend)
        self._encoder = self._as_text.backend if self._as_text else self._backend
        self.bos_token_id, eos = parts.special_id("bos_token"), parts.special_id("eos_token")
        self.eos_token_ids: tuple[int, ...] = () if eos is None else (eos,)
        # The token that stands before a text that nothing else stands before.
        self.begin_token_id: int | None = eos if self.bos_token_id is None else self.bos_token_id
        self.vocab_size: int = self._backend.get_vocab_size(with_added_tokens=True)
        added = self._backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        # Vocabularies that fall back to bytes have a token for each; those of bytes inside a character:
        ids = (self._backend.token_to_id(f"<0x{byte:02X}>") for byte in range(0x80, 0xC0))
        self.continuation_ids = frozenset(token_id for token_id in ids if token_id is not None)
        self._anchor = self._backend.encode("a", add_special_tokens=False).ids[-1:]
        self._anchor_text = self.decode(self._anchor)
        self._token_texts: dict[int, str] = {}
        self._cutting_encoders: dict[tuple[int, str], Any] = {}  # by the most tokens and the side

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """The token ids of each text.

        Args:
            texts: The texts.
            add_special_tokens: Whether the special tokens that the model expects around a prompt are added.
        """
        return self._encode(texts, add_special_tokens)

    @cached_property
    def num_added(self) -> tuple[int, int]:
        """Number of special tokens that are added before a text, and after it."""
        mask = self._backend.encode("a", add_special_tokens=True).special_tokens_mask
        text = [place for place, special in enumerate(mask) if not special] or [0]
        return text[0], len(mask) - 1 - text[-1]

    def encode_pair(self, first: str, second: str, most: int | None = None, cut: str = "right") -> list[list[int]]:
        """The token ids of a pair of texts with the special tokens around them, and the type of each token.

        Args:
            first: The first text.
            second: The second text.
            most: The most tokens, beyond which the longer text is cut; None: no text is cut.
            cut: Side at which a text is cut, "left" or "right".
        """
        encoding = self._encoder.encode(first, second)
        if most is not None and len(encoding) > most:
            encoding = self._cutting(most, cut).encode(first, second)
        return [encoding.ids, encoding.type_ids]

    def _cutting(self, most: int, side: str) -> Any:
        """A copy of the encoder that cuts pairs at a side to `most` tokens, kept: a large vocabulary takes a second."""
        if (most, side) not in self._cutting_encoders:
            from tokenizers import Tokenizer as Backend

            cutting = Backend.from_str(self._encoder.to_str())
            cutting.enable_truncation(most, strategy="longest_first", direction=side)
            self._cutting_encoders[most, side] = cutting
        return self._cutting_encoders[most, side]

    def encode_chat(self, messages: Sequence[dict[str, Any]], options: ChatOptions = PLAIN_CHAT) -> list[int]:
        """The token ids of a conversation, rendered by the chat template up to the assistant's answer.

        Args:
            messages: Messages `[{"role": ..., "content": ...}, ...]`.
            options: Options of the prompt, such as continuing the last message.

        Raises:
            RowError: The chat template rejects the messages, or leaves out some of their text.
            InputError: The model has no chat template.
        """
        return self._encode([self.render_chat(messages, options)], add_special_tokens=False)[0]

    def render_chat(self, messages: Sequence[dict[str, Any]], options: ChatOptions = PLAIN_CHAT) -> str:
        """The text of a conversation's prompt, with its special tokens, whose tokens `encode_chat` returns.

        Other tokenizers may tokenize this text in another way.
        """
        (text,) = self.render_chats([Chat(messages, options)])
        if isinstance(text, RowError):
            raise text
        return text

    def render_chats(self, chats: Sequence[Chat]) -> list[str | RowError]:
        """The texts of the prompts of many conversations, or the error of a conversation that has none.

        Raises:
            InputError: The model has no chat template.
        """
        template = self.chat_template
        refused = [self._unknown_role(chat.messages) for chat in chats]
        known = [
            replace(chat, messages=[self._as_given(message) for message in chat.messages])
            for chat, error in zip(chats, refused, strict=True)
            if error is None
        ]
        texts = iter(template.render(known))
        rendered = [next(texts) if error is None else error for error in refused]
        if not self._as_text:
            return rendered
        return [text if isinstance(text, RowError) else self._as_text.rendered(text) for text in rendered]

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """The model's chat template. Raises InputError if it has none."""
        return ChatTemplate.of(self._parts.chat_template, self._parts.special_tokens)

    def _unknown_role(self, messages: Sequence[dict[str, Any]]) -> RowError | None:
        """The error for a message whose role the chat template does not know; or None.

        The template would write such a role unchanged, or leave the message out.
        """
        for number, message in enumerate(messages, 1):
            role = message.get("role") if isinstance(message, dict) else None
            if isinstance(role, str) and role != "developer" and not self.chat_template.knows_role(role):
                return RowError(
                    f"message {number} has the role {role!r}, which the model's chat template does not know:"
                    " give system, user or assistant"
                )
        return None

    def _as_given(self, message: dict[str, Any]) -> dict[str, Any]:
        """A message as the chat template gets it.

        Role "developer" becomes "system" if the template does not know it.
        """
        if not isinstance(message, dict):
            return message
        if message.get("role") == "developer" and "developer" not in self.chat_template.roles:
            message = {**message, "role": "system"}
        if self._as_text and isinstance(message.get("content"), str):
            message = {**message, "content": self._as_text.hide(message["content"])}
        return message

    def writes_in_chats(self, text: str) -> bool:
        """Tell whether the source of the model's chat template contains this text."""
        given = self._parts.chat_template or ""
        return any(text in template for template in (given.values() if isinstance(given, dict) else [given]))

    @property
    def has_chat_template(self) -> bool:
        """True if the model has a chat template, or several."""
        return bool(self._parts.chat_template)

    @property
    def reads_messages(self) -> bool:
        """True if prompts depend on the messages, or if the model has no chat template."""
        return not self.has_chat_template or self.chat_template.reads_messages

    @property
    def renders_texts(self) -> bool:
        """True if a text can be a user's message: the model has a default chat template, which reads messages."""
        given = self._parts.chat_template
        return bool(given.get("default") if isinstance(given, dict) else given) and self.reads_messages

    def require_chat_template(self, options: ChatOptions = PLAIN_CHAT) -> None:
        """Raise InputError if the model has no chat template, or one that does not use a variable of `options`."""
        self.chat_template.check_variables(options.variables)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of tokens. Incomplete UTF-8 characters become U+FFFD.

        Args:
            token_ids: The tokens.
            skip_special_tokens: Whether special tokens are left out of the text.
        """
        return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """The text that one token has in the middle of a text."""
        if token_id not in self._token_texts:
            # Alone, the token would lose its leading space in vocabularies that treat the first word apart.
            text = self.decode([*self._anchor, token_id], skip_special_tokens=False)
            self._token_texts[token_id] = text[len(self._anchor_text) :]
        return self._token_texts[token_id]

    def token_id(self, token: str) -> int | None:
        """The id of a token in the spelling of the vocabulary; None: the vocabulary does not have it."""
        token_id: int | None = self._backend.token_to_id(token)
        return token_id

    def stop_detector(self, stop: Sequence[str]) -> StopDetector:
        """A detector of stop strings in the text of one sample."""
        return StopDetector(self, stop)

    def to_json(self) -> str:
        """The tokenizer as JSON text of Hugging Face's `tokenizers`."""
        return self._backend.to_str()

    def identity(self) -> str:
        """sha256 of everything that determines how text becomes tokens, and of the chat template."""
        template = json.dumps(self._parts.chat_template, sort_keys=True)
        mode = "special tokens as text" if self._as_text else ""
        # JSON of a large vocabulary takes a second, and three times its size in memory.
        backend = self._parts.digest or self.to_json()
        return hashlib.sha256((backend + template + mode).encode()).hexdigest()

    def least_tokens(self, text: str) -> int:
        """A lower bound of the number of a text's tokens. 0: no bound is known, or tokenizing the text is quick."""
        return self._bound.least(text) if len(text) > _SHORT else 0

    @cached_property
    def _bound(self) -> TokenBound:
        return TokenBound(state_of(self._encoder))

    def _encode(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        """The token ids of each text. The number of texts that are tokenized at once depends on the free memory."""
        encoded: list[list[int]] = []
        group: list[str] = []
        length = 0
        for text in texts:
            if group and length + len(text) > _TOGETHER:
                encoded += self._encode_together(group, add_special_tokens)
                group, length = [], 0
            group.append(text)
            length += len(text)
        return encoded + self._encode_together(group, add_special_tokens)

    def _encode_together(self, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
        if self._parts.prepare is not None:
            texts = [self._parts.prepare(text) for text in texts]
        try:
            encodings = self._encoder.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        except (TypeError, UnicodeEncodeError):  # a lone surrogate, as careless JSON holds, is no text
            encodings = self._encoder.encode_batch_fast(repair_surrogates(texts), add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]


class NoText:
    """A placeholder for the tokenizer of a job whose prompts are token ids and whose results are not decoded."""

    eos_token_ids = ()
    begin_token_id = None

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return ""

    def token_id(self, token: str) -> int | None:
        return None

    def writes_in_chats(self, text: str) -> bool:
        return False

    def to_json(self) -> str:
        raise InputError(
            "dummy weights have no tokenizer, so that nothing they generate can follow a schema: leave it out"
        )


class StopDetector:
    """The search for stop strings in the text of one sample, within tokens and across them.

    For each token the last few tokens are decoded: as many as the longest stop string has bytes, and a margin. If their
    text has a stop string, the whole sample is decoded.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._token_ids: list[int] = []
        # Special tokens are no part of the text; one that is a stop string all the same ends it where it stands.
        self._special = {token_id: s for s in stop if (token_id := tokenizer.token_id(s)) in tokenizer.special_ids}
        self._end: int | None = None  # the end of the text before a stop string
        # Every token but a special one is at least a byte. Where the window begins, up to three tokens may be
        # the rest of a character, and one may lose its leading space.
        self._window = max((len(s.encode("utf-8", "replace")) for s in self._stop), default=0) + 4

    def push(self, token_id: int) -> str | None:
        """Add the next token of the sample.

        Returns:
            The stop string that is first in the sample's text; None: the text has none.
        """
        if token_id in self._tokenizer.special_ids:
            return self._special.get(token_id)
        ids = self._token_ids
        ids.append(token_id)
        start = max(0, len(ids) - self._window)
        for _ in range(3):  # bytes of a character decode together or not at all
            if start and ids[start] in self._tokenizer.continuation_ids:
                start -= 1
        recent = self._tokenizer.decode(ids[start:])
        if not any(s in recent for s in self._stop):
            return None
        text = self._tokenizer.decode(ids)
        places = [(text.find(s), s) for s in self._stop if s in text]
        if not places:
            return None
        self._end, stop = min(places, key=lambda pair: pair[0])
        return stop

    @property
    def text(self) -> str:
        """The text of the sample so far, up to the stop string if there is one."""
        return self._tokenizer.decode(self._token_ids)[: self._end]
