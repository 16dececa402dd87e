"""Memory for large intermediate results that each thread keeps and uses again.

New pages of memory cost more time than filling them.
"""

from __future__ import annotations

import math
import threading

import torch
from torch import Tensor

_of_thread = threading.local()


def scratch(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Memory of this thread for an intermediate result, with undefined content.

    It is valid until this thread calls `scratch` with the same name again, or `release`.

    Args:
        name: Name of the memory.
        shape: Shape of the returned tensor.
        dtype: Dtype of the returned tensor.
    """
    size = math.prod(shape) * dtype.itemsize
    kept: dict[str, Tensor] = _of_thread.__dict__.setdefault("kept", {})
    if name not in kept or kept[name].numel() < size:
        kept.pop(name, None)  # before there is more
        kept[name] = torch.empty(size, dtype=torch.uint8)
    return kept[name][:size].view(dtype).view(shape)


def release() -> None:
    """Free all memory that this thread keeps."""
    _of_thread.__dict__.pop("kept", None)
