"""The state of a running job as other programs read it: in its run directory, and as metrics for Prometheus."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from batchgen._version import __version__
from batchgen.core.errors import InputError
from batchgen.core.machine import resident_bytes
from batchgen.core.typed_json import parse_json, read_typed

STATES = ("starting", "running", "complete", "stopped", "failed", "interrupted")
SNAPSHOT_FILE = "progress.json"  # in a run directory
_EVERY_S = 2.0


@dataclass(frozen=True)
class Snapshot:
    """The state of a job at one moment. Times are seconds since 1970.

    Attributes:
        state: One of `STATES`.
        output: Name of the output.
        started: Time at which the command started.
        updated: Time of this snapshot.
        host: Name of the host.
        process: Id of the process.
        rows: Number of rows of the job; None: not known.
        rows_done: Number of finished rows, those of earlier runs and failed ones included.
        rows_failed: Number of failed rows.
        rows_per_s: Finished rows per second lately, of this run.
        prompt_tokens: Prompt tokens of this run.
        generated_tokens: Generated tokens of this run.
        sweeps: Number of sweeps of this run.
        seconds_left: Predicted seconds until the job ends; None: not known.
        left_is_bound: True where the job may end earlier than that, as the lengths of outputs are not known.
        message: The reason why the job ended, where it failed or stopped; None: there is none.
    """

    state: str
    output: str
    started: float
    updated: float
    host: str
    process: int
    rows: int | None = None
    rows_done: int = 0
    rows_failed: int = 0
    rows_per_s: float = 0.0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    sweeps: int = 0
    seconds_left: float | None = None
    left_is_bound: bool = False
    message: str | None = None

    @classmethod
    def starting(cls, output: str) -> Snapshot:
        """The state of a job of this process that starts now. output: name of the output."""
        now = time.time()
        return cls("starting", output, now, now, socket.gethostname(), os.getpid())

    @classmethod
    def read(cls, directory: Path) -> Snapshot | None:
        """The newest state in a run directory; None where there is none, or none of this version."""
        with contextlib.suppress(OSError, ValueError):
            snapshot: Snapshot = read_typed(cls, parse_json((directory / SNAPSHOT_FILE).read_bytes()))
            return snapshot
        return None

    @property
    def process_is_alive(self) -> bool | None:
        """True where the job's process runs on this host, False where it has ended; None: it is on another host."""
        if self.host != socket.gethostname():
            return None
        try:
            os.kill(self.process, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass  # another user's
        return True


def metrics(snapshot: Snapshot) -> str:
    """A snapshot in Prometheus' text format, as node_exporter's textfile collector reads it."""
    output = snapshot.output.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    label = f'output="{output}"'
    values: list[tuple[str, str, str, list[tuple[str, float | None]]]] = [
        ("info", "gauge", "Version of batchgen, and the host.", [
            (f'version="{__version__}",host="{snapshot.host}"', 1.0)
        ]),
        ("state", "gauge", "1 for the state that the job is in.", [
            (f'state="{state}"', float(state == snapshot.state)) for state in STATES
        ]),
        ("start_time_seconds", "gauge", "When the command started, since 1970.", [("", snapshot.started)]),
        ("update_time_seconds", "gauge", "When this file was written, since 1970.", [("", snapshot.updated)]),
        ("rows", "gauge", "Rows of the job.", [("", snapshot.rows)]),
        ("rows_done", "gauge", "Finished rows, failed ones included.", [("", snapshot.rows_done)]),
        ("rows_failed", "gauge", "Failed rows.", [("", snapshot.rows_failed)]),
        ("prompt_tokens_total", "counter", "Prompt tokens of this run.", [("", snapshot.prompt_tokens)]),
        ("generated_tokens_total", "counter", "Generated tokens of this run.", [("", snapshot.generated_tokens)]),
        ("sweeps_total", "counter", "Sweeps of this run.", [("", snapshot.sweeps)]),
        ("seconds_left", "gauge", "Predicted seconds until the job ends.", [("", snapshot.seconds_left)]),
        ("memory_bytes", "gauge", "Resident memory of the process.", [("", float(resident_bytes()))]),
    ]  # fmt: skip
    lines: list[str] = []
    for name, kind, help_text, samples in values:
        known = [(labels, value) for labels, value in samples if value is not None]
        if known:
            lines += [f"# HELP batchgen_{name} {help_text}", f"# TYPE batchgen_{name} {kind}"]
            lines += [
                f"batchgen_{name}{{{','.join(filter(None, (label, labels)))}}} {value:.15g}" for labels, value in known
            ]
    return "\n".join(lines) + "\n"


class Publisher:
    """The newest snapshot of a job, written into files every few seconds and at its end."""

    def __init__(self, output: str, metrics_file: str | None) -> None:
        """Write the state "starting".

        Args:
            output: Name of the output.
            metrics_file: The file for Prometheus; None: there is none.

        Raises:
            InputError: The file cannot be written.
        """
        self._metrics_file = Path(metrics_file).expanduser() if metrics_file else None
        self._directory: Path | None = None
        self._written_s = time.monotonic()
        self.snapshot = Snapshot.starting(output)
        if self._metrics_file is not None:
            try:
                _replace(self._metrics_file, metrics(self.snapshot))
            except OSError as error:
                raise InputError(f"--metrics-file {metrics_file} cannot be written: {error.strerror}") from error

    def write_into(self, run_directory: Path) -> None:
        """Write the state into a run directory too, from now on."""
        self._directory = run_directory
        self.publish()

    @property
    def is_due(self) -> bool:
        """True where the files are some seconds old."""
        return time.monotonic() - self._written_s >= _EVERY_S

    def publish(self, **changes: Any) -> None:
        """Change the snapshot and write it. Files that cannot be written are left as they are, and the job goes on."""
        self.snapshot = replace(self.snapshot, updated=time.time(), **changes)
        self._written_s = time.monotonic()
        if self._directory is not None:
            with contextlib.suppress(OSError):
                _replace(self._directory / SNAPSHOT_FILE, json.dumps(asdict(self.snapshot), indent=1) + "\n")
        if self._metrics_file is not None:
            with contextlib.suppress(OSError):
                _replace(self._metrics_file, metrics(self.snapshot))

    def end(self, report: Mapping[str, Any]) -> None:
        """Publish how the job has ended. report: the report of the run."""
        self.publish(
            state="stopped" if report["state"] == "stopped" else "complete",
            rows=report["rows"],
            rows_done=report["rows_ok"] + report["rows_failed"],
            rows_failed=report["rows_failed"],
            prompt_tokens=report["prompt_tokens"],
            generated_tokens=report["generated_tokens"],
            sweeps=report["sweeps"],
            seconds_left=None,
            rows_per_s=0.0,
        )

    @contextlib.contextmanager
    def ending(self) -> Iterator[None]:
        """Publish how the job ends, if it ends with an exception."""
        try:
            yield
        except KeyboardInterrupt:
            self.publish(state="interrupted", seconds_left=None, rows_per_s=0.0)
            raise
        except BaseException as error:
            if self.snapshot.state in ("starting", "running"):
                self.publish(state="failed", message=str(error), seconds_left=None, rows_per_s=0.0)
            raise


def _replace(path: Path, text: str) -> None:
    """Replace a file in one step, for readers; it need not be there after a power cut. Raises OSError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, "utf-8")
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
