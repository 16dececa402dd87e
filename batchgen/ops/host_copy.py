"""Small arrays between the host and a device, for which nobody waits."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def upload(array: np.ndarray, device: torch.device) -> Tensor:
    """The array as a tensor of the device.

    A copy to a GPU goes through pinned memory, so the host waits for nothing: from pageable memory it would wait for
    all that is launched before. On the CPU the tensor shares the array's memory.
    """
    tensor = torch.from_numpy(array)
    return (tensor if device.type == "cpu" else tensor.pin_memory()).to(device, non_blocking=True)


def download(tensor: Tensor) -> Tensor:
    """The tensor in the host's memory, once the device has come so far; itself, where it is there."""
    if tensor.device.type == "cpu":
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
