"""A job that streams its weights, with output lengths of the Azure trace: this checkout against one of before.

A sweep then takes as long with few rows as with many, so what counts is the number of sweeps. There are ten times as
many rows as in flight. Each run is a process of its own, and the checkouts take turns; the time is that of `batchgen
run`, whole. The least possible number of sweeps is all tokens over the rows in flight.

    python benchmarks/length_order.py --other ../batchgen-before
    python benchmarks/length_order.py --counts    only count sweeps, for several sizes

With `--counts` layers compute nothing: this checkout's engine has rows in the order of their prompts, and then the
longest first. Where each sweep takes as long as bringing the weights, the seconds of a job are as its sweeps.
"""

from __future__ import annotations

import argparse
import csv
import heapq
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from peers.workloads import AZURE_SAMPLE
from recording import result_path, write
from torch import Tensor

from batchgen.core.request import Request, SamplingParams
from batchgen.engine.engine import Engine

ROOT = Path(__file__).resolve().parents[1]
_RUN_LIMIT_S = 3600


def lengths_of(path: Path, rows: int, divisor: int) -> list[int]:
    """Output lengths of rows drawn from a trace, divided, so that a run does not take hours."""
    with path.open() as file:
        trace = [int(row["GeneratedTokens"]) for row in csv.DictReader(file)]
    return [max(1, length // divisor) for length in random.Random(0).choices(trace, k=rows)]


def sweeps(lengths: Iterable[int], seqs: int) -> int:
    """Sweeps until all rows have ended, if they start in this order and each takes a place that is free."""
    ends = [0] * seqs
    for length in lengths:
        heapq.heapreplace(ends, ends[0] + length)
    return max(ends)


def counted(path: Path, times: int, divisor: int) -> list[dict[str, Any]]:
    """Sweeps of an engine with rows in the order of their prompts, with the longest first, and those of input order."""
    results = []
    for seqs in (32, 64, 128, 256):
        lengths = lengths_of(path, seqs * times, divisor)
        draw = random.Random(1)
        requests = [
            Request([draw.randrange(100, 40_000) for _ in range(16)], SamplingParams(max_tokens=n, ignore_eos=True))
            for n in lengths
        ]
        found = {}
        with Engine("demo", max_num_seqs=seqs, max_model_len=16 + max(lengths)) as loaded:
            words = torch.zeros(seqs, loaded.parts.config.vocab_size)

            def without_layers(batches: Any, on_logits: Any, words: Tensor = words, **options: Any) -> None:
                for batch in batches:
                    if batch.logits_rows:
                        on_logits(batch.logits_rows, words[: len(batch.logits_rows)], 0)

            loaded.parts.executor.run = without_layers
            for longest_first in (False, True):
                engine = Engine.from_parts(loaded.parts, longest_first=longest_first)
                for _ in engine.generate(requests):
                    pass
                found[longest_first] = engine.stats.sweeps
        least = max(max(lengths), -(-sum(lengths) // seqs))
        result = {"seqs": seqs, "rows": len(lengths), "input_order": sweeps(lengths, seqs), "least": least}
        result |= {"prompt_order": found[False], "longest_first": found[True]}
        results.append(result | {"times_fewer_sweeps": found[False] / found[True]})
        print(results[-1], flush=True)
    return results


def run(checkout: Path, folder: Path, lengths: Sequence[int], args: argparse.Namespace) -> dict[str, Any]:
    """The report of one run of the job."""
    source, output, report = (folder / name for name in ("in.jsonl", "out.jsonl", "report.json"))
    draw = random.Random(1)
    rows = [
        {"prompt": [draw.randrange(100, 40_000) for _ in range(args.prompt_len)], "sampling": {"max_tokens": length}}
        for length in lengths
    ]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    python = checkout / ".venv" / "bin" / "python"
    command = [str(python) if python.exists() else sys.executable, "-m", "batchgen", "run"]
    command += ["-m", args.model, "-i", str(source), "-o", str(output), "--overwrite", "--prompt-column", "prompt"]
    command += ["--sampling-column", "sampling", "--ignore-eos", "--device", args.device]
    command += ["--max-num-seqs", str(args.max_num_seqs), "--report", str(report), "--progress", "none"]
    if checkout == ROOT:
        command += ["--drafts", "0"]  # the order alone is measured
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    subprocess.run(command, cwd=checkout, env=environment, check=True, timeout=_RUN_LIMIT_S)
    values: dict[str, Any] = json.loads(report.read_text())
    return values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--other", type=Path, help="a checkout of before rows were put in the order of their lengths")
    parser.add_argument("--counts", action="store_true", help="only count sweeps")
    parser.add_argument("--trace", type=Path, default=AZURE_SAMPLE, help="with a column GeneratedTokens")
    parser.add_argument("--divisor", type=int, default=4, help="of the trace's lengths")
    parser.add_argument("--prompt-len", type=int, default=16)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--device", default="emulated:gpu-memory=600MiB,h2d=512MiB/s")
    parser.add_argument("--max-num-seqs", type=int, default=128)
    parser.add_argument("--times", type=int, default=10, help="as many rows as in flight")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--output", type=Path, help="[default: benchmarks/results/length_order-CPU.json]")
    args = parser.parse_args()
    if args.counts:
        results = counted(args.trace, args.times, args.divisor)
        write(args.output or result_path("length_order_sweeps"), {"arguments": vars(args), "sizes": results})
        return
    seqs = args.max_num_seqs
    lengths = lengths_of(args.trace, seqs * args.times, args.divisor)
    checkouts = {"here": ROOT} | ({"other": args.other.resolve()} if args.other else {})
    reports: dict[str, list[dict[str, Any]]] = {name: [] for name in checkouts}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(args.repeats):
            for name, checkout in checkouts.items():
                report = run(checkout, Path(folder), lengths, args)
                kept = {key: report[key] for key in ("wall_s", "sweeps", "estimated_wall_s") if key in report}
                reports[name].append(kept)
                print(name, kept, flush=True)
    result: dict[str, Any] = {
        "arguments": vars(args),
        "rows": len(lengths),
        "least_sweeps": max(max(lengths), -(-sum(lengths) // seqs)),
        "simulated_times": sweeps(lengths, args.max_num_seqs)
        / sweeps(sorted(lengths, reverse=True), args.max_num_seqs),
        "runs": reports,
    }
    if args.other:
        best = {name: min(report["wall_s"] for report in of_checkout) for name, of_checkout in reports.items()}
        result["faster_than_other"] = best["other"] / best["here"]
    write(args.output or result_path("length_order", by_cpu=True), result)


if __name__ == "__main__":
    main()
