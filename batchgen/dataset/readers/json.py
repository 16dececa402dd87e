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
from batchgen.dataset.identity import files_identity
from batchgen.dataset.json_types import infer_schema
from batchgen.dataset.openai_batch import COLUMNS, line_to_row
from batchgen.dataset.row_batches import row_reader
from batchgen.dataset.source import Source, check_same_columns, naming, open_bytes


def json_source(paths: list[str], limit: int | None) -> Source:
    """JSON lines files as one input. Raises InputError, naming the line that is not valid."""
    columns: dict[str, set[str]] = {}

    def noting_columns(rows: Iterable[tuple[str, dict[str, Any]]]) -> Iterator[dict[str, Any]]:
        for path, row in rows:
            columns.setdefault(path, set()).update(row)
            yield row

    schema, total = infer_schema(noting_columns(itertools.islice(_json_rows(paths), limit)), paths[0])
    if total == limit:
        columns.popitem()  # the last file may have been left before all its columns came
    if columns:
        check_same_columns(columns)
    read = row_reader(lambda start: (row for _, row in _json_rows(paths, start)), schema, total, paths[0])
    return Source("jsonl", schema, total, read, lambda: files_identity(paths))


def openai_source(paths: list[str], limit: int | None) -> Source:
    """Rows as `line_to_row` gives them; what is wrong with one shows when it is made into a request."""
    seen, duplicates, total = set(), set(), 0
    for _, line in itertools.islice(_json_rows(paths), limit):
        custom_id = line_to_row(line)["custom_id"]
        if custom_id is not None:
            digest = hashlib.blake2b(custom_id.encode(), digest_size=8).digest()  # ids may be long
            if digest in seen:
                duplicates.add(total)
            seen.add(digest)
        total += 1
    schema = pa.schema([(name, pa.string()) for name in COLUMNS])
    read = row_reader(lambda start: (line_to_row(row) for _, row in _json_rows(paths, start)), schema, total, paths[0])
    return Source("openai", schema, total, read, lambda: files_identity(paths), frozenset(duplicates))


def looks_like_openai(path: str) -> bool:
    """Whether the first line of a JSON lines file has all that a line of an OpenAI batch has."""
    with naming(path):
        _, row = next(_json_rows([path]), (None, {}))
    return all(name in row for name in COLUMNS)


def _json_rows(paths: list[str], start_row: int = 0) -> Iterator[tuple[str, dict[str, Any]]]:
    """(file, row) from a row on; the lines before it are not parsed."""
    lines = ((path, number, line) for path in paths for number, line in _numbered_lines(path))
    for path, number, line in itertools.islice(lines, start_row, None):
        yield path, _parse_object(path, number, line)


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
