"""Threads of the package that a test has started: in the same process, earlier tests may have left some of theirs."""

from __future__ import annotations

import threading
import time

_MOST_S = 300.0


class NewThreads:
    """Threads of the package that are started from now on."""

    def __init__(self) -> None:
        self._before = set(threading.enumerate())

    def running(self) -> list[str]:
        """Names of those that run."""
        new = set(threading.enumerate()) - self._before
        return sorted(thread.name for thread in new if thread.name.startswith("batchgen-"))

    def left(self) -> list[str]:
        """Names of those that run on; one that reads the input may take a moment to see that it is over."""
        until = time.monotonic() + _MOST_S
        while self.running() and time.monotonic() < until:
            time.sleep(0.01)
        return self.running()
