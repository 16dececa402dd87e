"""Scoring: requests become sequences, logits become log-probabilities, and sequences become scores."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from batchgen.core.errors import InputError, RowError
from batchgen.core.request import (
    ContinuationScore,
    SamplingParams,
    Scored,
    ScoreRequest,
    cut_overlong,
)
from batchgen.engine.encode import LengthLimit, Texts, begins_twice, check_vocabulary, chunks, encode_all, encode_pairs
from batchgen.engine.non_finite import NonFiniteSequences
from batchgen.engine.parts import EngineParts, EngineStats
from batchgen.engine.requests import each_score_request
from batchgen.engine.token_tree import Node, Path, paths_of, windows_of
from batchgen.schedule.from_policy import longest_sequence
from batchgen.schedule.sequence import NOT_FINITE, Sequence

if TYPE_CHECKING:
    from batchgen.models.tokenizers.tokenizer import Tokenizer
    from batchgen.runtime.scorer import Scorer


@dataclass(frozen=True)
class Tokens:
    """The token ids of a request to score, in four bytes each, as many requests wait.

    Attributes:
        context: Tokens before the continuations: the request's own, or a beginning-of-text token.
        continuations: Tokens of each continuation.
        given: Number of context tokens that come from the request.
        rolling: Whether continuations may be longer than the model's context; they are scored in windows.
    """

    context: array
    continuations: tuple[array, ...]
    given: int
    rolling: bool

    def longest_path(self, context_len: int) -> int:
        """Tokens of the longest sequence that scores this request. context_len: the model's context, in tokens."""
        longest = len(self.context) + max(map(len, self.continuations)) - 1
        return min(longest, context_len) if self.rolling else longest


@dataclass(frozen=True)
class _Prepared:
    index: int
    row_id: str | int
    row: int | None
    logprobs: int | None = None
    tokens: Tokens | None = None
    error: str | None = None

    @property
    def prompt(self) -> array | None:
        """Token ids of the context, by which requests are put in order; None: it has failed."""
        return None if self.tokens is None else self.tokens.context


@dataclass
class _InFlight:
    """A request some of whose sequences are still running.

    Attributes:
        row: Number of the request's row in the input, if it has one.
        tokens: Token ids of the request.
        sequences: The sequences that score it.
        nodes: The place of each score, for each token of each continuation.
        running: Number of sequences that are still running.
    """

    row: int | None
    tokens: Tokens
    sequences: list[Sequence]
    nodes: list[list[Node]]
    running: int


class Scoring:
    """The request handler of one call of `Engine.score`."""

    vocabulary_chunks = True

    def __init__(self, parts: EngineParts, on_overlong: str) -> None:
        self._parts, self._on_overlong = parts, on_overlong
        self._limit = LengthLimit.of(parts.policy.max_model_len, on_overlong)
        self._begins_twice = False
        self._in_flight: dict[int, _InFlight] = {}
        assert parts.scorer is not None
        self._new_scorer = parts.scorer
        self._scorer = parts.scorer()  # for the sweep in flight
        self.non_finite = NonFiniteSequences()

    def prepare(self, requests: Iterable[ScoreRequest | None]) -> Iterator[_Prepared]:
        """Tokenize requests, in chunks of several; yields the prepared requests. It runs in the input thread."""
        for chunk in chunks(each_score_request(requests)):
            fine = [request for _, request in chunk if request.error is None]
            texts = encode_all(self._parts.tokenizer, fine, self._limit)
            for index, request in chunk:
                row_id = index if request.id is None else request.id
                if request.error is not None:
                    yield _Prepared(index, row_id, request.row, error=request.error)
                    continue
                try:
                    yield _Prepared(index, row_id, request.row, request.logprobs, self._tokens(request, texts))
                except (RowError, InputError) as problem:
                    yield _Prepared(index, row_id, request.row, error=str(problem))

    def _tokens(self, request: ScoreRequest, texts: Texts) -> Tokens:
        config, policy = self._parts.config, self._parts.policy
        tokens = tokens_of(self._parts.tokenizer, request, texts, policy.max_model_len, self._on_overlong)
        for token_ids in (tokens.context, *tokens.continuations):
            check_vocabulary(token_ids, config.vocab_size, "the text to score")
        self._begins_twice |= begins_twice(self._parts.tokenizer, request.context, tokens.context)
        pool = longest_sequence(policy, self._parts.memory, self._parts.compute_tier)
        longest = tokens.longest_path(policy.max_model_len)
        if longest > pool:
            raise RowError(f"{longest} tokens need more KV than the {pool} tokens that fit the memory budget")
        return tokens

    def start(self, prepared: _Prepared) -> list[Sequence] | Scored:
        """The sequences of a request, or its Scored if it failed before it ran."""
        if prepared.error is not None:
            return Scored(prepared.index, prepared.row_id, 0, error=prepared.error, row=prepared.row)
        tokens = prepared.tokens
        assert tokens is not None
        paths, nodes = paths_to_run(tokens, self._parts.policy.max_model_len)
        # The scheduler counts one generated token at the end, though there is none: KV is that of the sequence's own
        # tokens.
        sampling = SamplingParams(max_tokens=1, logprobs=prepared.logprobs)
        sequences = [
            Sequence(prepared.index, prepared.row_id, k, list(path.tokens), sampling, targets=path.targets)
            for k, path in enumerate(paths)
        ]
        if not tokens.rolling:
            for sequence in sequences[1:]:
                sequence.prefix_source, sequence.num_source_tokens = sequences[0], len(tokens.context)
        self._in_flight[prepared.index] = _InFlight(prepared.row, tokens, sequences, nodes, len(sequences))
        return sequences

    def take_logits(self, rows, logits, start: int) -> None:
        self._scorer.take(rows, logits, start)

    def end_sweep(self) -> Scorer:
        """The scorer that holds the scores of the sweep that is being run."""
        scorer, self._scorer = self._scorer, self._new_scorer()
        return scorer

    def advance(self, scorer: Scorer, stats: EngineStats) -> list[Sequence]:
        """Give sequences the scores of a sweep that has run; returns the sequences that have all their scores."""
        stats.begins_twice |= self._begins_twice
        finished = take_scores(scorer, self.non_finite)
        for sequence in finished:
            if sequence.sample_index == 0:  # a request counts once
                tokens = self._in_flight[sequence.request_index].tokens
                scored = sum(map(len, tokens.continuations))
                stats.scored_tokens += scored
                stats.prompt_tokens += tokens.given + scored
                stats.cached_prompt_tokens += min(tokens.given, sequence.num_cached)
        return finished

    def finish(self, sequence: Sequence) -> Scored | None:
        """The scores of a sequence's request, if all its other sequences have ended; None: some still run."""
        flight = self._in_flight[sequence.request_index]
        flight.running -= 1
        if flight.running:
            return None
        del self._in_flight[sequence.request_index]
        tokens, row = flight.tokens, flight.row
        if not all(map(is_finite, flight.sequences)):
            error = self._parts.not_finite
            return Scored(sequence.request_index, sequence.row_id, tokens.given, error=error, row=row)
        scores = tuple(
            self._score(tuple(continuation), nodes, flight.sequences)
            for continuation, nodes in zip(tokens.continuations, flight.nodes, strict=True)
        )
        cached = min(tokens.given, flight.sequences[0].num_cached)
        return Scored(sequence.request_index, sequence.row_id, tokens.given, scores, cached_tokens=cached, row=row)

    def _score(self, tokens: tuple[int, ...], nodes: list[Node], sequences: list[Sequence]) -> ContinuationScore:
        positions, total, is_greedy = [], 0.0, True
        for token, (path, position, target) in zip(tokens, nodes, strict=True):
            score = sequences[path].scores[position]
            logprob = score.logprobs[target]
            positions.append(self._parts.position_logprobs(token, logprob, score.top))
            total += logprob
            is_greedy = is_greedy and score.argmax == token
        return ContinuationScore(tokens, total, is_greedy, tuple(positions))


def take_scores(
    scorer: Scorer, non_finite: NonFiniteSequences, has_failed: Callable[[Sequence], bool] = lambda sequence: False
) -> list[Sequence]:
    """Give sequences the scores of a sweep that has run; returns the sequences that have all their scores.

    Args:
        scorer: The scores.
        non_finite: Sequences with NaN or infinity in their logits, to which others are added.
        has_failed: Function that tells whether the request of a sequence has failed already.
    """
    finished = []
    for (sequence, position), score in scorer.results():
        if position != sequence.scored_from + len(sequence.scores):
            continue  # the sequence begins again
        if score.argmax == NOT_FINITE and non_finite.reruns(sequence, failed=has_failed(sequence)):
            sequence.scores.clear()
            continue
        sequence.scores.append(score)
        if len(sequence.scores) == len(sequence.targets):
            finished.append(sequence)
    return finished


def is_finite(sequence: Sequence) -> bool:
    """Tell whether none of a sequence's scores is of logits with NaN or infinity."""
    return all(score.argmax != NOT_FINITE for score in sequence.scores)


def tokens_of(tokenizer: Tokenizer, request: ScoreRequest, texts: Texts, context_len: int, on_overlong: str) -> Tokens:
    """The token ids of a request to score; a context that is too long is cut, or refused.

    Args:
        tokenizer: The model's tokenizer.
        request: The request to score.
        texts: Texts that were encoded together with those of other requests.
        context_len: The model's context, in tokens. The last token of a continuation is not run and need not fit.
        on_overlong: "error", "truncate-left" or "truncate-right", for a context that is too long.

    Raises:
        RowError: The request cannot be scored.
        InputError: The model has no chat template.
    """
    context, continuations = encode_pairs(tokenizer, request, texts, LengthLimit.of(context_len, on_overlong))
    for number, tokens in enumerate(continuations, 1):
        if not tokens:
            raise RowError(f"continuation {number} has no tokens")
    before = list(context)
    if before:
        longest = max(map(len, continuations))
        before = cut_overlong(before, longest - 1, context_len, on_overlong)
        if len(before) + longest - 1 > context_len:
            raise RowError(
                f"the context has {len(before)} tokens and the longest continuation {longest},"
                f" the model's context holds {context_len}"
            )
    given = len(before)
    if not before:
        if tokenizer.begin_token_id is None:
            raise RowError("the context is empty, and the model has no token that begins a text: give a context")
        before = [tokenizer.begin_token_id]
    ids = tuple(array("i", tokens) for tokens in continuations)
    return Tokens(array("i", before), ids, given, rolling=not given)


def paths_to_run(tokens: Tokens, context_len: int) -> tuple[list[Path], list[list[Node]]]:
    """The sequences that score a request.

    Args:
        tokens: Token ids of the request.
        context_len: The model's context, in tokens; longer continuations are scored in windows.

    Returns:
        The sequences; and for each token of each continuation, the place of its score in them.
    """
    paths: list[Path] = []
    nodes: list[list[Node]] = [[] for _ in tokens.continuations]
    fitting = []
    for i, continuation in enumerate(tokens.continuations):
        if len(tokens.context) + len(continuation) - 1 <= context_len:
            fitting.append(i)
            continue
        for window in windows_of(tokens.context[0], continuation, context_len):
            nodes[i] += [(len(paths), position, 0) for position in range(len(window.targets))]
            paths.append(window)
    if fitting:
        tree_paths, tree_nodes = paths_of(tokens.context, [tokens.continuations[i] for i in fitting])
        for i, of_tokens in zip(fitting, tree_nodes, strict=True):
            nodes[i] = [(len(paths) + path, position, target) for path, position, target in of_tokens]
        paths += tree_paths
    return paths, nodes
