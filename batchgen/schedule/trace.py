"""A timeline in the Chrome trace format (chrome://tracing, Perfetto): a row for each lane."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from batchgen.core.errors import BatchgenError, InputError
from batchgen.core.private_files import NotPrivate
from batchgen.schedule.step_graph import LANES, Step


class TraceWriter:
    """A writer of Steps as they end, so that the timeline of a long run needs no memory.

    The file is valid JSON once closed, and viewers read it even if it never was.
    """

    def __init__(self, path: str | Path, name: str) -> None:
        """Open the file.

        Args:
            path: Path of the file.
            name: Name of the process in the viewer.

        Raises:
            InputError: The file cannot be written.
        """
        self._path = Path(path)
        try:
            self._file = open(_opened(self._path), "w")  # noqa: SIM115
        except OSError as error:
            raise InputError(f"--trace {path} cannot be written: {error.strerror}") from error
        self._write("[\n" + json.dumps({"ph": "M", "name": "process_name", "pid": 1, "args": {"name": name}}))
        for row, lane in enumerate(LANES):
            for kind, value in (("thread_name", {"name": lane}), ("thread_sort_index", {"sort_index": row})):
                self._event({"ph": "M", "name": kind, "pid": 1, "tid": row, "args": value})

    def add(self, step: Step, start_s: float, end_s: float) -> None:
        """Write a Step.

        Args:
            step: The Step.
            start_s: Seconds since any moment that is the same for all Steps: viewers begin with the first of them.
            end_s: Seconds since that moment when it ended.

        Raises:
            BatchgenError: The file takes no more.
        """
        self._event(
            {
                "ph": "X",
                "name": step.kind,
                "cat": step.lane,
                "pid": 1,
                "tid": LANES.index(step.lane),
                "ts": round(start_s * 1e6, 1),
                "dur": round((end_s - start_s) * 1e6, 1),
                "args": {"sweep": step.sweep, "layer": step.layer, "batch": step.batch},
            }
        )

    def close(self) -> None:
        """Close the file. Raises BatchgenError where it takes no more."""
        if not self._file.closed:
            try:
                self._write("\n]\n")
            finally:
                with self._errors_named():
                    self._file.close()

    def _event(self, event: dict[str, Any]) -> None:
        self._write(",\n" + json.dumps(event))

    def _write(self, text: str) -> None:
        with self._errors_named():
            self._file.write(text)

    @contextlib.contextmanager
    def _errors_named(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise BatchgenError(
                f"--trace {self._path} takes no more: {error.strerror}; free some space, or leave it out"
            ) from error


def _opened(path: Path) -> int:
    """The descriptor of a file to be written from its start. Raises OSError.

    No link is followed but one of this user's or root's, as /dev/stdout is.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    if path.is_symlink():
        if os.lstat(path).st_uid not in (os.geteuid(), 0):
            raise NotPrivate("it is a link of another user", path)
        return os.open(path, flags, 0o666)
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)
