"""Everything a job can be told."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from batchgen.core.errors import InputError
from batchgen.core.request import SamplingParams
from batchgen.core.units import parse_seconds
from batchgen.engine.engine import ON_OVERLONG
from batchgen.runtime.grammar import check_grammar

TASKS = ("generate", "score")


@dataclass(frozen=True)
class JobOptions:
    """Everything `batchgen run` can be told, under the names of its flags (see `batchgen run --help`).

    input may also be a `datasets.Dataset` or `IterableDataset`. output: None where only a plan is asked for, or
    for a file in the cache directory.
    """

    model: str
    input: Any
    output: str | Path | None
    prompt_column: str | None = None
    prompt_template: str | None = None
    messages_column: str | None = None
    system_prompt: str | None = None
    chat: bool = False
    task: str = "generate"
    continuations_column: str | None = None
    choices: tuple[str, ...] = ()
    choices_column: str | None = None
    sampling_column: str | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    dtype: str = "auto"
    quantization: str = "none"
    kv_cache_dtype: str = "auto"
    device: str = "auto"
    gpu_memory: str | int | None = None
    cpu_memory: str | int | None = None
    disk_memory: str | int | None = None
    hardware: str | None = None
    offload_dir: str | Path | None = None
    plan: str | None = None
    admission: str = "auto"
    max_num_seqs: int | None = None
    num_gpu_batches: int | None = None
    max_num_batched_tokens: int | None = None
    max_model_len: int | None = None
    share_prefixes: bool = True
    expected_output_len: int | None = None
    resume: bool = True
    overwrite: bool = False
    retry_failed: bool = False
    max_time: str | float | None = None
    flush_interval: str | float = "5s"
    on_error: str = "record"
    on_overlong: str = "error"
    shard: str | None = None
    limit: int | None = None
    split: str | None = None
    id_column: str | None = None
    input_format: str | None = None
    output_prefix: str = ""
    report: str | None = None
    trace: str | None = None
    progress: str = "auto"
    dry_run: bool = False


def check_options(options: JobOptions) -> None:
    """Everything that can be refused without reading anything."""
    if options.on_error not in ("record", "fail"):
        raise InputError(f"--on-error must be record or fail, not {options.on_error!r}")
    if options.on_overlong not in ON_OVERLONG:
        raise InputError(f"--on-overlong must be one of {', '.join(ON_OVERLONG)}, not {options.on_overlong!r}")
    _check_task(options)
    if options.plan is not None:
        fixed = ("hardware", "max_num_seqs", "num_gpu_batches", "max_num_batched_tokens")
        given = any(getattr(options, name) is not None for name in fixed)
        if given or options.admission != "auto" or not options.share_prefixes:
            raise InputError(
                "--plan says it all: leave out --hardware, --admission, --max-num-seqs, --num-gpu-batches,"
                " --max-num-batched-tokens and --no-enable-prefix-caching"
            )
    for name in ("max_num_seqs", "num_gpu_batches", "max_num_batched_tokens", "expected_output_len"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise InputError(f"--{name.replace('_', '-')} must be at least 1, not {value}")
    if options.limit is not None and options.limit < 1:
        raise InputError(f"--limit must be at least 1, not {options.limit}")
    if options.overwrite and options.retry_failed:
        raise InputError(
            "--overwrite and --retry-failed exclude each other: the first starts afresh, the second"
            " keeps the rows that are fine"
        )
    if options.retry_failed and not options.resume:
        raise InputError("--retry-failed needs what was done before: leave out --no-resume")
    for name, allowed in (("quantization", ("none", "int4")), ("kv_cache_dtype", ("auto", "int4"))):
        if getattr(options, name) not in allowed:
            raise InputError(f"--{name.replace('_', '-')} must be {' or '.join(allowed)}")
    check_grammar(options.sampling)
    _check_path("--report", options.report)
    _check_path("--trace", options.trace)
    if options.max_time is not None:
        seconds(options.max_time)
    if seconds(options.flush_interval) <= 0:
        raise InputError(f"--flush-interval must be above 0, not {options.flush_interval!r}")


def _check_task(options: JobOptions) -> None:
    if options.task not in TASKS:
        raise InputError(f"--task must be {' or '.join(TASKS)}, not {options.task!r}")
    if options.task == "generate":
        for name in ("continuations_column", "choices", "choices_column"):
            if getattr(options, name):
                raise InputError(f"--{name.replace('_', '-')} is for scoring: give --task score")
        return
    default = SamplingParams()
    for name in SamplingParams.names():
        if name != "logprobs" and getattr(options.sampling, name) != getattr(default, name):
            flag = "-n" if name == "n" else f"--{name.replace('_', '-')}"
            raise InputError(f"{flag} has no meaning with --task score, which generates nothing: leave it out")
    for name in ("sampling_column", "expected_output_len"):
        if getattr(options, name) is not None:
            flag = f"--{name.replace('_', '-')}"
            raise InputError(f"{flag} has no meaning with --task score, which generates nothing: leave it out")


def seconds(value: str | float) -> float:
    """A duration given as text or as a number."""
    return parse_seconds(value) if isinstance(value, str) else float(value)


def _check_path(flag: str, path: str | None) -> None:
    """Raises InputError now rather than after hours of work."""
    if path and (Path(path).is_dir() or not os.access(Path(path).absolute().parent, os.W_OK)):
        raise InputError(f"{flag} {path} cannot be written: give a file in a directory that exists")
