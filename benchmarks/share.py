"""Workers on one output, killed, suspended past the lease and replaced at random.

The output equals an undisturbed worker's.

    python benchmarks/share.py                                # 8 processes, 60 kills, 20 suspensions
    python benchmarks/share.py --kills 5 --suspensions 2

Rows are made from their numbers instead of by a model, with pauses: what is tested is who writes what.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from recording import result_path, write

from batchgen.job.status import output_status
from batchgen.output.manifest import Manifest
from batchgen.output.run_directory import run_directory

SUPPORT = Path(__file__).parents[1] / "tests" / "support"
WORKER = SUPPORT / "shared_worker.py"
_LIMIT_S = 300.0  # a worker that takes longer than this after the last disturbance hangs


def start(output: Path, args: argparse.Namespace, seed: int, log: Path) -> subprocess.Popen:
    """Starts a worker, whose output goes to `log`."""
    command = [sys.executable, WORKER, output, args.rows, seed, args.pause, args.lease]
    with log.open("w") as file:
        return subprocess.Popen([str(part) for part in command], stdout=file, stderr=subprocess.STDOUT)


def saved_rows(output: Path) -> int:
    """The rows that all workers have saved."""
    held = Manifest.read(run_directory(output) / "manifest.json")
    if held is None:
        return 0
    found = output_status(output, sleep=lambda seconds: None)
    return found["rows_ok"] + found["rows_failed"]


def disturb(output: Path, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Runs a job with kills, suspensions and new workers, spread over its rows.

    Raises:
        SystemExit: a worker fails or hangs.
    """
    draw = random.Random(args.seed)
    events = ["kill"] * args.kills + ["suspend"] * args.suspensions
    draw.shuffle(events)
    moments = sorted(draw.uniform(0.02, 0.85) * args.rows for _ in events)  # rows saved
    started_s, seeds = time.monotonic(), iter(range(10**6))
    logs: list[Path] = []

    def worker() -> subprocess.Popen:
        seed = next(seeds)
        logs.append(folder / f"log-{seed}")
        return start(output, args, seed, logs[-1])

    workers = [worker() for _ in range(args.workers)]
    for what, rows in zip(events, moments, strict=True):
        while saved_rows(output) < rows:
            time.sleep(0.05)
        victim = draw.choice(workers)
        if what == "kill":
            victim.kill()
            victim.wait()
            workers.remove(victim)
            workers.append(worker())
        else:
            os.kill(victim.pid, signal.SIGSTOP)
            threading.Timer(draw.uniform(1.5, 3) * args.lease, _go_on, (victim,)).start()

    for process in workers:
        if process.wait(_LIMIT_S) != 0:
            raise SystemExit(f"a worker ended with {process.returncode}")
    ran = sum(int(line.split()[1]) for log in logs for line in log.read_text().splitlines() if line.startswith("rows "))
    return {
        "kills": events.count("kill"),
        "suspensions": events.count("suspend"),
        "workers_started": len(logs),
        "wall_s": time.monotonic() - started_s,
        "rows_run_by_those_that_ended": ran,
    }


def _go_on(process: subprocess.Popen) -> None:
    if process.poll() is None:
        os.kill(process.pid, signal.SIGCONT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--suspensions", type=int, default=20)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--pause", type=float, default=0.02, help="seconds, after every fifth row")
    parser.add_argument("--lease", type=float, default=3.0, help="seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=result_path("share"))
    args = parser.parse_args()
    sys.path.insert(0, str(SUPPORT))
    from fake_rows import FakeDataset, expected_rows, result_of

    with tempfile.TemporaryDirectory(prefix="batchgen-share-") as folder:
        output = Path(folder) / "out.parquet"
        found = disturb(output, args, Path(folder))
        rows = pq.read_table(output).to_pylist()
        expected = expected_rows(FakeDataset(args.rows), lambda row: result_of(row, fail_every=13))
        found |= {"rows": len(rows), "rows_that_differ": sum(a != b for a, b in zip(rows, expected, strict=True))}
    record = {"seed": args.seed, "workers": args.workers, "lease_s": args.lease, **found}
    write(args.output, record)
    print(json.dumps(record))


if __name__ == "__main__":
    main()
