"""Streaming reader for a JSON array of any length: one element after the other."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, TextIO

from batchgen.core.text import repair_surrogates
from batchgen.core.typed_json import check_nesting

_BLOCK_CHARS = 1 << 20
# A token that the end of what is held may have cut, such as half of an escaped surrogate pair, is no longer.
_TOKEN_CHARS = 12
_BLANKS = " \t\r\n"


def array_elements(text: TextIO, block_chars: int = _BLOCK_CHARS) -> Iterator[Any]:
    """Yield the elements of a text that is one JSON array. Memory holds about one element and one block of text.

    Args:
        text: The text, open for reading.
        block_chars: Characters that are read at a time.

    Raises:
        ValueError: The text is not an array, its JSON is not valid, or the array is followed by more text.
        RecursionError: An element is nested too deeply.
    """
    window = _Window(text, block_chars)
    if window.next_char() != "[":
        raise ValueError("it is no array")
    window.at += 1
    if window.next_char() == "]":
        window.at += 1
    else:
        while True:
            yield window.value()
            closing = window.next_char()
            window.at += 1
            if closing == "]":
                break
            if closing != ",":
                raise ValueError("it ends in the middle" if not closing else f"{closing!r} where ',' or ']' should be")
    if window.next_char():
        raise ValueError("more follows after the end of the array")


class _Window:
    """The part of a text that is in memory.

    Attributes:
        at: Position in this part at which the unread text begins.
    """

    def __init__(self, text: TextIO, block_chars: int) -> None:
        self.at = 0
        self._text, self._block_chars, self._held = text, block_chars, ""

    def next_char(self) -> str:
        """The next character that is not whitespace, without reading past it; "" at the end of the text."""
        while True:
            while self.at < len(self._held):
                if self._held[self.at] not in _BLANKS:
                    return self._held[self.at]
                self.at += 1
            if not self._read_on():
                return ""

    def value(self) -> Any:
        """Read one JSON value. Raises ValueError."""
        self.next_char()
        while True:
            try:
                value, end = json.JSONDecoder().raw_decode(self._held, self.at)
            except json.JSONDecodeError as error:
                cut = error.msg.startswith("Unterminated string") or error.pos >= len(self._held) - _TOKEN_CHARS
                if cut and self._read_on():
                    continue
                raise ValueError(error.msg) from error
            if end == len(self._held) and self._read_on():  # a number may go on
                continue
            source = self._held[self.at : end]
            check_nesting(value, source)
            value = repair_surrogates(value) if "\\u" in source else value
            self.at = end
            return value

    def _read_on(self) -> bool:
        """Drop the text that was read and load more; True where there was more."""
        rest = self._held[self.at :]
        more = self._text.read(max(self._block_chars, len(rest)))  # twice as much: long values are tried a few times
        self._held, self.at = rest + more, 0
        return bool(more)
