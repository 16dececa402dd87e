"""Temporary folders that do not outlive their process, even where it was killed."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
import weakref
from pathlib import Path

from batchgen.core.file_lock import LockHeld, lock_file

_LOCK = "lock"
_UNFINISHED = "new-"  # a folder without its lock yet: no other process looks at it


class ScratchFolder:
    """A folder for files that a process needs while it runs.

    It is deleted by `close` or at the end of the process. Where the process was killed, the next one that makes a
    folder of the same kind deletes it: the owner's lock, which the system releases, tells which folders are left over.

    Attributes:
        path: The folder. Only this user can read it.
    """

    def __init__(self, kind: str, parent: Path | None = None) -> None:
        """Make a folder, and delete those of the same kind whose processes have ended.

        Args:
            kind: A word for what the folder is for; part of its name.
            parent: The folder in which it is made; None: that of temporary files (TMPDIR).

        Raises:
            OSError: The folder cannot be made.
        """
        parent, prefix = parent or Path(tempfile.gettempdir()), f"batchgen-{kind}-"
        _delete_leftovers(parent, prefix)
        unlocked = Path(tempfile.mkdtemp(prefix=_UNFINISHED + prefix, dir=parent))
        try:
            descriptor = lock_file(unlocked / _LOCK)
        except OSError:
            shutil.rmtree(unlocked, ignore_errors=True)
            raise
        self.path = unlocked.rename(parent / unlocked.name.removeprefix(_UNFINISHED))
        self._delete = weakref.finalize(self, _delete, self.path, descriptor)

    def close(self) -> None:
        """Delete the folder and all that is in it."""
        self._delete()

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _delete(path: Path, descriptor: int) -> None:
    shutil.rmtree(path, ignore_errors=True)
    os.close(descriptor)


def _delete_leftovers(parent: Path, prefix: str) -> None:
    """Delete this user's folders whose names begin with a prefix and whose locks nobody holds."""
    for path in parent.glob(f"{prefix}*"):
        try:
            status = os.lstat(path)
            if status.st_uid == os.geteuid() and stat.S_ISDIR(status.st_mode):
                _delete(path, lock_file(path / _LOCK))
        except (LockHeld, OSError):
            continue
