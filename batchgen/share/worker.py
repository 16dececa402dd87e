"""One worker of a shared job: it claims, saves and finishes ranges of rows, and writes its record for the others."""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from batchgen.share.files import Files
from batchgen.share.lease import Lease, Table, WorkerRecord, claim, finish, is_held, write_worker
from batchgen.share.ranges import may_claim

Rows = npt.NDArray[np.int64]

TICKS_PER_LEASE = 12  # a worker is taken for dead when so many of its signs in a row are missing


class Parts(Protocol):
    """The interface of a store of finished rows, by range, generation and number of the part."""

    def count(self, name: str, generation: int) -> int:
        """The number of intact parts of a generation of a range, counted from the first one up to a gap."""

    def rows(self, name: str, generation: int, count: int) -> Iterator[tuple[Sequence[int], Sequence[bool]]]:
        """Yield (row indices, flags of failed rows) for each of the first parts of a generation.

        Args:
            name: Name of the range.
            generation: Generation of the range's lease.
            count: Number of parts to read.
        """

    def write(self, name: str, generation: int, number: int, results: Mapping[int, Any]) -> int:
        """Write a part to stable storage; gives the number of its failed rows.

        Args:
            name: Name of the range.
            generation: Generation of the range's lease.
            number: Number of the part in this generation.
            results: Results by row index.
        """


class RowSet(Protocol):
    """The interface of a set of row indices, which supports `row in rows`."""

    def __contains__(self, row: int, /) -> bool: ...


@dataclass
class Held:
    """A range that this worker has and has not finished.

    Attributes:
        lease: The lease of the range.
        left: Row indices that are not saved.
        parts: Number of parts that were written in this generation.
        ok: Number of saved rows that succeeded.
        failed: Number of saved rows that failed.
    """

    lease: Lease
    left: set[int]
    parts: int = 0
    ok: int = 0
    failed: int = 0


def range_name(index: int) -> str:
    """The name of a range, as file names have it."""
    return f"{index:06d}"


class Worker:
    """One worker of a shared job. `tick`, `claim_range` and `save` may each be called by a different thread.

    Attributes:
        name: Name of the worker, which no other worker has.
        table: This worker's view of the common directory.
        phase: "loading", "running", "waiting" or "joining".
        saved: Number of rows that this worker has saved.
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
        self._order: Rows | None = None
        self._position_of_row: Rows | None = None

    def work_on(self, ranges: list[range], parts: Parts, skip: RowSet = ()) -> None:
        """Set the rows of the job, before the first range is claimed.

        Args:
            ranges: The ranges of row indices, or of positions in the order of `work_in_order`.
            parts: The store of finished rows.
            skip: Row indices that were finished before the job was shared.
        """
        self._ranges, self._parts, self._skip = ranges, parts, skip
        self._starts = [rows.start for rows in ranges]

    def work_in_order(self, rows: Rows) -> None:
        """Let ranges be of an order of the rows, which is the same for all workers, before the first one is claimed.

        Args:
            rows: All row indices of the job, in this order, int64 [rows].
        """
        positions = np.empty(len(rows), np.int64)
        positions[rows] = np.arange(len(rows))
        self._order, self._position_of_row = rows, positions

    def position_of(self, row: int) -> int:
        """The position of a row in the order that ranges are of."""
        return row if self._position_of_row is None else int(self._position_of_row[row])

    def tick(self) -> None:
        """Write this worker's record and read those of the others. Raises OSError."""
        self._tell()
        with self._lock:
            self.table.refresh()

    def end(self) -> None:
        """Record that this worker has ended, so that its leases are free at once. Raises OSError."""
        self._ended = True
        self._tell()

    def claim_phase(self, name: str) -> Lease | None:
        """Claim the phase "open" or "join"; None where it is not free."""
        with self._lock:
            self.table.refresh()
            if not self.table.is_free(name, self.name):
                return None
            return claim(self._files, self.table, name, self.name, lambda generation: 0)

    def claim_range(self, ahead: int) -> list[int] | None:
        """Claim a range where this worker needs more rows.

        Args:
            ahead: Number of rows that keep this worker's engine busy.

        Returns:
            The row indices of the range that are not finished, in the order of ranges; None where nothing is claimed.

        Raises:
            OSError: The common directory cannot be read or written.
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
        """Count a row that the engine has finished and that may not be saved yet."""
        self._finished += 1

    def save(self, results: Mapping[int, Any]) -> None:
        """Save finished rows, and finish the ranges that they complete. Rows of ranges that were lost are dropped.

        Args:
            results: Results by row index.
        """
        by_range: dict[str, dict[int, Any]] = defaultdict(dict)
        for row, result in results.items():
            by_range[self.range_of(row)][row] = result
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

    def range_of(self, row: int) -> str:
        """The name of the range of a row."""
        return range_name(bisect_right(self._starts, self.position_of(row)) - 1)

    def is_left(self, row: int) -> bool:
        """True where this worker has a row's range and has not saved the row."""
        held = self._held.get(self.range_of(row))
        return held is not None and row in held.left

    @property
    def is_idle(self) -> bool:
        """True where the engine has finished all rows that this worker has claimed."""
        return self._claimed == self._finished

    @property
    def all_claimed(self) -> bool:
        """True where no range is free, as far as this worker has seen."""
        return not any(self._is_free(i) for i in range(len(self._ranges)))

    @property
    def all_done(self) -> bool:
        """True where all rows of the job are saved, by any worker."""
        return all(range_name(i) in self.table.done for i in range(len(self._ranges)))

    def counts(self) -> tuple[int, int]:
        """The numbers (ok, failed) of saved rows of all workers, as far as this worker has seen."""
        with self._lock:
            mine = {name: (held.ok, held.failed) for name, held in list(self._held.items())}
            return saved_rows(self.table, mine)

    def _is_free(self, index: int) -> bool:
        name = range_name(index)
        return name not in self._held and self.table.is_free(name, self.name)

    def _claim(self, index: int) -> list[int] | None:
        """Claim one range; gives its row indices that are not finished.

        The result is None where another worker has the range, or where all its rows are finished.
        """
        name = range_name(index)
        lease = claim(self._files, self.table, name, self.name, lambda g: self._parts.count(name, g))
        if lease is None:
            return None
        failed_of: dict[int, bool] = {}  # of each row, what its newest result says
        for generation, count in sorted(lease.adopted.items()):
            for saved, failed in self._parts.rows(name, generation, count):
                failed_of.update(zip(saved, failed, strict=True))
        positions = self._ranges[index]
        rows = positions if self._order is None else self._order[positions.start : positions.stop].tolist()
        left = [row for row in rows if row not in failed_of and row not in self._skip]
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
    """The numbers (ok, failed) of saved rows of all workers.

    They are those of finished ranges, of this worker's ranges, and of the other workers' ranges by their last records.

    Args:
        table: This worker's view of the common directory.
        mine: Saved rows (ok, failed) of each range that this worker has, by range name.
    """
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
