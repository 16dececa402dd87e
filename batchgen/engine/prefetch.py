"""An iterator that runs in a thread of its own, a bounded number of items ahead."""

from __future__ import annotations

import threading
from collections import deque
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
        self._items: deque[T] = deque()  # each call of it happens as a whole, whichever thread makes it
        self._error: BaseException | None = None
        self._ended = False  # after the last item
        # Each thread waits only where it finds nothing to do, so most items wake nobody.
        self._has_items, self._has_space = threading.Event(), threading.Event()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="batchgen-input", daemon=True)
        try:
            self._thread.start()
        except BaseException:  # an interrupt, while it was being started: nobody could close it later
            self._closed.set()
            raise

    def _run(self) -> None:
        try:
            for item in self._source:
                self._wait_for_space()
                if self._closed.is_set():
                    return
                self._items.append(item)
                if not self._has_items.is_set():
                    self._has_items.set()
        except BaseException as error:  # handed to the consumer
            self._error = error
        finally:
            self._ended = True
            self._has_items.set()

    def _wait_for_space(self) -> None:
        while len(self._items) >= self._ahead and not self._closed.is_set():
            self._has_space.clear()
            if len(self._items) >= self._ahead:  # else the consumer may have looked before the line above
                self._has_space.wait(self._POLL_S)

    @property
    def ready(self) -> bool:
        """True where the next item, or the exception in its place, is there, so that `next` does not wait."""
        return bool(self._items) or self._ended

    def take(self, most: int) -> list[T]:
        """The next items, as many as are there and at most `most`. It waits for one; there is none after the last."""
        items = self._items
        while not items and not self._closed.is_set():
            self._has_items.clear()
            if items or self._ended:  # in this order: items may have come since the line above that looked for them
                break
            self._has_items.wait()
        taken = [items.popleft() for _ in range(min(most, len(items)))]
        if not self._has_space.is_set() and len(items) <= self._ahead // 2:
            self._has_space.set()
        if not taken and self._error is not None:
            error, self._error = self._error, None
            raise error
        return taken

    def __next__(self) -> T:
        for item in self.take(1):
            return item
        raise StopIteration

    def close(self) -> None:
        self._closed.set()
        self._has_space.set()
        self._thread.join(timeout=5)
        self._items.clear()
        self._error = None
