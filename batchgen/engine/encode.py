"""Tokenizing the prompts of requests to generate and to score: text, chat messages or token ids.

The texts of many requests are tokenized together, which is faster than one by one. First all texts are collected and
encoded. Then each request looks its own token ids up.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from batchgen.core.errors import InputError, RowError
from batchgen.core.request import Request, ScoreRequest

if TYPE_CHECKING:
    from batchgen.models.tokenizers.tokenizer import Tokenizer

ENCODE_CHUNK = 64  # requests tokenized together
R = TypeVar("R")
# Characters that are tokenized whatever the context; the tokenizer takes a hundred bytes and more for each.
_ALWAYS_TOKENIZED = 1 << 22
_MOST_PER_TOKEN = 16  # characters of a longer text for each token of the context


@dataclass(frozen=True)
class Texts:
    """The texts of some requests, encoded together.

    Attributes:
        tokens: Token ids by (text, whether special tokens are added).
        chats: Chat messages as rendered text with special tokens written out, or the error of the chat template; by the
            Python `id` of the request.
    """

    tokens: Mapping[tuple[str, bool], list[int]]
    chats: Mapping[int, str | RowError]

    def of_chat(self, request: Request | ScoreRequest) -> str:
        """The rendered text of a request's chat messages. Raises RowError where the chat template refused them."""
        text = self.chats[id(request)]
        if isinstance(text, RowError):
            raise text
        return text


def chunks(requests: Iterable[R | None]) -> Iterator[list[tuple[int, R]]]:
    """Split an iterable of requests into chunks whose texts are tokenized together.

    Args:
        requests: Requests. None among them means that the next request may take a while: the chunk ends there.

    Yields:
        Lists of (number, request), with at most `ENCODE_CHUNK` requests each.
    """
    chunk: list[tuple[int, R]] = []
    number = 0
    for request in requests:
        if request is not None:
            chunk.append((number, request))
            number += 1
        if chunk and (request is None or len(chunk) == ENCODE_CHUNK):
            yield chunk
            chunk = []
    if chunk:
        yield chunk


@dataclass(frozen=True)
class LengthLimit:
    """The longest text that is tokenized; longer texts fail before they take time and memory.

    Attributes:
        context: Length of the context, in tokens.
        cuts: Whether prompts longer than the context are cut instead of refused.
    """

    context: int
    cuts: bool

    @classmethod
    def of(cls, context: int, on_overlong: str) -> LengthLimit:
        """The limit for a context of `context` tokens. on_overlong: "error", "truncate-left" or "truncate-right"."""
        return cls(context, on_overlong != "error")

    def check(self, tokenizer: Tokenizer, text: str, what: str = "the prompt") -> None:
        """Raise RowError for a text that is too long to be tokenized.

        Args:
            tokenizer: The model's tokenizer.
            text: The text.
            what: Noun phrase that names the text in the message.
        """
        least = 0 if self.cuts else tokenizer.least_tokens(text)
        if least > self.context:
            raise RowError(f"{what} has {least:,} tokens at least, the context holds {self.context:,}")
        most = max(_ALWAYS_TOKENIZED, _MOST_PER_TOKEN * self.context)
        if len(text) > most:
            raise RowError(
                f"{what} has {len(text):,} characters, and no more than {most:,} are tokenized"
                f" for a context of {self.context:,} tokens: cut it before"
            )

    def has(self, tokenizer: Tokenizer, text: str) -> bool:
        """Tell whether a text is short enough to be tokenized."""
        try:
            self.check(tokenizer, text)
        except RowError:
            return False
        return True


def encode_texts(tokenizer: Tokenizer, requests: Iterable[Request], limit: LengthLimit | None) -> Texts:
    """Encode the texts and chat messages among the prompts of some requests together.

    Args:
        tokenizer: The model's tokenizer.
        requests: Requests to generate.
        limit: The longest text that is tokenized, longer ones are left out; None: any length.
    """
    requests = list(requests)
    chats = _rendered(tokenizer, [(request, request.prompt) for request in requests])
    plain = [r.prompt for r in requests if isinstance(r.prompt, str) and r.prompt]
    wanted = {(text, True) for text in plain} | {(text, False) for text in chats.values() if isinstance(text, str)}
    fitting = [key for key in wanted if limit is None or limit.has(tokenizer, key[0])]
    return Texts(_encoded(tokenizer, fitting), chats)


def encode_prompt(
    tokenizer: Tokenizer, request: Request, limit: LengthLimit | None = None, texts: Texts | None = None
) -> list[int]:
    """The token ids of a request's prompt; an empty list for an empty prompt.

    Args:
        tokenizer: The model's tokenizer.
        request: A request whose prompt is a text, chat messages or token ids.
        limit: The longest text that is tokenized; None: any length.
        texts: Texts that were encoded together with those of other requests; None: the prompt is encoded here.

    Raises:
        RowError: The chat template refuses the messages, or the prompt is too long.
    """
    prompt = request.prompt
    if not len(prompt):
        return []
    if request.chat.tools is not None and not is_chat(prompt):
        raise RowError("tools are for chat messages, and the prompt is none: give it as messages")
    if isinstance(prompt, str):
        key = (prompt, True)
    elif isinstance(prompt[0], dict):
        texts = texts or encode_texts(tokenizer, [request], limit)
        key = (texts.of_chat(request), False)
    else:
        return [int(token_id) for token_id in prompt if not isinstance(token_id, dict)]
    if limit is not None and (texts is None or key not in texts.tokens):
        limit.check(tokenizer, key[0])
    return (texts or encode_texts(tokenizer, [request], limit)).tokens[key]


def _rendered(tokenizer: Tokenizer, given: Iterable[tuple[Request | ScoreRequest, Any]]) -> dict[int, str | RowError]:
    """Texts of chat messages, or the errors of their template, by the id of the request."""
    chats = [(request, value) for request, value in given if is_chat(value)]
    if not chats:
        return {}
    from batchgen.models.tokenizers.chat_template import Chat

    try:
        texts = tokenizer.render_chats([Chat(messages, request.chat) for request, messages in chats])
    except InputError as error:  # there is no chat template
        texts = [RowError(str(error))] * len(chats)
    return {id(request): text for (request, _), text in zip(chats, texts, strict=True)}


def is_chat(prompt: Any) -> bool:
    """Tell whether a prompt is chat messages."""
    return not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], dict)


def _encoded(tokenizer: Tokenizer, wanted: Iterable[tuple[str, bool]]) -> dict[tuple[str, bool], list[int]]:
    encoded: dict[tuple[str, bool], list[int]] = {}
    for special in (True, False):
        keys = [key for key in wanted if key[1] == special]
        if keys:
            tokens = tokenizer.encode_batch([text for text, _ in keys], add_special_tokens=special)
            encoded.update(zip(keys, tokens, strict=True))
    return encoded


def begins_twice(tokenizer: Tokenizer, prompt: object, token_ids: Sequence[int]) -> bool:
    """Tell whether the tokens of a text begin with two beginning-of-text tokens: one written in it, one added.

    Args:
        tokenizer: The model's tokenizer, which may add a beginning-of-text token.
        prompt: The prompt.
        token_ids: Token ids of the prompt.
    """
    if not isinstance(prompt, str):
        return False
    bos = tokenizer.begin_token_id
    return bos is not None and list(token_ids[:2]) == [bos, bos]


def check_vocabulary(token_ids: Iterable[int], vocab_size: int, what: str) -> None:
    """Raise RowError for a token id outside of the model's vocabulary; a tokenizer may have more tokens.

    Args:
        token_ids: Token ids.
        vocab_size: Number of token embeddings of the model.
        what: Noun phrase that names the tokens in the message.
    """
    if not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        raise RowError(f"{what} has a token id outside the model's vocabulary of {vocab_size}")


def encode_all(tokenizer: Tokenizer, requests: Iterable[ScoreRequest], limit: LengthLimit | None = None) -> Texts:
    """Encode together all texts that `encode_pairs` needs for some requests to score.

    Args:
        tokenizer: The model's tokenizer.
        requests: Requests to score.
        limit: The longest context that is tokenized; None: any length.
    """
    requests = list(requests)
    chats = _rendered(tokenizer, [(request, request.context) for request in requests])
    wanted: dict[tuple[str, bool], list[int]] = {}
    for request in requests:
        with contextlib.suppress(RowError, InputError):  # raised again when the request is encoded
            encode_pairs(tokenizer, request, Texts(_Wanted(wanted), chats), limit)
    return Texts(_encoded(tokenizer, wanted), chats)


class _Wanted(dict):
    """A stand-in for the tokens of texts that notes which texts are looked up."""

    def __init__(self, wanted: dict) -> None:
        self._wanted = wanted

    def __getitem__(self, key: tuple[str, bool]) -> list[int]:
        self._wanted[key] = []
        return []


def encode_pairs(
    tokenizer: Tokenizer, request: ScoreRequest, texts: Texts, limit: LengthLimit | None = None
) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """The token ids of the context of a request to score, and those of each of its continuations.

    Args:
        tokenizer: The model's tokenizer.
        request: The request to score.
        texts: Texts that were encoded together with those of other requests.
        limit: The longest context that is tokenized; None: any length.

    Raises:
        RowError: There are no continuations, some are texts and others token ids, or the context is too long.
    """
    context, continuations = request.context, request.continuations
    if not continuations:
        raise RowError("there are no continuations")
    written = [c for c in continuations if isinstance(c, str)]
    if 0 < len(written) < len(continuations):
        raise RowError("continuations must be all texts or all token ids")
    special = True
    if is_chat(context):
        context, special = texts.of_chat(request), False
    if limit is not None:
        _check_to_score(tokenizer, context, continuations, limit)
    tokens = texts.tokens
    if not written:
        before = tokens[context, special] if isinstance(context, str) and context else _ids(context)
        return tuple(before), [_ids(c) for c in continuations]
    if not isinstance(context, str):
        return _ids(context), [tuple(tokens[c, False]) for c in written]
    stripped = context.rstrip()
    spaces = context[len(stripped) :]
    if not stripped:
        return (), [_beginning(tokens[spaces + c, False], tokenizer) for c in written]
    context_ids = tuple(tokens[stripped, special])
    return context_ids, [tuple(tokens[stripped + spaces + c, special][len(context_ids) :]) for c in written]


def _check_to_score(tokenizer: Tokenizer, context: str | Iterable, continuations: Iterable, limit: LengthLimit) -> None:
    """Raise RowError for a context that cannot fit; a continuation without a context may be longer than the model's."""
    stripped = context.rstrip() if isinstance(context, str) else ""
    if stripped:
        limit.check(tokenizer, stripped, "the text to score")
    unbounded = LengthLimit(limit.context, cuts=True)
    for continuation in continuations:
        if isinstance(continuation, str):
            unbounded.check(tokenizer, continuation, "a text to score")


def _beginning(token_ids: list[int], tokenizer: Tokenizer) -> tuple[int, ...]:
    """Token ids of a text without its beginning-of-text token."""
    return tuple(token_ids[1:] if token_ids and token_ids[0] == tokenizer.begin_token_id else token_ids)


def _ids(values: Iterable) -> tuple[int, ...]:
    return tuple(int(value) for value in values)
