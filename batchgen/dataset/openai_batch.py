"""OpenAI batch files as input: each line becomes a `Request`.

Bodies of /v1/chat/completions and /v1/completions are read, with vLLM's additional parameters, and those of
/v1/embeddings by jobs that embed texts. A parameter that would change the result and is not supported fails its row
with a message that names it. No parameter is ignored silently.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa

from batchgen.core.errors import InputError, RowError, one_line
from batchgen.core.request import MOST_SAMPLES, PLAIN_CHAT, ChatOptions, Request, SamplingParams
from batchgen.dataset.bad_lines import bad_lines
from batchgen.dataset.messages import normalize_messages, normalize_tools

COLUMNS = ("custom_id", "method", "url", "body")
CHAT_URL = "/v1/chat/completions"
COMPLETIONS_URL = "/v1/completions"
EMBEDDINGS_URL = "/v1/embeddings"

# vLLM's names of what a text must follow, and those of `SamplingParams`.
VLLM_GRAMMARS = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "grammar"}
# Parameters that say nothing about the answer.
_IGNORED = {
    *("model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
    *("prompt_cache_retention", "parallel_tool_calls", "stream_options", "priority", "request_id"),
}
# Parameters that are not supported, and the values with which they ask for nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "tools": ([],),  # of a completion
    "tool_choice": ("none", "auto"),  # of a chat also a function: see forced_function
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "stream": (False,),
    "suffix": ("",),
    "min_tokens": (0,),
    "use_beam_search": (False,),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
}


def line_to_row(line: dict[str, Any]) -> dict[str, str | None]:
    """Convert the JSON object of a line to the columns `COLUMNS`; the body becomes JSON text.

    A value is None where it is missing, or is not a string.
    """
    row = {name: line.get(name) if isinstance(line.get(name), str) else None for name in COLUMNS}
    body = line.get("body")
    return {**row, "body": None if body is None else json.dumps(body, ensure_ascii=False)}


def rows_to_requests(
    batch: pa.RecordBatch,
    first_row: int,
    sampling: SamplingParams,
    duplicate_rows: frozenset[int] = frozenset(),
    chat: ChatOptions = PLAIN_CHAT,
) -> Iterator[Request]:
    """Yield one Request per row of a batch of OpenAI batch lines.

    Args:
        batch: Rows with the columns `COLUMNS`.
        first_row: Index of the batch's first row in the input.
        sampling: Parameters that give `max_tokens` and `seed` where a body has none. All other parameters default to
            OpenAI's values (temperature 1).
        duplicate_rows: Indices of rows that fail because an earlier row has the same custom_id.
        chat: Variables for the chat template; those in a body override them.
    """
    bad = bad_lines(batch)
    for index, row in enumerate(batch.select(list(COLUMNS)).to_pylist(), first_row):
        row_id = index if row["custom_id"] is None else row["custom_id"]
        if index in bad:
            yield Request("", sampling, row_id, error=bad[index])
            continue
        try:
            if index in duplicate_rows:
                raise RowError(f"custom_id {row['custom_id']!r} is on an earlier line too")
            (prompt, *more), own_sampling, own_chat = parse_row(row, sampling, chat)
            yield Request(
                prompt,
                own_sampling,
                row_id,
                more_prompts=tuple(more),
                chat=own_chat,
                reasoning_apart=row["url"] == CHAT_URL,  # a completion has no place for it
            )
        except RowError as error:
            yield Request("", sampling, row_id, error=one_line(error))


def rows_to_embed(
    batch: pa.RecordBatch, first_row: int, duplicate_rows: frozenset[int] = frozenset()
) -> Iterator[Request]:
    """Yield one Request per row of a batch of OpenAI batch lines for /v1/embeddings; it has a prompt for each input.

    Args:
        batch: Rows with the columns `COLUMNS`.
        first_row: Index of the batch's first row in the input.
        duplicate_rows: Indices of rows that fail because an earlier row has the same custom_id.
    """
    bad = bad_lines(batch)
    for index, row in enumerate(batch.select(list(COLUMNS)).to_pylist(), first_row):
        row_id = index if row["custom_id"] is None else row["custom_id"]
        try:
            if index in bad:
                raise RowError(bad[index])
            if index in duplicate_rows:
                raise RowError(f"custom_id {row['custom_id']!r} is on an earlier line too")
            prompt, *more = _inputs(_body_of(row, EMBEDDINGS_URL))
            yield Request(prompt, None, row_id, more_prompts=tuple(more))
        except RowError as error:
            yield Request("", None, row_id, error=one_line(error))


def _inputs(body: dict[str, Any]) -> list[Any]:
    """The texts or token ids that a body for /v1/embeddings asks the embeddings of. Raises RowError."""
    fields = {name: value for name, value in body.items() if value is not None}
    if "input" not in fields:
        raise RowError("input is missing")
    inputs = _prompts(fields.pop("input"), "input")
    _take(fields, "encoding_format", lambda value: value in ("float", "base64"), "float or base64")
    _take(fields, "dimensions", lambda value: _is_int(value) and value > 0, "a number above 0")
    _refuse_others(fields)
    return inputs


def parse_row(
    row: dict[str, str | None], sampling: SamplingParams, chat: ChatOptions
) -> tuple[list[Any], SamplingParams, ChatOptions]:
    """Parse a row with the columns `COLUMNS`. Raises RowError, which names the invalid field.

    Args:
        row: Values by column.
        sampling: Parameters that give `max_tokens` and `seed` where the body has none.
        chat: Variables for the chat template; those in the body override them.

    Returns:
        The prompts, the sampling parameters, and the options for rendering chat messages.
    """
    body = _body_of(row, CHAT_URL, COMPLETIONS_URL)
    own_chat = _chat_options(body, chat) if row["url"] == CHAT_URL else PLAIN_CHAT
    return *parse_body(str(row["url"]), body, sampling), own_chat


def _body_of(row: dict[str, str | None], *urls: str) -> dict[str, Any]:
    """The decoded body of a row that asks for one of some endpoints. Raises RowError."""
    if not row["custom_id"]:
        raise RowError("custom_id is missing or not a string")
    if row["method"] != "POST":
        raise RowError(f"method must be POST, not {row['method']!r}")
    if row["url"] not in urls:
        other = "" if row["url"] != EMBEDDINGS_URL else ": batchgen run --task embed is for it"
        raise RowError(f"url must be {' or '.join(urls)}, not {row['url']!r}{other}")
    if row["body"] is None:
        raise RowError("body is missing")
    body = json.loads(row["body"])
    if not isinstance(body, dict):
        raise RowError("body is not a JSON object")
    return body


def parse_body(url: str, body: dict[str, Any], sampling: SamplingParams) -> tuple[list[Any], SamplingParams]:
    """Parse the body of a request. Raises RowError, which names the invalid field.

    Args:
        url: The request's endpoint, such as "/v1/completions".
        body: The decoded JSON body.
        sampling: Parameters that give `max_tokens` and `seed` where the body has none.

    Returns:
        The prompts (texts, lists of token ids, or one list of chat messages), and the sampling parameters.
    """
    chat = url == CHAT_URL
    of_chat = _OF_CHAT if chat else ()
    fields = {name: value for name, value in body.items() if value is not None and name not in of_chat}
    if chat:
        _take(fields, "prompt", lambda _: False, "absent: this url takes messages")
        if "messages" not in fields:
            raise RowError("messages is missing")
        prompts: list[Any] = [normalize_messages(fields.pop("messages"))]
    else:
        _take(fields, "messages", lambda _: False, "absent: this url takes a prompt")
        if "prompt" not in fields:
            raise RowError("prompt is missing")
        prompts = _prompts(fields.pop("prompt"), "prompt")
    max_tokens = _take(fields, "max_tokens", _is_int, "an integer", sampling.max_tokens)
    echo = not chat and _take(fields, "echo", _is_bool, "true or false", False)
    if echo and max_tokens == 0:  # the prompt alone is the answer: what is generated is left out of it
        max_tokens = 1
    if chat:
        _take(fields, "echo", lambda value: value is False, "false: a chat has no text before its answer")
        max_tokens = _take(fields, "max_completion_tokens", _is_int, "an integer", max_tokens)
    n = _take(fields, "n", _is_int, "an integer", 1)
    _take(fields, "best_of", lambda value: value == n, f"equal to n ({n}): choosing the best is not supported")
    stop = _take(fields, "stop", _is_stop, "a string or a list of strings", [])
    logprobs = _chat_logprobs(fields) if chat else _take(fields, "logprobs", _is_int, "an integer")
    prompt_logprobs = _take(fields, "prompt_logprobs", _is_int, "an integer")
    if echo and prompt_logprobs is None:  # of token ids it has the texts
        prompt_logprobs = logprobs if logprobs is not None or all(isinstance(p, str) for p in prompts) else 0
    values = {
        "max_tokens": max_tokens,
        "n": n,
        "temperature": _take(fields, "temperature", _is_number, "a number", 1.0),
        "top_p": _take(fields, "top_p", _is_number, "a number", 1.0),
        "top_k": _take(fields, "top_k", _is_int, "an integer", 0),
        "min_p": _take(fields, "min_p", _is_number, "a number", 0.0),
        "repetition_penalty": _take(fields, "repetition_penalty", _is_number, "a number", 1.0),
        "presence_penalty": _take(fields, "presence_penalty", _is_number, "a number", 0.0),
        "frequency_penalty": _take(fields, "frequency_penalty", _is_number, "a number", 0.0),
        "logit_bias": _take(fields, "logit_bias", _is_bias, "an object of token ids and numbers", {}),
        "stop": stop,
        "stop_token_ids": _take(fields, "stop_token_ids", _is_token_ids, "a list of token ids", []),
        "ignore_eos": _take(fields, "ignore_eos", _is_bool, "true or false", False),
        "seed": _take(fields, "seed", _is_int, "an integer", sampling.seed),
        "logprobs": logprobs,
        "prompt_logprobs": prompt_logprobs,
        **_grammar(fields, _forced_parameters(body) if chat else None),
    }
    _refuse_others(fields)
    try:
        own = SamplingParams(**values)
    except InputError as error:
        raise RowError(str(error)) from error
    if len(prompts) * n > MOST_SAMPLES:
        raise RowError(f"{len(prompts)} prompts with n = {n} are more than {MOST_SAMPLES} samples: split the line")
    return prompts, own


# Fields of chats that say how their messages become a prompt.
_OF_CHAT = ("chat_template_kwargs", "reasoning_effort", "continue_final_message", "add_generation_prompt", "tools")


def forced_function(body: dict[str, Any]) -> dict[str, Any] | None:
    """The function of `tools` that a chat's `tool_choice` asks the model to call, as OpenAI describes it.

    It is the named one, or with "required" the only one.

    Args:
        body: The decoded JSON body.

    Returns:
        The object of the function, with its "name" and perhaps "parameters"; None where none has to be called.

    Raises:
        RowError: There is no such function, or several functions and none is named.
    """
    choice = body.get("tool_choice")
    if choice in (None, "none", "auto"):
        return None
    tools = normalize_tools(body.get("tools"), "tools") or []
    functions: list[dict[str, Any]] = [tool["function"] for tool in tools if isinstance(tool.get("function"), dict)]
    if choice == "required":
        if len(functions) != 1:
            raise RowError(f"tool_choice = required is not supported with {len(functions)} functions: name one")
        return functions[0]
    asked = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = asked.get("name") if isinstance(asked, dict) else None
    named = [function for function in functions if name is not None and function.get("name") == name]
    if not named:
        raise RowError("tool_choice must be none, auto, required or the name of a function in tools")
    return named[0]


def _forced_parameters(body: dict[str, Any]) -> dict[str, Any] | None:
    """The JSON schema of the arguments of the function that has to be called; None: none has to be. Raises RowError."""
    function = forced_function(body)
    if function is None:
        return None
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    if not isinstance(parameters, dict):
        raise RowError("parameters of a function in tools must be a JSON schema")
    return parameters


def _chat_options(body: dict[str, Any], given: ChatOptions) -> ChatOptions:
    """The options for rendering a body's chat messages. Raises RowError.

    Args:
        body: The decoded JSON body.
        given: The job's options, which variables in the body override.
    """
    fields = {name: body[name] for name in _OF_CHAT if body.get(name) is not None}
    continues = _take(fields, "continue_final_message", _is_bool, "true or false", False)
    if _take(fields, "add_generation_prompt", _is_bool, "true or false", not continues) is continues:
        raise RowError(
            "add_generation_prompt must be the opposite of continue_final_message: a prompt ends in the assistant's"
            " last"
            " message, or where the next one begins"
        )
    messages = body.get("messages")
    if continues and isinstance(messages, list) and messages and _role(messages[-1]) != "assistant":
        raise RowError("continue_final_message needs a last message of the role assistant")
    own = _take(fields, "chat_template_kwargs", _is_object, "an object", {})
    effort = _take(fields, "reasoning_effort", _is_text, "a string")
    own = {**given.variables, **({} if effort is None else {"reasoning_effort": effort}), **own}
    try:
        return ChatOptions(own, continues, normalize_tools(fields.get("tools"), "tools"))
    except InputError as error:
        raise RowError(str(error)) from error


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, dict) else None


def _take(fields: dict[str, Any], name: str, valid: Callable[[Any], bool], rule: str, default: Any = None) -> Any:
    """Remove a field from a body and return its value, or the default where it is missing. Raises RowError.

    Args:
        fields: The body's remaining fields.
        name: Name of the field.
        valid: The function that says whether a value is valid.
        rule: A text for the error message that says which values are valid.
        default: The value of a missing field.
    """
    if name not in fields:
        return default
    value = fields.pop(name)
    if not valid(value):
        raise RowError(f"{name} must be {rule}, not {one_line(json.dumps(value, ensure_ascii=False))}")
    return value


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_stop(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(v, str) for v in value))


def _is_token_ids(value: Any) -> bool:
    return isinstance(value, list) and all(_is_int(v) and v >= 0 for v in value)


def _is_bias(value: Any) -> bool:
    return isinstance(value, dict) and all(k.isdecimal() and _is_number(v) for k, v in value.items())


def _prompts(given: Any, name: str) -> list[str | list[int]]:
    """The prompts in a field of a body: texts or lists of token ids, given as one prompt or as a list of prompts."""
    several = isinstance(given, list) and bool(given) and isinstance(given[0], (str, list))
    prompts: list[Any] = given if several else [given]
    for prompt in prompts:
        if not isinstance(prompt, str) and not _is_token_ids(prompt):
            raise RowError(f"{name} must be a string or a list of token ids, or a list of these")
        if not prompt:
            raise RowError(f"the {name} is empty")
    return prompts


def _chat_logprobs(fields: dict[str, Any]) -> int | None:
    wanted = _take(fields, "logprobs", _is_bool, "true or false", False)
    top = _take(fields, "top_logprobs", _is_int, "an integer", 0)
    if top and not wanted:
        raise RowError("top_logprobs needs logprobs to be true")
    return top if wanted else None


def _grammar(fields: dict[str, Any], forced: dict[str, Any] | None) -> dict[str, Any]:
    """The grammar of a body, from OpenAI's response_format or vLLM's structured_outputs or guided_json and the like.

    Args:
        fields: The body's remaining fields.
        forced: The JSON schema of the arguments of a function that has to be called; None: none has to be.
    """
    if forced is not None:
        fields.pop("tool_choice")
    wanted = _take(fields, "response_format", _is_response_format, "of type text, json_object or json_schema", {})
    rule = f"an object with one of {', '.join(VLLM_GRAMMARS)}"
    structured = _take(fields, "structured_outputs", _is_structured_outputs, rule, {})
    guided = {key: fields.pop(name) for key in VLLM_GRAMMARS if (name := f"guided_{key}") in fields}
    ways = {
        "response_format": {"json": _schema_of(wanted)} if wanted.get("type", "text") != "text" else {},
        "structured_outputs": structured,
        "guided_json and the like": guided,
        "tool_choice": {} if forced is None else {"json": forced},
    }
    given = [way for way, values in ways.items() if values]
    if len(given) > 1:
        raise RowError(f"{' and '.join(given)} exclude each other")
    values = {key: value for way in given for key, value in ways[way].items()}
    for key, value in values.items():
        if not _is_grammar(key, value):
            raise RowError(f"{given[0]}: {key} must be {'a list of texts' if key == 'choice' else 'a text'}")
    return {VLLM_GRAMMARS[key]: value for key, value in values.items()}


def _schema_of(wanted: dict[str, Any]) -> dict[str, Any]:
    """The JSON schema of a response_format that asks for JSON."""
    schema: dict[str, Any] = {"type": "object"} if wanted["type"] == "json_object" else wanted["json_schema"]["schema"]
    return schema


def _is_grammar(key: str, value: Any) -> bool:
    """Tell whether a value of `VLLM_GRAMMARS` has the right type."""
    if key == "choice":
        return isinstance(value, list) and bool(value) and all(isinstance(text, str) for text in value)
    return isinstance(value, str) or (key == "json" and isinstance(value, dict))


def _is_response_format(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    schema = value.get("json_schema")
    has_schema = isinstance(schema, dict) and isinstance(schema.get("schema"), dict)
    return value.get("type") in ("text", "json_object") or (value.get("type") == "json_schema" and has_schema)


def _is_structured_outputs(value: Any) -> bool:
    return isinstance(value, dict) and len(value) == 1 and set(value) <= set(VLLM_GRAMMARS)


def _refuse_others(fields: dict[str, Any]) -> None:
    for name, value in fields.items():
        if name not in _IGNORED and value not in _NEUTRAL.get(name, ()):
            known = name in _NEUTRAL
            value_text = one_line(json.dumps(value, ensure_ascii=False))[:80]
            raise RowError(f"{name} = {value_text} is not supported" if known else f"{name} is not supported")
