"""Outputs that are not local files: standard output, and URLs that fsspec can write.

Such a job writes its output and its run directory in the cache directory, so that it can be resumed as any other job.
The complete output is copied to its destination. For each copy, a version that its file system reports is noted next to
the local output. So a copy that somebody changed is not replaced, and a deleted copy is written again.
"""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import json
import shutil
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from batchgen.core.atomic_file import write_atomically
from batchgen.core.cache_folder import cache_dir
from batchgen.core.errors import BatchgenError, InputError, one_line
from batchgen.core.screen import leave_standard_output, put, takes_product
from batchgen.core.text import without_credentials
from batchgen.dataset.paths import InputPaths
from batchgen.dataset.storage import file_system, is_url, version
from batchgen.job.options import JobOptions
from batchgen.output.run_directory import errors_path, run_directory

STANDARD_OUTPUT = "-"


def local_output(name: str) -> str | Path:
    """The local file of an `--output` name. Raises InputError for "-", as only its own job knows the local file."""
    if name == STANDARD_OUTPUT:
        raise InputError("jobs of standard output are not told apart by it: status is for outputs with a name")
    return Destination(name).local_path() if is_url(name) else name


def make_output_folder(folder: Path) -> None:
    """Make a folder in the cache directory for outputs without a file of their own. Raises InputError."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"cannot make {folder} ({error.strerror}): set BATCHGEN_CACHE to a directory that you can write to"
        ) from error


@dataclass(frozen=True)
class Destination:
    """An output that is not a local file.

    Attributes:
        name: "-" for standard output, or a URL.
    """

    name: str

    @classmethod
    def of(cls, options: JobOptions) -> Destination | None:
        """The destination of a job's output, if it is standard output or a URL; None: it is a local file."""
        name = str(options.output)
        return cls(name) if options.output == STANDARD_OUTPUT or is_url(options.output) else None

    @property
    def is_stdout(self) -> bool:
        return self.name == STANDARD_OUTPUT

    def local(self, options: JobOptions) -> JobOptions:
        """The job's options with a local file as output; None for standard output: the fingerprint names the file."""
        return replace(options, output=None if self.is_stdout else self.local_path())

    def check(self, options: JobOptions) -> None:
        """Check that a destination can be written, before the job begins.

        Raises:
            InputError: It cannot be reached, has another job's output, or has this job's output changed by others.
        """
        if self.is_stdout:
            if options.report == STANDARD_OUTPUT:
                raise InputError("--output - and --report - are both standard output: give one of them a file")
            if not takes_product():
                raise InputError("--output - is standard output, which is closed: give a file, or what takes the rows")
            return
        path = self.local_path()
        system, inner = file_system(self.name)
        if self._is_read(inner, options.input):
            raise InputError(f"--output {self.name} is a part of the input: give another place, which no run reads")
        try:
            there = bool(system.exists(inner))
            urls = {without_credentials(url): url for url in (self.name, self._errors_url(path))}
            noted = {urls[name]: copied["there"] for name, copied in _copies(path).items() if name in urls}
            changed = [url for url, there_then in noted.items() if version(url) not in ("", there_then)]
        except Exception as error:  # each file system has errors of its own
            raise InputError(f"--output {self.name} cannot be reached: {_reason(error, self.name)}") from error
        if there and not options.overwrite and not run_directory(path).exists():
            raise InputError(
                f"{self.name} exists and is not the output of this job: move it, give another --output, "
                "or replace it with --overwrite"
            )
        if changed and not options.overwrite:
            raise InputError(
                f"{changed[0]} was changed since this job wrote it: move it away and run again,"
                " or replace it with --overwrite"
            )
        make_output_folder(path.parent)

    def names(self, output: Path, *, errors_file: bool) -> dict[str, Any]:
        """The names of the output and of its file of errors, as fields of a report.

        Args:
            output: The local output.
            errors_file: Whether the output has a file of errors.
        """
        names = [self.name, self._errors_url(output) if errors_file and not self.is_stdout else None]
        output_name, errors_name = (name and without_credentials(name) for name in names)
        return {"output": output_name, "errors_output": errors_name}

    def _errors_url(self, output: Path) -> str:
        return f"{self.name.rpartition('/')[0]}/{errors_path(output).name}"

    def put(self, output: Path, *, errors_file: bool) -> bool:
        """Copy a complete output and its file of errors to the destination, unless they are there already.

        Args:
            output: The local output.
            errors_file: Whether the output has a file of errors.

        Returns:
            True where the destination is a URL, and a file was missing there.

        Raises:
            BatchgenError: The destination cannot be written; the same command tries again.
        """
        paths = (output, errors_path(output)) if errors_file else (output,)
        try:
            if self.is_stdout:
                for path in paths:
                    _to_standard_output(path)
                return False
            urls = [self.name, self._errors_url(output)][: len(paths)]
            return _copy(dict(zip(urls, paths, strict=True)), output)
        except Exception as error:  # each file system has errors of its own
            where = "standard output" if self.is_stdout else self.name
            if self.is_stdout:
                leave_standard_output()
            raise BatchgenError(
                f"cannot write {where} ({_reason(error, self.name)}): all rows are kept, the same command tries again"
            ) from error

    def _is_read(self, inner: str, given: object) -> bool:
        """Tell whether the output would be a part of the job's input, so that the next run would read it.

        Args:
            inner: Path of the output in its file system.
            given: The job's input.
        """
        if not is_url(given):
            return self.name.startswith("file://") and InputPaths.of(given).includes(inner) is not None
        same_system = self.name.partition("://")[0] == str(given).partition("://")[0]
        read = file_system(str(given))[1].rstrip("/")
        return same_system and (inner == read or inner.startswith(f"{read}/") or fnmatch.fnmatch(inner, read))

    def local_path(self) -> Path:
        digest = hashlib.sha256(self.name.encode()).hexdigest()
        return cache_dir() / "outputs" / digest[:32] / without_credentials(self.name).rpartition("/")[2]


def _to_standard_output(path: Path) -> None:
    """Write a file of JSON lines to standard output; on a terminal with control characters made visible."""
    with path.open("rb") as file:
        if sys.stdout.isatty():
            put(line.decode().removesuffix("\n") for line in file)
        else:
            shutil.copyfileobj(file, sys.stdout.buffer)
            sys.stdout.buffer.flush()


def _copy(files: dict[str, Path], output: Path) -> bool:
    """Copy files to their URLs, unless noted copies are there unchanged. Raises whatever a file system raises."""
    here = {url: f"{path.stat().st_size} {path.stat().st_mtime_ns}" for url, path in files.items()}
    if _copies(output) == _copies_now(here):
        return False
    note = _note(output)
    note.unlink(missing_ok=True)  # should this be cut short, nothing is known of what is there
    for url, path in files.items():
        system, inner = file_system(url)
        system.put_file(str(path), inner)
    write_atomically(note, json.dumps(_copies_now(here), indent=1).encode())
    return True


def _copies_now(here: dict[str, str]) -> dict[str, dict[str, str]]:
    """The note on the copies that exist now. here: version of each copied local file, by the URL of its copy."""
    return {without_credentials(url): {"here": here[url], "there": version(url)} for url in here}


def _note(output: Path) -> Path:
    return output.with_name(f"{output.name}.copies.json")


def _copies(output: Path) -> dict[str, dict[str, str]]:
    """The note on earlier copies: versions of the local file and of its copy, by the copy's URL without credentials."""
    with contextlib.suppress(OSError, ValueError):
        copies: dict[str, dict[str, str]] = json.loads(_note(output).read_bytes())
        return copies
    return {}


def _reason(error: Exception, url: str) -> str:
    text = without_credentials(str(getattr(error, "strerror", None) or error), url)
    return one_line(text) or type(error).__name__
