"""Weights of 8 bits: their products against those in bf16 and fp32, and what they cost in quality.

    python benchmarks/int8.py rates
    python benchmarks/int8.py perplexity
    python benchmarks/int8.py perplexity --formats "int8 weights" --tokens 2000

Rates: on as many threads as BATCHGEN_NUM_THREADS says, one by its own clock; linear layers of fp32 and bf16 with packed weights, and of weights of
8 bits, whose tokens are quantized within the call. Weights come from memory: several are used in turn. Perplexity: as
`int4_perplexity.py`, of the demo model on Python's reference documentation; in parts where that takes long (`--windows 0 7`).

Results go to benchmarks/results/int8-CPU.json, named after the kind of CPU; what was measured before and is not now stays.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from cpu_kind import machine, slug
from int4_perplexity import DTYPE, measure, real_text
from kernel_rates import clock

from batchgen.core.device import Device
from batchgen.core.dtypes import INT8
from batchgen.engine.loader import LoadRequest, in_memory_policy, load_parts, resolve_budgets
from batchgen.engine.parts import EngineParts
from batchgen.job.report import versions
from batchgen.models.files import ModelFiles, read_config, resolve_model
from batchgen.models.tokenizers.tokenizer import load_tokenizer
from batchgen.ops import dispatch as ops
from batchgen.ops import int8
from batchgen.ops.instruction_set import instruction_set

HERE = Path(__file__).parent
SHAPES = ((576, 1536), (1536, 576), (2048, 8192), (3072, 3072))  # columns, depth
TOKENS = (1, 4, 16, 64, 256, 1024)
WEIGHT_BYTES = 96 << 20  # of all weights of a shape in fp32: more than caches hold
MADE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "fp32": lambda w: w, "bf16": lambda w: w.bfloat16(), "int8": int8.quantize,
}  # fmt: skip
DTYPES = {"bf16": torch.bfloat16}  # of tokens
FORMATS = {"fp32": "none", "int8 weights": INT8}
TARGET = 1.01  # of perplexity, against fp32


def rates(at_least_s: float) -> dict[str, dict]:
    """GFLOP/s of each shape and number of tokens, and int8's ratio to the faster of the others."""
    found = {}
    for columns, depth in SHAPES:
        count = max(2, WEIGHT_BYTES // (4 * columns * depth))
        weights = [torch.randn(columns, depth) * depth**-0.5 for _ in range(count)]
        packed = {name: [ops.pack_weight(make(w)) for w in weights] for name, make in MADE.items()}
        for tokens in TOKENS:
            inputs = {name: torch.randn(tokens, depth).to(DTYPES.get(name, torch.float32)) for name in MADE}
            best = dict.fromkeys(MADE, 1e9)
            turn, deadline = 0, time.perf_counter() + at_least_s
            while turn < 3 or time.perf_counter() < deadline:
                for name, x in inputs.items():  # in turn, and the best of each: others may use the machine too
                    best[name] = min(best[name], seconds_of(x, packed[name], turn))
                turn += 1
            row = {name: 2 * tokens * columns * depth / s / 1e9 for name, s in best.items()}
            row["ratio"] = row["int8"] / max(row["fp32"], row["bf16"])
            found[f"{columns}x{depth}, {tokens} tokens"] = {name: round(value, 2) for name, value in row.items()}
            print(f"{columns}x{depth}, {tokens} tokens:", found[f"{columns}x{depth}, {tokens} tokens"], flush=True)
    return found


def seconds_of(x: torch.Tensor, weights: list, turn: int) -> float:
    """Of one call, the mean of some that take a few milliseconds together."""
    calls = max(1, 256 // len(x))
    started = clock()
    for i in range(calls):
        ops.linear(x, weights[(turn + i) % len(weights)])
    return (clock() - started) / calls


def load(files: ModelFiles, quantization: str, window: int, chunk: int) -> EngineParts:
    """The model on the CPU, everything in memory, with KV for one window."""
    device, config = Device("cpu"), read_config(files)
    policy = in_memory_policy(
        config, device, dtype=DTYPE, admission="continuous", max_num_seqs=1, max_num_batched_tokens=chunk,
        max_model_len=window, share_prefixes=False, quantization=quantization,
    )  # fmt: skip
    request = LoadRequest(
        files, config, policy, dtype=DTYPE, device=device, budgets=resolve_budgets(device), min_output_len=1
    )
    return load_parts(replace(request, task="score"), lambda: load_tokenizer(files))


def perplexities(args: argparse.Namespace) -> dict[str, dict]:
    """format -> "first:last" windows -> nats per token and number of tokens."""
    files = resolve_model("demo")
    num_windows = -(-args.tokens // (args.window - 1))
    tokens = load_tokenizer(files).encode_batch([real_text()])[0][: num_windows * args.window]
    windows = [tokens[i : i + args.window] for i in range(0, len(tokens), args.window)]
    first, stop = args.windows or (0, num_windows)
    found = {}
    for name in args.formats:
        parts = load(files, FORMATS[name], args.window, args.chunk)
        scored = measure(parts, windows[first:stop])
        parts.executor.close()
        kept = ("nats_per_token", "tokens_scored", "weight_bytes", "seconds")
        found[name] = {f"{first}:{min(stop, num_windows)}": {key: scored[key] for key in kept}}
        print(f"{name}, windows {first} to {stop}: {scored['perplexity']:.4f}", flush=True)
    return found


def summary(parts: dict[str, dict]) -> dict[str, dict]:
    """Of each format the perplexity of all its windows."""
    found = {}
    for name, some in parts.items():
        tokens = sum(part["tokens_scored"] for part in some.values())
        nats = sum(part["nats_per_token"] * part["tokens_scored"] for part in some.values()) / tokens
        found[name] = {"perplexity": math.exp(nats), "tokens_scored": tokens}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=["rates", "perplexity"])
    parser.add_argument("--seconds", type=float, default=1.0, help="for each row of rates, at least")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--tokens", type=int, default=20_000, help="tokens to score, at least")
    parser.add_argument("--window", type=int, default=1024, help="tokens that are read in one go")
    parser.add_argument(
        "--windows", type=int, nargs=2, help="FIRST STOP: these only; the result has those of earlier runs too"
    )
    parser.add_argument("--chunk", type=int, default=256, help="tokens of a sweep")
    parser.add_argument("--output", type=Path, default=None)
    args = parser.parse_args()
    on = machine()
    measured = rates(args.seconds) if args.part == "rates" else perplexities(args)
    path = args.output or HERE / "results" / f"int8-{slug(on)}.json"
    results = (json.loads(path.read_text()) if path.exists() else {"benchmark": "int8"}) | {"machine": on}
    if args.part == "rates":
        results |= {"instruction_set": instruction_set(), "gflop_per_s": measured}
    else:
        parts = results.setdefault("windows", {})
        for name, some in measured.items():
            parts[name] = parts.get(name, {}) | some
        texts = results["perplexity"] = summary(parts)
        if texts.keys() == FORMATS.keys():
            ratio = texts["int8 weights"]["perplexity"] / texts["fp32"]["perplexity"]
            same = parts["fp32"].keys() == parts["int8 weights"].keys()
            results |= {"ratio_to_fp32": ratio, "target": TARGET, "target_met": same and ratio <= TARGET}
    results.setdefault("commands", {})[args.part] = shlex.join(["python", *sys.argv])
    results["versions"] = versions()
    path.write_text(json.dumps(results, indent=2) + "\n")
    print(path)


if __name__ == "__main__":
    main()
