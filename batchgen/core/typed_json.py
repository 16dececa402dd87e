"""Frozen dataclasses from JSON values, checked against the declared types of their fields."""

from __future__ import annotations

import contextlib
import json
import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

MOST_NESTED = 300  # lists and objects within each other, in a row of JSON
_LARGEST = 2**53  # of integers: what JSON readers and floating point agree on


def parse_json(text: str | bytes, object_pairs_hook: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """Parse JSON like `json.loads`, but raise only ValueError, even where values are nested too deeply."""
    try:
        return json.loads(text, object_pairs_hook=object_pairs_hook)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def check_nesting(value: Any, text: str | bytes) -> None:
    """Check that a decoded JSON value is not nested too deeply to be read and written anywhere in the program.

    Python's own limit is that of its stack: it lets a value pass in one place, and not in another.

    Args:
        value: The decoded JSON value.
        text: The JSON text, in which few brackets make a look at the value needless.

    Raises:
        ValueError: More than `MOST_NESTED` lists and objects are within each other.
    """
    opening = ("[", "{") if isinstance(text, str) else (b"[", b"{")
    if sum(map(text.count, opening)) <= MOST_NESTED:  # type: ignore[arg-type]  # of the text's own type
        return
    level = [value]
    for _ in range(MOST_NESTED):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, (dict, list))
        ]
        if not level:
            return
    raise ValueError(f"it is nested too deeply: {MOST_NESTED} lists and objects within each other are the most")


def read_typed(kind: Any, value: Any, where: str = "it") -> Any:
    """Convert a decoded JSON value to a Python type.

    Args:
        kind: The type: bool, int, float (finite), str, a Literal of texts, a dataclass, `Mapping[K, V]`, `tuple[...]`,
            a union, or `Any`.
        value: The decoded JSON value, with dictionaries for dataclasses and lists for tuples.
        where: Name of the value in error messages.

    Raises:
        ValueError: The value does not have the type. The message names the place in the value.
    """
    if kind is Any:
        return value
    if get_origin(kind) in (Union, types.UnionType):
        if value is None and type(None) in get_args(kind):
            return None
        *others, kind = (k for k in get_args(kind) if k is not type(None))
        for other in others:
            with contextlib.suppress(ValueError):
                return read_typed(other, value, where)
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise ValueError(f"{where} must be one of {', '.join(get_args(kind))}, not {_short(value)}")
        return value
    if is_dataclass(kind):
        return _dataclass(kind, value, where)
    if get_origin(kind) is tuple:
        return _tuple(get_args(kind), value, where)
    if get_origin(kind) is not None and issubclass(get_origin(kind), Mapping):
        _is(dict, value, where, "an object")
        key_kind, inner = get_args(kind)
        return {
            read_typed(key_kind, k, f"a name in {where}"): read_typed(inner, v, f"{where}.{k}")
            for k, v in value.items()
        }
    return _scalar(kind, value, where)


def _is(kind: type, value: Any, where: str, called: str) -> None:
    if not isinstance(value, kind):
        raise ValueError(f"{where} must be {called}, not {_short(value)}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _scalar(kind: Any, value: Any, where: str) -> Any:
    if kind is float:
        if type(value) not in (int, float) or not abs(value) <= 1e300:  # of NaN, too
            raise ValueError(f"{where} must be a number, not {_short(value)}")
        return float(value)
    called = {int: "a whole number", str: "a text", bool: "true or false"}[kind]
    is_of_kind = isinstance(value, str) if kind is str else type(value) is kind  # an enum's member may be a text
    if not is_of_kind or (kind is int and abs(value) > _LARGEST):
        raise ValueError(f"{where} must be {called}, not {_short(value)}")
    return str(value) if kind is str else value


def _tuple(kinds: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    _is(list | tuple, value, where, "a list")  # type: ignore[arg-type]
    if kinds[-1] is Ellipsis:
        kinds = (kinds[0],) * len(value)
    if len(kinds) != len(value):
        raise ValueError(f"{where} must have {len(kinds)} values, not {len(value)}")
    return tuple(read_typed(k, v, f"{where}[{i}]") for i, (k, v) in enumerate(zip(kinds, value, strict=True)))


def _dataclass(kind: Any, value: Any, where: str) -> Any:
    _is(dict, value, where, "an object")
    hints, own = get_type_hints(kind), {f.name: f for f in fields(kind) if f.init}
    if unknown := sorted(set(map(str, value)) - set(own)):
        raise ValueError(f"{where} has no field {unknown[0]!r}")
    required = (f.name for f in own.values() if f.default is MISSING and f.default_factory is MISSING)
    if missing := [name for name in required if name not in value]:
        raise ValueError(f"{where} lacks {missing[0]!r}")
    return kind(**{name: read_typed(hints[name], inner, f"{where}.{name}") for name, inner in value.items()})
