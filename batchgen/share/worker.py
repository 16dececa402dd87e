"""One worker of a shared job: ranges that it claims, saves and finishes, and its record for the others."""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from batchgen.share.files import Files
from batchgen.share.lease import Lease, Table, WorkerRecord, claim, finish, is_held, write_worker
from batchgen.share.ranges import may_claim

TICKS_PER_LEASE = 12  # a worker is taken for dead when so many of its signs in a row are missing


class Parts(Protocol):
    """Finished rows on stable storage, by range, generation and number."""

    def count(self, name: str, generation: int) -> int:
        """Intact parts, from the first one on without a gap."""

    def rows(self, name: str, generation: int, count: int) -> Iterator[tuple[Sequence[int], Sequence[bool]]]:
        """Pairs of the rows that each of the first `count` parts holds and whether each of them failed."""

    def write(self, name: str, generation: int, number: int, results: Mapping[int, Any]) -> int:
        """Write a part; returns how many of its rows failed."""


class RowSet(Protocol):
    """Rows that can be asked for one by one."""

    def __contains__(self, row: int, /) -> bool: ...


@dataclass
class Held:
    """A range that this worker has.

    Attributes:
        lease: Its lease.
        left: Rows that are not saved.
        parts: Parts of this generation.
        ok: Rows saved without errors.
        failed: Failed rows saved.
    """

    lease: Lease
    left: set[int]
    parts: int = 0
    ok: int = 0
    failed: int = 0


def range_name(index: int) -> str:
    """The name of a range in file names."""
    return f"{index:06d}"


class Worker:
    """One worker of a shared job. `tick`, `claim_range` and `save` may each be called by a thread of its own.

    Attributes:
        name: Name that no other worker has.
        table: The worker's view of the others.
        phase: "loading", "running", "waiting" or "joining".
        saved: Rows that it has saved.
    """

    def __init__(
        self,
        name: str,
        files: Files,
        lease_s: float,
        *,
        process: str = "",
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.table = Table(files, lease_s, now)
        self.phase = "loading"
        self.saved = 0
        self._files, self._process, self._now = files, process, now
        self._lock = threading.Lock()  # of the table
        self._counter = 0
        self._ended = False
        self._started_s: float | None = None
        self._claimed = self._finished = 0  # rows; each is changed by one thread only
        self._held: dict[str, Held] = {}
        self._ranges: list[range] = []
        self._skip: RowSet = ()

    def work_on(self, ranges: list[range], parts: Parts, skip: RowSet = ()) -> None:
        """From now on there are rows: `ranges` of them, without those that were done before."""
        self._ranges, self._parts, self._skip = ranges, parts, skip
        self._starts = [rows.start for rows in ranges]

    def tick(self) -> None:
        """Say that it lives, and look what the others do. Raises OSError."""
        self._tell()
        with self._lock:
            self.table.refresh()

    def end(self) -> None:
        """Say that it does nothing more: its leases are free at once. Raises OSError."""
        self._ended = True
        self._tell()

    def claim_phase(self, name: str) -> Lease | None:
        """Claim "open" or "join", if it is free."""
        with self._lock:
            self.table.refresh()
            if not self.table.is_free(name, self.name):
                return None
            return claim(self._files, self.table, name, self.name, lambda generation: 0)

    def claim_range(self, ahead: int) -> list[int] | None:
        """Claim a range, if it is time for one.

        Args:
            ahead: Rows to have in hand.

        Returns:
            Its rows that are to be run, in order; None: there is nothing to claim now. Raises OSError.
        """
        outstanding = self._claimed - self._finished
        if outstanding >= ahead:
            return None
        if self._started_s is None:
            self._started_s = self._now()
        with self._lock:
            self.table.refresh()
        free = [i for i in range(len(self._ranges)) if self._is_free(i)]
        unclaimed = sum(len(self._ranges[i]) for i in free)
        if not may_claim(
            outstanding=outstanding, unclaimed=unclaimed, workers=max(1, len(self.table.alive)), ahead=ahead
        ):
            return None
        for i in free:
            rows = self._claim(i)
            if rows:
                return rows
        return None

    def row_finished(self) -> None:
        """The engine has finished a row; it may not be saved yet."""
        self._finished += 1

    def save(self, results: Mapping[int, Any]) -> None:
        """Save finished rows, and finish the ranges that they complete; rows of ranges that were lost are dropped."""
        by_range: dict[str, dict[int, Any]] = defaultdict(dict)
        for row, result in results.items():
            by_range[range_name(bisect_right(self._starts, row) - 1)][row] = result
        for name, rows in by_range.items():
            held = self._held.get(name)
            if held is None:
                continue
            needed = {row: result for row, result in rows.items() if row in held.left}
            if not needed:
                continue
            if name in self.table.done or not is_held(self._files, held.lease):
                del self._held[name]
                continue
            failed = self._parts.write(name, held.lease.generation, held.parts, needed)
            held.parts += 1
            held.left -= needed.keys()
            held.ok, held.failed = held.ok + len(needed) - failed, held.failed + failed
            self.saved += len(needed)
            if not held.left:
                self._finish(name, held)

    @property
    def is_idle(self) -> bool:
        """True where the engine has finished all rows that were claimed."""
        return self._claimed == self._finished

    @property
    def all_claimed(self) -> bool:
        """True where no range is free, as far as was seen."""
        return not any(self._is_free(i) for i in range(len(self._ranges)))

    @property
    def all_done(self) -> bool:
        """True where all rows are saved, by whomever."""
        return all(range_name(i) in self.table.done for i in range(len(self._ranges)))

    def counts(self) -> tuple[int, int]:
        """Rows of all workers that are saved, as far as was seen: (ok, failed)."""
        with self._lock:
            mine = {name: (held.ok, held.failed) for name, held in list(self._held.items())}
            return saved_rows(self.table, mine)

    def _is_free(self, index: int) -> bool:
        name = range_name(index)
        return name not in self._held and self.table.is_free(name, self.name)

    def _claim(self, index: int) -> list[int] | None:
        """The rows that are to be run of a range; None where it was not to be had, or had all its rows."""
        name = range_name(index)
        lease = claim(self._files, self.table, name, self.name, lambda g: self._parts.count(name, g))
        if lease is None:
            return None
        failed_of: dict[int, bool] = {}  # of each row, what its newest result says
        for generation, count in sorted(lease.adopted.items()):
            for rows, failed in self._parts.rows(name, generation, count):
                failed_of.update(zip(rows, failed, strict=True))
        left = [row for row in self._ranges[index] if row not in failed_of and row not in self._skip]
        num_failed = sum(map(bool, failed_of.values()))
        held = Held(lease, set(left), ok=len(failed_of) - num_failed, failed=num_failed)
        if not left:
            self._finish(name, held)
            return None
        self._claimed += len(left)
        self._held[name] = held
        return left

    def _finish(self, name: str, held: Held) -> None:
        finish(self._files, held.lease, held.parts, held.ok, held.failed)
        self._held.pop(name, None)

    def _tell(self) -> None:
        self._counter += 1
        seconds = 0.0 if self._started_s is None else self._now() - self._started_s
        ranges = {name: (held.ok, held.failed) for name, held in list(self._held.items())}
        record = WorkerRecord(
            self._counter, self._process, self._ended, self.phase, round(seconds, 3), self.saved, ranges
        )
        write_worker(self._files, self.name, record)


def saved_rows(table: Table, mine: Mapping[str, tuple[int, int]]) -> tuple[int, int]:
    """(ok, failed) rows that are saved: of finished ranges, of one's own, and of the others what their workers said."""
    ok = failed = 0
    for name in {*table.done, *table.leases}:
        done, lease = table.done.get(name), table.leases.get(name)
        if done is not None:
            more = done.ok, done.failed
        elif name in mine:
            more = mine[name]
        else:
            record = table.workers.get(lease.worker) if lease else None
            more = record.ranges.get(name, (0, 0)) if record else (0, 0)
        ok, failed = ok + more[0], failed + more[1]
    return ok, failed
