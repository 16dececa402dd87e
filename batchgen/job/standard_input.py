"""Standard input as a job's input: it is copied to a temporary file, since inputs are read more than once."""

from __future__ import annotations

import shutil
import sys
from tempfile import gettempdir

from batchgen.core.errors import InputError
from batchgen.core.scratch_folder import ScratchFolder

STANDARD_INPUT = "-"
_SUFFIXES = {"parquet": ".parquet", "csv": ".csv"}


def is_standard_input(given: object) -> bool:
    """True where a job's input is standard input. An input may also be a table, which "==" would compare by values."""
    return isinstance(given, str) and given == STANDARD_INPUT


class StandardInput:
    """A file with all of standard input, which is deleted by `close` or at the end of the process.

    Attributes:
        path: The file. Its name is always the same, since an input's name is part of the job's fingerprint.
    """

    def __init__(self, input_format: str | None) -> None:
        """Read standard input to its end. Raises InputError where nothing is piped in, or there is no space for it."""
        if sys.stdin is None or sys.stdin.isatty():
            raise InputError("--input - reads what is piped in, and nothing is: give a file, or a command before |")
        try:
            self._folder = ScratchFolder("stdin")
            self.path = self._folder.path / f"stdin{_SUFFIXES.get(input_format or '', '.jsonl')}"
            with self.path.open("wb") as file:
                shutil.copyfileobj(sys.stdin.buffer, file)
        except OSError as error:
            raise InputError(
                f"standard input cannot be kept in {gettempdir()} ({error.strerror}): set TMPDIR"
            ) from error

    def close(self) -> None:
        """Delete the file."""
        self._folder.close()
