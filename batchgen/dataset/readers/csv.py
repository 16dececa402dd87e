"""Reader for CSV and TSV files. Each file is read twice: to check it and count its rows, and then for the rows.

All columns are text, exactly as written, so that "007" or "2.50" is in the prompt unchanged.
"""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa

from batchgen.core.errors import InputError
from batchgen.dataset.column_types import DELIMITERS
from batchgen.dataset.identity import InputFiles
from batchgen.dataset.partitions import Partitions
from batchgen.dataset.row_batches import row_reader
from batchgen.dataset.source import Source, check_same_columns, check_unique, naming
from batchgen.dataset.storage import open_bytes

_NAMES = {"tab": "\t", "\\t": "\t"}  # as a shell's user writes it
_SNIFFED_RECORDS = 20


def csv_source(paths: list[str], limit: int | None, partitions: Partitions, delimiter: str | None) -> Source:
    """Open CSV files as one input, with all columns as text.

    Args:
        paths: Paths of the files.
        limit: The most rows to read.
        partitions: Columns of the files' partition directories.
        delimiter: Character between fields, or "tab". None: a comma, or a tab in .tsv files. Where that gives a single
            column, another common delimiter is used if it gives several columns.

    Raises:
        InputError: A line is not valid; the message names it.
    """
    files = InputFiles(paths, partitions, may_get_lines=True)
    if delimiter is not None:
        delimiters = dict.fromkeys(paths, _delimiter(delimiter))
    else:
        delimiters = {path: _sniffed_delimiter(path) for path in paths}
    columns = {path: next(_csv_records(path, delimiters[path]), (0, []))[1] for path in paths}
    for path, names in columns.items():
        check_unique(names, path)
        partitions.check_names(names, path)
    check_same_columns(columns)

    def rows_from(start_row: int) -> Iterator[tuple[str, dict[str, Any]]]:
        for path, row in itertools.islice(_csv_rows(delimiters), start_row, None):
            yield path, row | partitions.row(path)

    total = sum(1 for _ in itertools.islice(_csv_rows(delimiters), limit))
    schema = pa.schema([*((name, pa.string()) for name in columns[paths[0]]), *partitions.fields])
    return Source(
        "csv",
        schema,
        total,
        row_reader(rows_from, schema, total, files.check),
        files.identity,
        begins_with=files.begin_with,
        check=files.check_all,
        notices=() if delimiter is not None else tuple(_notices(delimiters, columns)),
    )


def _csv_rows(delimiters: Mapping[str, str]) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield (file, row) for all rows.

    Args:
        delimiters: The delimiter of each file, by path.
    """
    for path, delimiter in delimiters.items():
        records = _csv_records(path, delimiter)
        _, names = next(records, (0, []))
        for line, fields in records:
            if len(fields) != len(names):
                raise InputError(
                    f"{path}, line {line}: {len(fields)} fields, but the header has {len(names)}, with {delimiter!r} "
                    "between fields: correct it (fields that hold separators or line breaks go into double quotes), or "
                    "give --csv-delimiter"
                )
            yield path, dict(zip(names, fields, strict=True))


def _csv_records(path: str, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Yield (number of the last line, fields) for the header and each row of a file; blank lines are skipped."""
    csv.field_size_limit(2**31 - 1)  # fields are whole documents; the module's own limit is 128 KiB
    with naming(path), open_bytes(path) as file:
        lines = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
        reader = csv.reader(lines, delimiter=delimiter, strict=True)
        try:
            yield from ((reader.line_num, fields) for fields in reader if fields)
        except csv.Error as error:
            raise InputError(f"{path}, line {reader.line_num} is not valid CSV ({error}): correct it") from error


def _delimiter(given: str) -> str:
    """The character that a value of the option for delimiters stands for. Raises InputError."""
    delimiter = _NAMES.get(given.lower(), given)
    if len(delimiter) != 1 or delimiter in '"\r\n':
        raise InputError(f"--csv-delimiter must be one character, or tab, not {given!r}")
    return delimiter


def _usual_delimiter(path: str) -> str:
    return "\t" if path.lower().removesuffix(".gz").removesuffix(".zst").endswith(".tsv") else ","


def _sniffed_delimiter(path: str) -> str:
    """Find the delimiter of a file: the usual one, unless it gives a single column and another gives several."""
    usual = _usual_delimiter(path)
    header = next(_csv_records(path, usual), (0, []))[1]
    if len(header) != 1:
        return usual
    widths = {candidate: _width(path, candidate) for candidate in DELIMITERS if candidate in header[0]}
    best = max(widths, key=lambda candidate: widths[candidate], default=usual)
    return best if widths.get(best, 1) > 1 else usual


def _width(path: str, delimiter: str) -> int:
    """The number of fields that each of the first records has; 0 where numbers differ or the text is not CSV."""
    try:
        widths = {len(fields) for _, fields in itertools.islice(_csv_records(path, delimiter), _SNIFFED_RECORDS)}
    except InputError:
        return 0
    return widths.pop() if len(widths) == 1 else 0


def _notices(delimiters: Mapping[str, str], columns: Mapping[str, list[str]]) -> Iterator[str]:
    """Yield messages for the user about the way in which files were read; only the first of similar messages.

    Args:
        delimiters: The delimiter of each file, by path.
        columns: The column names of each file, by path.
    """
    told: set[str] = set()
    for path, delimiter in delimiters.items():
        if delimiter != _usual_delimiter(path) and delimiter not in told:
            told.add(delimiter)
            yield f"{path}: fields are read with {delimiter!r} between them (--csv-delimiter gives another)"
        elif len(columns[path]) == 1 and any(other in columns[path][0] for other in DELIMITERS) and "" not in told:
            told.add("")
            header = columns[path][0]
            yield f"{path}: its header is read as one column, {header!r}: give --csv-delimiter if it is several"
