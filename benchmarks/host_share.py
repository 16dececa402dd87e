"""How much of a sweep the host spends beside computing it, on the CPU: scheduling, packing and taking results, outside
`Executor.run`. On a CPU these take turns with the kernels; overlapping them could save this share at most.

    python benchmarks/host_share.py [--model demo] [-o benchmarks/results/host_share.json]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import time
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from batchgen.core.machine import cpu_name
from batchgen.core.request import Request, SamplingParams
from batchgen.engine.engine import Engine
from batchgen.engine.generation import Generation
from batchgen.ops.instruction_set import instruction_set
from batchgen.schedule.scheduler import Scheduler

PROMPT_LEN, OUTPUT_LEN = 32, 48
_HERE = Path(__file__).parent


class Timed:
    """Seconds spent in each of some functions, by name. Of functions that call each other, the outer one has all."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inside = False

    @contextmanager
    def of(self, owner: object, **functions: str):
        """functions: name of an attribute of the owner -> what its time is counted as."""
        real = {name: getattr(owner, name) for name in functions}
        for name, what in functions.items():
            setattr(owner, name, self.timed(real[name], what))
        try:
            yield
        finally:
            for name, function in real.items():
                setattr(owner, name, function)

    def timed(self, function, what: str):
        def timed(*args, **options):
            if self._inside:
                return function(*args, **options)
            self._inside = True
            started = time.perf_counter()
            try:
                return function(*args, **options)
            finally:
                self.seconds[what] += time.perf_counter() - started
                self._inside = False

        return timed


def measure(engine: Engine, num_seqs: int) -> dict:
    """Decode sweeps of so many sequences, all of equal lengths: their prompts are computed in the first sweeps, which are left out."""
    rng = random.Random(0)
    sampling = SamplingParams(max_tokens=OUTPUT_LEN, ignore_eos=True)
    prompts = [[rng.randrange(100, 10_000) for _ in range(PROMPT_LEN)] for _ in range(num_seqs)]
    timed, marks = Timed(), []

    def on_sweep(stats) -> None:
        marks.append((time.perf_counter(), dict(timed.seconds), stats.generated_tokens))

    parts = engine.parts
    engine.parts = replace(parts, pack=timed.timed(parts.pack, "pack"), split=timed.timed(parts.split, "pack"))
    with (
        timed.of(Scheduler, schedule="schedule", commit="schedule"),
        timed.of(Generation, advance="advance", finish="advance"),
        timed.of(parts.executor, run="run"),
    ):
        done = list(engine.generate([Request(p, sampling) for p in prompts], on_sweep=on_sweep))
    engine.parts = parts
    assert all(c.error is None for c in done)
    whole = [i for i in range(1, len(marks)) if marks[i][2] - marks[i - 1][2] == num_seqs]
    first, last = whole[1], whole[-2]  # between prompts and the end
    sweeps = last - first
    seconds = marks[last][0] - marks[first][0]
    spent = {what: marks[last][1][what] - marks[first][1][what] for what in marks[last][1]}
    spent["other"] = seconds - sum(spent.values())
    host = seconds - spent["run"]
    return {
        "sequences": num_seqs,
        "sweeps": sweeps,
        "sweep_ms": round(1e3 * seconds / sweeps, 3),
        **{f"{what}_ms": round(1e3 * value / sweeps, 3) for what, value in spent.items()},
        "host_share": round(host / seconds, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--sequences", type=int, nargs="+", default=[64, 256])
    parser.add_argument("-o", "--output", type=Path, default=_HERE / "results" / "host_share.json")
    given = parser.parse_args()
    results = []
    for dtype in given.dtype:
        most = max(given.sequences)
        with Engine(
            given.model, dtype=dtype, max_num_seqs=most, max_num_batched_tokens=2048, max_model_len=128
        ) as engine:
            for num_seqs in given.sequences:
                results.append({"dtype": dtype, **measure(engine, num_seqs)})
                print(json.dumps(results[-1]), flush=True)
    machine = {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "kernels": instruction_set(),
        "python": platform.python_version(),
    }
    found = {
        "machine": machine,
        "model": given.model,
        "prompt_len": PROMPT_LEN,
        "output_len": OUTPUT_LEN,
        "results": results,
    }
    given.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
