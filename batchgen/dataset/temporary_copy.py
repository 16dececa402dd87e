"""A temporary copy of a stream's rows: rows are read more than once, and identified by all of their values."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa

from batchgen.core.errors import InputError
from batchgen.core.private_files import open_unnamed


def copy_of(schema: pa.Schema, batches: Iterable[pa.RecordBatch], name: str) -> pa.Table:
    """Copy batches into a file without a name, and give them as a table that is mapped from it.

    The file is gone when the table is, or when the process ends.

    Args:
        schema: The columns.
        batches: The rows.
        name: Name of the input in error messages.

    Raises:
        InputError: There is no space for the copy.
    """
    folder = tempfile.gettempdir()
    try:
        with os.fdopen(open_unnamed(Path(folder)), "w+b") as file:
            with pa.ipc.new_stream(file, schema) as writer:
                for batch in batches:
                    writer.write_batch(batch)
            file.flush()
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise InputError(f"{name} cannot be copied to {folder} ({error.strerror or error}): set TMPDIR") from error
    return pa.ipc.open_stream(pa.py_buffer(mapped)).read_all()
