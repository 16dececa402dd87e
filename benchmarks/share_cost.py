"""What sharing an output costs, and what a second worker brings: real jobs of the demo model, side by side, several rounds in turn.

    python benchmarks/share_cost.py                          # three rounds, 20 minutes on two cores
    python benchmarks/share_cost.py --rounds 1 --rows 40     # a try

A round has five cases with one plan, so that nothing is measured or planned anew in any of them:

    alone       one process on the first two cores
    shared      the same command with --share
    one         one worker with --share on the first core
    two         two workers with --share, each with a core of its own
    shards      two processes with --shard on these cores, which know nothing of each other: what the machine allows

Times are those of whole commands: start, loading, rows and the join. The CPU time that a case took, in which waiting is nothing, is beside them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from batchgen.core.machine import cpu_name

RESULTS = Path(__file__).parent / "results"
_WORDS = [
    "river",
    "stone",
    "market",
    "window",
    "paper",
    "garden",
    "silver",
    "morning",
    "bridge",
    "letter",
    "orange",
    "winter",
    "engine",
    "table",
    "forest",
]


def write_rows(path: Path, rows: int, words: int, seed: int) -> None:
    """Prompts that begin differently: none takes over a prefix of another."""
    draw = random.Random(seed)
    prompts = [f"{i} " + " ".join(draw.choices(_WORDS, k=words)) for i in range(rows)]
    pq.write_table(pa.table({"prompt": prompts}), path)


def run(commands: list[tuple[str, list[str]]], folder: Path) -> dict[str, float]:
    """Run commands at the same time, each on its own cores; returns the wall time until all have ended and their CPU time, in seconds."""
    started_s = time.monotonic()
    processes = []
    for number, (cores, command) in enumerate(commands):
        with (folder / f"log-{number}").open("w") as log:
            pinned = ["taskset", "--cpu-list", cores, *command]
            processes.append(subprocess.Popen(pinned, stdout=log, stderr=subprocess.STDOUT))
    cpu_s = 0.0
    for number, process in enumerate(processes):
        _, status, usage = os.wait4(process.pid, 0)
        if (code := os.waitstatus_to_exitcode(status)) != 0:
            raise SystemExit(f"a command ended with {code}:\n{(folder / f'log-{number}').read_text()[-2000:]}")
        cpu_s += usage.ru_utime + usage.ru_stime
    return {"wall_s": time.monotonic() - started_s, "cpu_s": cpu_s}


def cases(args: argparse.Namespace, folder: Path, plans: dict[str, Path]) -> dict[str, list[tuple[str, list[str]]]]:
    """The commands of each case, with the cores that they run on."""

    def command(cores: str, output: str, *more: str) -> tuple[str, list[str]]:
        job = [
            *job_of(args, folder),
            "--output",
            str(folder / output),
            "--plan",
            str(plans[cores]),
            "--progress",
            "none",
        ]
        return cores, [
            sys.executable,
            "-m",
            "batchgen",
            "run",
            *job,
            *more,
            "--report",
            str(folder / f"{output}.{cores}.json"),
        ]

    both, first, second = args.cores, *args.cores.split(",")
    plans[second] = plans[first]
    return {
        "alone": [command(both, "alone.parquet")],
        "shared": [command(both, "shared.parquet", "--share")],
        "one": [command(first, "one.parquet", "--share")],
        "two": [command(core, "two.parquet", "--share") for core in (first, second)],
        "shards": [command(core, f"shard{i}.parquet", "--shard", f"{i}/2") for i, core in enumerate((first, second))],
    }


def job_of(args: argparse.Namespace, folder: Path) -> list[str]:
    """What decides rows, and memory."""
    options = ["--model", args.model, "--input", str(folder / "in.parquet"), "--dtype", "float32", "--ignore-eos"]
    return [*options, "--max-tokens", str(args.output_len), "--cpu-memory", "3GiB"]


def plan(args: argparse.Namespace, folder: Path, cores: str) -> Path:
    """The plan of a process on these cores, measured there."""
    path = folder / f"plan-{cores}.json"
    command = [sys.executable, "-m", "batchgen", "plan", *job_of(args, folder), "--max-num-seqs", str(args.seqs)]
    command += ["-o", str(path), "--progress", "none"]
    subprocess.run(["taskset", "--cpu-list", cores, *command], check=True, stdout=subprocess.DEVNULL)
    return path


def of_reports(folder: Path, output: str) -> dict[str, float]:
    """Sums over the workers of a case, in seconds: loading the model, sweeps, and waiting for rows."""
    reports = [json.loads(path.read_text()) for path in sorted(folder.glob(f"{output}*.json"))]
    busy = [report["busy_s"] for report in reports]
    return {
        "load_s": sum(report["load_s"] for report in reports),
        "sweeps_s": sum(s["compute"] + s["sampling"] for s in busy),
        "input_wait_s": sum(s["input_wait"] for s in busy),
    }


def equal(folder: Path) -> bool:
    """Whether all cases have made the same rows."""
    whole = pq.read_table(folder / "alone.parquet")
    shards = pa.concat_tables(pq.read_table(folder / f"shard{i}.parquet") for i in (0, 1))
    others = [pq.read_table(folder / f"{name}.parquet") for name in ("shared", "one", "two")]
    return all(whole.to_pylist() == other.to_pylist() for other in (*others, shards))


def compare(rounds: list[dict[str, dict[str, float]]]) -> dict[str, Any]:
    """Medians over rounds of the ratios within each."""

    def ratio(a: str, b: str, of: str = "wall_s") -> float:
        return round(statistics.median(r[a][of] / r[b][of] for r in rounds), 4)

    return {
        "shared_over_alone": ratio("shared", "alone"),
        "shared_over_alone_cpu": ratio("shared", "alone", "cpu_s"),
        "one_over_two": ratio("one", "two"),
        "two_over_shards": ratio("two", "shards"),
        "two_over_one_cpu": ratio("two", "one", "cpu_s"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rows", type=int, default=600)
    parser.add_argument("--words", type=int, default=60, help="of a prompt")
    parser.add_argument("--output-len", type=int, default=32)
    parser.add_argument("--seqs", type=int, default=64, help="samples in flight")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cores", default="0,1", help="two of them")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=RESULTS / "share_cost.json")
    args = parser.parse_args()
    rounds: list[dict[str, dict[str, float]]] = []
    with tempfile.TemporaryDirectory(prefix="batchgen-share-") as name:
        folder = Path(name)
        write_rows(folder / "in.parquet", args.rows, args.words, args.seed)
        plans = {cores: plan(args, folder, cores) for cores in (args.cores, args.cores.split(",")[0])}
        order = list(cases(args, folder, plans))
        for number in range(args.rounds):
            place = folder / f"round-{number}"
            place.mkdir()
            (place / "in.parquet").symlink_to(folder / "in.parquet")
            found = {}
            commands = cases(args, place, plans)
            for case in order:
                output = "shard" if case == "shards" else case
                found[case] = run(commands[case], place) | of_reports(place, output)
                print(case, json.dumps(found[case]), flush=True)
            if not equal(place):
                raise SystemExit("the outputs differ")
            rounds.append(found)
            order.reverse()  # what drifts with time meets each side alike
    machine = {"cpu": cpu_name(), "cores": os.cpu_count(), "python": platform.python_version()}
    settings = {name: getattr(args, name) for name in ("model", "rows", "words", "output_len", "seqs", "cores", "seed")}
    record = {"machine": machine, **settings, **compare(rounds), "rounds": rounds}
    args.output.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps({name: value for name, value in record.items() if name != "rounds"}))


if __name__ == "__main__":
    main()
