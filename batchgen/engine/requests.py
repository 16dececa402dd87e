"""Conversion of a caller's values to requests. A value that cannot be converted becomes a request with an error."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from batchgen.core.errors import InputError, RowError
from batchgen.core.request import Request, SamplingParams, ScoreRequest

_PROMPT = "text, token ids or chat messages"
_MOST_TOKEN_ID = (1 << 31) - 1


def each_request(given: Any) -> Iterator[Request | None]:
    """Convert values to requests to generate.

    Args:
        given: An iterable of requests and prompts, or a single text or Request. None from an iterator means that the
            next value may take a while; None in a list fails as a row.

    Yields:
        A request for each value, whose prompts are texts, lists of token ids or lists of messages. None for each None
            of an iterator.

    Raises:
        InputError: The value is not iterable.
    """
    for one in _one_by_one(given, Request):
        if one is None and isinstance(given, Iterator):
            yield None
            continue
        request = one if isinstance(one, Request) else Request("")
        try:
            yield request if request.error is not None else _checked(request, one)
        except RowError as error:
            yield replace(request, prompt="", more_prompts=(), sampling=None, error=str(error))


def each_score_request(given: Any) -> Iterator[ScoreRequest | None]:
    """Convert values to requests to score.

    Args:
        given: An iterable of ScoreRequests, or a single one. None from an iterator means that the next value may take a
            while.

    Yields:
        A request for each value, and None for each None of an iterator.

    Raises:
        InputError: The value is not iterable.
    """
    for one in _one_by_one(given, ScoreRequest):
        if (one is None and isinstance(given, Iterator)) or (isinstance(one, ScoreRequest) and one.error is not None):
            yield one
            continue
        try:
            if not isinstance(one, ScoreRequest):
                raise RowError(f"a request to score must be a ScoreRequest, not {_kind(one)}")
            continuations = tuple(_text_or_ids(c, "a continuation") for c in one.continuations)
            yield replace(one, context=_prompt(one.context, "the context"), continuations=continuations)
        except RowError as error:
            request = one if isinstance(one, ScoreRequest) else ScoreRequest("", ())
            yield replace(request, context="", continuations=(), error=str(error))


def _one_by_one(given: Any, request_type: type) -> Iterable:
    if isinstance(given, str | bytes | Mapping | request_type):
        return (given,)
    if not isinstance(given, Iterable):
        raise InputError(f"requests must be a list or another iterable of them, not {_kind(given)}")
    return given


def _checked(request: Request, given: Any) -> Request:
    """A request with checked values. Raises RowError.

    Args:
        request: The given request, or an empty one where a prompt was given.
        given: The given request or prompt.
    """
    if not isinstance(request.sampling, SamplingParams | None):
        raise RowError(f"sampling must be SamplingParams, not {_kind(request.sampling)}")
    if not isinstance(request.more_prompts, list | tuple):
        raise RowError(f"more_prompts must be a tuple of prompts, not {_kind(request.more_prompts)}")
    prompt = _prompt(request.prompt if given is request else given, "a prompt")
    if prompt is request.prompt and request.more_prompts == ():
        return request
    return replace(request, prompt=prompt, more_prompts=tuple(_prompt(p, "a prompt") for p in request.more_prompts))


def _prompt(given: Any, what: str) -> Any:
    """A prompt as text, token ids or chat messages. Raises RowError."""
    if isinstance(given, list | tuple) and given and all(isinstance(message, Mapping) for message in given):
        for message in given:
            _check_texts(message, what)
        return given
    return _text_or_ids(given, what, _PROMPT)


def _text_or_ids(given: Any, what: str, kinds: str = "text or token ids") -> str | list[int]:
    if isinstance(given, str):
        _check_texts(given, what)
        return given
    token_ids = given.tolist() if hasattr(given, "tolist") else given  # arrays of numpy and torch
    if not isinstance(token_ids, Sequence) or isinstance(token_ids, str | bytes | bytearray):
        raise RowError(f"{what} must be {kinds}, not {_kind(given)}")
    if not all(type(token_id) is int for token_id in token_ids):
        token_ids = [_token_id(token_id, what, kinds) for token_id in token_ids]
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) <= _MOST_TOKEN_ID:
        raise RowError(f"{what} has a token id outside the model's vocabulary")
    return list(token_ids)


def _token_id(given: Any, what: str, kinds: str) -> int:
    try:
        if isinstance(given, bool):
            raise TypeError
        return operator.index(given)  # numpy's integers too
    except TypeError:
        raise RowError(f"{what} must be {kinds}, not a list with {_kind(given)}") from None


def _check_texts(given: Any, what: str) -> None:
    """Raise RowError for text that is not valid Unicode, with which the tokenizer would refuse all texts of a chunk."""
    if isinstance(given, Mapping):
        given = list(given.values())
    if isinstance(given, list | tuple):
        for one in given:
            _check_texts(one, what)
    elif isinstance(given, str) and not given.isascii():
        try:
            given.encode()
        except UnicodeEncodeError as error:
            broken = f"half of a surrogate pair, \\u{ord(given[error.start]):04x}, at character {error.start}"
            raise RowError(f"{what} has {broken}: it is no valid Unicode") from error


def _kind(value: Any) -> str:
    return "None" if value is None else type(value).__name__
