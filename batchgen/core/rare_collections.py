"""Few garbage collections while an engine runs: its rows are freed by reference counts, and a search finds nothing.

Python searches all young objects for cycles whenever some hundred more have been made than freed, as every sweep does.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

# Objects that are made, less those that are freed, before the young ones are searched: some ten thousand rows.
_YOUNG_OBJECTS = 500_000
_lock = threading.Lock()
_blocks = 0  # `with` blocks that have begun and not ended, of all threads
_threshold: tuple[int, int, int] = gc.get_threshold()  # outside of them


@contextmanager
def collected_rarely() -> Iterator[None]:
    """Within a `with` block of any thread, the process searches for garbage rarely. A threshold of 0 stays: never."""
    global _blocks, _threshold
    with _lock:
        if not _blocks:
            _threshold = gc.get_threshold()
            if _threshold[0]:
                gc.set_threshold(max(_threshold[0], _YOUNG_OBJECTS), *_threshold[1:])
        _blocks += 1
    try:
        yield
    finally:
        with _lock:
            _blocks -= 1
            if not _blocks:
                gc.set_threshold(*_threshold)
