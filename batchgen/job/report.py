"""The report of a job: JSON for programs, a few lines for people."""

from __future__ import annotations

import errno
import importlib.metadata
import json
import platform
import socket
import time
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchgen._version import __version__
from batchgen.core.digest import json_sha256
from batchgen.core.errors import BatchgenError
from batchgen.core.screen import ProductLost, leave_standard_output, put
from batchgen.core.units import format_bytes, format_seconds
from batchgen.job.files import write_text
from batchgen.job.kernels import kernels_report
from batchgen.job.run_command import run_command
from batchgen.ops.instruction_set import instruction_set
from batchgen.output.result_counts import LENGTH
from batchgen.output.run_directory import Run, errors_path
from batchgen.share.run import SharedRun

_LONG_JOB_S = 60.0  # of a shorter job nobody compares estimates
_LINE_CHARS = 140  # of the line of answers in the summary
_LIMITS = {  # how to raise the limits of tokens, by where these are
    "job": "--max-tokens",
    "rows": "max_tokens of these rows (--max-tokens where they have none)",
    "batch": "max_tokens of these requests (--max-tokens where they have none)",
    "steps": "max-tokens of the step",
}

if TYPE_CHECKING:
    from batchgen.core.plan import Plan
    from batchgen.engine.engine import Engine
    from batchgen.engine.parts import SweepRunner
    from batchgen.job.options import JobOptions
    from batchgen.job.source import RequestSource


@dataclass(frozen=True)
class Origin:
    """The circumstances of a run, for its report.

    Attributes:
        started: Time at which the command started, in the local time zone.
        started_s: Time of time.monotonic at which the command started.
        command: The command line, with credentials hidden.
        model: Name of the model.
        identity: The model's identity (`batchgen.models.identity`); None: it is not known yet.
    """

    started: datetime
    started_s: float
    command: str
    model: str
    identity: dict[str, Any] | None = None

    @classmethod
    def of(cls, options: JobOptions, started_s: float) -> Origin:
        """The circumstances of a run.

        Args:
            options: The job's options, as they were given.
            started_s: Start of the command, of time.monotonic.
        """
        started = datetime.now().astimezone() - timedelta(seconds=time.monotonic() - started_s)
        return cls(started, started_s, run_command(options, skip=frozenset()), options.model)

    def to_json(self) -> dict[str, Any]:
        """The circumstances of a run that ends now, as JSON values."""
        return {
            "started": self.started.isoformat(timespec="seconds"),
            "ended": datetime.now().astimezone().isoformat(timespec="seconds"),
            "host": socket.gethostname(),
            "command": self.command,
            "model": self.model,
            "model_sha256": json_sha256(self.identity),
        }


def versions() -> dict[str, str]:
    """Versions of batchgen and of the packages that decide its results and speed; instruction set of the kernels."""
    packages = {name: importlib.metadata.version(name) for name in ("torch", "tokenizers", "pyarrow")}
    return {"batchgen": __version__, "python": platform.python_version(), "kernels": instruction_set(), **packages}


def write_report(report: dict[str, Any], path: str) -> None:
    """Write a report as JSON, atomically; "-" is standard output, whose reader may have closed it.

    Raises:
        InputError: The file cannot be written.
        BatchgenError: Standard output cannot be written.
    """
    text = json.dumps(report, indent=2, ensure_ascii=False)
    if path == "-":
        try:
            put([text])
        except ProductLost as error:
            leave_standard_output()
            if error.errno != errno.EPIPE:
                raise BatchgenError(
                    f"--report - cannot be written ({error.strerror}): give a file with room for it"
                ) from error
    else:
        write_text(text + "\n", path, "--report")


def make_report(
    options: JobOptions,
    source: RequestSource,
    state: Run | SharedRun,
    engine: Engine | None,
    plan: Plan | None,
    origin: Origin,
    outcome: str,
) -> dict[str, Any]:
    """The report of a run that has ended, as JSON values.

    Numbers of rows are those of the whole output; tokens, times and bytes are those of this run.

    Args:
        options: The job's options.
        source: The job's input.
        state: The job's run directory.
        engine: The job's engine; None: no row was left to run.
        plan: The job's plan; None: no row was left to run.
        origin: Circumstances of the run.
        outcome: "complete", "already complete" or "stopped".
    """
    totals = state.totals or {"rows_ok": state.done_rows.ok, "rows_failed": state.done_rows.failed}
    rows = totals["rows_ok"] + totals["rows_failed"]
    total_rows = rows if outcome != "stopped" else source.dataset.num_rows
    counts = state.result_counts(source.columns)
    return {
        "state": outcome,
        **origin.to_json(),
        "output": str(options.output),
        "errors_output": str(errors_path(Path(str(options.output)))) if source.is_openai else None,
        "output_columns": source.output_names(options),
        "rows": total_rows,
        "rows_ok": totals["rows_ok"],
        "rows_failed": totals["rows_failed"],
        "errors": [asdict(kind) for kind in state.error_kinds()] if totals["rows_failed"] else [],
        "rows_resumed": rows if outcome == "already complete" else state.rows_resumed,
        "rows_left": None if total_rows is None else total_rows - rows,
        "rows_begun": len(state.partials),
        "tokens_begun": sum(partial.num_tokens for partial in state.partials.values()),
        "finish_reasons": dict(counts.finish_reasons),
        "cut_tokens": counts.cut_tokens,
        "answers": [asdict(one) for one in counts.answers],
        "answers_exact": counts.answers_exact,
        "answered": counts.answered,
        "max_tokens": options.sampling.max_tokens,
        "limits_of": _limits_of(options, source),
        **engine_report(engine, plan, time.monotonic() - origin.started_s),
    }


def _limits_of(options: JobOptions, source: RequestSource) -> str:
    """The place of the limits of tokens: a key of `_LIMITS`."""
    if options.steps:
        return "steps"
    if source.is_openai:
        return "batch"
    return "job" if options.sampling_column is None else "rows"


def engine_report(engine: Engine | None, plan: Plan | None, wall_s: float) -> dict[str, Any]:
    """The part of a report about the engine: its work, its predicted time and its machine, as JSON values.

    Times are in seconds, sizes in bytes.

    Args:
        engine: The engine; None: there was nothing to run.
        plan: The engine's plan; None: there was none.
        wall_s: Seconds since the command started.
    """
    from batchgen.engine.parts import EngineStats, process_peaks

    stats = engine.stats if engine else EngineStats()
    tokens = stats.prompt_tokens + stats.generated_tokens
    executor = engine.parts.executor if engine else None
    lanes = {"input": stats.busy_s["input_wait"]}
    if engine:
        lanes |= engine.busy_s
        lanes["compute"] += stats.busy_s["sampling"]
    peaks = process_peaks(executor)
    others = engine.parts.peaks_of_others() if engine else ()
    return {
        "prompt_tokens": stats.prompt_tokens,
        "cached_prompt_tokens": stats.cached_prompt_tokens,
        "generated_tokens": stats.generated_tokens,
        "scored_tokens": stats.scored_tokens,
        "vectors": stats.embedded,
        "drafted_tokens": stats.drafted_tokens,
        "accepted_tokens": stats.accepted_tokens,
        "forced_tokens": stats.forced_tokens,
        "wall_s": wall_s,
        "load_s": engine.parts.load_s if engine else 0.0,
        "generated_tokens_per_s": stats.generated_tokens / wall_s,
        "total_tokens_per_s": tokens / wall_s,
        "predicted_wall_s": plan.prediction.total_s if plan else None,
        "predicted": plan.prediction.to_json() if plan else None,
        "hardware": plan.hardware if plan else None,
        "bottleneck": max(lanes, key=lambda lane: lanes[lane]) if engine else None,
        "peak_bytes": peaks,
        "processes": [{"rank": rank, "peak_bytes": of} for rank, of in enumerate([peaks, *others])],
        "bytes_moved": engine.bytes_moved if engine else {},
        "busy_s": dict(stats.busy_s) | {lane: s for lane, s in lanes.items() if lane not in ("input", "compute")},
        "stalled_s": engine.stalled_s if engine else {},
        "routing": _routing(executor),
        "adaptations": [change.to_json() for change in engine.changes] if engine else [],
        "sweeps": stats.sweeps,
        "preempted": stats.preempted,
        "left_out": stats.left_out,
        "moved": stats.moved,
        "swapped_out": stats.swapped_out,
        "dtype": engine.parts.dtype if engine else None,
        "policy": engine.policy.to_json() if engine else None,
        "memory": engine.parts.memory.to_json() if engine else None,
        "kernels": kernels_report(engine.parts.kernels) if engine else None,
        "versions": versions(),
    }


def _routing(executor: SweepRunner | None) -> dict[str, float] | None:
    """The distribution that was fitted to how many tokens each expert of a layer got, as JSON values; None: unknown."""
    fitted = executor.routing.fitted() if executor else None
    return asdict(fitted) if fitted else None


def dry_run_lines(report: dict[str, Any]) -> list[str]:
    """The lines that `batchgen run --dry-run` prints. report: what `run_job` returns for a dry run."""
    rows = report["rows"]
    asked = f", {report['first_row_asks']}" if report["first_row_asks"] else ""
    columns = f"; it adds {', '.join(report['output_columns'])}" if report["output_columns"] else ""
    return [
        *report["headline"],
        f"model {report['model']} in {report['dtype']}; {'an unknown number of' if rows is None else f'{rows:,}'} rows",
        f"output: {report['output'] or 'standard output'}{columns}",
        f"row {report['first_row']}: {report['first_prompt_tokens']:,} prompt tokens{asked}",
        *report["first_prompt"].split("\n"),
    ]


def summary(report: dict[str, Any]) -> list[str]:
    """The lines that `batchgen run` prints at its end. report: the report of the run."""
    lines = []
    ok, failed, resumed = report["rows_ok"], report["rows_failed"], report["rows_resumed"]
    rows = f"{ok:,} rows ok, {failed:,} failed" + (f", {resumed:,} of them from before" if resumed else "")
    if report["state"] == "already complete":
        lines.append(f"already complete: {rows}; nothing to do (--overwrite runs it again)")
    elif report["state"] == "stopped":
        left = report["rows_left"]
        begun = f", {report['rows_begun']:,} of them begun" if report["rows_begun"] else ""
        rest = "" if left is None else f", {left:,} left"
        lines.append(f"stopped: {rows}{rest}{begun}; the same command goes on from here")
    else:
        predicted = report["predicted_wall_s"]
        said = f" (predicted {format_seconds(predicted)}{_at_first(report)})" if predicted else ""
        lines.append(f"done in {format_seconds(report['wall_s'])}{said}: {rows}")
    stepped = report["limits_of"] == "steps"
    if cached := report.get("rows_cached"):
        of_rows = "answers" if stepped else f"of {ok + failed - resumed:,} rows"
        lines.append(f"{cached:,} {of_rows} from the cache")
    if repeated := report.get("rows_repeated"):
        lines.append(f"{repeated:,} {'prompts' if stepped else 'rows'} repeat others and were not computed again")
    if report["prompt_tokens"]:
        cached = report["cached_prompt_tokens"]
        shared = f" ({cached / report['prompt_tokens']:.0%} from shared prefixes)" if cached else ""
        if report["vectors"]:
            made, rate = f"{report['vectors']:,} vectors", ""
        elif report["scored_tokens"]:
            made, rate = f"{report['scored_tokens']:,} of them scored", ""
        else:
            made = f"{report['generated_tokens']:,} generated"
            rate = f" ({report['generated_tokens_per_s']:,.1f} generated/s)"
        lines.append(
            f"{report['prompt_tokens']:,} prompt tokens{shared}, {made}:"
            f" {report['total_tokens_per_s']:,.0f} tokens/s{rate};"
            f" peak memory {format_bytes(report['peak_bytes']['cpu'])}"
        )
        lines += _other_processes(report["processes"])
    lines += result_lines(report)
    lines += [f"{kind['rows']:,} failed: {kind['error']}" for kind in report["errors"]]
    if failed and report["state"] != "stopped":
        # The last step's column has the errors of earlier steps too.
        error = next((name for name in reversed(report["output_columns"]) if name.endswith("error")), "error")
        place = report.get("errors_output") or f"the {error} column"
        lines.append(f"{place} tells why rows failed; --retry-failed runs just those again")
    lines.append(_origin_line(report))
    if report["state"] != "stopped":
        lines.append(
            f"output: {report['output']}" + (f", {report['errors_output']}" if report.get("errors_output") else "")
        )
    return lines


def result_lines(report: dict[str, Any]) -> list[str]:
    """Lines about the results: how texts ended, and the most frequent short answers.

    Args:
        report: The report of a run.
    """
    lines = []
    reasons, total = report["finish_reasons"], sum(report["finish_reasons"].values())
    if cut := reasons.get(LENGTH):
        fewest, most = report["cut_tokens"]
        at = f"{most:,}" if fewest == most else f"{fewest:,} to {most:,}"
        limit = _LIMITS[report.get("limits_of", "job")]
        lines.append(f"{cut:,} of {total:,} answers were cut at {at} tokens: raise {limit} for whole ones")
    others = [f"{count:,} {reason}" for reason, count in reasons.items() if reason not in (LENGTH, "stop")]
    if others:
        lines.append(f"other ends of answers: {', '.join(others)}")
    if report["answers"]:
        about = "" if report["answers_exact"] else "at least "
        answered = report["answered"]
        line, rest = "answers: ", answered
        for one in report["answers"]:
            item = f"{one['answer']!r} {about}{one['count']:,}, "
            if len(line) + len(item) > _LINE_CHARS and rest < answered:
                break
            line, rest = line + item, rest - one["count"]
        end = f"others {rest:,}" if rest and report["answers_exact"] else ""
        lines.append((line + end).removesuffix(", "))
    return lines


def _origin_line(report: dict[str, Any]) -> str:
    """The line with the time, the host, the version and the model of a run."""
    started, ended = (datetime.fromisoformat(report[name]) for name in ("started", "ended"))
    until = ended.strftime("%H:%M:%S" if ended.date() == started.date() else "%Y-%m-%d %H:%M:%S")
    return (
        f"{started:%Y-%m-%d %H:%M:%S} to {until} {ended:%Z} on {report['host']}, batchgen"
        f" {report['versions']['batchgen']}, model {report['model']} ({report['model_sha256'][:12]})"
    )


def _other_processes(processes: list[dict[str, Any]]) -> list[str]:
    """A line with the peak memory of each process, where there are several."""
    if len(processes) == 1:
        return []
    peaks = [(p["peak_bytes"] and format_bytes(p["peak_bytes"]["cpu"])) or "unknown" for p in processes]
    return [f"peak memory of the {len(processes)} processes, rank 0 first: {', '.join(peaks)}"]


def _at_first(report: dict[str, Any]) -> str:
    """Text with the time that was predicted near the start of a job of a minute or more, when its speed was seen."""
    estimated_s = report.get("estimated_wall_s")
    if estimated_s is None or report["wall_s"] < _LONG_JOB_S:
        return ""
    return f", {format_seconds(estimated_s)} when 3% of it was done"
