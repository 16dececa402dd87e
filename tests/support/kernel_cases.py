"""Dtypes, their rounding and random numbers, for all checks of Triton's kernels."""

from __future__ import annotations

import torch
from hypothesis import settings
from thorough import quick_or
from triton_device import DEVICE

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROUNDING = {torch.float32: 3e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}
# On a card, compiling is what takes the time.
MORE = quick_or(0.2, 1) if DEVICE.type == "cpu" else 2
if DEVICE.type != "cpu":
    settings.register_profile("card", derandomize=True, database=None)
    settings.load_profile("card")


def random(seed, *shape, dtype=torch.float32, scale=1.0):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)
