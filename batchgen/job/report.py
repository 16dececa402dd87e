"""The report of a job: JSON for programs, a few lines for people."""

from __future__ import annotations

import errno
import importlib.metadata
import json
import platform
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchgen._version import __version__
from batchgen.core.errors import BatchgenError
from batchgen.core.screen import ProductLost, leave_standard_output, put
from batchgen.core.units import format_bytes, format_seconds
from batchgen.job.files import write_text
from batchgen.job.kernels import kernels_report
from batchgen.ops.instruction_set import instruction_set
from batchgen.output.run_directory import Run, errors_path
from batchgen.share.run import SharedRun

if TYPE_CHECKING:
    from batchgen.core.plan import Plan
    from batchgen.engine.engine import Engine
    from batchgen.engine.parts import SweepRunner
    from batchgen.job.options import JobOptions
    from batchgen.job.source import RequestSource


def versions() -> dict[str, str]:
    """Versions of batchgen and of the packages that decide its results and speed; instruction set of the kernels."""
    packages = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "pyarrow")}
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
    started_s: float,
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
        started_s: Start of the command, of time.monotonic.
        outcome: "complete", "already complete" or "stopped".
    """
    totals = state.totals or {"rows_ok": state.done_rows.ok, "rows_failed": state.done_rows.failed}
    rows = totals["rows_ok"] + totals["rows_failed"]
    total_rows = rows if outcome != "stopped" else source.dataset.num_rows
    return {
        "state": outcome,
        "output": str(options.output),
        "errors_output": str(errors_path(Path(str(options.output)))) if source.is_openai else None,
        "output_columns": source.output_names(options),
        "rows": total_rows,
        "rows_ok": totals["rows_ok"],
        "rows_failed": totals["rows_failed"],
        "errors": [asdict(kind) for kind in state.error_kinds()] if totals["rows_failed"] else [],
        "rows_resumed": rows if outcome == "already complete" else state.rows_resumed,
        "rows_left": None if total_rows is None else total_rows - rows,
        **engine_report(engine, plan, time.monotonic() - started_s),
    }


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
    if executor:
        lanes |= executor.busy_s
        lanes["compute"] += stats.busy_s["sampling"]
    peaks = process_peaks(executor)
    others = engine.parts.peaks_of_others() if engine else ()
    return {
        "prompt_tokens": stats.prompt_tokens,
        "cached_prompt_tokens": stats.cached_prompt_tokens,
        "generated_tokens": stats.generated_tokens,
        "scored_tokens": stats.scored_tokens,
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
        "bytes_moved": executor.bytes_moved if executor else {},
        "busy_s": dict(stats.busy_s) | {lane: s for lane, s in lanes.items() if lane not in ("input", "compute")},
        "stalled_s": executor.stalled_s if executor else {},
        "routing": _routing(executor),
        "adaptations": [change.to_json() for change in engine.changes] if engine else [],
        "sweeps": stats.sweeps,
        "preempted": stats.preempted,
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
        lines.append(f"stopped: {rows}, {left:,} left; the same command goes on from here")
    else:
        predicted = report["predicted_wall_s"]
        said = f" (predicted {format_seconds(predicted)}{_at_first(report)})" if predicted else ""
        lines.append(f"done in {format_seconds(report['wall_s'])}{said}: {rows}")
    if repeated := report.get("rows_repeated"):
        lines.append(f"{repeated:,} rows repeat others and were not computed again")
    if report["prompt_tokens"]:
        cached = report["cached_prompt_tokens"]
        shared = f" ({cached / report['prompt_tokens']:.0%} from shared prefixes)" if cached else ""
        if report["scored_tokens"]:
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
    lines += [f"{kind['rows']:,} failed: {kind['error']}" for kind in report["errors"]]
    if failed and report["state"] != "stopped":
        error = next((name for name in report["output_columns"] if name.endswith("error")), "error")
        lines.append(f"the {error} column tells why rows failed; --retry-failed runs just those again")
    if report["state"] != "stopped":
        lines.append(
            f"output: {report['output']}" + (f", {report['errors_output']}" if report.get("errors_output") else "")
        )
    return lines


def _other_processes(processes: list[dict[str, Any]]) -> list[str]:
    """A line with the peak memory of each process, where there are several."""
    if len(processes) == 1:
        return []
    peaks = [(p["peak_bytes"] and format_bytes(p["peak_bytes"]["cpu"])) or "unknown" for p in processes]
    return [f"peak memory of the {len(processes)} processes, rank 0 first: {', '.join(peaks)}"]


def _at_first(report: dict[str, Any]) -> str:
    """Text with the time that was predicted for the job near its start."""
    estimated_s = report.get("estimated_wall_s")
    return "" if estimated_s is None else f", {format_seconds(estimated_s)} when 3% were through"
