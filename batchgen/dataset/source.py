"""The `Source` that every reader makes: a schema, and a function that reads from a given row.

Readers share these too: files opened and errors named in one way, columns checked and put in order.
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
    """One input of a known format, before limit and shard.

    Attributes:
        format: One of `FORMATS`.
        schema: The input's columns.
        total_rows: Number of rows; None where only a full pass can tell.
        read: Yields batches in order, of about `BATCH_BYTES` at most, with the columns that are asked for, one or more,
            in the schema's order; others are not decoded where the format allows. It may begin with rows before
            `start_row` where that is cheaper than cutting, and batches may be larger than `batch_rows`.
        identity: Gives the JSON values that decide whether this is the same input.
        duplicates: Rows whose id an earlier row has.
        begins_with: Tells from (identity now, identity before) whether its first rows are all those that it had before.
            None: it gets no more rows.
        check: Raises InputError where the input is not what it was when `identity` was called.
        notices: Lines on how it was understood, where a person should know.
    """

    format: str
    schema: pa.Schema
    total_rows: int | None
    read: ReadRows
    identity: Callable[[], dict[str, Any]]
    duplicates: frozenset[int] = frozenset()
    begins_with: Callable[[dict[str, Any], dict[str, Any]], bool] | None = None
    check: Callable[[], None] = lambda: None
    notices: tuple[str, ...] = ()


@contextmanager
def naming(path: str, *more_errors: type[Exception]) -> Iterator[None]:
    """Turn what a reader raises about `path` into one line that names it."""
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
    """Raise InputError unless every file of {path: column names} has the same ones, in any order."""
    (first, expected), *others = ((path, set(names)) for path, names in columns.items())
    for path, names in others:
        if names != expected:
            differing = ", ".join(map(repr, sorted(expected ^ names)))
            raise InputError(
                f"{path} and {first} do not have the same columns (only one has {differing}): "
                "run them as separate jobs, or make their columns the same"
            )


def check_unique(names: list[str], path: str) -> None:
    """Raise InputError where two columns have the same name."""
    twice = sorted({n for n in names if names.count(n) > 1})
    if twice:
        raise InputError(f"{path} has more than one column named {', '.join(map(repr, twice))}: rename one")


def schema_of(schema: pa.Schema, names: Iterable[str]) -> pa.Schema:
    """Some columns of a schema, in its order."""
    wanted = set(names)
    return pa.schema([field for field in schema if field.name in wanted], metadata=schema.metadata)


def rows_of_batch(size_bytes: int, rows: int, batch_rows: int) -> int:
    """Number of rows of a batch, at most `batch_rows`, where `rows` rows take `size_bytes`."""
    return max(1, min(batch_rows, BATCH_BYTES * max(rows, 1) // max(size_bytes, 1)))


def conform(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """The batch with the columns in the schema's order and types."""
    columns = ((batch.column(field.name), field.type) for field in schema)
    arrays = [array if array.type == wanted else array.cast(wanted) for array, wanted in columns]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
