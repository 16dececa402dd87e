"""Large intermediate results in memory that is used again: new pages cost more to get than to fill."""

from __future__ import annotations

import math
import threading

import torch
from torch import Tensor

_of_thread = threading.local()


def scratch(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Memory of the calling thread, with anything in it, until the thread's next call with this name, or `release`."""
    size = math.prod(shape) * dtype.itemsize
    kept: dict[str, Tensor] = _of_thread.__dict__.setdefault("kept", {})
    if name not in kept or kept[name].numel() < size:
        kept.pop(name, None)  # before there is more
        kept[name] = torch.empty(size, dtype=torch.uint8)
    return kept[name][:size].view(dtype).view(shape)


def release() -> None:
    """Give the calling thread's memory back."""
    _of_thread.__dict__.pop("kept", None)
