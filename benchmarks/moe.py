"""A mixture of experts larger than memory: batchgen against llama.cpp on the same shape, inside one memory limit.

gpt-oss-20b's shape in MXFP4 (12.5 GB) within 8 GiB, or Qwen3-30B-A3B's in Q4_0 (17.5 GB) within 10 GiB, with random weights; the
limit is a cgroup in which page cache counts. Rows of 64 random tokens in and 32 out. The rest is as in larger_than_memory.py:
bounds are the bytes that batchgen read at the disk's rate, or the job's FLOPs at the best rate of products of one expert's or a
layer's size, whichever takes longer. What an engine that is left out had in the same job stays in the file. Needs root, and the shape's size twice on the disk (once without llama.cpp).

    python benchmarks/moe.py --shape gpt-oss-20b
    python benchmarks/moe.py --shape qwen3-30b-a3b --engines batchgen
    python benchmarks/moe.py --shape gpt-oss-20b --layers 2 --rows 32 --memory 5GiB --output trial.json     # a tenth of it
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import larger_than_memory as base
import random_mixture
import random_model
from cpu_kind import machine, slug
from peers.environments import python_of
from peers.machine_rates import disk_read_rate

from batchgen.core.machine import available_cores
from batchgen.core.units import format_bytes, parse_bytes
from batchgen.job.report import versions

HERE = Path(__file__).parent
ENGINES = ["batchgen", "llama.cpp"]
_JOB = ("shape", "layers", "memory", "rows", "prompt_tokens", "output_tokens")
MEMORY = {"gpt-oss-20b": "8GiB", "qwen3-30b-a3b": "10GiB"}
# Of the limit, for what the kernel counts beside the process.
_BESIDE_FRAC = 0.08


class Job(base.Job):
    """The work, and the files that hold it."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.rows, self.prompt_tokens, self.output_tokens = args.rows, args.prompt_tokens, args.output_tokens
        self.work_dir: Path = args.work_dir
        self.work_dir.mkdir(parents=True, exist_ok=True)
        name = args.shape if args.layers is None else f"{args.shape}-{args.layers}"
        self.model, self.gguf = self.work_dir / name, self.work_dir / f"{name}.gguf"
        self.config, _ = random_mixture.config_of(args.shape, args.layers)
        random_mixture.write_store(self.model, args.shape, args.layers)
        if "llama.cpp" in args.engines:
            random_mixture.write_gguf(self.gguf, args.shape, args.layers)
        self.prompts = random_model.prompt_ids(self.rows, self.prompt_tokens, self.config.vocab_size)


def bound(job: Job, run: dict[str, Any], disk_bytes_per_s: float) -> dict[str, Any]:
    """The least time for batchgen's run. Products: the best rate of sweeps of its block, or of the part of it that an expert gets."""
    counts, config = base.sweep_tokens(job, run), job.config
    counts |= {max(1, count * config.experts_per_token // config.num_experts) for count in counts}
    return base.bound(job, run, disk_bytes_per_s, counts) | {
        "predicted_over_measured": run["report"]["predicted_wall_s"] / run["report"]["wall_s"],
    }


def _kept(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Of the same job on the same machine, the runs of engines that are left out this time."""
    if not args.output.exists():
        return []
    before = json.loads(args.output.read_text())
    same = before["machine"] == machine() and all(before["arguments"][name] == getattr(args, name) for name in _JOB)
    return [run for run in before["runs"] if same and run["engine"] not in args.engines]


def _parse(argv: list[str] | None = None) -> argparse.Namespace:
    def sizes(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=MEMORY, default="gpt-oss-20b")
    parser.add_argument("--engines", type=lambda text: text.split(","), default=ENGINES)
    parser.add_argument("--memory", type=parse_bytes, help="the limit, page cache included [default: by shape]")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--layers", type=int, help="the first layers alone [default: all]")
    parser.add_argument("--sequences", type=sizes, default="1,16,64,256", help="those tried with llama.cpp")
    parser.add_argument("--llama-batch-tokens", type=int, default=1024, help="most tokens in one pass of llama.cpp")
    parser.add_argument("--threads", type=int, default=available_cores(), help="of llama.cpp")
    parser.add_argument("--probe-s", type=float, default=60, help="time for each number of sequences tried")
    parser.add_argument(
        "--peer-limit", type=float, default=600, help="seconds after which llama.cpp's run is projected"
    )
    parser.add_argument("--batchgen-option", action="append", default=[], help="more for `batchgen run`")
    parser.add_argument("--no-first-run", action="store_true", help="the machine has been measured already")
    parser.add_argument("--work-dir", type=Path, required=True, help="for the model and llama.cpp's environment")
    parser.add_argument("--output", type=Path, help="[default: results/moe-SHAPE-CPU.json]")
    args = parser.parse_args(argv)
    if unknown := set(args.engines) - set(ENGINES):
        parser.error(f"no engine {sorted(unknown)[0]!r}: there are {', '.join(ENGINES)}")
    args.memory = args.memory or parse_bytes(MEMORY[args.shape])
    args.cpu_memory = int(args.memory * (1 - _BESIDE_FRAC))
    args.output = args.output or HERE / "results" / f"moe-{args.shape}-{slug(machine())}.json"
    return args


def main() -> None:
    args = _parse()
    if "llama.cpp" in args.engines:
        python_of("llama.cpp", args.work_dir)
    job = Job(args)
    print(f"{job.rows} rows, {job.flops / 1e12:.1f} TFLOP, within {format_bytes(args.memory)}", flush=True)
    runs: list[dict[str, Any]] = []
    for engine in args.engines:
        if engine == "batchgen":
            disk = disk_read_rate(sorted(job.model.glob("layer-*.safetensors")))
            run = base.run_batchgen(job, args)
            run["bound"] = bound(job, run, disk)
        else:
            run = base.run_best(engine, job, args, [trial["size"] for trial in base.probe(engine, job, args)])
        runs.append({"engine": engine} | run)
        print(
            f"{engine:10} {job.generated_tokens / run['generation_s']:6.1f} generated tokens/s, {run['generation_s']:5.0f} s"
            + ("" if run["complete"] else f" projected from {run['measured_s']:.0f} s")
            + f", peak {format_bytes(run['limited']['peak_bytes'])}",
            flush=True,
        )
        if "bound" in run:
            shares = {k: round(v, 2) for k, v in run["bound"].items() if isinstance(v, float)}
            print(f"  {shares}", flush=True)
        summary = _write(runs + _kept(args), job, args)  # at once: another engine may not get through
    print(json.dumps(summary, indent=2))


def _write(runs: list[dict[str, Any]], job: Job, args: argparse.Namespace) -> dict[str, Any]:
    """Writes the result of these runs, and gives its summary."""
    runs = sorted(runs, key=lambda run: ENGINES.index(run["engine"]))
    result = {
        "benchmark": "moe",
        "command": f"python benchmarks/moe.py --shape {args.shape} --memory {args.memory / 2**30:g}GiB",
        "arguments": {k: v for k, v in vars(args).items() if k not in ("work_dir", "output")},
        "machine": machine(),
        "flops": job.flops,
        "weight_bytes": sum(file.stat().st_size for file in job.model.glob("*.safetensors")),
        "summary": base.summary([{**run, "round": 1} for run in runs], job),
        "runs": [{k: v for k, v in run.items() if k != "first_tokens"} for run in runs],
        "versions": versions(),
    }
    args.output.write_text(json.dumps(result, indent=2) + "\n")
    return result["summary"]


if __name__ == "__main__":
    main()
