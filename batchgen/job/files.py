"""Checks of the files that a command writes: it must not write a file that it reads."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from batchgen.core.atomic_file import write_atomically
from batchgen.core.errors import InputError
from batchgen.core.hardware import HARDWARE_VARIABLE
from batchgen.dataset.paths import InputPaths, is_in, same_file
from batchgen.job.option import AT_FILE, TEXT_OF_FILE
from batchgen.job.option_table import options_of
from batchgen.job.options import JobOptions
from batchgen.output.formats import FORMATS
from batchgen.output.run_directory import RUN_FILES, errors_path, run_directory, target_path

# Names of the files that are read in a model's folder.
_MODEL_FILES = re.compile(
    r"(config|generation_config|manifest|tokenizer.*|vocab|added_tokens|special_tokens_map|chat_template.*)\.json"
    r"|.*\.index\.json|merges\.txt|.*\.(safetensors|model|jinja)"
)


def check_files(
    job: JobOptions, *, plan_file: str | None = None, plan_page: str | None = None, errors_file: bool = False
) -> None:
    """Check that a command writes no file that it reads, and no file twice.

    Args:
        job: The job's options.
        plan_file: File of the plan, `batchgen plan -o`.
        plan_page: Page of the plan, `batchgen plan --html`.
        errors_file: Whether the output has a second file (`errors_path`).

    Raises:
        InputError: A written file is read, lies in a folder that is read, or lies in the run directory.
    """
    if job.output is not None and not Path(job.output).name:
        raise InputError(f"cannot write {job.output!r}: --output must end in {', '.join(FORMATS)}")
    if job.trace == "-":
        raise InputError("--trace - is no file: a timeline needs one, such as --trace trace.json")
    for flag, page in (("--report-html", job.report_html), ("--html", plan_page)):
        if page == "-":
            raise InputError(f"{flag} - is no file: a page needs one, such as {flag} page.html")
    inputs = InputPaths.of(job.input)
    texts = {"--report": job.report, "-o": plan_file, "--report-html": job.report_html, "--html": plan_page}
    written = [(flag, path) for flag, path in _written(job, texts, errors_file) if not is_device(path)]
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
        _check_run_directory(job, Path(job.output), inputs, written)


def is_device(path: str | os.PathLike[str]) -> bool:
    """Tell whether a path is a device such as /dev/null, which no file may replace; false if it cannot be read."""
    with contextlib.suppress(OSError):
        return stat.S_ISCHR(os.stat(path).st_mode)
    return False


def write_text(text: str, path: str, flag: str) -> None:
    """Write text to a file atomically; to a device such as /dev/null, directly.

    Args:
        text: The file's content.
        path: The file.
        flag: Flag of the option that named the file.

    Raises:
        InputError: The file cannot be written.
    """
    target, content = Path(path), text.encode()
    try:
        if is_device(target):  # /dev/null: no file must take its place
            target.write_bytes(content)
        else:
            write_atomically(target, content)
    except OSError as error:
        raise InputError(f"{flag} {path} cannot be written: {error.strerror}") from error


def _check_run_directory(job: JobOptions, output: Path, inputs: InputPaths, written: list[tuple[str, Path]]) -> None:
    directory = run_directory(target_path(output))
    given: list[tuple[str, str | Path]] = [("--input", path) for path in inputs.files]
    if inputs.folder is not None:
        given.append(("--input", inputs.folder))
    for flag, path in [*given, *_read(job), *written]:
        if is_in(path, directory):
            raise InputError(
                f"{flag} {path} lies in {directory}, where --output keeps its progress: give a file elsewhere"
            )
    for name in RUN_FILES:
        if reason := inputs.includes(directory / name):
            raise InputError(
                f"--output {job.output} keeps its progress in {directory}, where {name} {reason}: give a file elsewhere"
            )


def _written(job: JobOptions, texts: dict[str, str | None], errors_file: bool) -> Iterator[tuple[str, Path]]:
    """(flag, file) of each file that a job writes, but those with unique names in the disk tier and in the cache.

    Args:
        job: The job's options.
        texts: Further written files, by flag.
        errors_file: Whether the output has a file of errors.
    """
    if job.output is not None:
        yield "--output", Path(job.output)
        if errors_file:
            yield "--output's errors", errors_path(target_path(Path(job.output)))
    for flag, path in texts.items():
        if path and path != "-":
            yield flag, Path(path)
            yield f"{flag}'s", Path(f"{path}.tmp")  # its name until it is complete
    if job.trace:
        yield "--trace", Path(job.trace)


def _read(job: JobOptions) -> Iterator[tuple[str, Path]]:
    """(flag, file) of each file that a job reads, but for its input."""
    for option in options_of("run"):
        value = getattr(job, option.name, None)
        if option.name == "input" or option.reads in (None, TEXT_OF_FILE) or not value:
            continue
        if option.reads != AT_FILE:
            yield from ((option.flag, path) for path in _files_at(Path(value).expanduser()))
        elif value.startswith("@"):
            yield option.flag, Path(value[1:]).expanduser()
    if job.hardware is None and (profile := os.environ.get(HARDWARE_VARIABLE)):
        yield f"${HARDWARE_VARIABLE}", Path(profile)
    for flag, name in job.read_before:
        yield flag, Path(name)


def _files_at(path: Path) -> Iterator[Path]:
    """The file itself, or the files in a model's directory."""
    if path.is_file():
        yield path
    elif path.is_dir():
        yield from (inner for inner in path.iterdir() if _MODEL_FILES.fullmatch(inner.name))
