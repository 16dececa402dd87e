"""Checks of a job's options that need neither model nor input."""

from __future__ import annotations

import errno
import os
import stat
import sys
from pathlib import Path

from batchgen.core.attention_budget import ALL
from batchgen.core.device import require_cuda
from batchgen.core.draft_rates import check_drafts
from batchgen.core.errors import InputError
from batchgen.core.request import GRAMMARS, SamplingParams
from batchgen.core.units import format_bytes, size_bytes
from batchgen.distributed.launch import rank_of_environment
from batchgen.job.destination import STANDARD_OUTPUT, Destination
from batchgen.job.failures import FailureLimit
from batchgen.job.files import check_files, is_device
from batchgen.job.given_hardware import given_for_run
from batchgen.job.option_table import flag_of, options_of
from batchgen.job.options import CLASSIFY, EMBED, OF_VECTORS, RERANK, JobOptions, seconds
from batchgen.job.standard_input import is_standard_input
from batchgen.output.run_directory import JOINT_STATE, check_output, joint_directory, target_path
from batchgen.runtime.grammar import check_grammar

# Python and a job's imports take more than this on any machine.
_LEAST_MEMORY_BYTES = 300 << 20
# Larger numbers are mistakes, and would overflow counters. A sweep is simulated micro-batch by micro-batch, so a plan
# with millions of them would never end.
_MOST = {"tensor_parallel": 4096, "pipeline": 4096, "limit": sys.maxsize, "num_gpu_batches": 1024}
_MOST_OF_OTHERS = (1 << 31) - 1


def check_job(options: JobOptions) -> None:
    """Refuse mistakes that can be found within a second, before the libraries that run models are imported.

    Raises:
        BatchgenError: The options contradict each other, this machine lacks the device or is not one of the hardware
            profile's kind, the output cannot be written, another process holds it, or the memory is too small for any
            model.
    """
    check_options(options)
    if (destination := Destination.of(options)) is not None:
        if not options.dry_run:
            destination.check(options)
        options = destination.local(options)
    check_files(options)
    if options.device == "cuda":
        require_cuda()
    given_for_run(options.hardware, on_card=options.device == "cuda")
    if options.cpu_memory is not None and size_bytes(options.cpu_memory) < _LEAST_MEMORY_BYTES:
        raise InputError(
            f"--cpu-memory {options.cpu_memory} is too small for any job: the process alone takes some"
            f" {format_bytes(_LEAST_MEMORY_BYTES)}; give what the machine has, or leave it out"
        )
    if options.output is not None and not options.dry_run:
        joint = options.cascade is not None or options.lora_column is not None
        begun = joint and (joint_directory(target_path(Path(options.output))) / JOINT_STATE).exists()
        check_output(options.output, overwrite=options.overwrite or begun, shared=options.share)


def check_options(options: JobOptions) -> None:
    """Raise InputError for options that contradict each other or are out of range."""
    for option in options_of("run"):
        if option.choices and getattr(options, option.name) not in (*option.choices, option.default):
            known, given = ", ".join(option.choices), getattr(options, option.name)
            raise InputError(f"{option.flag} must be one of {known}, not {given!r}")
    _check_task(options)
    _check_chat(options)
    if options.reorder_fields is not None and options.prompt_template is None:
        raise InputError("--reorder-fields is for the columns of a --prompt-template: give one, or leave it out")
    if options.plan is not None:
        fixed = ("hardware", "max_num_seqs", "num_gpu_batches", "max_num_batched_tokens")
        given = any(getattr(options, name) is not None for name in fixed)
        if given or options.admission != "auto" or not options.share_prefixes:
            raise InputError(
                "--plan says it all: leave out --hardware, --admission, --max-num-seqs, --num-gpu-batches,"
                " --max-num-batched-tokens and --no-enable-prefix-caching"
            )
    for name in (
        "max_num_seqs",
        "num_gpu_batches",
        "max_num_batched_tokens",
        "expected_output_len",
        "limit",
        "tensor_parallel",
        "pipeline",
    ):
        value, most = getattr(options, name), _MOST.get(name, _MOST_OF_OTHERS)
        if value is not None and not 1 <= value <= most:
            bound = "at least 1" if value < 1 else f"at most {most:,}"
            raise InputError(f"{flag_of(name)} must be {bound}, not {value}")
    if options.drafts is not None:
        check_drafts("--drafts", options.drafts)
    size_bytes(options.cache_size)
    if options.overwrite and options.retry_failed:
        raise InputError(
            "--overwrite and --retry-failed exclude each other: the first starts afresh, the second"
            " keeps the rows that are fine"
        )
    if options.retry_failed and not options.resume:
        raise InputError("--retry-failed needs what was done before: leave out --no-resume")
    has_schema = any("json_schema" in dict(step.options) for step in options.steps)
    if options.json_columns and options.sampling.json_schema is None and not has_schema:
        raise InputError("--json-columns needs --json-schema, whose properties become columns: give a schema")
    _check_share(options)
    _check_steps(options)
    _check_ranks(options)
    _check_joint(options)
    _check_cascade(options)
    check_grammar(options.sampling)
    check_path("--report", options.report)
    check_path("--report-html", options.report_html)
    check_path("--trace", options.trace)
    FailureLimit.parse(options.max_failed)
    if options.max_time is not None:
        seconds(options.max_time)
    if seconds(options.flush_interval) <= 0:
        raise InputError(f"--flush-interval must be above 0, not {options.flush_interval!r}")


def _check_share(options: JobOptions) -> None:
    if seconds(options.share_lease) <= 0:
        raise InputError(f"--share-lease must be above 0, not {options.share_lease!r}")
    if not options.share:
        return
    for flag, given in {
        "--overwrite": options.overwrite,
        "--retry-failed": options.retry_failed,
        "--no-resume": not options.resume,
        "--report-html": options.report_html is not None,
    }.items():
        if given:
            raise InputError(
                f"{flag} is for one process: leave out --share, or {flag}, which each worker would do again"
            )
    if is_standard_input(options.input):
        raise InputError("--share needs an input that all workers see: write it to a file, and give that")
    if options.output is not None and Destination.of(options) is not None:
        raise InputError(f"--share needs an output that all workers see as a file, not {options.output}")
    if options.shard is not None:
        raise InputError("--share divides the rows among its workers: leave out --shard")


def _check_steps(options: JobOptions) -> None:
    if not options.steps:
        return
    for flag, given in {
        f"--task {options.task}": options.task != "generate",
        "--share": options.share,
        "--output-prefix": options.output_prefix,
        "--sampling-column": options.sampling_column,
        "--reorder-fields": options.reorder_fields is not None,
        "--report-html": options.report_html is not None,
    }.items():
        if given:
            raise InputError(f"{flag} does not go with steps, each of which generates: leave out one of them")


def _check_joint(options: JobOptions) -> None:
    """Refuse what does not go with several jobs that make one output."""
    flag = "--cascade" if options.cascade is not None else "--lora-column"
    if options.cascade is None and options.lora_column is None:
        return
    for other, given in {
        "--lora-column": options.cascade is not None and options.lora_column is not None,
        "--lora": options.lora_column is not None and options.lora is not None,
        "--plan": options.plan is not None,
        "--report-html": options.report_html is not None,
        "--share": options.share,
        "steps": bool(options.steps),
        "--trace": options.trace is not None,
        "--tensor-parallel": options.tensor_parallel > 1,
        "--pipeline": options.pipeline > 1,
    }.items():
        if given:
            raise InputError(f"{other} does not go with {flag}: leave one of them out")
    if is_standard_input(options.input):
        raise InputError(f"{flag} reads its input several times: write it to a file, and give that")


def _check_cascade(options: JobOptions) -> None:
    if options.cascade is None:
        return
    sampling = options.sampling
    for other, given in {"-n": sampling.n > 1, "--sampling-column": options.sampling_column is not None}.items():
        if given:
            raise InputError(f"{other} does not go with --cascade: leave one of them out")
    chooses = options.choices or options.choices_column
    if options.task not in ("generate", "score"):
        raise InputError(
            f"--cascade is for --task generate and score, not {options.task}: leave it out, or score --choices"
        )
    if options.task == "score" and not (chooses or options.continuations_column):
        raise InputError("--cascade compares answers, and a score of a whole text is none: give --choices")
    if options.task == "generate" and not (chooses or any(getattr(sampling, name) for name in GRAMMARS)):
        raise InputError("--cascade compares answers, and free texts rarely agree: give --choices or --json-schema")
    for name in ("agree", "confidence"):
        if not 0.0 < getattr(options, name) < 1.0:
            raise InputError(f"{flag_of(name)} must be above 0 and below 1, not {getattr(options, name):g}")
    if options.agree_on is not None and options.agree_on not in options.choices:
        raise InputError(f"--agree-on must be one of --choices, not {options.agree_on!r}")
    if options.agree_within < 0.0:
        raise InputError(f"--agree-within must be 0 or more, not {options.agree_within:g}")
    if options.cascade_sample is not None and options.cascade_sample < 1:
        raise InputError(f"--cascade-sample must be at least 1, not {options.cascade_sample}")


def _check_ranks(options: JobOptions) -> None:
    asked = {flag_of(name): getattr(options, name) for name in ("tensor_parallel", "pipeline")}
    several = [flag for flag, count in asked.items() if count > 1]
    if not several:
        return
    flag = several[0]
    others = {"--plan": options.plan is not None, "--share": options.share, "--pipeline": len(several) > 1}
    for other, given in others.items():
        if given:
            raise InputError(f"{flag} does not go with {other}: leave one of them out")
    if (place := rank_of_environment()) is not None and place.size != asked[flag]:
        raise InputError(
            f"the launcher has started {place.size} ranks, {flag} is {asked[flag]}: give both the same number"
        )


def _check_chat(options: JobOptions) -> None:
    if options.chat is False and options.chat_template is not None:
        raise InputError("--chat-template and --no-chat exclude each other: leave out one")


def _check_task(options: JobOptions) -> None:
    if options.task == "generate" and options.continuations_column:
        raise InputError("--continuations-column is for scoring: give --task score")
    of_tasks = {
        **dict.fromkeys(("prompt_name", "pooling", "normalize", "dimensions"), (EMBED,)),
        "instruction": (EMBED, RERANK),
        "pair_column": (CLASSIFY, RERANK),
    }
    for name, tasks in of_tasks.items():
        if getattr(options, name) is not None and options.task not in tasks:
            flag = flag_of(name)
            raise InputError(f"{flag} is for --task {' or '.join(tasks)}: give that task, or leave {flag} out")
    if options.vector_dtype != "float32" and options.task != EMBED:
        raise InputError("--vector-dtype is for --task embed: give that task, or leave --vector-dtype out")
    if options.task == "generate":
        return
    default = SamplingParams()
    given = [
        name
        for name in SamplingParams.names()
        if name != "logprobs" and getattr(options.sampling, name) != getattr(default, name)
    ]
    given += [
        name for name in ("sampling_column", "expected_output_len", "cache") if getattr(options, name) is not None
    ]
    given += ["drafts"] if options.drafts else []
    if options.task in OF_VECTORS:
        given += ["logprobs"] if options.sampling.logprobs is not None else []
        given += ["attention_budget"] if options.attention_budget != ALL else []
        given += [name for name in ("continuations_column", "choices_column") if getattr(options, name) is not None]
        given += ["choices"] if options.choices else []
        for flag, count in (("--tensor-parallel", options.tensor_parallel), ("--pipeline", options.pipeline)):
            if count > 1:
                raise InputError(f"--task {options.task} needs the whole model in one process: leave {flag} out")
    if given:
        raise InputError(
            f"{flag_of(given[0])} has no meaning with --task {options.task}, which generates nothing: leave it out"
        )


def check_path(flag: str, path: str | None) -> None:
    """Raise InputError for a file that cannot be written, before a job begins that would write it at its end.

    Args:
        flag: Flag of the option that names the file.
        path: The file; None: the option is not given.
    """
    if not path or path == STANDARD_OUTPUT or is_device(path):
        return
    parent, reason = Path(path).absolute().parent, None
    try:
        if stat.S_ISDIR(os.stat(path).st_mode):
            reason = errno.EISDIR
    except OSError as error:
        reason = error.errno if error.errno != errno.ENOENT or not parent.is_dir() else None
    if reason is None and not os.access(parent, os.W_OK):
        reason = errno.EACCES
    if reason is not None:
        raise InputError(
            f"{flag} {path} cannot be written ({os.strerror(reason)}): give a file in a directory that you may write to"
        )
