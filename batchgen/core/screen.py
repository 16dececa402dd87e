"""Standard output and standard error: the one place where batchgen writes for people.

A screen tells of the work and is no part of it. One that is closed, full, or a terminal that has vanished takes nothing
more, and the job goes on to its end. Standard output is different where it is what a command was run for, such as a
plan: there it is an error that it cannot be written, unless its reader wanted no more.
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
    """A text stream that never fails: what it cannot write is dropped. All else is that of the stream that it wraps."""

    def __init__(self, stream: Any) -> None:
        """Wrap a text stream; None, as Python has it where there is no standard error, takes nothing."""
        self._stream = stream

    @classmethod
    def over(cls, stream: Any) -> Screen:
        """The screen over a stream, which may be a screen already."""
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
        """Tell whether the stream is a terminal."""
        with suppress(OSError, ValueError, AttributeError):
            return bool(self._stream.isatty())
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class ProductLost(OSError):
    """Standard output takes no more of what a command was run for."""


class Product:
    """Standard output of a whole process, click's help included: it fails with ProductLost."""

    def __init__(self, stream: Any) -> None:
        """Wrap a text stream."""
        self._stream = stream

    def write(self, text: str) -> int:
        """Write as a text stream does. Raises ProductLost."""
        with _lost():
            return int(self._stream.write(text))

    def flush(self) -> None:
        """Flush as a text stream does. Raises ProductLost."""
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
    """Show people a line, all of it at once, with nothing in it that would act on a terminal. Never fails.

    Args:
        line: One line, which may have words of rows, files and models in it.
        stream: The stream; None: standard error.
    """
    screen = Screen.over(stream or sys.stderr)
    screen.write(visible(line) + "\n")
    screen.flush()


def put(lines: Iterable[str]) -> None:
    """Write the product of a command to standard output; control characters but for line breaks are spelled out.

    Raises:
        ProductLost: Nothing more can be written there.
    """
    with _lost():
        if sys.stdout is None:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        for line in lines:
            sys.stdout.write(visible(line, lines=True) + "\n")
        sys.stdout.flush()


def takes_product() -> bool:
    """Tell whether standard output exists and may be written, as far as can be known beforehand."""
    try:
        return fcntl.fcntl(sys.stdout.fileno(), fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY
    except io.UnsupportedOperation:  # it is no file but a stream of Python's
        return True
    except (OSError, ValueError, AttributeError):
        return False


def leave_standard_output() -> None:
    """Close standard output, or the interpreter would try again as it ends, and exit with code 120."""
    with suppress(OSError, ValueError, AttributeError):
        sys.stdout.flush()
        return
    with suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def claim_standard_streams() -> None:
    """Have a process keep its first three file descriptors for standard input, output and error.

    The number of one that was closed when the process began would go to the next file that is opened, and what is
    written to
    the screen into that file. A descriptor that takes nothing stands in its place.
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
