"""Reader for Parquet files, page by page; row groups before the first wanted row and other columns are skipped."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pyarrow as pa

from batchgen.core.errors import InputError, one_line
from batchgen.dataset.identity import InputFiles
from batchgen.dataset.partitions import Partitions
from batchgen.dataset.source import (
    Source,
    check_same_columns,
    check_unique,
    conform,
    naming,
    rows_of_batch,
    schema_of,
)
from batchgen.dataset.storage import is_url, open_raw
from batchgen.dataset.unify import unify_schemas

if TYPE_CHECKING:
    import pyarrow.parquet as pq

_PARQUET_BUFFER_BYTES = 256 << 10  # per column, so that pages are streamed instead of whole column chunks

_PROBED_ROWS = 64  # of a file, which tell how large its rows are once they are decoded


def parquet_source(paths: list[str], partitions: Partitions) -> Source:
    """Open Parquet files as one input. Raises InputError where a file is damaged or columns are incompatible."""
    files = InputFiles(paths, partitions)
    schema, columns, groups = None, {}, []
    for path in paths:
        with naming(path), _open_parquet(path) as file:
            found = file.schema_arrow.remove_metadata()
            groups.append([file.metadata.row_group(g).num_rows for g in range(file.metadata.num_row_groups)])
        check_unique(found.names, path)
        partitions.check_names(found.names, path)
        columns[path] = found.names
        check_same_columns({paths[0]: columns[paths[0]], path: found.names})
        try:
            schema = found if schema is None else unify_schemas(schema, found)
        except pa.ArrowException as error:
            reason = one_line(error)
            raise InputError(f"{path} and {paths[0]} differ in a column's type ({reason}): cast it") from error

    assert schema is not None  # there is at least one file
    own = schema
    whole = pa.schema([*own, *partitions.fields])

    def read(start_row: int, batch_rows: int, names: list[str]) -> Iterator[tuple[int, pa.RecordBatch]]:
        # A column of the files' own counts the rows where only those of their directories are wanted.
        in_files = schema_of(own, names) if set(names) & set(own.names) else pa.schema([own.field(0)])
        first = 0
        for path, sizes in zip(paths, groups, strict=True):
            if first + sum(sizes) <= start_row:
                first += sum(sizes)
                continue
            skipped = 0
            while first + sizes[skipped] <= start_row:
                first += sizes[skipped]
                skipped += 1
            with naming(path), _open_parquet(path) as file:
                wanted = list(range(skipped, len(sizes)))
                rows = _rows_at_once(file, wanted, in_files.names, batch_rows)
                for batch in file.iter_batches(rows, row_groups=wanted, columns=in_files.names, use_threads=False):
                    files.check(path)
                    yield first, partitions.extend(_in_types(batch, in_files, path), path).select(names)
                    first += batch.num_rows

    total = sum(map(sum, groups))
    return Source("parquet", whole, total, read, files.identity, begins_with=files.begin_with, check=files.check_all)


def _in_types(batch: pa.RecordBatch, schema: pa.Schema, path: str) -> pa.RecordBatch:
    """Rows of a file with the column types of the whole input. Raises InputError where a value does not fit."""
    try:
        return conform(batch, schema)
    except pa.ArrowInvalid as error:
        raise InputError(
            f"{path} has a value that the type of its column in other files does not hold ({one_line(error)}): cast it"
        ) from error


def _rows_at_once(file: pq.ParquetFile, groups: list[int], names: list[str], batch_rows: int) -> int:
    """The number of rows to read at once from some row groups.

    Args:
        file: The Parquet file.
        groups: Numbers of the row groups.
        names: Names of the columns to read.
        batch_rows: The most rows to read at once.
    """
    inside = tuple(f"{name}." for name in names)
    rows = batch_rows
    for group in map(file.metadata.row_group, groups):
        size_bytes = group.total_byte_size
        if len(names) < len(file.schema_arrow):
            chunks = [group.column(i) for i in range(group.num_columns)]
            wanted = [c for c in chunks if c.path_in_schema in names or c.path_in_schema.startswith(inside)]
            size_bytes = sum(chunk.total_uncompressed_size for chunk in wanted)
        rows = rows_of_batch(size_bytes, group.num_rows, rows)
    if rows > _PROBED_ROWS:  # a long value that is written once in a dictionary takes its length in every row
        probe = next(file.iter_batches(_PROBED_ROWS, row_groups=groups, columns=names, use_threads=False), None)
        rows = rows if probe is None else rows_of_batch(probe.nbytes, probe.num_rows, rows)
    return rows


def _open_parquet(path: str) -> pq.ParquetFile:
    import pyarrow.parquet as pq

    source = open_raw(path) if is_url(path) else path
    return pq.ParquetFile(source, buffer_size=_PARQUET_BUFFER_BYTES, pre_buffer=False, page_checksum_verification=True)
