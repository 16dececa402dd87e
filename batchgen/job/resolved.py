"""A job's options as they are meant for its model on its machine: worked out once, handed over frozen."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from batchgen.core.cache_folder import cache_dir
from batchgen.core.device import Device, parse_device
from batchgen.core.dtypes import AUTO, DEQUANTIZED, KEPT_FORMATS, MIXED
from batchgen.core.errors import InputError
from batchgen.core.hardware import HardwareProfile
from batchgen.core.units import parse_rate, size_bytes
from batchgen.distributed.launch import ranks_of_host
from batchgen.engine.loader import choose_weights, resolve_budgets, resolve_context, resolve_dtype
from batchgen.engine.tensor_parallel import check_hosts, first_shard, shard_weights
from batchgen.job.options import JobOptions
from batchgen.models.config import ModelConfig
from batchgen.models.files import ModelFiles, read_config, resolve_weights
from batchgen.models.shard import Shard
from batchgen.planner.parallel import check_stages, largest_stage


@dataclass(frozen=True)
class ResolvedJob:
    """What a job's options come to.

    files, config: the model's. dtype: of what is computed. context: longest prompt plus output, in tokens. offload_dir: of
    the disk tier. gpu_memory, cpu_memory, disk_memory: in bytes, None where the options leave them open. shard: rank 0's part of the
    model, whose shape `config` is then. as_found: the format of the model's weights, where they may stay in it or be expanded.
    expanded_format: of weights that are expanded, as a shard does not have them as they were found. of_host: processes among which host memory, disk and cores are shared. shares: the cores of each rank
    or stage of this host.
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
    as_found: str | None = None
    expanded_format: str = ""
    of_host: int = 1
    shares: tuple[frozenset[int], ...] = ()

    @cached_property
    def budgets(self) -> Mapping[str, int]:
        """Bytes of each tier that one process may use, of what is free when they are first asked for. Raises InputError."""
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
        """Ranks, or stages, that run the model together."""
        return max(self.options.tensor_parallel, self.options.pipeline)

    @property
    def planned_formats(self) -> tuple[str, ...]:
        """Quantizations that the plan chooses between: as found and expanded, or none, where the options alone tell."""
        return () if self.as_found is None or self.shard is not None else (self.as_found, DEQUANTIZED)

    @property
    def process_config(self) -> ModelConfig:
        """The shape of what one process has of the model: of the largest stage, or `config`."""
        stages = self.options.pipeline
        return self.config if stages == 1 else largest_stage(self.config, stages)

    @property
    def link_bytes_per_s(self) -> float | None:
        """Of the link between the processes, where the options say so."""
        given = self.options.link_bandwidth
        return None if given is None else parse_rate(given, "--link-bandwidth")


def resolve_job(
    options: JobOptions, files: ModelFiles, config: ModelConfig | None = None, of_host: int | None = None
) -> ResolvedJob:
    """Resolve options for the machine that this is.

    Args:
        options: The job's.
        files: Those of `options.model`.
        config: The model's configuration; None: it is read from `files`.
        of_host: Processes on this host; None: those that share the model here.

    Raises:
        InputError: A value means nothing here, or the model is not supported.
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
        )["cpu"]

    job = _resolved(options, files, config, device, dtype, memory_bytes)
    return replace(_in_shards(job, shard), of_host=of_host)


def resolve_for(
    hardware: HardwareProfile, options: JobOptions, files: ModelFiles, config: ModelConfig, of_host: int | None = None
) -> ResolvedJob:
    """Resolve options for another machine, of which there is only a profile.

    What does not run on its device yet is resolved all the same: `why_not_run` tells.

    Args:
        hardware: What each host has.
        options, files, config: As of `resolve_job`.
        of_host: Processes on each host; None: all that share the model.

    Raises:
        InputError: A value means nothing there.
    """
    config, shard = _split(options, files, config, Device("cpu"))
    dtype = options.dtype
    if dtype == "auto":
        dtype = config.dtype if hardware.compute.has_rates("gemm_flops_per_s", config.dtype) else "float32"
    device = Device("cpu" if hardware.gpu is None else "cuda")

    def memory_bytes() -> int:
        whole = hardware.cpu_memory_bytes if options.cpu_memory is None else size_bytes(options.cpu_memory)
        return whole // (of_host or max(options.tensor_parallel, options.pipeline))

    job = _resolved(options, files, config, device, dtype, memory_bytes)
    return replace(_in_shards(job, shard), of_host=of_host or job.processes)


def why_not_run(job: ResolvedJob, of_host: int | None = None) -> str:
    """Say why this version does not run the processes of a job on its device; "" where it does.

    of_host: how many a host has; None: all.
    """
    size = job.options.tensor_parallel
    try:
        check_stages(job.config, job.options.pipeline, job.device)
        check_hosts(job.device.kind, size, size if of_host is None else of_host)
    except InputError as error:
        return str(error)
    return ""


def _split(
    options: JobOptions, files: ModelFiles, config: ModelConfig, device: Device
) -> tuple[ModelConfig, Shard | None]:
    """Shape and shard of rank 0, where ranks share every layer; stages are checked. Raises InputError."""
    check_stages(config, options.pipeline, device)
    if options.tensor_parallel == 1:
        return config, None
    shard = first_shard(files, config, options.tensor_parallel, device, options.weights)
    return shard.config, shard


def _in_shards(job: ResolvedJob, shard: Shard | None) -> ResolvedJob:
    """The job of rank 0, whose weights are as a shard can have them. Raises InputError."""
    if shard is None:
        return job
    found, as_found = job.options.weights, job.as_found
    weights = shard_weights(shard, found)
    return replace(
        job,
        options=replace(job.options, weights=weights),
        shard=shard,
        as_found=as_found if as_found and shard_weights(shard, as_found) == as_found else None,
        expanded_format="" if weights == found else found,
    )


def expanded_line(job: ResolvedJob) -> list[str]:
    """That ranks have packed weights expanded, and what that costs; nothing where they do not."""
    if not job.expanded_format:
        return []
    why = (
        "matrices in several formats, which are cut only where all have one"
        if job.expanded_format == MIXED
        else f"weights in {job.expanded_format}, whose blocks would be cut"
    )
    return [
        f"--tensor-parallel expands {why}: they take the memory and the reads of {job.dtype}; --pipeline keeps them as they are"
    ]


def _resolved(
    options: JobOptions,
    files: ModelFiles,
    config: ModelConfig,
    device: Device,
    dtype: str,
    memory_bytes: Callable[[], int],
) -> ResolvedJob:
    found = resolve_weights(files, options.weights, on_cpu=device.kind != "cuda")
    weights = choose_weights(files, config, options.weights, dtype, device, memory_bytes)

    def size(value: str | int | None) -> int | None:
        return None if value is None else size_bytes(value)

    return ResolvedJob(
        options=replace(options, weights=weights),
        files=files,
        config=config,
        dtype=dtype,
        device=device,
        as_found=found if options.weights == AUTO and found in KEPT_FORMATS else None,
        context=resolve_context(config, options.max_model_len),
        offload_dir=Path(options.offload_dir or cache_dir()),
        gpu_memory=size(options.gpu_memory),
        cpu_memory=size(options.cpu_memory),
        disk_memory=size(options.disk_memory),
    )
