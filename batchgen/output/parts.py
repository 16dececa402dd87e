"""Part files: Parquet files of finished rows, one every few seconds, and an index of the rows in them.

A row may be in several part files, as a retried row is. The part with the highest number has its newest result.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from batchgen.core.atomic_file import replace_durably, written_atomically
from batchgen.core.errors import BatchgenError
from batchgen.output.embed_result import EMBED_SCHEMA, EmbedResult
from batchgen.output.row_map import RowMap
from batchgen.output.row_result import RowResult, is_result_schema
from batchgen.output.score_result import SCORE_SCHEMA, ScoreResult

Result = RowResult | ScoreResult | EmbedResult
_PART_NAME = re.compile(r"part-(\d{6,})\.parquet(\.damaged)?")
_ORIGIN = b"batchgen"
_GROUP_BYTES = 2 << 20  # a row group is what a join decodes at once
_WINDOW_BYTES = 16 << 20
_WINDOW_ROWS = 65536


class DamagedPart(Exception):
    """A part file whose content is not valid. Its rows have to be computed again."""


def part_paths(parts_dir: Path) -> list[Path]:
    """The paths of the part files, oldest first."""
    found = [(int(m[1]), p) for p in parts_dir.iterdir() if (m := _PART_NAME.fullmatch(p.name)) and not m[2]]
    return [path for _, path in sorted(found)]


def part_number(path: Path) -> int:
    """The number of a part file. Parts are numbered in the order in which they were written."""
    found = _PART_NAME.fullmatch(path.name)
    if found is None:
        raise ValueError(f"{path} is no part")
    return int(found[1])


def next_part_number(parts_dir: Path) -> int:
    """The next unused part number: one above every part file that was ever in the directory, damaged ones included."""
    numbers = [int(m[1]) for p in parts_dir.iterdir() if (m := _PART_NAME.fullmatch(p.name))]
    return max(numbers, default=-1) + 1


def missing_parts(parts_dir: Path, written: int) -> list[str]:
    """The names of part files that were deleted.

    Part numbers have no gaps, so a missing number is a deleted file.

    Args:
        parts_dir: The directory of the part files.
        written: The number of part files that are known to have been written.
    """
    numbers = {int(m[1]) for p in parts_dir.iterdir() if (m := _PART_NAME.fullmatch(p.name))}
    wanted = range(max(written, 1 + max(numbers, default=-1)))
    return [f"part-{number:06d}.parquet" for number in wanted if number not in numbers]


def write_part(
    parts_dir: Path, number: int, results: Mapping[int, Result], origin: dict[str, Any] | None = None
) -> pa.RecordBatch:
    """Write a part file in one step and return its rows as an Arrow batch.

    Args:
        parts_dir: The directory of the part files.
        number: The number of the part.
        results: Results of one type (generated, scored or embedded) by row index.
        origin: JSON values about the job, which `part_origin` reads.

    Raises:
        OSError: The file cannot be written. No temporary file is left.
    """
    kind: Any = type(next(iter(results.values())))  # of all of them
    batch = kind.to_batch(results)
    rows_per_group = max(1, min(8192, batch.num_rows * _GROUP_BYTES // max(1, batch.nbytes)))
    with written_atomically(parts_dir / f"part-{number:06d}.parquet") as file:
        sink = pa.BufferOutputStream()  # parts are bounded; plain writes give plain OSErrors
        schema = batch.schema.with_metadata({_ORIGIN: json.dumps(origin).encode()})
        with pq.ParquetWriter(sink, schema, compression="zstd", write_page_checksum=True) as writer:
            writer.write_batch(batch.cast(schema), row_group_size=rows_per_group)
        file.write(sink.getvalue())
    return batch


def part_origin(path: Path) -> dict[str, Any]:
    """Read the JSON values about the job that a part file records. Raises DamagedPart."""
    with _open_part(path) as file:
        text = (file.schema_arrow.metadata or {}).get(_ORIGIN)
    try:
        return dict(json.loads(text)) if text is not None else {}
    except (ValueError, TypeError) as error:
        raise DamagedPart(f"{path.name}: its origin cannot be read") from error


def quarantine(path: Path) -> None:
    """Rename a damaged part file, so that it no longer counts as a part but can still be inspected."""
    replace_durably(path, path.with_name(path.name + ".damaged"))


@dataclass(frozen=True)
class PartGroup:
    """The row indices of one Parquet row group of a part file.

    Attributes:
        number: Number of the row group in the file.
        rows: Row indices, int64 [n], ascending.
        failed: True for each row that failed, bool [n].
        size_bytes: Uncompressed bytes of the row group.
    """

    number: int
    rows: np.ndarray[Any, Any]
    failed: np.ndarray[Any, Any]
    size_bytes: int


def scan_part(path: Path) -> Iterator[PartGroup]:
    """Yield the row indices of each row group of a part file; no other columns are read. Raises DamagedPart."""
    file = _open_part(path)
    with file:
        columns = [name for name in ("row", "error", "generated_tokens") if name in file.schema_arrow.names]
        for number in range(file.metadata.num_row_groups):
            table = _read(path, file, [number], columns)
            rows = table.column("row").to_numpy()
            failed = table.column("error").is_valid().to_numpy()
            yield PartGroup(number, rows, failed, file.metadata.row_group(number).total_byte_size)


def part_columns(path: Path, columns: list[str]) -> pa.Table:
    """Read some columns of a part file into a table. Raises DamagedPart."""
    with _open_part(path) as file:
        return _read(path, file, list(range(file.metadata.num_row_groups)), columns)


def newest_results(paths: Sequence[Path], columns: Sequence[str]) -> Iterator[pa.Table]:
    """Yield columns of the rows in part files, the newest file first. A row with several results comes once.

    Args:
        paths: The part files, oldest first.
        columns: Names of the columns to read.

    Raises:
        DamagedPart: A part file is damaged.
    """
    seen = RowMap(np.uint8)
    for path in reversed(paths):
        table = part_columns(path, ["row", *columns])
        rows = table.column("row").to_numpy()
        newest = seen.at(rows) == 0
        seen.put(rows, 1)
        yield table if newest.all() else table.filter(pa.array(newest))


def part_output_lens(path: Path) -> list[int]:
    """Read the number of generated tokens of each sample from a part file of generated texts. Raises DamagedPart."""
    column = part_columns(path, ["generated_tokens"]).column(0)
    lengths: list[int] = column.combine_chunks().flatten().to_pylist()
    return lengths


def _open_part(path: Path) -> pq.ParquetFile:
    try:
        file = pq.ParquetFile(path, page_checksum_verification=True)
    except PermissionError as error:  # it may well be whole: its rows are not to be computed again
        raise PermissionError(error.errno, os.strerror(error.errno or errno.EACCES), str(path)) from error
    except (pa.ArrowException, OSError) as error:
        raise _damaged(path, error) from error
    schema = file.schema_arrow
    if not (is_result_schema(schema) or schema.equals(SCORE_SCHEMA) or schema.equals(EMBED_SCHEMA)):
        raise DamagedPart(f"{path.name}: its columns are not those of a part")
    return file


def _read(path: Path, file: pq.ParquetFile, groups: list[int], columns: list[str] | None = None) -> pa.Table:
    try:
        return file.read_row_groups(groups, columns=columns)
    except (pa.ArrowException, OSError) as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> Exception:
    """The error to raise for a part file that cannot be read.

    It is DamagedPart for invalid content, and the given error where the system failed to read the file.
    """
    if isinstance(error, OSError) and error.errno is not None:
        return error
    return DamagedPart(f"{path.name}: {' '.join(str(error).split())}")


class PartIndex:
    """An index of the row groups of part files: the first and the last row of each, whatever the number of rows."""

    def __init__(self, parts_dir: Path) -> None:
        self._paths = part_paths(parts_dir)
        groups, bytes_per_row = [], 1.0
        for part, path in enumerate(self._paths):
            for group in _reporting_damage(path, scan_part(path)):
                groups.append((part, group.number, int(group.rows[0]), int(group.rows[-1])))
                bytes_per_row = max(bytes_per_row, group.size_bytes / len(group.rows))
        self._groups = np.array(groups, np.int64).reshape(-1, 4)  # part, row group, first row, last row
        self.window_rows = int(min(_WINDOW_ROWS, max(1024, _WINDOW_BYTES / bytes_per_row)))

    @property
    def times_decoded(self) -> float:
        """Mean number of times that a row group is decoded, if windows of rows are read one after the other."""
        if not len(self._groups):
            return 0.0
        windows = self._groups[:, 2:] // self.window_rows
        return float((windows[:, 1] - windows[:, 0]).mean()) + 1.0

    def tables(self) -> Iterator[pa.Table]:
        """Yield all results in tables, the oldest first. Raises BatchgenError where a part file is damaged."""
        return self._tables(np.full(len(self._groups), True))

    def read(self, first_row: int, count: int) -> pa.RecordBatch:
        """Read the newest results of consecutive rows, in order.

        Args:
            first_row: Index of the first row.
            count: Number of rows.

        Raises:
            BatchgenError: A row has no result, or a part file is damaged.
        """
        overlap = (self._groups[:, 2] < first_row + count) & (self._groups[:, 3] >= first_row)
        pieces = []
        for table in self._tables(overlap):
            rows = table.column("row").to_numpy()
            pieces.append(table.filter(pa.array((rows >= first_row) & (rows < first_row + count))))
        return newest_of_all(pieces, first_row, count)

    def _tables(self, wanted: np.ndarray[Any, Any]) -> Iterator[pa.Table]:
        """Yield some row groups as tables, the oldest first. wanted: True for each of them, bool [groups]."""
        groups = self._groups[wanted]
        for part in np.unique(groups[:, 0]).tolist():
            path = self._paths[part]
            yield from _reporting_damage(path, _read_groups(path, groups[groups[:, 0] == part, 1].tolist()))


def newest_in_order(tables: Sequence[pa.Table]) -> pa.RecordBatch:
    """Put tables of results together, sorted by row; some may have reasoning, and others none.

    Args:
        tables: The tables, at least one, the oldest first. Of a row with several results the last one is taken.
    """
    table = pa.concat_tables(tables, promote_options="default")
    rows = table.column("row").to_numpy()
    order = np.argsort(rows, kind="stable")
    is_newest = np.diff(rows[order], append=-1) != 0
    return table.take(pa.array(order[is_newest])).combine_chunks().to_batches()[0]


def newest_of_all(tables: Sequence[pa.Table], first_row: int, count: int) -> pa.RecordBatch:
    """The newest results of consecutive rows, in order. Raises BatchgenError where a row has none.

    Args:
        tables: Results of some of these rows, the oldest first.
        first_row: Index of the first row.
        count: Number of rows.
    """
    filled = [table for table in tables if table.num_rows]
    results = newest_in_order(filled) if filled else None
    if results is not None and results.num_rows == count:
        return results
    rows = np.arange(first_row, first_row + count)
    missing = np.setdiff1d(rows, [] if results is None else results.column("row").to_numpy())
    raise BatchgenError(f"{len(missing)} rows from row {missing[0]} on have no result yet: run the same command again")


def _read_groups(path: Path, numbers: list[int]) -> Iterator[pa.Table]:
    with _open_part(path) as file:
        for number in numbers:
            yield _read(path, file, [number])


def _reporting_damage(path: Path, items: Iterator[Any]) -> Iterator[Any]:
    """Yield the items of an iterator; a DamagedPart quarantines the part file and becomes a BatchgenError."""
    try:
        yield from items
    except DamagedPart as error:
        quarantine(path)
        raise BatchgenError(f"{error}: run the same command again to compute its rows anew") from error
