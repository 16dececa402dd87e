"""Reader for tables that a program has: lists, dicts, Arrow tables and streams, DataFrames of pandas and Polars.

What exports an Arrow C stream (`__arrow_c_stream__`) is read through it, without its library.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import pyarrow as pa

from batchgen.core.errors import InputError, one_line
from batchgen.core.text import repair_surrogates
from batchgen.dataset.content_digest import content_digest
from batchgen.dataset.json_types import infer_schema
from batchgen.dataset.row_batches import row_reader
from batchgen.dataset.source import Source, check_unique, conform, rows_of_batch, schema_of
from batchgen.dataset.temporary_copy import copy_of
from batchgen.dataset.unify import without_views

PROMPT = "prompt"  # the column of a list of texts
_TAKEN = (
    "a path, a list of texts or of dicts, a dict of columns, an Arrow table or stream, a DataFrame of pandas or Polars,"
    " a DuckDB relation, or a dataset of the `datasets` library"
)
# Libraries whose tables lie in memory already. Other streams may be longer than memory, and are copied to a file.
_IN_MEMORY = ("pandas", "polars", "pyarrow")
_ARROW_ERRORS = (pa.ArrowException, TypeError, ValueError, OverflowError)


def given_table_source(given: Any, name: str, limit: int | None) -> Source:
    """Open a table that a program has. Raises InputError where it is no table, or has columns that Arrow cannot hold.

    Args:
        given: The table.
        name: Name of the table in error messages.
        limit: The most rows to read.
    """
    if isinstance(given, list | tuple):
        table = _of_list(given if limit is None else given[:limit], name)
    elif isinstance(given, Mapping):
        table = _of_columns(given, name)
    elif _is_column(given):
        table = _of_columns({PROMPT: given}, name)
    elif hasattr(given, "__arrow_c_stream__"):
        table = _of_arrow(given, name, limit)
    else:
        kind = type(given).__name__
        raise InputError(
            f"input must be {_TAKEN}, not {kind}" + (": collect() it first" if kind == "LazyFrame" else "")
        )
    return table_source(table if limit is None else table.slice(0, limit), name)


def table_source(table: pa.Table, name: str, input_format: str = "table") -> Source:
    """Open an Arrow table. Raises InputError where two columns have the same name.

    Args:
        table: The table.
        name: Name of the table in error messages.
        input_format: Name of the format in the input's identity.
    """
    check_unique(table.column_names, name)
    schema = _without_views(table.schema)

    def read(start_row: int, batch_rows: int, names: list[str]) -> Iterator[tuple[int, pa.RecordBatch]]:
        rest, first, wanted = table.select(names).slice(start_row), start_row, schema_of(schema, names)
        for batch in rest.to_batches(max_chunksize=rows_of_batch(rest.nbytes, rest.num_rows, batch_rows)):
            yield first, conform(batch, wanted)
            first += batch.num_rows

    @cache
    def digest(rows: int) -> str:
        return content_digest(table.slice(0, rows))

    def identity() -> dict[str, Any]:
        return {"rows": table.num_rows, "xxh3_128": digest(table.num_rows)}

    def begins_with(now: dict[str, Any], was: dict[str, Any]) -> bool:
        rows: int = was["rows"]
        return bool(rows <= table.num_rows and digest(rows) == was["xxh3_128"])

    return Source(input_format, schema, table.num_rows, read, identity, begins_with=begins_with)


def _of_list(values: Sequence[Any], name: str) -> pa.Table:
    """The table of a list: of texts one column of prompts, of dicts a row each. Raises InputError."""
    kind = next(((str, Mapping)[isinstance(value, Mapping)] for value in values if value is not None), str)
    for index, value in enumerate(values):
        if not isinstance(value, kind) and (value is not None or kind is Mapping):
            raise InputError(
                f"item {index} of {name} is of type {type(value).__name__}: a list has texts (prompts) or dicts (rows)"
            )
    if kind is Mapping:
        return _of_rows(values, name)
    if values and all(value is not None and os.path.isfile(value) for value in values):
        raise InputError(f"{name} has names of files, and each would be a prompt: give a directory, a glob or one file")
    return pa.table({PROMPT: _texts(list(values))})


def _texts(values: list[str | None]) -> Any:
    try:
        return pa.array(values, pa.string())
    except UnicodeEncodeError:  # a lone surrogate has no UTF-8 form
        return pa.array(repair_surrogates(values), pa.string())


def _of_rows(rows: Sequence[Mapping[str, Any]], name: str) -> pa.Table:
    """The table of rows that are dicts, with types as those of JSON lines. Raises InputError."""
    dicts = [dict(row) for row in rows]
    try:
        schema, total = infer_schema(dicts, name)
    except _ARROW_ERRORS as error:
        raise InputError(f"{name} has keys that are no column names ({one_line(error)}): give texts") from error
    if not schema.names:
        raise InputError(f"{name} has rows without columns: nothing to make a prompt of")

    def read(dicts: list[dict[str, Any]]) -> pa.Table:
        batches = row_reader(lambda start: ((name, row) for row in dicts[start:]), schema, total)
        return pa.Table.from_batches([batch for _, batch in batches(0, total, schema.names)], schema)

    try:
        return read(dicts)
    except InputError as error:
        if not isinstance(error.__cause__, UnicodeEncodeError):
            raise
        return read(repair_surrogates(dicts))


def _of_columns(columns: Mapping[str, Any], name: str) -> pa.Table:
    """The table of a dict of columns: lists, numpy or Arrow arrays, or Series. Raises InputError."""
    arrays = {}
    for column, values in columns.items():
        if isinstance(values, str | bytes | Mapping):
            raise InputError(f"column {column!r} of {name} is one {type(values).__name__}: give a list of values")
        try:
            arrays[column] = _column(values)
        except _ARROW_ERRORS as error:
            raise InputError(
                f"column {column!r} of {name} is no list of values of one type ({one_line(error)}): convert it"
            ) from error
    try:
        return pa.table(arrays)
    except _ARROW_ERRORS as error:
        raise InputError(f"{name} is no dict of columns of equal lengths ({one_line(error)})") from error


def _column(values: Any) -> Any:
    """The values of a column as an Arrow array, perhaps a chunked one. Raises what Arrow raises."""
    if isinstance(values, pa.Array | pa.ChunkedArray):
        return values
    if hasattr(values, "__arrow_c_stream__"):
        return pa.chunked_array(values)
    return _texts(values) if isinstance(values, list) and _all_texts(values) else pa.array(values)


def _all_texts(values: list[Any]) -> bool:
    return all(type(value) is str for value in values)


def _of_arrow(given: Any, name: str, limit: int | None) -> pa.Table:
    """The table of an object that exports an Arrow C stream. Raises InputError."""
    if isinstance(given, pa.Table):
        return given
    in_memory = type(given).__module__.partition(".")[0] in _IN_MEMORY
    with _reading(name):
        if in_memory and not isinstance(given, pa.RecordBatchReader):
            return pa.table(given)
        reader = pa.RecordBatchReader.from_stream(given)
    return copy_of(_without_views(reader.schema), _first_rows(reader, limit, name), name)


@contextmanager
def _reading(name: str) -> Iterator[None]:
    """Turn what is raised while a table is read into an InputError: each library has errors of its own."""
    try:
        yield
    except Exception as error:
        raise InputError(f"{name} cannot be read as an Arrow table: {one_line(error)}") from error


def _is_column(given: Any) -> bool:
    """True for a single column: an Arrow array, or a Series or numpy array of one dimension."""
    if isinstance(given, pa.Array | pa.ChunkedArray):
        return True
    return hasattr(given, "__array__") and len(getattr(given, "shape", ())) == 1


def _first_rows(reader: pa.RecordBatchReader, limit: int | None, name: str) -> Iterator[pa.RecordBatch]:
    """Yield the first rows of a stream, with columns that can be written. Raises InputError."""
    schema, left = _without_views(reader.schema), limit
    while left is None or left > 0:
        with _reading(name):
            batch = next(reader, None)
            if batch is None:
                return
            rows = conform(batch if left is None else batch.slice(0, left), schema)
        yield rows
        left = None if left is None else left - rows.num_rows


def _without_views(schema: pa.Schema) -> pa.Schema:
    """The schema with columns whose batches can be written: of views each batch would bring the buffers of all rows."""
    return pa.schema([field.with_type(without_views(field.type)) for field in schema], metadata=schema.metadata)
