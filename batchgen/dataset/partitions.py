"""Hive partitions: columns that a file gets from its directories' names (`year=2024/month=05/rows.parquet`)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from urllib.parse import unquote

import pyarrow as pa

from batchgen.core.errors import InputError

Value = str | int | None
_FOLDER = re.compile(r"[^=]+=.*")
_NULL = "__HIVE_DEFAULT_PARTITION__"


@dataclass(frozen=True)
class Partitions:
    """The partition columns of an input's files; an input may have none.

    Attributes:
        fields: The columns: integers where all values are integers, else text.
        values: The columns' values for each file path, in the order of `fields`.
    """

    fields: tuple[pa.Field, ...] = ()
    values: dict[str, tuple[Value, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, paths: Sequence[str], root: str) -> Partitions:
        """Find the partition columns of files below a directory.

        Args:
            paths: Paths of the files.
            root: The directory.

        Raises:
            InputError: The files have different partition columns.
        """
        pairs = {path: _pairs(path[len(root) :]) for path in paths}
        names = [name for name, _ in pairs[paths[0]]]
        for path, found in pairs.items():
            if [name for name, _ in found] != names:
                raise InputError(
                    f"{path} and {paths[0]} lie in partitions of different columns: give files of one kind, as a glob"
                )
        if not names:
            return cls()
        columns = [[found[i][1] for found in pairs.values()] for i in range(len(names))]
        whole = [all(map(_is_integer, column)) and any(column) for column in columns]
        fields = [
            pa.field(name, pa.int64() if is_whole else pa.string()) for name, is_whole in zip(names, whole, strict=True)
        ]
        values = {
            path: tuple(
                int(text) if is_whole and text is not None else text
                for (_, text), is_whole in zip(found, whole, strict=True)
            )
            for path, found in pairs.items()
        }
        return cls(tuple(fields), values)

    def row(self, path: str) -> dict[str, Value]:
        """The partition columns' values, by name, of the rows of a file."""
        return dict(zip((field.name for field in self.fields), self.values.get(path, ()), strict=True))

    def check_names(self, names: Iterable[str], path: str) -> None:
        """Raise InputError where a file also has a column with the name of a partition column."""
        both = sorted({field.name for field in self.fields}.intersection(names))
        if both:
            raise InputError(
                f"{path} has a column {both[0]!r}, as its directories do: rename one, or give files as a glob"
            )

    def extend(self, batch: pa.RecordBatch, path: str) -> pa.RecordBatch:
        """Append the partition columns to rows of a file.

        Args:
            batch: Rows of the file.
            path: Path of the file.
        """
        for column, value in zip(self.fields, self.values.get(path, ()), strict=True):
            batch = batch.append_column(column, pa.array([value] * batch.num_rows, column.type))
        return batch


def is_partition(folder: str) -> bool:
    """True where a directory's name has the form `column=value`."""
    return _FOLDER.fullmatch(folder) is not None


def _pairs(path: str) -> list[tuple[str, str | None]]:
    """The (column, text) pairs of a path's directories."""
    split = (unquote(folder).partition("=") for folder in path.strip("/").split("/")[:-1])
    return [(name, None if value == _NULL else value) for name, _, value in split]


def _is_integer(text: str | None) -> bool:
    """True where a text is an integer in plain form; "05" is not, and remains text."""
    return text is None or re.fullmatch(r"0|-?[1-9]\d{0,17}", text) is not None
