"""From prompts to tokens: text, chat messages or token ids, of requests to generate and of requests to score.

Texts of many requests are tokenized together: first all texts are collected and encoded, then each request takes its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, TypeVar

from batchgen.core.errors import InputError, RowError
from batchgen.core.request import Request, ScoreRequest

if TYPE_CHECKING:
    from batchgen.models.tokenizer import Tokenizer

ENCODE_CHUNK = 64  # requests tokenized together
R = TypeVar("R")
Texts = Mapping[tuple[str, bool], list[int]]  # (text, whether special tokens are added) -> its tokens


def chunks(requests: Iterable[R | None]) -> Iterator[list[tuple[int, R]]]:
    """Requests with their numbers, some at a time, to be tokenized together.

    Args:
        requests: None among them says that it may take a while until there are more: those before it do not wait for these.
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


def encode_texts(tokenizer: Tokenizer, requests: Iterable[Request]) -> Texts:
    """Encode together the prompts that are texts.

    Returns:
        What `encode_prompt` asks for.
    """
    texts = [r.prompt for r in requests if isinstance(r.prompt, str) and r.prompt]
    encoded = tokenizer.encode_batch(texts) if texts else ()
    return {(text, True): token_ids for text, token_ids in zip(texts, encoded, strict=True)}


def encode_prompt(tokenizer: Tokenizer, request: Request, texts: Texts | None = None) -> list[int]:
    """The tokens of a prompt; none of an empty one.

    Args:
        tokenizer: The model's.
        request: Its prompt is a text, chat messages or token ids.
        texts: Of `encode_texts`; None: the text is encoded here.

    Raises:
        RowError: The chat template refuses the messages.
    """
    prompt = request.prompt
    if not len(prompt):
        return []
    if isinstance(prompt, str):
        return (texts or encode_texts(tokenizer, [request]))[prompt, True]
    if isinstance(prompt[0], dict):
        return tokenizer.encode_chat(prompt)
    return [int(token_id) for token_id in prompt]


def check_vocabulary(token_ids: Iterable[int], vocab_size: int, what: str) -> None:
    """Tokenizers may have tokens that the model has no embedding for. Raises RowError."""
    if not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        raise RowError(f"{what} has a token id outside the model's vocabulary of {vocab_size}")


def encode_all(tokenizer: Tokenizer, requests: Iterable[ScoreRequest]) -> Texts:
    """The tokens of all texts that `encode_pairs` asks for."""
    wanted: dict[tuple[str, bool], list[int]] = {}
    for request in requests:
        with contextlib.suppress(RowError, InputError):  # it will be found again
            encode_pairs(tokenizer, request, _Wanted(wanted))
    for special in (True, False):
        keys = [key for key in wanted if key[1] == special]
        if keys:
            encoded = tokenizer.encode_batch([text for text, _ in keys], add_special_tokens=special)
            wanted.update(zip(keys, encoded, strict=True))
    return wanted


class _Wanted:
    """Stands in for the tokens of texts: notes what is asked for."""

    def __init__(self, wanted: dict) -> None:
        self._wanted = wanted

    def __getitem__(self, key: tuple[str, bool]) -> list[int]:
        self._wanted[key] = []
        return []


def encode_pairs(
    tokenizer: Tokenizer, request: ScoreRequest, texts: Texts
) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """The tokens of the context and of each continuation, as `ScoreRequest` says. Raises RowError."""
    context, continuations = request.context, request.continuations
    if not continuations:
        raise RowError("there are no continuations")
    are_texts = {isinstance(c, str) for c in continuations}
    if len(are_texts) > 1:
        raise RowError("continuations must be all texts or all token ids")
    special = True
    if not isinstance(context, str) and len(context) and isinstance(context[0], dict):
        context, special = tokenizer.render_chat(context), False  # it has its special tokens written out
    if True not in are_texts:
        own = texts[context, special] if isinstance(context, str) and context else _ids(context)
        return tuple(own), [_ids(c) for c in continuations]
    if not isinstance(context, str):
        return _ids(context), [tuple(texts[c, False]) for c in continuations]
    stripped = context.rstrip()
    spaces = context[len(stripped) :]
    if not stripped:
        return (), [_beginning(texts[spaces + c, False], tokenizer) for c in continuations]
    own = tuple(texts[stripped, special])
    return own, [tuple(texts[stripped + spaces + c, special][len(own) :]) for c in continuations]


def _beginning(token_ids: list[int], tokenizer: Tokenizer) -> tuple[int, ...]:
    """Without the token that would stand before it anyway."""
    return tuple(token_ids[1:] if token_ids and token_ids[0] == tokenizer.begin_token_id else token_ids)


def _ids(values: Iterable) -> tuple[int, ...]:
    return tuple(int(value) for value in values)
