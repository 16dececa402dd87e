"""Errors whose message is one line that a person can act on.

The command line prints a `BatchgenError` without a traceback. Anything else that escapes is a bug in batchgen.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from batchgen.core.text import visible, without_credentials


class BatchgenError(Exception):
    """The reason why a job cannot start or go on, as one line that names the fix.

    Credentials in URLs are hidden; line breaks and other control characters, as names may have them, are made visible.

    Attributes:
        exit_code: The exit code of the process (see `batchgen run --help`).
    """

    exit_code = 1

    def __init__(self, message: object = "") -> None:
        super().__init__(visible(without_credentials(str(message))))


class InputError(BatchgenError):
    """An error in what the user has given: a path, a column, an option, a model or a memory budget."""

    exit_code = 2


class OtherSettings(InputError):
    """The output has finished rows of other settings, which may not be mixed with rows of these."""


class JobStopped(BatchgenError):
    """The job stopped before it was complete, without a fault: a deadline passed, or it must continue elsewhere.

    Finished rows are saved. The same command continues the job.
    """

    exit_code = 3


class TooManyFailed(BatchgenError):
    """More rows failed than `--max-failed` allows, or all rows failed.

    The results of finished rows and the errors of failed rows are saved.

    Attributes:
        report: The report of the job.
    """

    exit_code = 4

    def __init__(self, message: str, report: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.report = report or {}


class RowError(Exception):
    """A row that cannot be run, such as a null, empty or too long prompt. The row fails, and the job goes on."""


def file_error(error: OSError, path: str) -> InputError:
    """The error for a file or directory that cannot be opened.

    Args:
        error: The system's error.
        path: The name of the file or directory as the user gave it.
    """
    inside = "" if error.filename in (None, path) else f": {os.fspath(error.filename)}"
    denied = isinstance(error, PermissionError)
    advice = "have its owner give you access, or name another path" if denied else "check the path and its disk"
    return InputError(f"cannot open {path} ({error.strerror or error}{inside}): {advice}")


@contextmanager
def naming_files(path: str | None = None, errors: type[OSError] = OSError) -> Iterator[None]:
    """Turn a system error that is raised within the block into an InputError that names the file.

    Args:
        path: The name of the file as the user gave it; None: the name in the system error. A system error without a
            file name passes unchanged.
        errors: The type of the errors to turn; others pass unchanged.
    """
    try:
        yield
    except errors as error:
        name = path if path is not None else error.filename
        if name is None:
            raise
        raise file_error(error, os.fspath(name)) from error


def one_line(text: object) -> str:
    """The text of a value, shortened to one line, without credentials and terminal control characters."""
    line = " ".join(str(text).split())
    line = visible(without_credentials(line))  # before it is cut, or a piece of them would stay
    return line if len(line) <= 300 else line[:297] + "..."


def reason_of(error: BaseException) -> str:
    """The first line of an error's text, or the name of the error's type where the text is empty.

    Where the first line ends in a colon, the second line is added.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
