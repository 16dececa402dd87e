"""The continuations that a job scores: from a column, the same choices for every row, or the prompt itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from batchgen.core.errors import InputError, RowError
from batchgen.dataset.binary_text import checked_text
from batchgen.dataset.column_types import is_list, is_text, is_token_list, value_type

Continuations = tuple[str | list[int], ...]


@dataclass(frozen=True)
class ContinuationSpec:
    """The source of the continuations to score. Without any attribute, the prompt itself is scored.

    Attributes:
        column: Column that has a text, a list of texts, token ids, or a list of lists of token ids.
        choices: Texts that are the continuations of every row.
        choices_column: Column of lists of texts.

    Raises:
        InputError: More than one attribute is given.
    """

    column: str | None = None
    choices: tuple[str, ...] = ()
    choices_column: str | None = None

    def __post_init__(self) -> None:
        flags = {"--continuations-column": self.column, "--choices": self.choices}
        given = [flag for flag, value in (flags | {"--choices-column": self.choices_column}).items() if value]
        if len(given) > 1:
            raise InputError(f"{' and '.join(given)} exclude each other: give one")
        if isinstance(self.choices, str) or not all(isinstance(choice, str) and choice for choice in self.choices):
            raise InputError("--choices must be non-empty texts, each with a --choices of its own")
        object.__setattr__(self, "choices", tuple(self.choices))
        if len(self.choices) == 1 or len(set(self.choices)) < len(self.choices):
            raise InputError("--choices needs two or more texts that differ, each with a --choices of its own")

    @property
    def whole(self) -> bool:
        """True where the prompt itself is scored."""
        return not (self.column or self.choices or self.choices_column)

    def identity(self) -> dict[str, Any]:
        """The JSON values that identify the source of continuations in a job's fingerprint."""
        return {"column": self.column, "choices": list(self.choices), "choices_column": self.choices_column}


@dataclass(frozen=True)
class CompiledContinuations:
    """A source of continuations that was checked against the input's columns.

    Attributes:
        columns: Columns that it reads.
        of_row: The function that gives a row's continuations from {column: value} and raises RowError; None: the prompt
            itself is scored.
    """

    columns: tuple[str, ...] = ()
    of_row: Callable[[dict[str, Any]], Continuations] | None = None


def compile_continuations(spec: ContinuationSpec, schema: pa.Schema) -> CompiledContinuations:
    """Check a source of continuations against the columns of the input. Raises InputError."""
    if spec.whole:
        return CompiledContinuations()
    if spec.choices:
        return CompiledContinuations((), lambda row: spec.choices)
    if spec.choices_column is not None:
        column, kind = spec.choices_column, value_type(schema, spec.choices_column, "--choices-column")
        if not (is_list(kind) and is_text(kind.value_type)):
            raise InputError(f"--choices-column {column!r} holds {kind}: it must be lists of texts")
        return CompiledContinuations((column,), lambda row: _several(row[column], column))
    assert spec.column is not None  # or it would be `whole`
    column, kind = spec.column, value_type(schema, spec.column, "--continuations-column")
    if is_text(kind) or is_token_list(kind):
        return CompiledContinuations((column,), lambda row: (_one(row[column], column),))
    if is_list(kind) and (is_text(kind.value_type) or is_token_list(kind.value_type)):
        return CompiledContinuations((column,), lambda row: _several(row[column], column))
    raise InputError(
        f"--continuations-column {column!r} holds {kind}: it must be text, a list of texts, token ids, or a list of"
        " those"
    )


def _several(values: list[Any] | None, column: str) -> Continuations:
    if values is not None and not values:
        raise RowError(f"column {column!r} has no continuations")
    return tuple(_one(value, column) for value in _there(values, column))


def _one(given: Any, column: str) -> str | list[int]:
    value: str | list[int] = _there(checked_text(given, column), column)
    if not isinstance(value, str) and None in value:
        raise RowError(f"column {column!r} has a null token id")
    if not value:
        raise RowError(f"column {column!r} has an empty continuation")
    return value


def _there(value: Any, column: str) -> Any:
    if value is None:
        raise RowError(f"column {column!r} is null")
    return value
