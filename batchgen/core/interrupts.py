"""Ctrl-C, SIGTERM and SIGHUP for a whole process: it ends within a second, with a line that says what is kept.

The signal raises KeyboardInterrupt in the main thread, as it always does. While that thread is in a long C call, or
waits for another thread, nothing comes of it. So a thread that the signal wakes by itself (`signal.set_wakeup_fd`) ends
the process where the main one does not. That harms nothing, as a job may be killed at any moment; finished rows are
saved first, which needs no main thread (`keep`). A second signal ends the process at once.

This module imports next to nothing, so that signals are handled before anything that takes long is imported.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from batchgen import TYPE_CHECKING
from batchgen.core.text import visible

if TYPE_CHECKING:
    from typing import Any, NoReturn

EXIT_INTERRUPTED = 130
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # the last: the terminal is gone
_GRACE_S = 0.5  # for the main thread to end the process itself
_SAME_S = 0.1  # one Ctrl-C may come twice: from the terminal, and from a program that passes it on


def keep(save: Callable[[], str]) -> None:
    """Register a function that saves finished rows when the process is about to end.

    It is called from any thread, whatever the others are doing. Nothing is registered where no process is `guarded`.

    Args:
        save: Saves what there is to save, and returns the rest of a line that says what is kept; "" for nothing.
    """
    if _guard is not None:
        _guard.save = save


@contextmanager
def guarded() -> Iterator[None]:
    """Run the main thread's work: where it is interrupted, the process ends here with exit code 130."""
    global _guard
    guard = _guard = _Guard()
    try:
        guard.start()
        yield
    except BaseException:
        if guard.interrupted:  # whatever else was raised on the way here
            guard.save_and_end()
        raise
    finally:
        _guard = None
        guard.close()


class _Guard:
    """Signal handlers, and a thread that signals wake too.

    Attributes:
        interrupted: True once the main thread has been told.
    """

    def __init__(self) -> None:
        self.interrupted = False
        self.save: Callable[[], str] = lambda: "nothing was done yet"
        self._ending = threading.Lock()
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._handlers_before: dict[int, Any] = {}
        self._wakeup_before = -1

    def start(self) -> None:
        threading.Thread(target=self._watch, name="interrupts", daemon=True).start()
        self._wakeup_before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        for number in _SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:  # what a shell starts in the background is deaf to Ctrl-C
                self._handlers_before[number] = signal.signal(number, self._handle)

    def restore(self) -> None:
        """Set the handlers that were there before."""
        for number, handler in self._handlers_before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)

    def close(self) -> None:
        self.restore()
        os.close(self._write)  # the thread reads the end of the file, and ends

    def save_and_end(self) -> NoReturn:
        try:
            kept = self.save()
        except Exception as error:
            kept = f"not everything could be saved: {error}"
        self._end(kept)

    def _end(self, kept: str) -> NoReturn:
        """End the process; of several threads that call it, the first does."""
        self._ending.acquire()
        line = visible("batchgen: interrupted" + (f"; {kept}" if kept else "")) + "\n"
        with suppress(OSError, ValueError):
            clear = "\r\x1b[K" if os.isatty(2) else ""  # a progress bar may stand there
            if select.select([], [2], [], _GRACE_S)[1]:  # nobody may be reading
                os.write(2, (clear + line).encode())
        os._exit(EXIT_INTERRUPTED)

    def _handle(self, *_: object) -> None:
        if not self.interrupted:
            self.interrupted = True
            raise KeyboardInterrupt

    def _watch(self) -> None:
        with suppress(EOFError):
            self._wait(None)
            time.sleep(_SAME_S)
            self._wait(0)
            if not self._wait(_GRACE_S - _SAME_S):
                threading.Thread(target=self.save_and_end, name="last-save", daemon=True).start()
                self._wait(None)
            self._end("ended at once; what was saved before is kept")
        os.close(self._read)

    def _wait(self, timeout_s: float | None) -> bool:
        """Tell whether a signal comes before the time is over. Raises EOFError where the guard is closed."""
        while select.select([self._read], [], [], timeout_s)[0]:
            numbers = os.read(self._read, 64)
            if not numbers:
                raise EOFError
            if any(number in _SIGNALS for number in numbers):
                return True
        return False


_guard: _Guard | None = None


def _before_fork() -> None:
    global _mask_before
    _mask_before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)


def _after_fork() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _mask_before)


def _leave_to_parent() -> None:
    """Forget the guard in a forked process, which has none of its threads and handles signals of its own."""
    global _guard
    if _guard is not None:
        with suppress(ValueError):  # forked by another thread than the main one
            _guard.restore()
        _guard = None
    _after_fork()


_mask_before: set[int | signal.Signals] = set()
os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_leave_to_parent)
