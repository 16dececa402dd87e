"""What a sweep does beside products and attention, on `fixed` (random prompts of 512 tokens, 32 out).

The job runs in one process, after a warm-up. In some rounds the bindings of linear layers and attention do nothing: the wall
time left is the rest, to which comes what handing their loops to threads takes. In other rounds of that kind the time of each
part of the rest is counted. `--with-products` also runs the job as it is, for the share on this machine; the shares on others
are computed from product rates measured there, with the rest as it is here.

    python benchmarks/sweep_rest.py --with-products
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from peers.workloads import WORKLOADS, work

from batchgen.core.machine import cpu_name
from batchgen.core.request import Request, SamplingParams
from batchgen.engine.engine import Engine
from batchgen.engine.generation import Generation
from batchgen.job.report import versions
from batchgen.models import layers
from batchgen.models.files import read_config, resolve_model
from batchgen.ops import cpp
from batchgen.runtime import executor as executors
from batchgen.runtime.lanes import Lanes
from batchgen.schedule.scheduler import Scheduler

HERE = Path(__file__).parent
PRODUCTS = ("linear", "attention")
WARM_UP_TOKENS, WARM_UP_OUTPUT = 16, 2
# FLOP/s of two cores: of linear layers at hundreds of tokens, of prefill attention. Sources: results/kernels-amd-epyc-25-17-avx512-bf16.json
# (median over the demo model's shapes at 256 and 1,024 tokens); torch's linear on AMX, two times 1 TFLOP/s, with attention at
# the part of linear's rate that it has on Zen 4.
RATES = {
    "Zen 4, AVX-512 BF16": (830e9, 608e9),
    "AMX (oneDNN's linear)": (2000e9, 1465e9),
    "five times Zen 4": (4150e9, 3040e9),
}


class Clock:
    """Seconds and calls by part, each second counted once: for the innermost part that it was spent in. Of one thread."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.calls: dict[str, int] = defaultdict(int)
        self._open: list[str] = []
        self._since = 0.0

    def _turn(self) -> None:
        now = time.perf_counter()
        if self._open:
            self.seconds[self._open[-1]] += now - self._since
        self._since = now

    def of(self, part: str, function: Callable) -> Callable:
        """The function, its time counted."""

        def counted(*args, **options):
            self._turn()
            self._open.append(part)
            self.calls[part] += 1
            try:
                return function(*args, **options)
            finally:
                self._turn()
                self._open.pop()

        return counted


@contextmanager
def replaced(*changes: tuple[object, str, object]) -> Iterator[None]:
    """Attributes with other values for a while: (owner, name, value)."""
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]
    for owner, name, value in changes:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def bindings(*, products: bool, clock: Clock | None) -> tuple[object, str, object]:
    """The C++ bindings, without products perhaps, timed perhaps."""
    made = {name: getattr(cpp._kernels, name) for name in dir(cpp._kernels) if not name.startswith("_")}
    if not products:
        made |= dict.fromkeys(PRODUCTS, lambda *args: None)
    if clock:
        made |= {name: clock.of(f"kernel: {name}", made[name]) for name, f in made.items() if _is_kernel(f)}
    return cpp, "_kernels", SimpleNamespace(**made)


def _is_kernel(value: object) -> bool:
    return callable(value) and not isinstance(value, type)


def parts_of_a_sweep(clock: Clock) -> list[tuple[object, str, object]]:
    """Python's parts, timed. A generator's items are made for the part that asks for them."""
    named = [
        ("schedule", Scheduler, ("schedule", "commit", "finish", "add")),
        ("results", Generation, ("advance", "finish", "end_sweep", "start")),
        ("sampling", Generation, ("take_logits",)),
        ("prepare", executors.Executor, ("_prepare_all",)),
        ("steps", Lanes, ("execute",)),
        ("embedding", layers, ("embed",)),
    ]
    return [(owner, name, clock.of(part, getattr(owner, name))) for part, owner, names in named for name in names]


def run(engine: Engine, requests: list[Request]) -> dict[str, float]:
    used, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    sweeps = engine.stats.sweeps
    assert all(done.error is None for done in engine.generate(requests))
    wall_s, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
    return {
        "wall_s": wall_s,
        "cpu_s": after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime,
        "page_faults": after.ru_minflt - used.ru_minflt,
        "sweeps": engine.stats.sweeps - sweeps,
    }


def loop_s(asleep: bool) -> float:
    """Seconds that handing a loop to the threads takes: one of two items that take no time, less one of one item.

    asleep: after so long a pause that they sleep.
    """
    logits, taken = torch.zeros(2, 1), {1: [], 2: []}
    for turn in range(200 if asleep else 2000):
        rows = turn % 2 + 1
        ones = np.ones(rows)
        draws = ones.astype(np.float32), np.zeros(rows, np.int64), ones, 0 * ones, 0 * ones
        index = torch.empty(2, dtype=torch.int64)
        if asleep:
            time.sleep(0.001)
        began = time.perf_counter()
        cpp._kernels.draw(logits.data_ptr(), 1, 1, *draws, index.data_ptr())
        taken[rows].append(time.perf_counter() - began)
    return statistics.median(taken[2]) - statistics.median(taken[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--with-products", action="store_true", help="also run the job with its products")
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    config = read_config(resolve_model(args.model))
    job = WORKLOADS["fixed"](args.model, config.vocab_size, args.rows)

    def requests(rows) -> list[Request]:
        return [Request(ids, SamplingParams(max_tokens=count, ignore_eos=True)) for ids, count in rows]

    result = {"cpu": cpu_name(), "cores": len(os.sched_getaffinity(0)), "isa": cpp.instruction_set(), **vars(args)}
    result |= {
        "output": None,
        "load_average": os.getloadavg()[0],
        "threads": cpp._kernels.num_threads(),
        "versions": versions(),
    }
    with Engine(args.model, dtype=args.dtype, share_prefixes=False, cpu_memory="6GiB") as engine:
        # Leaves logits of as many rows behind as there will be.
        list(engine.generate(requests([(ids[:WARM_UP_TOKENS], WARM_UP_OUTPUT) for ids, _ in job.rows])))
        rounds, clocks = [], []
        for _ in range(args.rounds):
            with replaced(bindings(products=False, clock=None)):
                rounds.append(run(engine, requests(job.rows)))
            print("rest", rounds[-1], flush=True)
        for _ in range(args.rounds):
            clock, parts = Clock(), engine.parts
            timed = replace(parts, pack=clock.of("pack", parts.pack), split=clock.of("pack", parts.split))
            with replaced(bindings(products=False, clock=clock), (engine, "parts", timed), *parts_of_a_sweep(clock)):
                measured = clock.of("engine's loop", run)(engine, requests(job.rows))
            clocks.append((clock, measured))
        if args.with_products:
            clock = Clock()
            with replaced(bindings(products=True, clock=clock)):
                result["with_products"] = run(engine, requests(job.rows))
            result["with_products"] |= {f"{name}_s": clock.seconds[f"kernel: {name}"] for name in PRODUCTS}
            print("with products", result["with_products"], flush=True)
    result["rest"] = {key: statistics.median(r[key] for r in rounds) for key in rounds[0]}
    names = sorted({name for clock, _ in clocks for name in clock.seconds})
    table = {
        name: {
            "seconds": statistics.median(clock.seconds[name] for clock, _ in clocks),
            "calls": clocks[0][0].calls[name],
        }
        for name in names
    }
    result["parts"] = dict(sorted(table.items(), key=lambda item: -item[1]["seconds"]))
    result["parts_wall_s"] = statistics.median(measured["wall_s"] for _, measured in clocks)
    loops = sum(table[f"kernel: {name}"]["calls"] for name in PRODUCTS)
    result["loops"] = {"count": loops, "awake_s": loop_s(False), "asleep_s": loop_s(True)}
    rest_s = result["rest"]["wall_s"] + loops * result["loops"]["awake_s"]
    least = work(job, config)
    result["shares"] = {}
    for name, (linear, attention) in RATES.items():
        products_s = (least["linear_flops"] + least["logits_flops"]) / linear
        products_s += (least["prefill_attention_flops"] + least["decode_attention_flops"]) / attention
        result["shares"][name] = {"products_s": products_s, "rest_s": rest_s, "share": rest_s / (rest_s + products_s)}
    if args.with_products:
        products_s = sum(result["with_products"][f"{name}_s"] for name in PRODUCTS)
        result["shares"]["here"] = {"products_s": products_s, "rest_s": rest_s, "share": rest_s / (rest_s + products_s)}
    result = json.loads(json.dumps(result), parse_float=lambda text: float(f"{float(text):.4g}"))
    for name, part in result["parts"].items():
        print(f"{name:24} {part['seconds']:8.4f} s {part['calls']:7}")
    for name, figures in result["shares"].items():
        print(name, figures)
    slug = re.sub(r"[^a-z0-9]+", "-", f"{result['cpu']} {result['isa']} {args.dtype}".lower()).strip("-")
    output = args.output or HERE / "results" / f"sweep_rest-{slug}.json"
    output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
