"""Reader for the library `datasets`: data saved on disk, on the hub or in memory, as a table or as a stream."""

from __future__ import annotations

import hashlib
import itertools
import os
import sys
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from batchgen.core.errors import InputError, one_line
from batchgen.dataset.files import suggestion
from batchgen.dataset.identity import InputFiles
from batchgen.dataset.json_types import infer_schema
from batchgen.dataset.row_batches import row_reader, to_json
from batchgen.dataset.source import ReadRows, Source, conform, naming, rows_of_batch, schema_of

# Streams do not tell how large their rows are: so many are read at once.
_STREAM_ROWS = 64


def saved_source(name: str, split: str | None, limit: int | None) -> Source:
    """Open a directory that `datasets.save_to_disk` wrote.

    Args:
        name: Path of the directory.
        split: Name of the split to read; None where there is a single split, or none.
        limit: The most rows to read.

    Raises:
        InputError: The directory is damaged, or has no such split.
    """
    import datasets

    with naming(name, ValueError, KeyError, TypeError):
        loaded = datasets.load_from_disk(name)
    return datasets_source(loaded, name, split, limit)


def hub_source(name: str, split: str | None, limit: int | None) -> Source:
    """Open a dataset of the hub as a stream.

    Args:
        name: Id of the dataset on the hub.
        split: Name of the split to read; None where there is a single split.
        limit: The most rows to read.

    Raises:
        InputError: The dataset cannot be loaded, or has no such split.
    """
    import datasets

    try:
        loaded = datasets.load_dataset(name, streaming=True)
    except Exception as error:  # the library raises many kinds, for no network as for no such dataset
        reason = one_line(error) or type(error).__name__
        raise InputError(
            f"{name}: no such file or directory{suggestion(name)}; nor could a hub dataset of that name be "
            f"loaded ({reason})"
        ) from error
    return datasets_source(loaded, name, split, limit)


def datasets_source(dataset: Any, name: str, split: str | None, limit: int | None) -> Source:
    """Open an object of the library `datasets`. Raises InputError where it has no such split or another type.

    Args:
        dataset: The object.
        name: Name of the object in error messages.
        split: Name of the split to read; None where the object has a single split, or none.
        limit: The most rows to read.
    """
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
    raise InputError(f"{name} has a split that is no dataset, but a {type(dataset).__name__}")


def is_datasets_object(given: Any) -> bool:
    """True for a dataset of the library `datasets`, or for its splits; the library is not imported."""
    library = sys.modules.get("datasets")
    names = ("Dataset", "IterableDataset", "DatasetDict", "IterableDatasetDict")
    return library is not None and isinstance(given, tuple(getattr(library, name, ()) for name in names))


def files_behind(dataset: Any) -> list[str]:
    """The files that a `datasets` object reads, where the library tells; none for rows that a function generates."""
    if isinstance(dataset, str):
        return [dataset] if os.path.isfile(dataset) else []
    if isinstance(dataset, dict):
        return files_behind(list(dataset.values()))
    if isinstance(dataset, list | tuple):
        return [file for each in dataset for file in files_behind(each)]
    if hasattr(dataset, "cache_files"):  # a Dataset
        return [entry["filename"] for entry in dataset.cache_files]
    inside = ("_ex_iterable", "ex_iterable", "ex_iterables", "kwargs")  # of a stream, whose steps lie around each other
    return [file for name in inside if hasattr(dataset, name) for file in files_behind(getattr(dataset, name))]


def _table_source(dataset: Any) -> Source:
    dataset = dataset.with_format(None)
    schema = dataset.features.arrow_schema  # its metadata has the features: they are kept in the output
    # The fingerprint tells how the dataset was made, not what is in the files that it maps into memory.
    files = InputFiles(list(dict.fromkeys(files_behind(dataset))))

    def read(start_row: int, batch_rows: int, names: list[str]) -> Iterator[tuple[int, pa.RecordBatch]]:
        wanted = schema_of(schema, names)
        rest = dataset.select(range(start_row, len(dataset))).select_columns(names).with_format("arrow")
        size_bytes = dataset.data.select(names).nbytes  # of all rows there, of which some may be selected
        tables = rest.iter(rows_of_batch(size_bytes, dataset.data.num_rows, batch_rows))
        for first, batch in _table_batches(tables, wanted, start_row):
            for path in files:
                files.check(path)
            yield first, batch

    def identity() -> dict[str, Any]:
        in_files = files.identity() if files else {}
        return {"fingerprint": dataset._fingerprint, "rows": len(dataset), **in_files}

    return Source("datasets", schema, len(dataset), read, identity, check=files.check_all)


def _iterable_source(dataset: Any, name: str, limit: int | None) -> Source:
    """Open a stream of rows. Where its column types are unknown, it is read once to find them and count the rows."""
    dataset = dataset.with_format(None)
    read: ReadRows
    if dataset.features is not None:
        schema, total = dataset.features.arrow_schema, None

        def stream(start_row: int, batch_rows: int, names: list[str]) -> Iterator[tuple[int, pa.RecordBatch]]:
            wanted = schema_of(schema, names)
            with naming(name):
                tables = dataset.select_columns(names).with_format("arrow").iter(min(batch_rows, _STREAM_ROWS))
                yield from _table_batches(tables, wanted, 0)

        read = stream
    else:

        def rows_from(start_row: int) -> Iterator[tuple[str, dict[str, Any]]]:
            with naming(name):
                yield from ((name, row) for row in itertools.islice(dataset, start_row, None))

        schema, total = infer_schema((row for _, row in itertools.islice(rows_from(0), limit)), name)
        read = row_reader(rows_from, schema, total)

    def identity() -> dict[str, Any]:
        head: list[dict[str, Any]] = next(
            (batch.slice(0, 64).to_pylist() for _, batch in read(0, 64, schema.names)), []
        )
        return {"head_sha256": hashlib.sha256(to_json(head).encode()).hexdigest()}

    return Source("datasets", schema, total, read, identity, is_stream=True)


def _table_batches(tables: Iterator[pa.Table], schema: pa.Schema, first: int) -> Iterator[tuple[int, pa.RecordBatch]]:
    for table in tables:
        for batch in table.combine_chunks().to_batches():
            yield first, conform(batch, schema)
            first += batch.num_rows
