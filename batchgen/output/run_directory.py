"""The run directory next to an output file: it locks the output, keeps finished rows, and allows a job to resume.

For `out.parquet` the directory `out.parquet.batchgen/` has `lock` (an flock, which the kernel releases when the process
ends), `manifest.json`, `parts/` (finished rows), and `partials.parquet` (tokens of unfinished rows). States of the job,
and transitions:

    (nothing) --open--> running --finish--> complete --open with retry_failed, more rows, or output gone--> running

An existing output file is replaced only with `overwrite`, or where the manifest says that this job may.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from batchgen._version import __version__
from batchgen.core.atomic_file import is_full, replace_durably, staged, storage_error, sync_directory
from batchgen.core.digest import json_sha256
from batchgen.core.errors import BatchgenError, InputError, OtherSettings
from batchgen.core.file_lock import LockHeld, lock_file
from batchgen.core.kernel_choice import KernelChoice
from batchgen.core.partial import PartialCompletion
from batchgen.core.private_files import NotPrivate
from batchgen.output.columns import ONE_SAMPLE, Columns
from batchgen.output.error_kinds import ErrorKind, error_kinds
from batchgen.output.formats import output_format
from batchgen.output.join import Dataset, FormatRow, join, join_formatted
from batchgen.output.manifest import DamagedManifest, Manifest, describe_changes, read_kernels, without_lists
from batchgen.output.part_writer import PartWriter
from batchgen.output.partials import (
    PARTIALS_FILE,
    DamagedPartials,
    Partials,
    PartialSaver,
    read_partials,
    write_partials,
)
from batchgen.output.parts import (
    DamagedPart,
    missing_parts,
    next_part_number,
    part_origin,
    part_output_lens,
    part_paths,
    quarantine,
    scan_part,
)
from batchgen.output.result_counts import ResultCounts, count_parts
from batchgen.output.row_map import DoneRows

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
JOINT_STATE = "joint.json"  # in a `joint_directory`, once its output may be replaced
# A file of each kind that a run directory has.
RUN_FILES = (
    "lock",
    MANIFEST,
    "manifest.json.tmp",
    "joined-0.tmp",
    PARTIALS_FILE,
    "parts/part-000000.parquet",
    "parts/part-000000.parquet.tmp",
)

# Identity of an input before -> how its files differ now.
DescribeFiles = Callable[[dict[str, Any]], str]

# (fingerprint before, fingerprint now) -> whether the rows of the job before are the first ones of the job now.
Extends = Callable[[dict[str, Any], dict[str, Any]], bool]

# Where several workers share a job (`--share`): there until the output is complete.
SHARE_FOLDER = "share"

# Where a run sorts the requests of a large input; of one that was killed, the next run removes it.
SORTED_FOLDER = "sorted.tmp"


def errors_path(output_path: Path) -> Path:
    """The path of the file for failed rows in OpenAI batch format: `out.errors.jsonl` for `out.jsonl`."""
    return output_path.with_name(f"{output_path.stem}.errors.jsonl")


def run_directory(output_path: Path) -> Path:
    """The directory next to an output file in which a job keeps its finished rows."""
    return output_path.with_name(output_path.name + ".batchgen")


def joint_directory(output_path: Path) -> Path:
    """The directory next to an output file in which several jobs that make it together keep their files."""
    return output_path.with_name(output_path.name + ".jobs")


def target_path(output_path: Path) -> Path:
    """The path of the file to write: the target where the output path is a symbolic link, which is kept."""
    return Path(os.path.realpath(output_path)) if os.path.islink(output_path) else output_path


def open_run(
    output_path: str | os.PathLike[str],
    fingerprint: dict[str, Any],
    *,
    resume: bool = True,
    overwrite: bool = False,
    retry_failed: bool = False,
    errors_file: bool = False,
    shared: bool = False,
    extends: Extends | None = None,
    keep_parts: bool = False,
    describe_files: DescribeFiles | None = None,
    results_per_row: int = 1,
) -> Run:
    """Lock the run directory of an output, create it where it does not exist, and find the rows that are not finished.

    Args:
        output_path: The path of the output file.
        fingerprint: Everything that decides the output, as nested dicts of JSON values. Two runs with equal
            fingerprints give the same output.
        resume: True to continue from finished rows. False: the run refuses to start where there are finished rows.
        overwrite: True to discard earlier progress. An old output file stays until the new one is complete.
        retry_failed: True to run failed rows again.
        errors_file: True where the output is JSON lines with a second file for failed rows, `errors_path(output_path)`.
        shared: True where the caller is one of several workers and holds their lease for opening. No lock is taken.
        extends: The function that says whether this job may reuse the rows of another, smaller job; None: of no other.
        keep_parts: True to keep part files after the output is complete, since another job may reuse the rows.
        describe_files: The function that says, from the earlier identity of an input, how its files differ now.
        results_per_row: Number of results of each row: one a step.

    Raises:
        InputError: The output cannot be written, or belongs to another job.
        BatchgenError: Another process has the output locked.
    """
    output_path = target_path(Path(output_path))
    if output_format(output_path) != ".jsonl" and errors_file:
        raise InputError(f"an OpenAI batch is answered in JSON lines: {output_path.name} must end in .jsonl")
    targets = (output_path, errors_path(output_path)) if errors_file else (output_path,)
    directory = run_directory(output_path)
    try:
        _check_targets(targets)
        if not directory.exists() and not overwrite:
            _refuse_existing(targets)
        if not shared:
            _refuse_shared(directory, output_path)
        (directory / "parts").mkdir(parents=True, exist_ok=True)
        lock = None if shared else _lock(directory / "lock", output_path)
    except OSError as error:
        if is_full(error):
            raise storage_error(error, f"write {directory}") from error
        raise _unwritable(directory, error.strerror) from error
    run = Run(
        targets,
        directory,
        json.loads(json.dumps(fingerprint)),
        lock,
        extends,
        keep_parts,
        describe_files,
        results_per_row,
    )
    try:
        run._open(resume, overwrite, retry_failed)
    except OSError as error:
        run.close()
        raise storage_error(error, f"open {directory}") from error
    except BaseException:
        run.close()
        raise
    return run


def check_output(output_path: str | os.PathLike[str], *, overwrite: bool = False, shared: bool = False) -> None:
    """Check, before the job is known and without creating anything, that `open_run` can write to an output.

    Args:
        output_path: The path of the output file.
        overwrite: True where an existing output file may be replaced.
        shared: True where several workers share the output.

    Raises:
        InputError: The output cannot be written, or belongs to another job.
        BatchgenError: Another process has the output locked.
    """
    target = target_path(Path(output_path))
    output_format(target)
    try:
        _check_output(target, overwrite=overwrite, shared=shared)
    except OSError as error:
        raise _unwritable(run_directory(target), error.strerror) from error


def _check_output(target: Path, *, overwrite: bool, shared: bool) -> None:
    """Check that an output can be written, after links are resolved. Raises OSError, InputError, BatchgenError."""
    _check_targets((target,))
    directory = run_directory(target)
    if not directory.exists():
        if not overwrite:
            _refuse_existing((target,))
        if not os.access(target.absolute().parent, os.W_OK):
            raise _unwritable(directory, os.strerror(errno.EACCES))
        return
    if not shared:
        _refuse_shared(directory, target)
    if (directory / "lock").exists():
        with (
            contextlib.suppress(OSError) if shared else contextlib.nullcontext()
        ):  # some network file systems have no locks
            os.close(_lock(directory / "lock", target, shared=shared))


class Run:
    """A process's exclusive hold on an output, from open_run() to close().

    Attributes:
        complete: True where the output file is complete and no row is left to run.
        totals: Counts of a complete output (`rows`, `rows_ok`, `rows_failed`, `prompt_tokens`, `generated_tokens`).
        done_rows: Rows that need no more work. The part writer adds rows to it.
        rows_resumed: Number of rows that were done when the run was opened.
        rows_of_others: Number of rows that other workers have finished since.
        rows_known: Number of rows of this run whose answers were known before the model was loaded.
        partials: Tokens of unfinished rows, by row.
        notices: Messages to show to the user.
    """

    rows_of_others = rows_known = 0

    def __init__(
        self,
        targets: tuple[Path, ...],
        directory: Path,
        fingerprint: dict[str, Any],
        lock: int | None,
        extends: Extends | None,
        keep_parts: bool,
        describe_files: DescribeFiles | None = None,
        results_per_row: int = 1,
    ) -> None:
        self.output_path = targets[0]
        self.directory = directory
        self.parts_dir = directory / "parts"
        self.totals: dict[str, int] | None = None
        self.done_rows = DoneRows(results_per_row)
        self.rows_resumed = 0
        self.partials: Partials = {}
        self.notices: list[str] = []
        self._targets = targets
        self._manifest = Manifest(fingerprint)
        self._lock = lock
        self._extends = extends
        self._keep_parts = keep_parts
        self._describe_files = describe_files
        self._writer: PartWriter | None = None
        self._saver: PartialSaver | None = None

    @property
    def complete(self) -> bool:
        return self._manifest.state == "complete"

    def is_done(self, total_rows: int | None) -> bool:
        """True where all rows of the job are saved.

        Args:
            total_rows: Number of rows of the job; None: it is not known.
        """
        return total_rows is not None and self.done_rows.num_results == total_rows * self.done_rows.results_per_row

    @property
    def has_begun(self) -> bool:
        """True where rows were finished or begun before the run was opened."""
        return bool(self.rows_resumed or self.partials)

    def partial(self, row: int) -> PartialCompletion | None:
        """The tokens that an earlier run has generated for an unfinished row; None: none are known."""
        return self.partials.get(row)

    @property
    def kernels(self) -> KernelChoice | None:
        """The kernels that computed the rows so far; None: none are recorded."""
        return self._manifest.kernels

    @property
    def weight_format(self) -> str | None:
        """The format of the layers' weights that computed the rows so far; None: none is recorded."""
        return self._manifest.weight_format

    @property
    def first(self) -> str | None:
        """SHA-256 of the fingerprint of the smallest job whose rows this job reuses; None: it reuses no rows."""
        return self._manifest.first

    def record_kernels(self, kernels: KernelChoice) -> None:
        """Record the kernels of the next rows; called before the first of them. Raises BatchgenError."""
        self._record(replace(self._manifest, kernels=kernels))

    def record_weight_format(self, weight_format: str) -> None:
        """Record the weight format of the next rows; called before the first of them. Raises BatchgenError."""
        self._record(replace(self._manifest, weight_format=weight_format))

    def writer(self, **limits: Any) -> PartWriter:
        """Start a PartWriter for this run's results.

        Args:
            limits: The arguments of PartWriter that say when a part file is written.
        """
        origin = self._origin()
        self._writer = PartWriter(self.parts_dir, self.done_rows, origin=origin, **limits)
        return self._writer

    def saver(self, in_flight: Callable[[], Iterable[PartialCompletion]], interval_s: float) -> PartialSaver:
        """Start a thread that saves the tokens of unfinished rows.

        Args:
            in_flight: Function that returns the tokens of rows in flight.
            interval_s: Seconds between two saves.
        """
        origin = self._origin()

        def write(partials: Partials) -> None:
            if partials:
                write_partials(self._partials_path, partials.values(), origin)
            else:
                self._partials_path.unlink(missing_ok=True)

        self._saver = PartialSaver(self.partials, in_flight, lambda row: row not in self.done_rows, write, interval_s)
        return self._saver

    def save(self) -> int:
        """Write all added rows to stable storage and refuse further rows, as the last action of a process.

        What was sorted is removed. Any thread may call this method.

        Returns:
            The number of finished rows.
        """
        for thread in (self._writer, self._saver):
            if thread is not None:
                thread.stop()
        shutil.rmtree(self.directory / SORTED_FOLDER, ignore_errors=True)
        return self.totals["rows"] if self.totals else len(self.done_rows)

    def finish(
        self,
        dataset: Dataset,
        *,
        columns: Columns = ONE_SAMPLE,
        prefix: str = "",
        format_row: FormatRow | None = None,
        before_replacing: Callable[[], None] = lambda: None,
    ) -> dict[str, int]:
        """Write the output from the part files, put it in place in one step, and return its counts of rows and tokens.

        Args:
            dataset: The input.
            columns: The output columns.
            prefix: The prefix of the output columns' names.
            format_row: The function that makes the JSON values of the output and of the errors file; None: the output
                has columns.
            before_replacing: The function that is called after the new output is written and before it replaces the old
                one. An exception that it raises stops the replacement.

        Raises:
            BatchgenError: Rows are missing, or the disk fails. All finished rows are kept, and the next run continues
                from them.
        """
        joined = [self.directory / f"joined-{i}.tmp" for i in range(len(self._targets))]
        try:
            with contextlib.ExitStack() as stack:
                files = [stack.enter_context(staged(path)) for path in joined]
                if format_row is not None:
                    totals, counts = join_formatted(dataset, self.parts_dir, files[0], files[1], columns, format_row)
                else:
                    origin = {"version": __version__, "fingerprint": without_lists(self._manifest.fingerprint)}
                    totals, counts = join(
                        dataset, self.parts_dir, files[0], output_format(self.output_path),
                        columns=columns, prefix=prefix, note=json.dumps(origin, sort_keys=True),
                    )  # fmt: skip
            moves = list(zip(joined, self._targets, strict=True))
            sizes_bytes = {target.name: path.stat().st_size for path, target in moves}
            before_replacing()
            # From here on the output may be this job's own: a crash before the last line must not make the
            # next run take it for somebody else's.
            self._write_manifest(replace(self._manifest, may_replace=True))
            for path, target in moves:
                replace_durably(path, target)
            parts = next_part_number(self.parts_dir) if self._needs_parts(totals) else 0
            complete = replace(
                self._manifest, state="complete", totals=totals, counts=counts, files=sizes_bytes, parts=parts
            )
            self._write_manifest(complete)
        except OSError as error:
            raise storage_error(error, f"write {self.output_path}", len(self.done_rows)) from error
        self.totals = totals
        with contextlib.suppress(OSError):
            self._partials_path.unlink(missing_ok=True)
        if not self._needs_parts(totals):
            with contextlib.suppress(OSError):  # the next open tries again
                self._delete_parts()
        return totals

    def output_lens(self, limit: int = 4096) -> list[int]:
        """Read the numbers of generated tokens per sample from the newest part files.

        Args:
            limit: The approximate number of samples to read at most.
        """
        lengths: list[int] = []
        for path in reversed(part_paths(self.parts_dir)):
            if len(lengths) >= limit:
                break
            lengths += part_output_lens(path)
        return lengths

    def error_kinds(self) -> list[ErrorKind]:
        """The three most frequent groups of similar errors of failed rows; damaged part files are left out."""
        with contextlib.suppress(DamagedPart):
            return error_kinds(part_paths(self.parts_dir), results_per_row=self.done_rows.results_per_row)
        return []

    def result_counts(self, columns: Columns) -> ResultCounts:
        """Counts over the results of all finished rows; none where a part file is damaged.

        Args:
            columns: The output columns.
        """
        if self.totals is not None:
            return self._manifest.counts or ResultCounts()
        with contextlib.suppress(DamagedPart):
            return count_parts(part_paths(self.parts_dir), columns)
        return ResultCounts()

    def close(self) -> None:
        """Unlock the output. The kernel does so too when the process ends."""
        self._saver = None  # it refers to this object, which refers to the input: a copy of standard input ends with it
        lock, self._lock = self._lock, None
        if lock is None:
            return
        try:
            if self._writer is not None:
                with contextlib.suppress(OSError):  # it only tells of parts that are deleted later
                    self._note_parts()
        finally:
            os.close(lock)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _open(self, resume: bool, overwrite: bool, retry_failed: bool) -> None:
        """Read the run directory and write a manifest for this run."""
        self._remove_leftovers()
        if overwrite:
            self._start_afresh(may_replace=True)
            return
        held = self._read_manifest()
        if held is None:
            _refuse_existing(self._targets)
            self._start_afresh(may_replace=False)
            return
        is_complete, is_intact = held.state == "complete", self._is_intact(held)
        grows = self._grows(held)
        if not is_intact or retry_failed or grows:
            self._scan_parts(held.parts)
        totals = held.totals or {}  # which an intact output has
        if grows and is_intact and len(self.done_rows) < totals["rows"]:
            raise InputError(
                f"{self.output_path} has {totals['rows']:,} rows of a smaller job, but only {len(self.done_rows):,}"
                " of them are left in"
                f" {self.parts_dir}: move the output away to run the others again, or give --overwrite"
            )
        if grows:
            self.notices.append(
                f"{self.output_path.name} goes on from the {len(self.done_rows):,} rows of a smaller job"
            )
            first = held.first or json_sha256(held.fingerprint)
            held = replace(held, fingerprint=self._manifest.fingerprint, first=first)
        if not self._belongs_here(held, is_intact, resume):
            _refuse_existing(self._targets)
            self._start_afresh(may_replace=False)
            return
        if is_intact and not grows and not (retry_failed and totals["rows_failed"]):
            self._manifest, self.totals, self.done_rows = held, held.totals, DoneRows(self.done_rows.results_per_row)
            if not self._needs_parts(totals):
                self._delete_parts()
            return
        if not is_complete and not held.may_replace:
            _refuse_existing(self._targets)
        if is_complete and not is_intact:
            names = " or ".join(t.name for t in self._targets)
            self.notices.append(f"{names} is gone since this job wrote it: it is made again")
        if retry_failed:
            self.done_rows.forget_failed()
        self.rows_resumed = len(self.done_rows)
        self._write_manifest(replace(held, state="running", may_replace=held.may_replace or is_complete))
        if resume:
            self._read_partials()

    @property
    def _partials_path(self) -> Path:
        return self.directory / PARTIALS_FILE

    def _origin(self) -> dict[str, Any]:
        """JSON values about the job, which its part files and partial completions record."""
        kernels = None if self.kernels is None else self.kernels.to_json()
        origin = {"fingerprint": json_sha256(self._manifest.fingerprint), "kernels": kernels}
        origin["weight_format"] = self.weight_format
        if self.first is not None:
            origin["first"] = self.first
        return origin

    def _read_partials(self) -> None:
        """Read the tokens of unfinished rows. Damage costs these tokens alone."""
        try:
            partials = read_partials(self._partials_path, self._origin())
        except DamagedPartials as error:
            self.notices.append(f"tokens of unfinished rows are damaged, and are generated again: {error}")
            return
        self.partials.update({row: partial for row, partial in partials.items() if row not in self.done_rows})

    def _remove_leftovers(self) -> None:
        """Remove the temporary files of processes that were killed."""
        for folder in (self.directory, self.parts_dir):
            for leftover in folder.glob("*.tmp"):
                if leftover.is_dir():  # what workers shared
                    shutil.rmtree(leftover, ignore_errors=True)
                else:
                    leftover.unlink(missing_ok=True)

    def _grows(self, held: Manifest) -> bool:
        """True where the directory belongs to a smaller job whose rows are the first rows of this job."""
        now = self._manifest.fingerprint
        return self._extends is not None and held.fingerprint != now and self._extends(held.fingerprint, now)

    def _needs_parts(self, totals: dict[str, int]) -> bool:
        """True where a later run may still use the part files of a complete output."""
        return self._keep_parts or totals["rows_failed"] > 0

    def _is_intact(self, held: Manifest) -> bool:
        """True where the output is complete and its files exist. Raises InputError where a file was changed."""
        if held.state != "complete":
            return False
        expected = {target: (held.files or {}).get(target.name) for target in self._targets}
        for target, size_bytes in expected.items():
            if _size_bytes(target) not in (None, size_bytes):
                raise InputError(
                    f"{target} was changed since this job wrote it: move it away and run again, "
                    "or replace it with --overwrite"
                )
        return all(_size_bytes(target) == size_bytes for target, size_bytes in expected.items())

    def _belongs_here(self, held: Manifest, is_intact: bool, resume: bool) -> bool:
        """True where the directory belongs to this job; False where it belongs to another job without any rows.

        Raises:
            InputError: The directory has rows that this run may not reuse.
        """
        rows = held.totals["rows"] if held.totals and is_intact else len(self.done_rows)
        changes = describe_changes(held.fingerprint, self._manifest.fingerprint, self._describe_files)
        if changes and rows:
            raise OtherSettings(
                f"{self._where(is_intact)} has {rows} rows made {self._unlike(held)}: {changes}. "
                "Give another --output, or the old settings to go on, or --overwrite to start again"
            )
        if rows and not resume:
            raise InputError(
                f"{self._where(is_intact)} has {rows} finished rows: leave out --no-resume to keep them, "
                "or start again with --overwrite"
            )
        return not changes

    def _unlike(self, held: Manifest) -> str:
        """The words for what rows of another job were made of."""
        now = self._manifest.fingerprint
        others = {**held.fingerprint, "input": None} != {**now, "input": None}
        return "with other settings" if others else "of another input"

    def _where(self, is_complete: bool) -> Path:
        return self.output_path if is_complete else self.directory

    def _start_afresh(self, may_replace: bool) -> None:
        # Parts go first: should this be cut short, the old manifest is still true of what is left.
        self._partials_path.unlink(missing_ok=True)
        self._delete_parts()
        self._write_manifest(replace(self._manifest, may_replace=may_replace))

    def _read_manifest(self) -> Manifest | None:
        """Read the manifest. A damaged or deleted one is recreated where all part files are of this same job."""
        path = self.directory / MANIFEST
        try:
            held = Manifest.read(path)
            if held is not None or not part_paths(self.parts_dir):
                return held
            problem = InputError(f"{self.directory} has rows but no manifest: start again with --overwrite")
        except DamagedManifest as error:
            problem = error
        origins = []
        for part in part_paths(self.parts_dir):
            with contextlib.suppress(DamagedPart):  # it will be quarantined
                origins.append(part_origin(part))
        # The newest part is of this very job, and the others of it or of the smaller ones that it goes on from.
        own = json_sha256(self._manifest.fingerprint)
        first = origins[-1].get("first", own) if origins and origins[-1].get("fingerprint") == own else None
        if first is None or any(origin.get("first", origin.get("fingerprint")) != first for origin in origins):
            raise problem
        self.notices.append(f"{path} was damaged or gone: it is made again from {len(origins)} parts of this job")
        kernels = read_kernels(origins[-1].get("kernels"))
        first, weight_format = (origins[-1].get(name) for name in ("first", "weight_format"))
        return replace(self._manifest, kernels=kernels, first=first, weight_format=weight_format)

    def _note_parts(self) -> None:
        count = next_part_number(self.parts_dir)
        if count != self._manifest.parts:
            self._write_manifest(replace(self._manifest, parts=count))

    def _scan_parts(self, written: int) -> None:
        if gone := missing_parts(self.parts_dir, written):
            names = gone[0] if len(gone) == 1 else f"{gone[0]} and {len(gone) - 1:,} more parts"
            self.notices.append(f"{names} of {self.parts_dir} deleted: rows that were nowhere else are computed again")
        for path in part_paths(self.parts_dir):
            try:
                groups = list(scan_part(path))  # all of it first: damage anywhere costs the whole part
            except DamagedPart as error:
                quarantine(path)
                self.notices.append(f"damaged part quarantined, its rows are computed again: {error}")
                continue
            for group in groups:
                self.done_rows.mark(group.rows, group.failed)

    def _delete_parts(self) -> None:
        for path in self.parts_dir.glob("part-*"):
            path.unlink(missing_ok=True)
        sync_directory(self.parts_dir)

    def _record(self, manifest: Manifest) -> None:
        """Write the manifest where it differs from the one on disk. Raises BatchgenError."""
        if manifest == self._manifest:
            return
        if self.partials:
            logger.warning("unfinished rows start again: their tokens are of other kernels or weights")
            self.partials.clear()
        try:
            self._write_manifest(manifest)
        except OSError as error:
            raise storage_error(error, f"write {self.directory}", len(self.done_rows)) from error

    def _write_manifest(self, manifest: Manifest) -> None:
        manifest.write(self.directory / MANIFEST)
        self._manifest = manifest


def _unwritable(directory: Path, reason: str | None) -> InputError:
    return InputError(f"cannot write {directory}: {reason}: give an --output in a directory you can write to")


def _check_targets(targets: tuple[Path, ...]) -> None:
    folder = targets[0].parent
    if not folder.exists():
        raise InputError(f"there is no directory {folder} for --output: make it first (mkdir -p {folder})")
    for target in targets:
        if target.is_dir():
            raise InputError(f"--output {target} is a directory: give the name of a file in it")
        if target.exists() and not target.is_file():
            raise InputError(f"--output {target} is not a regular file: give another name")


def _refuse_existing(targets: tuple[Path, ...]) -> None:
    for target in targets:
        if target.exists():
            raise InputError(
                f"{target} exists and is not the output of this job: move it, give another --output, "
                "or replace it with --overwrite"
            )


def _size_bytes(path: Path) -> int | None:
    return path.stat().st_size if path.exists() else None


def _refuse_shared(directory: Path, output_path: Path) -> None:
    """Raise InputError where workers share the job of a run directory and have not completed it."""
    if not (directory / SHARE_FOLDER).exists():
        return
    held = Manifest.read(directory / MANIFEST)
    if held is None or held.state != "complete":
        raise InputError(
            f"{output_path} is worked on with --share: add --share to this command, or give another --output"
        )


def _lock(path: Path, output_path: Path, *, shared: bool = False) -> int:
    """Lock a file until its descriptor is closed. Raises BatchgenError, which names the process that has it locked.

    Args:
        path: The path of the lock file.
        output_path: The path of the output, for the error message.
        shared: True for a lock that several processes may hold at the same time.

    Returns:
        The descriptor of the lock file.
    """
    try:
        return lock_file(path, shared=shared)
    except LockHeld as error:
        raise BatchgenError(
            f"another batchgen is writing {output_path} ({error.holder}): wait for it, stop it, or give another"
            " --output"
        ) from None
    except NotPrivate as error:
        raise InputError(f"{path} is no lock ({error.strerror}): remove it, or give another --output") from error
