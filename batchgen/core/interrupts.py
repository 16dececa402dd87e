"""Ctrl-C, SIGTERM and SIGHUP: the process ends within a second and shows which results are kept.

The signal raises KeyboardInterrupt in the main thread, as Python always does. The exception cannot be raised while the
main thread is in a long C call or waits for another thread. So a second thread is woken by the signal
(`signal.set_wakeup_fd`), and ends the process where the main thread does not. A job may be killed at any moment without
harm. Finished rows are saved first, which needs no main thread (`keep`). A second signal ends the process at once.

This module imports few others, so that signals are handled before slow imports begin.
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
    """Register a function that saves finished rows when a signal ends the process.

    The function may be called from any thread, at any moment. Outside of `guarded` nothing is registered.

    Args:
        save: The function that saves. It returns the end of a sentence that says what is kept, or "" where nothing is.
    """
    if _guard is not None:
        _guard.save = save


@contextmanager
def guarded() -> Iterator[None]:
    """Run the block, the main thread's work, so that an interrupt ends the process with exit code 130."""
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
    """The signal handlers of a process, and a second thread that signals wake.

    Attributes:
        interrupted: True once the main thread has received KeyboardInterrupt.
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
        """Restore the signal handlers that were set before this guard."""
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
        """End the process; where several threads call this method, only the first call counts."""
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
        """True where a signal arrives within `timeout_s` seconds. Raises EOFError where the guard is closed."""
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
    """Drop the guard in a forked child, which does not have the guard's thread and handles its own signals."""
    global _guard
    if _guard is not None:
        with suppress(ValueError):  # forked by another thread than the main one
            _guard.restore()
        _guard = None
    _after_fork()


_mask_before: set[int | signal.Signals] = set()
os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_leave_to_parent)
