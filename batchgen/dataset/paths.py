"""The files and folders of an input on disk, to find out whether an output path would be a part of the input."""

from __future__ import annotations

import fnmatch
import glob
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from batchgen.dataset.output_names import is_output
from batchgen.dataset.readers.datasets import files_behind, is_datasets_object
from batchgen.dataset.storage import is_url


@dataclass(frozen=True)
class InputPaths:
    """The files of an input on disk, and the folder or glob that names them.

    Attributes:
        files: Paths of the files.
        folder: The folder that the user gave; None where it was not a folder. A later run also reads files that are
            added to it.
        pattern: The glob that the user gave; None where it was not a glob.
    """

    files: tuple[str, ...] = ()
    folder: str | None = None
    pattern: str | None = None

    @classmethod
    def of(cls, source: Any) -> InputPaths:
        """The paths of an input that `open_dataset` takes; none for an input that is not on disk or does not exist."""
        if not isinstance(source, (str, os.PathLike)):
            return cls(tuple(files_behind(source)) if is_datasets_object(source) else ())
        name = os.path.expanduser(os.fspath(source)).removeprefix("file://")
        if is_url(name):
            return cls()
        if os.path.isdir(name):
            return cls(folder=name)
        if os.path.isfile(name):
            return cls((name,))
        if glob.has_magic(name):
            found = [path for path in glob.glob(name, recursive=True) if not is_output(path, name)]
            return cls(tuple(path for path in found if os.path.isfile(path)), pattern=name)
        return cls()

    def includes(self, path: str | os.PathLike[str]) -> str | None:
        """The end of an error message that says how a file would be a part of the input; None where it would not be.

        Args:
            path: The path of the file, which need not exist.
        """
        if any(same_file(path, file) for file in self.files):
            return "is a file of the input"
        if is_output(os.fspath(path), self.pattern or self.folder or ""):  # which directories and globs leave out
            return None
        if self.folder is not None and is_in(path, self.folder):
            return f"lies in the input {self.folder}"
        if self.pattern is not None and _matches(os.path.realpath(path), self.pattern):
            return f"matches the input {self.pattern}"
        return None


def same_file(a: str | os.PathLike[str], b: str | os.PathLike[str]) -> bool:
    """True where two paths lead to the same file or folder, also through links, and also before it exists."""
    if os.path.realpath(a) == os.path.realpath(b):
        return True
    return os.path.exists(a) and os.path.exists(b) and os.path.samefile(a, b)


def is_in(path: str | os.PathLike[str], folder: str | os.PathLike[str]) -> bool:
    """True where a path is a folder or lies in the folder, at any depth."""
    path = os.path.realpath(path)
    while True:
        if same_file(path, folder):
            return True
        path, below = os.path.dirname(path), path
        if path == below:
            return False


def _matches(path: str, pattern: str) -> bool:
    """True where `glob` would find a file at a real path if the file existed.

    The first components of the pattern are expanded on disk, since folders may be links. The remaining components are
    matched by name, since folders of the path may not exist yet.

    Args:
        path: The real path of the file.
        pattern: The glob.
    """
    parts = [part for part in os.path.join(os.getcwd(), pattern).split("/") if part not in ("", ".")]
    first = next(i for i, part in enumerate(parts) if glob.has_magic(part))
    for cut in range(first, len(parts)):
        rest = parts[cut - (cut > first and parts[cut - 1] == "**") :]
        for head in glob.glob("/" + "/".join([*parts[:cut], ""]), recursive=True):
            root = os.path.realpath(head).rstrip("/") + "/"
            if path.startswith(root) and _names_match(path[len(root) :].split("/"), rest):
                return True
    return False


def _names_match(names: Sequence[str], patterns: Sequence[str]) -> bool:
    if not patterns:
        return not names
    if patterns[0] == "**" and _names_match(names, patterns[1:]):
        return True
    if not names or (names[0].startswith(".") and not patterns[0].startswith(".")):
        return False
    if patterns[0] == "**":
        return _names_match(names[1:], patterns)
    return fnmatch.fnmatchcase(names[0], patterns[0]) and _names_match(names[1:], patterns[1:])
