"""`open_dataset`: finds the files of an input and chooses the reader for their format."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from typing import Any

from batchgen.core.errors import InputError
from batchgen.dataset.bad_lines import ON_BAD_LINE
from batchgen.dataset.dataset import Dataset
from batchgen.dataset.files import EXTENSIONS, find_files, format_of, is_saved_dataset
from batchgen.dataset.output_names import left_out_line
from batchgen.dataset.partitions import Partitions
from batchgen.dataset.readers.csv import csv_source
from batchgen.dataset.readers.datasets import datasets_source, hub_source, is_datasets_object, saved_source
from batchgen.dataset.readers.json import json_source, looks_like_openai, openai_source
from batchgen.dataset.readers.parquet import parquet_source
from batchgen.dataset.readers.tables import given_table_source, table_source
from batchgen.dataset.source import FORMATS, Source
from batchgen.dataset.temporary_copy import copy_of


def open_dataset(
    source: Any,
    *,
    input_format: str | None = None,
    split: str | None = None,
    limit: int | None = None,
    shard: tuple[int, int] | None = None,
    on_bad_line: str = "fail",
    csv_delimiter: str | None = None,
    copy_streams: bool = False,
) -> Dataset:
    """Open an input and check it as far as possible without holding its rows in memory.

    An input may have no rows. Where its format has no schema (JSON lines), it then has no columns either.

    Args:
        source: The input: a file, glob or directory of Parquet (.parquet, .pq), JSON lines (.jsonl, .ndjson, .json) or
            CSV (.csv, .tsv) files, at a path or a URL that fsspec can read (s3://, hf://, ...); a directory written by
            `datasets.save_to_disk`; a dataset id of the Hugging Face hub; an object of the library `datasets`; or a
            table that a program has (`batchgen.dataset.readers.tables`). JSON and CSV files may be compressed (.gz,
            .zst). A JSON file may also be one array of objects. Subdirectories with names like `column=value` add such
            a column to their files. The files of an input are read in order of their names and must have the same
            columns.
        input_format: One of `FORMATS`; None: file extensions decide.
        split: Split of a `datasets` dataset.
        limit: The most rows to read.
        shard: (i, n): only the i-th, from 0, of n contiguous parts of the rows that `limit` leaves.
        on_bad_line: "fail" raises InputError for a line that is not a JSON object; "skip" makes it a row that fails
            (`bad_lines`).
        csv_delimiter: Character between the fields of CSV files.
        copy_streams: True to copy a stream, which only its first rows tell from others, into a temporary file. All of
            its values then identify it.

    Raises:
        InputError: The input does not exist, cannot be read, or has another format than its name says.
    """
    if input_format is not None and input_format not in FORMATS:
        raise InputError(f"--input-format {input_format!r} is not one of {', '.join(FORMATS)}")
    if limit is not None and limit < 1:
        raise InputError(f"--limit must be at least 1, not {limit}")
    if shard is not None and not 0 <= shard[0] < shard[1]:
        raise InputError(f"shard {shard[0]}/{shard[1]} does not exist: count from 0 to {shard[1] - 1}")
    if on_bad_line not in ON_BAD_LINE:
        raise InputError(f"--on-bad-line must be {' or '.join(ON_BAD_LINE)}, not {on_bad_line!r}")
    if isinstance(source, (str, os.PathLike)):
        name = os.path.expanduser(os.fspath(source))
        opened = _open_path(name, input_format, split, limit, on_bad_line, csv_delimiter)
    else:
        name = f"the {type(source).__name__} given"
        opened = _open_given(source, name, split, limit)
    if copy_streams and opened.is_stream:
        rows = (batch for _, batch in Dataset(opened, limit, None).batches())
        opened = table_source(copy_of(opened.schema, rows, name), name, opened.format)
    if csv_delimiter is not None and opened.format != "csv":
        raise InputError(f"--csv-delimiter is for CSV files, and {name} is read as {opened.format}: leave it out")
    if opened.total_rows is None and next(opened.read(0, 1, opened.schema.names), None) is None:
        opened = replace(opened, total_rows=0)
    if not opened.schema.names and opened.total_rows != 0:
        raise InputError(f"{name} has no columns: nothing to make a prompt of")
    return Dataset(opened, limit, shard)


def _open_given(given: Any, name: str, split: str | None, limit: int | None) -> Source:
    """Open an object that is no path. Raises InputError."""
    if is_datasets_object(given):
        return datasets_source(given, name, split, limit)
    if split is not None:
        raise InputError(f"--split is for `datasets` datasets, and {name} is not one: leave it out")
    return given_table_source(given, name, limit)


def _open_path(
    name: str,
    input_format: str | None,
    split: str | None,
    limit: int | None,
    on_bad_line: str,
    csv_delimiter: str | None,
) -> Source:
    if is_saved_dataset(name) and input_format in (None, "datasets"):
        return saved_source(name, split, limit)
    if not os.path.exists(name) and _may_be_on_hub(name, input_format):
        return hub_source(name, split, limit)
    if input_format == "datasets":
        raise InputError(f"{name} was not written by datasets.save_to_disk: leave out --input-format datasets")
    if split is not None:
        raise InputError(f"--split is for `datasets` datasets, and {name} is not one: leave it out")
    paths, partitions, left_out = find_files(name, input_format)
    opened = _open_files(name, paths, partitions, input_format, limit, on_bad_line, csv_delimiter)
    return replace(opened, notices=(left_out_line(left_out), *opened.notices)) if left_out else opened


def _open_files(
    name: str,
    paths: list[str],
    partitions: Partitions,
    input_format: str | None,
    limit: int | None,
    on_bad_line: str,
    csv_delimiter: str | None,
) -> Source:
    formats = dict.fromkeys(found for path in paths if (found := input_format or format_of(path)) is not None)
    if unknown := [path for path in paths if (input_format or format_of(path)) is None]:
        known = " ".join(EXTENSIONS)
        raise InputError(
            f"{unknown[-1]}: cannot tell its format from the name (known: {known}, text also as .gz or .zst): "
            f"give --input-format, one of {', '.join(FORMATS)}"
        )
    if len(formats) > 1:
        raise InputError(f"{name} has files of several formats: give --input-format {' or '.join(formats)}")
    (file_format,) = formats
    if file_format == "jsonl" and input_format is None and looks_like_openai(paths[0], on_bad_line):
        file_format = "openai"
    if file_format == "parquet":
        return parquet_source(paths, partitions, may_get_files=paths != [name])
    if file_format == "csv":
        return csv_source(paths, limit, partitions, csv_delimiter)
    if file_format == "openai":
        return openai_source(paths, limit, on_bad_line)
    return json_source(paths, limit, on_bad_line, partitions)


def _may_be_on_hub(name: str, input_format: str | None) -> bool:
    if input_format is None:  # "org/name", unless it is a misspelt file of a directory that is here
        is_id = re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name) is not None and format_of(name) is None
        return is_id and not os.path.isdir(os.path.dirname(name))
    return input_format == "datasets"
