"""Parquet files, streamed page by page; row groups before the wanted row are not read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pyarrow as pa

from batchgen.core.errors import InputError, one_line
from batchgen.dataset.identity import files_begin_with, files_identity
from batchgen.dataset.partitions import Partitions
from batchgen.dataset.source import Source, check_same_columns, check_unique, conform, naming
from batchgen.dataset.storage import is_url, open_raw

if TYPE_CHECKING:
    import pyarrow.parquet as pq

_PARQUET_BUFFER_BYTES = 256 << 10  # per column, so that pages are streamed instead of whole column chunks


def parquet_source(paths: list[str], partitions: Partitions) -> Source:
    """Parquet files as one input. Raises InputError: damaged, or columns that do not fit together."""
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
            schema = found if schema is None else pa.unify_schemas([schema, found])
        except pa.ArrowException as error:
            reason = one_line(error)
            raise InputError(f"{path} and {paths[0]} differ in a column's type ({reason}): cast it") from error

    assert schema is not None  # there is at least one file
    own = schema

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
            with naming(path), _open_parquet(path) as file:
                wanted = list(range(skipped, len(sizes)))
                for batch in file.iter_batches(batch_rows, row_groups=wanted, use_threads=False):
                    yield first, partitions.extend(conform(batch, own), path)
                    first += batch.num_rows

    total = sum(map(sum, groups))
    schema = pa.schema([*own, *partitions.fields])
    return Source(
        "parquet",
        schema,
        total,
        read,
        lambda: files_identity(paths, partitions),
        begins_with=lambda now, was: files_begin_with(paths, now, was),
    )


def _open_parquet(path: str) -> pq.ParquetFile:
    import pyarrow.parquet as pq

    source = open_raw(path) if is_url(path) else path
    return pq.ParquetFile(source, buffer_size=_PARQUET_BUFFER_BYTES, pre_buffer=False, page_checksum_verification=True)
