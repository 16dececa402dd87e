"""Serialization of frozen values for another process: JSON followed by arrays, without names of code as in pickle.

Only the dataclasses, named tuples and enums of a given table are created, field by field. An object that occurs several
times in a message is one object again after decoding.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np

from batchgen.core.frames import LENGTH, framed

_DTYPES = ("bool", "int8", "uint8", "int32", "uint32", "int64", "uint64", "float32", "float64")
# In JSON a list is [_LIST, ...], and so on: what else there is are None, bool, int, float and str.
_LIST, _TUPLE, _MAPPING, _PATH, _ARRAY, _VALUE, _AGAIN, _ARRAYS, _COLUMNS = range(9)
_PLAIN = frozenset({type(None), bool, int, float, str})
_FEWEST_OF_A_KIND = (
    3  # from so many on, values of one kind in a list are said field by field, which is some four times as fast
)

Table = Mapping[str, type]  # of dataclasses, named tuples and enums, by name


def table_of(*kinds: type) -> Table:
    """The table of dataclasses, named tuples and enums that a message may contain, by name."""
    return {kind.__name__: kind for kind in kinds}


def encode(value: Any, table: Table) -> bytes:
    """Serialize a value into a message.

    Args:
        value: None, bool, int, float, str, a path, an array, a list, a tuple, a mapping, or an instance of a type of
            the table.
        table: The types of objects that are allowed.

    Raises:
        TypeError: The value contains an object of another type.
    """
    writer = _Writer(table)
    text = json.dumps(writer.plain(value)).encode()
    return b"".join([framed(text), *writer.arrays])


def decode(message: bytes, table: Table) -> Any:
    """Deserialize the value of a message.

    Args:
        message: Bytes that `encode` has returned, with the same table.
        table: The types of objects that are allowed.

    Raises:
        ValueError: The bytes are not a valid message.
    """
    try:
        (length,) = LENGTH.unpack_from(message)
        start = LENGTH.size + length
        plain = json.loads(message[LENGTH.size : start])
        return _Reader(table, memoryview(message)[start:]).value(plain)
    except (struct.error, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"no message of this version: {error}") from error


def _names(kind: Any) -> tuple[str, ...]:
    """The names of a type's fields that its constructor takes, in order."""
    if issubclass(kind, Enum):
        return ("value",)
    return tuple(f.name for f in fields(kind) if f.init) if is_dataclass(kind) else kind._fields


class _Writer:
    def __init__(self, table: Table) -> None:
        self._names = {kind: (name, _names(kind)) for name, kind in table.items()}
        self.arrays: list[bytes] = []
        self._known: dict[int, int] = {}  # id of a value: its number among those that may occur again
        self._kept: list[Any] = []  # while their ids are used

    def plain(self, value: Any) -> Any:
        """Convert a value to a JSON value; arrays are collected apart."""
        kind = type(value)
        if value is None or kind in (bool, int, float, str):
            return value
        if isinstance(value, np.generic) and value.dtype.name in _DTYPES:
            return value.item()
        if kind is list or kind is tuple:
            return [_LIST if kind is list else _TUPLE, *self._items(value)]
        if (number := self._known.get(id(value))) is not None:
            return [_AGAIN, number]
        made = self._made(value, kind)
        self._note(value)
        return made

    def _note(self, value: Any) -> None:
        """Assign the next number to a value, under which later occurrences refer to it.

        The values inside of it have their numbers already. The reader assigns the same numbers.
        """
        self._known[id(value)] = len(self._kept)
        self._kept.append(value)

    def _items(self, values: Sequence[Any]) -> Iterable[Any]:
        """Convert the items of a list or tuple to JSON values; items of one type are written by field (`_columns`)."""
        kinds = set(map(type, values))
        if kinds <= _PLAIN:
            return values
        if len(values) < _FEWEST_OF_A_KIND or len(kinds) > 1:
            return map(self.plain, values)
        (kind,) = kinds
        if kind is np.ndarray and len({array.dtype for array in values}) == 1 and values[0].dtype.name in _DTYPES:
            self.arrays.append(b"".join([array.tobytes() for array in values]))
            return [[_ARRAYS, values[0].dtype.name, *[array.shape for array in values]]]
        if kind in self._names:
            return [self._columns(values, kind)]
        return map(self.plain, values)

    def _columns(self, values: Sequence[Any], kind: type) -> list[Any]:
        """Write objects of one type by field: for each field the values not written before, and their numbers."""
        name, names = self._names[kind]
        new = {id(value): value for value in values if id(value) not in self._known}
        columns = [self.plain([getattr(value, field) for value in new.values()]) for field in names]
        for value in new.values():
            self._note(value)
        return [_COLUMNS, name, len(new), columns, [self._known[id(value)] for value in values]]

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
        """Convert a JSON value, as `_Writer.plain` gives it, back to the original value."""
        if type(plain) is not list:
            return plain
        tag, *parts = plain
        if tag == _LIST:
            return self._items(parts)
        if tag == _TUPLE:
            return tuple(self._items(parts))
        if tag == _AGAIN:
            return self._known[parts[0]]
        made = self._makers[tag](parts)
        self._known.append(made)
        return made

    def _items(self, parts: list[Any]) -> list[Any]:
        """Convert the items of a list, as `_Writer._items` writes them, back to values."""
        if len(parts) == 1 and type(parts[0]) is list and parts[0]:
            if parts[0][0] == _ARRAYS:
                _, name, *shapes = parts[0]
                return self._read(name, shapes)
            if parts[0][0] == _COLUMNS:
                return self._rows(*parts[0][1:])
        return [self.value(part) if type(part) is list else part for part in parts]

    def _rows(self, name: str, count: int, columns: list[Any], numbers: list[int]) -> list[Any]:
        """Convert fields, as `_Writer._columns` writes them, back to objects."""
        kind, num_fields = self._table[name]
        fields_of_all = [self.value(column) for column in columns]
        if len(columns) != num_fields or any(len(column) != count for column in fields_of_all):
            raise ValueError(f"{name} has {num_fields} fields, each of all values")
        self._known += [kind(*values) for values in zip(*fields_of_all, strict=True)]
        return [self._known[number] for number in numbers]

    def _array(self, parts: list[Any]) -> np.ndarray:
        name, *shape = parts
        return self._read(name, [shape])[0]

    def _read(self, name: str, shapes: list[Any]) -> list[np.ndarray]:
        """Read the next arrays of one dtype from the message."""
        if name not in _DTYPES or not all(type(size) is int and size >= 0 for shape in shapes for size in shape):
            raise ValueError(f"no array is of {name!r} {shapes!r}")
        dtype, counts = np.dtype(name), [math.prod(shape) for shape in shapes]
        start, self._position = self._position, self._position + sum(counts) * dtype.itemsize
        if self._position > len(self._arrays):
            raise ValueError("an array is longer than its message")
        whole = np.frombuffer(bytearray(self._arrays[start : self._position]), dtype=dtype)
        arrays, first = [], 0
        for shape, count in zip(shapes, counts, strict=True):
            arrays.append(whole[first : first + count].reshape(shape))
            first += count
        return arrays

    def _made(self, parts: list[Any]) -> Any:
        name, *values = parts
        kind, count = self._table[name]
        if len(values) != count:
            raise ValueError(f"{name} has {count} fields, not {len(values)}")
        return kind(*[self.value(value) for value in values])
