"""What a person waits for who runs a first job: the command of `make quickstart` on a machine that was never measured.

Seconds from the start of the process to its first line on a terminal, what measuring took, and to the first finished row, under a
memory limit of 3 GiB; then the same once more, on the machine that is measured now. The demo model is there already: fetching it
takes what the network takes. Needs root and the memory controller of cgroups version 1, and idle cores.

    python benchmarks/first_minutes.py --repeats 2
"""

from __future__ import annotations

import argparse
import json
import os
import pty
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from soak import LIMIT_BYTES, RESULTS, memory_group

from batchgen.core.machine import cpu_name
from batchgen.models.files import resolve_model
from batchgen.ops.instruction_set import instruction_set

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "recipes" / "data_wrangling" / "fodors_zagats" / "job.toml"
LIMIT_S = 300.0


def first_row(folder: Path, cache: Path) -> dict[str, Any]:
    """Run the job in an empty folder until a row of it is finished. Raises SystemExit where it ends before."""
    output = folder / "out.parquet"
    command = [Path(sys.executable).parent / "batchgen", "run", "--config", RECIPE, "--output", output, "--overwrite"]
    ours, theirs = pty.openpty()
    lines: list[tuple[float, str]] = []
    started_s = time.monotonic()
    process = subprocess.Popen(
        [*command, "--flush-interval", "0.1s"], stdout=theirs, stderr=theirs, stdin=subprocess.DEVNULL, cwd=ROOT,
        env={**os.environ, "BATCHGEN_CACHE": str(cache)},
    )  # fmt: skip
    os.close(theirs)
    reader = threading.Thread(target=_note_lines, args=(ours, started_s, lines))
    reader.start()
    parts = folder / "out.parquet.batchgen" / "parts"
    while process.poll() is None and not list(parts.glob("*.parquet")):
        time.sleep(0.02)
        if time.monotonic() - started_s > LIMIT_S:
            process.kill()
    seconds, ended = time.monotonic() - started_s, process.poll() is not None
    process.terminate()
    process.wait()
    reader.join()
    if ended or seconds > LIMIT_S:
        raise SystemExit("no row was finished: " + " | ".join(line for _, line in lines))
    measuring = [at_s for at_s, line in lines if line.startswith("measuring")]
    planned_s = next(at_s for at_s, line in lines if line.startswith("plan:"))
    return {
        "first_line_s": round(lines[0][0], 2),
        "measuring_s": round(planned_s - measuring[0], 1) if measuring else 0.0,
        "plan_s": round(planned_s, 1),
        "first_row_s": round(seconds, 1),
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


def main() -> None:
    """Write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--output", type=Path, default=RESULTS / "first_minutes.json")
    args = parser.parse_args()
    demo = resolve_model("demo").path
    never, again = [], []
    with memory_group(LIMIT_BYTES) as group:
        for _ in range(args.repeats):
            with tempfile.TemporaryDirectory(prefix="batchgen-first-") as name:
                cache = Path(name, "cache")
                cache.mkdir()
                (cache / demo.name).symlink_to(demo)
                for found in (never, again):
                    found.append(first_row(Path(tempfile.mkdtemp(dir=name)), cache))
                    print(json.dumps(found[-1]), file=sys.stderr)
        most_bytes = int((group / "memory.max_usage_in_bytes").read_text())
    result = {
        "machine": {"cpu": cpu_name(), "cores": os.cpu_count(), "kernels": instruction_set()},
        "limit_bytes": LIMIT_BYTES,
        "most_bytes_in_group": most_bytes,
        "never_measured": never,
        "measured_before": again,
    }
    args.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
