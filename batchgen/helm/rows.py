"""A HELM request as rows of engine jobs, and its completions from their results. HELM itself is not needed here.

A completion is a row of a generate job; the log-probabilities of the prompt's own tokens (`echo_prompt`) are a row of a
score job. A row's id is a hash of all it asks for: requests that ask the same share a row, and as draws depend on the id,
a request gives the same completions in any run, beside any others.
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
    """The model's tokenizer.

    `encode` adds the special tokens that go around a prompt, `encode_chat` renders the chat template up to where the answer
    begins.
    """

    def encode(self, text: str) -> list[int]: ...

    def encode_chat(self, messages: list[dict]) -> list[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...


@dataclass(frozen=True)
class Row:
    """A row of a job.

    prompt: text or chat messages to generate from, token ids to score. sampling: fields of SamplingParams, for rows that
    generate.
    """

    kind: str
    prompt: str | tuple[dict, ...] | tuple[int, ...]
    id: str
    sampling: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Wanted:
    """What a request wants.

    generated: a row a completion, the same one again where decoding is greedy, and none where no token is wanted.

    prompt_text, prompt_ids: the prompt as it comes back where it is echoed, else None; scored: the row that has its
    tokens' log-probabilities, None where there are none to compute.
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
        """Each row once."""
        rows = [*self.generated, *([self.scored] if self.scored else [])]
        return tuple({row.id: row for row in rows}.values())


@dataclass(frozen=True)
class Answer:
    """A completion.

    tokens: (text, log-probability, natural log) of each. finish_reason: HELM's "stop" (a stop sequence), "endoftext" or
    "length".
    """

    text: str
    tokens: tuple[tuple[str, float], ...]
    finish_reason: str


def wanted(request: Any, tokenizer: PromptTokenizer, chat: bool) -> Wanted:
    """What `request`, a helm.common.request.Request, asks of the engine.

    chat: prompts go through the model's chat template. Raises RowError where the engine cannot do what it asks.
    """
    _check(request)
    messages = _messages(request, chat)
    prompt = request.prompt if messages is None else messages
    if not prompt:
        raise RowError("the prompt is empty")
    ids = scored = text = None
    first = ""
    if request.echo_prompt:
        ids = tuple(tokenizer.encode(prompt) if messages is None else tokenizer.encode_chat(list(messages)))
        if not ids:
            raise RowError("the prompt has no tokens")
        text, first = tokenizer.decode(ids), tokenizer.decode(ids[:1])
        if len(ids) > 1:
            scored = Row(SCORE, ids, _id(SCORE, ids))
    return Wanted(
        request.num_completions, _generated(request, prompt), text, ids, first, scored, tuple(request.stop_sequences)
    )


def answers(want: Wanted, results: Mapping[str, Mapping[str, Any]]) -> list[Answer]:
    """The completions of a request.

    Args:
        want: Of `wanted`.
        results: By row id {"text", "finish_reason", "logprobs", "error"}, as output columns have them; of rows that score the
            last two.

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
    """Raises RowError where the request asks for something else than text, or for what the engine does not know."""
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
    """How many tokens begin before the end of the text, and whether it was a stop string that ended it.

    The last token ended the sample: it is the end of text, or it completes a stop string, which may have begun tokens
    before. Offsets are counted in the tokens' texts, not in `text`, where bytes of a character may have become one.
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
