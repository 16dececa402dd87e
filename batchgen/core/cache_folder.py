"""The cache folder of a user: files that are downloaded, converted or measured once and used by all jobs."""

from __future__ import annotations

import os
from contextlib import suppress
from functools import cache
from pathlib import Path

from batchgen.core.errors import InputError
from batchgen.core.private_files import private_folder, why_untrusted
from batchgen.core.screen import say


def cache_dir() -> Path:
    """The folder of downloads and converted tokenizers: $BATCHGEN_CACHE, or the user's cache directory.

    The folder is created with mode 0700. Where other users may write to it, a subfolder that only this user can write
    to is used instead, and a warning is shown once.

    Raises:
        InputError: The subfolder is not this user's alone either, or the folder cannot be created.
    """
    if own := os.environ.get("BATCHGEN_CACHE"):
        path = Path(own).expanduser()
    else:
        base = os.environ.get("XDG_CACHE_HOME")
        path = (Path(base) if base else Path.home() / ".cache") / "batchgen"
    with suppress(OSError):  # who writes to it says so
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700)
    if (reason := why_untrusted(path, path)) is None:
        return path
    own_path = path / f"user-{os.geteuid()}"
    _warn(f"the cache {path} is not used as {reason}: {own_path} is, or the folder that BATCHGEN_CACHE names")
    try:
        return private_folder(own_path)
    except OSError as error:
        raise InputError(
            f"the cache {own_path} cannot be used ({error.strerror}): set BATCHGEN_CACHE to a folder of your own"
        ) from error


def is_trusted(path: Path, what: str) -> bool:
    """True where only this user or root can have written a path in the cache; otherwise a warning is shown once.

    Args:
        path: The path of a file or folder in `cache_dir()`.
        what: The noun phrase for the file or folder in the warning.
    """
    reason = why_untrusted(path, cache_dir())
    if reason is not None:
        _warn(f"{what} {path} is not used, as {reason}: it is made anew")
    return reason is None and path.exists()


@cache
def _warn(line: str) -> None:
    """Show a warning to the user, each text once per process."""
    with suppress(OSError, ValueError):
        say(f"batchgen: {line}")
