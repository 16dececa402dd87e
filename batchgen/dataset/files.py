"""Finding the files of an input by its name, and the input format by a file's extension."""

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
    """Find the files of an input, sorted by name, and the columns of its partition directories.

    Args:
        name: A path, URL, directory or glob.
        input_format: One of `FORMATS`; None: file extensions decide.
    """
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
    """Yield the files of a directory and of its partition directories, sorted by name."""
    for entry in entries(folder):
        path = os.path.join(folder, entry)
        if entry.startswith((".", "_")):
            continue
        if is_partition(entry) and is_folder(path):
            yield from _walk(path)
        elif is_file(path) or not there(path):  # which is said when it is opened: its rows are not left out
            yield path


def format_of(path: str) -> str | None:
    """The input format that a file's extension stands for; None: no known one. The query of a URL is ignored."""
    name = _QUERY.sub("", path) if is_url(path) else path
    stem, extension = os.path.splitext(name.lower())
    if extension in _COMPRESSED:
        text_format = EXTENSIONS.get(os.path.splitext(stem)[1])
        return None if text_format == "parquet" else text_format
    return EXTENSIONS.get(extension)


def suggestion(name: str) -> str:
    """The end of an error message for a missing path: similar names in its directory, or the missing directory."""
    parent, base = os.path.split(name)
    if glob.has_magic(parent) or is_url(name):
        return ""
    if not os.path.isdir(parent or "."):
        return f" (there is no directory {parent})"
    with naming(parent):
        close = difflib.get_close_matches(base, os.listdir(parent or "."), n=3)
    return f"; did you mean {' or '.join(os.path.join(parent, c) for c in close)}?" if close else ""
