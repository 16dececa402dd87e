"""Conversion of chat messages, in the forms that datasets use, to one form."""

from __future__ import annotations

from typing import Any

from batchgen.core.errors import RowError

# ShareGPT's names of those who speak, as roles.
_SHAREGPT_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "assistant", "model", "bard", "bing", "bot"), "assistant"),
    "system": "system",
    **dict.fromkeys(("tool", "function", "observation"), "tool"),
}


def normalize_messages(value: Any) -> list[dict[str, Any]]:
    """Convert chat messages to [{"role": ..., "content": text}].

    Text parts of a message's content are joined by newlines. ShareGPT's {"from", "value"} is accepted too: "human"
    becomes "user", "gpt" becomes "assistant".

    Raises:
        RowError: The value is not a non-empty list of such messages, or has content that a text model cannot take
            (images, tool calls).
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
    for name in ("tool_calls", "function_call"):
        if message.get(name):
            raise RowError(f"message {number} has {name}, which is not supported")
    if isinstance(content, list):
        content = "\n".join(_text_part(part, number) for part in content)
    if not isinstance(content, str):
        raise RowError(f"message {number} has no content" if content is None else f"message {number}: not text")
    return {"role": role, "content": content}


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
