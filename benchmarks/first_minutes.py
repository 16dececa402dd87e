"""Seconds that a person waits for in first jobs: on a machine never seen and on a known one, idle and busy.

For each job: seconds from the start of the process to the first line on its screen, seconds of measuring, seconds to
the first finished row, and to the end. Each series begins with an empty cache, in which only the demo model is, and
has three jobs in a row. A busy machine has two loops beside it that compute nothing of use.

    python benchmarks/first_minutes.py
    python benchmarks/first_minutes.py --only "four rows" --machines busy
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pty
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from recording import result_path, write

from batchgen.models.files import resolve_model

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "recipes" / "data_wrangling" / "fodors_zagats" / "job.toml"
BATCHGEN = Path(sys.executable).with_name("batchgen")
IN_A_ROW = 3
LIMIT_S = 600.0
LOOPS = 2
PROMPTS = ("The capital of France is", "Two plus two is", "Water boils at", "A cat is")
FORMATS = {
    "bfloat16": ("--dtype", "bfloat16", "--weights", "dequantized"),
    "float16": ("--dtype", "float16"),
    "float32": ("--dtype", "float32"),
    "int8": ("--weights", "int8"),
    "int4": ("--weights", "int4"),
}
_MEASURED = re.compile(r"measured this machine for ([\d.]+) s")
_PREDICTED = re.compile(r"predicted: .*")


def jobs(folder: Path) -> dict[str, list[str]]:
    """Name -> arguments of `batchgen run`."""
    rows = folder / "four.jsonl"
    rows.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    four = ["--model", "demo", "--input", str(rows), "--max-tokens", "16"]
    return (
        {"four rows": four}
        | {f"four rows, {name}": [*four, *options] for name, options in FORMATS.items()}
        | {"quickstart": ["--config", str(RECIPE)]}
    )


def run(arguments: list[str], folder: Path, cache: Path) -> dict[str, Any]:
    """Run a job on a terminal; returns its seconds. Raises SystemExit where it fails."""
    output = folder / "out.parquet"
    ours, theirs = pty.openpty()
    lines: list[tuple[float, str]] = []
    environment = {**os.environ, "BATCHGEN_CACHE": str(cache), "BATCHGEN_LOG": "DEBUG"}
    environment.pop("BATCHGEN_HARDWARE", None)
    started_s = time.monotonic()
    process = subprocess.Popen(
        [BATCHGEN, "run", *arguments, "--output", output, "--flush-interval", "0.1s"],
        stdout=theirs, stderr=theirs, stdin=subprocess.DEVNULL, cwd=ROOT, env=environment,
    )  # fmt: skip
    os.close(theirs)
    reader = threading.Thread(target=_note_lines, args=(ours, started_s, lines))
    reader.start()
    parts, first_row_s = Path(f"{output}.batchgen") / "parts", None
    while process.poll() is None:
        if first_row_s is None and (output.exists() or any(parts.glob("*.parquet"))):
            first_row_s = time.monotonic() - started_s
        time.sleep(0.01)
        if time.monotonic() - started_s > LIMIT_S:
            process.kill()
    total_s = time.monotonic() - started_s
    reader.join()
    said = [line for _, line in lines]
    if process.returncode:
        raise SystemExit("a job failed: " + " | ".join(said))
    measured = [float(match[1]) for line in said if (match := _MEASURED.search(line))]
    predicted = [match[0] for line in said if (match := _PREDICTED.search(line))]
    return {
        "first_line_s": round(lines[0][0], 2),
        "measuring_s": round(sum(measured), 2),
        "first_row_s": round(first_row_s or total_s, 2),
        "total_s": round(total_s, 2),
        "predicted": predicted[0] if predicted else "",
    }


def _note_lines(terminal: int, started_s: float, lines: list[tuple[float, str]]) -> None:
    """Add (seconds since the start, line) of all that a terminal is given."""
    text = ""
    while True:
        try:
            data = os.read(terminal, 4096)
        except OSError:  # the last process that had it has ended
            data = b""
        if not data:
            os.close(terminal)
            return
        at_s = time.monotonic() - started_s
        *whole, text = re.split(r"[\r\n]+", text + data.decode(errors="replace"))
        for line in whole:
            if plain := re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line).strip():
                lines.append((at_s, plain))


@contextlib.contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Have so many processes compute beside the block."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def main() -> None:
    """Write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", help="just these jobs; may be repeated")
    parser.add_argument("--machines", nargs="+", default=["idle", "busy"], choices=["idle", "busy"])
    parser.add_argument("--output", type=Path, default=result_path("first_minutes"))
    args = parser.parse_args()
    demo = resolve_model("demo").path
    results: dict[str, dict[str, list[dict[str, Any]]]] = {}
    with tempfile.TemporaryDirectory(prefix="batchgen-first-") as name:
        folder = Path(name)
        for state in args.machines:
            for job, arguments in jobs(folder).items():
                if args.only and job not in args.only:
                    continue
                cache = Path(tempfile.mkdtemp(dir=folder))
                (cache / demo.name).symlink_to(demo)
                series = results.setdefault(state, {}).setdefault(job, [])
                with busy_loops(LOOPS if state == "busy" else 0):
                    for _ in range(IN_A_ROW):
                        series.append(run(arguments, Path(tempfile.mkdtemp(dir=folder)), cache))
                        print(state, job, json.dumps(series[-1]), flush=True)
    write(args.output, {"busy_loops": LOOPS, "jobs": results})


if __name__ == "__main__":
    main()
