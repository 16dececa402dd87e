"""Outputs that are no file on this machine's disks: standard output, and URLs of fsspec's.

Such a job has its output and its run directory in the cache directory, where it goes on after an interruption as any other.
Once the output is whole it is copied to where it is to go.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from batchgen.core.errors import BatchgenError, InputError, one_line
from batchgen.dataset.storage import file_system, is_url
from batchgen.job.options import JobOptions
from batchgen.models.files import cache_dir
from batchgen.output.run_directory import errors_path, run_directory

STANDARD_OUTPUT = "-"


@dataclass(frozen=True)
class Destination:
    """Where an output goes. name: "-" or a URL."""

    name: str

    @classmethod
    def of(cls, options: JobOptions) -> Destination | None:
        """That of a job; None: a file."""
        name = str(options.output)
        return cls(name) if options.output == STANDARD_OUTPUT or is_url(options.output) else None

    @property
    def is_stdout(self) -> bool:
        return self.name == STANDARD_OUTPUT

    def local(self, options: JobOptions) -> JobOptions:
        """The job with a file of its own: that of a URL; None for standard output, which is called after the fingerprint."""
        return replace(options, output=None if self.is_stdout else self._local_path())

    def check(self, options: JobOptions) -> None:
        """Raises InputError where it cannot be reached, or somebody else's output is there."""
        if self.is_stdout:
            if options.report == STANDARD_OUTPUT:
                raise InputError("--output - and --report - are both standard output: give one of them a file")
            return
        path = self._local_path()
        system, inner = file_system(self.name)
        try:
            there = bool(system.exists(inner))
        except Exception as error:  # each file system has errors of its own
            raise InputError(f"--output {self.name} cannot be reached: {_reason(error)}") from error
        if there and not options.overwrite and not run_directory(path).exists():
            raise InputError(
                f"{self.name} exists and is not the output of this job: move it, give another --output, "
                "or replace it with --overwrite"
            )
        path.parent.mkdir(parents=True, exist_ok=True)

    def put(self, output: Path, *, errors_file: bool) -> dict[str, Any]:
        """Copy a whole output there, and its file of errors.

        Returns:
            What a report calls them.

        Raises:
            BatchgenError: It cannot be written; the same command tries again.
        """
        errors_name = None
        try:
            if self.is_stdout:
                for path in (output, errors_path(output)) if errors_file else (output,):
                    with path.open("rb") as file:
                        shutil.copyfileobj(file, sys.stdout.buffer)
                sys.stdout.buffer.flush()
            else:
                system, inner = file_system(self.name)
                system.put_file(str(output), inner)
                if errors_file:
                    folder, _, _ = self.name.rpartition("/")
                    errors_name = f"{folder}/{errors_path(output).name}"
                    system.put_file(str(errors_path(output)), file_system(errors_name)[1])
        except Exception as error:  # each file system has errors of its own
            where = "standard output" if self.is_stdout else self.name
            raise BatchgenError(
                f"cannot write {where} ({_reason(error)}): all rows are kept, the same command tries again"
            ) from error
        return {"output": self.name, "errors_output": errors_name}

    def _local_path(self) -> Path:
        digest = hashlib.sha256(self.name.encode()).hexdigest()
        return cache_dir() / "outputs" / digest[:32] / self.name.rpartition("/")[2]


def _reason(error: Exception) -> str:
    return one_line(getattr(error, "strerror", None) or error) or type(error).__name__
