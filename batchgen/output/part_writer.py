"""A thread that writes finished rows to part files while the engine computes further rows."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

from batchgen.core.atomic_file import storage_error
from batchgen.core.machine import trim_freed_memory
from batchgen.output.parts import Result, next_part_number, write_part
from batchgen.output.row_map import DoneRows

# malloc keeps what rows have freed, in ever more places of its heap: once in so many parts it is returned.
_PARTS_BETWEEN_TRIMS = 12


class _Row(NamedTuple):
    row: int
    result: Result
    size_bytes: int


class _Barrier(NamedTuple):
    """A request in the writer's queue: write all rows that were queued before, then answer.

    Attributes:
        answer: The queue that gets the answer.
        last: True where the thread ends after this request.
    """

    answer: queue.SimpleQueue[None]
    last: bool


class PartWriter:
    """A thread that collects finished rows and writes them to part files.

    A part file is written after `flush_interval_s` seconds, `flush_rows` rows or `flush_bytes` bytes, whichever comes
    first. It records `origin`, JSON values about the job.

    One thread calls add(), flush() and close(); any thread may call stop(). Where writing fails (a full disk), the next
    call of the first three raises a BatchgenError; rows that were written before stay. Rows are marked in `done_rows`
    once they are on stable storage. The calling thread holds no lock. So after a KeyboardInterrupt anywhere, close()
    can still write all rows that were added.
    """

    def __init__(
        self,
        parts_dir: Path,
        done_rows: DoneRows,
        *,
        flush_interval_s: float = 5.0,
        flush_rows: int = 65536,
        flush_bytes: int = 32 << 20,
        origin: dict[str, Any] | None = None,
    ) -> None:
        self._parts_dir = parts_dir
        self._done_rows = done_rows
        self._flush_interval_s = flush_interval_s
        self._flush_rows = flush_rows
        self._flush_bytes = flush_bytes
        self._origin = origin
        self._next_number = next_part_number(parts_dir)
        self._inbox: queue.SimpleQueue[_Row | _Barrier] = queue.SimpleQueue()
        self._added_bytes = 0  # changed by the caller's thread only
        self._settled_bytes = 0  # changed by the writer thread only
        self._failure: BaseException | None = None
        self._failure_raised = False
        # Not Thread.join and is_alive: after a KeyboardInterrupt in them a live thread passes for ended.
        self._ended = False
        self._farewell: queue.SimpleQueue[None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="part-writer", daemon=True).start()

    def add(self, row: int, result: Result) -> None:
        """Queue the result of one finished row. The call waits only where the disk is far behind.

        Args:
            row: Index of the row in the input.
            result: The row's result.
        """
        size_bytes = result.memory_bytes
        while self._added_bytes - self._settled_bytes > 2 * self._flush_bytes and self._failure is None:
            time.sleep(0.005)
        self._check_open()
        self._added_bytes += size_bytes
        self._inbox.put(_Row(row, result, size_bytes))

    def check(self) -> None:
        """Raise the error by which writing has failed, if it has. Any thread may call this method."""
        self._raise_failure()

    def flush(self) -> None:
        """Write all rows that were added so far; returns when they are on stable storage."""
        self._check_open()
        answer: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._inbox.put(_Barrier(answer, last=False))
        answer.get()
        self._raise_failure()

    def flush_soon(self) -> None:
        """Request that all rows added so far are written, without waiting for it. Any thread may call this method."""
        self._inbox.put(_Barrier(queue.SimpleQueue(), last=False))

    def close(self) -> None:
        """Write all rows and end the thread. Raises the error of writing, unless an earlier call has raised it."""
        if not self._ended:
            self._inbox.put(_Barrier(self._farewell, last=True))
            self._farewell.get()
        if not self._failure_raised:
            self._raise_failure()

    def stop(self) -> None:
        """Write all rows and end the thread, as the last action of a process; any thread may call this method.

        An error of writing is not raised here. Later calls of add() raise an error.
        """
        answer: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._inbox.put(_Barrier(answer, last=True))
        while not self._ended:  # another thread's barrier may be the one that is answered
            with contextlib.suppress(queue.Empty):
                answer.get(timeout=0.02)

    def __enter__(self) -> PartWriter:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _check_open(self) -> None:
        self._raise_failure()
        if self._ended:
            raise ValueError("the part writer is closed")

    def _raise_failure(self) -> None:
        if self._failure is not None:
            self._failure_raised = True
            raise self._failure

    def _run(self) -> None:
        pending: dict[int, Result] = {}
        pending_bytes = 0
        deadline_s = 0.0
        while True:
            item = self._take(deadline_s if pending else None)
            if isinstance(item, _Row):
                if not pending:
                    deadline_s = time.monotonic() + self._flush_interval_s
                pending[item.row] = item.result
                pending_bytes += item.size_bytes
                full = len(pending) >= self._flush_rows or pending_bytes >= self._flush_bytes
                if not full and time.monotonic() < deadline_s:
                    continue
            if pending:
                self._write(pending)
                self._settled_bytes += pending_bytes
                pending, pending_bytes = {}, 0
            if isinstance(item, _Barrier):
                self._ended = item.last
                item.answer.put(None)
                if item.last:
                    return

    def _take(self, deadline_s: float | None) -> _Row | _Barrier | None:
        """Wait for the next item of the queue until a deadline (time.monotonic); None where the deadline passes."""
        try:
            timeout_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
            return self._inbox.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def _write(self, results: dict[int, Result]) -> None:
        """Write one part file, unless an earlier one failed; its rows are then computed again after a restart."""
        if self._failure is not None:
            return
        try:
            self._save(results)
        except OSError as error:
            self._failure = storage_error(error, f"write a part in {self._parts_dir}", len(self._done_rows))
            self._failure.__cause__ = error
        except BaseException as error:  # a bug: the caller must hear of it, and still get answers
            self._failure = error

    def _save(self, results: dict[int, Result]) -> None:
        """Write rows to stable storage and mark them as done. Raises OSError."""
        batch = write_part(self._parts_dir, self._next_number, results, self._origin)
        self._next_number += 1
        failed = batch.column("error").is_valid().to_numpy(zero_copy_only=False)
        self._done_rows.mark(batch.column("row").to_numpy(), failed)
        if self._next_number % _PARTS_BETWEEN_TRIMS == 0:
            trim_freed_memory()
