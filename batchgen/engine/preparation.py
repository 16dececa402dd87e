"""Preparation of requests to generate: their tokens, checked and cut to the context, and the answers that are known.

It needs the model's tokenizer and no weights.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

from batchgen.core.errors import InputError, RowError
from batchgen.core.made_often import made_often
from batchgen.core.request import Answer, Completion, Prompt, Request, SamplingParams, cut_overlong, request_digest
from batchgen.engine.encode import (
    LengthLimit,
    Texts,
    begins_twice,
    check_vocabulary,
    chunks,
    encode_prompt,
    encode_texts,
)
from batchgen.engine.requests import each_request

if TYPE_CHECKING:
    from batchgen.models.tokenizers.tokenizer import Tokenizer
    from batchgen.runtime.grammar import Grammar

# From digests of requests to the answers that are known.
KnownAnswers = Callable[[list[bytes]], Mapping[bytes, Answer]]


@made_often
class Prepared:
    """A request that is ready to start.

    Attributes:
        index: Number of the request in the call.
        request: The request.
        prompts: Token ids and sampling parameters of each prompt. Ids are kept in four bytes each, as many requests
            wait.
        error: Reason why the request cannot run; None: it can.
        grammar: The grammar of the request's outputs; None: it has none.
        answer: The request's answer; None: it has to be computed.
    """

    index: int
    request: Request
    prompts: tuple[tuple[array[int], SamplingParams], ...]
    error: str | None = None
    grammar: Grammar | None = None
    answer: Answer | None = None

    @cached_property
    def digest(self) -> bytes:
        """Digest of what decides the request's samples beside the model; few requests need it."""
        return request_digest(self.prompts, self.row_id, self.request.reasoning_apart)

    @property
    def row_id(self) -> str | int:
        """The id of the request's row, which keys random draws."""
        return self.index if self.request.id is None else self.request.id

    @property
    def prompt(self) -> array[int] | None:
        """Token ids of its first prompt, by which requests are put in order; None: it has a result already."""
        return self.prompts[0][0] if self.error is None and self.answer is None else None

    def completion(self) -> Completion | None:
        """The result of a request that fails, or whose answer is known; None: it has to be computed."""
        index, row_id, row, answer = self.index, self.row_id, self.request.row, self.answer
        if self.error is None and answer is None:
            return None
        prompt_tokens = sum(len(token_ids) for token_ids, _ in self.prompts)
        if answer is None:
            return Completion(index, row_id, prompt_tokens, error=self.error, row=row)
        prompts = tuple(
            Prompt(tuple(token_ids), logprobs)
            for (token_ids, _), logprobs in zip(self.prompts, answer.prompt_logprobs, strict=True)
        )
        return Completion(index, row_id, prompt_tokens, answer.samples, row=row, prompts=prompts)


class Preparation:
    """The preparation of the requests of one call.

    Attributes:
        begins_twice: Whether a prompt began with the beginning-of-text token that the tokenizer adds as well.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        context: int,
        sampling: SamplingParams,
        on_overlong: str,
        *,
        most_tokens: int | None = None,
        known: KnownAnswers | None = None,
    ) -> None:
        """Prepare nothing yet.

        Args:
            tokenizer: The model's tokenizer.
            vocab_size: Number of token embeddings of the model.
            context: The most tokens of a prompt and its output together.
            sampling: Sampling parameters of requests that have none.
            on_overlong: "error", "truncate-left" or "truncate-right", for prompts that do not fit the context.
            most_tokens: Tokens whose KV fits into the memory budget; None: that is not known.
            known: Function that looks answers up; None: none are known.
        """
        self._tokenizer, self._vocab_size, self._context = tokenizer, vocab_size, context
        self._sampling, self._on_overlong, self._most_tokens = sampling, on_overlong, most_tokens
        self._known = known
        self._limit = LengthLimit.of(context, on_overlong)
        self.begins_twice = False

    def prepare(self, requests: Iterable[Request | str | None]) -> Iterator[Prepared]:
        """Tokenize requests, in chunks of several; yields the prepared requests."""
        for chunk in chunks(each_request(requests)):
            fine = [request for _, request in chunk if request.error is None]
            prompts = [each for request in fine for each in request.each_prompt]
            texts = encode_texts(self._tokenizer, prompts, self._limit)
            prepared = [self._prepared(index, request, texts) for index, request in chunk]
            if self._known is None:
                yield from prepared
                continue
            answers = self._known([one.digest for one in prepared if one.error is None])
            for one in prepared:
                yield replace(one, answer=answers.get(one.digest)) if one.error is None else one

    def _prepared(self, index: int, request: Request, texts: Texts) -> Prepared:
        if request.error is not None:
            return Prepared(index, request, (), error=request.error)
        encoded: list[tuple[array[int], SamplingParams]] = []
        try:
            for each in request.each_prompt:
                token_ids = self._encode(each, texts)
                sampling, token_ids = self._fit(each, token_ids, 1 + len(request.more_prompts))
                encoded.append((array("i", token_ids), sampling))
        except (RowError, InputError) as problem:
            return Prepared(index, request, tuple(encoded), error=str(problem))
        return Prepared(index, request, tuple(encoded))

    def _encode(self, request: Request, texts: Texts) -> list[int]:
        token_ids = encode_prompt(self._tokenizer, request, self._limit, texts)
        if not token_ids:
            raise RowError("the prompt is empty")
        check_vocabulary(token_ids, self._vocab_size, "the prompt")
        self.begins_twice |= begins_twice(self._tokenizer, request.prompt, token_ids)
        return token_ids

    def _fit(self, request: Request, token_ids: list[int], prompts: int) -> tuple[SamplingParams, list[int]]:
        """Fit a prompt and its max_tokens into the context and the KV pools.

        Args:
            request: The request.
            token_ids: Token ids of the prompt.
            prompts: Number of prompts of the whole request.

        Returns:
            Sampling parameters with max_tokens cut to the context, and the token ids, cut where `on_overlong` says so.

        Raises:
            RowError: The prompt does not fit.
            InputError: The result would be too large.
        """
        sampling = request.sampling or self._sampling
        if sampling.logit_bias:
            ids = [token_id for token_id, _ in sampling.logit_bias]
            check_vocabulary(ids, self._vocab_size, "logit_bias")
        context = self._context
        token_ids = cut_overlong(token_ids, sampling.max_tokens, context, self._on_overlong)
        count = len(token_ids)
        if count >= context:
            raise RowError(f"the prompt has {count} tokens, the context holds {context}")
        if sampling.max_tokens > context - count:
            sampling = replace(sampling, max_tokens=context - count)
        sampling.check_result_size(prompts, count)
        if self._most_tokens is not None and count + sampling.max_tokens - 1 > self._most_tokens:
            raise RowError(
                f"{count} prompt and {sampling.max_tokens} output tokens need more KV than the {self._most_tokens}"
                " tokens that fit the memory budget"
            )
        return sampling, token_ids
