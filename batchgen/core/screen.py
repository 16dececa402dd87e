"""Standard output and standard error: all text for people is written by this module.

Progress and messages are no part of the work. Where a stream is closed or full, or its terminal has vanished, they are
dropped, and the job goes on. Standard output may instead carry the result of a command, such as a plan. A failure to
write that result is an error, unless its reader has closed the pipe.
"""

from __future__ import annotations

import errno
import fcntl
import io
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

from batchgen import TYPE_CHECKING
from batchgen.core.text import visible

if TYPE_CHECKING:
    from typing import Any, TextIO


class Screen:
    """A text stream whose writes never fail: text that cannot be written is dropped.

    All other attributes are those of the wrapped stream.
    """

    def __init__(self, stream: Any) -> None:
        """Wrap a text stream; with None, as where Python has no standard error, all text is dropped."""
        self._stream = stream

    @classmethod
    def over(cls, stream: Any) -> Screen:
        """Wrap a stream in a Screen, unless it is one already."""
        return stream if isinstance(stream, cls) else cls(stream)

    def write(self, text: str) -> int:
        with suppress(OSError, ValueError, AttributeError):
            encoding = self._stream.encoding or "utf-8"
            self._stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError, AttributeError):
            self._stream.flush()

    def isatty(self) -> bool:
        """True where the stream is a terminal."""
        with suppress(OSError, ValueError, AttributeError):
            return bool(self._stream.isatty())
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class ProductLost(OSError):
    """The result of a command could not be written to standard output."""


class Product:
    """Standard output for the result of a command, the help text included: a failed write raises ProductLost."""

    def __init__(self, stream: Any) -> None:
        """Wrap a text stream."""
        self._stream = stream

    def write(self, text: str) -> int:
        """Write text and return its number of characters. Raises ProductLost."""
        with _lost():
            return int(self._stream.write(text))

    def flush(self) -> None:
        """Flush the stream. Raises ProductLost."""
        with _lost():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def _lost() -> Iterator[None]:
    try:
        yield
    except ProductLost:
        raise
    except OSError as error:
        raise ProductLost(error.errno, error.strerror) from error


def say(line: str, stream: TextIO | Screen | None = None) -> None:
    """Show one line to people. Terminal control characters are replaced. The function never fails.

    Args:
        line: One line, which may contain text of rows, files and models.
        stream: The stream; None: standard error.
    """
    screen = Screen.over(stream or sys.stderr)
    screen.write(visible(line) + "\n")
    screen.flush()


def put(lines: Iterable[str]) -> None:
    """Write the result of a command to standard output, with control characters other than line breaks replaced.

    Args:
        lines: Lines of the result.

    Raises:
        ProductLost: Standard output can no longer be written to.
    """
    with _lost():
        if sys.stdout is None:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        for line in lines:
            sys.stdout.write(visible(line, lines=True) + "\n")
        sys.stdout.flush()


def takes_product() -> bool:
    """True where standard output exists and, as far as can be known, can be written to."""
    try:
        return fcntl.fcntl(sys.stdout.fileno(), fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY
    except io.UnsupportedOperation:  # it is no file but a stream of Python's
        return True
    except (OSError, ValueError, AttributeError):
        return False


def leave_standard_output() -> None:
    """Flush standard output; where that fails, redirect it to the null device.

    Otherwise Python would flush again at its end, fail, and exit with code 120.
    """
    with suppress(OSError, ValueError, AttributeError):
        sys.stdout.flush()
        return
    with suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def claim_standard_streams() -> None:
    """Open a placeholder for each of the file descriptors 0, 1 and 2 that was closed when the process started.

    Otherwise the next opened file would get the descriptor's number, and text for the screen would be written into it.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            # The lowest that is free is this one. What a command was run for is not to vanish without a word.
            os.open(os.devnull, (os.O_WRONLY, os.O_RDONLY, os.O_RDWR)[descriptor])
    stdout, stderr = sys.stdout or open(1, "w", closefd=False), sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115
    # They are used as text streams, for as long as the process lasts.
    sys.stdout, sys.stderr = Product(stdout), Screen.over(stderr)
