"""The digest of an Arrow table's values, which is the same however the rows are cut into chunks and batches."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from batchgen.dataset.unify import without_views

# Rows that are hashed at once: copies that some types need stay small.
_ROWS = 1 << 16


def content_digest(table: pa.Table) -> str:
    """Hash the values of a table at about the speed of memory (XXH3 of 128 bits); gives 32 hexadecimal digits.

    Names of columns and widths of offsets are not hashed. What buffers hold behind nulls, and outside the table's rows,
    does not count.

    Args:
        table: The table.
    """
    import xxhash  # not everywhere that a job of small files runs

    streams: dict[str, Any] = defaultdict(xxhash.xxh3_128)
    for batch in table.to_batches(max_chunksize=_ROWS):
        for index, column in enumerate(batch.columns):
            kind = without_views(column.type)  # in which slices of 65,536 rows are copied
            _feed(streams, f"{index:06}", column if column.type == kind else column.cast(kind))
    whole = xxhash.xxh3_128(f"{table.num_rows} {table.num_columns}".encode())
    for name in sorted(streams):
        whole.update(name.encode() + streams[name].digest())
    return str(whole.hexdigest())


def _feed(streams: dict[str, Any], name: str, array: pa.Array) -> None:
    """Add an array to the hashes of its column, of which each sees one sequence of bytes, wherever chunks end.

    Args:
        streams: The hashes by name: which values are null, lengths, and values, of the column and of all within it.
        name: The beginning of the names of the column's hashes.
        array: The next values of the column.
    """
    streams[f"{name}?"].update(_bytes_of(array.is_valid()))
    if array.null_count:
        array = array.drop_null()
    if not len(array):
        return
    kind = array.type
    if isinstance(kind, pa.BaseExtensionType):
        _feed(streams, f"{name}.", array.storage)
    elif pa.types.is_dictionary(kind):
        _feed(streams, f"{name}.", array.dictionary_decode())
    elif pa.types.is_run_end_encoded(kind):
        _feed(streams, f"{name}.", pc.run_end_decode(array))
    elif pa.types.is_string(kind) or pa.types.is_binary(kind) or _is_large_text(kind):
        _feed_texts(streams, name, array)
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
        streams[f"{name}#"].update(pc.list_value_length(array).cast(pa.int64()).to_numpy())
        _feed(streams, f"{name}.", array.flatten())
    elif pa.types.is_fixed_size_list(kind):
        _feed(streams, f"{name}.", array.flatten())
    elif pa.types.is_struct(kind):
        for index, child in enumerate(array.flatten()):
            _feed(streams, f"{name}.{index:06}", child)
    elif pa.types.is_boolean(kind):
        streams[name].update(_bytes_of(array))
    elif pa.types.is_primitive(kind) or pa.types.is_fixed_size_binary(kind) or pa.types.is_decimal(kind):
        width = kind.bit_width // 8
        streams[name].update(memoryview(array.buffers()[1])[array.offset * width : (array.offset + len(array)) * width])
    else:  # maps and unions
        streams[name].update("".join(map(repr, array.to_pylist())).encode("utf-8", "surrogatepass"))


def _feed_texts(streams: dict[str, Any], name: str, array: pa.Array) -> None:
    """Add an array of texts or bytes without nulls: their lengths, and their bytes, which lie one after the other."""
    _, ends, data = array.buffers()
    wide = _is_large_text(array.type)
    offsets = np.frombuffer(ends, np.int64 if wide else np.int32, len(array) + 1, array.offset * (8 if wide else 4))
    streams[f"{name}#"].update(np.diff(offsets).astype(np.int64))
    if data is not None:
        streams[name].update(memoryview(data)[offsets[0] : offsets[-1]])


def _is_large_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_large_string(kind) or pa.types.is_large_binary(kind))


def _bytes_of(array: pa.BooleanArray) -> Any:
    """One byte for each boolean of an array without nulls, uint8 [n]."""
    return array.to_numpy(zero_copy_only=False).astype(np.uint8)
