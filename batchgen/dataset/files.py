"""Finding the files of an input by its name, and the input format by a file's extension."""

from __future__ import annotations

import difflib
import glob
import os
import re
from collections.abc import Iterator
from typing import NamedTuple

from batchgen.core.errors import InputError
from batchgen.dataset.output_names import MARK, is_output
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


class FoundFiles(NamedTuple):
    """The files of an input.

    Attributes:
        paths: Paths or URLs, sorted by name.
        partitions: Columns of the files' partition directories.
        left_out: Paths of files that are outputs of earlier jobs by their names.
    """

    paths: list[str]
    partitions: Partitions = Partitions()
    left_out: tuple[str, ...] = ()


def find_files(name: str, input_format: str | None) -> FoundFiles:
    """Find the files of an input.

    Files of a directory or glob that are named as outputs are left out, unless the glob asks for outputs.

    Args:
        name: A path, URL, directory or glob.
        input_format: One of `FORMATS`; None: file extensions decide.
    """
    with naming(name):
        if is_file(name):
            return FoundFiles([name])
        if is_folder(name):
            return _in_folder(name, input_format)
        if glob.has_magic(name):
            paths, left_out = _without_outputs(matches(name), name)
            if paths:
                return FoundFiles(paths, left_out=left_out)
            raise InputError(_only_outputs(name, left_out) or f"no file matches {name}{suggestion(name)}")
    if os.path.exists(name):
        raise InputError(f"{name} is not a regular file: save it as one, it is read more than once")
    raise InputError(f"{name}: no such file or directory{suggestion(name)}")


def is_saved_dataset(name: str) -> bool:
    """True where a path is a directory that `datasets.save_to_disk` has written."""
    return any(os.path.exists(os.path.join(name, file)) for file in ("dataset_dict.json", "state.json"))


def _without_outputs(paths: list[str], name: str) -> tuple[list[str], tuple[str, ...]]:
    """Paths that are not outputs by their names, and those that are. name: directory or glob of the input."""
    outputs = {path for path in paths if is_output(path, name)}
    return [path for path in paths if path not in outputs], tuple(path for path in paths if path in outputs)


def _only_outputs(name: str, left_out: tuple[str, ...]) -> str:
    """The error message for a directory or glob that has nothing but outputs; "" where it has none."""
    if not left_out:
        return ""
    return f"{name} has nothing but outputs of earlier jobs, such as {left_out[0]}: name one, or '*{MARK}.*'"


def _in_folder(name: str, input_format: str | None) -> FoundFiles:
    wanted = {"jsonl" if input_format == "openai" else input_format} if input_format else set(FORMATS)
    paths, left_out = _without_outputs([path for path in _walk(name) if format_of(path) in wanted], name)
    if not paths:
        what = "Parquet, JSON lines or CSV" if input_format is None else input_format
        raise InputError(
            _only_outputs(name, left_out)
            or f"no {what} files directly in {name}: give a glob, such as {name}/**/*.parquet"
        )
    return FoundFiles(paths, Partitions.of(paths, name), left_out)


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


def stem_of(path: str) -> str:
    """The name of a file without its extension, and without that of a compression; any other name as it is."""
    stem, extension = os.path.splitext(os.path.basename(path))
    if extension.lower() in _COMPRESSED:
        stem, extension = os.path.splitext(stem)
    return stem if extension.lower() in EXTENSIONS else os.path.basename(path)


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
