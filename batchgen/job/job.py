"""A job's options, resolved for its model and its machine: each value is computed once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from batchgen.core.attention_budget import AttentionBudget
from batchgen.core.cache_folder import cache_dir
from batchgen.core.device import Device, parse_device
from batchgen.core.dtypes import (
    AUTO,
    INT4,
    INT8,
    MIXED,
    NATIVE,
    NATIVE_FORMATS,
    STATE_DTYPES,
    changes_results,
    weight_format_of,
)
from batchgen.core.errors import InputError
from batchgen.core.hardware import HardwareProfile
from batchgen.core.quality import KV_LOSSES
from batchgen.core.units import parse_rate, size_bytes
from batchgen.distributed.launch import ranks_of_host
from batchgen.engine.loader import (
    check_attention_budget,
    check_state_dtype,
    choose_weights,
    native_formats,
    resolve_budgets,
    resolve_context,
    resolve_dtype,
)
from batchgen.engine.ranks import check_cards
from batchgen.engine.tensor_parallel import check_hosts, first_shard, shard_weights
from batchgen.job.options import JobOptions
from batchgen.models.config import ModelConfig
from batchgen.models.files import ModelFiles, read_config, resolve_weights, stored_weights
from batchgen.models.shard import Shard
from batchgen.planner.parallel import check_stages, largest_stage

# Formats that decide a job's answers where no option gives one; its fingerprint has none then.
USUAL_FORMATS = [NATIVE, "auto", STATE_DTYPES[0]]


@dataclass(frozen=True)
class Job:
    """A job: its options, and the values that they have for its model on its machine.

    Attributes:
        options: The options, with the device's default values filled in; `options.weights` is a format, or "native" or
            "dequantized" for the compute dtype.
        files: The model's files.
        config: The model's configuration; with tensor parallelism that of rank 0's part.
        dtype: The compute dtype.
        device: The compute device.
        context: The longest prompt plus output, in tokens.
        offload_dir: The directory of the disk tier.
        gpu_memory: Bytes of GPU memory of each process; None: not given.
        cpu_memory: Bytes of host memory of all processes of a host; None: not given.
        disk_memory: Bytes of disk of all processes of a host; None: not given.
        shard: Rank 0's part of the model; None: one process has all layers whole.
        native_format: The packed format of the model's weights, where they may stay in it or be dequantized.
        dequantized_format: The packed format of the model's weights, where tensor parallelism requires dequantizing.
        weights_reason: The sentence that says why `--weights auto` has chosen the format.
        open_weights: Formats that `--quality` could allow the layers' matrices to have, beside that of the options.
        open_kv: Formats that `--quality` could allow KV to have, beside that of the options.
        of_host: Number of processes that share a host's memory, disk and cores.
        shares: Set of CPU cores of each process of this host.
    """

    options: JobOptions
    files: ModelFiles
    config: ModelConfig
    dtype: str
    device: Device
    context: int
    offload_dir: Path
    gpu_memory: int | None
    cpu_memory: int | None
    disk_memory: int | None
    shard: Shard | None = None
    native_format: str | None = None
    dequantized_format: str = ""
    weights_reason: str = ""
    open_weights: tuple[str, ...] = ()
    open_kv: tuple[str, ...] = ()
    of_host: int = 1
    shares: tuple[frozenset[int], ...] = ()

    @cached_property
    def budgets(self) -> Mapping[str, int]:
        """Bytes of each tier that one process may use. Free memory is read at the first use. Raises InputError."""
        return resolve_budgets(
            self.device,
            cpu_memory=self.cpu_memory,
            gpu_memory=self.gpu_memory,
            disk_memory=self.disk_memory,
            offload_dir=self.offload_dir,
            processes=self.of_host,
        )

    @property
    def processes(self) -> int:
        """Number of ranks or stages that run the model together; 1 without them."""
        return max(self.options.tensor_parallel, self.options.pipeline)

    @property
    def open_format(self) -> str | None:
        """The packed format in which weights may stay, or from which they may be dequantized; None: no choice."""
        return None if self.shard is not None else self.native_format

    @property
    def weight_format(self) -> str:
        """The format in which the layers' matrices are held."""
        return weight_format_of(self.dtype, self.options.weights)

    @property
    def deciding_formats(self) -> list[str]:
        """The formats that decide a job's answers: of weights, of KV and of states, and an attention budget."""
        options = self.options
        weights = options.weights if changes_results(options.weights) else NATIVE
        budget = [] if AttentionBudget.of(options.attention_budget) is None else [options.attention_budget]
        return [weights, options.kv_cache_dtype, options.state_dtype, *budget]

    @property
    def process_memory(self) -> dict[str, int | None]:
        """The memory budgets of one process in bytes, by the names of their options; None: not given."""

        def part(size: int | None) -> int | None:
            return None if size is None else size // self.of_host

        memory = {"cpu_memory": part(self.cpu_memory), "disk_memory": part(self.disk_memory)}
        return memory | {"gpu_memory": self.gpu_memory}

    @property
    def process_config(self) -> ModelConfig:
        """The configuration of the part of the model that one process has; in a pipeline, that of the largest stage."""
        stages = self.options.pipeline
        return self.config if stages == 1 else largest_stage(self.config, stages)

    @property
    def link_bytes_per_s(self) -> float | None:
        """Bytes per second of the network between the processes, if the options give it; None: not given."""
        given = self.options.link_bandwidth
        return None if given is None else parse_rate(given, "--link-bandwidth")


def resolve_job(
    options: JobOptions, files: ModelFiles, config: ModelConfig | None = None, of_host: int | None = None
) -> Job:
    """Resolve a job's options for this machine.

    Args:
        options: The job's options.
        files: The files of the model that the options name.
        config: The model's configuration; None: it is read from `files`.
        of_host: Processes on this host; None: all processes that share the model.

    Raises:
        InputError: A value is invalid on this machine, or the model is not supported.
    """
    config = config or read_config(files)
    device = parse_device(options.device)
    dtype = resolve_dtype(config, options.dtype, device)
    config, shard = _split(options, files, config, device)
    of_host = of_host or ranks_of_host(max(options.tensor_parallel, options.pipeline))

    def memory_bytes() -> int:
        return resolve_budgets(
            device,
            cpu_memory=options.cpu_memory,
            gpu_memory=options.gpu_memory,
            processes=of_host,
        )["gpu" if device.kind == "cuda" else "cpu"]

    job = _resolved(options, files, config, device, dtype, memory_bytes)
    return replace(_in_shards(job, shard), of_host=of_host)


def resolve_for(
    hardware: HardwareProfile, options: JobOptions, files: ModelFiles, config: ModelConfig, of_host: int | None = None
) -> Job:
    """Resolve a job's options for another machine, which is known by its hardware profile.

    A job that this version cannot run on that machine's device is resolved too; `why_not_run` says so.

    Args:
        hardware: The profile of each host.
        options: The job's options.
        files: The files of the model that the options name.
        config: The model's configuration.
        of_host: Processes on each host; None: all processes that share the model.

    Raises:
        InputError: A value is invalid on that machine.
    """
    config, shard = _split(options, files, config, Device("cpu"))
    dtype = options.dtype
    if dtype == "auto":
        dtype = config.dtype if hardware.compute.has_rates("gemm_flops_per_s", config.dtype) else "float32"
    device = Device("cpu" if hardware.gpu is None else "cuda")

    def memory_bytes() -> int:
        if hardware.gpu_memory_bytes is not None:
            return hardware.gpu_memory_bytes if options.gpu_memory is None else size_bytes(options.gpu_memory)
        whole = hardware.cpu_memory_bytes if options.cpu_memory is None else size_bytes(options.cpu_memory)
        return whole // (of_host or max(options.tensor_parallel, options.pipeline))

    job = _resolved(options, files, config, device, dtype, memory_bytes)
    return replace(_in_shards(job, shard), of_host=of_host or job.processes)


def why_not_run(job: Job, of_host: int | None = None) -> str:
    """The reason why this version cannot run a job's processes on its device; "": it can.

    Args:
        job: The job.
        of_host: Number of processes on each host; None: all.
    """
    size = job.options.tensor_parallel
    try:
        check_stages(job.config, job.options.pipeline)
        check_hosts(job.device.kind, size, size if of_host is None else of_host)
    except InputError as error:
        return str(error)
    return ""


def _split(
    options: JobOptions, files: ModelFiles, config: ModelConfig, device: Device
) -> tuple[ModelConfig, Shard | None]:
    """The configuration and the shard of rank 0 under tensor parallelism; for a pipeline, its stages are checked."""
    check_stages(config, options.pipeline)
    if options.pipeline > 1 and device.kind == "cuda":
        check_cards("--pipeline", options.pipeline)
    if options.tensor_parallel == 1:
        return config, None
    shard = first_shard(files, config, options.tensor_parallel, device, options.weights)
    return shard.config, shard


def _in_shards(job: Job, shard: Shard | None) -> Job:
    """The job of rank 0, its weight format changed to one that the shard allows. Raises InputError."""
    if shard is None:
        return job
    asked, native = job.options.weights, job.native_format
    weights = shard_weights(shard, asked)
    return replace(
        job,
        options=replace(job.options, weights=weights),
        shard=shard,
        native_format=native if native and shard_weights(shard, native) == native else None,
        dequantized_format="" if weights == asked else asked,
        open_weights=tuple(name for name in job.open_weights if name == INT4 and shard.divides(INT4)),
    )


def dequantized_line(job: Job) -> list[str]:
    """A line that says that packed weights are held dequantized by ranks, or with an adapter; no line if not so."""
    if not job.dequantized_format and job.weight_format == job.dtype and (line := merged_line(job.files)) is not None:
        return [f"{line}: they take the memory and the reads of {job.dtype}; --weights int8 and int4 quantize the sum"]
    if not job.dequantized_format:
        return []
    why = (
        "matrices in several formats, which are cut only where all have one"
        if job.dequantized_format == MIXED
        else f"weights in {job.dequantized_format}, whose blocks would be cut"
    )
    return [
        f"--tensor-parallel expands {why}: they take the memory and the reads of {job.dtype}; --pipeline keeps them as "
        "they are"
    ]


def merged_line(files: ModelFiles) -> str | None:
    """A sentence that says that an adapter has packed weights dequantized; None: there is none, or they are numbers."""
    if files.lora is None or (packed := stored_weights(replace(files, lora=None))) is None:
        return None
    named = "several packed formats" if packed == MIXED else packed
    return f"an adapter is merged into numbers, so the weights, which are in {named}, are dequantized"


def _check_attention_budget(options: JobOptions, config: ModelConfig) -> None:
    """Refuse an attention budget where it cannot be kept to. Raises InputError."""
    check_attention_budget(config, options.attention_budget)
    if AttentionBudget.of(options.attention_budget) is None:
        return
    for flag, count in (("--tensor-parallel", options.tensor_parallel), ("--pipeline", options.pipeline)):
        if count > 1:
            raise InputError(f"--attention-budget needs the whole model in one process: leave it or {flag} out")


def _resolved(
    options: JobOptions,
    files: ModelFiles,
    config: ModelConfig,
    device: Device,
    dtype: str,
    memory_bytes: Callable[[], int],
) -> Job:
    check_state_dtype(config, options.state_dtype)
    _check_attention_budget(options, config)
    stored = resolve_weights(files, options.weights, native_formats(device))
    weights = choose_weights(files, config, options.weights, dtype, device, memory_bytes)

    def size(value: str | int | None) -> int | None:
        return None if value is None else size_bytes(value)

    return Job(
        options=replace(options, weights=weights),
        files=files,
        config=config,
        dtype=dtype,
        device=device,
        native_format=stored if options.weights == AUTO and stored in NATIVE_FORMATS else None,
        open_weights=()
        if options.weights != AUTO or changes_results(stored) or files.kind == "store"
        else (INT8, INT4),
        open_kv=tuple(KV_LOSSES) if options.kv_cache_dtype == "auto" else (),
        context=resolve_context(config, options.max_model_len),
        offload_dir=Path(options.offload_dir or cache_dir()),
        gpu_memory=size(options.gpu_memory),
        cpu_memory=size(options.cpu_memory),
        disk_memory=size(options.disk_memory),
    )
