"""Embedding: requests to sequences that run once through the layers, hidden states to vectors."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from batchgen.core.errors import InputError, RowError
from batchgen.core.request import Embedded, Request, SamplingParams
from batchgen.engine.encode import LengthLimit, Texts, check_vocabulary, chunks, encode_prompt, encode_texts
from batchgen.engine.non_finite import NonFiniteSequences
from batchgen.engine.parts import EngineParts, EngineStats
from batchgen.engine.requests import each_request
from batchgen.models.pooling import VectorSpec
from batchgen.runtime.pooler import Pooler, VectorHead
from batchgen.schedule.from_policy import longest_sequence
from batchgen.schedule.sequence import Sequence

if TYPE_CHECKING:
    from torch import Tensor

    from batchgen.models.tokenizers.tokenizer import Tokenizer


@dataclass(frozen=True)
class _Prepared:
    """A request that is ready to start, or that has failed.

    Attributes:
        index: Number of the request in the call.
        row_id: Id of its row.
        row: Number of its row in a dataset.
        prompts: Token ids of each text, in four bytes each; empty: it has failed.
        error: Reason why it has failed.
    """

    index: int
    row_id: str | int
    row: int | None
    prompts: tuple[array[int], ...] = ()
    error: str | None = None

    @property
    def prompt(self) -> array[int] | None:
        """Token ids of its first text, by which requests are put in order; None: it has failed."""
        return self.prompts[0] if self.prompts else None


@dataclass
class _InFlight:
    """A request some of whose texts are still running.

    Attributes:
        prepared: The request.
        vectors: Vector of each text so far; None: not finite.
        running: Number of texts that are still running.
        largest: The largest absolute value of the vectors so far.
    """

    prepared: _Prepared
    vectors: list[np.ndarray | None]
    running: int
    largest: float = 0.0


class Embedding:
    """The request handler of one call of `Engine.embed`."""

    vocabulary_chunks = False

    def __init__(self, parts: EngineParts, head: VectorHead, on_overlong: str) -> None:
        if not parts.config.hidden_output:
            raise InputError("the model is loaded to generate text: load it for embeddings")
        self._parts, self._head, self._on_overlong = parts, head, on_overlong
        self._pooler = Pooler(head.head.pooling)
        self._sums: dict[Sequence, Tensor] = {}  # of texts that are in several sweeps
        self._in_flight: dict[int, _InFlight] = {}
        self.non_finite = NonFiniteSequences()

    def prepare(self, requests: Iterable[Request | str | None]) -> Iterator[_Prepared]:
        """Tokenize requests, in chunks of several; yields the prepared requests. It runs in the input thread."""
        head, parts = self._head.head, self._parts
        limit = LengthLimit.of(parts.policy.max_model_len, self._on_overlong)
        for chunk in chunks(each_request(requests)):
            numbered = [(index, [prompted(each, head) for each in request.each_prompt]) for index, request in chunk]
            fine = [each for _, requests in numbered for each in requests if each.error is None and each.pair is None]
            texts = encode_texts(parts.tokenizer, fine, limit)
            for index, (request, *more) in numbered:
                row_id = index if request.id is None else request.id
                try:
                    if request.error is not None:
                        raise RowError(request.error)
                    prompts = tuple(array("i", self._tokens(each, limit, texts)) for each in (request, *more))
                    yield _Prepared(index, row_id, request.row, prompts)
                except (RowError, InputError) as problem:
                    yield _Prepared(index, row_id, request.row, error=str(problem))

    def _tokens(self, request: Request, limit: LengthLimit, texts: Texts) -> list[int]:
        """Token ids of a text that fits. Raises RowError, InputError."""
        parts, policy = self._parts, self._parts.policy
        tokens = tokens_to_embed(parts.tokenizer, self._head.head, request, limit, self._on_overlong, texts)
        check_vocabulary(tokens, parts.config.num_token_ids, "the text")
        most = longest_sequence(policy, parts.memory, parts.compute_tier)
        if len(tokens) > most:
            raise RowError(f"{len(tokens)} tokens need more KV than the {most} tokens that fit the memory budget")
        if not parts.config.causal and len(tokens) > policy.batch_tokens:
            raise RowError(
                f"{len(tokens)} tokens attend to each other in one sweep, and a sweep has {policy.batch_tokens}:"
                " give a larger --max-num-batched-tokens"
            )
        return tokens

    def start(self, prepared: _Prepared) -> list[Sequence] | Embedded:
        """The sequences of a request, or its Embedded if it failed before it ran."""
        if not prepared.prompts:
            return Embedded(prepared.index, prepared.row_id, 0, error=prepared.error, row=prepared.row)
        self._in_flight[prepared.index] = _InFlight(prepared, [None] * len(prepared.prompts), len(prepared.prompts))
        return [
            Sequence(
                prepared.index,
                prepared.row_id,
                k,
                prompt.tolist(),
                SamplingParams(max_tokens=1),
                targets=((),) * num_pooled(self._head.head, len(prompt)),
                is_whole=not self._parts.config.causal,
            )
            for k, prompt in enumerate(prepared.prompts)
        ]

    def take_logits(self, rows, hidden: Tensor, start: int) -> None:
        self._pooler.take(rows, hidden)

    def end_sweep(self) -> Pooler:
        """The pooler that holds the pooled hidden states of the sweep that is being run."""
        pooler, self._pooler = self._pooler, Pooler(self._head.head.pooling)
        return pooler

    def advance(self, pooler: Pooler, stats: EngineStats) -> list[Sequence]:
        """Pool the hidden states of a sweep that has run; returns the sequences that have their vectors."""
        ended: list[tuple[Sequence, Tensor]] = []
        mean = self._head.head.pooling == "mean"
        for sequence, first, num_tokens, values in pooler.results():
            before = self._sums.pop(sequence, None)
            if first > sequence.scored_from:
                if before is None:
                    continue  # it begins again
                values = before + values if mean else before
            if first + num_tokens < sequence.num_prompt:
                self._sums[sequence] = values
                continue
            ended.append((sequence, values / len(sequence.targets) if mean else values))
        if not ended:
            return []
        pooled = torch.stack([values for _, values in ended])
        vectors = self._head.vectors(pooled)
        are_finite = torch.isfinite(pooled).all(1).numpy() & np.isfinite(vectors).all(1)
        largest = np.abs(vectors).max(1)
        finished = []
        for (sequence, _), vector, is_finite, most in zip(ended, vectors, are_finite, largest, strict=True):
            if not is_finite and self.non_finite.reruns(sequence):
                continue
            flight = self._in_flight[sequence.request_index]
            # A copy: who keeps one row's vector is not to keep the array of its sweep.
            flight.vectors[sequence.sample_index] = vector.copy() if is_finite else None
            flight.largest = max(flight.largest, float(most))
            stats.prompt_tokens += sequence.num_prompt
            stats.cached_prompt_tokens += sequence.num_cached
            stats.embedded += 1
            finished.append(sequence)
        return finished

    def finish(self, sequence: Sequence) -> Embedded | None:
        """The vectors of a sequence's request, if all its other texts have ended; None: some still run."""
        flight = self._in_flight[sequence.request_index]
        flight.running -= 1
        if flight.running:
            return None
        del self._in_flight[sequence.request_index]
        prepared, vectors = flight.prepared, [vector for vector in flight.vectors if vector is not None]
        num_tokens = sum(map(len, prepared.prompts))
        error, most = None, self._head.head.largest
        if len(vectors) < len(prepared.prompts):
            error = self._parts.not_finite
        elif flight.largest > most:
            error = f"a value is {flight.largest:g}, and --vector-dtype holds {most:,.0f}: give float32, or --normalize"
        if error is not None:
            return Embedded(prepared.index, prepared.row_id, num_tokens, error=error, row=prepared.row)
        vector = vectors[0] if len(vectors) == 1 else np.concatenate(vectors)
        return Embedded(prepared.index, prepared.row_id, num_tokens, vector, row=prepared.row)


def prompted(request: Request, head: VectorSpec) -> Request:
    """The request with the head's texts around its own; token ids and messages stay as they are."""
    if not isinstance(request.prompt, str) or request.error is not None:
        return request
    if head.pair_texts is not None and request.pair is not None:
        before, between, after = head.pair_texts
        return replace(request, prompt=f"{before}{request.prompt}{between}{request.pair}{after}", pair=None)
    text, pair = head.prompt + request.prompt, request.pair
    if head.lowercases:
        text, pair = text.lower(), pair and pair.lower()
    return replace(request, prompt=text, pair=pair)


def num_pooled(head: VectorSpec, num_tokens: int) -> int:
    """The number of a text's last tokens whose hidden states are needed."""
    return 1 if head.pooling == "last" else num_tokens


def tokens_to_embed(
    tokenizer: Tokenizer,
    head: VectorSpec,
    request: Request,
    limit: LengthLimit,
    on_overlong: str,
    texts: Texts | None = None,
) -> list[int]:
    """Token ids of a text, or of a pair; one that is too long is cut between special tokens at its ends, or refused.

    Args:
        tokenizer: The model's tokenizer.
        head: Pooling, and what follows it.
        request: The request, with the head's prompt.
        limit: The longest text.
        on_overlong: "error", "truncate-left" or "truncate-right", for a text that is too long.
        texts: Texts that were encoded together with those of other requests; None: the text is encoded here.

    Raises:
        RowError: The text is empty or too long.
    """
    most = limit.context
    cuts = on_overlong != "error" and head.pair_texts is None  # whose template ends behind the second text
    if request.pair is not None:
        if not isinstance(request.prompt, str):
            raise RowError("a pair has two texts, and the first one is none")
        side = "left" if on_overlong == "truncate-left" else "right"
        tokens, types = tokenizer.encode_pair(request.prompt, request.pair, most if cuts else None, side)
        if head.pair_offset:
            tokens = [token + of_type * head.pair_offset for token, of_type in zip(tokens, types, strict=True)]
    elif request.prompt == "":  # the vector of its special tokens, as in sentence-transformers
        (tokens,) = tokenizer.encode_batch([""])
    else:
        tokens = encode_prompt(tokenizer, request, limit, texts)
    if not tokens:
        raise RowError("the text is empty")
    if len(tokens) <= most:
        return _without_padding(tokens, head.padding)
    if not cuts:
        cure = "--on-overlong truncate-right cuts it" if head.pair_texts is None else "cut the document before"
        raise RowError(f"the text has {len(tokens)} tokens, the context holds {most}: {cure}")
    before, after = tokenizer.num_added if isinstance(request.prompt, str) else (0, 0)
    if on_overlong == "truncate-right":
        cut = tokens[: most - after] + tokens[len(tokens) - after :]
    else:
        cut = tokens[:before] + tokens[len(tokens) - most + before :]
    return _without_padding(cut, head.padding)


def _without_padding(tokens: list[int], padding: int | None) -> list[int]:
    """A text without the padding at its end; its first token stays. No other token attends to what is left out."""
    kept = len(tokens)
    while kept > 1 and tokens[kept - 1] == padding:
        kept -= 1
    return tokens[:kept]
