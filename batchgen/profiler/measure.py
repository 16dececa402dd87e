"""Measuring of this machine into a HardwareProfile: rates, in about 15 s, and sizes, at once."""

from __future__ import annotations

import importlib.metadata
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchgen.core.device import require_cuda
from batchgen.core.direct_io import make_offload_dir
from batchgen.core.errors import InputError
from batchgen.core.hardware import ComputeRates, HardwareProfile
from batchgen.core.machine import available_cores, available_memory_bytes, cpu_name, resident_bytes
from batchgen.models.config import DTYPES, ModelConfig
from batchgen.ops.instruction_set import forced_instruction_set, instruction_set
from batchgen.profiler.calibration import gemm_slowing
from batchgen.profiler.timing import FULL, Device, Effort
from batchgen.profiler.transfer import copy_rates, disk_rates, dram_read_rate, first_touch_rate

if TYPE_CHECKING:
    from batchgen.profiler.compute import Subjects

logger = logging.getLogger(__name__)

DEVICES = ("cpu", "cuda")
_TABLES = (
    "gemm_flops_per_s",
    "prefill_attention_flops_per_s",
    "decode_attention_bytes_per_s",
    "elementwise_bytes_per_s",
)


@dataclass(frozen=True)
class Overheads:
    """Rates that can be measured only in a running engine, named like the fields of HardwareProfile.

    step_overhead_s belongs to the profile's compute device.
    """

    sweep_overhead_s: float
    batch_overhead_s: float
    sequence_overhead_s: float
    issue_overhead_s: float
    row_overhead_s: float
    step_overhead_s: float
    sampling_logits_per_s: float
    load_bytes_per_s: float
    gguf_load_bytes_per_s: float | None = None

    @classmethod
    def of(cls, profile: HardwareProfile) -> Overheads:
        """The overheads in a profile."""
        gpu = profile.gpu
        step_s = profile.cpu.step_overhead_s if gpu is None else gpu.launch_overhead_s
        names = (field.name for field in fields(cls) if field.name != "step_overhead_s")
        return cls(step_overhead_s=step_s, **{name: getattr(profile, name) for name in names})


def check_measurable(device: str, dtypes: Sequence[str]) -> None:
    """Raise InputError for a device that is not there or an unknown dtype."""
    if device not in DEVICES:
        raise InputError(f"device {device!r} cannot be measured: use {' or '.join(DEVICES)}")
    if unknown := [dtype for dtype in dtypes if dtype not in DTYPES]:
        raise InputError(f"dtype {unknown[0]!r} is not supported: use {', '.join(DTYPES)}")
    if not dtypes:
        raise InputError(f"nothing to measure: name one or more dtypes of {', '.join(DTYPES)}")
    if device == "cuda":
        require_cuda()


def measure(
    *,
    device: str,
    offload_dir: Path,
    dtypes: Sequence[str],
    overheads: Overheads,
    model: ModelConfig | None = None,
    effort: Effort = FULL,
    like: HardwareProfile | None = None,
) -> HardwareProfile:
    """Measure all rates of a hardware profile.

    Args:
        device: "cpu" or "cuda".
        offload_dir: Directory of the disk tier, made where it does not exist; its disk is measured.
        dtypes: Compute dtypes.
        overheads: Rates that were measured in a running engine.
        model: Model whose layers alone are measured; None: models of several usual sizes.
        effort: Grid points and time limits.
        like: Profile of this machine and directory for other models or dtypes, whose rates of disk, memory and copies
            are reused; None: they are measured.

    Raises:
        InputError: The device is missing, a dtype is unknown or offload_dir is unusable.
    """
    from batchgen.profiler.compute import subjects_of

    check_measurable(device, dtypes)
    offload_dir = make_offload_dir(offload_dir)
    watch = _Stopwatch()
    moves = _moving(device, offload_dir, effort, watch) if like is None else {n: getattr(like, n) for n in _MOVING}
    cpu, gpu = _compute_rates(device, dtypes, subjects_of(device, effort, model), effort, watch)
    # A GPU runs what was launched ahead of it, so the overhead is the launch's.
    step: dict[str, Any] = {"launch_overhead_s" if gpu else "step_overhead_s": overheads.step_overhead_s}
    return HardwareProfile(
        name=_machine_name(device),
        cpu=cpu if gpu else replace(cpu, **step),
        gpu=gpu and replace(gpu, **step),
        load_bytes_per_s=overheads.load_bytes_per_s,
        gguf_load_bytes_per_s=overheads.gguf_load_bytes_per_s,
        sampling_logits_per_s=overheads.sampling_logits_per_s,
        sweep_overhead_s=overheads.sweep_overhead_s,
        batch_overhead_s=overheads.batch_overhead_s,
        sequence_overhead_s=overheads.sequence_overhead_s,
        issue_overhead_s=overheads.issue_overhead_s,
        row_overhead_s=overheads.row_overhead_s,
        measured=_circumstances() | {"offload_dir": str(offload_dir), "seconds": watch.parts_s},
        **moves,
        **sizes(device, offload_dir),
    )


# Fields of a profile that depend on no model.
_MOVING = (
    "dram_bytes_per_s",
    "disk_read_bytes_per_s",
    "disk_write_bytes_per_s",
    "disk_read_overhead_s",
    "disk_write_overhead_s",
    "disk_cpu_overhead_s",
    "disk_call_overhead_s",
    "first_touch_bytes_per_s",
    "h2d_bytes_per_s",
    "d2h_bytes_per_s",
)


def _moving(device: str, offload_dir: Path, effort: Effort, watch: _Stopwatch) -> dict[str, Any]:
    """Rates of disk, host memory and copies to and from a GPU, by the names in `_MOVING`."""
    disk = watch(f"disk at {offload_dir}", lambda: disk_rates(offload_dir, effort))
    rates = {f"disk_{name}": value for name, value in asdict(disk).items()}
    rates["dram_bytes_per_s"] = watch("memory", lambda: dram_read_rate(effort))
    rates["first_touch_bytes_per_s"] = watch("fresh memory", lambda: first_touch_rate(effort))
    h2d = d2h = None
    if device == "cuda":
        h2d, d2h = watch("copies to and from the GPU", lambda: copy_rates(Device(device), effort))
    return rates | {"h2d_bytes_per_s": h2d, "d2h_bytes_per_s": d2h}


def add_dtypes(
    profile: HardwareProfile,
    dtypes: Sequence[str],
    *,
    model: ModelConfig | None = None,
    effort: Effort = FULL,
) -> HardwareProfile:
    """A profile of this machine with newly measured rates of more compute dtypes."""
    from batchgen.profiler.compute import subjects_of

    device = "cuda" if profile.gpu else "cpu"
    check_measurable(device, dtypes)
    watch = _Stopwatch()
    cpu, gpu = _compute_rates(device, dtypes, subjects_of(device, effort, model), effort, watch)
    seconds = profile.measured.get("seconds", {}) | watch.parts_s
    return replace(
        profile,
        cpu=merged(profile.cpu, cpu),
        gpu=merged(profile.gpu, gpu) if profile.gpu and gpu else profile.gpu,
        measured=profile.measured | {"seconds": seconds},
    )


def add_packed_kv(
    profile: HardwareProfile,
    dtype: str,
    kv_format: str,
    *,
    model: ModelConfig | None = None,
    effort: Effort = FULL,
) -> HardwareProfile:
    """A profile of this machine with newly measured rates of quantized KV.

    Args:
        profile: The profile.
        dtype: Compute dtype.
        kv_format: Format of the KV, a key of `KV_CODE_BITS`.
        model: Model whose layers alone are measured; None: models of several usual sizes.
        effort: Grid points and time limits.
    """
    from batchgen.profiler.compute import measure_decode_attention, measure_packed_kv, subjects_of

    device = "cuda" if profile.gpu else "cpu"
    check_measurable(device, (dtype,))
    watch = _Stopwatch()
    subjects = subjects_of(device, effort, model)
    rates = measure_packed_kv(Device(device), dtype, kv_format, subjects, effort, watch)
    if device == "cpu":
        profile = replace(profile, cpu=merged(profile.cpu, rates))
    else:
        beside = measure_decode_attention(Device("cpu"), dtype, subjects, effort, watch, kv_format)
        profile = replace(profile, gpu=merged(profile.compute, rates), cpu=merged(profile.cpu, beside))
    seconds = profile.measured.get("seconds", {}) | watch.parts_s
    return replace(profile, measured=profile.measured | {"seconds": seconds})


def add_dequantizing(
    profile: HardwareProfile,
    dtype: str,
    *,
    model: ModelConfig | None = None,
    effort: Effort = FULL,
) -> HardwareProfile:
    """A profile of this machine with the newly measured rate of dequantizing 4-bit weights to `dtype`."""
    from batchgen.profiler.compute import measure_dequantizing, subjects_of

    device = "cuda" if profile.gpu else "cpu"
    check_measurable(device, (dtype,))
    watch = _Stopwatch()
    subjects = subjects_of(device, effort, model)
    rates = measure_dequantizing(Device(device), dtype, subjects, effort, watch)
    return _with_rates(profile, rates, watch)


def add_products(
    profile: HardwareProfile,
    dtype: str,
    weight_format: str,
    *,
    model: ModelConfig | None = None,
    effort: Effort = FULL,
    as_stored: bool = False,
) -> HardwareProfile:
    """A profile of this machine with newly measured rates of GEMMs whose weights are in another format.

    Args:
        profile: The profile.
        dtype: Compute dtype.
        weight_format: "int8", one of `BLOCK_FORMATS`; with as_stored, the compute dtype too.
        model: Model whose layers alone are measured; None: models of several usual sizes.
        effort: Grid points and time limits.
        as_stored: Whether weights are in the layout in which they stream from disk, not prepacked.
    """
    from batchgen.profiler.compute import measure_products, subjects_of

    device = "cuda" if profile.gpu else "cpu"
    check_measurable(device, (dtype,))
    watch = _Stopwatch()
    subjects = subjects_of(device, effort, model)
    rates = measure_products(Device(device), dtype, weight_format, subjects, effort, watch, as_stored=as_stored)
    # The factors that whole sweeps have shown for the dtype's own GEMMs hold for these too.
    slowing = gemm_slowing(profile.measured.get("sweep_factors", {}).get(dtype, {}))
    scaled = {kind: table.slowed(slowing) for kind, table in rates.gemm_flops_per_s.items()}
    rates = replace(rates, gemm_flops_per_s=scaled)
    return _with_rates(profile, rates, watch)


def _with_rates(profile: HardwareProfile, rates: ComputeRates, watch: _Stopwatch) -> HardwareProfile:
    """The profile with further rates of its compute device, and what measuring them took."""
    changes: dict[str, Any] = {"gpu" if profile.gpu else "cpu": merged(profile.compute, rates)}
    seconds = profile.measured.get("seconds", {}) | watch.parts_s
    return replace(profile, measured=profile.measured | {"seconds": seconds}, **changes)


def merged(a: ComputeRates, b: ComputeRates) -> ComputeRates:
    """The rate tables of two ComputeRates in one; where both have a table, that of `b`."""
    tables = {name: getattr(a, name) | getattr(b, name) for name in _TABLES}
    return replace(a, expand_bytes_per_s=b.expand_bytes_per_s or a.expand_bytes_per_s, **tables)


def sizes(device: str, offload_dir: Path) -> dict[str, Any]:
    """The size fields of this machine's profile: bytes of memory and disk that a job can use now. Raises InputError."""
    import shutil

    return {
        "cpu_memory_bytes": available_memory_bytes() + resident_bytes(),
        "gpu_memory_bytes": gpu_memory_bytes() if device == "cuda" else None,
        "disk_bytes": shutil.disk_usage(make_offload_dir(offload_dir)).free,
    }


def gpu_memory_bytes() -> int:
    """Bytes of this machine's GPU that a job can use now."""
    import torch

    return int(torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved())


_METHOD = 5  # version of the way in which rates are measured


def identity(device: str) -> dict[str, Any]:
    """Values that identify a machine: profiles with the same values and offload directory have the same rates."""
    from batchgen._version import __version__

    return {
        "device": device,
        "cpu": cpu_name(),
        "cores": available_cores(),
        "kernels": instruction_set(),
        **({"forced": True} if forced_instruction_set() else {}),
        "gpu": _gpu_name() if device == "cuda" else None,
        "torch": importlib.metadata.version("torch"),
        "batchgen": __version__,
        "method": _METHOD,
    }


def machine_identity() -> dict[str, Any]:
    """Values that identify this machine, whatever part of it a process may use."""
    from batchgen._version import __version__

    return {"cpu": cpu_name(), "torch": importlib.metadata.version("torch"), "batchgen": __version__}


class _Stopwatch:
    """A stopwatch that runs parts of the measurement, logs their names, and keeps the seconds of each."""

    def __init__(self) -> None:
        self.parts_s: dict[str, float] = {}

    def __call__(self, name: str, part: Callable[[], Any]) -> Any:
        logger.info("measuring %s", name)
        started = time.perf_counter()
        result = part()
        self.parts_s[name] = round(time.perf_counter() - started, 3)
        return result


def _compute_rates(
    device: str, dtypes: Sequence[str], subjects: Subjects, effort: Effort, watch: _Stopwatch
) -> tuple[ComputeRates, ComputeRates | None]:
    """Rates of the CPU and the GPU. On a machine with a GPU, only decode attention is measured on the CPU."""
    from batchgen.profiler.compute import measure_compute, measure_decode_attention

    cpu = gpu = ComputeRates()
    for dtype in dtypes:
        if device == "cuda":
            gpu = merged(gpu, measure_compute(Device("cuda"), dtype, subjects, effort, watch))
            cpu = merged(cpu, measure_decode_attention(Device("cpu"), dtype, subjects, effort, watch))
        else:
            cpu = merged(cpu, measure_compute(Device("cpu"), dtype, subjects, effort, watch))
    return cpu, gpu if device == "cuda" else None


def _circumstances() -> dict[str, Any]:
    import torch

    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


def _machine_name(device: str) -> str:
    cores = available_cores()
    name = f"{cpu_name()}, {cores} core{'s' if cores > 1 else ''}"
    return f"{_gpu_name()} with {name}" if device == "cuda" else name


def _gpu_name() -> str:
    import torch

    return torch.cuda.get_device_name()
