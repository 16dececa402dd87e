"""Copies of small arrays between the host and a GPU for which the host does not wait.

Such copies need pinned memory. Allocating pinned memory may wait until the GPU is idle. So an engine allocates a
`Passage` before its first sweep. Without a `Passage`, torch allocates pinned memory for each copy.
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
    """Within a `with` block, send this thread's copies to and from a GPU through a `Passage`.

    Args:
        passage: Pinned memory for copies of one stream; None: torch allocates memory for each copy.
    """
    before = getattr(_of_thread, "passage", None)
    _of_thread.passage = passage
    try:
        yield
    finally:
        _of_thread.passage = before


def upload(array: np.ndarray, device: torch.device, out: Tensor | None = None) -> Tensor:
    """Copy an array to a device. The host does not wait: the copy goes through pinned memory.

    Args:
        array: The array, which may be changed after the call unless the device is the CPU.
        device: The device.
        out: Contiguous tensor on the device, of the array's shape and dtype. None: a new tensor.

    Returns:
        Tensor on the device. On the CPU a new one shares the array's memory.
    """
    passage = getattr(_of_thread, "passage", None)
    if device.type == "cpu" or passage is None:
        tensor = torch.from_numpy(array)
        if out is not None:
            return out.copy_(tensor if device.type == "cpu" else tensor.pin_memory(), non_blocking=True)
        return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
    if out is None:
        out = torch.empty(array.shape, dtype=torch.from_numpy(array).dtype, device=device)
    return passage.upload(array, out)


def download(tensor: Tensor) -> Tensor:
    """Start the copy of a tensor to the host's memory.

    Returns:
        Tensor on the host, which is filled when the device has computed the tensor and copied it. A tensor of the CPU
            is returned as it is.
    """
    if tensor.device.type == "cpu":
        return tensor
    passage = getattr(_of_thread, "passage", None)
    if passage is None:
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
    return passage.download(tensor)


def fetch(tensor: Tensor) -> Tensor:
    """Copy a small tensor to the host's memory, and wait for it. Other threads run meanwhile."""
    passage = getattr(_of_thread, "passage", None)
    return tensor.cpu() if passage is None or tensor.device.type == "cpu" else passage.fetch(tensor)


class Passage:
    """Pinned memory through which one stream of a GPU exchanges small tensors with the host.

    If it is full, the host waits for the stream.

    Invariant: memory is not used again while the stream still has to copy it, or while the host holds a result in it.
    """

    def __init__(self, memory: Tensor, record: Callable[[], Any], synchronize: Callable[[Any], None]) -> None:
        """Use pinned memory for the copies of one stream.

        Args:
            memory: Pinned memory, uint8 [bytes]. Three quarters are for uploads, the rest is for downloads.
            record: Function that returns an event after all work that was launched on the stream so far.
            synchronize: Function that waits for such an event, while other threads run.
        """
        self.num_copies = 0  # that were launched, so far
        self._record, self._synchronize = record, synchronize
        up, down = memory.split([len(memory) // 4 * 3, len(memory) - len(memory) // 4 * 3])
        # Uploads go round: a section is filled again when the copies from it are done.
        self._sections = up.split(len(up) // _SECTIONS)[:_SECTIONS]
        self._section_bytes = [section.numpy() for section in self._sections]
        self._section = self._filled = 0
        self._copied: list[Any] = [None] * _SECTIONS
        # A page of downloads is used again when nobody holds any of them.
        self._pages = down.split(len(down) // _PAGES)[:_PAGES]
        self._page = self._used = 0
        self._held = [0] * _PAGES
        self._let_go: deque[int] = deque()  # pages, by finalizers of any thread

    def upload(self, source: np.ndarray, target: Tensor) -> Tensor:
        """Start the copy of `source`, on the host, to `target`, on the GPU. `source` may be changed at once.

        Args:
            source: Contiguous array on the host.
            target: Contiguous tensor on the GPU, of as many bytes.

        Returns:
            `target`.
        """
        if not source.size:
            return target
        sent, left = source.reshape(-1).view(np.uint8), bytes_of(target)
        done, num_bytes = 0, len(sent)
        while done < num_bytes:
            section = self._sections[self._section]
            if self._filled >= section.shape[0]:
                section = self._next_section()
            first, count = self._filled, min(num_bytes - done, section.shape[0] - self._filled)
            self._section_bytes[self._section][first : first + count] = sent[done : done + count]
            part = left if count == num_bytes else left[done : done + count]
            part.copy_(section[first : first + count], non_blocking=True)
            self.num_copies += 1
            done += count
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
        """Start the copy of a tensor to the host.

        Returns:
            Tensor on the host, which is filled when the stream has executed the copy.
        """
        found = self._window(source.nbytes)
        if found is None:
            return source.cpu()
        window = found.view(source.dtype).view(source.shape)
        window.copy_(source, non_blocking=True)
        self.num_copies += 1
        return window

    def fetch(self, source: Tensor) -> Tensor:
        """Copy a tensor to the host, and wait for it."""
        found = self.download(source)
        self._synchronize(self._record())
        return found

    def _window(self, num_bytes: int) -> Tensor | None:
        """Free memory for a download, uint8 [num_bytes]; None if the results that the host holds leave too little."""
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


def bytes_of(tensor: Tensor) -> Tensor:
    """A contiguous tensor's memory, uint8 [bytes]."""
    flat = tensor.reshape(-1)
    # The dimension of a single number, or of none, may have any stride.
    return (flat if len(flat) > 1 else flat.as_strided((len(flat),), (1,))).view(torch.uint8)
