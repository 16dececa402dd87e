"""The files that an input's name stands for, and the format that a file's name tells."""

from __future__ import annotations

import difflib
import glob
import os
import re
from collections.abc import Iterator

from batchgen.core.errors import InputError
from batchgen.dataset.partitions import Partitions, is_partition
from batchgen.dataset.source import FORMATS, naming
from batchgen.dataset.storage import entries, is_file, is_folder, is_url, matches, there

EXTENSIONS = {
    **dict.fromkeys((".parquet", ".pq"), "parquet"),
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), "jsonl"),
    **dict.fromkeys((".csv", ".tsv"), "csv"),
}
_COMPRESSED = (".gz", ".zst")
_QUERY = re.compile(r"\?[^/?=]+=[^/]*$")


def find_files(name: str, input_format: str | None) -> tuple[list[str], Partitions]:
    """Files that a path, URL, directory or glob stands for, by name, and the columns of a directory's partitions."""
    with naming(name):
        if is_file(name):
            return [name], Partitions()
        if is_folder(name):
            return _in_folder(name, input_format)
        if glob.has_magic(name):
            if found := matches(name):
                return found, Partitions()
            raise InputError(f"no file matches {name}{suggestion(name)}")
    if os.path.exists(name):
        raise InputError(f"{name} is not a regular file: save it as one, it is read more than once")
    raise InputError(f"{name}: no such file or directory{suggestion(name)}")


def _in_folder(name: str, input_format: str | None) -> tuple[list[str], Partitions]:
    wanted = {"jsonl" if input_format == "openai" else input_format} if input_format else set(FORMATS)
    found = [path for path in _walk(name) if format_of(path) in wanted]
    if not found:
        what = "Parquet, JSON lines or CSV" if input_format is None else input_format
        raise InputError(f"no {what} files directly in {name}: give a glob, such as {name}/**/*.parquet")
    return found, Partitions.of(found, name)


def _walk(folder: str) -> Iterator[str]:
    """The files in a directory and in those that are its partitions, by name."""
    for entry in entries(folder):
        path = os.path.join(folder, entry)
        if entry.startswith((".", "_")):
            continue
        if is_partition(entry) and is_folder(path):
            yield from _walk(path)
        elif is_file(path) or not there(path):  # which is said when it is opened: its rows are not left out
            yield path


def format_of(path: str) -> str | None:
    """The format that a file name's extension stands for, before the query that a URL may have."""
    name = _QUERY.sub("", path) if is_url(path) else path
    stem, extension = os.path.splitext(name.lower())
    if extension in _COMPRESSED:
        text_format = EXTENSIONS.get(os.path.splitext(stem)[1])
        return None if text_format == "parquet" else text_format
    return EXTENSIONS.get(extension)


def suggestion(name: str) -> str:
    """ "; did you mean ...?" with names in the same directory, or which directory is missing."""
    parent, base = os.path.split(name)
    if glob.has_magic(parent) or is_url(name):
        return ""
    if not os.path.isdir(parent or "."):
        return f" (there is no directory {parent})"
    with naming(parent):
        close = difflib.get_close_matches(base, os.listdir(parent or "."), n=3)
    return f"; did you mean {' or '.join(os.path.join(parent, c) for c in close)}?" if close else ""
