"""Small arrays between the host and a device, for which nobody waits.

A copy from or to a GPU that nobody waits for needs pinned memory, and asking for some may wait for all that the GPU has
to do. So an engine brings its own (`Passage`), made before its first sweep; without one, torch provides it.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

# Parts of the memory for what goes up, one in use, others on their way; and of that for what comes down.
_SECTIONS, _PAGES = 4, 4
_ALIGNED = 64
_of_thread = threading.local()


@contextlib.contextmanager
def through(passage: Passage | None) -> Iterator[None]:
    """Has copies of this thread to and from a device go through a passage meanwhile, those of one stream."""
    before = getattr(_of_thread, "passage", None)
    _of_thread.passage = passage
    try:
        yield
    finally:
        _of_thread.passage = before


def upload(array: np.ndarray, device: torch.device) -> Tensor:
    """The array as a tensor of the device.

    A copy to a GPU goes through pinned memory, so the host waits for nothing: from pageable memory it would wait for
    all that is launched before. On the CPU the tensor shares the array's memory.
    """
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    passage = getattr(_of_thread, "passage", None)
    if passage is None:
        return tensor.pin_memory().to(device, non_blocking=True)
    return passage.upload(tensor, torch.empty(tensor.shape, dtype=tensor.dtype, device=device))


def download(tensor: Tensor) -> Tensor:
    """The tensor in the host's memory, once the device has come so far; itself, where it is there."""
    if tensor.device.type == "cpu":
        return tensor
    passage = getattr(_of_thread, "passage", None)
    if passage is None:
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
    return passage.download(tensor)


class Passage:
    """Pinned memory between the host and one stream of a device. Where it is full, the host waits for the stream.

    Invariant: what the stream has still to copy from or to is not given out again, nor what the host has still to read.
    """

    def __init__(self, memory: Tensor, record: Callable[[], Any], synchronize: Callable[[Any], None]) -> None:
        """A passage for one stream.

        Args:
            memory: pinned, uint8; three quarters of it for uploads, the rest for downloads.
            record: gives an event, what has been launched on the stream so far.
            synchronize: returns when an event has come; other threads run meanwhile.
        """
        self.num_copies = 0  # that were launched, so far
        self._record, self._synchronize = record, synchronize
        up, down = memory.split([len(memory) // 4 * 3, len(memory) - len(memory) // 4 * 3])
        # Uploads go round: a section is filled again when the copies from it are done.
        self._sections = up.split(len(up) // _SECTIONS)[:_SECTIONS]
        self._section = self._filled = 0
        self._copied: list[Any] = [None] * _SECTIONS
        # A page of downloads is used again when nobody holds any of them.
        self._pages = down.split(len(down) // _PAGES)[:_PAGES]
        self._page = self._used = 0
        self._held = [0] * _PAGES
        self._let_go: deque[int] = deque()  # pages, by finalizers of any thread

    def upload(self, source: Tensor, target: Tensor) -> Tensor:
        """target[...] = source, behind the caller's back; the source may change at once. Both are contiguous."""
        if not source.numel():
            return target
        source, left = _bytes_of(source), _bytes_of(target)
        while len(source):
            section = self._sections[self._section]
            if self._filled >= len(section):
                section = self._next_section()
            count = min(len(source), len(section) - self._filled)
            own = section[self._filled : self._filled + count]
            own.copy_(source[:count])
            left[:count].copy_(own, non_blocking=True)
            self.num_copies += 1
            source, left = source[count:], left[count:]
            self._filled += -(-count // _ALIGNED) * _ALIGNED
        return target

    def _next_section(self) -> Tensor:
        self._copied[self._section] = self._record()
        self._section, self._filled = (self._section + 1) % _SECTIONS, 0
        if self._copied[self._section] is not None:
            # All that the stream waits for has been launched, or is a host lane's already: it comes without this
            # thread.
            self._synchronize(self._copied[self._section])
        return self._sections[self._section]

    def download(self, source: Tensor) -> Tensor:
        """The tensor in the host's memory, once the stream has come so far."""
        found = self._window(source.nbytes)
        if found is None:
            return source.cpu()
        window = found.view(source.dtype).view(source.shape)
        window.copy_(source, non_blocking=True)
        self.num_copies += 1
        return window

    def _window(self, num_bytes: int) -> Tensor | None:
        """Free memory of a page; None where too much is held, or needed."""
        while self._let_go:
            self._held[self._let_go.popleft()] -= 1
        for page in (self._page, *(p for p in range(_PAGES) if p != self._page)):
            if not self._held[page]:
                self._page, self._used = page, 0
            if page == self._page and self._used + num_bytes <= len(self._pages[page]):
                window = self._pages[page][self._used : self._used + num_bytes].numpy()
                self._used += -(-num_bytes // _ALIGNED) * _ALIGNED
                self._held[page] += 1
                weakref.finalize(window, self._let_go.append, page).atexit = False
                return torch.from_numpy(window)
        return None


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)
