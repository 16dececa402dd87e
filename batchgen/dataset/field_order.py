"""The order of template fields that a user frees, `--reorder-fields`: prompts then begin alike for as long as they can.

A field stands on a line of its own in the template, and lines change places. Which order is best follows from how many
distinct values the fields have, alone and together (GGR: Liu et al., 2024).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import pyarrow as pa

from batchgen.core.errors import InputError
from batchgen.core.templates import SafeTemplate, TemplateFailed, TemplateSyntax
from batchgen.dataset.column_types import closest

_OPTION = "--reorder-fields"
_MOST_FIELDS = 8  # of which every set is looked at
_MOST_ROWS = 200_000  # that are looked at
_Numbers = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class FreeLines:
    """A template in which the lines of some fields may change places.

    Attributes:
        lines: All lines of the template.
        line_of: Number of the line of each field.
    """

    lines: tuple[str, ...]
    line_of: Mapping[str, int]

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields in the order of their lines."""
        return tuple(sorted(self.line_of, key=self.line_of.__getitem__))

    def arranged(self, fields: Sequence[str]) -> str:
        """The template with its free lines in the order of `fields`."""
        lines = list(self.lines)
        for place, field in zip(sorted(self.line_of.values()), fields, strict=True):
            lines[place] = self.lines[self.line_of[field]]
        return "\n".join(lines)


@dataclass(frozen=True)
class FieldValues:
    """The numbers of distinct values and of characters that the rows looked at have in some fields.

    Attributes:
        num_rows: Number of these rows.
        distinct: Number of distinct values of each set of fields.
        length: Mean characters of each field.
    """

    num_rows: int
    distinct: Mapping[frozenset[str], int]
    length: Mapping[str, float]

    @classmethod
    def of(cls, batches: Iterable[pa.RecordBatch], fields: Sequence[str]) -> FieldValues:
        """Count the values of the first rows.

        Args:
            batches: The rows, with the columns of the fields.
            fields: The fields.
        """
        hashes: dict[str, list[_Numbers]] = {field: [] for field in fields}
        characters = dict.fromkeys(fields, 0)
        num_rows = 0
        for batch in batches:
            rows = batch.slice(0, _MOST_ROWS - num_rows)
            for field in fields:
                of_rows, length = _hashes(rows.column(field))
                hashes[field].append(of_rows)
                characters[field] += length
            num_rows += rows.num_rows
            if num_rows >= _MOST_ROWS:
                break
        if not num_rows:
            return cls(0, {}, {})
        groups = {frozenset([field]): _groups([np.concatenate(hashes[field])]) for field in fields}
        for count in range(2, len(fields) + 1):
            for first, *rest in combinations(fields, count):
                parts = [groups[frozenset([first])], groups[frozenset(rest)]]
                groups[frozenset([first, *rest])] = _groups(parts)
        distinct = {of_set: int(numbers.max()) + 1 for of_set, numbers in groups.items()}
        return cls(num_rows, distinct, {field: characters[field] / num_rows for field in fields})

    def saved(self, fields: Sequence[str]) -> float:
        """Characters of the fields that rows have in common with an earlier one, if they come in this order."""
        heads = (frozenset(fields[: count + 1]) for count in range(len(fields)))
        lengths = (self.length[field] for field in fields)
        return sum((self.num_rows - self.distinct[head]) * length for head, length in zip(heads, lengths, strict=True))

    def best_order(self, fields: Sequence[str]) -> tuple[str, ...]:
        """The order with the most characters saved; of equal ones, the given one.

        The best order of a set ends with one of its fields after the best order of the others (Held and Karp, 1962).
        """
        if not self.num_rows:
            return tuple(fields)
        best: dict[frozenset[str], tuple[str, ...]] = {frozenset(): ()}
        for count in range(1, len(fields) + 1):
            for of_set in combinations(fields, count):
                orders = [(*best[frozenset(of_set) - {last}], last) for last in reversed(of_set)]
                best[frozenset(of_set)] = max(orders, key=self.saved)
        order = best[frozenset(fields)]
        return order if self.saved(order) > self.saved(fields) else tuple(fields)


def free_lines(text: str, fields: Sequence[str], schema: pa.Schema) -> FreeLines:
    """Find the lines of the fields in a template.

    Args:
        text: The template.
        fields: Names of columns whose order is free.
        schema: The input's columns.

    Raises:
        InputError: A field is no column, or its line cannot change places.
    """
    if len(set(fields)) != len(fields) or not 2 <= len(fields) <= _MOST_FIELDS:
        raise InputError(f"{_OPTION} needs from 2 to {_MOST_FIELDS} different columns, separated by commas")
    for field in fields:
        if field not in schema.names:
            raise InputError(f"{_OPTION}: {field!r} is not a column{closest(field, schema)}")
    lines = text.split("\n")
    used = [_variables(line, schema) for line in lines]
    line_of: dict[str, int] = {}
    for field in fields:
        numbers = [number for number, variables in enumerate(used) if variables is None or field in variables]
        numbers = [number for number in numbers if used[number] is not None or field in lines[number]]
        if len(numbers) != 1 or used[numbers[0]] is None or not _ends_blocks(lines[: numbers[0]], schema):
            raise InputError(
                f"{_OPTION}: {field} must be on exactly one line of the template, outside of blocks of several lines"
            )
        other = next((name for name, number in line_of.items() if number == numbers[0]), None)
        if other is not None:
            raise InputError(f"{_OPTION}: {other} and {field} are on one line of the template: give each its own")
        line_of[field] = numbers[0]
        if _sets_variable(lines, numbers[0], schema):
            raise InputError(f"{_OPTION}: the line of {field} sets a variable that other lines use")
    return FreeLines(tuple(lines), line_of)


def _variables(text: str, schema: pa.Schema) -> frozenset[str] | None:
    """The variables of a part of a template; None: it is no whole template by itself."""
    try:
        return frozenset(SafeTemplate("rows", text).use(schema.names).variables)
    except (TemplateSyntax, TemplateFailed):
        return None


def _ends_blocks(lines: Sequence[str], schema: pa.Schema) -> bool:
    """Tell whether text after these lines of a template is outside of all blocks and comments."""
    return _variables("\n".join([*lines, "text"]), schema) is not None


def _sets_variable(lines: Sequence[str], number: int, schema: pa.Schema) -> bool:
    """Tell whether other lines need what a line sets: without it, they have a variable more."""
    whole = _variables("\n".join(lines), schema)
    rest = _variables("\n".join([*lines[:number], *lines[number + 1 :]]), schema)
    return whole is not None and rest is not None and not rest <= whole


def _hashes(column: pa.Array) -> tuple[_Numbers, int]:
    """Hashes of the values of a column [rows], and the characters of all of them."""
    if pa.types.is_nested(column.type) or isinstance(column, pa.ExtensionArray):  # Arrow has no dictionaries of these
        column = pa.array([str(value) for value in column.to_pylist()], pa.large_string())
    elif pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    encoded = column.dictionary_encode(null_encoding="encode")
    texts = [str(value) for value in encoded.dictionary.to_pylist()]
    numbers = encoded.indices.to_numpy()
    of_values = np.array([hash(text) for text in texts], np.int64)
    lengths = np.array([len(text) for text in texts], np.int64)
    return of_values[numbers], int(lengths[numbers].sum())


def _groups(parts: Sequence[_Numbers]) -> _Numbers:
    """Number rows so that those with equal values in all parts have equal numbers, from 0."""
    numbers = parts[0]
    if len(parts) > 1:
        numbers = numbers * (int(parts[1].max()) + 1) + parts[1]
    groups: _Numbers = np.unique(numbers, return_inverse=True)[1]
    return groups
