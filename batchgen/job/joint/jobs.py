"""Jobs that make one output together: each is an ordinary job, in a directory beside the output, and can be resumed."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from batchgen.core.atomic_file import storage_error, write_atomically, written_atomically
from batchgen.core.errors import BatchgenError, InputError, TooManyFailed
from batchgen.core.file_lock import LockHeld, lock_file
from batchgen.core.units import format_seconds
from batchgen.job.cached_outputs import cached_output
from batchgen.job.checks import check_job
from batchgen.job.destination import Destination
from batchgen.job.failures import FailureLimit
from batchgen.job.log_format import LogFormat
from batchgen.job.option_table import options_of
from batchgen.job.options import JobOptions, seconds
from batchgen.job.progress import Progress
from batchgen.job.report import Origin, versions, write_report
from batchgen.job.run import run_job
from batchgen.job.source import open_input
from batchgen.output.formats import FORMATS, output_format
from batchgen.output.run_directory import JOINT_STATE, joint_directory, target_path

_TIMES = "times.json"


class Stopped(Exception):
    """The time of `--max-time` is over before all jobs are done."""


@dataclass
class Jobs:
    """Jobs that make one output together.

    Attributes:
        options: The options of the whole, with a local output.
        output: The output.
        directory: The directory of the jobs' files.
        deadline_s: Time of time.monotonic at which the last one stops; None: it has no limit.
        reports: Report of each job of this run, by the job's name.
    """

    options: JobOptions
    output: Path
    directory: Path
    deadline_s: float | None
    reports: dict[str, dict[str, Any]] = field(default_factory=dict)

    def say(self, line: str) -> None:
        """Show a line to the user."""
        options = self.options
        with Progress(options.progress, log_format=LogFormat(options.log_format, options.log_name)) as progress:
            progress.say(line)

    def run(self, name: str, options: JobOptions) -> Path:
        """Run one of the jobs; returns its output, a Parquet file.

        Args:
            name: The name of the job, after which its output is named.
            options: Its options, but for output and time.

        Raises:
            Stopped: The time is over before it is done.
        """
        output = self.output_of(name)
        left_s = None if self.deadline_s is None else self.deadline_s - time.monotonic()
        if left_s is not None and left_s <= 0:
            raise Stopped
        report = run_job(replace(options, output=output, max_time=left_s))
        self.reports[name] = report
        self._add_time(name, report)
        if report["state"] == "stopped":
            raise Stopped
        return output

    def output_of(self, name: str) -> Path:
        """The output of a job. name: the job's name."""
        return self.directory / f"{name}.parquet"

    def input_of(self, name: str) -> Path:
        """The file with the rows of a job. name: the job's name."""
        return self.directory / f"{name}-input.parquet"

    def times(self) -> dict[str, dict[str, Any]]:
        """Seconds and rows of each job, over all runs."""
        return read_json(self.directory / _TIMES) or {}

    def added_columns(self) -> dict[str, pa.DataType]:
        """Type of each column that the jobs of this run have added to the input's, by name; the last job's first."""
        types: dict[str, pa.DataType] = {}
        for name, report in self.reports.items():
            schema = pq.read_schema(self.output_of(name))
            types = {added: schema.field(added).type for added in report["output_columns"]} | types
        return types

    def _add_time(self, name: str, report: Mapping[str, Any]) -> None:
        """Add the time of a job to what earlier runs of it took."""
        if report["state"] == "already complete":
            return
        times = self.times()
        before = times.get(name, {"wall_s": 0.0, "rows": 0})
        rows = report["rows_ok"] + report["rows_failed"] - report["rows_resumed"]
        times[name] = {"wall_s": before["wall_s"] + report["wall_s"], "rows": before["rows"] + rows}
        write_atomically(self.directory / _TIMES, json.dumps(times).encode())


def one_of_several(options: JobOptions) -> JobOptions:
    """The options that each of several jobs has. options: those of the whole."""
    return replace(options, cascade=None, lora_column=None, overwrite=False, report=None, max_failed=None)


def over_rows(options: JobOptions, rows: Path) -> JobOptions:
    """The options of a job over some rows of the input. rows: the Parquet file that has them."""
    return replace(
        one_of_several(options),
        input=str(rows),
        input_format="parquet",
        split=None,
        limit=None,
        shard=None,
        on_bad_line="fail",
        csv_delimiter=None,
        max_failed="100%",  # a few rows may all fail: the limit is that of the whole
    )


def run_jobs(options: JobOptions, run: Callable[[Jobs], dict[str, Any]], flag: str) -> dict[str, Any]:
    """Run several jobs that make one output, or resume them.

    Args:
        options: The options of the whole.
        run: Function that runs the jobs and writes the output, and returns what the report says of them.
        flag: The option that asks for several jobs, for messages.

    Returns:
        The report, which is also written to `options.report`.

    Raises:
        BatchgenError: A job cannot be run or completed.
        TooManyFailed: More rows failed than `options.max_failed` allows; its `report` is the report.
    """
    started_s = time.monotonic()
    check_job(options)
    origin = Origin.of(options, started_s)
    if open_input(options).format == "openai":
        raise InputError(f"{flag} is for rows with columns, and an OpenAI batch has whole requests: leave it out")
    destination = Destination.of(options)
    local = options if destination is None else destination.local(options)
    output = Path(local.output) if local.output is not None else _unnamed_output(local, destination)
    deadline_s = None if options.max_time is None else started_s + seconds(options.max_time)
    target = target_path(output)
    jobs = Jobs(replace(local, output=output), target, joint_directory(target), deadline_s)
    with _locked(jobs):
        try:
            report = run(jobs)
        except Stopped:
            report = _stopped(jobs)
        report |= _ends(jobs, origin)
    if destination is not None and report["state"] != "stopped":
        report |= destination.names(output, errors_file=False)
        destination.put(output, errors_file=False)
    if options.report:
        write_report(report, options.report)
    limit = FailureLimit.parse(options.max_failed)
    if report["state"] != "stopped" and (reason := limit.exceeded(report["rows_failed"], report["rows"])):
        raise TooManyFailed(f"{reason}; {report['output']} has them with their errors", report)
    return report


def _unnamed_output(options: JobOptions, destination: Destination | None) -> Path:
    """The output of jobs whose options name none."""
    deciding = {
        option.name: repr(getattr(options, option.name, None))
        for option in options_of("run")
        if option.decides_results and option.name != "input"
    }
    identity = open_input(options, copy_streams=True).identity()
    fingerprint = {"input": identity, "options": deciding, "sampling": options.sampling.to_json()}
    return cached_output(fingerprint, ".arrow" if destination is None else ".jsonl")


@contextmanager
def _locked(jobs: Jobs) -> Iterator[None]:
    """Make the jobs' directory, and hold its lock within a `with` block; `--overwrite` begins it anew."""
    directory = jobs.directory
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = lock_file(directory / "lock")
    except LockHeld as held:
        raise BatchgenError(f"{jobs.output} is being written by {held.holder}: wait for it, or stop it") from held
    except OSError as error:
        raise storage_error(error, f"make {directory}") from error
    try:
        if jobs.options.overwrite:
            for path in directory.iterdir():
                if path.is_dir():
                    shutil.rmtree(path)
                elif path.name != "lock":
                    path.unlink()
        yield
    except OSError as error:
        raise storage_error(error, f"write {jobs.output}") from error
    finally:
        os.close(lock)


def write_output(
    jobs: Jobs,
    asked: Mapping[str, Any],
    schema: pa.Schema,
    batches: Iterable[pa.RecordBatch],
    error_column: str,
    about: Callable[[int], Mapping[str, Any]],
) -> dict[str, Any]:
    """Write the output of several jobs, unless it is there already.

    Args:
        jobs: The jobs.
        asked: All that decides the output, as JSON values: `files_of` the jobs, and more.
        schema: The output's columns.
        batches: The output's rows.
        error_column: Name of the column with the errors of rows that failed.
        about: Function from the number of rows to further fields of the report.

    Returns:
        The part of the report about the output.
    """
    state_path = jobs.directory / JOINT_STATE
    decided = {**asked, "suffix": jobs.output.suffix}
    kept = read_json(state_path)
    if kept is not None and kept["asked"] == decided and kept.get("output") == _version(jobs.output):
        before: dict[str, Any] = kept["report"]
        return before | {"state": "already complete", "rows_resumed": before["rows"]}
    write_atomically(state_path, json.dumps({"asked": None}).encode())  # from now on the output may be replaced
    errors: Counter[str] = Counter()
    rows = 0

    def counted() -> Iterator[pa.RecordBatch]:
        nonlocal rows
        for batch in batches:
            rows += batch.num_rows
            errors.update(pc.drop_null(batch.column(error_column)).to_pylist())
            yield batch

    with written_atomically(jobs.output) as file:
        FORMATS[output_format(jobs.output)](file, schema, counted())
    failed = sum(errors.values())
    report = {
        "state": "complete",
        "rows": rows,
        "rows_ok": rows - failed,
        "rows_failed": failed,
        "rows_left": 0,
        "rows_resumed": 0,
        "errors": [{"error": error, "rows": times} for error, times in errors.most_common(3)],
        **about(rows),
    }
    kept = {"asked": decided, "output": _version(jobs.output), "report": report}
    write_atomically(state_path, json.dumps(kept).encode())
    return report


def files_of(paths: Iterable[Path]) -> dict[str, list[int] | None]:
    """Version of each of some files, by its name."""
    return {path.name: _version(path) for path in paths}


def read_json(path: Path) -> Any:
    """The JSON value in a file; None: there is no such file."""
    return json.loads(path.read_bytes()) if path.exists() else None


def _ends(jobs: Jobs, origin: Origin) -> dict[str, Any]:
    """The circumstances of a run that ends now, for its report."""
    predicted = [report["predicted_wall_s"] for report in jobs.reports.values()]
    return {
        **origin.to_json(),
        "output": str(jobs.options.output),
        "wall_s": time.monotonic() - origin.started_s,
        "predicted_wall_s": sum(predicted) if predicted and None not in predicted else None,
        "versions": versions(),
        "jobs": jobs.reports,
    }


def _stopped(jobs: Jobs) -> dict[str, Any]:
    """The part of the report about jobs that the deadline has ended."""
    return {
        "state": "stopped",
        "rows": None,
        "rows_ok": 0,
        "rows_failed": 0,
        "rows_left": None,
        "rows_resumed": 0,
        "errors": [],
        "output_columns": [],
    }


def joint_summary(report: dict[str, Any], about: Iterable[str]) -> list[str]:
    """The lines that `batchgen run` prints at the end of several jobs.

    Args:
        report: The report of the run.
        about: Lines about the jobs of a complete output.
    """
    if report["state"] == "stopped":
        done = ", ".join(f"{name} {job['rows_ok'] + job['rows_failed']:,}" for name, job in report["jobs"].items())
        return [f"stopped: rows done by job: {done or 'none'}; the same command goes on from here"]
    predicted = report["predicted_wall_s"]
    said = f" (predicted {format_seconds(predicted)})" if predicted else ""
    done = f"done in {format_seconds(report['wall_s'])}{said}"
    begin = "already complete" if report["state"] == "already complete" else done
    lines = [f"{begin}: {report['rows_ok']:,} rows ok, {report['rows_failed']:,} failed", *about]
    lines += [f"{kind['rows']:,} failed: {kind['error']}" for kind in report["errors"]]
    return [*lines, f"output: {report['output']}"]


def _version(path: Path) -> list[int] | None:
    """Size and time of a file; None: there is none."""
    if not path.exists():
        return None
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]
