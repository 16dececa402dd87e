"""Frozen values as bytes for another process, and back: JSON, with arrays behind it. Nothing that is read names code.

Only dataclasses and named tuples of a table are made, field by field. A value that occurs several times in a message is one value again.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np

_LENGTH = struct.Struct("<Q")
_DTYPES = ("bool", "int8", "uint8", "int32", "uint32", "int64", "uint64", "float32", "float64")
# In JSON a list is [_LIST, ...], and so on: what else there is are None, bool, int, float and str.
_LIST, _TUPLE, _MAPPING, _PATH, _ARRAY, _VALUE, _AGAIN = range(7)

Table = Mapping[str, type]  # of dataclasses and named tuples, by name


def table_of(*kinds: type) -> Table:
    """What a reader may make."""
    return {kind.__name__: kind for kind in kinds}


def encode(value: Any, table: Table) -> bytes:
    """Make a message of a value.

    Args:
        value: None, bool, int, float, str, paths, arrays, lists, tuples, mappings, and the kinds of the table, of such values.
        table: The kinds.

    Raises:
        TypeError: Something else is in it.
    """
    writer = _Writer(table)
    text = json.dumps(writer.plain(value)).encode()
    return b"".join([_LENGTH.pack(len(text)), text, *writer.arrays])


def decode(message: bytes, table: Table) -> Any:
    """Make the value of a message again.

    Args:
        message: As `encode` makes it, with the same table.
        table: The kinds.

    Raises:
        ValueError: It is no such message.
    """
    try:
        (length,) = _LENGTH.unpack_from(message)
        start = _LENGTH.size + length
        plain = json.loads(message[_LENGTH.size : start])
        return _Reader(table, memoryview(message)[start:]).value(plain)
    except (struct.error, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"no message of this version: {error}") from error


def _names(kind: Any) -> tuple[str, ...]:
    """The fields of a kind that its constructor takes, in order."""
    return tuple(f.name for f in fields(kind) if f.init) if is_dataclass(kind) else kind._fields


class _Writer:
    def __init__(self, table: Table) -> None:
        self._names = {kind: (name, _names(kind)) for name, kind in table.items()}
        self.arrays: list[bytes] = []
        self._known: dict[int, int] = {}  # id of a value: its number among those that may occur again
        self._kept: list[Any] = []  # while their ids are used

    def plain(self, value: Any) -> Any:
        """The value as JSON has it."""
        kind = type(value)
        if value is None or kind in (bool, int, float, str):
            return value
        if isinstance(value, np.generic) and value.dtype.name in _DTYPES:
            return value.item()
        if kind is list:
            return [_LIST, *map(self.plain, value)]
        if kind is tuple:
            return [_TUPLE, *map(self.plain, value)]
        if (number := self._known.get(id(value))) is not None:
            return [_AGAIN, number]
        made = self._made(value, kind)
        self._known[id(value)] = len(self._known)
        self._kept.append(value)
        return made

    def _made(self, value: Any, kind: type) -> list[Any]:
        if kind is np.ndarray and value.dtype.name in _DTYPES:
            self.arrays.append(value.tobytes())
            return [_ARRAY, value.dtype.name, *value.shape]
        if kind in self._names:
            name, names = self._names[kind]
            return [_VALUE, name, *[self.plain(getattr(value, field)) for field in names]]
        if isinstance(value, Mapping):
            return [_MAPPING, *[[self.plain(key), self.plain(inner)] for key, inner in value.items()]]
        if isinstance(value, Path):
            return [_PATH, str(value)]
        raise TypeError(f"{kind.__name__} is not sent to other processes")


class _Reader:
    def __init__(self, table: Table, arrays: memoryview) -> None:
        self._table = {name: (kind, len(_names(kind))) for name, kind in table.items()}
        self._arrays, self._position = arrays, 0
        self._known: list[Any] = []
        self._makers: dict[int, Callable[[list[Any]], Any]] = {
            _MAPPING: lambda parts: {self.value(key): self.value(inner) for key, inner in parts},
            _PATH: lambda parts: Path(parts[0]),
            _ARRAY: self._array,
            _VALUE: self._made,
        }

    def value(self, plain: Any) -> Any:
        """What `_Writer.plain` was given."""
        if type(plain) is not list:
            return plain
        tag, *parts = plain
        if tag == _LIST:
            return [self.value(part) for part in parts]
        if tag == _TUPLE:
            return tuple([self.value(part) for part in parts])
        if tag == _AGAIN:
            return self._known[parts[0]]
        made = self._makers[tag](parts)
        self._known.append(made)
        return made

    def _array(self, parts: list[Any]) -> np.ndarray:
        name, *shape = parts
        if name not in _DTYPES or not all(type(size) is int and size >= 0 for size in shape):
            raise ValueError(f"no array is of {name!r} {shape!r}")
        dtype = np.dtype(name)
        count = int(np.prod(shape, dtype=object))
        start, self._position = self._position, self._position + count * dtype.itemsize
        if self._position > len(self._arrays):
            raise ValueError("an array is longer than its message")
        array: np.ndarray = np.frombuffer(self._arrays[start : self._position], dtype=dtype).reshape(shape).copy()
        return array

    def _made(self, parts: list[Any]) -> Any:
        name, *values = parts
        kind, count = self._table[name]
        if len(values) != count:
            raise ValueError(f"{name} has {count} fields, not {len(values)}")
        return kind(*[self.value(value) for value in values])
