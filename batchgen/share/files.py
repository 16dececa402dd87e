"""The few operations that sharing needs of a file system, and a directory that has them.

No file locks and no clocks are used: names that only one of several creators gets are enough. NFS, Lustre and Ceph have
them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import uuid
from pathlib import Path
from typing import Any, Protocol

from batchgen.core.errors import BatchgenError, InputError
from batchgen.core.typed_json import parse_json

FOLDERS = ("leases", "workers", "done", "parts")
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


class Files(Protocol):
    """Small files under names such as "leases/000003.0000"; a worker may see an older state than others wrote."""

    def create(self, name: str, content: bytes) -> bool:
        """Make a file that is there with all of its content, or not at all; False where the name is taken."""

    def replace(self, name: str, content: bytes) -> None:
        """Put a file at a name, whatever was there."""

    def read(self, name: str) -> bytes | None:
        """The content; None where there is no such file."""

    def names(self, folder: str) -> list[str]:
        """The names in a folder, in order, without those that are still being written."""

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""


def read_json(files: Files, name: str) -> Any:
    """A file's value; None where there is no such file. Raises BatchgenError where it is damaged, OSError."""
    content = files.read(name)
    if content is None:
        return None
    try:
        return parse_json(content)
    except ValueError as error:
        raise damaged(name) from error


def damaged(name: str) -> BatchgenError:
    """The error of a file whose content nobody writes."""
    return BatchgenError(
        f"share/{name} in the run directory is damaged: stop all workers, remove it, and run the same command again"
    )


class DirectoryFiles:
    """`Files` in a directory, which may be on a network file system.

    All methods may raise OSError, as when the directory has been removed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def make(self) -> None:
        """Make the directory and its folders."""
        for folder in FOLDERS:
            (self.path / folder).mkdir(parents=True, exist_ok=True)

    def create(self, name: str, content: bytes) -> bool:
        """Create a file by a hard link, unless the name is taken; gives False where it is.

        Raises:
            InputError: The file system has no hard links.
        """
        temporary = self._written(name, content, lasting=True)
        try:
            os.link(temporary, self.path / name)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno in _NO_LINKS:
                raise InputError(
                    f"--share needs hard links, which the file system of {self.path} does not have: give an --output"
                    " elsewhere"
                ) from error
            raise
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink()
        return True

    def replace(self, name: str, content: bytes) -> None:
        """Put content under a name, in place of what is there."""
        os.replace(self._written(name, content), self.path / name)

    def read(self, name: str) -> bytes | None:
        """The content under a name; None where there is none."""
        try:
            return (self.path / name).read_bytes()
        except FileNotFoundError:
            return None

    def names(self, folder: str) -> list[str]:
        """The names in a folder."""
        return sorted(name for name in os.listdir(self.path / folder) if not name.startswith("."))

    def remove(self, name: str) -> None:
        """Remove a name, if it is there."""
        (self.path / name).unlink(missing_ok=True)

    def _written(self, name: str, content: bytes, *, lasting: bool = False) -> Path:
        """A new file beside `name`. lasting: True where the content is on stable storage on return."""
        target = self.path / name
        temporary = target.with_name(f".{uuid.uuid4().hex}.tmp")
        try:
            with temporary.open("xb") as file:
                file.write(content)
                if lasting:
                    file.flush()
                    os.fsync(file.fileno())
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        return temporary
