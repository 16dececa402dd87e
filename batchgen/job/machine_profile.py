"""The hardware profile of the machine that a job runs on, or of the part of it that one process has.

Measuring takes at most a fiftieth of the time that the job is expected to take. What is not measured comes from the
table of the CPU's kind, and from what earlier jobs have shown (docs/hardware_profiles.md).
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from batchgen.core.cache_folder import cache_dir
from batchgen.core.cores import dedicated_core
from batchgen.core.device import Device
from batchgen.core.direct_io import make_offload_dir
from batchgen.core.dtypes import BLOCK_FORMATS, FORMAT_BYTES, INT4, INT8, matmul_key
from batchgen.core.hardware import HardwareProfile
from batchgen.core.knowledge import DISK, MANY, MEASURED, SPEED, Knowledge, weights_name
from batchgen.core.machine import available_memory_bytes, resident_bytes
from batchgen.core.quality import KV_LOSSES, WEIGHT_LOSSES, allowed
from batchgen.core.workload import Workload
from batchgen.engine.loader import TYPICAL_PROCESS_BYTES
from batchgen.job.given_hardware import given_for_run
from batchgen.job.job import Job
from batchgen.models.config import ModelConfig
from batchgen.models.layouts import main_format, output_format
from batchgen.planner.parallel import Link, link_of, part_of_host, with_all_reduce
from batchgen.planner.sizes import store_bytes
from batchgen.profiler.cache import BUSY, Wanted, load_or_measure, path_of, recall
from batchgen.profiler.contention import Beside
from batchgen.profiler.emulated import emulated_profile
from batchgen.profiler.kinds import corrected, first_knowledge, rates_of_kind, table_of_kind
from batchgen.profiler.machine_record import MachineRecord, read_record, record_path, update_record
from batchgen.profiler.measure import gpu_memory_bytes, machine_identity, sizes
from batchgen.profiler.probe import probed, trials_here
from batchgen.profiler.transfer import DiskRates, probe_disk

logger = logging.getLogger(__name__)
_BESIDE = Beside()  # since the process began

# Layers with more parameters are planned with the rates for models of any size.
_LARGE_LAYER_PARAMS = 1 << 28
# Weights that take a smaller part of the memory leave so much for KV that nothing is likely to go to disk.
_MEMORY_FRAC_WITHOUT_DISK = 0.5
# The part of a job's expected time that measuring may take, and the most seconds of each measurement. A shorter probe
# than the least tells nothing. (Emulating a device takes about a second more.)
_MEASURING_FRAC, _LEAST_PROBE_S, _PROBE_S, _DISK_S = 0.02, 0.1, 1.0, 1.0
_WORTH_LOGGING_S = 0.01
# A probe is left out where the speed of products is known to this standard deviation.
_WELL_KNOWN = 0.2
# Tokens of sweeps that a rough estimate counts with: full of prompts, and decoding.
_PROMPT_TOKENS, _DECODED_TOKENS = 1024, 32
# Standard deviation of the logarithm of a disk's speed after a probe, and that of an earlier job's probe.
_DISK_NOISE, _EARLIER_DISK_NOISE = 0.25, 0.4
# The factors of a table that was measured on this machine, and of one that was measured while the machine was busy.
_MEASURED_PRIOR, _BUSY_PRIOR = 0.3, 1.0


def profile_here(job: Job, workload: Workload) -> HardwareProfile:
    """The profile of one process's part of this machine, with the job's device.

    Args:
        job: The job.
        workload: The job's workload.

    Raises:
        InputError: The machine does not have the job's device, or a GPU cannot be measured.
    """
    device = job.device
    given = given_for_run(job.options.hardware, on_card=device.kind == "cuda")
    if given is not None:
        profile, core = given, given if device.slowdown is not None else None
    elif device.kind == "cuda":
        weights, as_stored = weight_formats_measured(job, may_stream=False)
        weights += allowed(job.open_weights, WEIGHT_LOSSES, job.options.quality)
        kv = _kv_formats_measured(job) + allowed(job.open_kv, KV_LOSSES, job.options.quality)
        wanted = wanted_of(job.process_config, job.dtype, weights, as_stored, kv, device="cuda")
        profile, core = measured_hardware(wanted, job.offload_dir), None
    else:
        profile, core = for_device(device, partial(_known_hardware, job, workload))
    profile = process_profile(on_this_machine(profile), job, whole=given is not None)
    return emulated_profile(profile, device, core) if device.kind == "emulated" else profile


def for_device(device: Device, find: Callable[[], HardwareProfile]) -> tuple[HardwareProfile, HardwareProfile | None]:
    """The profile of the CPU's cores, and for an emulated device with a dedicated core, the profile of that core.

    Args:
        device: The compute device.
        find: Function that finds the profile of the cores that this thread may use.

    Raises:
        InputError: The machine cannot be measured.
    """
    if device.slowdown is None:
        return find(), None
    from batchgen.ops import cpp as kernels  # with torch, which a plan for another machine does without

    core, others = dedicated_core()
    profiles = []
    for cores in (others, core):
        with kernels.on_cores(cores):
            profiles.append(find())
    return profiles[0], profiles[1]


def wanted_of(
    model: ModelConfig | None,
    dtype: str,
    weight_formats: tuple[str, ...] = (),
    as_stored: tuple[str, ...] = (),
    kv_formats: tuple[str, ...] = (),
    *,
    device: str = "cpu",
) -> Wanted:
    """The rates of a measured profile.

    Args:
        model: Model whose layers alone are measured, unless they are large; None: models of several usual sizes.
        dtype: Compute dtype.
        weight_formats: Formats of weights besides the compute dtype: "int4", "int8", one of `BLOCK_FORMATS`.
        as_stored: Formats of weights that stream: their GEMMs are measured on weights as they are stored.
        kv_formats: Formats of KV besides the compute dtype, keys of `KV_CODE_BITS`.
        device: "cpu" or "cuda".
    """
    if model is not None and model.params_per_layer > _LARGE_LAYER_PARAMS:
        model = None  # large products reach the same rates whatever their shape, and take long
    return Wanted(device, (dtype,), weight_formats, kv_formats, model, as_stored=as_stored)


def measured_hardware(wanted: Wanted, offload_dir: Path, *, refresh: bool = False) -> HardwareProfile:
    """The measured profile of this machine, or of the cores that this thread may use; from the cache where it is there.

    Args:
        wanted: Rates that it must have.
        offload_dir: Directory of the disk tier, whose disk is measured.
        refresh: Whether cached rates are measured again.

    Raises:
        InputError: The machine cannot be measured.
    """
    return load_or_measure(wanted, cache_dir=cache_dir(), offload_dir=offload_dir, refresh=refresh)


def slowdown_here(for_s: float = 0.0) -> float:
    """The factor by which work takes longer beside what others have run on the cores since the process began.

    Args:
        for_s: Seconds that the work is expected to take; 0: a moment.
    """
    return _BESIDE.slowdown(for_s)


def record_of_machine() -> Path:
    """The file with what is known of this machine."""
    return record_path(cache_dir(), machine_identity())


def knowledge_of_table(table: str) -> Knowledge:
    """The knowledge of the factors of a table before any probe or job."""
    if table.startswith(f"{MEASURED} {BUSY}"):
        return Knowledge(table, prior=_BUSY_PRIOR)
    return Knowledge(table, prior=_MEASURED_PRIOR) if table.startswith(MEASURED) else first_knowledge(table)


def _known_hardware(job: Job, workload: Workload) -> HardwareProfile:
    """The profile of the cores that this thread may use: as known, and probed as far as the job's time allows."""
    offload_dir = make_offload_dir(job.offload_dir)
    path = record_of_machine()
    streams = may_stream(job, workload)
    record, table = read_record(path), _measured_table(job, offload_dir, streams=streams)
    if table is not None:
        key, profile = table
        apply = partial(corrected, profile, model=job.process_config)
    else:
        key = table_of_kind()
        apply = partial(rates_of_kind, model=job.process_config, sizes=sizes("cpu", offload_dir))
    known = record.knowledge.get(key) or knowledge_of_table(key)
    profile = apply(known)
    disk = record.disks.get(str(offload_dir))
    if streams:
        profile = with_disk(profile, disk)
    expected_s = _rough_seconds(profile, job, workload, streams=streams)
    began_s = time.monotonic()
    known = _probed(profile, job, expected_s, path)
    if streams:
        now = probe_disk(offload_dir, min(_DISK_S, _MEASURING_FRAC * expected_s))
        if now is not None:
            disk = now
            update_record(path, lambda record: record.with_disk(offload_dir, now))
        if disk is not None:
            noise = _EARLIER_DISK_NOISE if now is None else _DISK_NOISE
            known = known.after({DISK: 1.0}, known.mean({DISK: 1.0}), noise)
    known = known.slowed(slowdown_here(expected_s), slowdown_here())
    if (seconds := time.monotonic() - began_s) > _WORTH_LOGGING_S:
        logger.debug("measured this machine for %.2f s", seconds)
    return with_disk(apply(known), disk)


def _measured_table(job: Job, offload_dir: Path, *, streams: bool) -> tuple[str, HardwareProfile] | None:
    """The name and the rates of this machine's measured profile, for the job's model or else any; None: it has none.

    Args:
        job: The job.
        offload_dir: Directory of the disk tier.
        streams: Whether the weights may be larger than the memory.
    """
    weights, as_stored = weight_formats_measured(job, may_stream=streams)
    kv = _kv_formats_measured(job)
    all_formats = tuple(dict.fromkeys((*weights, *job.open_weights))), (*kv, *job.open_kv)
    for model, (weight_formats, kv_formats) in itertools.product(
        (job.process_config, None), (all_formats, (weights, kv))
    ):
        wanted = wanted_of(model, job.dtype, weight_formats, as_stored, kv_formats)
        if (profile := recall(wanted, cache_dir=cache_dir(), offload_dir=offload_dir)) is not None:
            busy = f" {BUSY}" if BUSY in profile.measured else ""
            return f"{MEASURED}{busy} {path_of(wanted, cache_dir(), offload_dir).stem}", profile
    return None


def _probed(profile: HardwareProfile, job: Job, expected_s: float, path: Path) -> Knowledge:
    """The knowledge of the machine after a probe, where the machine is not known well and the job is long enough."""
    known = profile.knowledge
    assert known is not None
    seconds = min(_PROBE_S, _MEASURING_FRAC * expected_s)
    products = {SPEED: 1.0, MANY: 1.0, weights_name(matmul_key(job.dtype, job.dtype)): 1.0}
    if known.deviation(products) <= _WELL_KNOWN or seconds < _LEAST_PROBE_S:
        return known
    free_bytes = min(available_memory_bytes(), max(0, job.budgets["cpu"] - resident_bytes()))
    after = probed(known, trials_here(profile, job.dtype, free_bytes), seconds)
    if after != known:
        after = replace(after, probe_s=seconds)
        update_record(path, lambda record: _unless_there(record, after))
    return after


def _unless_there(record: MachineRecord, known: Knowledge) -> MachineRecord:
    """The record with what a probe has shown, unless other jobs have added to the table meanwhile."""
    return record if known.table in record.knowledge else record.with_knowledge(known)


def _rough_seconds(profile: HardwareProfile, job: Job, workload: Workload, *, streams: bool) -> float:
    """A job's seconds by its products, its prompts' attention and what streams, without a plan.

    Args:
        profile: The machine.
        job: The job.
        workload: The job's workload.
        streams: Whether the weights may stream in every sweep.
    """
    model, tokens = job.process_config, workload.num_seqs * workload.computed_prompt_len
    rates = profile.cpu.rates("gemm_flops_per_s", job.dtype)
    flops = 2 * model.matmul_params_per_layer * model.num_layers
    decoded = workload.num_seqs * (workload.output_len.mean - 1)
    seconds = tokens * flops / rates.at(width=model.hidden_size, tokens=_PROMPT_TOKENS)
    seconds += decoded * flops / rates.at(width=model.hidden_size, tokens=_DECODED_TOKENS)
    seconds += _attention_seconds(profile, model, job.dtype, workload)
    if streams:
        size = store_bytes(model, job.dtype, job.options.weights)
        seconds += workload.output_len.mean * size / profile.disk_read_bytes_per_s
    return seconds


def _attention_seconds(profile: HardwareProfile, model: ModelConfig, dtype: str, workload: Workload) -> float:
    """Seconds of the prompts' attention to themselves; where it is causal, a token sees half of its prompt."""
    rates, lengths = profile.cpu.rates("prefill_attention_flops_per_s", dtype), workload.prompt_len
    others = model.flops_per_token(0)

    def seconds(tokens: int) -> float:
        seen = -(-tokens // 2) if model.causal else tokens
        return tokens * (model.flops_per_token(seen) - others) / rates.at(context=tokens)

    computed = workload.computed_prompt_len / lengths.mean
    return workload.num_seqs * computed * sum(map(seconds, lengths.values)) / len(lengths.values)


def with_disk(profile: HardwareProfile, disk: DiskRates | None) -> HardwareProfile:
    """A profile with measured rates of a disk; as it is without."""
    if disk is None:
        return profile
    return replace(
        profile,
        disk_read_bytes_per_s=disk.read_bytes_per_s,
        disk_write_bytes_per_s=disk.write_bytes_per_s,
        disk_read_overhead_s=disk.read_overhead_s,
        disk_write_overhead_s=disk.write_overhead_s,
        disk_cpu_overhead_s=disk.cpu_overhead_s,
        disk_call_overhead_s=disk.call_overhead_s,
    )


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


def may_stream(job: Job, workload: Workload | None = None) -> bool:
    """Tell whether so much of a job's memory is weights and its longest row's KV that some of that may go to disk.

    Args:
        job: The job.
        workload: The job's workload; None: there is none, and weights alone count.
    """
    size = store_bytes(job.process_config, job.dtype, job.options.weights)
    if workload is not None:
        longest = workload.prompt_len.max + workload.output_len.max
        size += job.process_config.kv_bytes_per_token(int(FORMAT_BYTES[job.dtype])) * longest
    return _MEMORY_FRAC_WITHOUT_DISK * (job.budgets["cpu"] - TYPICAL_PROCESS_BYTES) < size


def weight_formats_measured(job: Job, *, may_stream: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The weight formats whose rates a measured profile of a job has, and those that stream as they are stored.

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


def _kv_formats_measured(job: Job) -> tuple[str, ...]:
    """The KV formats that a job's options give, whose rates a measured profile of the job has."""
    kv_cache_dtype = job.options.kv_cache_dtype
    return () if kv_cache_dtype == "auto" else (kv_cache_dtype,)


def on_this_machine(hardware: HardwareProfile) -> HardwareProfile:
    """A profile with its own rates and this machine's memory sizes, for a job that runs on this machine."""
    here = max(available_memory_bytes() + resident_bytes(), 1)
    on_card = None if hardware.gpu is None else gpu_memory_bytes()
    return replace(hardware, cpu_memory_bytes=here, gpu_memory_bytes=on_card)
