"""Outputs of jobs that name none: files in the cache directory, in which the same job finds its rows again.

They are bounded: each such job deletes those that were not used for a week, and the oldest of more than 4 GiB.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchgen.core.cache_folder import cache_dir
from batchgen.core.digest import json_sha256
from batchgen.core.file_lock import LockHeld, lock_file
from batchgen.job.destination import make_output_folder
from batchgen.output.manifest import FORMAT_VERSION
from batchgen.output.run_directory import run_directory

KEPT_S = 7 * 24 * 3600
KEPT_BYTES = 4 << 30
_NAME_CHARS = 32
# Of an output, its file of errors and its run directory. Outputs at URLs have folders of their own beside these.
_NAMES = re.compile(rf"([0-9a-f]{{{_NAME_CHARS}}})\.(arrow|jsonl|errors\.jsonl)(\.batchgen)?")


def cached_output(fingerprint: dict[str, Any], suffix: str) -> Path:
    """The file of a job without an output of its own. Its name follows from the fingerprint and the version of files.

    Other outputs in the cache are deleted where they are old or too large together.

    Args:
        fingerprint: All that decides the output's rows.
        suffix: Extension of the output's format.

    Raises:
        InputError: The folder cannot be made.
    """
    folder = cache_dir() / "outputs"
    make_output_folder(folder)
    output = folder / f"{json_sha256(fingerprint | {'format_version': FORMAT_VERSION})[:_NAME_CHARS]}{suffix}"
    with contextlib.suppress(OSError):  # it is used now; by the output's own time `datasets` tells its content
        os.utime(run_directory(output))
    _prune(folder, output)
    return output


@dataclass(frozen=True)
class _Output:
    """An output in the cache.

    Attributes:
        paths: Its files and its run directory.
        size_bytes: Bytes of all its files.
        used_s: Time at which one of them was last written, or used by a job.
    """

    paths: tuple[Path, ...]
    size_bytes: int
    used_s: float

    @property
    def is_complete(self) -> bool:
        """True where a job has written the output. Its rows can be computed again; those of others are not lost."""
        return any(path.is_file() for path in self.paths)


def _prune(folder: Path, kept: Path) -> None:
    """Delete old outputs, and then the longest unused complete ones while all take too much. kept: stays anyway."""
    others = sorted((o for o in _outputs(folder) if kept not in o.paths), key=lambda output: output.used_s)
    held_bytes = sum(output.size_bytes for output in others)
    for output in others:
        is_old = time.time() - output.used_s > KEPT_S
        if is_old or (output.is_complete and held_bytes > KEPT_BYTES):
            _delete(output)
            held_bytes -= output.size_bytes


def _outputs(folder: Path) -> Iterator[_Output]:
    by_name: dict[str, list[Path]] = defaultdict(list)
    for path in folder.iterdir():
        if match := _NAMES.fullmatch(path.name):
            by_name[match[1]].append(path)
    for paths in by_name.values():
        with contextlib.suppress(OSError):  # another job has deleted it
            files = [file.stat() for path in paths for file in (path, *path.rglob("*"))]
            yield _Output(tuple(paths), sum(file.st_size for file in files), max(file.st_mtime for file in files))


def _delete(output: _Output) -> None:
    """Delete an output, unless a job works on it. A table that is mapped from it stays valid."""
    with contextlib.ExitStack() as stack, contextlib.suppress(OSError, LockHeld):
        for directory in filter(Path.is_dir, output.paths):
            stack.callback(os.close, lock_file(directory / "lock"))
        for path in output.paths:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink()
