"""The cost of quantized weights and KV in quality: perplexity of the demo model on real English text.

The text is Python's own reference documentation, as CPython carries it along (`pydoc_data.topics`). It is cut into
windows; each token but a window's first is scored by its log-probability given those before it in the window.
Everything goes through the engine's executor as a prompt does, in chunks, so that attention reads all KV, a token's own
too, from the cache in its format. The model's published file has 4-bit weights already, so int4 weights are a second
rounding.

What the result file has of the same text is kept, window by window: a measurement that was stopped goes on, and formats
can be measured one by one, fp32 first.

    python benchmarks/perplexity.py
    python benchmarks/perplexity.py --format fp32 --format "int8 KV"
    python benchmarks/perplexity.py --tokens 2000 --output trial.json
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from recording import result_path, write

from batchgen.core.device import Device
from batchgen.core.dtypes import INT4, INT5, INT8
from batchgen.core.machine import cpu_name
from batchgen.core.request import ScoreRequest
from batchgen.engine.engine import Engine
from batchgen.engine.loader import LoadRequest, in_memory_policy, load_parts, resolve_budgets
from batchgen.engine.parts import EngineParts
from batchgen.models.files import ModelFiles, read_config, resolve_model
from batchgen.models.kept_stores import find_or_convert
from batchgen.models.tokenizers.loading import load_tokenizer

DTYPE = "float32"
FORMATS = {  # of weights, of KV
    "fp32": (DTYPE, DTYPE),
    "int8 weights": (INT8, DTYPE),
    "int4 weights": (INT4, DTYPE),
    "int8 KV": (DTYPE, INT8),
    "int5 KV": (DTYPE, INT5),
    "int4 KV": (DTYPE, INT4),
    "int4 weights, int5 KV": (INT4, INT5),
}
TEXT = "pydoc_data.topics of CPython, the topics in alphabetical order, from the start"
TARGETS = {
    "int8 weights": 1.01,
    "int4 weights": 1.15,
    "int8 KV": 1.003,
    "int5 KV": 1.025,
}  # of perplexity, against fp32


def real_text() -> str:
    """The topics of the Python language reference, in alphabetical order."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name].strip() for name in sorted(topics))


def results_in(path: Path, subject: dict) -> dict[str, dict]:
    """The results of a file about the same text, by format."""
    held = json.loads(path.read_text()) if path.exists() else {}
    same = all(held.get(name) == value for name, value in subject.items())
    return held["results"] if same else {}


def write_results(path: Path, subject: dict, results: dict[str, dict]) -> None:
    """Writes all results, the formats in their order; fp32 must be among them."""
    results = {name: results[name] for name in FORMATS if name in results}
    whole = [r for r in results.values() if r["tokens_scored"] == results["fp32"]["tokens_scored"]]
    for result in whole:
        result["ratio_to_fp32"] = result["perplexity"] / results["fp32"]["perplexity"]
    met = {name: results[name]["ratio_to_fp32"] <= most for name, most in TARGETS.items() if results.get(name) in whole}
    content = {
        **subject,
        "results": results,
        "targets": TARGETS,
        "targets_met": met,
    }
    write(path, content)


def load(files: ModelFiles, weight_format: str, kv_format: str, window: int, chunk: int, folder: Path) -> EngineParts:
    """The model on the CPU, everything in memory, with KV for one window."""
    device = Device("cpu")
    config = read_config(files)
    policy = in_memory_policy(
        config, device, dtype=DTYPE, admission="continuous", max_num_seqs=1, max_num_batched_tokens=chunk,
        max_model_len=window, share_prefixes=False,
    )  # fmt: skip
    request = LoadRequest(
        files,
        config,
        replace(policy, weight_format=weight_format, kv_format=kv_format),
        dtype=DTYPE,
        device=device,
        budgets=resolve_budgets(device),
        min_output_len=1,
        store=find_or_convert(files, folder, DTYPE, INT4) if weight_format == INT4 else None,
    )
    return load_parts(request, lambda: load_tokenizer(files))


def measure(parts: EngineParts, windows: list[list[int]], held: dict) -> Iterator[dict]:
    """Scores every window by itself, without its first token, and yields the results so far.

    Args:
        held: the result of the windows before these.
    """
    nats, seconds = list(held.get("nats_by_window", [])), held.get("seconds", 0.0)
    started = time.perf_counter()
    cache = parts.executor.kv_cache.shape_of(0)
    with Engine.from_parts(parts) as engine:
        for scored in engine.score(ScoreRequest(window[:1], (window[1:],)) for window in windows):
            nats.append(-float(np.mean([t.chosen.logprob for t in scored.scores[0].tokens])))
            yield {
                "perplexity": math.exp(np.mean(nats)),
                "nats_per_token": float(np.mean(nats)),
                "nats_by_window": nats,
                "tokens_scored": len(nats) * (len(windows[0]) - 1),
                "weight_bytes": parts.loaded_bytes,
                "kv_bytes_per_token": parts.config.num_layers * cache.block_bytes / cache.kv_block_size,
                "seconds": seconds + time.perf_counter() - started,
                "cpu": cpu_name(),
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--tokens", type=int, default=20_000, help="tokens to score, at least")
    parser.add_argument("--window", type=int, default=1024, help="tokens that are read in one go")
    parser.add_argument("--chunk", type=int, default=256, help="tokens of a sweep")
    parser.add_argument("--format", action="append", choices=list(FORMATS), help="[default: all]")
    parser.add_argument("--output", type=Path, default=result_path("perplexity"))
    args = parser.parse_args()
    files = resolve_model(args.model)
    num_windows = -(-args.tokens // (args.window - 1))
    tokens = load_tokenizer(files).encode_batch([real_text()])[0][: num_windows * args.window]
    if len(tokens) < num_windows * args.window:
        parser.error(f"the text has {len(tokens):,} tokens only: give a smaller --tokens")
    windows = [tokens[i : i + args.window] for i in range(0, len(tokens), args.window)]
    subject = {"model": args.model, "text": TEXT, "window": args.window}
    results = results_in(args.output, subject)
    with tempfile.TemporaryDirectory() as folder:
        for name in args.format or FORMATS:
            held = results.get(name, {})
            missing = windows[held.get("tokens_scored", 0) // (args.window - 1) :]
            if not missing:
                continue
            parts = load(files, *FORMATS[name], args.window, args.chunk, Path(folder))
            for results[name] in measure(parts, missing, held):
                write_results(args.output, subject, results)
            parts.executor.close()
    write_results(args.output, subject, results)
    for name, result in results.items():
        print(
            f"{name}: perplexity {result['perplexity']:.3f}, {100 * (result['ratio_to_fp32'] - 1):+.2f} % against fp32"
        )
        if name in TARGETS:
            reached = result["ratio_to_fp32"] <= TARGETS[name]
            print(f"{name}: {'within' if reached else 'NOT within'} {100 * (TARGETS[name] - 1):.1f} % of fp32")


if __name__ == "__main__":
    main()
