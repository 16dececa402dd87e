"""One worker's part in a shared output, with the methods of a `Run`: open, write part files, join.

Until the output is complete, `out.parquet.batchgen/` has a folder `share/` besides the files of an ordinary run:

    job.json        fingerprint, number of rows, lease time; written by the worker that opened the output, never changed
    kernels.json    kernels that compute the rows, chosen by the first worker that runs rows
    weights.json    format of the layers' weights, chosen by the first worker that runs rows
    order.json      digest of the order of rows that ranges are of, chosen by the first worker that runs rows
    leases/ workers/ done/ (see `lease.py`)    parts/ (see `part_store.py`)    partials/ (see `range_partials.py`)

One worker joins: it links the part files that count into an ordinary run, which writes the output. Then `share/` is
removed.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchgen.core.atomic_file import storage_error
from batchgen.core.digest import json_sha256
from batchgen.core.errors import BatchgenError, InputError
from batchgen.core.kernel_choice import KernelChoice
from batchgen.core.partial import PartialCompletion
from batchgen.core.scratch_folder import ScratchFolder
from batchgen.core.typed_json import read_typed
from batchgen.output.columns import Columns
from batchgen.output.error_kinds import ErrorKind, error_kinds
from batchgen.output.join import Dataset
from batchgen.output.manifest import Manifest, describe_changes
from batchgen.output.part_writer import PartWriter
from batchgen.output.partials import Partials, PartialSaver
from batchgen.output.parts import DamagedPart, Result, next_part_number, part_number, part_paths, scan_part
from batchgen.output.result_counts import ResultCounts, count_parts
from batchgen.output.row_map import DoneRows
from batchgen.output.run_directory import (
    SHARE_FOLDER,
    DescribeFiles,
    Extends,
    Run,
    open_run,
    run_directory,
    target_path,
)
from batchgen.share.files import DirectoryFiles, Files, damaged, read_json
from batchgen.share.lease import Lease, is_held
from batchgen.share.part_store import PartStore, link_parts
from batchgen.share.range_partials import RangePartials
from batchgen.share.ranges import row_ranges
from batchgen.share.worker import TICKS_PER_LEASE, Worker

_VERSION = 1
_LONGEST_LEASE_S = 366 * 86400.0  # more is no lease that somebody asked for
_FLUSH_OFTEN_S = 0.5  # how often rows are saved once no range is left to claim: others wait for these
_LONGEST_POLL_S = 1.0


class _LeaseLost(BatchgenError):
    """Another worker has taken over the lease of the phase that this worker carried out."""


@dataclass(frozen=True)
class SharedJob:
    """The values of a shared job that are the same for all workers.

    Attributes:
        fingerprint: Everything that decides the output.
        rows: Number of rows of the job.
        lease_s: Seconds without a new record after which a worker counts as dead.
        first_part: Number of the first part file that is not from an earlier ordinary run.
        first: SHA-256 of the fingerprint of the first of several growing jobs, where this job reuses rows of smaller
            ones.
    """

    fingerprint: dict[str, Any]
    rows: int
    lease_s: float
    first_part: int
    first: str | None = None

    def to_json(self) -> bytes:
        """The content of job.json."""
        return (json.dumps({"version": _VERSION, **vars(self)}, indent=1, sort_keys=True) + "\n").encode()

    @classmethod
    def read(cls, files: Files) -> SharedJob | None:
        """Read job.json from the common directory; None where no worker has opened the output.

        Raises:
            InputError: Another version of batchgen wrote the file.
            BatchgenError: The file is damaged.
            OSError: The file cannot be read.
        """
        record = read_json(files, "job.json")
        if record is None:
            return None
        try:
            fields = read_typed(Mapping[str, Any], record)
            if fields["version"] != _VERSION:
                raise InputError("share/job.json is of another version of batchgen: use the same one for all workers")
            found: SharedJob = read_typed(cls, {name: value for name, value in fields.items() if name != "version"})
            if not 0 < found.lease_s <= _LONGEST_LEASE_S or min(found.rows, found.first_part) < 0:
                raise ValueError("numbers that no job has")
        except (ValueError, KeyError) as error:
            raise damaged("job.json") from error
        return found


class Tally:
    """The number of finished rows of all workers: `ok`, `failed`, and their sum as `len()`."""

    def __init__(self) -> None:
        self.ok = self.failed = 0

    def __len__(self) -> int:
        return self.ok + self.failed


class SharedRun:
    """One worker's part in a shared output, from `open_shared_run` to `close`.

    It has the attributes of a `Run`. Its `done_rows` counts the finished rows of all workers, as far as this worker has
    seen.

    Attributes:
        sorted_folder: Folder with the sorted requests of this worker, which `save` removes; None: it has none.
    """

    rows_known = 0  # a worker looks its rows up as it runs them

    def __init__(
        self,
        output_path: Path,
        lease_s: float,
        open_plain: Callable[[], Run],
        fingerprint: dict[str, Any],
        describe_files: DescribeFiles | None = None,
    ) -> None:
        self.output_path, self._describe_files = output_path, describe_files
        self.directory = directory = run_directory(output_path)
        self.totals: dict[str, int] | None = None
        self.done_rows = Tally()
        self.rows_resumed = 0
        self.notices: list[str] = []
        self.sorted_folder: ScratchFolder | None = None
        self._files = DirectoryFiles(directory / SHARE_FOLDER)
        self._open_plain, self._fingerprint = open_plain, fingerprint
        self._origin = {"fingerprint": json_sha256(fingerprint), "kernels": None}
        self._parts = PartStore(directory / SHARE_FOLDER / "parts", self._origin)
        self._before = DoneRows()
        process = f"process {os.getpid()} on {socket.gethostname()}"
        self.worker = Worker(f"{socket.gethostname()}-{uuid.uuid4().hex[:8]}", self._files, lease_s, process=process)
        self._lease_s = lease_s
        self._ended = threading.Event()
        self._changed = threading.Event()
        self._writer: SharedPartWriter | None = None
        self._saver: PartialSaver | None = None
        self.partials: Partials = {}
        self._range_partials: RangePartials | None = None

    @property
    def complete(self) -> bool:
        """True where the output file is complete and no row is left to run."""
        return self.totals is not None

    @property
    def parts_dir(self) -> Path:
        """The ordinary run's directory of part files, into which those of the workers are linked."""
        return self.directory / "parts"

    def is_done(self, total_rows: int | None) -> bool:
        """True where all rows of the job are saved, by any worker."""
        return self.complete or self.worker.all_done

    @property
    def rows_of_others(self) -> int:
        """The number of rows that other workers have saved since this worker opened the output."""
        return max(0, len(self.done_rows) - self.rows_resumed - self.rows_here)

    @property
    def rows_here(self) -> int:
        """The number of rows that this worker has saved."""
        return self.worker.saved

    @property
    def has_begun(self) -> bool:
        """True where rows were finished before this worker opened the output."""
        return bool(self.rows_resumed)

    def partial(self, row: int) -> PartialCompletion | None:
        """The tokens that another worker has generated for a row of this worker; None: none are known."""
        return self.partials.get(row)

    @property
    def kernels(self) -> KernelChoice | None:
        """The kernels that compute the rows of all workers; None where no worker has recorded any."""
        record = read_json(self._files, "kernels.json")
        return None if record is None else KernelChoice.from_json(record)

    def record_kernels(self, kernels: KernelChoice) -> None:
        """Record the kernels of all rows, unless another worker has recorded its own. Raises BatchgenError."""
        self._record("kernels.json", kernels.to_json())

    @property
    def weight_format(self) -> str | None:
        """The format of the layers' weights of all workers; None where no worker has recorded any."""
        record = read_json(self._files, "weights.json")
        try:
            return None if record is None else read_typed(Mapping[str, str], record)["weight_format"]
        except (ValueError, KeyError) as error:
            raise damaged("weights.json") from error

    def record_weight_format(self, weight_format: str) -> None:
        """Record the weight format of all rows, unless another worker has recorded its own. Raises BatchgenError."""
        self._record("weights.json", {"weight_format": weight_format})

    @property
    def order(self) -> str | None:
        """The digest of the order that ranges are of, "" for that of the input; None where no worker has recorded any.

        Raises:
            BatchgenError: The record is damaged.
        """
        record = read_json(self._files, "order.json")
        try:
            return None if record is None else read_typed(Mapping[str, str], record)["digest"]
        except (ValueError, KeyError) as error:
            raise damaged("order.json") from error

    def record_order(self, digest: str) -> None:
        """Record the order that ranges are of, unless another worker has recorded one. Raises BatchgenError."""
        self._record("order.json", {"digest": digest})

    def _record(self, name: str, values: dict[str, Any]) -> None:
        try:
            self._files.create(name, json.dumps(values).encode())
        except OSError as error:
            if not self.complete_elsewhere():
                raise storage_error(error, f"write {self._files.path}", len(self.done_rows)) from error

    def writer(self, *, flush_interval_s: float = 5.0) -> SharedPartWriter:
        """Start a part writer for this worker's results.

        Args:
            flush_interval_s: Seconds after which a part file is written.
        """
        self._writer = SharedPartWriter(self, self.parts_dir, self._before, flush_interval_s=flush_interval_s)
        return self._writer

    def saver(self, in_flight: Callable[[], Iterable[PartialCompletion]], interval_s: float) -> PartialSaver:
        """Start a thread that saves the tokens of this worker's unfinished rows, from which others go on if it dies.

        Args:
            in_flight: Function that returns the tokens of rows in flight.
            interval_s: Seconds between two saves.
        """
        kernels = self.kernels
        origin = {**self._parts.origin, "kernels": None if kernels is None else kernels.to_json()}
        origin["weight_format"] = self.weight_format
        store = RangePartials(self.directory, self._files.path / "partials", origin, self.worker.range_of)
        self._range_partials = store

        def write(partials: Partials) -> None:
            try:
                store.write(partials)
            except OSError:
                if not self.complete_elsewhere():
                    raise

        self._saver = PartialSaver(self.partials, in_flight, self.worker.is_left, write, interval_s)
        return self._saver

    def save(self) -> int:
        """Write all added rows to stable storage and leave the job; gives the finished rows of all workers."""
        for thread in (self._writer, self._saver):
            if thread is not None:
                thread.stop()
        if self.sorted_folder is not None:
            self.sorted_folder.close()
        self.close()
        if not self.complete:
            self._count()
        return self.totals["rows"] if self.totals else len(self.done_rows)

    def claims(self, ahead: int, should_stop: Callable[[], bool]) -> Iterator[list[int] | None]:
        """Claim ranges for this worker until all rows of the job are saved, by any worker.

        Args:
            ahead: Number of rows that keep this worker's engine busy.
            should_stop: The function that says whether to stop claiming.

        Yields:
            The row indices to run of each claimed range. None before each wait: ranges of other workers become free
                when these die.

        Raises:
            BatchgenError: The disk fails.
        """
        self.worker.phase = "running"
        ran_since = False
        try:
            while not should_stop() and not self._ended.is_set():
                self._changed.clear()
                if self._writer is not None:
                    self._writer.check()  # rows that it cannot save are not done, and nobody else is to wait for them
                rows = self.worker.claim_range(ahead)
                if rows is not None:
                    ran_since = True
                    if self._range_partials is not None:
                        self.partials.update(self._range_partials.read(rows))
                    yield rows
                    continue
                if self.worker.all_done:
                    return
                if self._writer is not None and self.worker.all_claimed:
                    self._writer.flush_often()
                    if self.worker.is_idle:  # nothing more comes out that could be saved with what has
                        self._writer.flush_soon()
                if ran_since:
                    yield None
                ran_since = False
                self._changed.wait(self._poll_s)
        except OSError as error:
            if not self.complete_elsewhere():
                raise storage_error(error, f"work in {self._files.path}", len(self.done_rows)) from error

    def finish(self, dataset: Dataset, **how: Any) -> dict[str, int]:
        """Wait until all rows are finished, then write the output, or wait until another worker has written it.

        Args:
            dataset: The input.
            **how: Further arguments of `Run.finish`.

        Returns:
            The output's counts of rows and tokens.

        Raises:
            BatchgenError: Rows are missing, or the disk fails.
        """
        self.worker.phase = "waiting"
        while not self.complete:
            try:
                if self.complete_elsewhere():
                    break
                if not self.worker.all_done:
                    raise BatchgenError(
                        "rows have to be computed anew, as a part of them is damaged: run the same command again"
                    )
                lease = self.worker.claim_phase("join")
                if lease is not None:
                    self.worker.phase = "joining"
                    self.totals = self._join(lease, dataset, how)
                    break
                self._ended.wait(self._poll_s)
            except (OSError, _LeaseLost) as error:
                if self.complete_elsewhere():
                    break
                if isinstance(error, OSError):
                    raise storage_error(error, f"work in {self._files.path}", len(self.done_rows)) from error
        self.close()
        assert self.totals is not None
        return self.totals

    def output_lens(self) -> list[int]:
        """An empty list, since a worker does not read the part files of others for the lengths of finished rows."""
        return []

    def error_kinds(self) -> list[ErrorKind]:
        """The three most frequent groups of similar errors of failed rows."""
        with contextlib.suppress(DamagedPart, OSError):
            return error_kinds(self._part_paths())
        return []

    def result_counts(self, columns: Columns) -> ResultCounts:
        """Counts over the results of the finished rows of all workers; none where a part file is damaged or gone.

        Args:
            columns: The output columns.
        """
        if self.complete:
            held = Manifest.read(self.directory / "manifest.json")
            return (held and held.counts) or ResultCounts()
        with contextlib.suppress(DamagedPart, OSError):
            return count_parts(self._part_paths(), columns)
        return ResultCounts()

    def _part_paths(self) -> list[Path]:
        """The part files of all workers, after those of an earlier ordinary run."""
        shared = [] if self.complete else self._parts.all_paths()
        return [*part_paths(self.parts_dir), *shared]

    def close(self) -> None:
        """Leave the job. Other workers take over this worker's unfinished ranges at once."""
        if not self._ended.is_set():
            self._ended.set()
            self._changed.set()
            with contextlib.suppress(OSError):  # completed: the folder is gone
                self.worker.end()

    def __enter__(self) -> SharedRun:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def changed(self) -> None:
        """Wake `claims` after a row was finished, since another range may now be claimed."""
        self.worker.row_finished()
        self._changed.set()

    def saved(self) -> None:
        """Wake `claims` after rows were saved, since all rows of the job may now be saved."""
        self._changed.set()

    def open(self, rows: int) -> None:
        """Open the output as the first worker, or enter the job that another worker has opened. Raises BatchgenError.

        Args:
            rows: Number of rows of the job.
        """
        with self._storage("open"):
            self._files.make()
            while (job := SharedJob.read(self._files)) is None:
                try:
                    self.worker.tick()
                    lease = self.worker.claim_phase("open")
                except FileNotFoundError:  # a worker that found the output complete has taken the folder away
                    if self.complete_elsewhere():
                        return
                    self._files.make()
                    continue
                if lease is not None and self._files.read("job.json") is None:
                    self._open_first(rows)
                    if self.complete:
                        return
                else:
                    time.sleep(min(0.1, self._poll_s))
            if changes := describe_changes(job.fingerprint, self._fingerprint, self._describe_files):
                raise InputError(
                    f"{self.directory} is worked on with other settings: {changes}. "
                    "Give all workers the same ones, or another --output"
                )
            self._take_part(job)

    def give_up(self) -> None:
        """Leave an output that could not be opened; removes `share/` unless it has a job or other workers."""
        self.close()
        with contextlib.suppress(OSError, BatchgenError):
            self.worker.table.refresh()
            if self._files.read("job.json") is None and set(self.worker.table.workers) <= {self.worker.name}:
                self._remove()

    def _open_first(self, rows: int) -> None:
        """Open the output as the first worker: check it like an ordinary run, then write job.json."""
        with self._open_plain() as plain:
            self.notices += plain.notices
            if plain.complete:
                self.totals, self.rows_resumed = plain.totals, plain.rows_resumed
                self._remove()
                return
            if plain.kernels is not None and plain.rows_resumed:
                self.record_kernels(plain.kernels)
            if plain.weight_format is not None and plain.rows_resumed:
                self.record_weight_format(plain.weight_format)
            first_part = next_part_number(plain.parts_dir)
            job = SharedJob(self._fingerprint, rows, self._lease_s, first_part, plain.first)
        self._files.create("job.json", job.to_json())

    def _take_part(self, job: SharedJob) -> None:
        self._job = job
        if job.first is not None:
            self._parts = PartStore(self._files.path / "parts", {**self._origin, "first": job.first})
        for path in part_paths(self.parts_dir):
            if part_number(path) < job.first_part:
                for group in scan_part(path):
                    self._before.mark(group.rows, group.failed)
        self.worker.work_on(row_ranges(job.rows), self._parts, self._before)
        self.worker.table.lease_s = self._lease_s = job.lease_s
        self.worker.tick()
        self._count()
        self.rows_resumed = len(self.done_rows)
        threading.Thread(target=self._heartbeat, name="batchgen-share", daemon=True).start()

    def _heartbeat(self) -> None:
        while not self._ended.wait(self._lease_s / TICKS_PER_LEASE):
            # The part writer will tell of a disk that is full, or gone, and who claims rows of a file that is damaged.
            with contextlib.suppress(OSError, BatchgenError):
                self.worker.tick()
            self._count()

    def _count(self) -> None:
        ok, failed = self.worker.counts()
        self.done_rows.ok, self.done_rows.failed = ok + self._before.ok, failed + self._before.failed

    def _join(self, lease: Lease, dataset: Dataset, how: dict[str, Any]) -> dict[str, int]:
        """Link the part files that count into an ordinary run, and have it write the output.

        Args:
            lease: The lease of the phase "join".
            dataset: The input.
            how: Further arguments of `Run.finish`.

        Returns:
            The output's counts of rows and tokens.
        """
        done = {name: one.parts for name, one in self.worker.table.done.items()}
        for name, parts in done.items():
            if self._parts.damaged(name, parts):
                self._files.remove(f"done/{name}")
                raise BatchgenError(
                    f"a part of rows {name} is damaged: run the same command again to compute its rows anew"
                )

        def check() -> None:
            if not is_held(self._files, lease):
                raise _LeaseLost("another worker joins the parts")

        def before_replacing() -> None:
            how.get("before_replacing", lambda: None)()
            check()

        check()
        link_parts(self._parts, done, self.parts_dir, self._job.first_part)
        with self._open_plain() as plain:
            if plain.complete:
                totals = plain.totals or {}
            else:
                if (kernels := self.kernels) is not None:
                    plain.record_kernels(kernels)
                if (weight_format := self.weight_format) is not None:
                    plain.record_weight_format(weight_format)
                totals = plain.finish(dataset, **{**how, "before_replacing": before_replacing})
        self.close()
        self._remove()
        return totals

    def _remove(self) -> None:
        """Remove `share/` in one step, by a rename first, so that other workers see either all of it or nothing."""
        gone = self._files.path.with_name(f"{SHARE_FOLDER}.{uuid.uuid4().hex}.tmp")
        with contextlib.suppress(OSError):
            os.replace(self._files.path, gone)
            shutil.rmtree(gone)

    def complete_elsewhere(self) -> bool:
        """True where another worker has written the output."""
        held = Manifest.read(self.directory / "manifest.json")
        if held is None or held.state != "complete" or describe_changes(held.fingerprint, self._fingerprint):
            return False
        self.totals = held.totals
        return True

    @property
    def _poll_s(self) -> float:
        return min(_LONGEST_POLL_S, self._lease_s / TICKS_PER_LEASE)

    @contextlib.contextmanager
    def _storage(self, action: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise storage_error(error, f"{action} {self._files.path}", len(self.done_rows)) from error


class SharedPartWriter(PartWriter):
    """A writer of part files (`PartWriter`) for the ranges of a shared job."""

    def __init__(self, run: SharedRun, parts_dir: Path, before: DoneRows, *, flush_interval_s: float) -> None:
        self._run_shared = run
        super().__init__(parts_dir, before, flush_interval_s=flush_interval_s)

    def add(self, row: int, result: Result) -> None:
        """Queue the result of one finished row."""
        super().add(row, result)
        self._run_shared.changed()

    def flush_often(self) -> None:
        """Write part files at short intervals from now on, since other workers wait for the rows."""
        if self._flush_interval_s > _FLUSH_OFTEN_S:
            self._flush_interval_s = _FLUSH_OFTEN_S
            self.flush_soon()

    def _save(self, results: dict[int, Result]) -> None:
        try:
            self._run_shared.worker.save(results)
            self._run_shared.saved()
        except OSError:
            if not self._run_shared.complete_elsewhere():
                raise


def open_shared_run(
    output_path: str | os.PathLike[str],
    fingerprint: dict[str, Any],
    *,
    rows: int,
    lease_s: float,
    errors_file: bool = False,
    extends: Extends | None = None,
    keep_parts: bool = False,
    describe_files: DescribeFiles | None = None,
) -> SharedRun:
    """Become one of the workers on an output.

    Args:
        output_path: The path of the output file.
        fingerprint: Everything that decides the output. It must equal that of the worker that opened the output.
        rows: Number of rows of the input.
        lease_s: Seconds without a new record after which a worker counts as dead. The value of the worker that opened
            the output counts.
        errors_file: True where the output comes with a second file for failed rows.
        extends: The function that says whether this job may reuse the rows of another, smaller job; None: of no other.
        keep_parts: True to keep part files after the output is complete, since another job may reuse the rows.
        describe_files: The function that says, from the earlier identity of an input, how its files differ now.

    Raises:
        BatchgenError: The output cannot be written, belongs to another job, or has workers with another fingerprint.
    """
    fingerprint = json.loads(json.dumps(fingerprint))

    def open_plain() -> Run:
        return open_run(
            output_path,
            fingerprint,
            errors_file=errors_file,
            shared=True,
            extends=extends,
            keep_parts=keep_parts,
            describe_files=describe_files,
        )

    run = SharedRun(target_path(Path(output_path)), lease_s, open_plain, fingerprint, describe_files)
    try:
        run.open(rows)
    except BaseException:
        run.give_up()
        raise
    return run
