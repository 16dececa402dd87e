"""CSV and TSV files, read twice: when opened, to find every error and count the rows, and then for the rows.

CSV has no types: its columns are text, exactly as written, so that "007" or "2.50" reaches the prompt
unchanged.
"""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from batchgen.core.errors import InputError
from batchgen.dataset.identity import files_begin_with, files_identity, sizes_of
from batchgen.dataset.partitions import Partitions
from batchgen.dataset.row_batches import row_reader
from batchgen.dataset.source import Source, check_same_columns, check_unique, naming
from batchgen.dataset.storage import open_bytes


def csv_source(paths: list[str], limit: int | None, partitions: Partitions) -> Source:
    """CSV files as one input, all columns text. Raises InputError, naming the line that is not valid."""
    sizes = sizes_of(paths)
    columns = {path: next(_csv_records(path), (0, []))[1] for path in paths}
    for path, names in columns.items():
        check_unique(names, path)
        partitions.check_names(names, path)
    check_same_columns(columns)

    def rows_from(start_row: int) -> Iterator[dict[str, Any]]:
        for path, row in itertools.islice(_csv_rows(paths), start_row, None):
            yield row | partitions.row(path)

    total = sum(1 for _ in itertools.islice(_csv_rows(paths), limit))
    schema = pa.schema([*((name, pa.string()) for name in columns[paths[0]]), *partitions.fields])
    read = row_reader(rows_from, schema, total, paths[0])
    return Source(
        "csv",
        schema,
        total,
        read,
        lambda: files_identity(paths, partitions, sizes),
        begins_with=lambda now, was: files_begin_with(paths, now, was, may_get_lines=True),
    )


def _csv_rows(paths: list[str]) -> Iterator[tuple[str, dict[str, str]]]:
    """(file, row)."""
    for path in paths:
        records = _csv_records(path)
        _, names = next(records, (0, []))
        for line, fields in records:
            if len(fields) != len(names):
                raise InputError(
                    f"{path}, line {line}: {len(fields)} fields, but the header has {len(names)}: correct it "
                    "(fields that hold separators or line breaks go into double quotes)"
                )
            yield path, dict(zip(names, fields, strict=True))


def _csv_records(path: str) -> Iterator[tuple[int, list[str]]]:
    """(number of its last line, fields) of the header and each row; blank lines are no rows."""
    delimiter = "\t" if path.lower().removesuffix(".gz").removesuffix(".zst").endswith(".tsv") else ","
    csv.field_size_limit(2**31 - 1)  # fields are whole documents; the module's own limit is 128 KiB
    with naming(path), open_bytes(path) as file:
        lines = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
        reader = csv.reader(lines, delimiter=delimiter, strict=True)
        try:
            yield from ((reader.line_num, fields) for fields in reader if fields)
        except csv.Error as error:
            raise InputError(f"{path}, line {reader.line_num} is not valid CSV ({error}): correct it") from error
