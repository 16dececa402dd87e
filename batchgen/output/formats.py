"""File formats of the final output (Parquet, JSON lines, CSV, Arrow), each written from a stream of batches.

The bytes of the file depend only on the rows' values and the batch sizes, so an interrupted job ends in the same file.
"""

from __future__ import annotations

import base64
import datetime
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from batchgen.core.errors import InputError

_GROUP_ROWS = 65536
_GROUP_BYTES = 32 << 20


def output_format(path: Path) -> str:
    """The file extension of an output path, one of FORMATS. Raises InputError for any other."""
    suffix = path.suffix.lower()
    if suffix not in FORMATS:
        raise InputError(f"cannot write {path.name!r}: --output must end in {', '.join(FORMATS)}")
    return suffix


def check_writable(path: Path, schema: pa.Schema) -> None:
    """Raise InputError where the output format cannot hold a column of the schema. Called before the job runs."""
    if output_format(path) != ".parquet":
        return
    for field in schema:
        try:
            with pq.ParquetWriter(pa.BufferOutputStream(), pa.schema([field])) as writer:
                writer.write_table(pa.schema([field]).empty_table())
        except (pa.ArrowException, OSError) as error:
            raise InputError(
                f"column {field.name!r} of type {field.type} cannot be kept in a Parquet file: "
                "drop it from the input, or write to a .jsonl file"
            ) from error


def _write_parquet(file: BinaryIO, schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> None:
    """Write a Parquet file. A row group ends at a number of rows or of bytes, both counted from the values alone."""
    with pq.ParquetWriter(file, schema, compression="zstd") as writer:
        group: list[pa.RecordBatch] = []
        rows = size_bytes = 0
        for batch in batches:
            group.append(batch)
            rows += batch.num_rows
            size_bytes += sum(_value_bytes(column) for column in batch.columns)
            if rows >= _GROUP_ROWS or size_bytes >= _GROUP_BYTES:
                writer.write_table(pa.Table.from_batches(group), row_group_size=rows)
                group, rows, size_bytes = [], 0, 0
        if group:
            writer.write_table(pa.Table.from_batches(group), row_group_size=rows)


def _write_arrow(file: BinaryIO, schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> None:
    """Write Arrow's stream format, which the library `datasets` can map into memory as it is."""
    with pa.ipc.new_stream(file, schema) as writer:
        for batch in batches:
            writer.write_batch(batch)


def _value_bytes(array: pa.Array) -> int:
    """Bytes of an array's values without validity bitmaps, which Arrow may or may not allocate."""
    kind = array.type
    if pa.types.is_list(kind):
        return 4 * len(array) + _value_bytes(array.flatten())
    if pa.types.is_fixed_size_list(kind):
        return int(kind.list_size * len(array) * kind.value_type.bit_width) // 8
    if pa.types.is_struct(kind):
        return sum(_value_bytes(child) for child in array.flatten())
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        return 4 * len(array) + int(pc.sum(pc.binary_length(array)).as_py() or 0)
    if pa.types.is_primitive(kind):
        return (len(array) * int(kind.bit_width) + 7) // 8
    return int(array.nbytes)


def _write_jsonl(file: BinaryIO, schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> None:
    for batch in batches:
        file.writelines(json_line(row) for row in batch.to_pylist())


def _write_csv(file: BinaryIO, schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> None:
    """Write rows as CSV: nested columns as JSON text, times in ISO 8601, bytes in base64, null as an empty field.

    An empty text is written as "", so that it differs from null.
    """
    plain = [_is_plain(f.type) for f in schema]
    kept = [f if p else pa.field(f.name, pa.string()) for f, p in zip(schema, plain, strict=True)]
    csv_schema = pa.schema(kept)
    with pa_csv.CSVWriter(file, csv_schema) as writer:
        for batch in batches:
            columns = [c if p else _as_text(c) for c, p in zip(batch.columns, plain, strict=True)]
            writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=csv_schema))


def _is_plain(kind: pa.DataType) -> bool:
    t = pa.types
    is_text = t.is_string(kind) or t.is_large_string(kind)
    is_number = t.is_boolean(kind) or t.is_integer(kind) or t.is_floating(kind)
    return bool(is_text or is_number or t.is_date(kind))


def _as_text(column: pa.Array) -> pa.Array:
    write = _json_text if pa.types.is_nested(column.type) else lambda value: str(_jsonable(value))
    return pa.array([None if v is None else write(v) for v in column.to_pylist()], pa.string())


def json_line(value: Any) -> bytes:
    """A value as one line of JSON with a newline. NaN is written as null, bytes in base64, dates in ISO 8601."""
    return _json_text(value).encode("utf-8", "replace") + b"\n"


def _json_text(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, default=_jsonable, allow_nan=False)
    except ValueError:  # JSON has no NaN and no infinity
        return json.dumps(_finite(value), ensure_ascii=False, default=_jsonable)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _jsonable(value: Any) -> Any:
    """The text for a value that JSON cannot hold: bytes in base64, dates and times in ISO 8601."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    return str(value)


FORMATS = {".parquet": _write_parquet, ".jsonl": _write_jsonl, ".csv": _write_csv, ".arrow": _write_arrow}
