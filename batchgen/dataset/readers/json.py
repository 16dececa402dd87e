"""JSON lines, of which OpenAI batch files are one kind.

They are read twice: when opened, to find every error, count the rows and find one type per column that holds
for all of them, and then for the rows.
"""

from __future__ import annotations

import codecs
import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa

from batchgen.core.errors import InputError, one_line
from batchgen.core.text import repair_surrogates
from batchgen.dataset.bad_lines import BadLine
from batchgen.dataset.identity import files_begin_with, files_identity, sizes_of
from batchgen.dataset.json_types import infer_schema
from batchgen.dataset.openai_batch import COLUMNS, line_to_row
from batchgen.dataset.partitions import Partitions
from batchgen.dataset.row_batches import row_reader
from batchgen.dataset.source import Source, check_same_columns, naming
from batchgen.dataset.storage import open_bytes


def json_source(paths: list[str], limit: int | None, on_bad_line: str, partitions: Partitions) -> Source:
    """JSON lines files as one input. Raises InputError, naming the line that is not valid, unless these are to be skipped."""
    columns: dict[str, set[str]] = {}
    sizes = sizes_of(paths)

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

    def whole_rows(start_row: int) -> Iterator[dict[str, Any]]:
        for path, row in rows_from(start_row):
            yield row if isinstance(row, BadLine) else row | partitions.row(path)

    read = row_reader(whole_rows, schema, total, paths[0])
    return Source(
        "jsonl",
        schema,
        total,
        read,
        lambda: files_identity(paths, partitions, sizes),
        begins_with=lambda now, was: files_begin_with(paths, now, was, may_get_lines=True),
    )


def openai_source(paths: list[str], limit: int | None, on_bad_line: str = "fail") -> Source:
    """Rows as `line_to_row` gives them; what is wrong with one shows when it is made into a request."""
    seen, duplicates, total = set(), set(), 0
    sizes = sizes_of(paths)

    def rows_from(start_row: int) -> Iterator[dict[str, Any]]:
        for _, line in _json_rows(paths, on_bad_line, start_row):
            yield line if isinstance(line, BadLine) else line_to_row(line)

    for row in itertools.islice(rows_from(0), limit):
        custom_id = row.get("custom_id")
        if custom_id is not None:
            digest = hashlib.blake2b(custom_id.encode(), digest_size=8).digest()  # ids may be long
            if digest in seen:
                duplicates.add(total)
            seen.add(digest)
        total += 1
    schema = pa.schema([(name, pa.string()) for name in COLUMNS])
    read = row_reader(rows_from, schema, total, paths[0])
    return Source(
        "openai",
        schema,
        total,
        read,
        lambda: files_identity(paths, sizes=sizes),
        frozenset(duplicates),
        begins_with=lambda now, was: files_begin_with(paths, now, was, may_get_lines=True),
    )


def looks_like_openai(path: str, on_bad_line: str = "fail") -> bool:
    """Whether the first line of a JSON lines file that is valid has all that a line of an OpenAI batch has."""
    with naming(path):
        rows = (row for _, row in _json_rows([path], on_bad_line) if not isinstance(row, BadLine))
        row = next(rows, {})
    return all(name in row for name in COLUMNS)


def _json_rows(paths: list[str], on_bad_line: str, start_row: int = 0) -> Iterator[tuple[str, dict[str, Any]]]:
    """(file, row) from a row on; the lines before it are not parsed. Rows may be `BadLine` where these are skipped."""
    lines = ((path, number, line) for path in paths for number, line in _numbered_lines(path))
    for path, number, line in itertools.islice(lines, start_row, None):
        try:
            row = _parse_object(path, number, line)
        except InputError as error:
            if on_bad_line == "fail":
                raise InputError(f"{error} (--on-bad-line skip notes it and goes on)") from error
            row = BadLine(f"{error}; the line: {line.decode(errors='replace').strip()}")
        yield path, row


def _numbered_lines(path: str) -> Iterator[tuple[int, bytes]]:
    """(line number from 1, line) of the lines that are not blank."""
    with naming(path), open_bytes(path) as file:
        for number, line in enumerate(file, 1):
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if line.strip():
                yield number, line


def _parse_object(path: str, number: int, line: bytes) -> dict[str, Any]:
    where = f"{path}, line {number}"
    if line.lstrip().startswith(b"["):
        raise InputError(f"{where} is an array: write one object a line, as jq -c '.[]' does")
    try:
        value = json.loads(line.decode())
        value = repair_surrogates(value) if b"\\u" in line else value
    except (ValueError, RecursionError) as error:
        at = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        reason = one_line(at)
        raise InputError(f"{where} is not valid JSON ({reason}): write one object a line") from error
    if not isinstance(value, dict):
        raise InputError(f"{where} is not a JSON object: write one object a line, its keys the columns")
    return value
