"""The run directory beside an output: who holds it, what job it belongs to, how far that job is.

`out.parquet.batchgen/` holds `lock` (an flock, released by the kernel however the process ends),
`manifest.json` (fingerprint, state, totals) and `parts/` (finished rows). States and what leads on:

    (nothing) --open--> running --finish--> complete --open with retry_failed, or output gone--> running

An output that is there is replaced only by `overwrite`, or where the manifest says that this job may.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import platform
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from batchgen._version import __version__
from batchgen.atomic_file import replace_durably, staged, storage_error, sync_directory, write_atomically
from batchgen.errors import BatchgenError, InputError
from batchgen.output import Dataset, FormatRow, join, join_formatted
from batchgen.output_formats import output_format
from batchgen.part_writer import PartWriter
from batchgen.parts import DamagedPart, DoneRows, part_paths, scan_part, set_aside

_FORMAT_VERSION = 1
_SHOWN_CHARS = 48


def errors_path(output_path: Path) -> Path:
    """Where a job in OpenAI batch format puts its failed rows: `out.errors.jsonl` beside `out.jsonl`."""
    return output_path.with_name(f"{output_path.stem}.errors.jsonl")


def open_run(
    output_path: str | os.PathLike,
    fingerprint: dict[str, Any],
    *,
    resume: bool = True,
    overwrite: bool = False,
    retry_failed: bool = False,
    errors_file: bool = False,
) -> Run:
    """Lock the run directory of `output_path` and find out what is left to do.

    fingerprint: JSON-able, nested dicts; two runs with equal fingerprints would give the same output.
    resume: go on from rows that are there; otherwise refuse to start while there are any.
    overwrite: drop old progress; an old output stays until the new one is whole.
    retry_failed: count failed rows as not done, so that they are run again.
    errors_file: the output is JSON lines, and `errors_path()` is written with it.

    Raises InputError where the output cannot be written or belongs to something else, BatchgenError where
    another process holds it.
    """
    output_path = Path(output_path)
    if output_path.is_symlink():  # write what it points to, and keep the link
        output_path = Path(os.path.realpath(output_path))
    if output_format(output_path) != ".jsonl" and errors_file:
        raise InputError(f"answers in OpenAI batch format are JSON lines: --output must end in .jsonl, not {output_path.name}")
    targets = (output_path, errors_path(output_path)) if errors_file else (output_path,)
    directory = output_path.with_name(output_path.name + ".batchgen")
    _check_target(output_path)
    if not directory.exists() and not overwrite:
        _refuse_foreign(targets)
    try:
        (directory / "parts").mkdir(parents=True, exist_ok=True)
        lock = _lock(directory / "lock", output_path)
    except OSError as error:
        raise InputError(
            f"cannot write beside {output_path}: {error.strerror}: give an --output in a directory you can write to"
        ) from error
    run = Run(targets, directory, json.loads(json.dumps(fingerprint)), lock)
    try:
        with run.storage_errors(f"open {directory}"):
            run._open(resume=resume, overwrite=overwrite, retry_failed=retry_failed)
    except BaseException:
        run.close()
        raise
    return run


class Run:
    """One job's hold on its output, from open_run() to close().

    complete: the output is there and nothing is to be done. totals: the complete job's counts (`rows`,
    `rows_ok`, `rows_failed`, `prompt_tokens`, `generated_tokens`), None before. done_rows: rows that need no
    work; rows_resumed: how many those were at the start. notices: lines a person should see.
    """

    def __init__(self, targets: tuple[Path, ...], directory: Path, fingerprint: dict[str, Any], lock: int) -> None:
        self.output_path = targets[0]
        self.directory = directory
        self.parts_dir = directory / "parts"
        self.complete = False
        self.totals: dict[str, int] | None = None
        self.done_rows = DoneRows()
        self.rows_resumed = 0
        self.notices: list[str] = []
        self._targets = targets
        self._fingerprint = fingerprint
        self._lock: int | None = lock

    def writer(self, **limits: Any) -> PartWriter:
        """A PartWriter for this run's results; `limits` as PartWriter takes them."""
        return PartWriter(self.parts_dir, self.done_rows, **limits)

    def finish(
        self,
        dataset: Dataset,
        *,
        n: int = 1,
        logprobs: bool = False,
        prefix: str = "",
        format_row: FormatRow | None = None,
    ) -> dict[str, int]:
        """Join the parts into the output, put it in place atomically, and return the totals.

        n, logprobs, prefix: as given to output_schema(). format_row: write JSON lines of its making instead,
        into the output and the errors file. Raises BatchgenError where rows are missing or the disk fails;
        everything is kept then, and the same call may be made again.
        """
        staged_paths = [self.directory / f"joined-{i}.tmp" for i in range(len(self._targets))]
        with self.storage_errors(f"write {self.output_path}"), contextlib.ExitStack() as stack:
            try:
                with contextlib.ExitStack() as files:
                    sinks = [files.enter_context(staged(path)) for path in staged_paths]
                    if format_row is None:
                        note = json.dumps({"version": __version__, "fingerprint": self._fingerprint}, sort_keys=True)
                        suffix = output_format(self.output_path)
                        options = {"n": n, "logprobs": logprobs, "prefix": prefix, "note": note}
                        totals = join(dataset, self.parts_dir, sinks[0], suffix, **options)
                    else:
                        totals = join_formatted(dataset, self.parts_dir, *sinks, format_row)
            except ...:
                ...
        return totals
