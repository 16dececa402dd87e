"""The account of a finished job: JSON for programs, a few lines for people."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
from pathlib import Path

from batchgen._version import __version__
from batchgen.errors import InputError
from batchgen.units import format_bytes, format_seconds


def versions() -> dict[str, str]:
    """Versions of batchgen and of what decides its results and speed."""
    packages = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "pyarrow")}
    return {"batchgen": __version__, "python": platform.python_version(), **packages}


def check_report_path(path: str | None) -> None:
    """Raises InputError now rather than after hours of work."""
    if path and (Path(path).is_dir() or not os.access(Path(path).absolute().parent, os.W_OK)):
        raise InputError(f"--report {path} cannot be written: give a file in a directory that exists")


def write_report(report: dict, path: str) -> None:
    """Writes JSON, whole or not at all; "-" is stdout."""
    text = json.dumps(report, indent=2, ensure_ascii=False) + "\n"
    if path == "-":
        sys.stdout.write(text)
        return
    temporary = Path(f"{path}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text)
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise InputError(f"--report {path} cannot be written: {error.strerror}") from error


def summary(report: dict) -> list[str]:
    """The closing lines for a person."""
    lines = []
    ok, failed, resumed = report["rows_ok"], report["rows_failed"], report["rows_resumed"]
    rows = f"{ok:,} rows ok, {failed:,} failed" + (f", {resumed:,} of them from before" if resumed else "")
    if report["state"] == "already complete":
        lines.append(f"already complete: {rows}; nothing to do (--overwrite runs it again)")
    elif report["state"] == "stopped":
        left = report["rows_left"]
        lines.append(f"stopped: {rows}, {left:,} left; the same command goes on from here")
    else:
        lines.append(f"done in {format_seconds(report['wall_s'])}: {rows}")
    if report["generated_tokens"]:
        cached = report["cached_prompt_tokens"]
        share = f" ({cached / report['prompt_tokens']:.0%} from shared prefixes)" if cached else ""
        lines.append(
            f"{report['prompt_tokens']:,} prompt tokens{share}, {report['generated_tokens']:,} generated:"
            f" {report['total_tokens_per_s']:,.0f} tokens/s ({report['generated_tokens_per_s']:,.1f} generated/s);"
            f" peak memory {format_bytes(report['peak_bytes']['cpu'])}"
        )
    if report.get("first_error"):
        lines.append(f"first failed row: {report['first_error']}")
    if failed and report["state"] != "stopped":
        lines.append("the error column tells why rows failed; --retry-failed runs just those again")
    if report["state"] != "stopped":
        lines.append(
            f"output: {report['output']}" + (f", {report['errors_output']}" if report.get("errors_output") else "")
        )
    return lines
