"""What went wrong, in one line a person can act on.

`BatchgenError` carries such a line; the command line prints it without a traceback.
Anything else that escapes is a bug in batchgen.
"""

from typing import Any

from batchgen.core.text import without_credentials


class BatchgenError(Exception):
    """A job cannot start or go on.

    The message is one line and names the fix. Credentials of URLs in it are hidden.

    `exit_code` is what the process ends with (see `batchgen run --help`).
    """

    exit_code = 1

    def __init__(self, message: object = "") -> None:
        super().__init__(without_credentials(str(message)))


class InputError(BatchgenError):
    """What the user handed in is wrong: a path, a column, a flag, a model, a budget."""

    exit_code = 2


class JobStopped(BatchgenError):
    """A job is not done, and nothing is wrong: the deadline came first, or it waits to be run elsewhere.

    Finished rows are saved; the same call goes on.
    """

    exit_code = 3


class TooManyFailed(BatchgenError):
    """More rows failed than `--max-failed` allows, or all of them.

    What was finished is saved, the errors in their rows. `report` is that of the job.
    """

    exit_code = 4

    def __init__(self, message: str, report: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.report = report or {}


class RowError(Exception):
    """One row cannot be run (null, empty, too long). Recorded in that row; the job goes on."""


def one_line(text: object) -> str:
    """Text for such a line: line breaks and runs of blanks become one blank, it ends and shows no credentials."""
    line = without_credentials(" ".join(str(text).split()))  # before it is cut, or a piece of them would stay
    return line if len(line) <= 300 else line[:297] + "..."
