"""Repair of text for UTF-8 and for the terminal, and removal of credentials."""

from __future__ import annotations

import re
from typing import TypeVar

Nest = TypeVar("Nest")


class NotText(bytes):
    """A value of a text column whose bytes are not valid UTF-8; formatting it as text raises ValueError."""

    def __str__(self) -> str:
        raise ValueError("a value is bytes that are not UTF-8 text")

    __repr__ = __str__

    def __format__(self, spec: str) -> str:
        return str(self)


_HIDDEN = "***"
_CONTROLS = {"n": "\n", "t": "\t"}
_TYPED = re.compile(r"\\(\\*)([nt])")
# user:password@ of a URL. The latter may hold "/", as keys of S3 do, which a port cannot: it is followed by a path.
_USER_AND_PASSWORD = re.compile(r"(?<=://)(?:[^\s/@:]*:[^\s/]*|[^\s/@:]+:(?!\d+/)[^\s@]*)(?=@)")
_TOKEN = re.compile(r"(?<=https://)[^\s/@:]+(?=@)|(?<=http://)[^\s/@:]+(?=@)")
# The values of a URL's query: signatures and tokens, under names of each service's own.
_QUERY = re.compile(r"://\S*?[?#]\S*")
_QUERY_VALUE = re.compile(r"([?&#;][^\s=&/'\"]+=)([^\s&#'\"(),;\]]+)")


def without_credentials(text: str, *urls: str) -> str:
    """Replace keys, passwords, signatures and tokens of URLs in a text by ***.

    Args:
        text: Any text, such as a library's message that quotes a URL.
        urls: URLs whose credentials are replaced also where the text has them without the rest of the URL.
    """
    for url in urls:
        for secret in _secrets(url):
            text = text.replace(secret, _HIDDEN)
    if "://" not in text:
        return text
    text = _TOKEN.sub(_HIDDEN, _USER_AND_PASSWORD.sub(_HIDDEN, text))
    return _QUERY.sub(lambda found: _QUERY_VALUE.sub(rf"\1{_HIDDEN}", found[0]), text)


def _secrets(url: str) -> list[str]:
    """The credentials in a URL, the longest first."""
    found = [match[0] for pattern in (_USER_AND_PASSWORD, _TOKEN) for match in pattern.finditer(url)]
    found += [user_or_password for pair in found for user_or_password in pair.split(":", 1)]
    found += [value[2] for query in _QUERY.finditer(url) for value in _QUERY_VALUE.finditer(query[0])]
    least = 4  # shorter ones may be a part of any word
    return sorted((secret for secret in found if len(secret) >= least and secret != _HIDDEN), key=len, reverse=True)


def typed(text: str) -> str:
    r"""The text that somebody means who typed it on a command line: `\n` is a newline, `\t` a tab, `\\n` the text `\n`.

    Of several backslashes before the letter one is dropped. All other backslashes are text.
    """
    return _TYPED.sub(lambda match: match[1] + match[2] if match[1] else _CONTROLS[match[2]], text)


def as_typed(text: str) -> str:
    """The text that has to be typed on a command line so that `typed` gives a text."""
    escaped = re.sub(r"(\\+)(?=[nt])", r"\1\\", text)
    return re.sub(r"(?<!\\)[\n\t]", lambda match: "\\n" if match[0] == "\n" else "\\t", escaped)


def repair_surrogates(value: Nest) -> Nest:
    r"""Replace lone surrogates by U+FFFD in a text, or in every text of nested lists, tuples and dicts.

    A lone surrogate is half of a surrogate pair ("\ud800" in JSON), as in a text that was cut in the middle of a
    character. It has no UTF-8 form. Two halves that follow each other become the one character that they stand for.

    Args:
        value: A text, or nested lists, tuples and dicts, whose keys are repaired too. Other values stay unchanged.

    Returns:
        A copy of the value in which every text can be encoded as UTF-8.
    """
    return _repaired(value)  # type: ignore[return-value]  # a nest of the same types, which mypy cannot express


def visible(text: str, *, lines: bool = False) -> str:
    r"""Replace the characters of a text that would control a terminal or the layout of a page by visible escapes.

    Control characters, marks of the writing direction, line separators and lone surrogates become escapes such as
    `\x1b` or `\u202e`. A tab stays. JSON text on one line stays valid JSON.

    Args:
        text: Any text.
        lines: True where line breaks stay; False where they are replaced too.
    """
    shown = text.translate(_SHOWN_IN_LINES if lines else _SHOWN)
    return shown.encode("utf-8", "backslashreplace").decode("utf-8")


_ACTING = (
    *range(0x20), *range(0x7F, 0xA0), 0x061C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A),
)  # fmt: skip
_NAMED = {ord("\n"): "\\n", ord("\r"): "\\r"}
_SHOWN = {
    code: _NAMED.get(code, f"\\x{code:02x}" if code < 0x20 else f"\\u{code:04x}")
    for code in _ACTING
    if code != ord("\t")
}
_SHOWN_IN_LINES = {code: shown for code, shown in _SHOWN.items() if code != ord("\n")}


def _repaired(value: object) -> object:
    if isinstance(value, str):
        return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    if isinstance(value, list):
        return [_repaired(v) for v in value]
    if isinstance(value, tuple):
        return tuple(_repaired(v) for v in value)
    if isinstance(value, dict):
        return {_repaired(k): _repaired(v) for k, v in value.items()}
    return value
