"""The lease protocol: one worker at a time has a range of rows, and only one result of a range counts.

    leases/NAME.GENERATION   who has NAME, and which parts of earlier generations it goes on from; never changed
    workers/WORKER           a counter that its worker raises; one that does not change for the lease time is dead
    done/NAME                all rows of NAME are in parts, and in these; never changed, and the first one counts

NAME is a range ("000017") or a phase ("open", "join"). The worker of the highest generation has the lease. It is taken
over by creating the next generation, which only one worker can. Clocks of machines are never compared: each worker sees
by its own monotonic clock how long a counter has stood still.

Fencing: parts belong to a generation. A worker that was taken for dead and lives may write parts that nobody goes on
from, and never another result: `done` names the parts that count.
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
    """Who has a name. adopted: parts of earlier generations that it goes on from."""

    name: str
    generation: int
    worker: str
    adopted: Parts = field(default_factory=dict)

    @property
    def file(self) -> str:
        """The name of this generation's file."""
        return f"leases/{self.name}.{self.generation:04d}"


@dataclass(frozen=True)
class Done:
    """A range that is finished.

    Attributes:
        parts: Parts that have its rows; a row in several is that of the highest generation.
        ok: Rows without errors.
        failed: Rows that failed.
    """

    parts: Parts
    ok: int
    failed: int


@dataclass(frozen=True)
class WorkerRecord:
    """The record that a worker writes every few seconds.

    Attributes:
        counter: Number raised each time.
        process: The worker's process, "process 12 on node3".
        ended: True where it will do nothing more: its leases are free.
        phase: "loading", "running", "waiting" or "joining".
        seconds: Seconds since it began to run rows.
        rows: Rows saved in that time.
        ranges: (ok, failed) rows in parts of the ranges that it has, by name.
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
    """A lease as its file has it, in JSON, whose keys are texts."""

    worker: str
    adopted: Mapping[str, int]


@dataclass(frozen=True)
class _DoneRecord:
    """A finished range as its file has it."""

    parts: Mapping[str, int]
    ok: int
    failed: int


def write_worker(files: Files, worker: str, record: WorkerRecord) -> None:
    """Say that a worker lives."""
    files.replace(f"workers/{worker}", json.dumps(asdict(record)).encode())


class Table:
    """A worker's view of the common directory; leases and ends never change, so each is read once.

    Attributes:
        leases: The highest generation seen of each name.
        done: Finished ranges by name.
        workers: The last record of each worker.
        lease_s: Seconds without a sign of life after which a worker counts as dead.
    """

    def __init__(self, files: Files, lease_s: float, now: Callable[[], float]) -> None:
        self.leases: dict[str, Lease] = {}
        self.done: dict[str, Done] = {}
        self.workers: dict[str, WorkerRecord] = {}
        self.lease_s = lease_s
        self._files, self._now = files, now
        self._seen: dict[str, tuple[int | None, float]] = {}  # worker: its counter, and since when it has been that

    def refresh(self) -> None:
        """Look again. Raises OSError, and BatchgenError where a file is damaged."""
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
        """Tell whether a worker has written that it ended, or its counter has not changed for the lease time."""
        record = self.workers.get(worker)
        if record is not None and record.ended:
            return True
        seen = self._seen.get(worker)
        return seen is not None and self._now() - seen[1] >= self.lease_s

    @property
    def alive(self) -> list[str]:
        """Workers that are not dead."""
        return [worker for worker in self.workers if not self.is_dead(worker)]

    def is_free(self, name: str, me: str) -> bool:
        """Tell whether `me`, who does not have a name, may claim it."""
        if name in self.done:
            return False
        lease = self.leases.get(name)
        return lease is None or lease.worker == me or self.is_dead(lease.worker)


def claim(files: Files, table: Table, name: str, me: str, count_parts: Callable[[int], int]) -> Lease | None:
    """Try to get a name that is free.

    Args:
        files: The common directory.
        table: The worker's view, which has just been refreshed.
        name: The name.
        me: The worker.
        count_parts: Gives the number of a generation's parts, from the first one on without a gap.

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
    """Tell whether nobody has taken a lease over, as far as this worker sees."""
    return files.read(Lease(lease.name, lease.generation + 1, "").file) is None


def finish(files: Files, lease: Lease, parts: int, ok: int, failed: int) -> bool:
    """Record that a range is done, with `parts` parts of this generation; False where that was recorded before."""
    done = Done({**lease.adopted, **({lease.generation: parts} if parts else {})}, ok, failed)
    return files.create(f"done/{lease.name}", json.dumps(asdict(done)).encode())


def read_done(files: Files, name: str) -> Done | None:
    """The parts of a range that count; None where it is not finished. Raises BatchgenError for a damaged record."""
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
    """A lease as it was created; None where it is not there. Raises BatchgenError where it is damaged."""
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
    """The record of what a worker said last; None where it said nothing. Raises BatchgenError where that is damaged."""
    record = read_json(files, f"workers/{worker}")
    try:
        return None if record is None else read_typed(WorkerRecord, record)
    except ValueError as error:
        raise damaged(f"workers/{worker}") from error


def _parts(record: Mapping[str, int]) -> Parts:
    """Raises ValueError."""
    if any(count < 0 for count in record.values()):
        raise ValueError("numbers of parts below 0")
    return {int(generation): count for generation, count in record.items()}
