"""A dataset in: Parquet, JSON lines, CSV, `datasets` and OpenAI batch files, all read as Arrow batches.

Every reader streams: what is held in memory does not grow with the number of rows. Each is a `_Source`, a
schema and a function that reads from a given row; `Dataset` lays `limit` and `shard` over it.

JSON lines and CSV are read twice. The first pass, when the input is opened, finds every syntax error, counts
the rows and, for JSON, finds one type per column that holds for the whole file. CSV has no types: its columns
are text, exactly as written, so that "007" or "2.50" reaches the prompt unchanged.
"""

from __future__ import annotations

import codecs
import csv
import difflib
import glob
import gzip
import hashlib
import io
import itertools
import json
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import pyarrow as pa

from batchgen.errors import InputError
from batchgen.openai_batch import COLUMNS, line_to_row

FORMATS = ("parquet", "jsonl", "csv", "datasets", "openai")
_EXTENSIONS = {
    **dict.fromkeys((".parquet", ".pq"), "parquet"),
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), "jsonl"),
    **dict.fromkeys((".csv", ".tsv"), "csv"),
}
_READ_ERRORS = (OSError, EOFError, zlib.error, UnicodeError, pa.ArrowException)

_PARQUET_BUFFER_BYTES = 256 << 10  # per column, so that pages are streamed instead of whole column chunks
_HASH_WHOLE_BYTES = 64 << 20
_HASH_SAMPLE_BYTES = 64 << 10
_HASH_SAMPLES = 64
_MAX_DEPTH = 50  # of nested types; deeper values become text
_MAX_FIELDS = 2000  # an object with more different keys than this is a map, not a record


@dataclass(frozen=True)
class _Source:
    """One input of a known format, before limit and shard.

    total_rows: None where only a full pass can tell. read(start_row, batch_rows) yields (first row, batch) in
    order; it may begin with rows before `start_row` where that is cheaper than cutting, and batches may be
    larger than `batch_rows`.
    """

    format: str
    schema: pa.Schema
    total_rows: int | None
    read: Callable[[int, int], Iterator[tuple[int, pa.RecordBatch]]]
    identity: Callable[[], dict]
    duplicates: frozenset[int] = frozenset()


class Dataset:
    """The rows of one input that this job is about. Made by `open_dataset`.

    Row indices count from 0 over the whole input, whatever `limit` and `shard` leave of it. It may be
    iterated any number of times.
    """

    def __init__(self, source: _Source, limit: int | None, shard: tuple[int, int] | None):
        self._source, self._limit, self._shard = source, limit, shard
        self._total = source.total_rows  # rows after `limit`; None until counted
        if self._total is not None and limit is not None:
            self._total = min(self._total, limit)

    @property
    def format(self) -> str:
        """One of `FORMATS`."""
        return self._source.format

    @property
    def schema(self) -> pa.Schema:
        """All input columns. Every batch has exactly this schema."""
        return self._source.schema

    @property
    def duplicate_rows(self) -> frozenset[int]:
        """OpenAI batches: indices of the rows whose custom_id an earlier row already has. Else empty."""
        return self._source.duplicates

    @property
    def num_rows(self) -> int | None:
        """Rows after limit and shard, or None where only `count_rows()` can tell."""
        if self._total is None:
            return None
        begin, stop = self._bounds()
        return stop - begin

    def count_rows(self) -> int:
        """`num_rows`, with a pass over the input where that is needed (once)."""
        if self._total is None:
            counts = (batch.num_rows for _, batch in self._clipped(0, self._limit, 1024))
            self._total = sum(counts)
        return self.num_rows

    def batches(self, start_row: int = 0, batch_rows: int = 1024) -> Iterator[tuple[int, pa.RecordBatch]]:
        """(index of the first row, batch) in input order, from row `start_row` on.

        Batches hold 1 to `batch_rows` rows, cut wherever the reader finds it cheapest. Raises InputError,
        naming the file, where it turns out to be corrupt on the way.
        """
        if self._shard is not None:
            self.count_rows()
        begin, stop = self._bounds()
        return self._clipped(max(begin, start_row), stop, batch_rows)

    def identity(self) -> dict:
        """What decides whether this is the same input, as JSON values: names, sizes, hashes, columns.

        No absolute path and no time stamp, so that a copied input is the same input; and not the limit or the
        shard, which belong to the job.
        """
        columns = {field.name: str(field.type) for field in self.schema}
        return {"format": self.format, "columns": columns, **self._source.identity()}

    def _bounds(self) -> tuple[int, int | None]:
        """First row and the one after the last; None: to the end."""
        if self._total is None:
            return 0, self._limit
        index, shards = self._shard or (0, 1)
        return index * self._total // shards, (index + 1) * self._total // shards

    def _clipped(self, begin: int, stop: int | None, batch_rows: int) -> Iterator[tuple[int, pa.RecordBatch]]:
        if stop is not None and begin >= stop:
            return
        for first, batch in self._source.read(begin, batch_rows):
            end = batch.num_rows if stop is None else min(batch.num_rows, stop - first)
            for offset in range(max(begin - first, 0), end, batch_rows):
                yield first + offset, batch.slice(offset, min(batch_rows, end - offset))
            if stop is not None and first + batch.num_rows >= stop:
                return
        if self._total is not None:
            raise InputError(
                f"the input ended before row {stop}: it changed while it was read, so start again"
            )


def open_dataset(
    source: Any,
    *,
    input_format: str | None = None,
    split: str | None = None,
    limit: int | None = None,
    shard: tuple[int, int] | None = None,
) -> Dataset:
    """Opens an input and checks all of it that can be checked without keeping it in memory.

    source: a file, a glob or a directory of Parquet (.parquet, .pq), JSON lines (.jsonl, .ndjson, .json) or
        CSV (.csv, .tsv) files, the last two also with .gz; a directory written by `datasets.save_to_disk`; a
        hub dataset id; or a `datasets` object. The files of one input are read in the order of their names
        and must have the same columns.
    input_format: one of `FORMATS`, where the name does not tell. split: of a `datasets` dataset.
    limit: only the first so many rows. shard: (i, n), the i-th of n contiguous parts of what `limit` leaves.
    Raises InputError: nothing found, nothing in it, not readable, or not what its name says.
    """
    if input_format is not None and input_format not in FORMATS:
        raise InputError(f"--input-format {input_format!r} is not one of {', '.join(FORMATS)}")
    if limit is not None and limit < 1:
        raise InputError(f"--limit must be at least 1, not {limit}")
    if shard is not None and not 0 <= shard[0] < shard[1]:
        raise InputError(f"shard {shard[0]}/{shard[1]} does not exist: count from 0 to {shard[1] - 1}")
    if isinstance(source, (str, os.PathLike)):
        name = os.path.expanduser(os.fspath(source))
        opened = _open_path(name, input_format, split, limit)
    else:
        name = f"the {type(source).__name__} given"
        opened = _datasets_source(source, name, split, limit)
    if opened.total_rows == 0 or (opened.total_rows is None and next(opened.read(0, 1), None) is None):
        raise InputError(f"{name} has no rows: nothing to generate")
    if not opened.schema.names:
        raise InputError(f"{name} has no columns: nothing to make a prompt of")
    return Dataset(opened, limit, shard)


# Finding files


def _open_path(name: str, input_format: str | None, split: str | None, limit: int | None) -> _Source:
    saved = any(os.path.exists(os.path.join(name, f)) for f in ("dataset_dict.json", "state.json"))
    if saved and input_format in (None, "datasets"):
        return _saved_source(name, split, limit)
    if not os.path.exists(name) and _may_be_on_hub(name, input_format):
        return _hub_source(name, split, limit)
    if input_format == "datasets":
        raise InputError(
            f"{name} was not written by datasets.save_to_disk: leave out --input-format datasets"
        )
    if split is not None:
        raise InputError(f"--split is for `datasets` datasets, and {name} is not one: leave it out")
    paths = _find_files(name, input_format)
    formats = {input_format or _format_of(path): path for path in paths}
    if None in formats:
        known = " ".join(_EXTENSIONS)
        raise InputError(
            f"{formats[None]}: cannot tell its format from the name (known: {known}, text also as .gz): "
            f"give --input-format, one of {', '.join(FORMATS)}"
        )
    if len(formats) > 1:
        raise InputError(f"{name} has files of several formats: give --input-format {' or '.join(formats)}")
    (file_format,) = formats
    if file_format == "jsonl" and input_format is None and _looks_like_openai(paths[0]):
        file_format = "openai"
    if file_format == "parquet":
        return _parquet_source(paths)
    return {"jsonl": _json_source, "csv": _csv_source, "openai": _openai_source}[file_format](paths, limit)


def _find_files(name: str, input_format: str | None) -> list[str]:
    """The files that a path, directory or glob stands for, by name."""
    if "://" in name:
        raise InputError(f"{name} is a URL: download it and give the local file")
    if os.path.isfile(name):
        return [name]
    if os.path.isdir(name):
        wanted = {"jsonl" if input_format == "openai" else input_format} if input_format else set(FORMATS)
        with _naming(name):
            entries = sorted(e for e in os.listdir(name) if not e.startswith((".", "_")))
        found = [p for p in (os.path.join(name, e) for e in entries) if os.path.isfile(p)]
        found = [p for p in found if _format_of(p) in wanted]
        if not found:
            what = "Parquet, JSON lines or CSV" if input_format is None else input_format
            raise InputError(f"no {what} files directly in {name}: give a glob, such as {name}/**/*.parquet")
        return found
    if glob.has_magic(name):
        found = sorted(p for p in glob.glob(name, recursive=True) if os.path.isfile(p))
        if not found:
            raise InputError(f"no file matches {name}{_suggestion(name)}")
        return found
    if os.path.exists(name):
        raise InputError(f"{name} is not a regular file: save it as one, it is read more than once")
    raise InputError(f"{name}: no such file or directory{_suggestion(name)}")


def _format_of(path: str) -> str | None:
    """The format that a file name's extension stands for."""
    stem, extension = os.path.splitext(path.lower())
    if extension == ".gz":
        text_format = _EXTENSIONS.get(os.path.splitext(stem)[1])
        return None if text_format == "parquet" else text_format
    return _EXTENSIONS.get(extension)


def _suggestion(name: str) -> str:
    """ "; did you mean ...?" with names in the same directory, or which directory is missing."""
    parent, base = os.path.split(name)
    if glob.has_magic(parent):
        return ""
    if not os.path.isdir(parent or "."):
        return f" (there is no directory {parent})"
    with _naming(parent):
        close = difflib.get_close_matches(base, os.listdir(parent or "."), n=3)
    return f"; did you mean {' or '.join(os.path.join(parent, c) for c in close)}?" if close else ""


def _may_be_on_hub(name: str, input_format: str | None) -> bool:
    if input_format is None:  # "org/name", unless it is a misspelt file of a directory that is here
        is_id = re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name) is not None and _format_of(name) is None
        return is_id and not os.path.isdir(os.path.dirname(name))
    return input_format == "datasets"


@contextmanager
def _naming(path: str, *more_errors: type[Exception]):
    """Turns what a reader raises about `path` into one line that names it."""
    try:
        yield
    except (*_READ_ERRORS, *more_errors) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise InputError(
                f"cannot read {path} ({error.strerror}): check its permissions and its disk"
            ) from error
        if isinstance(error, UnicodeError):
            raise InputError(
                f"{path} is not UTF-8 ({_one_line(str(error))}): convert it, as iconv does"
            ) from error
        raise InputError(
            f"cannot read {path} ({_one_line(str(error))}): it is damaged, incomplete or of another "
            "format, so write or copy it again"
        ) from error


def _one_line(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 300 else text[:297] + "..."


def _open_bytes(path: str):
    """The file's bytes, decompressed if it is gzip, which its first bytes tell."""
    with open(path, "rb") as file:
        zipped = file.read(2) == b"\x1f\x8b"
    return gzip.open(path) if zipped else open(path, "rb")


def _files_identity(paths: list[str]) -> dict:
    return {"files": [_file_identity(path) for path in paths]}


def _file_identity(path: str) -> dict:
    """Name, size and SHA-256; of a file over 64 MiB, of its head, its tail and 64 evenly spaced samples."""
    digest = hashlib.sha256()
    with _naming(path), open(path, "rb") as file:
        size_bytes = os.fstat(file.fileno()).st_size
        if size_bytes <= _HASH_WHOLE_BYTES:
            while block := file.read(1 << 20):
                digest.update(block)
        else:
            last = _HASH_SAMPLES + 1
            for sample in range(last + 1):
                file.seek(sample * (size_bytes - _HASH_SAMPLE_BYTES) // last)
                digest.update(file.read(_HASH_SAMPLE_BYTES))
    return {"name": Path(path).name, "size_bytes": size_bytes, "sha256": digest.hexdigest()}


def _check_same_columns(columns: dict[str, Iterable[str]]) -> None:
    """Raises InputError unless every file of {path: column names} has the same ones, in any order."""
    (first, expected), *others = ((path, set(names)) for path, names in columns.items())
    for path, names in others:
        if names != expected:
            differing = ", ".join(map(repr, sorted(expected ^ names)))
            raise InputError(
                f"{path} and {first} do not have the same columns (only one has {differing}): "
                "run them as separate jobs, or make their columns the same"
            )


def _check_unique(names: list[str], path: str) -> None:
    twice = sorted({n for n in names if names.count(n) > 1})
    if twice:
        raise InputError(f"{path} has more than one column named {', '.join(map(repr, twice))}: rename one")


# Parquet


def _parquet_source(paths: list[str]) -> _Source:
    schema, columns, groups = None, {}, []
    for path in paths:
        with _naming(path), _open_parquet(path) as file:
            found = file.schema_arrow.remove_metadata()
            groups.append([file.metadata.row_group(g).num_rows for g in range(file.metadata.num_row_groups)])
        _check_unique(found.names, path)
        columns[path] = found.names
        _check_same_columns({paths[0]: columns[paths[0]], path: found.names})
        try:
            schema = found if schema is None else pa.unify_schemas([schema, found])
        except pa.ArrowException as error:
            reason = _one_line(str(error))
            raise InputError(
                f"{path} and {paths[0]} differ in a column's type ({reason}): cast it"
            ) from error

    def read(start_row: int, batch_rows: int) -> Iterator[tuple[int, pa.RecordBatch]]:
        first = 0
        for path, sizes in zip(paths, groups, strict=True):
            if first + sum(sizes) <= start_row:
                first += sum(sizes)
                continue
            skipped = 0
            while first + sizes[skipped] <= start_row:
                first += sizes[skipped]
                skipped += 1
            with _naming(path), _open_parquet(path) as file:
                wanted = list(range(skipped, len(sizes)))
                for batch in file.iter_batches(batch_rows, row_groups=wanted, use_threads=False):
                    yield first, _conform(batch, schema)
                    first += batch.num_rows

    total = sum(map(sum, groups))
    return _Source("parquet", schema, total, read, lambda: _files_identity(paths))


def _open_parquet(path: str):
    import pyarrow.parquet as pq

    return pq.ParquetFile(
        path, buffer_size=_PARQUET_BUFFER_BYTES, pre_buffer=False, page_checksum_verification=True
    )


def _conform(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """The batch with the columns in the schema's order and types."""
    columns = ((batch.column(field.name), field.type) for field in schema)
    arrays = [array if array.type == wanted else array.cast(wanted) for array, wanted in columns]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


# CSV


def _csv_source(paths: list[str], limit: int | None) -> _Source:
    columns = {path: next(_csv_records(path), (0, []))[1] for path in paths}
    for path, names in columns.items():
        _check_unique(names, path)
    _check_same_columns(columns)
    total = sum(1 for _ in itertools.islice(_csv_rows(paths), limit))
    schema = pa.schema([(name, pa.string()) for name in columns[paths[0]]])
    read = _row_reader(lambda start: itertools.islice(_csv_rows(paths), start, None), schema, total, paths[0])
    return _Source("csv", schema, total, read, lambda: _files_identity(paths))


def _csv_rows(paths: list[str]) -> Iterator[dict[str, str]]:
    for path in paths:
        records = _csv_records(path)
        _, names = next(records, (0, []))
        for line, fields in records:
            if len(fields) != len(names):
                raise InputError(
                    f"{path}, line {line}: {len(fields)} fields, but the header has {len(names)}: correct it "
                    "(fields that hold separators or line breaks go into double quotes)"
                )
            yield dict(zip(names, fields, strict=True))


def _csv_records(path: str) -> Iterator[tuple[int, list[str]]]:
    """(number of its last line, fields) of the header and each row; blank lines are no rows."""
    delimiter = "\t" if path.lower().removesuffix(".gz").endswith(".tsv") else ","
    csv.field_size_limit(2**31 - 1)  # fields are whole documents; the module's own limit is 128 KiB
    with _naming(path), _open_bytes(path) as file:
        lines = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
        reader = csv.reader(lines, delimiter=delimiter, strict=True)
        try:
            yield from ((reader.line_num, fields) for fields in reader if fields)
        except csv.Error as error:
            raise InputError(
                f"{path}, line {reader.line_num} is not valid CSV ({error}): correct it"
            ) from error


# JSON lines


def _json_source(paths: list[str], limit: int | None) -> _Source:
    columns: dict[str, set[str]] = {}

    def noting_columns(rows: Iterable[tuple[str, dict]]) -> Iterator[dict]:
        for path, row in rows:
            columns.setdefault(path, set()).update(row)
            yield row

    schema, total = _infer_schema(noting_columns(itertools.islice(_json_rows(paths), limit)), paths[0])
    if total == limit:
        columns.popitem()  # the last file may have been left before all its columns came
    if columns:
        _check_same_columns(columns)
    read = _row_reader(lambda start: (row for _, row in _json_rows(paths, start)), schema, total, paths[0])
    return _Source("jsonl", schema, total, read, lambda: _files_identity(paths))


def _openai_source(paths: list[str], limit: int | None) -> _Source:
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
    read = _row_reader(
        lambda start: (line_to_row(row) for _, row in _json_rows(paths, start)), schema, total, paths[0]
    )
    return _Source("openai", schema, total, read, lambda: _files_identity(paths), frozenset(duplicates))


def _looks_like_openai(path: str) -> bool:
    with _naming(path):
        _, row = next(_json_rows([path]), (None, {}))
    return all(name in row for name in COLUMNS)


def _json_rows(paths: list[str], start_row: int = 0) -> Iterator[tuple[str, dict]]:
    """(file, row) from a row on; the lines before it are not parsed."""
    lines = ((path, number, line) for path in paths for number, line in _numbered_lines(path))
    for path, number, line in itertools.islice(lines, start_row, None):
        yield path, _parse_object(path, number, line)


def _numbered_lines(path: str) -> Iterator[tuple[int, bytes]]:
    """(line number from 1, line) of the lines that are not blank."""
    with _naming(path), _open_bytes(path) as file:
        for number, line in enumerate(file, 1):
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if line.strip():
                yield number, line


def _parse_object(path: str, number: int, line: bytes) -> dict:
    where = f"{path}, line {number}"
    if line.lstrip().startswith(b"["):
        raise InputError(f"{where} is an array: write one object a line, as jq -c '.[]' does")
    try:
        value = json.loads(line.decode())
        value = _without_lone_surrogates(value) if b"\\u" in line else value
    except (ValueError, RecursionError) as error:
        at = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        reason = _one_line(at)
        raise InputError(f"{where} is not valid JSON ({reason}): write one object a line") from error
    if not isinstance(value, dict):
        raise InputError(f"{where} is not a JSON object: write one object a line, its keys the columns")
    return value


def _without_lone_surrogates(value: Any) -> Any:
    """Half of a surrogate pair, as texts cut in the middle have, is no character: it becomes U+FFFD."""
    if isinstance(value, str):
        return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    if isinstance(value, list):
        return [_without_lone_surrogates(v) for v in value]
    if isinstance(value, dict):
        return {_without_lone_surrogates(k): _without_lone_surrogates(v) for k, v in value.items()}
    return value


# Rows as Python values: one type per column over all of them


class _Kind(Enum):
    """A JSON scalar's type. A float holds every INT without loss, but not every LONG."""

    BOOL, INT, LONG, FLOAT, STRING, MIXED = range(6)  # MIXED: no single Arrow type holds the values


_SCALARS = {
    _Kind.BOOL: pa.bool_(),
    _Kind.INT: pa.int64(),
    _Kind.LONG: pa.int64(),
    _Kind.FLOAT: pa.float64(),
    _Kind.STRING: pa.string(),
    _Kind.MIXED: None,
}


def _infer_schema(rows: Iterable[dict], name: str) -> tuple[pa.Schema, int]:
    """The schema that holds all rows, and their number. A column that no one type holds is text."""
    kinds: Any = {}
    total = 0
    for row in rows:
        kinds = _widen(kinds, row)
        if kinds is _Kind.MIXED:
            raise InputError(
                f"the rows of {name} have more than {_MAX_FIELDS} different keys: nest or rename them"
            )
        total += 1
    types = {column: _arrow_type(kind) for column, kind in kinds.items()}
    return pa.schema([(c, pa.string() if t is None else t) for c, t in types.items()]), total


def _row_reader(rows_from: Callable[[int], Iterator[dict]], schema: pa.Schema, total_rows: int, name: str):
    """A `_Source.read` over rows as dicts; keys that a row does not have are null.

    It stops after `total_rows`: the rows beyond may be anything, they were not seen by the first pass.
    """

    def read(start_row: int, batch_rows: int) -> Iterator[tuple[int, pa.RecordBatch]]:
        rows = itertools.islice(rows_from(start_row), total_rows - start_row)
        while chunk := list(itertools.islice(rows, batch_rows)):
            columns = ([row.get(field.name) for row in chunk] for field in schema)
            try:
                arrays = [_to_array(v, t) for v, t in zip(columns, schema.types, strict=True)]
            except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
                reason = _one_line(str(error))
                raise InputError(f"{name} changed while it was being read ({reason}): start again") from error
            yield start_row, pa.RecordBatch.from_arrays(arrays, schema=schema)
            start_row += len(chunk)

    return read


def _to_array(values: list, column_type: pa.DataType) -> pa.Array:
    if column_type == pa.string():  # strings as they are, anything else that shares their column as JSON
        values = [v if v is None or isinstance(v, str) else _to_json(v) for v in values]
    return pa.array(values, column_type)


def _to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def _widen(kind: Any, value: Any, depth: int = 0) -> Any:
    """The narrowest kind that holds `value` and everything that `kind` holds.

    A kind is None (only nulls so far), a `_Kind`, another Arrow type, [kind] for lists or {key: kind} for
    objects. Lists and objects are widened in place.
    """
    if value is None or kind is _Kind.MIXED:
        return kind
    if depth > _MAX_DEPTH:
        return _Kind.MIXED
    if isinstance(value, dict):
        kind = {} if kind is None else kind
        if not isinstance(kind, dict):
            return _Kind.MIXED
        for key, item in value.items():
            kind[key] = _widen(kind.get(key), item, depth + 1)
        return kind if len(kind) <= _MAX_FIELDS else _Kind.MIXED
    if isinstance(value, list):
        kind = [None] if kind is None else kind
        if not isinstance(kind, list):
            return _Kind.MIXED
        for item in value:
            kind[0] = _widen(kind[0], item, depth + 1)
        return kind
    new = _scalar_kind(value)
    if kind is None or kind == new:
        return new
    for wide, narrow in ((_Kind.LONG, _Kind.INT), (_Kind.FLOAT, _Kind.INT)):
        if (kind, new) in ((wide, narrow), (narrow, wide)):
            return wide
    return _Kind.MIXED


def _scalar_kind(value: Any) -> Any:
    if isinstance(value, str):
        return _Kind.STRING
    if isinstance(value, bool):
        return _Kind.BOOL
    if isinstance(value, int):
        if abs(value) <= 2**53:
            return _Kind.INT
        return _Kind.LONG if -(2**63) <= value < 2**63 else _Kind.MIXED
    if isinstance(value, float):
        return _Kind.FLOAT
    try:  # dates, bytes, numpy arrays: never in JSON, but a `datasets` generator may yield them
        return pa.infer_type([value])
    except (pa.ArrowException, TypeError, ValueError):
        return _Kind.MIXED


def _arrow_type(kind: Any) -> pa.DataType | None:
    """None where no Arrow type does: mixed values inside, or objects without any key (Parquet has none)."""
    if kind is None:
        return pa.null()
    if isinstance(kind, list):
        item = _arrow_type(kind[0])
        return None if item is None else pa.list_(item)
    if isinstance(kind, dict):
        fields = {key: _arrow_type(item) for key, item in kind.items()}
        return None if not fields or None in fields.values() else pa.struct(list(fields.items()))
    return _SCALARS[kind] if isinstance(kind, _Kind) else kind


# The `datasets` library


def _saved_source(name: str, split: str | None, limit: int | None) -> _Source:
    import datasets

    with _naming(name, ValueError, KeyError, TypeError):
        loaded = datasets.load_from_disk(name)
    return _datasets_source(loaded, name, split, limit)


def _hub_source(name: str, split: str | None, limit: int | None) -> _Source:
    import datasets

    try:
        loaded = datasets.load_dataset(name, streaming=True)
    except Exception as error:  # the library raises many kinds, for no network as for no such dataset
        reason = _one_line(str(error)) or type(error).__name__
        raise InputError(
            f"{name}: no such file or directory{_suggestion(name)}; nor could a hub dataset of that name be "
            f"loaded ({reason})"
        ) from error
    return _datasets_source(loaded, name, split, limit)


def _datasets_source(dataset: Any, name: str, split: str | None, limit: int | None) -> _Source:
    import datasets

    if isinstance(dataset, dict):  # DatasetDict, IterableDatasetDict
        if split is None and len(dataset) > 1:
            raise InputError(f"{name} has several splits: choose one with --split ({', '.join(dataset)})")
        if split is not None and split not in dataset:
            raise InputError(f"{name} has no split {split!r}: choose one of {', '.join(dataset)}")
        if not dataset:
            raise InputError(f"{name} has no splits: nothing to generate")
        dataset = dataset[split] if split is not None else next(iter(dataset.values()))
    elif split is not None and str(getattr(dataset, "split", None)) != split:
        raise InputError(f"{name} is a single dataset without a split {split!r}: leave --split out")
    if isinstance(dataset, datasets.Dataset):
        return _table_source(dataset)
    if isinstance(dataset, datasets.IterableDataset):
        return _iterable_source(dataset, name, limit)
    raise InputError(f"input must be a path or a `datasets` dataset, not {type(dataset).__name__}")


def _table_source(dataset: Any) -> _Source:
    dataset = dataset.with_format(None)
    schema = dataset.features.arrow_schema.remove_metadata()

    def read(start_row: int, batch_rows: int) -> Iterator[tuple[int, pa.RecordBatch]]:
        rest = dataset.select(range(start_row, len(dataset))).with_format("arrow")
        return _table_batches(rest.iter(batch_rows), schema, start_row)

    def identity() -> dict:
        return {"fingerprint": dataset._fingerprint, "rows": len(dataset)}

    return _Source("datasets", schema, len(dataset), read, identity)


def _iterable_source(dataset: Any, name: str, limit: int | None) -> _Source:
    """A stream: of unknown length, unless its features are unknown too and a pass has to find them."""
    dataset = dataset.with_format(None)
    if dataset.features is not None:
        schema, total = dataset.features.arrow_schema.remove_metadata(), None

        def read(start_row: int, batch_rows: int) -> Iterator[tuple[int, pa.RecordBatch]]:
            with _naming(name):
                yield from _table_batches(dataset.with_format("arrow").iter(batch_rows), schema, 0)

    else:

        def rows_from(start_row: int) -> Iterator[dict]:
            with _naming(name):
                yield from itertools.islice(dataset, start_row, None)

        schema, total = _infer_schema(itertools.islice(rows_from(0), limit), name)
        read = _row_reader(rows_from, schema, total, name)

    def identity() -> dict:
        _, head = next(read(0, 64))
        return {"head_sha256": hashlib.sha256(_to_json(head.slice(0, 64).to_pylist()).encode()).hexdigest()}

    return _Source("datasets", schema, total, read, identity)


def _table_batches(
    tables: Iterator[pa.Table], schema: pa.Schema, first: int
) -> Iterator[tuple[int, pa.RecordBatch]]:
    for table in tables:
        for batch in table.combine_chunks().to_batches():
            yield first, _conform(batch, schema)
            first += batch.num_rows
