"""Text that UTF-8 can hold, and text as it is shown."""

from __future__ import annotations

from typing import TypeVar

Nest = TypeVar("Nest")


def repair_surrogates(value: Nest) -> Nest:
    """Replace lone surrogates by U+FFFD in a text, or in every text of nested lists, tuples and dicts.

    Half of a surrogate pair, as texts that were cut in the middle have ("\\ud800" in JSON), is no character and has no
    UTF-8 form. Two halves that follow each other become the one character they stand for.

    Args:
        value: a text, or a nest of lists, tuples and dicts (keys included); anything else in it stays as it is.

    Returns:
        The same nest; every text in it can be encoded.
    """
    return _repaired(value)  # type: ignore[return-value]  # a nest of the same types, which mypy cannot express


def visible(text: str, *, lines: bool = False) -> str:
    """Text as it may be shown on a terminal or a page, whoever has written it: what would act there is spelled out.

    Control characters (escape sequences begin with one), the marks that turn the direction of writing, separators of lines and
    lone surrogates become `\\x1b` or `\\u202e`; a tab stays. In a text of JSON these are JSON's own escapes.

    Args:
        text: Any text.
        lines: Whether line breaks stay; else they are spelled out too.
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
