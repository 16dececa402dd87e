"""OpenAI batch files as output: each result becomes a line of the success file or of the error file."""

from __future__ import annotations

import base64
import json
import re
from typing import Any

import numpy as np

from batchgen.core.digest import json_sha256
from batchgen.dataset.openai_batch import forced_function

_TOOL_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_LOWEST_LOGPROB = -9999.0  # what OpenAI writes for tokens of no probability; JSON has no infinity


def format_response(
    custom_id: str | None, body: str | dict[str, Any], completion_row: dict[str, Any], model_name: str, row_index: int
) -> dict[str, Any]:
    """The JSON value of a line of the success file.

    Ids are derived from `custom_id` and `row_index`, and `created` is 0, so that the line does not depend on the time.

    Args:
        custom_id: The request's custom_id.
        body: The request's body, which tells a chat from a completion.
        completion_row: {"samples": [{"text", "reasoning": None or a text, "finish_reason", "logprobs": None or
            [{"token", "token_id", "logprob", "top": [{"token", "token_id", "logprob"}]}], "token_ids": None or [int]}],
            "prompts": [{"logprobs": as of a sample, "token_ids": None or [int]}], "prompt_tokens": int,
            "generated_tokens": [int]}.
        model_name: Name of the model in the line.
        row_index: Index of the request's row in the input.
    """
    asked: dict[str, Any] = json.loads(body) if isinstance(body, str) else body
    chat = "messages" in asked
    function = forced_function(asked) if chat and asked.get("tools") else None
    digest = _digest(custom_id, row_index)
    samples, prompts = completion_row["samples"], completion_row["prompts"]
    prompt_tokens = completion_row["prompt_tokens"]
    completion_tokens = sum(completion_row["generated_tokens"])
    if asked.get("echo"):
        samples = _with_prompts(asked, samples, prompts)
        completion_tokens = 0 if asked.get("max_tokens") == 0 else completion_tokens
    answer: dict[str, Any] = {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{digest}",
        "object": "chat.completion" if chat else "text_completion",
        "created": 0,
        "model": model_name,
        "choices": [
            (_chat_choice(index, sample, asked, function) if chat else _text_choice(index, sample))
            | _token_ids("token_ids", sample)
            for index, sample in enumerate(samples)
        ],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        },
    }
    for index, choice in enumerate(answer["choices"]):  # where vLLM has them: a chat has one prompt
        prompt = prompts[index * len(prompts) // len(samples)]
        wanted = asked.get("prompt_logprobs") is not None and prompt["logprobs"] is not None
        logprobs = {"prompt_logprobs": [_prompt_position(p) for p in prompt["logprobs"]]} if wanted else {}
        (answer if chat else choice).update(logprobs | _token_ids("prompt_token_ids", prompt))
    return _success(custom_id, digest, answer)


def format_embeddings(
    custom_id: str | None,
    body: str | dict[str, Any],
    vectors: np.ndarray,
    prompt_tokens: int,
    model_name: str,
    row_index: int,
) -> dict[str, Any]:
    """The JSON value of a line of the success file, for a request of embeddings.

    Args:
        custom_id: The request's custom_id.
        body: The request's body.
        vectors: The embeddings of its inputs, float32 [inputs, dimensions].
        prompt_tokens: Number of tokens of all inputs.
        model_name: Name of the model in the line.
        row_index: Index of the request's row in the input.
    """
    asked: dict[str, Any] = json.loads(body) if isinstance(body, str) else body
    in_base64, digest = asked.get("encoding_format") == "base64", _digest(custom_id, row_index)
    answer = {
        "object": "list",
        "data": [
            {
                "object": "embedding",
                "index": index,
                "embedding": base64.b64encode(vector.astype("<f4").tobytes()).decode()
                if in_base64
                else vector.tolist(),
            }
            for index, vector in enumerate(vectors)
        ],
        "model": model_name,
        "usage": {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens},
    }
    return _success(custom_id, digest, answer)


def _success(custom_id: str | None, digest: str, answer: dict[str, Any]) -> dict[str, Any]:
    """A line of the success file around an answer. digest: digest of the request, which ids are made of."""
    return {
        "id": f"batch_req_{digest}",
        "custom_id": custom_id,
        "response": {"status_code": 200, "request_id": f"req_{digest}", "body": answer},
        "error": None,
    }


def format_error(custom_id: str | None, message: str, row_index: int) -> dict[str, Any]:
    """The JSON value of a line of the error file: a response with status 400, and the message as `error`.

    Args:
        custom_id: The request's custom_id.
        message: The text of the error.
        row_index: Index of the request's row in the input.
    """
    digest = _digest(custom_id, row_index)
    details = {"message": message, "type": "invalid_request_error", "param": None, "code": "row_failed"}
    return {
        "id": f"batch_req_{digest}",
        "custom_id": custom_id,
        "response": {"status_code": 400, "request_id": f"req_{digest}", "body": {"error": details}},
        "error": {"code": "row_failed", "message": message},
    }


def _digest(custom_id: str | None, row_index: int) -> str:
    return json_sha256([custom_id, row_index])[:24]


def _chat_choice(
    index: int, sample: dict[str, Any], asked: dict[str, Any], function: dict[str, Any] | None
) -> dict[str, Any]:
    """A choice of a chat's answer. function: the function that the request makes the model call; None: none."""
    logprobs = sample.get("logprobs")
    positions = None if logprobs is None else {"content": [_position(p) for p in logprobs], "refusal": None}
    reasoning = sample.get("reasoning")
    thoughts = {} if reasoning is None else {"reasoning_content": reasoning}
    content, calls = _content_and_calls(sample["text"], index, asked, function)
    made = {"tool_calls": calls} if calls else {}
    # OpenAI's reason for a named function is that of any text.
    made_by_choice = calls and sample["finish_reason"] == "stop" and not isinstance(asked.get("tool_choice"), dict)
    return {
        "index": index,
        "message": {"role": "assistant", "content": content, **thoughts, **made, "refusal": None},
        "logprobs": positions,
        "finish_reason": "tool_calls" if made_by_choice else sample["finish_reason"],
    }


def _content_and_calls(
    text: str, index: int, asked: dict[str, Any], function: dict[str, Any] | None
) -> tuple[str | None, list[dict[str, Any]]]:
    """The content of a chat's answer, and the calls of tools in it.

    Args:
        text: The answer as the model wrote it; the arguments alone where the request names the function to call.
        index: Number of the choice, which is in the ids of its calls.
        asked: The request's body.
        function: The function that the request makes the model call; None: none.
    """
    if not asked.get("tools"):
        return text, []
    if function is not None:
        return None, [_call(index, 0, function["name"], text)]
    return _tool_calls(text, index)


def _call(index: int, number: int, name: str, arguments: str) -> dict[str, Any]:
    """A call of a tool. index, number: those of the choice and of the call in it. arguments: JSON text."""
    return {
        "id": f"call_{index}_{number}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def _tool_calls(text: str, index: int) -> tuple[str | None, list[dict[str, Any]]]:
    """The content and the calls of tools in a text in the form of Hermes and Qwen.

    A call is a JSON object between `<tool_call>` and `</tool_call>`. A text with a call that is no such object is all
    content, as the model wrote it.

    Args:
        text: The text.
        index: Number of the choice, which is in the ids of its calls.
    """
    calls = []
    for number, match in enumerate(_TOOL_CALL.finditer(text)):
        try:
            call = json.loads(match[1])
            name, arguments = call["name"], call["arguments"]
        except (ValueError, TypeError, KeyError, RecursionError):
            return text, []
        written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        calls.append(_call(index, number, name, written))
    return (_TOOL_CALL.sub("", text).strip() or None, calls) if calls else (text, [])


def _token_ids(name: str, owner: dict[str, Any]) -> dict[str, list[int]]:
    """The token ids of a prompt or a sample under a name; nothing where they were not asked for."""
    return {} if owner.get("token_ids") is None else {name: owner["token_ids"]}


def _with_prompts(
    asked: dict[str, Any], samples: list[dict[str, Any]], prompts: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The samples of a completion that echoes its prompts, with the text and the log-probabilities of their prompts.

    Args:
        asked: The request's body. Where its max_tokens is 0 the prompts alone are the answer.
        samples: The samples.
        prompts: The prompts, of which each has as many samples.
    """
    given = asked["prompt"]
    texts = given if isinstance(given, list) and given and isinstance(given[0], str | list) else [given]
    echoed = []
    for index, sample in enumerate(samples):
        number = index * len(texts) // len(samples)
        text, positions = texts[number], prompts[number]["logprobs"] if len(prompts) == len(texts) else []
        if not isinstance(text, str):
            text = "".join(position["token"] for position in positions)
        if asked.get("max_tokens") == 0:
            sample = {**sample, "text": "", "logprobs": None if sample["logprobs"] is None else []}
        logprobs = None if sample["logprobs"] is None else [*positions, *sample["logprobs"]]
        echoed.append({**sample, "text": text + sample["text"], "logprobs": logprobs})
    return echoed


def _prompt_position(position: dict[str, Any]) -> dict[str, Any] | None:
    """A position of vLLM's prompt_logprobs: an object for each token id; None for the first token.

    `rank` is null for a token that is not among the most likely ones that were asked for.
    """
    if position["logprob"] is None:
        return None
    ranks = {token["token_id"]: rank for rank, token in enumerate(position["top"], 1)}
    return {
        str(token["token_id"]): {
            "logprob": _logprob(token),
            "rank": ranks.get(token["token_id"]),
            "decoded_token": token["token"],
        }
        for token in [position, *position["top"]]
    }


def _position(position: dict[str, Any]) -> dict[str, Any]:
    return {**_token(position), "top_logprobs": [_token(token) for token in position["top"]]}


def _token(token: dict[str, Any]) -> dict[str, Any]:
    # A token that is only part of a character shows as U+FFFD: its own bytes are not known here.
    text = token["token"]
    known = "\ufffd" not in text
    return {"token": text, "logprob": _logprob(token), "bytes": list(text.encode()) if known else None}


def _text_choice(index: int, sample: dict[str, Any]) -> dict[str, Any]:
    return {
        "index": index,
        "text": sample["text"],
        "logprobs": None if sample.get("logprobs") is None else _text_logprobs(sample["logprobs"]),
        "finish_reason": sample["finish_reason"],
    }


def _text_logprobs(positions: list[dict[str, Any]]) -> dict[str, Any]:
    tops: list[dict[str, float] | None] = []  # {token: logprob} of a position, its own token among them
    offsets, offset = [], 0
    for position in positions:
        ranked: dict[str, float] = {}
        for token in [*position["top"], position]:
            if (logprob := _logprob(token)) is not None:
                ranked.setdefault(token["token"], logprob)  # of tokens with one text the most likely
        tops.append(ranked or None)
        offsets.append(offset)
        offset += len(position["token"])
    return {
        "tokens": [position["token"] for position in positions],
        "token_logprobs": [_logprob(position) for position in positions],
        "top_logprobs": tops,
        "text_offset": offsets,
    }


def _logprob(token: dict[str, Any]) -> float | None:
    """A token's log-probability in JSON; None for the first token of a prompt."""
    return None if token["logprob"] is None else max(token["logprob"], _LOWEST_LOGPROB)
