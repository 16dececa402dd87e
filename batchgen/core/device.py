"""Compute devices: the CPU, a CUDA GPU, or an accelerator emulated on the CPU with memory and links of its own."""

from __future__ import annotations

import math
import os
import re
import warnings
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from batchgen.core.errors import InputError, one_line
from batchgen.core.units import format_bytes, parse_bytes

_EMULATED = "emulated"
_KNOWN = (
    "auto, cpu, cuda or emulated:gpu-memory=512MiB[,h2d=2GiB/s][,d2h=2GiB/s][,slowdown=2][,step-overhead=1ms]"
    "[,cpu-slowdown=2]"
)
_SIZES, _FACTORS = ("gpu-memory", "h2d", "d2h"), ("slowdown", "cpu-slowdown")
_OF_OWN_CORE = ("cpu-slowdown", "step-overhead")


@dataclass(frozen=True)
class Device:
    """A compute device: the CPU, a CUDA GPU, or an accelerator that is emulated on the CPU.

    Attributes:
        kind: "cpu", "cuda" or "emulated".
        gpu_memory_bytes: Memory of an emulated device, in bytes; None for other devices.
        h2d_bytes_per_s: Limit of the emulated link from host to device, in bytes/s; None: no limit.
        d2h_bytes_per_s: Limit of the emulated link from device to host, in bytes/s; None: no limit.
        slowdown: Factor, 1 or more, by which an emulated device is slower than the CPU core that is dedicated to it.
            None: the emulated device has no dedicated core; it uses all cores and takes turns with CPU attention.
        cpu_slowdown: Factor, 1 or more, by which CPU attention is slowed down where the emulated device has a dedicated
            core.
        step_overhead_s: Extra seconds of each layer of each micro-batch on a dedicated core.
    """

    kind: str
    gpu_memory_bytes: int | None = None
    h2d_bytes_per_s: float | None = None
    d2h_bytes_per_s: float | None = None
    slowdown: float | None = None
    cpu_slowdown: float = 1.0
    step_overhead_s: float = 0.0

    @property
    def shares_cores(self) -> bool:
        """True where the device computes on the same CPU cores as CPU attention, so that the two take turns."""
        return self.kind == _EMULATED and self.slowdown is None

    @property
    def accelerated(self) -> bool:
        """True where the device has memory separate from host memory."""
        return self.kind != "cpu"

    def __str__(self) -> str:
        if self.kind != _EMULATED:
            return self.kind
        text = f"{_EMULATED}:gpu-memory={format_bytes(self.gpu_memory_bytes or 0).replace(' ', '')}"
        for name, rate in (("h2d", self.h2d_bytes_per_s), ("d2h", self.d2h_bytes_per_s)):
            text += "" if rate is None else f",{name}={format_bytes(rate).replace(' ', '')}/s"
        if self.slowdown is not None:
            text += f",slowdown={self.slowdown:g}"
            text += f",step-overhead={self.step_overhead_s * 1e3:g}ms" if self.step_overhead_s else ""
            text += f",cpu-slowdown={self.cpu_slowdown:g}" if self.cpu_slowdown != 1 else ""
        return text


def has_cuda() -> bool:
    """True where torch can use a CUDA GPU by NVIDIA's driver for Linux."""
    return not why_no_cuda()


@cache
def why_no_cuda() -> str:
    """The reason why torch can use no CUDA GPU here by NVIDIA's driver for Linux, and what helps; "": it can use one.

    torch takes seconds to import, so it is imported only where this driver reports devices.
    """
    if not _driver_has_devices():
        if Path("/dev/dxg").exists():
            return "WSL's driver has no stream memory operations, so use Linux itself"
        return (
            "there is no /dev/nvidia0, so install NVIDIA's driver, or give the container a GPU (docker run --gpus all)"
        )
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a build without CUDA, so install one with it (docs/cuda.md)"
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        if torch.cuda.is_available():
            capability, kernels = compute_capability(), torch.cuda.get_arch_list()
            return "" if _has_kernels(kernels, capability) else _no_kernels(torch.__version__, capability, kernels)
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return f"CUDA_VISIBLE_DEVICES={visible!r} leaves none, so name one there, or unset it"
    reason = f" ({one_line(told[-1].message)})" if told else ""
    return (
        f"torch {torch.__version__} cannot use this GPU's driver{reason}, so install a newer driver, or a torch that is"
        " built for an older CUDA"
    )


def _driver_has_devices() -> bool:
    return any(Path("/dev").glob("nvidia[0-9]*"))


def _has_kernels(kernels: Collection[str], capability: tuple[int, int]) -> bool:
    """Tell whether a build of torch has kernels for a GPU, or code that its driver makes such kernels of.

    Args:
        kernels: Names of the build's kernels, as of torch: "sm_90", "compute_120"; none: not known.
        capability: The GPU's compute capability, (major, minor).
    """
    own = 10 * capability[0] + capability[1]
    known = [(kind, int(version)) for kind, version in re.findall(r"(sm|compute)_(\d+)", " ".join(kernels))]
    # Machine code runs on later GPUs of the same major number, what is compiled at run time on all later ones.
    return not known or any(
        version <= own and (kind == "compute" or version // 10 == capability[0]) for kind, version in known
    )


def _no_kernels(version: str, capability: tuple[int, int], kernels: Collection[str]) -> str:
    return (
        f"the GPU has compute capability {capability[0]}.{capability[1]}, and torch {version} has no kernels for it"
        f" (but {', '.join(kernels)}), so install a torch that has, such as one built for an older CUDA"
    )


@cache
def compute_capability() -> tuple[int, int]:
    """The compute capability of the current CUDA device, (major, minor)."""
    import torch

    major, minor = torch.cuda.get_device_capability()
    return int(major), int(minor)


def sixteen_bits(capability: tuple[int, int]) -> str:
    """The 16-bit dtype that a GPU multiplies fast: "float16" below compute capability 8.0 (Ampere), else "bfloat16".

    Args:
        capability: The GPU's compute capability, (major, minor).
    """
    return "bfloat16" if capability >= (8, 0) else "float16"


def require_cuda(remedy: str = "or leave it out") -> None:
    """Raise InputError, which says why, where torch can use no CUDA GPU here. remedy: what else helps."""
    if reason := why_no_cuda():
        raise InputError(f"--device cuda: torch finds no CUDA device here: {reason}, {remedy}")


def parse_device(text: str) -> Device:
    """Parse a value of the option `--device`; "auto" stands for the CPU.

    Raises:
        InputError: The value is not understood, or names a device that this machine does not have.
    """
    if text in ("auto", "cpu"):
        return Device("cpu")
    if text == "cuda":
        require_cuda()
        return Device("cuda")
    kind, _, options = text.partition(":")
    if kind != _EMULATED:
        raise InputError(f"device {text!r} is not supported: use {_KNOWN}")
    values: dict[str, float] = {}
    for option in filter(None, options.split(",")):
        name, _, value = option.partition("=")
        if name not in (*_SIZES, *_FACTORS, "step-overhead") or name in values or not value:
            raise InputError(f"--device {text}: {option!r} is not understood; use {_KNOWN}")
        if name == "step-overhead":
            values[name] = _number(text, name, value.removesuffix("ms"), 0) / 1e3
            continue
        values[name] = _number(text, name, value, 1) if name in _FACTORS else parse_bytes(value.removesuffix("/s"))
        if values[name] <= 0:
            raise InputError(f"--device {text}: {name} must be above 0")
    if "gpu-memory" not in values:
        raise InputError(f"--device {text} needs the size of its memory: use {_KNOWN}")
    for name in _OF_OWN_CORE:
        if name in values and "slowdown" not in values:
            raise InputError(
                f"--device {text}: {name} is for a device with a core of its own; give slowdown too, which may be 1"
            )
    return Device(
        _EMULATED,
        int(values["gpu-memory"]),
        values.get("h2d"),
        values.get("d2h"),
        values.get("slowdown"),
        values.get("cpu-slowdown", 1.0),
        values.get("step-overhead", 0.0),
    )


def _number(text: str, name: str, value: str, least: float) -> float:
    """Parse a number inside a value of the option `--device`. Raises InputError where it is below `least`."""
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not least <= number < math.inf:
        raise InputError(f"--device {text}: {name} must be a number from {least:g} on, not {value!r}")
    return number
