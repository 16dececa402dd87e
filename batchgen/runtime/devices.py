"""The tiers of each kind of device: the CPU, an accelerator emulated on it, a CUDA card."""

from __future__ import annotations

import torch

from batchgen.core.device import Device
from batchgen.runtime.dedicated_core import DedicatedCore
from batchgen.runtime.memory.tiers import Tiers
from batchgen.runtime.memory.transfers import Arena, Link


def open_tiers(device: Device, gpu_bytes: int | None = None) -> Tiers:
    """Open the tiers of a device.

    Args:
        device: Device that computes.
        gpu_bytes: The budget of its own memory; None: all there is.

    Raises:
        InputError: An emulated accelerator is to have a core of its own, and there are not two.
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
    dedicated_core = (
        None if device.slowdown is None else DedicatedCore(device.slowdown, device.cpu_slowdown, device.step_overhead_s)
    )
    return Tiers(
        "gpu", arenas, (Link(device.h2d_bytes_per_s), Link(device.d2h_bytes_per_s)), dedicated_core=dedicated_core
    )
