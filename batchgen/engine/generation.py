"""Generation: requests become sequences, logits become tokens, and a request's samples become its completion."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterable, Iterator, Set
from collections.abc import Sequence as List
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from torch import Tensor

from batchgen.core.errors import InputError, RowError
from batchgen.core.partial import PartialCompletion, PartialSample
from batchgen.core.request import (
    Completion,
    PositionLogprobs,
    Prompt,
    Request,
    Sample,
    SamplingParams,
)
from batchgen.engine.encode import is_chat
from batchgen.engine.non_finite import NonFiniteSequences
from batchgen.engine.parts import EngineParts, EngineStats
from batchgen.engine.preparation import KnownAnswers, Preparation, Prepared
from batchgen.engine.scoring import is_finite, take_scores
from batchgen.models.tokenizers.harmony import AnswerStops, Harmony
from batchgen.models.tokenizers.thinking import Gate, Thinking, ThoughtStops
from batchgen.ops import dispatch as ops
from batchgen.ops.host_copy import download
from batchgen.runtime.grammar import Constraint, Grammar
from batchgen.runtime.logits_parts import LogitsParts, spread, take
from batchgen.runtime.sampler import Sampled, SampledToken
from batchgen.schedule.from_policy import longest_sequence
from batchgen.schedule.sequence import NOT_FINITE, PENDING, LogitsRow, Sequence

if TYPE_CHECKING:
    from batchgen.models.tokenizers.tokenizer import StopDetector
    from batchgen.runtime.scorer import Scorer


@dataclass
class _InFlight:
    """A request that has started, and some of whose sequences still run.

    Attributes:
        prepared: The request.
        sequences: The sequence of each sample.
        samples: Samples that have ended; None for others.
        running: Number of sequences that still run, those that score prompts included.
        logprobs: Log-probabilities of the tokens of prompts, by the number of the prompt, as far as they are known;
            None: nobody asked for them.
        error: Reason why the request fails; None: it has not failed.
    """

    prepared: Prepared
    sequences: list[Sequence]
    samples: list[Sample | None]
    running: int
    logprobs: dict[int, tuple[PositionLogprobs, ...]] | None = None
    error: str | None = None

    @property
    def cached_tokens(self) -> int:
        """Tokens of all prompts whose KV came from other rows."""
        if len(self.sequences) == 1 and not _is_scored(self.sequences[0]):  # as in most jobs
            return self.sequences[0].num_cached
        of_prompts: dict[int, int] = {}
        for sequence in self.sequences:
            if not _is_scored(sequence):
                prompt = sequence.sample_index // sequence.sampling.n
                of_prompts[prompt] = max(of_prompts.get(prompt, 0), sequence.num_cached)
        return sum(of_prompts.values())

    def completion(self, *, has_digest: bool) -> Completion:
        """The result of the request. has_digest: Whether it has the request's digest."""
        first, logprobs, row = self.sequences[0], self.logprobs or {}, self.prepared.request.row
        of_prompts = self.sequences[:: first.sampling.n]  # the first sample of each
        num_tokens = sum([sequence.num_prompt for sequence in of_prompts])
        if self.error is not None:
            return Completion(first.request_index, first.row_id, num_tokens, error=self.error, row=row)
        return Completion(
            first.request_index,
            first.row_id,
            num_tokens,
            tuple([sample for sample in self.samples if sample is not None]),
            None,
            self.cached_tokens,
            row,
            tuple([Prompt(tuple(s.tokens[: s.num_prompt]), logprobs.get(i)) for i, s in enumerate(of_prompts)]),
            self.prepared.digest if has_digest else b"",
        )

    def partial(self) -> PartialCompletion | None:
        """The tokens so far; None where there are none worth keeping. Any thread may call this method."""
        row = self.prepared.request.row
        if self.error is not None or row is None:
            return None
        partial = PartialCompletion(row, self.prepared.digest, tuple(map(_partial, self.sequences)))
        return partial if partial.num_tokens else None


def _partial(sequence: Sequence) -> PartialSample:
    """The tokens of a sequence that have reached the host."""
    generated = sequence.generated
    while generated and generated[-1] < 0:  # pending, or not finite
        generated.pop()
    if sequence.sampling.logprobs is None:
        return PartialSample(np.array(generated, np.int32))
    sampled = sequence.logprobs[: len(generated)]  # another thread may be about to append to it
    numbers = np.array([token.numbers for token in sampled] or [[]], np.float64)[: len(sampled)]
    return PartialSample(np.array(generated[: len(sampled)], np.int32), numbers)


def _is_scored(sequence: Sequence) -> bool:
    """Tell whether another sequence of the request scores this one's prompt, which it so has computed for it."""
    return sequence.sampling.prompt_logprobs is not None and sequence.num_prompt > 1


@dataclass(frozen=True)
class _Finish:
    """The end of a sample.

    Attributes:
        reason: Finish reason: "stop", "length" or "error".
        stop: Stop string or stop token id that ended it, if one did.
        ends_with_stop_token: Whether its last token is not part of the text.
        error: Error of the request, if it fails.
    """

    reason: str
    stop: str | int | None = None
    ends_with_stop_token: bool = False
    error: str | None = None


_LENGTH = _Finish("length")


@dataclass(frozen=True)
class _Chosen:
    """Tokens that a sweep samples.

    Attributes:
        rows: Row of logits that each token is chosen from. Tokens of sequences that have ended are dropped. Those after
            drafts follow each other, and come after the one without drafts.
        sampled: The sampler's results, in the order of the rows.
        scorer: The scores of prompts; None: the sweep has none.
        largest: Whether all have the largest logits, so that nothing of their sequences needs the host.
    """

    rows: list[LogitsRow]
    sampled: list[Sampled]
    scorer: Scorer | None = None
    largest: bool = False

    @property
    def needs_host(self) -> bool:
        """True where the device cannot sample some next token before the host has read the one before it."""
        if self.largest:
            return False
        waiting = [  # looks at each sequence of the sweep
            s.drafted or s
            for s, _ in self.rows
            if s.constraint is not None or s.drafts or s.drafted is not None or s.sampling.penalizes_output
        ]
        return any(sequence.drafts or not sequence.is_complete for sequence in waiting)

    def tokens(self, ends: Set[int], stats: EngineStats) -> Iterator[tuple[Sequence, SampledToken, int]]:
        """Write the tokens into their sequences; count those that a sequence just goes on with, and yield the others.

        A token after drafts counts if each of these is the token that was chosen before it.

        Args:
            ends: Tokens that may end any sequence.
            stats: The engine's totals.

        Yields:
            (sequence, token, tokens that the sequence has generated).
        """
        tokens = itertools.chain.from_iterable(sampled.tokens() for sampled in self.sampled)
        num_going_on = 0
        for (at, before), token in zip(self.rows, tokens, strict=True):  # each sequence of every sweep
            sequence, position, token_id = at.drafted or at, before + 1, token.token_id
            known = sequence.tokens
            if position < len(known):
                known[position] = token_id
            elif not _accepts_draft(sequence, position):
                continue
            else:
                known.append(token_id)
                sequence.num_computed += 1
            sampling, num_generated = sequence.sampling, position + 1 - sequence.num_prompt
            if (
                sequence.num_restored + 1 < num_generated < sampling.max_tokens
                and token_id not in ends
                and sampling.asks_for_tokens_alone
            ):
                num_going_on += 1
            else:
                yield sequence, token, num_generated
        stats.generated_tokens += num_going_on


def _accepts_draft(sequence: Sequence, position: int) -> bool:
    """Judge the first draft of a sequence: True where it is the sequence's last token, whose KV is so there.

    Args:
        sequence: A sequence. After a refused draft it has none any more.
        position: Position of the token that was sampled after the draft.
    """
    if not sequence.drafts or position != len(sequence.tokens):
        return False
    accepted = sequence.drafts[0] == sequence.tokens[-1]
    sequence.drafts = sequence.drafts[1:] if accepted else ()
    return accepted


def _sharing_prefixes(sequences: list[Sequence]) -> list[Sequence]:
    """Have the first sequence of each prompt compute the prompt for the others; returns the sequences."""
    first: dict[int, Sequence] = {}
    for sequence in sequences:
        source = first.setdefault(sequence.sample_index // sequence.sampling.n, sequence)
        if source is not sequence:
            sequence.prefix_source, sequence.num_source_tokens = source, sequence.num_prompt - 1
            sequence.computes_prompt = False
    return sequences


class Generation:
    """The request handler of one call of `Engine.generate`.

    Attributes:
        takes_ahead: Whether grammars take tokens that nothing else is allowed in place of; the next sweep then waits
            for masks before it is scheduled.
    """

    vocabulary_chunks = False  # draws need a row's logits all at once

    def __init__(
        self, parts: EngineParts, sampling: SamplingParams, on_overlong: str, known: KnownAnswers | None = None
    ) -> None:
        self._parts = parts
        self._preparation = Preparation(
            parts.tokenizer,
            parts.config.vocab_size,
            parts.policy.max_model_len,
            sampling,
            on_overlong,
            most_tokens=longest_sequence(parts.policy, parts.memory, parts.compute_tier),
            known=known,
        )
        self._looks_up = known is not None
        self._in_flight: dict[int, _InFlight] = {}
        self._detectors: dict[Sequence, AnswerStops | ThoughtStops | StopDetector] = {}
        self._finishes: dict[Sequence, _Finish] = {}
        self._harmony = Harmony.of(parts.tokenizer) if parts.config.has_channels else None
        # Thinking tags by regular expression, which most rows have none of.
        self._tags = lru_cache(maxsize=64)(partial(Thinking.of, parts.tokenizer))
        self._thinking: dict[
            Sequence, tuple[Thinking, bool]
        ] = {}  # thinking tags, and whether the text begins in thoughts
        self._sampled: list[tuple[List[LogitsRow], Sampled]] = []  # in the sweep in flight
        self._largest = True  # whether all of them are those with the largest logits
        self._gates: dict[Sequence, tuple[Gate, Grammar]] = {}  # of sequences whose grammar has not begun
        self.takes_ahead = False
        self._ahead: list[Sequence] = []  # whose grammars may have taken tokens ahead
        self._scorer: Scorer | None = None  # of the prompts in the sweep in flight; None: no prompt is scored
        self.non_finite = NonFiniteSequences()

    def prepare(self, requests: Iterable[Request | str | None]) -> Iterator[Prepared]:
        """Tokenize requests and compile their grammars; yields the prepared requests. It runs in the input thread."""
        for prepared in self._preparation.prepare(requests):
            if prepared.error is not None or prepared.answer is not None or not prepared.prompts[0][1].constrained:
                yield prepared
                continue
            assert self._parts.grammars is not None
            try:
                yield replace(prepared, grammar=self._parts.grammars.compile(prepared.prompts[0][1]))
            except (RowError, InputError) as problem:
                yield replace(prepared, error=str(problem))

    def start(self, prepared: Prepared) -> list[Sequence] | Completion:
        """The sequences of a request, or its Completion if it failed before it ran, or its answer is known."""
        if (completion := prepared.completion()) is not None:
            return completion
        row_id = prepared.row_id
        started: list[Sequence] = []
        for number, (token_ids, sampling) in enumerate(prepared.prompts):
            started += self._samples_of(prepared, row_id, number * sampling.n, token_ids, sampling)
        logprobs = self._first_logprobs(prepared)
        sequences = started if logprobs is None else [sequence for sequence in started if not sequence.targets]
        flight = _InFlight(prepared, sequences, [None] * len(sequences), len(started), logprobs)
        self._in_flight[prepared.index] = flight
        if prepared.request.partial is not None and (restored := self._restored(started, prepared)) is not None:
            return restored
        return started if len(started) == 1 else _sharing_prefixes(started)

    def _first_logprobs(self, prepared: Prepared) -> dict[int, tuple[PositionLogprobs, ...]] | None:
        """The position of the first token of each prompt, where log-probabilities are asked for; None: nowhere."""
        return {
            number: (self._parts.position_logprobs(token_ids[0], None),)
            for number, (token_ids, sampling) in enumerate(prepared.prompts)
            if sampling.prompt_logprobs is not None
        } or None

    def _restored(self, started: list[Sequence], prepared: Prepared) -> list[Sequence] | Completion | None:
        """Give sequences the tokens that an earlier run has generated.

        Args:
            started: The sequences of the request.
            prepared: The request.

        Returns:
            The sequences that still run, or the Completion if all samples have ended; None: there are no such tokens.
        """
        partial = prepared.request.partial
        if partial is None or partial.digest != prepared.digest:
            return None
        if len(partial.samples) != sum(not sequence.targets for sequence in started):
            return None
        completion = None
        running: list[Sequence] = []
        samples = iter(partial.samples)
        for sequence in started:
            if not sequence.targets:  # those that score a prompt begin again
                self._restore(sequence, next(samples))
            if sequence in self._finishes:
                completion = self.finish(sequence)
            else:
                running.append(sequence)
        return completion if completion is not None else _sharing_prefixes(running)

    def _restore(self, sequence: Sequence, sample: PartialSample) -> None:
        """Append an earlier run's tokens to a new sequence, which may end with them.

        Detectors of stop strings and grammars read them as if they were chosen now. Random draws follow from the number
        of tokens.
        """
        for known, token_id in enumerate(sample.token_ids.tolist(), 1):
            sequence.tokens.append(token_id)
            if sample.logprobs is not None:
                sequence.logprobs.append(SampledToken.of_numbers(token_id, sample.logprobs[known - 1].tolist()))
            finish = self._finish_of(sequence, token_id, known)
            if finish is not None:
                self._finishes[sequence] = finish
                return
        sequence.num_restored = sequence.num_generated
        if sequence.constraint is None or self._parts.grammars is None:
            return
        if answer := self._constrained_part(sequence, sequence.generated):
            self._parts.grammars.restore(cast("Constraint", sequence.constraint), answer)

    def partials(self) -> list[PartialCompletion]:
        """The tokens so far of requests that have started and not ended. Any thread may call this method."""
        flights = list(self._in_flight.values())
        return [partial for flight in flights if (partial := flight.partial()) is not None]

    def _samples_of(
        self, prepared: Prepared, row_id: str | int, first: int, token_ids: array, sampling: SamplingParams
    ) -> list[Sequence]:
        """The sequences of one prompt of a request.

        Where log-probabilities of the prompt are asked for, the first is a sequence that scores the prompt and takes
        over no KV, since the logits of all its positions are needed.

        Args:
            prepared: The request.
            row_id: Id of the request's row, which seeds random draws.
            first: Index, among all samples of the request, of this prompt's first sample.
            token_ids: Token ids of the prompt.
            sampling: Sampling parameters of the prompt.
        """
        started: list[Sequence] = []
        if sampling.prompt_logprobs is not None and len(token_ids) > 1:
            started.append(_scoring_sequence(prepared.index, row_id, first, token_ids, sampling))
        thinking = self._thinking_of(prepared.request, token_ids, sampling)
        for k in range(sampling.n):
            sequence = Sequence(prepared.index, row_id, first + k, list(token_ids), sampling)
            if thinking is not None:
                self._thinking[sequence] = thinking
            if prepared.grammar is not None:
                self._constrain(sequence, prepared.grammar, self._gate_of(prepared.request, sequence, thinking))
            if sampling.stop:
                self._detectors[sequence] = self._stops(sampling.stop, thinking)
            started.append(sequence)
        return started

    def _thinking_of(
        self, request: Request, token_ids: array, sampling: SamplingParams
    ) -> tuple[Thinking, bool] | None:
        """Thinking tags of a request's samples, and whether they begin in thoughts; None: they do not think."""
        if self._harmony is not None or not request.reasoning_apart:
            return None
        thinking = self._tags(sampling.regex)
        if thinking is None:
            return None
        continued: Any = request.prompt if request.chat.continue_final and is_chat(request.prompt) else ()
        return thinking, thinking.begins(token_ids, continued)

    def _gate_of(self, request: Request, sequence: Sequence, thinking: tuple[Thinking, bool] | None) -> Gate | None:
        """The gate that keeps a sample's grammar out of its thoughts; None: the grammar begins with the text.

        Args:
            request: The sample's request.
            sequence: The sample.
            thinking: Its thinking tags, and whether it begins in thoughts; None: it does not think between tags.
        """
        prompt = sequence.tokens
        if self._harmony is not None and request.reasoning_apart:
            return self._harmony.gate(prompt)
        if thinking is None:
            return None
        begins_turn = is_chat(request.prompt) and not request.chat.continue_final
        return thinking[0].gate(prompt, sequence.sampling, thinking[1], begins_turn)

    def _constrain(self, sequence: Sequence, grammar: Grammar, gate: Gate | None) -> None:
        """Give a new sequence its grammar, which begins after the gate if there is one."""
        if gate is None:
            sequence.constraint = grammar.start()
            return
        sequence.constraint = grammar.before(gate.first, must_begin=gate.must_begin)
        self._gates[sequence] = gate, grammar

    def _constrained_part(self, sequence: Sequence, token_ids: Iterable[int]) -> list[int]:
        """The last of some tokens of a sequence, those that its grammar takes; it begins if its gate lets it.

        Args:
            sequence: The sequence, which has a grammar.
            token_ids: Tokens that it has generated and this method has not been given before.
        """
        token_ids = list(token_ids)
        if sequence not in self._gates:
            return token_ids
        gate, grammar = self._gates[sequence]
        for i, token_id in enumerate(token_ids):
            if (offset := gate.answer_from(token_id)) is not None:
                del self._gates[sequence]
                sequence.constraint = grammar.start()
                return token_ids[i + offset :]
        sequence.constraint = grammar.before()
        return []

    def _stops(
        self, stop: tuple[str, ...], thinking: tuple[Thinking, bool] | None
    ) -> AnswerStops | ThoughtStops | StopDetector:
        """The detector of a sample's stop strings. thinking: its tags, and whether it begins in thoughts; or None."""
        detector = self._parts.tokenizer.stop_detector(stop)
        if self._harmony is not None:
            return AnswerStops(self._harmony, detector)
        return detector if thinking is None else ThoughtStops(*thinking, detector)

    def drafted(self, sequences: Iterable[Sequence]) -> None:
        """Have the masks made that sequences with drafts need in the sweep that is about to run."""
        constraints = {cast("Constraint", s.constraint): s.drafts for s in sequences if s.constraint is not None}
        if constraints and self._parts.grammars is not None:
            self._parts.grammars.draft(constraints)

    def take_logits(self, rows, logits, start: int) -> Tensor | None:
        """Sample the next tokens of sequences, and score tokens of prompts.

        Args:
            rows: Sequences whose logits these are, one for each row.
            logits: fp32 logits, [rows, vocabulary].
            start: Index in the vocabulary of the first column: 0, as logits come whole.
        """
        if isinstance(logits, Tensor) and self.takes_largest(rows):  # as in most jobs
            chosen, if_finite = ops.argmax_if_finite(logits, NOT_FINITE)
            self.take_largest(rows, chosen, if_finite)
            return chosen
        self._largest = False
        parts = LogitsParts.of(rows)
        if parts.scored:
            assert self._parts.scorer is not None
            self._scorer = self._scorer or self._parts.scorer()
            self._scorer.take([rows[i] for i in parts.scored], take(logits, parts.scored), start)
        if not parts.sampled:
            return None
        sampled_rows = take(rows, parts.sampled)
        sampled = self._parts.sample(take(logits, parts.sampled), [sequence for sequence, _ in sampled_rows])
        self._sampled.append((sampled_rows, sampled))
        return spread(sampled.token_ids, parts.sampled, len(rows))

    def takes_largest(self, rows: List[LogitsRow]) -> bool:
        """Tell whether of each row the token with the largest logit is chosen, and nothing else is asked for."""
        others = [  # looks at each sequence of every sweep
            s
            for s, _ in rows
            if s.constraint is not None or s.targets or s.drafts or s.drafted is not None or not s.sampling.is_argmax
        ]
        return not others

    def take_largest(self, rows: List[LogitsRow], chosen: Tensor, if_finite: Tensor) -> None:
        """Take the tokens with the largest logits, where `takes_largest` says so (`sweep_options.Largest`)."""
        self._sampled.append((rows, Sampled(chosen, download(if_finite))))

    def end_sweep(self) -> _Chosen:
        """The tokens sampled in the sweep that is being run. Their sequences hold PENDING until it has run."""
        rows: list[LogitsRow] = []
        for sampled_rows, _ in self._sampled:
            rows += sampled_rows
            for sequence, _ in sampled_rows:  # each sequence of every sweep
                if sequence.drafted is None:
                    sequence.tokens.append(PENDING)
        chosen = _Chosen(rows, [sampled for _, sampled in self._sampled], self._scorer, self._largest)
        self._sampled, self._scorer, self._largest = [], None, True
        return chosen

    def take_forced(self, stats: EngineStats) -> list[Sequence]:
        """Append the tokens that grammars leave no choice about; returns the sequences that have ended with them.

        No sweep samples them. Their KV is computed by the next sweep, with that of the token before them.
        """
        finished: list[Sequence] = []
        sequences, self._ahead = self._ahead, []
        for sequence in sequences:
            for token_id in cast("Constraint", sequence.constraint).take_ahead():
                sequence.tokens.append(token_id)
                stats.generated_tokens += 1
                stats.forced_tokens += 1
                finish = self._finish_of(sequence, token_id, sequence.num_generated)
                if finish is not None:
                    self._finishes[sequence] = finish
                    finished.append(sequence)
                    break
        return finished

    def advance(self, chosen: _Chosen, stats: EngineStats) -> list[Sequence]:
        """Write the sampled tokens of a sweep that has run into its sequences; returns those that have ended."""
        finished: list[Sequence] = []
        constrained: dict[Sequence, list[int]] = {}
        generated = 0
        stats.begins_twice |= self._preparation.begins_twice
        if chosen.scorer is not None:
            finished += take_scores(chosen.scorer, self.non_finite, self._has_failed)
        stats.prompt_tokens += sum(1 + sequence.num_prompt for sequence in finished)
        for sequence, token, known in chosen.tokens({NOT_FINITE, *self._parts.eos_token_ids}, stats):
            first = known == sequence.num_restored + 1
            if (
                token.token_id == NOT_FINITE
                and first
                and self.non_finite.reruns(sequence, failed=self._has_failed(sequence))
            ):
                del sequence.tokens[sequence.num_prompt + sequence.num_restored :]
                sequence.drafts = ()
                continue
            generated += 1
            if first and sequence.computes_prompt:
                stats.prompt_tokens += sequence.num_prompt
                stats.cached_prompt_tokens += sequence.num_cached
            if sequence.sampling.logprobs is not None:
                sequence.logprobs.append(token)
            finish = self._failure_of(sequence) or self._finish_of(sequence, token.token_id, known)
            if finish is not None:
                del sequence.tokens[sequence.num_prompt + known :]  # those of sweeps in flight
                sequence.drafts = ()
                self._finishes[sequence] = finish
                finished.append(sequence)
            elif sequence.constraint is not None and self._constrained_part(sequence, [token.token_id]):
                constrained.setdefault(sequence, []).append(token.token_id)
        grammars = self._parts.grammars
        if constrained and grammars is not None:  # the next masks are made while the next sweep's layers compute
            going = [s for s in constrained if s not in self._finishes]
            # Log-probabilities of a token need logits.
            self._ahead = [s for s in going if self.takes_ahead and s.sampling.logprobs is None]
            grammars.advance(
                {cast("Constraint", s.constraint): constrained[s] for s in going},
                {cast("Constraint", s.constraint): s.sampling.max_tokens - s.num_generated for s in self._ahead},
            )
        if grammars:
            stats.busy_s |= {"masks": grammars.busy_s, "mask_wait": grammars.waited_s}
        stats.generated_tokens += generated
        return finished

    def finish(self, sequence: Sequence) -> Completion | None:
        """The completion of a sequence's request, if all its other sequences have ended; None: some still run."""
        flight = self._in_flight[sequence.request_index]
        self._gates.pop(sequence, None)
        if sequence.targets:
            self._add_prompt_logprobs(flight, sequence)
        else:
            finish, detector = self._finishes.pop(sequence), self._detectors.pop(sequence, None)
            if finish.error is not None:
                flight.error = flight.error or finish.error
            else:
                flight.samples[sequence.sample_index] = self._sample(sequence, finish, detector)
        flight.running -= 1
        if flight.running:
            return None
        return self._in_flight.pop(sequence.request_index).completion(has_digest=self._looks_up)

    def _has_failed(self, sequence: Sequence) -> bool:
        return self._in_flight[sequence.request_index].error is not None

    def _add_prompt_logprobs(self, flight: _InFlight, sequence: Sequence) -> None:
        """Add the log-probabilities of a prompt to its request.

        Args:
            flight: The request.
            sequence: The sequence that has scored the prompt.
        """
        if not is_finite(sequence):
            flight.error = flight.error or self._parts.not_finite
            return
        assert flight.logprobs is not None, "nobody asked for them"
        number = sequence.sample_index // sequence.sampling.n
        positions = (
            self._parts.position_logprobs(token, score.logprobs[0], score.top)
            for (token,), score in zip(sequence.targets, sequence.scores, strict=True)
        )
        flight.logprobs[number] = (*flight.logprobs[number], *positions)

    def _failure_of(self, sequence: Sequence) -> _Finish | None:
        """The end of a sequence whose grammar had no token to sample; None: it had one.

        Tokens that the grammar has taken before count: a stop string in them, or the last token allowed, ends the
        sequence well.
        """
        error = sequence.constraint.error if sequence.constraint is not None else None
        return _Finish("error", error=error) if error is not None else None

    def _finish_of(self, sequence: Sequence, token: int, num_generated: int) -> _Finish | None:
        """The end of a sequence at a generated token; None: the sequence goes on.

        Args:
            sequence: The sequence.
            token: Id of the token.
            num_generated: Number of tokens that the sequence has generated, this one included.
        """
        sampling, constraint = sequence.sampling, sequence.constraint
        if token == NOT_FINITE:
            return _Finish("error", error=self._parts.not_finite)
        # A grammar ends with the end of text: nothing can follow it.
        if token in self._parts.eos_token_ids and (constraint is not None or not sampling.ignore_eos):
            return _Finish("stop", ends_with_stop_token=True)
        if token in sampling.stop_token_ids:
            return _Finish("stop", token, ends_with_stop_token=True)
        detector = self._detectors.get(sequence)
        if detector is not None:
            stop = detector.push(token)
            if stop is not None:
                return _Finish("stop", stop)
        return _LENGTH if num_generated >= sampling.max_tokens else None

    def _sample(self, sequence: Sequence, finish: _Finish, detector) -> Sample:
        tokenizer, generated = self._parts.tokenizer, sequence.generated
        said = generated[:-1] if finish.ends_with_stop_token else generated
        channels = self._harmony.read(said) if self._harmony else None
        if channels is not None:
            return self._apart(sequence, finish, *channels)
        if self._thinking and sequence in self._thinking:
            thinking, begun = self._thinking.pop(sequence)
            split = thinking.split(said, begun, sequence.sampling)
            if split is not None:
                return self._apart(sequence, finish, split.answer, split.thoughts)
        text = detector.text if detector is not None and isinstance(finish.stop, str) else tokenizer.decode(said)
        return Sample(text, tuple(generated), finish.reason, self._logprobs(sequence), finish.stop)

    def _apart(self, sequence: Sequence, finish: _Finish, text: str, reasoning: str) -> Sample:
        """A sample whose thoughts are apart from its answer. A stop string ends the answer."""
        if isinstance(finish.stop, str):
            text = text.split(finish.stop)[0]
        generated, logprobs = tuple(sequence.generated), self._logprobs(sequence)
        return Sample(text, generated, finish.reason, logprobs, finish.stop, reasoning)

    def _logprobs(self, sequence: Sequence) -> tuple[PositionLogprobs, ...] | None:
        if sequence.sampling.logprobs is None:
            return None
        return tuple(self._parts.position_logprobs(t.token_id, t.logprob, t.top) for t in sequence.logprobs)


def _scoring_sequence(
    request_index: int, row_id: str | int, sample_index: int, token_ids: Iterable[int], sampling: SamplingParams
) -> Sequence:
    """A sequence that scores each token of a prompt but the first.

    Args:
        request_index: Index of the request.
        row_id: Id of its row.
        sample_index: Index, among all samples of the request, of the prompt's first sample.
        token_ids: Token ids of the prompt.
        sampling: Sampling parameters of the prompt's samples.
    """
    tokens = list(token_ids)
    # The scheduler counts one generated token at the end, though there is none.
    sampling = replace(sampling, max_tokens=1, logprobs=sampling.prompt_logprobs)
    targets = tuple((token,) for token in tokens[1:])
    return Sequence(request_index, row_id, sample_index, tokens[:-1], sampling, targets=targets)
