"""Reader for JSON lines (OpenAI batch files among them), and for files that are one JSON array of objects.

Each file is read twice: when opened, to check it, count its rows and find one type per column; and then for the rows.
"""

from __future__ import annotations

import codecs
import hashlib
import io
import itertools
import json
import re
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa

from batchgen.core.errors import InputError, one_line
from batchgen.core.text import repair_surrogates
from batchgen.core.typed_json import check_nesting
from batchgen.dataset.bad_lines import BadLine
from batchgen.dataset.identity import InputFiles
from batchgen.dataset.json_array import array_elements
from batchgen.dataset.json_types import infer_schema
from batchgen.dataset.openai_batch import COLUMNS, line_to_row
from batchgen.dataset.partitions import Partitions
from batchgen.dataset.row_batches import row_reader, to_json
from batchgen.dataset.source import Source, check_same_columns, naming
from batchgen.dataset.storage import open_bytes

# How a file begins that is one array of objects, after a byte order mark. A line that is another array is no row.
_ARRAY = re.compile(rb"\s*\[\s*[{\]]")
_DIGESTS_AT_ONCE = 1 << 20


def json_source(paths: list[str], limit: int | None, on_bad_line: str, partitions: Partitions) -> Source:
    """Open JSON lines files as one input.

    Args:
        paths: Paths of the files.
        limit: The most rows to read.
        on_bad_line: "fail" raises InputError for an invalid line; "skip" makes it a row that fails.
        partitions: Columns of the files' partition directories.

    Raises:
        InputError: A line is not valid; the message names it.
    """
    columns: dict[str, set[str]] = {}
    files = InputFiles(paths, partitions, may_get_lines=True)

    def noting_columns(rows: Iterable[tuple[str, dict[str, Any]]]) -> Iterator[dict[str, Any]]:
        for path, row in rows:
            if not isinstance(row, BadLine):
                columns.setdefault(path, set()).update(row)
                row = row | partitions.row(path)
            yield row

    def rows_from(start_row: int) -> Iterator[tuple[str, dict[str, Any]]]:
        return _json_rows(paths, on_bad_line, start_row)

    schema, total = infer_schema(noting_columns(itertools.islice(rows_from(0), limit)), paths[0])
    if total and not columns:
        raise InputError(f"no line of {paths[0]} is a JSON object: write one object a line, its keys the columns")
    if total == limit:
        columns.popitem()  # the last file may have been left before all its columns came
    for path, names in columns.items():
        partitions.check_names(names, path)
    if columns:
        check_same_columns(columns)

    def whole_rows(start_row: int) -> Iterator[tuple[str, dict[str, Any]]]:
        for path, row in rows_from(start_row):
            yield path, row if isinstance(row, BadLine) else row | partitions.row(path)

    read = row_reader(whole_rows, schema, total, files.check)
    return Source("jsonl", schema, total, read, files.identity, begins_with=files.begin_with, check=files.check_all)


def openai_source(paths: list[str], limit: int | None, on_bad_line: str) -> Source:
    """Open OpenAI batch files as one input. Invalid requests are found later, when rows become requests.

    Args:
        paths: Paths of the files.
        limit: The most rows to read.
        on_bad_line: "fail" raises InputError for an invalid line; "skip" makes it a row that fails.
    """
    digests = array("Q")  # of each row's id; 0: it has none
    files = InputFiles(paths, may_get_lines=True)

    def rows_from(start_row: int) -> Iterator[tuple[str, dict[str, Any]]]:
        for path, line in _json_rows(paths, on_bad_line, start_row):
            yield path, line if isinstance(line, BadLine) else line_to_row(line)

    for _, row in itertools.islice(rows_from(0), limit):
        custom_id = row.get("custom_id")
        digest = b"" if custom_id is None else hashlib.blake2b(custom_id.encode(), digest_size=8).digest()
        digests.append(int.from_bytes(digest, "little"))
    total, duplicates = len(digests), _repeated(digests)
    del digests
    schema = pa.schema([(name, pa.string()) for name in COLUMNS])
    read = row_reader(rows_from, schema, total, files.check)
    return Source(
        "openai",
        schema,
        total,
        read,
        files.identity,
        duplicates,
        begins_with=files.begin_with,
        check=files.check_all,
    )


def _repeated(digests: array[int]) -> frozenset[int]:
    """Rows whose digest an earlier row has, looked for among some of the digests at a time. 0 is no digest."""
    values = np.frombuffer(digests, np.uint64)
    times = len(values) // _DIGESTS_AT_ONCE + 1
    repeated: list[int] = []
    for residue in range(times):
        rows = np.flatnonzero((values != 0) & (values % np.uint64(times) == residue))
        rows = rows[np.argsort(values[rows], kind="stable")]
        repeated += rows[1:][values[rows[1:]] == values[rows[:-1]]].tolist()
    return frozenset(repeated)


def looks_like_openai(path: str, on_bad_line: str) -> bool:
    """True where the first valid line of a JSON lines file has all fields of an OpenAI batch line."""
    with naming(path):
        rows = (row for _, row in _json_rows([path], on_bad_line) if not isinstance(row, BadLine))
        row = next(rows, {})
    return all(name in row for name in COLUMNS)


@dataclass(frozen=True)
class _Record:
    """A row of a file before it is checked: an unparsed line, or an element of an array.

    Attributes:
        path: Path of the file.
        where: Path and number of the line or element, for error messages.
        line: Bytes of the line; None for an element.
        element: The element of an array.
    """

    path: str
    where: str
    line: bytes | None = None
    element: Any = None

    def row(self) -> dict[str, Any]:
        """The row as {column: value}. Raises InputError where the record is not a JSON object."""
        value = self.element if self.line is None else _parse_line(self.where, self.line)
        if not isinstance(value, dict):
            raise InputError(f"{self.where} is not a JSON object: write one object a line, its keys the columns")
        return value

    def text(self) -> str:
        return to_json(self.element) if self.line is None else self.line.decode(errors="replace").strip()


def _json_rows(paths: list[str], on_bad_line: str, start_row: int = 0) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (file, row) from a row index on, without parsing earlier lines; a skipped line is yielded as `BadLine`."""
    records = (record for path in paths for record in _records(path))
    for record in itertools.islice(records, start_row, None):
        try:
            row = record.row()
        except InputError as error:
            if on_bad_line == "fail":
                raise InputError(f"{error} (--on-bad-line skip notes it and goes on)") from error
            row = BadLine(f"{error}; the line: {record.text()}")
        yield record.path, row


def _records(path: str) -> Iterator[_Record]:
    with naming(path), open_bytes(path) as file:
        head = file.peek(1)  # type: ignore[attr-defined]  # which `open_bytes` promises
        yield from (_elements if _ARRAY.match(head.removeprefix(codecs.BOM_UTF8)) else _lines)(path, file)


def _lines(path: str, file: BinaryIO) -> Iterator[_Record]:
    """Yield the lines of a file that are not blank, numbered from 1."""
    for number, line in enumerate(file, 1):
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        if line.strip():
            yield _Record(path, f"{path}, line {number}", line)


def _elements(path: str, file: BinaryIO) -> Iterator[_Record]:
    """Yield the elements of a file that is one JSON array, numbered from 1. Raises InputError for invalid JSON."""
    number = 0
    try:
        for number, element in enumerate(array_elements(io.TextIOWrapper(file, encoding="utf-8-sig", newline="")), 1):
            yield _Record(path, f"{path}, element {number}", element=element)
    except UnicodeError:
        raise
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{path} is not valid JSON after element {number} of its array ({one_line(error)}): correct it, or write"
            " one "
            "object a line"
        ) from error


def _parse_line(where: str, line: bytes) -> Any:
    if line.lstrip().startswith(b"["):
        raise InputError(f"{where} is an array: write one object a line, as jq -c '.[]' does")
    try:
        value = json.loads(line.decode())
        check_nesting(value, line)
        return repair_surrogates(value) if b"\\u" in line else value
    except (ValueError, RecursionError) as error:
        at = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        hint = ", as jq -c '.rows[]' does with the array under a document's key rows" if line.strip() == b"{" else ""
        raise InputError(f"{where} is not valid JSON ({one_line(at)}): write one object a line{hint}") from error
