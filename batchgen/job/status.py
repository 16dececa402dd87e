"""The progress of a job and of its workers, as `batchgen status` shows it."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from batchgen.core.errors import InputError, naming_files
from batchgen.core.file_lock import LockHeld, lock_file
from batchgen.core.units import format_seconds
from batchgen.job.snapshot import Snapshot
from batchgen.output.error_kinds import error_kinds
from batchgen.output.manifest import Manifest
from batchgen.output.parts import DamagedPart, part_number, part_paths, scan_part
from batchgen.output.row_map import DoneRows
from batchgen.output.run_directory import SHARE_FOLDER, joint_directory, run_directory, target_path
from batchgen.share.files import DirectoryFiles
from batchgen.share.lease import Table
from batchgen.share.run import SharedJob
from batchgen.share.worker import TICKS_PER_LEASE, saved_rows

_RUNNING = ("starting", "running")
_GOES_ON = ("stopped", "interrupted", "failed", "killed")
_FRESH_S = 60.0  # a process elsewhere that has told of itself since then is alive


def output_status(
    output: str | Path, sleep: Callable[[float], None] = time.sleep, name: str | None = None
) -> dict[str, Any]:
    """Read the progress of a job without disturbing it.

    Args:
        output: The path of the output file (`batchgen run --output`).
        sleep: The function that waits, in seconds, for the workers' next records.
        name: The name of the output in messages; None: its path.

    Returns:
        JSON values:
            state: "complete"; "shared"; "starting" or "running" where its process is alive; "stopped" by a deadline or
                by nobody knows whom, "interrupted" by a signal, "failed", or "killed", where it is not.
            rows, rows_ok, rows_failed, rows_left, percent: Numbers of rows; None where the total is not known.
            rows_per_s, seconds_left, left_is_bound, ends: Of a job that runs; None where they are not known.
            process, is_alive, updated: The newest process, and when it last told of itself.
            message, errors: The reason why the job failed, and the most frequent errors of its rows.
            workers: Of a shared job: each has name, process, state ("loading", "running", "waiting", "joining",
                "silent" or "left"), rows and rows_per_s.

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
    if directory is not None and held is None and joint_directory(target).is_dir():
        raise InputError(
            f"{name} is made by several jobs: ask for those in {joint_directory(target)}, such as *.parquet"
        )
    if directory is None or held is None:
        raise InputError(f"{name} has no job: give the --output of a `batchgen run` that has begun")
    if held.state == "complete" and held.totals:
        return _complete(directory, held)
    files = DirectoryFiles(directory / SHARE_FOLDER)
    job = SharedJob.read(files)
    if job is None:
        return _plain(directory, held.results_per_row)
    try:
        return _shared(files, job, directory, sleep)
    except FileNotFoundError:  # the folder is gone: a worker has completed the output meanwhile
        if files.path.exists():
            raise
        return _status(output, sleep, name)


def describe_status(status: dict[str, Any]) -> list[str]:
    """Format the result of `output_status` as lines of text."""
    ok_failed = f"{status['rows_ok']:,} rows ok, {status['rows_failed']:,} failed"
    workers = status.get("workers")
    state = status["state"] if workers is None else f"shared by {len(workers)} workers"
    process = f" by {status['process']}" if status.get("is_alive") else ""
    parts = [f"{state}{process}: {ok_failed}"]
    if status["rows"] is not None and status["rows_left"]:
        parts += [f"{status['rows_left']:,} of {status['rows']:,} left ({status['percent']:.0f}% done)"]
    if status["rows_per_s"]:
        parts += [f"{status['rows_per_s']:,.2f} rows/s"]
    if status["seconds_left"] is not None:
        at_most, about = ("at most ", "by") if status["left_is_bound"] else ("", "about")
        ends = datetime.fromisoformat(status["ends"])
        day = "" if ends.date() == datetime.now(ends.tzinfo).date() else f"{ends:%a} "
        parts += [f"{at_most}{format_seconds(status['seconds_left'])} left, ends {about} {day}{ends:%H:%M}"]
    lines = [", ".join(parts)]
    if status["state"] in _GOES_ON:
        told = {"killed": f"{status['process']} has ended without a word; ", "failed": ""}
        lines.append(f"{told.get(status['state'], '')}the same command goes on from here")
    lines += [status["message"]] if status["message"] else []
    lines += [f"{error['rows']:,} failed: {error['error']}" for error in status["errors"]]
    if status["errors"]:
        lines.append("--retry-failed runs the failed rows again")
    for worker in workers or ():
        rate = f", {worker['rows_per_s']:.2f} rows/s" if worker["rows_per_s"] else ""
        ranges = f", {worker['ranges']} ranges in hand" if worker["ranges"] else ""
        lines.append(
            f"{worker['name']} ({worker['process']}): {worker['state']}, {worker['rows']:,} rows{rate}{ranges}"
        )
    return lines


def _counts(ok: int, failed: int, rows: int | None) -> dict[str, Any]:
    """The numbers of rows of a status, and its other values where nothing is known of them."""
    nothing = dict.fromkeys(("rows_per_s", "seconds_left", "ends", "process", "is_alive", "updated", "message"))
    return {
        "rows": rows,
        "rows_ok": ok,
        "rows_failed": failed,
        "rows_left": None if rows is None else rows - ok - failed,
        "percent": None if rows is None else 100.0 * (ok + failed) / rows if rows else 100.0,
        **nothing,
        "left_is_bound": False,
        "errors": [],
    }


def _complete(directory: Path, held: Manifest) -> dict[str, Any]:
    totals = held.totals or {}
    counts = _counts(totals["rows_ok"], totals["rows_failed"], totals["rows"])
    snapshot = Snapshot.read(directory)
    message = snapshot.message if snapshot is not None and snapshot.state == "failed" else None
    errors = _errors(directory, totals["rows_failed"], held.results_per_row)
    return {"state": "complete", **counts, "message": message, "errors": errors}


def _plain(directory: Path, results_per_row: int) -> dict[str, Any]:
    """The status of a job that one process runs, or has run."""
    done, snapshot = _rows_of_parts(directory, None, results_per_row), Snapshot.read(directory)
    rows = None if snapshot is None else snapshot.rows
    status = {"state": "stopped", **_counts(done.ok, done.failed, rows)}
    status["errors"] = _errors(directory, done.failed, results_per_row)
    holder, is_alive = _holder(directory, snapshot)
    status |= {"process": holder, "is_alive": is_alive}
    if snapshot is None:
        return status | {"state": "running" if is_alive else "stopped"}
    status |= {"state": snapshot.state, "updated": _time_text(snapshot.updated)}
    if is_alive:
        left = snapshot.seconds_left
        if left is not None:
            left = max(0.0, left - (time.time() - snapshot.updated))
            status |= {"seconds_left": left, "ends": _time_text(time.time() + left)}
        status |= {"rows_per_s": snapshot.rows_per_s, "left_is_bound": snapshot.left_is_bound}
        if snapshot.state not in _RUNNING:  # another run has begun since
            status["state"] = "running"
        return status
    if snapshot.state in _RUNNING:
        status["state"] = "killed"
    return status | {"message": snapshot.message}


def _holder(directory: Path, snapshot: Snapshot | None) -> tuple[str | None, bool]:
    """The newest process of a job, and True where it is alive."""
    newest = None if snapshot is None else f"process {snapshot.process} on {snapshot.host}"
    try:
        os.close(lock_file(directory / "lock", shared=True))
    except LockHeld as error:
        return error.holder, True
    except OSError:  # a file system without locks
        if snapshot is not None and snapshot.state in _RUNNING:
            is_fresh = time.time() - snapshot.updated < _FRESH_S
            return newest, is_fresh if snapshot.process_is_alive is None else snapshot.process_is_alive
    return newest, False


def _errors(directory: Path, failed: int, results_per_row: int) -> list[dict[str, Any]]:
    """The most frequent errors of failed rows."""
    if failed:
        with contextlib.suppress(DamagedPart, FileNotFoundError):
            paths = part_paths(directory / "parts")
            return [asdict(kind) for kind in error_kinds(paths, results_per_row=results_per_row)]
    return []


def _time_text(moment: float) -> str:
    """A time of time.time() as text, in the local time zone."""
    return datetime.fromtimestamp(moment).astimezone().isoformat(timespec="seconds")


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
    counts = _counts(ok + before.ok, failed + before.failed, job.rows)
    rate = sum(worker["rows_per_s"] for worker in workers)
    if rate:
        left = counts["rows_left"] / rate
        counts |= {"rows_per_s": rate, "seconds_left": left, "ends": _time_text(time.time() + left)}
    return {"state": "shared", **counts, "workers": workers}


def _rows_of_parts(directory: Path, below: int | None, results_per_row: int = 1) -> DoneRows:
    """The rows in an ordinary run's part files.

    Args:
        directory: The run directory.
        below: Only part files with a lower number are read; None: all.
        results_per_row: Number of results of each row.
    """
    done = DoneRows(results_per_row)
    for path in part_paths(directory / "parts"):
        if below is None or part_number(path) < below:
            try:
                for group in scan_part(path):
                    done.mark(group.rows, group.failed)
            except (DamagedPart, FileNotFoundError):  # the next run tells of it; or it is complete by now
                continue
    return done
