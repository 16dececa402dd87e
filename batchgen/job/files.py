"""The files that a command writes are none of those that it reads: an input is never replaced, nor does it grow by its output."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from batchgen.core.errors import InputError
from batchgen.dataset.paths import InputPaths, is_in, same_file
from batchgen.job.options import JobOptions
from batchgen.output.run_directory import RUN_FILES, errors_path, run_directory, target_path

# What is read of a model's folder.
_MODEL_FILES = re.compile(
    r"(config|generation_config|manifest|tokenizer.*|vocab|added_tokens|special_tokens_map|chat_template.*|.*\.index)\.json"
    r"|merges\.txt|.*\.(safetensors|model|jinja)"
)


def check_files(job: JobOptions, *, plan_file: str | None = None, errors_file: bool = False) -> None:
    """Raises InputError where something that the command would write is, or lies in, something that it reads; or is written twice.

    plan_file: where `batchgen plan` puts its plan. errors_file: the output has a second file (`errors_path`).
    """
    inputs = InputPaths.of(job.input)
    written = list(_written(job, plan_file, errors_file))
    for i, (flag, path) in enumerate(written):
        if reason := inputs.includes(path):
            raise InputError(f"{flag} {path} {reason}: give a file elsewhere, which no run reads or replaces")
        for other, read in _read(job):
            if same_file(path, read):
                raise InputError(f"{flag} {path} is the file of {other}: give another name")
        for other, earlier in written[:i]:
            if same_file(path, earlier):
                raise InputError(f"{flag} {path} is the file of {other} too: give another name")
    if job.output is not None:
        _check_run_directory(job, inputs, written)


def _check_run_directory(job: JobOptions, inputs: InputPaths, written: list[tuple[str, Path]]) -> None:
    directory = run_directory(target_path(Path(job.output)))
    own = [*inputs.files, *([inputs.folder] if inputs.folder else [])]
    for flag, path in [*(("--input", path) for path in own), *_read(job), *written]:
        if is_in(path, directory):
            raise InputError(
                f"{flag} {path} lies in {directory}, where --output keeps its progress: give a file elsewhere"
            )
    for name in RUN_FILES:
        if reason := inputs.includes(directory / name):
            raise InputError(
                f"--output {job.output} keeps its progress in {directory}, where {name} {reason}: give a file elsewhere"
            )


def _written(job: JobOptions, plan_file: str | None, errors_file: bool) -> Iterator[tuple[str, Path]]:
    """(flag, file) of each; the disk tier and the cache have files of names of their own."""
    if job.output is not None:
        yield "--output", Path(job.output)
        if errors_file:
            yield "--output's errors", errors_path(target_path(Path(job.output)))
    for flag, path in (("--report", job.report), ("-o", plan_file)):
        if path and path != "-":
            yield flag, Path(path)
            yield f"{flag}'s", Path(f"{path}.tmp")  # which it is until it is whole
    if job.trace:
        yield "--trace", Path(job.trace)


def _read(job: JobOptions) -> Iterator[tuple[str, Path]]:
    """(flag, file) of what is read beside the input."""
    model = Path(job.model).expanduser()
    if model.is_file():
        yield "--model", model
    elif model.is_dir():
        for path in model.iterdir():
            if _MODEL_FILES.fullmatch(path.name):
                yield "--model", path
    for flag, path in (("--plan", job.plan), ("--hardware", job.hardware)):
        if path and Path(path).is_file():
            yield flag, Path(path)
    if (job.prompt_template or "").startswith("@"):
        yield "--prompt-template", Path(job.prompt_template[1:]).expanduser()
