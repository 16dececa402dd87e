"""The progress of a job and of its workers, as `batchgen status` shows it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from batchgen.core.errors import InputError, naming_files
from batchgen.core.file_lock import LockHeld, lock_file
from batchgen.core.units import format_seconds
from batchgen.output.manifest import Manifest
from batchgen.output.parts import DamagedPart, part_number, part_paths, scan_part
from batchgen.output.row_map import DoneRows
from batchgen.output.run_directory import SHARE_FOLDER, run_directory, target_path
from batchgen.share.files import DirectoryFiles
from batchgen.share.lease import Table
from batchgen.share.run import SharedJob
from batchgen.share.worker import TICKS_PER_LEASE, saved_rows


def output_status(
    output: str | Path, sleep: Callable[[float], None] = time.sleep, name: str | None = None
) -> dict[str, Any]:
    """Read the progress of a job without disturbing it.

    Args:
        output: The path of the output file (`batchgen run --output`).
        sleep: The function that waits, in seconds, for the workers' next records.
        name: The name of the output in messages; None: its path.

    Returns:
        JSON values: state ("complete", "shared", "running" or "stopped"), rows_ok, rows_failed. For a shared job also
            rows_left, seconds_left (None: not known) and workers. Each worker has name, process, state ("loading",
            "running", "waiting", "joining", "silent" or "left"), rows and rows_per_s.

    Raises:
        InputError: There is no job, or this user may not read it.
        BatchgenError: A file of the job is damaged.
    """
    with naming_files(errors=PermissionError):
        return _status(Path(output), sleep, name or str(output))


def _status(output: Path, sleep: Callable[[float], None], name: str) -> dict[str, Any]:
    target = target_path(output)
    directory = run_directory(target) if target.name else None
    held = Manifest.read(directory / "manifest.json") if directory is not None else None
    if directory is None or held is None:
        raise InputError(f"{name} has no job: give the --output of a `batchgen run` that has begun")
    if held.state == "complete" and held.totals:
        return {"state": "complete", **{name: held.totals[name] for name in ("rows_ok", "rows_failed")}}
    files = DirectoryFiles(directory / SHARE_FOLDER)
    job = SharedJob.read(files)
    if job is None:
        return _plain(directory)
    try:
        return _shared(files, job, directory, sleep)
    except FileNotFoundError:  # the folder is gone: a worker has completed the output meanwhile
        if files.path.exists():
            raise
        return _status(output, sleep, name)


def describe_status(status: dict[str, Any]) -> list[str]:
    """Format the result of `output_status` as lines of text."""
    rows = f"{status['rows_ok']:,} rows ok, {status['rows_failed']:,} failed"
    if status["state"] != "shared":
        process = f" by {status['process']}" if status.get("process") else ""
        return [f"{status['state']}{process}: {rows}"]
    left = "" if status["seconds_left"] is None else f", {format_seconds(status['seconds_left'])}"
    lines = [f"shared by {len(status['workers'])} workers: {rows}, {status['rows_left']:,} left{left}"]
    for worker in status["workers"]:
        rate = f", {worker['rows_per_s']:.2f} rows/s" if worker["rows_per_s"] else ""
        ranges = f", {worker['ranges']} ranges in hand" if worker["ranges"] else ""
        lines.append(
            f"{worker['name']} ({worker['process']}): {worker['state']}, {worker['rows']:,} rows{rate}{ranges}"
        )
    return lines


def _plain(directory: Path) -> dict[str, Any]:
    done = _rows_of_parts(directory, None)
    status = {"state": "stopped", "rows_ok": done.ok, "rows_failed": done.failed}
    try:
        os.close(lock_file(directory / "lock", shared=True))
    except LockHeld as error:
        status |= {"state": "running", "process": error.holder}
    except OSError:
        pass  # a file system without locks
    return status


def _shared(files: DirectoryFiles, job: SharedJob, directory: Path, sleep: Callable[[float], None]) -> dict[str, Any]:
    table = Table(files, job.lease_s, time.monotonic)
    table.refresh()
    counters = {name: record.counter for name, record in table.workers.items()}
    sleep(1.5 * job.lease_s / TICKS_PER_LEASE)
    table.refresh()
    workers: list[dict[str, Any]] = []
    for name, record in table.workers.items():
        alive = not record.ended and record.counter != counters.get(name)
        in_hand = [
            n for n, lease in table.leases.items() if lease.worker == name and n.isdigit() and n not in table.done
        ]
        workers.append({
            "name": name,
            "process": record.process,
            "state": record.phase if alive else "left" if record.ended else "silent",
            "rows": record.rows,
            "rows_per_s": record.rows / record.seconds if alive and record.seconds else 0.0,
            "ranges": len(in_hand),
        })  # fmt: skip
    before = _rows_of_parts(directory, job.first_part)
    ok, failed = saved_rows(table, {})
    left = job.rows - ok - failed - before.ok - before.failed
    rate = sum(worker["rows_per_s"] for worker in workers)
    return {
        "state": "shared",
        "rows_ok": ok + before.ok,
        "rows_failed": failed + before.failed,
        "rows_left": left,
        "seconds_left": left / rate if rate else None,
        "workers": workers,
    }


def _rows_of_parts(directory: Path, below: int | None) -> DoneRows:
    """The rows in an ordinary run's part files.

    Args:
        directory: The run directory.
        below: Only part files with a lower number are read; None: all.
    """
    done = DoneRows()
    for path in part_paths(directory / "parts"):
        if below is None or part_number(path) < below:
            try:
                for group in scan_part(path):
                    done.mark(group.rows, group.failed)
            except (DamagedPart, FileNotFoundError):  # the next run tells of it; or it is complete by now
                continue
    return done
