"""Conversion of chat messages, in the forms that datasets use, to one form."""

from __future__ import annotations

import json
from typing import Any

from batchgen.core.errors import RowError, one_line

# ShareGPT's names of those who speak, as roles.
_SHAREGPT_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "assistant", "model", "bard", "bing", "bot"), "assistant"),
    "system": "system",
    **dict.fromkeys(("tool", "function", "observation"), "tool"),
}


def normalize_messages(value: Any) -> list[dict[str, Any]]:
    """Convert chat messages to [{"role": ..., "content": text}].

    Calls of tools and their results keep `tool_calls`, `tool_call_id` and `name`; the content of a message with calls
    may be None. Arguments of a call that are JSON text become objects, as chat templates expect them.

    Text parts of a message's content are joined by newlines. ShareGPT's {"from", "value"} is accepted too: "human"
    becomes "user", "gpt" becomes "assistant".

    Raises:
        RowError: The value is not a non-empty list of such messages, or has content that a text model cannot take, such
            as images.
    """
    if not isinstance(value, list) or not value:
        raise RowError("messages are not a list of {role, content} objects, or it is empty")
    return [_normalize_message(message, number) for number, message in enumerate(value, 1)]


def _normalize_message(message: Any, number: int) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise RowError(f"message {number} is not a {{role, content}} object")
    if message.get("role") is None and message.get("from") is not None:
        message = _of_sharegpt(message, number)
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise RowError(f"message {number} has no role")
    if message.get("function_call"):
        raise RowError(f"message {number} has function_call, which is not supported: give tool_calls")
    more = {name: message[name] for name in ("tool_call_id", "name") if message.get(name) is not None}
    if message.get("tool_calls"):
        more["tool_calls"] = _tool_calls(message["tool_calls"], number)
    if isinstance(content, list):
        content = "\n".join(_text_part(part, number) for part in content)
    if not isinstance(content, str) and (content is not None or "tool_calls" not in more):
        raise RowError(f"message {number} has no content" if content is None else f"message {number}: not text")
    return {"role": role, "content": content, **more}


def normalize_tools(value: Any, what: str) -> list[dict[str, Any]] | None:
    """Convert tools to a list of objects, as chat templates take them; None: there are none.

    Args:
        value: A list of JSON schemas of tools, or JSON text of such a list or of its items.
        what: Noun phrase that names the tools in messages.

    Raises:
        RowError: The value is no such list.
    """
    tools = _parsed(value, what)
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list):
        raise RowError(f"{what} must be a list of tools, each a JSON object")
    tools = [_parsed(tool, what) for tool in tools]
    if not all(isinstance(tool, dict) for tool in tools):
        raise RowError(f"{what} must be a list of tools, each a JSON object")
    return tools


def without_nulls(value: Any) -> Any:
    """A value without nulls in its objects: structs of Arrow have the fields of all rows."""
    if isinstance(value, dict):
        return {name: without_nulls(item) for name, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def _parsed(value: Any, what: str) -> Any:
    """The value of a JSON text; other values as they are. Raises RowError."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise RowError(f"{what} is not valid JSON: {one_line(error)}") from error


def _tool_calls(value: Any, number: int) -> list[dict[str, Any]]:
    """The calls of tools of a message, each with its arguments as an object where they are one. Raises RowError."""
    what = f"tool_calls of message {number}"
    calls = _parsed(value, what)
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise RowError(f"{what} must be a list of objects")
    return [_tool_call(call, what) for call in calls]


def _tool_call(call: dict[str, Any], what: str) -> dict[str, Any]:
    function = call.get("function", call)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RowError(f"{what} must name a function each")
    arguments = function.get("arguments")
    if isinstance(arguments, str) and arguments.lstrip().startswith("{"):
        function = {**function, "arguments": _parsed(arguments, f"arguments in {what}")}
    return {**call, "function": function} if "function" in call else function


def _of_sharegpt(message: dict[str, Any], number: int) -> dict[str, Any]:
    speaker = message["from"]
    role = _SHAREGPT_ROLES.get(speaker.lower()) if isinstance(speaker, str) else None
    if role is None:
        raise RowError(
            f"message {number} is from {speaker!r}, which is none of {', '.join(_SHAREGPT_ROLES)}, ShareGPT's names"
        )
    return {"role": role, "content": message.get("value")}


def _text_part(part: Any, number: int) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    text = part.get("text") if kind == "text" else None
    if not isinstance(text, str):
        raise RowError(f"message {number} has a part of type {kind!r}: only text parts are supported")
    return text
