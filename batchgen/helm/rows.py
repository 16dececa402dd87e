"""Conversion of HELM requests to rows of batchgen jobs, and of the rows' results to HELM completions.

A completion is a row of a generate job. The log-probabilities of the prompt's own tokens (`echo_prompt`) are a row of a
score job. A row's id is a hash of all that it asks for, so equal requests share a row. Random draws depend on the id,
so a request has the same completions in any run. This module does not import HELM.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from batchgen.core.digest import json_sha256
from batchgen.core.errors import RowError

GENERATE, SCORE = "generate", "score"  # the kinds of rows: --task of their jobs


class PromptTokenizer(Protocol):
    """The interface of the model's tokenizer.

    `encode` adds the special tokens that a prompt has. `encode_chat` renders the chat template up to the point where
    the answer begins.
    """

    def encode(self, text: str) -> list[int]: ...

    def encode_chat(self, messages: list[dict]) -> list[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...


@dataclass(frozen=True)
class Row:
    """A row of a generate job or of a score job.

    Attributes:
        kind: GENERATE or SCORE.
        prompt: Text or chat messages to generate from, or token ids to score.
        id: Hash of all that the row asks for.
        sampling: Fields of SamplingParams; None: the row scores.
    """

    kind: str
    prompt: str | tuple[dict, ...] | tuple[int, ...]
    id: str
    sampling: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Wanted:
    """The rows that answer a HELM request.

    Attributes:
        num_completions: Number of completions.
        generated: The row of each completion, the same row where decoding is greedy; empty where no token is to be
            generated.
        prompt_text: Text of the echoed prompt; None: it is not echoed.
        prompt_ids: Token ids of the echoed prompt; None: it is not echoed.
        first_token: Text of the prompt's first token.
        scored: The row with the log-probabilities of the echoed prompt's tokens; None: there are none to compute.
        stop: Stop strings.
    """

    num_completions: int
    generated: tuple[Row, ...] = ()
    prompt_text: str | None = None
    prompt_ids: tuple[int, ...] | None = None
    first_token: str = ""
    scored: Row | None = None
    stop: tuple[str, ...] = ()

    @property
    def rows(self) -> tuple[Row, ...]:
        """The rows that must be run, each once."""
        rows = [*self.generated, *([self.scored] if self.scored else [])]
        return tuple({row.id: row for row in rows}.values())


@dataclass(frozen=True)
class Answer:
    """A completion of a HELM request.

    Attributes:
        text: Text of the completion.
        tokens: Text and natural log-probability of each token.
        finish_reason: HELM's "stop" (a stop sequence), "endoftext" or "length".
    """

    text: str
    tokens: tuple[tuple[str, float], ...]
    finish_reason: str


def wanted(request: Any, tokenizer: PromptTokenizer, chat: bool) -> Wanted:
    """The rows that answer a HELM request.

    Args:
        request: A helm.common.request.Request.
        tokenizer: The model's tokenizer.
        chat: Whether prompts go through the model's chat template.

    Raises:
        RowError: The engine cannot do what the request asks for.
    """
    _check(request)
    messages = _messages(request, chat)
    prompt = request.prompt if messages is None else messages
    if not prompt:
        raise RowError("the prompt is empty")
    ids = scored = text = None
    first = ""
    if request.echo_prompt:
        ids = tuple(tokenizer.encode(request.prompt) if messages is None else tokenizer.encode_chat(list(messages)))
        if not ids:
            raise RowError("the prompt has no tokens")
        text, first = tokenizer.decode(ids), tokenizer.decode(ids[:1])
        if len(ids) > 1:
            scored = Row(SCORE, ids, _id(SCORE, ids))
    return Wanted(
        request.num_completions, _generated(request, prompt), text, ids, first, scored, tuple(request.stop_sequences)
    )


def answers(want: Wanted, results: Mapping[str, Mapping[str, Any]]) -> list[Answer]:
    """The completions of a HELM request, made from the results of its rows.

    Args:
        want: The rows of the request.
        results: Results by row id: "text", "finish_reason", "logprobs" and "error", as output columns have them; of
            rows that score, the last two.

    Raises:
        RowError: A row has failed.
    """
    for row in want.rows:
        if results[row.id]["error"] is not None:
            raise RowError(results[row.id]["error"])
    echoed: tuple[tuple[str, float], ...] = ()
    if want.prompt_ids is not None:
        positions = results[want.scored.id]["logprobs"] if want.scored else []
        # HELM's convention for a token that nothing stands before, in all its clients.
        echoed = ((want.first_token, 0.0), *((p["token"], p["logprob"]) for p in positions))
    prompt = want.prompt_text or ""
    if not want.generated:
        return [Answer(prompt, echoed, "length")] * want.num_completions
    completions = [_completion(results[row.id], want.stop) for row in want.generated]
    return [Answer(prompt + c.text, echoed + c.tokens, c.finish_reason) for c in completions]


def _check(request: Any) -> None:
    """Raise RowError where a request asks for something other than text, or for a value that is out of range."""
    for field in ("embedding", "multimodal_prompt", "image_generation_parameters"):
        if getattr(request, field, None):
            raise RowError(f"requests with {field} are not supported: this deployment generates plain text")
    if request.num_completions < 1:
        raise RowError(f"num_completions must be at least 1, not {request.num_completions}")
    if request.max_tokens < 0:
        raise RowError(f"max_tokens must be 0 or more, not {request.max_tokens}")


def _messages(request: Any, chat: bool) -> tuple[dict, ...] | None:
    """The chat messages to complete; None where the prompt is plain text."""
    if request.messages and not chat:
        raise RowError("chat messages need a chat model: set apply_chat_template in model_deployments.yaml")
    if not chat:
        return None
    return tuple(request.messages or ({"role": "user", "content": request.prompt},))


def _generated(request: Any, prompt: str | tuple[dict, ...]) -> tuple[Row, ...]:
    if request.max_tokens == 0:
        return ()
    sampling = {
        "max_tokens": request.max_tokens,
        "temperature": float(request.temperature),
        "top_p": float(request.top_p),
        "stop": list(request.stop_sequences),
    }
    for penalty in ("presence_penalty", "frequency_penalty"):
        if getattr(request, penalty):  # others have the ids that they had before there were penalties
            sampling[penalty] = float(getattr(request, penalty))
    if request.response_format and request.response_format.json_schema:
        sampling["json_schema"] = json.dumps(request.response_format.json_schema, sort_keys=True)
    if request.temperature == 0:  # whatever `random` is, and as often as it is asked for
        return (Row(GENERATE, prompt, _id(GENERATE, prompt, sampling), sampling),) * request.num_completions
    return tuple(
        Row(GENERATE, prompt, _id(GENERATE, prompt, sampling, request.random, number), sampling)
        for number in range(request.num_completions)
    )


def _id(*parts: Any) -> str:
    return json_sha256(parts)[:32]


def _completion(result: Mapping[str, Any], stop: Sequence[str]) -> Answer:
    tokens = tuple((position["token"], position["logprob"]) for position in result["logprobs"])
    if result["finish_reason"] == "length":
        return Answer(result["text"], tokens, "length")
    kept, at_stop_string = _before_the_stop([token for token, _ in tokens], result["text"], stop)
    return Answer(result["text"], tokens[:kept], "stop" if at_stop_string else "endoftext")


def _before_the_stop(tokens: Sequence[str], text: str, stop: Sequence[str]) -> tuple[int, bool]:
    """The number of a sample's tokens that begin before the end of its text, and whether a stop string ended it.

    The last token of a sample is the end-of-text token, or it completes a stop string, which may begin in earlier
    tokens. Offsets are counted in the joined token texts, since in `text` the bytes of one character may have been
    joined.

    Args:
        tokens: Text of each token.
        text: Text of the sample, without the stop string.
        stop: Stop strings.
    """
    begins = [0]
    for token in tokens:
        begins.append(begins[-1] + len(token))
    last, whole = begins[-2], "".join(tokens)
    offsets = [whole.find(s, max(0, last - len(s) + 1)) for s in stop]
    end = min((o for o in offsets if o >= 0), default=None)
    # A stop string inside the end-of-text token is none: the text before it is whole.
    if end is None or (end > last and whole[:last].endswith(text)):
        return len(tokens) - 1, False
    return sum(begin < end for begin in begins[:-1]), True
