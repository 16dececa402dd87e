"""Values that callers exchange with the engine: requests, sampling parameters, completions and scores."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from batchgen.core.errors import InputError, one_line
from batchgen.core.made_often import made_often

if TYPE_CHECKING:
    import numpy as np

    from batchgen.core.partial import (
        PartialCompletion,
    )  # imports numpy, which the command line's help does not wait for

# Limits of what one row may ask for, as it would take all memory and time: samples of all its prompts (vLLM has the
# same
# limit), stop strings and stop tokens, and the bytes of its results should every sample be as long as it may be.
MOST_SAMPLES = 16384
MOST_STOPS = 1024
MOST_RESULT_BYTES = 4 << 30
_MOST_INT = 2**31 - 1
# Beyond these, 32-bit floating point makes infinities and zeros of logits.
_LEAST_PENALTY, _MOST_PENALTY = 1e-3, 1e3
# Parameters that a text must follow, of which a sample has at most one.
GRAMMARS = ("json_schema", "regex", "choice", "grammar")
_FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
# About what a token and its log-probabilities take while they wait to be written.
_TOKEN_BYTES, _LOGPROB_BYTES = 40, 200

LEAST_TEMPERATURE = 2.0**-126  # the smallest normal number of 32 bits


@dataclass(frozen=True)
class SamplingParams:
    """Parameters by which tokens are chosen. Names and meanings are vLLM's; `temperature` defaults to 0 (greedy).

    Temperature is applied first, then `min_p`, `top_k` and `top_p`.

    Attributes:
        max_tokens: The most tokens generated per sample, at least 1.
        temperature: Divisor of the logits. 0 is greedy decoding, and so is a value below 1.2e-38, which a 32-bit float
            does not hold.
        top_p: Probability mass that is kept: the smallest set of most likely tokens that reaches this fraction of the
            mass left by `min_p` and `top_k`. 1 is off.
        top_k: Number of most likely tokens that are kept; 0 is off.
        min_p: The least probability of a kept token, as a fraction of the most likely token's probability; 0 is off.
        repetition_penalty: Number by which the logits of tokens in the prompt or output are divided where positive, and
            multiplied where negative; 1 is off.
        presence_penalty: Number subtracted from the logit of each token that is in the output, -2 to 2; 0 is off.
        frequency_penalty: Number subtracted from the logit of a token for each of its occurrences in the output, -2 to
            2; 0 is off.
        logit_bias: Numbers, -100 to 100, added to the logits of tokens before any penalty: a mapping from token id to
            number, or pairs of them.
        n: Number of samples per request, at most `MOST_SAMPLES`.
        seed: Seed of the random draws. A draw depends on the seed, the row id, the sample and the step.
        stop: Strings that end a sample, at most `MOST_STOPS`. The text ends before the string.
        stop_token_ids: Ids of tokens that end a sample, at most `MOST_STOPS`.
        ignore_eos: True to continue after the model's end-of-text tokens.
        logprobs: Number of most likely tokens that are reported at each position with their log-probabilities, besides
            the chosen token. 0: the chosen token alone; None: nothing is reported. Log-probabilities are those of the
            model, before temperature, penalties and grammars.
        prompt_logprobs: Number of most likely tokens that are reported at each position of the prompt with their
            log-probabilities, besides the prompt's own token. 0: the own token alone; None: nothing is reported.
        json_schema: JSON schema of the whole text, as JSON text, a mapping or a class of pydantic. The JSON is on one
            line, unless the schema's "x-guidance" sets another whitespace_pattern. A text that ends early by
            `max_tokens` or a stop string may be incomplete.
        regex: Regular expression that the whole text matches.
        choice: Texts, one of which is the whole text.
        grammar: Context-free grammar of the whole text, in the variant of Lark that llguidance reads.
        compact_json: True for JSON without spaces between its parts; else there may be one space.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    n: int = 1
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    json_schema: str | Mapping[str, Any] | type | None = None
    regex: str | None = None
    choice: tuple[str, ...] = ()
    grammar: str | None = None
    compact_json: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        object.__setattr__(self, "choice", (self.choice,) if isinstance(self.choice, str) else tuple(self.choice or ()))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        object.__setattr__(self, "logit_bias", _bias_pairs(self.logit_bias))
        if self.top_k == -1:  # vLLM's other way to say "off"
            object.__setattr__(self, "top_k", 0)
        for name in _FLOATS:
            _check_float(name, getattr(self, name))
        schema: Any = self.json_schema
        if hasattr(schema, "model_json_schema"):
            schema = schema.model_json_schema()
        if isinstance(schema, Mapping):
            object.__setattr__(self, "json_schema", json.dumps(schema, ensure_ascii=False))
        checks = [
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("temperature", 0.0 <= self.temperature < float("inf"), "0 or more"),
            ("top_p", 0.0 < self.top_p <= 1.0, "above 0 and at most 1"),
            ("top_k", 0 <= self.top_k <= _MOST_INT, f"0 (off) to {_MOST_INT}"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "between 0 and 1"),
            (
                "repetition_penalty",
                _LEAST_PENALTY <= self.repetition_penalty <= _MOST_PENALTY,
                f"between {_LEAST_PENALTY:g} and {_MOST_PENALTY:g}",
            ),
            ("presence_penalty", -2.0 <= self.presence_penalty <= 2.0, "between -2 and 2"),
            ("frequency_penalty", -2.0 <= self.frequency_penalty <= 2.0, "between -2 and 2"),
            ("n", 1 <= self.n <= MOST_SAMPLES, f"between 1 and {MOST_SAMPLES}"),
            *(
                (name, getattr(self, name) is None or 0 <= getattr(self, name) <= 100, "between 0 and 100")
                for name in ("logprobs", "prompt_logprobs")
            ),
            (
                "stop",
                len(self.stop) <= MOST_STOPS and all(isinstance(s, str) and s for s in self.stop),
                f"non-empty strings, at most {MOST_STOPS}",
            ),
            ("stop_token_ids", len(self.stop_token_ids) <= MOST_STOPS, f"at most {MOST_STOPS} tokens"),
            ("json_schema", isinstance(self.json_schema, str | None), "a JSON schema or a class of pydantic"),
            ("regex", isinstance(self.regex, str | None), "text"),
            ("choice", all(isinstance(text, str) and text for text in self.choice), "non-empty texts"),
            ("grammar", isinstance(self.grammar, str | None), "text"),
        ]
        for name, ok, rule in checks:
            if not ok:
                raise InputError(f"{name} must be {rule}, not {one_line(repr(getattr(self, name)))}")
        if self.is_greedy and self.n > 1:
            raise InputError("n > 1 with temperature 0 gives n identical samples: set a temperature above 0")
        if len(given := self.given_grammars) > 1:
            raise InputError(f"{' and '.join(given)} exclude each other: give one")

    @property
    def given_grammars(self) -> tuple[str, ...]:
        """Names of the parameters of `GRAMMARS` that are given: one at most."""
        return tuple(name for name in GRAMMARS if getattr(self, name) not in (None, ()))

    @property
    def constrained(self) -> bool:
        """True where the text must follow a JSON schema, a regular expression, a choice or a grammar."""
        return bool(self.given_grammars)

    @cached_property
    def is_greedy(self) -> bool:
        """True where the most likely token is chosen and nothing is drawn."""
        return self.temperature < LEAST_TEMPERATURE

    @cached_property
    def penalizes_output(self) -> bool:
        """True where a penalty makes the choice of a token depend on the output's earlier tokens."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @cached_property
    def changes_logits(self) -> bool:
        """True where a bias or a penalty changes the logits of some tokens before a token is chosen."""
        return self.penalizes_output or bool(self.logit_bias)

    @cached_property
    def is_argmax(self) -> bool:
        """True where the token with the largest of the model's logits is chosen, and nothing else is asked for."""
        return self.is_greedy and not self.changes_logits and self.logprobs is None

    @cached_property
    def asks_for_tokens_alone(self) -> bool:
        """True where a sampled token is looked at for nothing but ending the text as it would end any other."""
        return self.logprobs is None and not (self.stop or self.stop_token_ids or self.constrained)

    def check_result_size(self, prompts: int, prompt_tokens: int = 0) -> None:
        """Raise InputError where the results of one request may be too large for memory.

        Args:
            prompts: Number of prompts of the request.
            prompt_tokens: Number of tokens of the longest prompt.
        """
        token_bytes = _TOKEN_BYTES + (0 if self.logprobs is None else _LOGPROB_BYTES * (1 + self.logprobs))
        if (size_bytes := prompts * self.n * self.max_tokens * token_bytes) > MOST_RESULT_BYTES:
            raise InputError(
                f"{prompts * self.n} samples of up to {self.max_tokens} tokens"
                f"{'' if self.logprobs is None else f' with {1 + self.logprobs} log-probabilities each'} could take "
                f"{size_bytes / 2**30:,.0f} GiB in one row: lower n, max_tokens or logprobs"
            )
        if self.prompt_logprobs is None:
            return
        size_bytes = prompts * prompt_tokens * _LOGPROB_BYTES * (1 + self.prompt_logprobs)
        if size_bytes > MOST_RESULT_BYTES:
            raise InputError(
                f"{1 + self.prompt_logprobs} log-probabilities for each of {prompt_tokens:,} prompt tokens could take"
                f" {size_bytes / 2**30:,.0f} GiB in one row: lower prompt_logprobs"
            )

    def to_json(self) -> dict[str, Any]:
        """All fields as JSON values."""
        values: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return values

    def identity(self) -> dict[str, Any]:
        """The fields that decide which tokens are chosen, as JSON values: those of random draws only where it draws."""
        drawn = ("temperature", "top_p", "top_k", "min_p", "seed") if self.is_greedy else ()
        return {name: value for name, value in self.to_json().items() if name not in drawn}

    @cached_property
    def identity_bytes(self) -> bytes:
        """`identity` as JSON text. Many rows have the same parameters, so it is made once."""
        return json.dumps(self.identity(), sort_keys=True).encode()

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return tuple(f.name for f in fields(cls))


def _check_float(name: str, value: Any) -> None:
    """Raise InputError where a value is not a number, or is an integer that is too large for a float."""
    try:
        if isinstance(value, str):
            raise TypeError
        float(value)
    except (TypeError, ValueError) as error:
        raise InputError(f"{name} must be a number, not {one_line(repr(value))}") from error
    except OverflowError as error:
        raise InputError(f"{name} is too large: {one_line(repr(value))}") from error


def _bias_pairs(given: Any) -> tuple[tuple[int, float], ...]:
    """Convert logit biases to (token id, bias) pairs, sorted by token id. Raises InputError."""
    rule = f"logit_bias must map token ids to numbers between -100 and 100, not {one_line(repr(given))}"
    try:
        pairs = given.items() if isinstance(given, Mapping) else given
        biases = {int(token_id): float(bias) for token_id, bias in pairs}
    except (TypeError, ValueError, OverflowError) as error:
        raise InputError(rule) from error
    if not all(token_id >= 0 and -100.0 <= bias <= 100.0 for token_id, bias in biases.items()):
        raise InputError(rule)
    return tuple(sorted(biases.items()))


# Variables of chat templates that follow from the messages, or from how they are to be rendered.
_TAKEN_VARIABLES = ("messages", "tools", "add_generation_prompt", "continue_final_message")


@dataclass(frozen=True)
class ChatOptions:
    """Options for rendering chat messages into a prompt.

    Attributes:
        chat_template_kwargs: Variables for the model's chat template, such as {"enable_thinking": False}, as a mapping
            or as JSON text. A request with a variable that the template does not use fails.
        continue_final: True where a last message of the assistant is continued. Else the model starts a new message.
        tools: Tools that the model may call, as JSON schemas that the chat template writes into the prompt; None: none.
        is_whole: True where the messages are all of the text, which is judged or embedded: no answer begins after them.

    Raises:
        InputError: The variables are not valid JSON.
    """

    chat_template_kwargs: Mapping[str, Any] | str = field(default_factory=dict)
    continue_final: bool = False
    tools: Sequence[Mapping[str, Any]] | None = None
    is_whole: bool = False

    def __post_init__(self) -> None:
        given: Any = self.chat_template_kwargs
        try:
            variables = json.loads(given) if isinstance(given, str) else json.loads(json.dumps(dict(given or {})))
        except (TypeError, ValueError, RecursionError) as error:
            raise InputError(f"chat_template_kwargs is no JSON object: {one_line(error)}") from error
        if not isinstance(variables, dict):
            raise InputError(
                f'chat_template_kwargs must be a JSON object such as {{"enable_thinking": false}}, not {given!r}'
            )
        for name in variables:
            if name in _TAKEN_VARIABLES:
                raise InputError(
                    f"chat_template_kwargs cannot have {name!r}, which follows from the messages: leave it out"
                )
        object.__setattr__(self, "chat_template_kwargs", variables)

    @property
    def variables(self) -> Mapping[str, Any]:
        """The variables for the chat template as a mapping, parsed where they were given as JSON text."""
        assert isinstance(self.chat_template_kwargs, dict)
        return self.chat_template_kwargs

    def identity(self) -> dict[str, Any]:
        """The options that differ from the defaults, as JSON values."""
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name))}


PLAIN_CHAT = ChatOptions()


@made_often
class Request:
    """One row for the engine to generate from.

    Attributes:
        prompt: Text (tokenized with the model's special tokens), token ids (a list, or an integer array of numpy or
            torch), or chat messages (`[{"role": ..., "content": ...}]`, rendered with the model's chat template).
        sampling: The row's sampling parameters; None: the engine's.
        id: Value that decides the row's random draws, together with seed, sample and step; None: the row's position.
        error: The reason why the row has no valid prompt. The engine returns a failed Completion with this text.
        row: Number of the row in a dataset. The engine copies it to the Completion and does not use it.
        more_prompts: Further prompts. Each has `n` samples too, which come after those of `prompt`.
        chat: Options for rendering chat messages into a prompt.
        reasoning_apart: True where text between `<think>` and `</think>` is removed from a sample's text.
        pair: Second text of a pair, for models that judge pairs of texts; None: there is one text.
        partial: The samples that an earlier run has begun; generation goes on from them, unless the request's tokens or
            sampling parameters differ. None: it begins anew.
    """

    prompt: str | Sequence[int] | Sequence[dict[str, Any]]
    sampling: SamplingParams | None = None
    id: str | int | None = None
    error: str | None = None
    row: int | None = None
    more_prompts: tuple[str | Sequence[int], ...] = ()
    chat: ChatOptions = PLAIN_CHAT
    reasoning_apart: bool = True
    pair: str | None = None
    partial: PartialCompletion | None = None

    def numbered(self, row: int, *, reasoning_apart: bool) -> Request:
        """The request with the number of its row.

        Made for each row of a job, so without the checks of `dataclasses.replace`.

        Args:
            row: Number of the row.
            reasoning_apart: False where reasoning is never removed.
        """
        numbered = object.__new__(type(self))
        apart = self.reasoning_apart and reasoning_apart
        numbered.__dict__.update(self.__dict__, row=row, reasoning_apart=apart)
        return numbered

    @property
    def each_prompt(self) -> tuple[Request, ...]:
        """Split the request into one request per prompt."""
        if not self.more_prompts:
            return (self,)
        return tuple(replace(self, prompt=p, more_prompts=()) for p in (self.prompt, *self.more_prompts))


def request_digest(
    prompts: Iterable[tuple[array[int], SamplingParams]], row_id: str | int, reasoning_apart: bool
) -> bytes:
    """Digest, 16 bytes, of what decides a request's samples beside the model.

    Args:
        prompts: Token ids of each prompt, and its sampling parameters.
        row_id: Id of the request's row, on which samples depend where tokens are drawn at random.
        reasoning_apart: Whether reasoning is removed from the samples' texts.
    """
    digest = blake2b(b"apart" if reasoning_apart else b"whole", digest_size=16)
    for token_ids, sampling in prompts:
        drawn = "" if sampling.is_greedy else f"{type(row_id).__name__} {row_id}"
        digest.update(f"{len(token_ids)} {drawn}\0".encode(errors="surrogatepass"))
        digest.update(sampling.identity_bytes)
        digest.update(token_ids)
    return digest.digest()


def cut_overlong(token_ids: list[int], max_tokens: int, context: int, on_overlong: str) -> list[int]:
    """The prompt's token ids, cut as `--on-overlong` says so that prompt and output fit into the context.

    Args:
        token_ids: Token ids of the prompt.
        max_tokens: The most tokens of the output.
        context: The most tokens of prompt and output together.
        on_overlong: A value of `--on-overlong`. With "error", the token ids are returned uncut.
    """
    if on_overlong == "error" or len(token_ids) + max_tokens <= context:
        return token_ids
    keep = max(1, context - max_tokens)
    return token_ids[-keep:] if on_overlong == "truncate-left" else token_ids[:keep]


@dataclass(frozen=True)
class ScoreRequest:
    """A context and the continuations that `Engine.score` scores after it.

    Attributes:
        context: Text, token ids or chat messages. "" or () stands for the model's beginning-of-text token, or else for
            its end-of-text token; continuations that are longer than the model's context are then scored in windows.
        continuations: One or more texts or lists of token ids. A text is tokenized together with its context. Spaces at
            the end of the context then belong to the continuation.
        id: Value that is copied to the `Scored`; None: the request's position.
        logprobs: Number of most likely tokens, at most 100, that are also reported at each position; None: none.
        error: The reason why the row has no valid request. The engine returns a failed Scored with this text.
        row: Number of the row in a dataset. The engine copies it to the Scored and does not use it.
        chat: Options for rendering chat messages into a context.
    """

    context: str | Sequence[int] | Sequence[dict[str, Any]]
    continuations: tuple[str | Sequence[int], ...]
    id: str | int | None = None
    logprobs: int | None = None
    error: str | None = None
    row: int | None = None
    chat: ChatOptions = PLAIN_CHAT

    def __post_init__(self) -> None:
        if isinstance(self.continuations, str):
            raise InputError("continuations must be a tuple of texts or of token ids, not one text")
        object.__setattr__(self, "continuations", tuple(self.continuations))
        if self.logprobs is not None and not 0 <= self.logprobs <= 100:
            raise InputError(f"logprobs must be between 0 and 100, not {self.logprobs!r}")


@dataclass(frozen=True)
class TokenLogprob:
    """A token and its log-probability (natural log) under the model.

    Attributes:
        token_id: Id of the token.
        token: Text of the token.
        logprob: The log-probability; None for the first token of a prompt, which follows nothing.
    """

    token_id: int
    token: str
    logprob: float | None


@dataclass(frozen=True)
class PositionLogprobs:
    """The log-probabilities at one position: of the token that is there, and of the most likely tokens.

    Attributes:
        chosen: The token that was chosen or scored, or the prompt's token.
        top: The most likely tokens, most likely first; as many as `logprobs` or `prompt_logprobs` asked for.
    """

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...] = ()


@made_often
class Sample:
    """One generated text of a request.

    Attributes:
        text: The generated text without reasoning: of gpt-oss the channel "final", of other reasoning models the text
            after `</think>`.
        token_ids: All generated tokens.
        finish_reason: "stop" (end of text, a stop string or a stop token) or "length".
        logprobs: Log-probabilities at each position; None where they were not asked for.
        stop: The stop string or stop token id that ended the text; None where there was none.
        reasoning: The reasoning text: of gpt-oss the other channels, of other models the text between `<think>` and
            `</think>`. None where there is no reasoning.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    logprobs: tuple[PositionLogprobs, ...] | None = None
    stop: str | int | None = None
    reasoning: str | None = None


@made_often
class Prompt:
    """The tokens of one prompt of a request.

    Attributes:
        token_ids: Token ids of the prompt.
        logprobs: Log-probabilities at each position; None where `prompt_logprobs` did not ask for them.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...] | None = None


@dataclass(frozen=True)
class Answer:
    """The part of a Completion that does not depend on which job computes it.

    Attributes:
        samples: The generated texts, `n` of each prompt.
        prompt_logprobs: For each prompt, log-probabilities at each position; None where they were not asked for.
    """

    samples: tuple[Sample, ...]
    prompt_logprobs: tuple[tuple[PositionLogprobs, ...] | None, ...]


@made_often
class Completion:
    """The result of one request: `samples` where it succeeded, `error` where it failed.

    Attributes:
        index: Position of the request in the iterable that the engine was given, from 0. Completions are in the order
            in which requests finish.
        id: Id of the request, or its position where it has none.
        prompt_tokens: Number of tokens of all prompts.
        samples: The generated texts, `n` of each prompt; empty where the request failed.
        error: The reason why the request failed; None where it succeeded.
        cached_tokens: Number of prompt tokens whose KV was already computed for another row.
        row: Number of the request's row in a dataset.
        prompts: Tokens of each prompt; empty where the request failed.
        digest: Digest of what decides the samples beside the model (`request_digest`); empty where they were not
            computed for this request, or no answers are looked up.
    """

    index: int
    id: str | int
    prompt_tokens: int
    samples: tuple[Sample, ...] = ()
    error: str | None = None
    cached_tokens: int = 0
    row: int | None = None
    prompts: tuple[Prompt, ...] = ()
    digest: bytes = b""

    @property
    def answer(self) -> Answer:
        """The part of a Completion that does not depend on which job computes it."""
        return Answer(self.samples, tuple(prompt.logprobs for prompt in self.prompts))

    @property
    def text(self) -> str | None:
        """The text of the first sample; None where the request failed."""
        return self.samples[0].text if self.samples else None

    @property
    def prompt_token_ids(self) -> tuple[int, ...] | None:
        """Token ids of the first prompt; None where the request failed."""
        return self.prompts[0].token_ids if self.prompts else None

    @property
    def prompt_logprobs(self) -> tuple[PositionLogprobs, ...] | None:
        """Log-probabilities at each position of the first prompt; None where there are none."""
        return self.prompts[0].logprobs if self.prompts else None


@dataclass(frozen=True)
class ContinuationScore:
    """The log-probability of one continuation after its context.

    Attributes:
        token_ids: Token ids of the continuation.
        logprob: Natural logarithm of the continuation's probability, summed over its tokens.
        is_greedy: True where greedy decoding would generate the continuation: each token is the most likely one after
            the tokens before it. Of equally likely tokens the one with the lowest id counts.
        tokens: Log-probabilities at each position.
    """

    token_ids: tuple[int, ...]
    logprob: float
    is_greedy: bool
    tokens: tuple[PositionLogprobs, ...]


@dataclass(frozen=True)
class Scored:
    """The result of one ScoreRequest: `scores` where it succeeded, `error` where it failed.

    Attributes:
        index: Position of the request in the iterable that the engine was given, from 0.
        id: Id of the request, or its position where it has none.
        context_tokens: Number of tokens of the context.
        scores: Scores of the continuations, in their order; empty where the request failed.
        error: The reason why the request failed; None where it succeeded.
        cached_tokens: Number of tokens whose KV was already computed for another row.
        row: Number of the request's row in a dataset.
    """

    index: int
    id: str | int
    context_tokens: int
    scores: tuple[ContinuationScore, ...] = ()
    error: str | None = None
    cached_tokens: int = 0
    row: int | None = None


@dataclass(frozen=True)
class Embedded:
    """The result of one request to embed: `vector` where it succeeded, `error` where it failed.

    Attributes:
        index: Position of the request in the iterable that the engine was given, from 0.
        id: Id of the request, or its position where it has none.
        prompt_tokens: Number of tokens of the text, special ones included.
        vector: The embedding, float32 [dimensions], or those of several prompts, one after the other; None where the
            request failed.
        error: The reason why the request failed; None where it succeeded.
        row: Number of the request's row in a dataset.
    """

    index: int
    id: str | int
    prompt_tokens: int
    vector: np.ndarray | None = None
    error: str | None = None
    row: int | None = None
