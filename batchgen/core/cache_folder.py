"""The folder of what is downloaded, converted and measured once for all jobs of a user."""

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

    It is made with mode 0700.

    Where another user may write to it, a folder within it that is this user's alone, which a line says once.

    Raises:
        InputError: That folder is not this user's alone either, or cannot be made.
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
    """Say whether something in the cache is there that only this user, or root, can have written.

    Where another may have, a line says so.

    Args:
        path: In `cache_dir()`.
        what: For the line.
    """
    reason = why_untrusted(path, cache_dir())
    if reason is not None:
        _warn(f"{what} {path} is not used, as {reason}: it is made anew")
    return reason is None and path.exists()


@cache
def _warn(line: str) -> None:
    """Says it once."""
    with suppress(OSError, ValueError):
        say(f"batchgen: {line}")
