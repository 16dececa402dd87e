"""The hardware profile of the machine that a job runs on, or of the part of it that one process has."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from batchgen.core.cache_folder import cache_dir
from batchgen.core.cores import dedicated_core, on_cores
from batchgen.core.device import Device
from batchgen.core.dtypes import BLOCK_FORMATS, INT4, INT8
from batchgen.core.errors import InputError
from batchgen.core.hardware import HARDWARE_VARIABLE, HardwareProfile, read_profile
from batchgen.core.machine import available_memory_bytes, resident_bytes
from batchgen.job.job import Job
from batchgen.models.config import ModelConfig
from batchgen.models.layouts import main_format, output_format
from batchgen.planner.parallel import Link, link_of, part_of_host, with_all_reduce
from batchgen.planner.sizes import store_bytes
from batchgen.profiler.cache import Wanted
from batchgen.profiler.calibration import corrected_by_disk_probe, corrected_by_probe
from batchgen.profiler.emulated import emulated_profile
from batchgen.profiler.in_subprocess import recall_or_measure
from batchgen.profiler.shipped import shipped_profile, shipped_profiles

# Layers with more parameters are planned with the rates for models of any size.
_LARGE_LAYER_PARAMS = 1 << 28
# Weights that take a smaller part of the memory leave so much for KV that nothing is likely to go to disk.
_MEMORY_FRAC_WITHOUT_DISK = 0.5


def profile_here(job: Job) -> HardwareProfile:
    """The profile of one process's part of this machine, with the job's device. It is measured if it is not cached.

    Args:
        job: The job.

    Raises:
        InputError: The machine cannot be measured, or does not have the job's device.
    """
    device, memory_bytes = job.device, job.budgets["cpu"]
    size = store_bytes(job.process_config, job.dtype, job.options.weights)
    may_stream = _MEMORY_FRAC_WITHOUT_DISK * memory_bytes < size
    weight_formats, as_stored = weight_formats_measured(job, may_stream=may_stream)
    kv_cache_dtype = job.options.kv_cache_dtype
    find = partial(
        find_hardware,
        job.options.hardware,
        dtype=job.dtype,
        offload_dir=job.offload_dir,
        model=job.process_config,
        device="cuda" if device.kind == "cuda" else "cpu",
        weight_formats=weight_formats,
        kv_formats=() if kv_cache_dtype == "auto" else (kv_cache_dtype,),
        as_stored=as_stored,
        memory_bytes=memory_bytes,
    )
    profile, core = find_for(device, find)
    if profile.gpu is not None and device.kind != "cuda":
        raise InputError(
            f"{profile.name} has a GPU, jobs run on the CPU here: leave out --hardware; `batchgen plan` takes it"
        )
    if profile.gpu is None and device.kind == "cuda":
        raise InputError(
            f"{profile.name} has no GPU, and jobs run on one here: leave out --hardware, or give --device cpu"
        )
    profile = on_this_machine(profile)
    if may_stream:
        profile = corrected_by_disk_probe(profile, job.offload_dir)
    given = bool(job.options.hardware or os.environ.get(HARDWARE_VARIABLE))
    profile = process_profile(profile, job, whole=given)
    return emulated_profile(profile, device, core) if device.kind == "emulated" else profile


def find_for(device: Device, find: Callable[..., HardwareProfile]) -> tuple[HardwareProfile, HardwareProfile | None]:
    """The profile of the CPU's cores, and for an emulated device with a dedicated core, the profile of that core.

    Args:
        device: The compute device.
        find: `find_hardware` with all arguments bound but `cores`.

    Raises:
        InputError: The machine cannot be measured.
    """
    if device.slowdown is None:
        return find(), None
    core, others = dedicated_core()
    return find(cores=others), find(cores=core)


def find_hardware(
    name: str | None,
    *,
    dtype: str,
    offload_dir: Path,
    device: str = "cpu",
    weight_formats: tuple[str, ...] = (),
    kv_formats: tuple[str, ...] = (),
    as_stored: tuple[str, ...] = (),
    refresh: bool = False,
    model: ModelConfig | None = None,
    memory_bytes: int | None = None,
    cores: frozenset[int] | None = None,
) -> HardwareProfile:
    """Find the hardware profile of a machine. This machine is measured if its profile is not cached.

    Args:
        name: A file, or the name of a profile that ships with the package; "": this machine's profile; None: the one
            that $BATCHGEN_HARDWARE names, or else this machine's. All other arguments are for this machine's profile.
        dtype: Compute dtype.
        offload_dir: Directory of the disk tier, whose disk is measured.
        device: "cpu" or "cuda".
        weight_formats: Formats of weights besides the compute dtype: "int4", "int8", one of `BLOCK_FORMATS`.
        kv_formats: Formats of KV besides the compute dtype, keys of `KV_CODE_BITS`.
        as_stored: Formats of weights that stream: their GEMMs are measured on weights as they are stored.
        refresh: Whether cached rates are measured again.
        model: Model whose layers alone are measured; None: models of several usual sizes.
        memory_bytes: Bytes of host memory that measuring and this process may use together; None: the free memory.
        cores: CPU cores to measure; None: all that this process may use.

    Raises:
        InputError: There is no such profile, or the machine cannot be measured.
    """
    origin = "--hardware"
    if name is None:
        name, origin = os.environ.get(HARDWARE_VARIABLE, ""), f"${HARDWARE_VARIABLE}"
    if name:
        if name in shipped_profiles():
            return shipped_profile(name)
        if not Path(name).exists():
            known = ", ".join(shipped_profiles())
            raise InputError(f"{origin} {name}: no such file, and none of the shipped profiles ({known})")
        return read_profile(name)
    wanted = Wanted(device, (dtype,), weight_formats, kv_formats, model, kernels_of=model, as_stored=as_stored)
    if model is not None and model.params_per_layer > _LARGE_LAYER_PARAMS:
        wanted = replace(wanted, model=None)  # large products reach the same rates whatever their shape, and take long
    with contextlib.nullcontext() if cores is None else on_cores(cores):
        profile = recall_or_measure(
            wanted,
            cache_dir=cache_dir(),
            offload_dir=offload_dir,
            refresh=refresh,
            memory_bytes=memory_bytes,
        )
        return corrected_by_probe(profile, dtype)


def process_profile(hardware: HardwareProfile, job: Job, *, whole: bool) -> HardwareProfile:
    """The profile of the part of a machine that one of a job's processes has.

    Args:
        hardware: The profile of the machine.
        job: The job.
        whole: Whether `hardware` is the profile of one process's part already.
    """
    part = part_of_host(hardware, job.of_host, whole=whole)
    return part if job.shard is None else with_all_reduce(part, job.shard.size, link_between(hardware, job))


def link_between(hardware: HardwareProfile, job: Job) -> Link:
    """The network link between the processes of a job that run a model together."""
    gpus_of_a_host = job.device.kind == "cuda" and job.processes <= job.of_host
    return link_of(hardware, job.link_bytes_per_s, gpus_of_a_host=gpus_of_a_host)


def weight_formats_measured(job: Job, *, may_stream: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The weight formats whose rates a plan needs, and those among them that stream as they are stored.

    Args:
        job: The job.
        may_stream: Whether the weights may be larger than the memory.
    """
    config, weights = job.process_config, job.open_format or job.options.weights
    layers, output = main_format(config, weights), output_format(config, job.dtype, weights)
    as_stored = []
    if job.device.kind != "cuda":  # whose memory holds all weights as they are stored
        streams = may_stream or job.device.accelerated
        as_stored += [layers if layers in (INT8, *BLOCK_FORMATS) else job.dtype] if streams and layers != INT4 else []
        # Chunks of an output matrix that come over lie as they are stored.
        as_stored += [output] if job.device.accelerated and output in BLOCK_FORMATS else []
    formats = tuple(name for name in (INT4, INT8, *BLOCK_FORMATS) if name in (layers, output))
    return formats, tuple(dict.fromkeys(as_stored))


def on_this_machine(hardware: HardwareProfile) -> HardwareProfile:
    """A profile with its own rates and this machine's memory sizes, for a job that runs on this machine."""
    here = available_memory_bytes() + resident_bytes()
    return replace(hardware, cpu_memory_bytes=max(here, 1))
