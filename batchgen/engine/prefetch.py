"""An iterator that runs in a thread of its own, a bounded number of items ahead."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import TypeVar

T = TypeVar("T")


class Prefetch(Iterator[T]):
    """An iterator over the items of a source, which another thread makes at most `ahead` items early.

    An exception in the source is raised where its item would have come. `close` ends the thread.
    """

    _POLL_S = 0.1  # how long a closed thread may still wait for space

    def __init__(self, source: Iterator[T], ahead: int) -> None:
        self._source, self._ahead = source, ahead
        # A `queue.Queue` would wake the other thread at each item. Here the thread waits only where it is far ahead.
        self._queue: queue.SimpleQueue[tuple[str, object]] = queue.SimpleQueue()
        self._has_space = threading.Event()
        self._closed = threading.Event()
        self._done = False
        self._thread = threading.Thread(target=self._run, name="batchgen-input", daemon=True)
        try:
            self._thread.start()
        except BaseException:  # an interrupt, while it was being started: nobody could close it later
            self._closed.set()
            raise

    def _run(self) -> None:
        try:
            for item in self._source:
                if not self._put(("item", item)):
                    return
            self._put(("end", None))
        except BaseException as error:  # handed to the consumer
            self._put(("error", error))

    def _put(self, entry: tuple[str, object]) -> bool:
        while self._queue.qsize() >= self._ahead and not self._closed.is_set():
            self._has_space.clear()
            if self._queue.qsize() >= self._ahead:  # else the consumer may have looked before the line above
                self._has_space.wait(self._POLL_S)
        self._queue.put(entry)
        return not self._closed.is_set()

    @property
    def ready(self) -> bool:
        """True where the next item, or the exception in its place, is there, so that `next` does not wait."""
        return self._done or not self._queue.empty()

    def __next__(self) -> T:
        if self._done:
            raise StopIteration
        kind, value = self._queue.get()
        if not self._has_space.is_set() and self._queue.qsize() <= self._ahead // 2:
            self._has_space.set()
        if kind == "item":
            return value  # type: ignore[return-value]
        self._done = True
        if kind == "error":
            raise value  # type: ignore[misc]
        raise StopIteration

    def close(self) -> None:
        self._done = True
        self._closed.set()
        self._thread.join(timeout=5)
