"""lm-evaluation-harness on its own `hf` model and on batchgen, in turn: the three tasks of recipes/lm_eval, in float32.

Both read the same Hugging Face directory, made from the demo model's GGUF. Every turn is a new process that imports,
loads and evaluates all documents; batchgen starts without earlier results. `hf` goes in the batches, of --batch-sizes,
that are fastest for a few documents. Once it runs with its softmax in float64, for reference: in float32 torch's is off
by about 1e-5 a token over this vocabulary, always in the same direction, which is 1e-2 for a page of a thousand tokens.

    python benchmarks/lm_eval_tasks.py [--limit N] [--turns N] [--batch-sizes 1,4,8]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from peers.model_files import write_directory
from recording import result_path, write

from batchgen.core.cache_folder import cache_dir
from batchgen.job.report import versions
from batchgen.models.files import resolve_model

HERE = Path(__file__).parent
TASKS = ("listings_match", "listings_address", "listings_perplexity")
TRIAL = 6  # documents of each task
METRICS = ("acc,none", "acc_norm,none", "exact_match,stripped", "word_perplexity,none")


def evaluate(model: str, model_args: dict, limit: int | None, scratch: Path, tasks: Sequence[str] = TASKS) -> dict:
    """One evaluation in a process of its own, by peers/run_lm_eval.py."""
    settings, result = scratch / "settings.json", scratch / "result.json"
    given = {"model": model, "model_args": model_args, "tasks": list(tasks), "limit": limit}
    given |= {"include_path": str(HERE.parent / "recipes" / "lm_eval"), "threads": torch.get_num_threads()}
    settings.write_text(json.dumps(given))
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    subprocess.run([sys.executable, HERE / "peers" / "run_lm_eval.py", settings, result], check=True, env=environment)
    return json.loads(result.read_text())


def difference(ours: dict, theirs: dict) -> dict:
    """Largest differences of log-likelihoods, and numbers of generated texts and greedy flags that differ."""
    found = {"continuations": 0.0, "texts": 0.0, "other_greedy_flags": 0, "other_generated_texts": 0}
    for task, samples in theirs["responses"].items():
        for mine, reference in zip(ours["responses"][task], samples, strict=True):
            for a, b in zip(mine, reference, strict=True):
                if isinstance(b, str):
                    found["other_generated_texts"] += a != b
                elif isinstance(b, list):
                    found["continuations"] = max(found["continuations"], abs(a[0] - b[0]))
                    found["other_greedy_flags"] += a[1] != b[1]
                else:
                    found["texts"] = max(found["texts"], abs(a - b))
    return found


def scores(run: dict) -> dict:
    return {
        task: {name: value for name, value in values.items() if name in METRICS}
        for task, values in run["results"].items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limit", type=int, help="documents of each task; all where it is not given")
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--batch-sizes", default="1,4,8", help="of hf; the fastest counts")
    parser.add_argument("--max-length", type=int, default=2048)
    parser.add_argument("--output", type=Path, default=result_path("lm_eval"))
    args = parser.parse_args()
    directory = str(write_directory(resolve_model("demo").path, cache_dir() / "demo-float32", "float32"))
    common = {"pretrained": directory, "dtype": "float32", "max_length": args.max_length}
    peer = common | {"device": "cpu"}
    sizes = [int(size) for size in args.batch_sizes.split(",")]
    tried, ours, theirs = {}, [], []
    with tempfile.TemporaryDirectory() as scratch:
        for size in sizes if len(sizes) > 1 else ():
            tried[size] = evaluate("hf", peer | {"batch_size": size}, TRIAL, Path(scratch))["wall_s"]
            print(f"hf, {TRIAL} documents of each task in batches of {size}: {tried[size]:.1f} s", flush=True)
    peer["batch_size"] = min(tried, key=tried.get) if tried else sizes[0]
    for turn in range(args.turns):
        with tempfile.TemporaryDirectory() as scratch:
            work = {"work_dir": f"{scratch}/work", "progress": "none"}
            ours.append(evaluate("batchgen", common | work, args.limit, Path(scratch)))
            theirs.append(evaluate("hf", peer, args.limit, Path(scratch)))
        print(f"turn {turn + 1}: batchgen {ours[-1]['wall_s']:.1f} s, hf {theirs[-1]['wall_s']:.1f} s", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        exact = peer | {"batch_size": 2, "softmax_dtype": "float64"}
        scored = [task for task in TASKS if task != "listings_address"]
        reference = evaluate("hf", exact, args.limit, Path(scratch), scored)
    times = ("wall_s", "cpu_s", "load_s", "request_s")
    best = [min(runs, key=lambda run: run["wall_s"]) for runs in (ours, theirs)]
    result = {
        "arguments": {k: v for k, v in vars(args).items() if k != "output"},
        "threads": torch.get_num_threads(),
        "hf_batch_size": peer["batch_size"],
        "hf_batch_sizes_s": tried,
        "scores": {"batchgen": scores(best[0]), "hf": scores(best[1])},
        "difference": difference(*best),
        "difference_from_hf_with_float64_softmax": {
            name: difference(run, reference) for name, run in zip(("batchgen", "hf"), best, strict=True)
        },
        "batchgen": [{k: run[k] for k in times} for run in ours],
        "hf": [{k: run[k] for k in times} for run in theirs],
        "ratio": best[1]["wall_s"] / best[0]["wall_s"],
        "ratio_per_turn": [t["wall_s"] / o["wall_s"] for o, t in zip(ours, theirs, strict=True)],
        "ratio_of_cpu_s": best[1]["cpu_s"] / best[0]["cpu_s"],
        "ratio_of_requests": {
            name: best[1]["request_s"][name] / seconds for name, seconds in best[0]["request_s"].items()
        },
        "versions": versions() | best[1]["versions"],
    }
    write(args.output, result)
    print(json.dumps({k: v for k, v in result.items() if k.startswith(("scores", "difference", "ratio"))}, indent=2))


if __name__ == "__main__":
    main()
