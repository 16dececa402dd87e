"""Errors whose message is one line that a person can act on.

The command line prints a `BatchgenError` without a traceback. Anything else that escapes is a bug in batchgen.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from batchgen.core.text import visible, without_credentials


class BatchgenError(Exception):
    """A job cannot start or go on.

    The message is one line and names the fix. Credentials of URLs in it are hidden.

    Attributes:
        exit_code: The exit code of the process (see `batchgen run --help`).
    """

    exit_code = 1

    def __init__(self, message: object = "") -> None:
        super().__init__(without_credentials(str(message)))


class InputError(BatchgenError):
    """Something that the user has given is wrong: a path, a column, a flag, a model, a budget."""

    exit_code = 2


class JobStopped(BatchgenError):
    """A job is not done, and nothing is wrong: the deadline came first, or it waits to be run elsewhere.

    Finished rows are saved; the same call goes on.
    """

    exit_code = 3


class TooManyFailed(BatchgenError):
    """More rows failed than `--max-failed` allows, or all of them.

    Finished rows are saved, with the errors of the others.

    Attributes:
        report: The report of the job.
    """

    exit_code = 4

    def __init__(self, message: str, report: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.report = report or {}


class RowError(Exception):
    """One row cannot be run (null, empty, too long). The error is recorded in that row, and the job goes on."""


def file_error(error: OSError, path: str) -> InputError:
    """The error that names a file or directory that cannot be opened. path: the name that the user gave."""
    inside = "" if error.filename in (None, path) else f": {os.fspath(error.filename)}"
    denied = isinstance(error, PermissionError)
    advice = "have its owner give you access, or name another path" if denied else "check the path and its disk"
    return InputError(f"cannot open {path} ({error.strerror or error}{inside}): {advice}")


@contextmanager
def naming_files(path: str | None = None, errors: type[OSError] = OSError) -> Iterator[None]:
    """Turn a system error about a file within the block into an InputError that names the file.

    Args:
        path: Name that the user gave; None: the name in the error. An error without a name passes.
        errors: Type of the errors that are turned.
    """
    try:
        yield
    except errors as error:
        name = path if path is not None else error.filename
        if name is None:
            raise
        raise file_error(error, os.fspath(name)) from error


def one_line(text: object) -> str:
    """A value as text of one line, without characters that act on a terminal, without credentials, and not too long."""
    line = " ".join(str(text).split())
    line = visible(without_credentials(line))  # before it is cut, or a piece of them would stay
    return line if len(line) <= 300 else line[:297] + "..."


def reason_of(error: BaseException) -> str:
    """The first line of an error's text, and the next where it ends in a colon; the error's type if it has no text."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
