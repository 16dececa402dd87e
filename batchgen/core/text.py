"""Text that UTF-8 can hold."""

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
