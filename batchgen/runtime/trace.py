"""A timeline in the Chrome trace format (chrome://tracing, Perfetto): a row for each lane."""

from __future__ import annotations

import json
from pathlib import Path

from batchgen.errors import InputError
from batchgen.runtime.schedule import LANES, Step


class TraceWriter:
    """Writes Steps as they end, so that the timeline of a long run needs no memory. The file is valid JSON once closed, and
    viewers read it even if it never was."""

    def __init__(self, path: str | Path, name: str) -> None:
        """name: of the process in the viewer. Raises InputError where the file cannot be written."""
        try:
            self._file = Path(path).open("w")  # noqa: SIM115
        except OSError as error:
            raise InputError(f"--trace {path} cannot be written: {error.strerror}") from error
        self._file.write("[\n")
        self._file.write(json.dumps({"ph": "M", "name": "process_name", "pid": 1, "args": {"name": name}}))
        for row, lane in enumerate(LANES):
            for kind, value in (("thread_name", {"name": lane}), ("thread_sort_index", {"sort_index": row})):
                self._event({"ph": "M", "name": kind, "pid": 1, "tid": row, "args": value})
        self._origin_s: float | None = None

    def add(self, step: Step, start_s: float, end_s: float) -> None:
        if self._origin_s is None:
            self._origin_s = start_s
        self._event(
            {
                "ph": "X",
                "name": step.kind,
                "cat": step.lane,
                "pid": 1,
                "tid": LANES.index(step.lane),
                "ts": round((start_s - self._origin_s) * 1e6, 1),
                "dur": round((end_s - start_s) * 1e6, 1),
                "args": {"sweep": step.sweep, "layer": step.layer, "batch": step.batch},
            }
        )

    def close(self) -> None:
        if not self._file.closed:
            self._file.write("\n]\n")
            self._file.close()

    def _event(self, event: dict) -> None:
        self._file.write(",\n" + json.dumps(event))
