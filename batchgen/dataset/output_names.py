"""Names of outputs that are written beside their inputs, `data.out.parquet`, which globs and directories leave out."""

from __future__ import annotations

import os
import re

MARK = ".out"  # between an input's name and the extension of its output
_OUTPUT = re.compile(rf"{re.escape(MARK)}(\.errors)?\.(parquet|jsonl|csv|arrow)", re.IGNORECASE)
_RUN_DIRECTORY = ".batchgen"


def is_output(path: str, pattern: str = "") -> bool:
    """True where a path is named as an output beside an input, or lies in a run directory.

    Args:
        path: Path or URL of a file.
        pattern: Glob or directory that names the file. It asks for outputs where its last part has the mark itself, and
            for files of run directories where it names such a directory.
    """
    *folders, name = path.split("/")
    if _RUN_DIRECTORY not in pattern and any(folder.endswith(_RUN_DIRECTORY) for folder in folders):
        return True
    return MARK + "." not in os.path.basename(pattern) and _OUTPUT.search(name) is not None


def left_out_line(paths: tuple[str, ...]) -> str:
    """The line about files of a glob or directory that are left out."""
    others = f" and {len(paths) - 1:,} more" if len(paths) > 1 else ""
    return f"left out: {paths[0]}{others}, named as outputs of earlier jobs (--input '*{MARK}.*' reads them)"
