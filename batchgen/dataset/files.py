"""The files that an input's name stands for, and the format that a file's name tells."""

from __future__ import annotations

import difflib
import glob
import os

from batchgen.core.errors import InputError
from batchgen.dataset.source import FORMATS, naming

EXTENSIONS = {
    **dict.fromkeys((".parquet", ".pq"), "parquet"),
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), "jsonl"),
    **dict.fromkeys((".csv", ".tsv"), "csv"),
}


def find_files(name: str, input_format: str | None) -> list[str]:
    """The files that a path, directory or glob stands for, by name."""
    if "://" in name:
        raise InputError(f"{name} is a URL: download it and give the local file")
    if os.path.isfile(name):
        return [name]
    if os.path.isdir(name):
        wanted = {"jsonl" if input_format == "openai" else input_format} if input_format else set(FORMATS)
        with naming(name):
            entries = sorted(e for e in os.listdir(name) if not e.startswith((".", "_")))
        found = [p for p in (os.path.join(name, e) for e in entries) if os.path.isfile(p)]
        found = [p for p in found if format_of(p) in wanted]
        if not found:
            what = "Parquet, JSON lines or CSV" if input_format is None else input_format
            raise InputError(f"no {what} files directly in {name}: give a glob, such as {name}/**/*.parquet")
        return found
    if glob.has_magic(name):
        found = sorted(p for p in glob.glob(name, recursive=True) if os.path.isfile(p))
        if not found:
            raise InputError(f"no file matches {name}{suggestion(name)}")
        return found
    if os.path.exists(name):
        raise InputError(f"{name} is not a regular file: save it as one, it is read more than once")
    raise InputError(f"{name}: no such file or directory{suggestion(name)}")


def format_of(path: str) -> str | None:
    """The format that a file name's extension stands for."""
    stem, extension = os.path.splitext(path.lower())
    if extension == ".gz":
        text_format = EXTENSIONS.get(os.path.splitext(stem)[1])
        return None if text_format == "parquet" else text_format
    return EXTENSIONS.get(extension)


def suggestion(name: str) -> str:
    """ "; did you mean ...?" with names in the same directory, or which directory is missing."""
    parent, base = os.path.split(name)
    if glob.has_magic(parent):
        return ""
    if not os.path.isdir(parent or "."):
        return f" (there is no directory {parent})"
    with naming(parent):
        close = difflib.get_close_matches(base, os.listdir(parent or "."), n=3)
    return f"; did you mean {' or '.join(os.path.join(parent, c) for c in close)}?" if close else ""
