"""The file operations that sharing a job needs, and their implementation in a directory.

Neither file locks nor clocks are used. It is enough that only one of several processes can create a name, as on NFS,
Lustre and Ceph.
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

FOLDERS = ("leases", "workers", "done", "parts", "partials")
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


class Files(Protocol):
    """The interface of a store of small files with names such as "leases/000003.0000".

    A worker may see an older state than the one that other workers have written.
    """

    def create(self, name: str, content: bytes) -> bool:
        """Create a file with its whole content in one step; True if it was created, False if the name is taken."""

    def replace(self, name: str, content: bytes) -> None:
        """Create a file, or replace an existing one, in one step."""

    def read(self, name: str) -> bytes | None:
        """Read the content of a file; None where it does not exist."""

    def names(self, folder: str) -> list[str]:
        """The names of the files in a folder, sorted, without temporary files."""

    def remove(self, name: str) -> None:
        """Remove a file where it exists."""


def read_json(files: Files, name: str) -> Any:
    """Read a file as JSON; None where it does not exist. Raises BatchgenError where it is damaged, and OSError."""
    content = files.read(name)
    if content is None:
        return None
    try:
        return parse_json(content)
    except ValueError as error:
        raise damaged(name) from error


def damaged(name: str) -> BatchgenError:
    """The error to raise for a file with content that no worker writes."""
    return BatchgenError(
        f"share/{name} in the run directory is damaged: stop all workers, remove it, and run the same command again"
    )


class DirectoryFiles:
    """A store of small files (`Files`) in a directory, which may be on a network filesystem.

    All methods may raise OSError, as when the directory was removed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def make(self) -> None:
        """Create the directory and its subfolders."""
        for folder in FOLDERS:
            (self.path / folder).mkdir(parents=True, exist_ok=True)

    def create(self, name: str, content: bytes) -> bool:
        """Create a file by a hard link; True where it was created, False where the name is taken.

        Raises:
            InputError: The filesystem has no hard links.
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
        """Create a file, or replace an existing one, in one step."""
        os.replace(self._written(name, content), self.path / name)

    def read(self, name: str) -> bytes | None:
        """Read the content of a file; None where it does not exist."""
        try:
            return (self.path / name).read_bytes()
        except FileNotFoundError:
            return None

    def names(self, folder: str) -> list[str]:
        """The names of the files in a folder, sorted."""
        return sorted(name for name in os.listdir(self.path / folder) if not name.startswith("."))

    def remove(self, name: str) -> None:
        """Remove a file where it exists."""
        (self.path / name).unlink(missing_ok=True)

    def _written(self, name: str, content: bytes, *, lasting: bool = False) -> Path:
        """Write a temporary file in the folder of `name`; gives its path.

        Args:
            name: Name of the file that the temporary one will become.
            content: All bytes of the file.
            lasting: True to flush the file to stable storage.
        """
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
