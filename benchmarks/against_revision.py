"""This checkout against another one of batchgen: whether tokens are equal, and ratios of times, of the same jobs.

    python benchmarks/against_revision.py --other ../batchgen-before --rounds 12

Both need an environment in `.venv` with their kernels built. Three processes hold an engine of the demo model each:
this checkout, the other one, and this one again, which shows how far apart equal programs are measured. They run the
same rows one after the other, in an order that changes; only generating counts, in wall time and in CPU time of all
threads. Jobs: `fixed` (random prompts of 512 tokens, 32 out), and `match` (the quickstart's prompts, which begin
alike).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Runs in either checkout, so it uses nothing but what both export. A line in: the job's rows; a line out: what it took.
_RUN = """
import json, sys, time
import batchgen
options = json.loads(sys.stdin.readline())
with batchgen.Engine("demo", cpu_memory="3GiB", **options) as engine:
    for line in sys.stdin:
        rows = json.loads(line)
        requests = [batchgen.Request(ids, batchgen.SamplingParams(max_tokens=n, ignore_eos=True)) for ids, n in rows]
        wall, cpu = time.perf_counter(), time.process_time()
        done = {c.index: c.samples[0].token_ids for c in engine.generate(requests)}
        took = [time.perf_counter() - wall, time.process_time() - cpu]
        print(json.dumps([*took, [list(done[i]) for i in range(len(requests))]]), flush=True)
"""


class Worker:
    """A process of one checkout that holds an engine."""

    def __init__(self, checkout: Path, options: dict) -> None:
        self._process = subprocess.Popen(
            [checkout / ".venv" / "bin" / "python", "-c", _RUN],
            cwd=checkout,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._send(options)

    def _send(self, value: object) -> None:
        self._process.stdin.write(json.dumps(value) + "\n")
        self._process.stdin.flush()

    def run(self, rows: list) -> tuple[float, float, list[list[int]]]:
        """Wall seconds, CPU seconds and tokens of a job."""
        self._send(rows)
        line = self._process.stdout.readline()
        if not line:
            sys.exit("a checkout's process ended")
        return tuple(json.loads(line))

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()


def revision(checkout: Path) -> str:
    return subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=checkout, capture_output=True, text=True, check=True
    ).stdout.strip()


def compare(workers: dict[str, Worker], rows: list, rounds: int) -> dict:
    """Medians of the ratios within rounds, in which all workers take turns; a first round does not count."""
    wall, cpu = {side: [] for side in workers}, {side: [] for side in workers}
    tokens = []
    sides = list(workers)
    for turn in range(-1, rounds):
        shift = turn % len(sides)
        for side in sides[shift:] + sides[:shift]:
            taken, computed, made = workers[side].run(rows)
            tokens.append(made)
            if turn >= 0:
                wall[side].append(round(taken, 3))
                cpu[side].append(round(computed, 3))

    def ratio(of: dict[str, list[float]], side: str, beside: str) -> float:
        return round(statistics.median(a / b for a, b in zip(of[side], of[beside], strict=True)), 4)

    return {
        "rows": len(rows),
        "wall_seconds": wall,
        "cpu_seconds": cpu,
        "wall_ratio": ratio(wall, "here", "other"),
        "cpu_ratio": ratio(cpu, "here", "other"),
        "control_wall_ratio": ratio(wall, "here", "again"),
        "control_cpu_ratio": ratio(cpu, "here", "again"),
        "tokens_equal": all(made == tokens[0] for made in tokens),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--other", type=Path, required=True, help="the other checkout")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--rows", type=int, default=6, help="of each job")
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from peers.workloads import WORKLOADS

    from batchgen.core.machine import cpu_name
    from batchgen.models.files import read_config, resolve_model

    vocab = read_config(resolve_model("demo")).vocab_size
    checkouts = {"here": ROOT, "other": args.other.resolve(), "again": ROOT}
    result = {"cpu": cpu_name(), "date": time.strftime("%Y-%m-%d"), "dtype": args.dtype, "jobs": {}}
    result["revisions"] = {name: revision(path) for name, path in checkouts.items() if name != "again"}
    for name in ("fixed", "match"):
        work = WORKLOADS[name]("demo", vocab, args.rows)
        options = {"dtype": args.dtype, "share_prefixes": work.share_prefixes}
        workers = {side: Worker(path, options) for side, path in checkouts.items()}
        result["jobs"][name] = compared = compare(workers, work.rows, args.rounds)
        for worker in workers.values():
            worker.close()
        print(name, {key: value for key, value in compared.items() if not key.endswith("seconds")}, flush=True)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
