"""Reader for Parquet files, page by page; row groups before the first wanted row and other columns are skipped."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from batchgen.core.digest import json_sha256
from batchgen.core.errors import InputError, one_line
from batchgen.dataset.bad_lines import bad_lines_of_schema, with_bad_lines
from batchgen.dataset.binary_text import is_binary
from batchgen.dataset.column_types import is_text
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

_SAMPLED_ROWS = 16  # at either end of a file
_SAMPLED_BYTES = 64 << 20  # a row group that is larger is not read for a few rows
_PROBED_ROWS = 64  # of a file, which tell how large its rows are once they are decoded


def parquet_source(paths: list[str], partitions: Partitions, *, may_get_files: bool) -> Source:
    """Open Parquet files as one input. Raises InputError where a file is damaged or columns are incompatible.

    Args:
        paths: The files.
        partitions: Columns of the files' partition directories.
        may_get_files: True for files of a directory or glob, to which files may be added. False for one file, which is
            written once.
    """
    files = InputFiles(paths, partitions, details=lambda path: details(path))
    schema, columns, groups = None, {}, []
    bad: dict[str, dict[int, str]] = {}
    for path in paths:
        with naming(path), _open_parquet(path) as file:
            found, bad[path] = file.schema_arrow.remove_metadata(), bad_lines_of_schema(file.schema_arrow)
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
                begin = first - sum(sizes[:skipped])
                errors = {begin + row: error for row, error in bad[path].items()}
                rows = _rows_at_once(file, wanted, in_files.names, batch_rows)
                for batch in file.iter_batches(rows, row_groups=wanted, columns=in_files.names, use_threads=False):
                    files.check(path)
                    whole_rows = partitions.extend(_in_types(batch, in_files, path), path).select(names)
                    here = range(first, first + batch.num_rows)
                    yield first, with_bad_lines(whole_rows, {row: errors[row] for row in errors if row in here})
                    first += batch.num_rows

    samples = None if may_get_files or is_url(paths[0]) else _Samples(paths[0], own)

    def details(path: str) -> dict[str, Any]:
        rows = sum(groups[paths.index(path)])
        return {"rows": rows} | ({} if samples is None else {"sample": samples.digests(rows)})

    def begins_alike(was: dict[str, Any]) -> bool | None:
        if samples is None or "sample" not in was:
            return None
        known = [pair for pair in zip(was["sample"], samples.digests(was["rows"]), strict=True) if None not in pair]
        return all(before == now for before, now in known) if known else None

    total = sum(map(sum, groups))
    return Source(
        "parquet",
        whole,
        total,
        read,
        files.identity,
        begins_with=files.begin_with if may_get_files else None,
        begins_alike=begins_alike,
        check=files.check_all,
    )


@dataclass(frozen=True)
class _Samples:
    """Digests of a few rows of a local file, by which a file is recognized that has more rows than before.

    Attributes:
        path: Path of the file.
        schema: The file's columns.
    """

    path: str
    schema: pa.Schema

    def digests(self, stop: int) -> list[str | None]:
        """The digests of the first and of the last few of the file's first `stop` rows; None where reading takes long.

        Args:
            stop: Number of rows, at most those of the file.
        """
        return [self._digest(0, min(_SAMPLED_ROWS, stop)), self._digest(max(0, stop - _SAMPLED_ROWS), stop)]

    def _digest(self, start: int, stop: int) -> str | None:
        names = [
            f.name for f in self.schema if pa.types.is_integer(f.type) or (is_text(f.type) and not is_binary(f.type))
        ]
        values: list[Any] = []
        with naming(self.path), _open_parquet(self.path) as file:
            first = 0
            for group in range(file.metadata.num_row_groups):
                end = first + file.metadata.row_group(group).num_rows
                if first < stop and start < end:
                    if start > first and file.metadata.row_group(group).total_byte_size > _SAMPLED_BYTES:
                        return None
                    values += _rows_of_group(file, group, names, max(0, start - first), min(end, stop) - first)
                first = end
        return json_sha256(values)


def _rows_of_group(file: pq.ParquetFile, group: int, names: list[str], start: int, stop: int) -> list[Any]:
    """Rows of a row group as Python values; rows with text that is not UTF-8 are left out."""
    rows: list[Any] = []
    first = 0
    for batch in file.iter_batches(_SAMPLED_ROWS, row_groups=[group], columns=names, use_threads=False):
        with contextlib.suppress(UnicodeError):
            rows += batch.slice(
                max(0, start - first), max(0, min(batch.num_rows, stop - first) - max(0, start - first))
            ).to_pylist()
        first += batch.num_rows
        if first >= stop:
            break
    return rows


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
