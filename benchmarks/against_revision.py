"""This checkout against another one of batchgen: the same jobs in turn, the same tokens, and how much longer they take.

    python benchmarks/against_revision.py --other ../batchgen-before --rounds 3

Both need an environment in `.venv` with their kernels built. Each measurement is a process of its own, which loads the demo
model, warms up and generates; only generating counts. Jobs: `fixed` (random prompts of 512 tokens, 32 out), and `match` (the
quickstart's prompts, which begin alike).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "against_revision.json"
# Runs in either checkout, so it uses nothing but what both export.
_RUN = """
import json, sys, time
import batchgen
rows, dtype, shared = json.load(open(sys.argv[1]))
params = [batchgen.SamplingParams(max_tokens=n, ignore_eos=True) for _, n in rows]
with batchgen.Engine("demo", dtype=dtype, share_prefixes=shared, cpu_memory="6GiB") as engine:
    list(engine.generate([batchgen.Request(list(range(200, 456)), params[0])] * 2))
    began = time.perf_counter()
    done = {c.index: c.samples[0].token_ids for c in engine.generate(
        [batchgen.Request(ids, p) for (ids, _), p in zip(rows, params)])}
    seconds = time.perf_counter() - began
print(json.dumps([seconds, [list(done[i]) for i in range(len(rows))]]))
"""


def measure(checkout: Path, job: Path) -> tuple[float, list[list[int]]]:
    done = subprocess.run(
        [checkout / ".venv" / "bin" / "python", "-c", _RUN, job], cwd=checkout, capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(f"{checkout}: {done.stderr[-2000:]}")
    seconds, tokens = json.loads(done.stdout.splitlines()[-1])
    return seconds, tokens


def revision(checkout: Path) -> str:
    return subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=checkout, capture_output=True, text=True, check=True
    ).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--other", type=Path, required=True, help="the other checkout")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=24, help="of each job")
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from peers.workloads import WORKLOADS

    from batchgen.core.machine import cpu_name
    from batchgen.models.files import read_config, resolve_model

    vocab = read_config(resolve_model("demo")).vocab_size
    checkouts = {"here": ROOT, "other": args.other.resolve()}
    result = {"cpu": cpu_name(), "date": time.strftime("%Y-%m-%d"), "dtype": args.dtype, "rows": args.rows, "jobs": {}}
    result["revisions"] = {name: revision(path) for name, path in checkouts.items()}
    with tempfile.TemporaryDirectory() as folder:
        for name in ("fixed", "match"):
            work = WORKLOADS[name]("demo", vocab, args.rows)
            job = Path(folder, "job.json")
            job.write_text(json.dumps([work.rows, args.dtype, work.share_prefixes]))
            seconds: dict[str, list[float]] = {"here": [], "other": []}
            tokens = []
            for turn in range(args.rounds):
                for side in sorted(checkouts, reverse=bool(turn % 2)):
                    taken, made = measure(checkouts[side], job)
                    seconds[side].append(round(taken, 3))
                    tokens.append(made)
                    print(f"{name} {side}: {taken:.2f} s", flush=True)
            result["jobs"][name] = {
                "seconds": seconds,
                "ratio": round(
                    statistics.median(a / b for a, b in zip(seconds["here"], seconds["other"], strict=True)), 4
                ),
                "tokens_equal": all(made == tokens[0] for made in tokens),
            }
            print(name, result["jobs"][name]["ratio"], "tokens equal:", result["jobs"][name]["tokens_equal"])
    RESULT.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
