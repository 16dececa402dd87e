"""Tokenizing prompts: text, chat messages or token ids, of requests to generate and of requests to score.

Texts of many requests are tokenized together: all are collected and encoded, and then each request takes its own
    tokens.
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
        chats: Text of chat messages, its special tokens written out, by the id of the request; or the error of their
            template.
    """

    tokens: Mapping[tuple[str, bool], list[int]]
    chats: Mapping[int, str | RowError]

    def of_chat(self, request: Request | ScoreRequest) -> str:
        """The text of a request's messages. Raises RowError."""
        text = self.chats[id(request)]
        if isinstance(text, RowError):
            raise text
        return text


def chunks(requests: Iterable[R | None]) -> Iterator[list[tuple[int, R]]]:
    """Yield requests with their numbers, in chunks to be tokenized together.

    Args:
        requests: Requests; None among them means that the next one may take a while, so the chunk ends there.
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
    """The longest text that is tokenized.

    Attributes:
        context: Tokens that the context holds.
        cuts: Whether longer prompts are cut.
    """

    context: int
    cuts: bool

    @classmethod
    def of(cls, context: int, on_overlong: str) -> LengthLimit:
        """The limit of a context under an engine's `on_overlong`: "error", "truncate-left" or "truncate-right"."""
        return cls(context, on_overlong != "error")

    def check(self, tokenizer: Tokenizer, text: str, what: str = "the prompt") -> None:
        """Raise RowError for a text that cannot fit or would take too much memory, before it is tokenized."""
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
        """Tell whether `check` lets a text pass."""
        try:
            self.check(tokenizer, text)
        except RowError:
            return False
        return True


def encode_texts(tokenizer: Tokenizer, requests: Iterable[Request], limit: LengthLimit | None) -> Texts:
    """Encode together the prompts that are texts or chat messages, but for those that cannot fit."""
    requests = list(requests)
    chats = _rendered(tokenizer, [(request, request.prompt) for request in requests])
    plain = [r.prompt for r in requests if isinstance(r.prompt, str) and r.prompt]
    wanted = {(text, True) for text in plain} | {(text, False) for text in chats.values() if isinstance(text, str)}
    fitting = [key for key in wanted if limit is None or limit.has(tokenizer, key[0])]
    return Texts(_encoded(tokenizer, fitting), chats)


def encode_prompt(
    tokenizer: Tokenizer, request: Request, limit: LengthLimit | None = None, texts: Texts | None = None
) -> list[int]:
    """The tokens of a prompt; none of an empty one.

    Args:
        tokenizer: The model's tokenizer.
        request: A request whose prompt is a text, chat messages or token ids.
        limit: The longest text that is tokenized; None: any.
        texts: Texts that were encoded together with others; None: the prompt is encoded here.

    Raises:
        RowError: The chat template refuses the messages, or it is too long.
    """
    prompt = request.prompt
    if not len(prompt):
        return []
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
    """Tell whether a text's tokens begin with two beginning-of-text tokens: its own, and the tokenizer's."""
    if not isinstance(prompt, str):
        return False
    bos = tokenizer.begin_token_id
    return bos is not None and list(token_ids[:2]) == [bos, bos]


def check_vocabulary(token_ids: Iterable[int], vocab_size: int, what: str) -> None:
    """Raise RowError for a token that the model has no embedding for: tokenizers may have some."""
    if not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        raise RowError(f"{what} has a token id outside the model's vocabulary of {vocab_size}")


def encode_all(tokenizer: Tokenizer, requests: Iterable[ScoreRequest], limit: LengthLimit | None = None) -> Texts:
    """Encode together all texts that `encode_pairs` needs for these requests. limit: the longest context; None: any."""
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
    """The tokens of a request's context and of each of its continuations.

    Args:
        tokenizer: The model's tokenizer.
        request: The request to score.
        texts: Texts that were encoded together with others.
        limit: The longest context; None: any.

    Raises:
        RowError: There are no continuations, or they are of two kinds, or the context cannot fit.
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
