"""`Source`, the value that every reader returns: a schema, and a function that reads rows from a given index on.

The module also has what readers share: errors that name the file, and checks and ordering of columns.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from batchgen.core.errors import BatchgenError, InputError, file_error, one_line
from batchgen.core.text import without_credentials
from batchgen.dataset.storage import is_url

# Batches of rows are about this large, or of one row.
BATCH_BYTES = 16 << 20
FORMATS = ("parquet", "jsonl", "csv", "datasets", "openai")
_READ_ERRORS = (OSError, EOFError, zlib.error, UnicodeError, pa.ArrowException)

# (start_row, batch_rows, names of columns) -> (first row, batch of these columns)
ReadRows = Callable[[int, int, list[str]], Iterator[tuple[int, pa.RecordBatch]]]


@dataclass(frozen=True)
class Source:
    """An input of a known format, before limit and shard are applied.

    Attributes:
        format: The input format: one of `FORMATS`, or "table" for a table that a program has.
        schema: The input's columns.
        total_rows: Number of rows; None where the input must be read to know it.
        read: The function that yields Arrow batches in input order, of at most about `BATCH_BYTES`, with the requested
            columns (at least one) in the schema's order. It may start with rows before `start_row` and exceed
            `batch_rows` where that is cheaper. Other columns are not decoded where the format allows that.
        identity: The function that gives the JSON values that identify the input.
        duplicates: Indices of rows whose id an earlier row has.
        begins_with: The function that says, from (identity now, identity before), whether the input starts with all
            rows that it had before. None: the input never grows.
        begins_alike: The function that tells, from the earlier identity of a file, whether the file now begins with the
            same rows, as far as a sample of them shows; None: that is not known.
        check: The function that raises InputError where the input has changed since `identity` was called.
        notices: Messages for the user about the way in which the input was read.
        is_stream: True where only the first rows identify the input, as it is not read more than needed.
    """

    format: str
    schema: pa.Schema
    total_rows: int | None
    read: ReadRows
    identity: Callable[[], dict[str, Any]]
    duplicates: frozenset[int] = frozenset()
    begins_with: Callable[[dict[str, Any], dict[str, Any]], bool] | None = None
    begins_alike: Callable[[dict[str, Any]], bool | None] = lambda was: None
    check: Callable[[], None] = lambda: None
    notices: tuple[str, ...] = ()
    is_stream: bool = False


@contextmanager
def naming(path: str, *more_errors: type[Exception]) -> Iterator[None]:
    """Turn an exception that a reader raises within the block into an InputError that names the file.

    Args:
        path: Path of the file.
        more_errors: Types of exceptions to turn, besides the usual ones.
    """
    # File systems behind URLs have errors of their own.
    errors = (Exception,) if is_url(path) else (*_READ_ERRORS, *more_errors)
    try:
        yield
    except BatchgenError:
        raise
    except errors as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise file_error(error, path) from error
        if isinstance(error, UnicodeError):
            raise InputError(f"{path} is not UTF-8 ({one_line(error)}): convert it, as iconv does") from error
        reason = one_line(without_credentials(str(error), path))
        raise InputError(
            f"cannot read {path} ({reason}): it is damaged, incomplete or of another format, so write or copy it again"
        ) from error


def check_same_columns(columns: Mapping[str, Iterable[str]]) -> None:
    """Raise InputError where files have different column names; the order of columns does not matter.

    Args:
        columns: The column names by file.
    """
    (first, expected), *others = ((path, set(names)) for path, names in columns.items())
    for path, names in others:
        if names != expected:
            differing = ", ".join(map(repr, sorted(expected ^ names)))
            raise InputError(
                f"{path} and {first} do not have the same columns (only one has {differing}): "
                "run them as separate jobs, or make their columns the same"
            )


def check_unique(names: list[str], path: str) -> None:
    """Raise InputError where two columns of a file have the same name."""
    twice = sorted({n for n in names if names.count(n) > 1})
    if twice:
        raise InputError(f"{path} has more than one column named {', '.join(map(repr, twice))}: rename one")


def schema_of(schema: pa.Schema, names: Iterable[str]) -> pa.Schema:
    """The columns of a schema that have the given names, in the schema's order."""
    wanted = set(names)
    return pa.schema([field for field in schema if field.name in wanted], metadata=schema.metadata)


def rows_of_batch(size_bytes: int, rows: int, batch_rows: int) -> int:
    """The number of rows per batch, at most `batch_rows`, for batches of about `BATCH_BYTES`.

    Args:
        size_bytes: Bytes of `rows` rows.
        rows: Number of rows that take `size_bytes`.
        batch_rows: The most rows of a batch.
    """
    return max(1, min(batch_rows, BATCH_BYTES * max(rows, 1) // max(size_bytes, 1)))


def conform(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """A batch with the columns of a schema, in its order and types."""
    columns = ((batch.column(field.name), field.type) for field in schema)
    arrays = [array if array.type == wanted else array.cast(wanted) for array, wanted in columns]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
