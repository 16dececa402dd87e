"""A thread that puts finished rows on disk while the engine makes the next ones."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

from batchgen.core.atomic_file import storage_error
from batchgen.output.parts import Result, next_part_number, write_part
from batchgen.output.row_map import DoneRows


class _Row(NamedTuple):
    row: int
    result: Result
    size_bytes: int


class _Barrier(NamedTuple):
    """A wish to have everything before it written, and to hear so on `answer`."""

    answer: queue.SimpleQueue[None]
    last: bool


class PartWriter:
    """A thread that takes finished rows and flushes them as parts.

    A part is flushed after `flush_interval_s`, `flush_rows` or `flush_bytes`, whichever comes first; it records
    `origin`.

    add(), flush() and close() belong to one thread, stop() to any. An error in writing (a full disk) is raised there,
    at the next call, as a BatchgenError; rows flushed before stay. Rows are marked in `done_rows` once they are on
    stable storage. The calling thread holds no lock, so that after a KeyboardInterrupt anywhere close() can still write
    what was added.
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
        """Hand over one finished row. Cheap; waits only while the disk is far behind."""
        size_bytes = result.memory_bytes
        while self._added_bytes - self._settled_bytes > 2 * self._flush_bytes and self._failure is None:
            time.sleep(0.005)
        self._check_open()
        self._added_bytes += size_bytes
        self._inbox.put(_Row(row, result, size_bytes))

    def check(self) -> None:
        """Raise what went wrong in the writing, if anything did; for any thread."""
        self._raise_failure()

    def flush(self) -> None:
        """Return when everything added so far is on stable storage."""
        self._check_open()
        answer: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._inbox.put(_Barrier(answer, last=False))
        answer.get()
        self._raise_failure()

    def flush_soon(self) -> None:
        """Have everything added so far written, and do not wait; for any thread."""
        self._inbox.put(_Barrier(queue.SimpleQueue(), last=False))

    def close(self) -> None:
        """Flush and end the thread. Raises what went wrong, unless an earlier call did."""
        if not self._ended:
            self._inbox.put(_Barrier(self._farewell, last=True))
            self._farewell.get()
        if not self._failure_raised:
            self._raise_failure()

    def stop(self) -> None:
        """Flush and end the thread, called by any thread.

        What goes wrong is not raised, and add() raises from now on: this is for a process that is about to end.
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
        """The next item; None when the deadline (time.monotonic) passes first."""
        try:
            timeout_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
            return self._inbox.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def _write(self, results: dict[int, Result]) -> None:
        """Write one part, unless an earlier one failed: then the caller has been told to start again."""
        if self._failure is not None:
            return
        try:
            self._save(results)
        except OSError as error:
            self._failure = storage_error(error, f"write a part in {self._parts_dir}", len(self._done_rows))
        except BaseException as error:  # a bug: the caller must hear of it, and still get answers
            self._failure = error

    def _save(self, results: dict[int, Result]) -> None:
        """Put rows on stable storage, and mark them as done. Raises OSError."""
        batch = write_part(self._parts_dir, self._next_number, results, self._origin)
        self._next_number += 1
        failed = batch.column("error").is_valid().to_numpy(zero_copy_only=False)
        self._done_rows.mark(batch.column("row").to_numpy(), failed)
