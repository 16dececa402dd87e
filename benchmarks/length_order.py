"""A job that streams its weights, with output lengths of the Azure trace: longest first, against prompt order.

A sweep then takes as long with few rows as with many, so what counts is the number of sweeps. There are ten times as
many rows as in flight, and a model of Llama-3.2-3B's shape runs within 3 GiB of memory, with its weights on disk. One
engine has loaded it, and runs the job in the one order and in the other, in turns. The least possible number of sweeps
is all tokens over the rows in flight.

    python benchmarks/length_order.py --work-dir DIR
    python benchmarks/length_order.py --counts    only count sweeps, for several sizes

With `--counts` the demo model's layers compute nothing. Where each sweep takes as long as bringing the weights, the
seconds of a job are as its sweeps.
"""

from __future__ import annotations

import argparse
import csv
import heapq
import random
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from counting_models import counting_model
from drafts import load
from peers.workloads import AZURE_SAMPLE
from recording import result_path, write
from torch import Tensor

from batchgen.core.request import Request, SamplingParams
from batchgen.core.units import parse_bytes
from batchgen.engine.engine import Engine
from batchgen.engine.loader import process_bytes
from batchgen.models.files import read_config, resolve_model


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


def timed(lengths: Sequence[int], args: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """Seconds and sweeps of the job with rows in the order of their prompts, and with the longest first, in turns."""
    path = counting_model(args.work_dir / f"counting-{args.layers}", args.layers)
    vocab = read_config(resolve_model(str(path))).vocab_size
    draw = random.Random(1)
    requests = [
        Request(
            [draw.randrange(vocab) for _ in range(args.prompt_tokens)], SamplingParams(max_tokens=n, ignore_eos=True)
        )
        for n in lengths
    ]
    found: dict[str, list[dict[str, Any]]] = {"prompt_order": [], "longest_first": []}
    with Engine.from_parts(load(path, args.max_num_seqs, args.memory, process_bytes(), args)) as loaded:
        for _ in range(args.repeats):
            for name, runs in found.items():
                engine = Engine.from_parts(loaded.parts, longest_first=name == "longest_first")
                started = time.perf_counter()
                for _ in engine.generate(requests):
                    pass
                runs.append({"seconds": time.perf_counter() - started, "sweeps": engine.stats.sweeps})
                print(name, runs[-1], flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--counts", action="store_true", help="only count sweeps")
    parser.add_argument("--trace", type=Path, default=AZURE_SAMPLE, help="with a column GeneratedTokens")
    parser.add_argument("--divisor", type=int, help="of the trace's lengths [default: 32; with --counts 4]")
    parser.add_argument("--work-dir", type=Path, help="the model, twice its size")
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--memory", type=parse_bytes, default=parse_bytes("3GiB"))
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--max-num-seqs", type=int, default=128)
    parser.add_argument("--times", type=int, default=10, help="as many rows as in flight")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--output", type=Path, help="[default: benchmarks/results/length_order-CPU.json]")
    args = parser.parse_args()
    if args.counts:
        results = counted(args.trace, args.times, args.divisor or 4)
        write(args.output or result_path("length_order_sweeps"), {"arguments": vars(args), "sizes": results})
        return
    if args.work_dir is None:
        parser.error("--work-dir is needed without --counts")
    seqs = args.max_num_seqs
    lengths = lengths_of(args.trace, seqs * args.times, args.divisor or 32)
    args.output_tokens = max(lengths)
    runs = timed(lengths, args)
    best = {name: min(run["seconds"] for run in of_order) for name, of_order in runs.items()}
    result = {
        "arguments": vars(args),
        "rows": len(lengths),
        "least_sweeps": max(max(lengths), -(-sum(lengths) // seqs)),
        "input_order_sweeps": sweeps(lengths, seqs),
        "runs": runs,
        "gain": best["prompt_order"] / best["longest_first"],
    }
    write(args.output or result_path("length_order", by_cpu=True), result)


if __name__ == "__main__":
    main()
