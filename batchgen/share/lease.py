"""The lease protocol, by which one worker at a time has a range of rows and only one result of a range counts.

    leases/NAME.GENERATION   the worker that has NAME, and parts of earlier generations that it reuses; never changed
    workers/WORKER           a counter that the worker increments; one that stands still for the lease time is dead
    done/NAME                the parts that have all rows of NAME; never changed, and only the first one counts

NAME is a range of rows ("000017") or a phase of the job ("open", "join"). The worker of the highest generation has the
lease. Another worker takes a lease over by creating the next generation's file, which only one worker can. Clocks of
different machines are never compared: each worker measures by its own monotonic clock how long a counter stands still.

Fencing: each part belongs to a generation. A worker that was taken for dead but still runs may go on writing parts.
These parts never count, since `done` names the parts that do.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field

from batchgen.core.errors import BatchgenError
from batchgen.core.typed_json import read_typed
from batchgen.share.files import Files, damaged, read_json

Parts = Mapping[int, int]  # generation: number of its parts that count, the first ones


@dataclass(frozen=True)
class Lease:
    """A worker's right to run a range of rows, or to carry out a phase of the job.

    Attributes:
        name: Name of the range ("000017") or phase ("open", "join").
        generation: Number of takeovers before this lease, from 0.
        worker: Name of the worker.
        adopted: Number of parts to reuse of each earlier generation.
    """

    name: str
    generation: int
    worker: str
    adopted: Parts = field(default_factory=dict)

    @property
    def file(self) -> str:
        """The name of the lease's file."""
        return f"leases/{self.name}.{self.generation:04d}"


@dataclass(frozen=True)
class Done:
    """The record of a finished range.

    Attributes:
        parts: Number of parts of each generation that have the range's rows. Where a row is in several, the highest
            generation counts.
        ok: Number of rows that succeeded.
        failed: Number of rows that failed.
    """

    parts: Parts
    ok: int
    failed: int


@dataclass(frozen=True)
class WorkerRecord:
    """The record by which a worker shows every few seconds that it is alive.

    Attributes:
        counter: A number that increases with each record.
        process: The worker's process, such as "process 12 on node3".
        ended: True where the worker has ended; its leases are then free.
        phase: "loading", "running", "waiting" or "joining".
        seconds: Seconds since the worker began to run rows.
        rows: Number of rows that it has saved in that time.
        ranges: Saved rows (ok, failed) of each range that the worker has and has not finished, by range name.
    """

    counter: int
    process: str
    ended: bool = False
    phase: str = "loading"
    seconds: float = 0.0
    rows: int = 0
    ranges: Mapping[str, tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class _LeaseRecord:
    """The content of a lease's file. Keys are text, as JSON requires."""

    worker: str
    adopted: Mapping[str, int]


@dataclass(frozen=True)
class _DoneRecord:
    """The content of a finished range's file. Keys are text, as JSON requires."""

    parts: Mapping[str, int]
    ok: int
    failed: int


def write_worker(files: Files, worker: str, record: WorkerRecord) -> None:
    """Write a worker's record, which shows the other workers that it is alive.

    Args:
        files: The common directory.
        worker: Name of the worker.
        record: The worker's current record.
    """
    files.replace(f"workers/{worker}", json.dumps(asdict(record)).encode())


class Table:
    """One worker's view of the common directory; files that never change (leases, finished ranges) are read once.

    Attributes:
        leases: The lease of the highest generation seen, by name of range or phase.
        done: Records of finished ranges, by name.
        workers: The last record of each worker, by worker name.
        lease_s: Seconds without a new record after which a worker counts as dead.
    """

    def __init__(self, files: Files, lease_s: float, now: Callable[[], float]) -> None:
        self.leases: dict[str, Lease] = {}
        self.done: dict[str, Done] = {}
        self.workers: dict[str, WorkerRecord] = {}
        self.lease_s = lease_s
        self._files, self._now = files, now
        self._seen: dict[str, tuple[int | None, float]] = {}  # worker: its counter, and since when it has been that

    def refresh(self) -> None:
        """Read the common directory again. Raises OSError, and BatchgenError where a file is damaged."""
        done = {name: self.done.get(name) or read_done(self._files, name) for name in self._files.names("done")}
        self.done = {name: one for name, one in done.items() if one is not None}
        for file in self._files.names("leases"):
            name, _, generation = file.partition(".")
            if not generation.isdecimal():
                raise damaged(f"leases/{file}")
            known = self.leases.get(name)
            if known is not None and known.generation >= int(generation):
                continue
            if (lease := read_lease(self._files, name, int(generation))) is not None:
                self.leases[name] = lease
        for worker in self._files.names("workers"):
            with contextlib.suppress(BatchgenError):  # it will be written again, if its worker lives
                if (record := _read_worker(self._files, worker)) is not None:
                    self.workers[worker] = record
        for worker in {*self.workers, *(lease.worker for lease in self.leases.values())}:
            said = self.workers.get(worker)
            counter = said.counter if said else None
            if worker not in self._seen or self._seen[worker][0] != counter:
                self._seen[worker] = counter, self._now()

    def is_dead(self, worker: str) -> bool:
        """True where a worker has recorded its end, or its counter has not changed for the lease time."""
        record = self.workers.get(worker)
        if record is not None and record.ended:
            return True
        seen = self._seen.get(worker)
        return seen is not None and self._now() - seen[1] >= self.lease_s

    @property
    def alive(self) -> list[str]:
        """The names of the workers that are not dead."""
        return [worker for worker in self.workers if not self.is_dead(worker)]

    def is_free(self, name: str, me: str) -> bool:
        """True where worker `me` may claim a range or phase that it does not have."""
        if name in self.done:
            return False
        lease = self.leases.get(name)
        return lease is None or lease.worker == me or self.is_dead(lease.worker)


def claim(files: Files, table: Table, name: str, me: str, count_parts: Callable[[int], int]) -> Lease | None:
    """Try to get the lease of a free range or phase.

    Args:
        files: The common directory.
        table: This worker's view, which was just refreshed.
        name: Name of the range or phase.
        me: Name of this worker.
        count_parts: The function that gives the number of intact parts of a generation, counted up to the first gap.

    Returns:
        The lease; None where another worker was faster.
    """
    held = table.leases.get(name)
    generation = 0 if held is None else held.generation + 1
    adopted = {g: n for g in range(generation) if (n := count_parts(g))}
    lease = Lease(name, generation, me, adopted)
    content = json.dumps({"worker": me, "adopted": adopted}).encode()
    if not files.create(lease.file, content):
        # A network file system may say so of a file that it has just made: the answer was lost and it asked again.
        there = read_lease(files, name, generation)
        if there is None or there.worker != me:
            return None
        lease = there
    table.leases[name] = lease
    return lease


def is_held(files: Files, lease: Lease) -> bool:
    """True where no other worker has taken a lease over, as far as this worker can see."""
    return files.read(Lease(lease.name, lease.generation + 1, "").file) is None


def finish(files: Files, lease: Lease, parts: int, ok: int, failed: int) -> bool:
    """Record that a range is finished; True where this is the first record of it, False where it was recorded before.

    Args:
        files: The common directory.
        lease: The lease of the range.
        parts: Number of parts of the lease's generation.
        ok: Number of rows that succeeded.
        failed: Number of rows that failed.
    """
    done = Done({**lease.adopted, **({lease.generation: parts} if parts else {})}, ok, failed)
    return files.create(f"done/{lease.name}", json.dumps(asdict(done)).encode())


def read_done(files: Files, name: str) -> Done | None:
    """Read the record of a finished range; None where it is not finished. Raises BatchgenError where it is damaged."""
    record = read_json(files, f"done/{name}")
    if record is None:
        return None
    try:
        found = read_typed(_DoneRecord, record)
        if min(found.ok, found.failed) < 0:
            raise ValueError("numbers of rows below 0")
        return Done(_parts(found.parts), found.ok, found.failed)
    except ValueError as error:
        raise damaged(f"done/{name}") from error


def read_lease(files: Files, name: str, generation: int) -> Lease | None:
    """Read a lease from its file; None where it does not exist. Raises BatchgenError where it is damaged.

    Args:
        files: The common directory.
        name: Name of the range or phase.
        generation: Generation of the lease.
    """
    file = Lease(name, generation, "").file
    record = read_json(files, file)
    if record is None:
        return None
    try:
        found = read_typed(_LeaseRecord, record)
        return Lease(name, generation, found.worker, _parts(found.adopted))
    except ValueError as error:
        raise damaged(file) from error


def _read_worker(files: Files, worker: str) -> WorkerRecord | None:
    """Read the last record of a worker; None where it has written none. Raises BatchgenError where it is damaged."""
    record = read_json(files, f"workers/{worker}")
    try:
        return None if record is None else read_typed(WorkerRecord, record)
    except ValueError as error:
        raise damaged(f"workers/{worker}") from error


def _parts(record: Mapping[str, int]) -> Parts:
    """Convert the keys of a record's parts from text to generation numbers. Raises ValueError."""
    if any(count < 0 for count in record.values()):
        raise ValueError("numbers of parts below 0")
    return {int(generation): count for generation, count in record.items()}
