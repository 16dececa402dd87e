"""The memories that a model lives in, what computes on them, and what carries data between them.

Weights, KV and the executor of one engine share a `Tiers`: they draw on the same budgets and the same links.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from batchgen.core.device import Device
from batchgen.ops.dispatch import CPU
from batchgen.runtime.memory.transfers import Arena, Link

if TYPE_CHECKING:
    from batchgen.runtime.steps.streams import Driver


@dataclass(frozen=True)
class Tiers:
    """The memory of each tier, and how to reach it. Without arguments: the host alone, without a budget.

    compute_tier: the tier that is the compute device's own memory. arenas: tier -> its memory; none for "disk". links: (to,
    from) an accelerator. device: what computes, as torch names it. driver: a CUDA card's streams.
    """

    compute_tier: str = "cpu"
    arenas: Mapping[str, Arena] = field(default_factory=lambda: {tier: Arena(tier) for tier in ("gpu", "cpu")})
    links: tuple[Link, Link] | None = None
    device: torch.device = CPU
    driver: Driver | None = None

    def close(self) -> None:
        """Gives back what the host's memory has registered with a driver. Tensors stay."""
        for arena in self.arenas.values():
            arena.memory.close()


def open_tiers(device: Device, gpu_bytes: int | None = None) -> Tiers:
    """Open the tiers of a device.

    Args:
        device: What computes.
        gpu_bytes: The budget of its own memory; None: all there is.
    """
    if device.kind == "cuda":
        from batchgen.runtime.cuda import CudaDriver, CudaLink, GpuMemory, PinnedMemory, cap_memory

        if gpu_bytes is not None:
            cap_memory(gpu_bytes)
        driver = CudaDriver()
        arenas = {
            "cpu": Arena("--cpu-memory", memory=PinnedMemory()),
            "gpu": Arena("--gpu-memory", gpu_bytes, GpuMemory()),
        }
        links = CudaLink(driver, to_gpu=True), CudaLink(driver, to_gpu=False)
        return Tiers("gpu", arenas, links, torch.device("cuda"), driver)
    arenas = {"cpu": Arena("--cpu-memory"), "gpu": Arena("--gpu-memory", gpu_bytes)}
    if not device.accelerated:
        return Tiers("cpu", arenas)
    return Tiers("gpu", arenas, (Link(device.h2d_bytes_per_s), Link(device.d2h_bytes_per_s)))
