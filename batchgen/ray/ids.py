"""The ids of a job's rows: a check that they are unique, and the rows that are not done yet.

The functions run as Ray tasks, in processes that import few modules and load no model.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from xxhash import xxh3_64_intdigest

from batchgen.core.errors import InputError


def check_ids(input: str, id_column: str) -> int:
    """Check that the ids of all rows are unique; returns their number. Only the column of ids is read.

    Args:
        input: The input, as `ray.data.read_parquet` takes it.
        id_column: Name of the column with the ids.

    Raises:
        InputError: Two ids are equal or one is missing. Ray may have wrapped this error.
    """
    import ray.data

    ids = ray.data.read_parquet(input, columns=[id_column])
    hashed = ids.map_batches(hash_ids, fn_args=(id_column,), batch_format="pyarrow", batch_size=None)
    chunks = [batch.column(0).to_numpy() for batch in hashed.iter_batches(batch_format="pyarrow", batch_size=None)]
    hashes = np.concatenate(chunks) if chunks else np.zeros(0, np.uint64)
    repeated = pa.array(_repeated(hashes))
    if not len(repeated):
        return len(hashes)
    # Several ids may have one hash: ids with a repeated hash are compared themselves.
    suspects = ids.map_batches(_with_hash, fn_args=(id_column, repeated), batch_format="pyarrow", batch_size=None)
    counts = Counter(row[id_column] for row in suspects.iter_rows())
    if equal := [value for value, count in counts.items() if count > 1]:
        raise InputError(
            f"column {id_column!r} has {equal[0]!r} in {counts[equal[0]]:,} rows: give an id_column whose values differ"
        )
    return len(hashes)


def hash_ids(batch: pa.Table, id_column: str) -> pa.Table:
    """Hashes of the rows' ids, 64 bits each, equal on every machine. Raises InputError for a row without an id."""
    column = batch.column(id_column)
    if column.null_count:
        raise InputError(f"column {id_column!r} has rows without a value: give an id_column that all rows have")
    return pa.table(
        {"hash": pa.array([xxh3_64_intdigest(str(value).encode()) for value in column.to_pylist()], pa.uint64())}
    )


def _with_hash(batch: pa.Table, id_column: str, hashes: pa.Array) -> pa.Table:
    return batch.filter(pc.is_in(hash_ids(batch, id_column).column(0), value_set=hashes))


def _repeated(values: np.ndarray) -> np.ndarray:
    """The values that occur more than once in an array."""
    unique, counts = np.unique(values, return_counts=True)
    return unique[counts > 1]


def ids_done(folder: Path, id_column: str) -> pa.Array:
    """Ids of all rows that are in an output, in any order.

    Args:
        folder: The output.
        id_column: Name of the column with the ids.
    """
    columns = [pq.read_table(path, columns=[id_column]).column(0) for path in sorted(folder.glob("part-*.parquet"))]
    chunks = [chunk for column in columns for chunk in column.chunks]
    return pa.concat_arrays(chunks) if chunks else pa.array([])


def without_ids(batch: pa.Table, done: pa.Array, id_column: str) -> pa.Table:
    """The rows of a batch whose id is not in `done`."""
    return batch.filter(pc.invert(pc.is_in(batch.column(id_column), value_set=done)))


def rows_left(batch: pa.Table, done: Any, id_column: str) -> pa.Table:
    """The rows of a batch whose id is not among the ids of rows that are done.

    Args:
        batch: Rows of the input.
        done: Ray's reference to an Arrow array of the ids that are done; Ray stores the array once per machine.
        id_column: Name of the column with the ids.
    """
    import ray

    return without_ids(batch, ray.get(done), id_column)
