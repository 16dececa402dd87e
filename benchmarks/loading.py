"""How fast a GGUF's weights are unpacked, and how soon the demo model runs.

Unpacking: bytes of unpacked weights per second, of each format, by the kernels on all cores and by the gguf package's numpy.
Start: seconds from the end of imports to the end of the first sweep, in processes of their own; "numpy" is what it takes where
the kernels are told of no format, so that the gguf package unpacks.

    python benchmarks/loading.py
    python benchmarks/loading.py --only unpacking
    python benchmarks/loading.py --only file --gguf FILE

The last loads the weights of a GGUF as found, in a process of their own, with nothing of it in the page cache and again with all of
it there, beside the rates at which the disk is read past the cache and at which memory is written for the first time.

What a run leaves out stays in the file as it was.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).parent
ROWS, COLUMNS = 8192, 2048  # far more than caches hold, once unpacked
NUMPY_ROWS = 1024

START = """
import json, sys, time
begun = time.perf_counter()
import torch, transformers, gguf.quants
from transformers import PreTrainedTokenizerFast
from batchgen.core.request import Request, SamplingParams
from batchgen.engine.engine import Engine
import batchgen.models.checkpoint, batchgen.models.tokenizers.tokenizer
import batchgen.runtime.executor, batchgen.runtime.sampler, batchgen.runtime.scorer
from batchgen.ops import cpp
dtype, how = sys.argv[1:]
if how == "numpy":
    cpp.GGUF_TYPES.clear()
imported = time.perf_counter()
with Engine("demo", dtype=dtype) as engine:
    loaded = time.perf_counter()
    next(engine.generate([Request("Hello", SamplingParams(max_tokens=1))]))
    ready = time.perf_counter()
print(json.dumps({"imports_s": imported - begun, "load_s": loaded - imported, "first_sweep_s": ready - loaded,
                  "ready_s": ready - imported}))
"""

FILE = """
import json, resource, sys, time
import torch, gguf.quants
from batchgen.models.checkpoint import open_checkpoint
from batchgen.models.files import read_config, resolve_model, resolve_quantization
from batchgen.schedule.residency import WeightResidency
from batchgen.runtime.memory.weights import Weights
files = resolve_model(sys.argv[1])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
started = time.perf_counter()
config = read_config(files)
residency = WeightResidency.in_memory(config, resolve_quantization(files, "none"))
weights = Weights(config, residency, torch.bfloat16, checkpoint=open_checkpoint(files, config))
taken = time.perf_counter() - started
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({"load_s": taken, "loaded_bytes": weights.num_bytes, "peak_bytes": peak - before}))
"""
# Memory that is used for the first time, by all cores: no load of so many bytes is faster.
FRESH = """
import sys, time
import torch
from batchgen.core.direct_io import aligned_buffer
memory = torch.frombuffer(aligned_buffer(int(sys.argv[1])), dtype=torch.uint8)
started = time.perf_counter()
memory.fill_(1)
print(memory.nbytes / (time.perf_counter() - started))
"""
PIECE_BYTES = 16 << 20


def seconds(run: Callable[[], object], at_least: int = 3, at_least_s: float = 0.3) -> float:
    """Median time of a call."""
    run()
    taken: list[float] = []
    deadline = time.perf_counter() + at_least_s
    while len(taken) < at_least or time.perf_counter() < deadline:
        started = time.perf_counter()
        run()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


def unpacking() -> dict[str, dict[str, float]]:
    """GB/s of unpacked weights by format, beside those of a plain copy."""
    import gguf
    import numpy as np
    import torch

    from batchgen.ops import cpp

    outs = {name: torch.zeros(ROWS, COLUMNS, dtype=getattr(torch, name)) for name in ("float32", "bfloat16")}
    copies = {name: torch.ones_like(out) for name, out in outs.items()}
    figures = {
        "copy": {n: out.nbytes / seconds(lambda o=out, c=copies[n]: o.copy_(c)) / 1e9 for n, out in outs.items()}
    }
    rng = np.random.default_rng(0)
    for packing in cpp.GGUF_TYPES:
        kind = gguf.GGMLQuantizationType[packing]
        values, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        packed = rng.integers(0, 120, (ROWS, COLUMNS // values * block_bytes), dtype=np.uint8)
        tensor = torch.from_numpy(packed)
        figures[packing] = {
            name: out.nbytes / seconds(lambda o=out, p=packing, t=tensor: cpp.unpack_blocks(p, t, o)) / 1e9
            for name, out in outs.items()
        }
        few = packed[:NUMPY_ROWS]
        with np.errstate(all="ignore"):
            numpy_s = seconds(lambda k=kind, f=few: gguf.quants.dequantize(f, k), at_least_s=0)
        figures[packing]["numpy_float32"] = NUMPY_ROWS * COLUMNS * 4 / numpy_s / 1e9
    return figures


def starts(rounds: int) -> dict[str, dict[str, float]]:
    """Medians by dtype and way of unpacking, measured in turn; the first round is a warm-up."""
    runs: dict[tuple[str, str], list[dict[str, float]]] = {}
    for _ in range(rounds + 1):
        for dtype in ("float32", "bfloat16"):
            for how in ("kernels", "numpy"):
                done = subprocess.run([sys.executable, "-c", START, dtype, how], capture_output=True, check=True)
                runs.setdefault((dtype, how), []).append(json.loads(done.stdout))
    return {
        f"{dtype}, {how}": {key: statistics.median(r[key] for r in measured[1:]) for key in measured[0]}
        for (dtype, how), measured in runs.items()
    }


def file_load(path: Path) -> dict[str, dict[str, float]]:
    """Seconds, rates and memory of loading a GGUF."""
    from batchgen.core.direct_io import DirectFile, aligned_buffer

    def forget() -> None:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def read_into_cache() -> None:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass

    size = path.stat().st_size
    forget()
    buffer, direct = memoryview(aligned_buffer(PIECE_BYTES)), DirectFile(path)
    started = time.perf_counter()
    for start in range(0, size - PIECE_BYTES, PIECE_BYTES):
        direct.read([(start, buffer)])
    disk_rate = (size - PIECE_BYTES) / (time.perf_counter() - started)
    direct.close()
    figures: dict[str, dict[str, float]] = {"disk": {"bytes_per_s": disk_rate, "file_bytes": size}}
    fresh = subprocess.run([sys.executable, "-c", FRESH, str(size)], capture_output=True, check=True, text=True)
    figures["memory"] = {"bytes_per_s": float(fresh.stdout)}
    for name in ("not cached", "cached"):
        if name == "not cached":
            forget()
        else:
            read_into_cache()
        done = subprocess.run([sys.executable, "-c", FILE, path], capture_output=True, check=True)
        found = json.loads(done.stdout)
        rate = size / found["load_s"]
        figures[name] = found | {"bytes_per_s": rate, "of_disk_rate": rate / disk_rate}
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=["unpacking", "start", "file"])
    parser.add_argument("--gguf", type=Path, help="of --only file")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    from cpu_kind import machine, slug

    from batchgen.job.report import versions

    on = machine()
    output = args.output or HERE / "results" / f"loading-{slug(on)}.json"
    before = json.loads(output.read_text()) if args.only and output.exists() else {}  # the other part stays
    result: dict = before | {"machine": on, "rounds": args.rounds, "versions": versions()}
    if args.gguf:
        result["file_load"] = file_load(args.gguf)
    if args.only in (None, "unpacking"):
        result["unpacked_gb_per_s"] = unpacking()
    if args.only in (None, "start"):
        result["demo_start"] = starts(args.rounds)
    result = json.loads(json.dumps(result), parse_float=lambda text: float(f"{float(text):.4g}"))
    for part in ("unpacked_gb_per_s", "demo_start", "file_load"):
        for name, figures in result.get(part, {}).items():
            print(f"{name:20}", "  ".join(f"{key} {value}" for key, value in figures.items()))
    output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
