"""Seconds and memory of sorting the prompts of a large input, beside the predicted seconds of its job.

Rows are reviews of products in a shuffled order, six of each, as in benchmarks/row_order.py: about 1,000 bytes each.
They are read from JSON lines and sorted as a job does it. Each size runs in a process of its own. The job is planned
for a machine whose profile ships with the package.

    python benchmarks/sort_prompts.py --rows 100000 --rows 1000000
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from recording import machine, result_path, write
from row_order import words_of

from batchgen.core.request import Request
from batchgen.job.sorted_requests import SortedRequests

_PIECES, _WORDS, _PIECES_OF_PRODUCT, _REVIEWS = 2048, 30, 5, 6


def write_input(path: Path, rows: int) -> None:
    """Reviews whose products come in a shuffled order; texts are put together of pieces."""
    draw = random.Random(5)
    pieces = [words_of(draw, _WORDS) for _ in range(_PIECES)]

    def text(row: int) -> str:
        number = row * 2_654_435_761 % (1 << 32) * rows // (1 << 32) // _REVIEWS
        of_product = random.Random(number).choices(pieces, k=_PIECES_OF_PRODUCT)
        review = pieces[row % _PIECES]
        return f"Product {number}: {' '.join(of_product)}\nReview: {review}\nIs the review positive?"

    with path.open("w") as file:
        for row in range(rows):
            file.write(json.dumps({"text": text(row)}) + "\n")


def requests_of(path: Path) -> Iterator[Request]:
    with path.open() as file:
        for row, line in enumerate(file):
            yield Request(json.loads(line)["text"], row=row)


def sort(path: Path, folder: Path) -> dict[str, Any]:
    """Sorts the rows of a file in this process, and reads them in their order."""
    started, started_cpu = time.perf_counter(), time.process_time()
    ordered = SortedRequests(requests_of(path), folder / "sorted")
    sorted_s, sorted_cpu_s = time.perf_counter() - started, time.process_time() - started_cpu
    last = ""
    for request in ordered.read():
        if request.prompt < last:
            raise SystemExit("the rows are not in order")
        last = request.prompt
    ordered.close()
    return {
        "sort_s": sorted_s,
        "sort_cpu_s": sorted_cpu_s,
        "sort_and_read_cpu_s": time.process_time() - started_cpu,
        "shared_part": ordered.shared_part,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def predicted_s(path: Path, args: argparse.Namespace) -> float:
    """The predicted seconds of a job with the rows of a file, four tokens each."""
    command = [sys.executable, "-m", "batchgen", "plan", "-m", args.model, "-i", str(path), "--prompt-column", "text"]
    command += ["--max-tokens", "4", "--hardware", args.hardware, "--device", "cpu", "--json"]
    plan = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    seconds: float = plan["prediction"]["total_s"]
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--hardware", default="zen4")
    parser.add_argument("--rows", type=int, action="append", help="may be repeated")
    parser.add_argument("--output", type=Path, default=result_path("sort_prompts"))
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(sort(args.one, args.one.parent)))
        return
    runs = []
    for rows in args.rows or [100_000, 1_000_000]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "in.jsonl"
            write_input(path, rows)
            command = [sys.executable, __file__, "--one", str(path)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            run = {"rows": rows} | json.loads(done.stdout.splitlines()[-1]) | {"job_s": predicted_s(path, args)}
        runs.append(run | {"part_of_job": run["sort_cpu_s"] / run["job_s"]})
        print(runs[-1], flush=True)
    write(args.output, {"arguments": vars(args), "machine": machine(), "runs": runs})


if __name__ == "__main__":
    main()
