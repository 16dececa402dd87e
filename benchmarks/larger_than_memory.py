"""A mixture of experts larger than memory: batchgen against llama.cpp on the same shape, inside one memory limit.

Shapes are gpt-oss-20b's in MXFP4 (12.5 GB), and those of Qwen3-30B-A3B (17.5 GB), Qwen3.6-35B-A3B (20 GB; three of
four layers keep a state) and Gemma 4 26B-A4B (15 GB) in Q4_0, with random weights. The limit is a cgroup in which page
cache counts. Rows have 64 random tokens in and 32 out.

llama.cpp is first tried for a short time with several numbers of sequences, and then runs the job with the best one. A
run that takes longer than --peer-limit is stopped, and its time projected from the passes it made. batchgen is also
held against what the machine could do at best: the bytes it read at the disk's rate, the job's FLOPs at the best rate
of matrix products of one expert's or a layer's size, or the states that single tokens read and write at the memory's
rate, whichever takes longest. The runs of an engine that is left
out stay in the file. Needs root, and the shape's size twice on the disk (once without llama.cpp).

    python benchmarks/larger_than_memory.py --shape gpt-oss-20b --work-dir DIR
    python benchmarks/larger_than_memory.py --shape qwen3-30b-a3b --engines batchgen --work-dir DIR
    python benchmarks/larger_than_memory.py --layers 2 --rows 32 --memory 5GiB --output trial.json --work-dir DIR
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import random_shapes
from peers.environments import python_of
from peers.machine_rates import disk_read_rate, gemm_rates
from peers.memory_limit import LimitedRun, empty_page_cache, run_limited
from peers.workloads import Workload, work
from random_model import prompt_ids, prompt_text
from recording import machine, result_path, write

from batchgen.core.dtypes import BLOCK_FORMATS
from batchgen.core.machine import available_cores
from batchgen.core.units import format_bytes, parse_bytes
from batchgen.profiler.timing import FULL
from batchgen.profiler.transfer import dram_read_rate

BATCHGEN = Path(sys.executable).with_name("batchgen")
LLAMA_CPP = Path(__file__).parent / "peers" / "llama_cpp_sequences.py"
ENGINES = ["batchgen", "llama.cpp"]
MEMORY = {
    "gpt-oss-20b": "8GiB",
    "qwen3-30b-a3b": "10GiB",
    "qwen3.6-35b-a3b": "10GiB",
    "gemma-4-26b-a4b": "10GiB",
}
_BESIDE_FRAC = 0.08  # of the limit, for what the kernel counts beside the process
_SAME_JOB = ("shape", "layers", "memory", "rows", "prompt_tokens", "output_tokens")
_REPORT_LEFT_OUT = {"command", "host", "output", "errors_output", "hardware", "predicted", "versions", "first_error"}


class Job:
    """The rows, and the files of the model."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.rows, self.prompt_tokens, self.output_tokens = args.rows, args.prompt_tokens, args.output_tokens
        self.work_dir: Path = args.work_dir
        self.work_dir.mkdir(parents=True, exist_ok=True)
        name = args.shape if args.layers is None else f"{args.shape}-{args.layers}"
        self.model, self.gguf = self.work_dir / name, self.work_dir / f"{name}.gguf"
        self.config, _ = random_shapes.config_of(args.shape, args.layers)
        random_shapes.write_store(self.model, args.shape, args.layers)
        if "llama.cpp" in args.engines:
            random_shapes.write_gguf(self.gguf, args.shape, args.layers)
        self.prompts = prompt_ids(self.rows, self.prompt_tokens, self.config.vocab_size)

    def write_json(self, rows: int) -> Path:
        """The first rows' token ids, for llama.cpp."""
        path = self.work_dir / "prompts.json"
        path.write_text(json.dumps(self.prompts[:rows]))
        return path

    def write_parquet(self) -> Path:
        """The prompts as texts, for batchgen."""
        path = self.work_dir / "prompts.parquet"
        pq.write_table(pa.table({"prompt": [prompt_text(ids) for ids in self.prompts]}), path)
        return path

    @property
    def generated_tokens(self) -> int:
        return self.rows * self.output_tokens

    @property
    def flops(self) -> int:
        """FLOPs of the job: logits only where a token is drawn, and the last token drawn goes through no layer."""
        fed = range(1, self.prompt_tokens + self.output_tokens)
        unused_logits = (self.prompt_tokens - 1) * 2 * self.config.vocab_size * self.config.embed_size
        return self.rows * (sum(map(self.config.flops_per_token, fed)) - unused_logits)


def run_batchgen(job: Job, args: argparse.Namespace) -> dict[str, Any]:
    """Runs the job by the command line, after two rows of it for which the machine is measured."""
    disk = disk_read_rate(sorted(job.model.glob("layer-*.safetensors")))
    output, report_file = job.work_dir / "output.parquet", job.work_dir / "report.json"
    command = [
        str(BATCHGEN), "run", "--model", str(job.model), "--input", str(job.write_parquet()), "--output", str(output),
        "--max-tokens", str(job.output_tokens), "--ignore-eos", "--report", str(report_file), "--progress", "none",
        "--cpu-memory", str(int(args.memory * (1 - _BESIDE_FRAC))), "--overwrite", *args.batchgen_option,
    ]  # fmt: skip
    if not args.no_first_run:
        _require_success(_limited([*command, "--limit", "2"], job, args, "batchgen-first", 3600), job, "batchgen-first")
    limited = _limited(command, job, args, "batchgen", 3600)
    _require_success(limited, job, "batchgen")
    report = json.loads(report_file.read_text())
    if report["rows_ok"] != job.rows or report["generated_tokens"] != job.generated_tokens:
        raise SystemExit(f"batchgen did {report['rows_ok']} rows and {report['generated_tokens']} tokens: not the job")
    run = {
        "complete": True,
        "load_s": report["load_s"],
        "generation_s": report["wall_s"] - report["load_s"],
        "wall_s": limited.wall_s,
        "limited": asdict(limited),
        "report": {key: value for key, value in report.items() if key not in _REPORT_LEFT_OUT},
    }
    return run | {"bound": bound(job, run, disk)}


def run_llama_cpp(job: Job, args: argparse.Namespace, rows: int, sequences: int, limit_s: float) -> dict[str, Any]:
    """Runs rows of the job with so many sequences at a time; {"killed": True} where memory did not do."""
    output = job.work_dir / "peer.json"
    output.unlink(missing_ok=True)
    settings = {"sequences": sequences, "batch_tokens": args.llama_batch_tokens}
    command = [
        str(python_of("llama.cpp", job.work_dir)), str(LLAMA_CPP), "--model", str(job.gguf),
        "--sequences", str(sequences), "--batch-tokens", str(args.llama_batch_tokens),
        "--prompts", str(job.write_json(rows)), "--max-new-tokens", str(job.output_tokens),
        "--threads", str(args.threads), "--limit-s", str(limit_s), "--output", str(output),
    ]  # fmt: skip
    limited = _limited(command, job, args, "llama.cpp", 2 * limit_s + 600)
    if limited.oom_kills:
        return {"killed": True, "limited": asdict(limited)}
    _require_success(limited, job, "llama.cpp")
    answer = json.loads(output.read_text())
    passes = answer["passes"]
    complete = answer["complete"] and rows == job.rows
    projected_s = answer["generation_s"] if complete else projection(passes, job)
    return {
        "complete": complete,
        "load_s": answer["load_s"],
        "measured_s": answer["generation_s"],
        "generation_s": projected_s,
        "wall_s": limited.wall_s if complete else projected_s and projected_s + answer["load_s"],
        "passes": len(passes),
        "prompt_pass_s": [round(p["seconds"], 2) for p in passes if p["prompt_tokens"]],
        "decode_pass_s": [round(p["seconds"], 2) for p in passes if not p["prompt_tokens"]],
        "limited": asdict(limited),
        "versions": answer["versions"],
        "settings": settings,
    }


def projection(passes: list[dict], job: Job) -> float | None:
    """Seconds of the whole job: what is left takes as long per token as what was done, prompts and single tokens apart.

    Returns:
        None where there was no pass of either kind.
    """
    prompts = [p for p in passes if p["prompt_tokens"]]
    decodes = [p for p in passes if not p["prompt_tokens"]]
    if not prompts or not decodes:
        return None
    done_prompt = sum(p["prompt_tokens"] for p in prompts)
    left_prompt = job.rows * job.prompt_tokens - done_prompt
    left_first_tokens = left_prompt // job.prompt_tokens  # they come with their prompts
    left_tokens = job.generated_tokens - sum(p["generated_tokens"] for p in passes) - left_first_tokens
    prompt_s = sum(p["seconds"] for p in prompts) / done_prompt
    token_s = sum(p["seconds"] for p in decodes) / sum(p["generated_tokens"] for p in decodes)
    return sum(p["seconds"] for p in passes) + left_prompt * prompt_s + left_tokens * token_s


def promising_sequences(job: Job, args: argparse.Namespace) -> list[int]:
    """Numbers of sequences after a short run with each, the fastest first."""
    sizes = [size for size in args.sequences if size <= job.rows]
    if len(sizes) == 1:
        return sizes
    seconds: dict[int, float] = {}
    for size in sizes:
        trial = run_llama_cpp(job, args, size, size, args.probe_s)
        if trial.get("generation_s"):
            seconds[size] = trial["generation_s"]
        said = "out of memory" if trial.get("killed") else "no token in time"
        print(f"  llama.cpp at {size}: " + (f"{seconds[size]:.0f} s" if size in seconds else said), flush=True)
    if not seconds:
        raise SystemExit(f"llama.cpp does not fit: none of {sizes} sequences")
    return sorted(seconds, key=seconds.__getitem__)


def run_best(job: Job, args: argparse.Namespace) -> dict[str, Any]:
    """The job with the first number of sequences that memory lasts for.

    A short run does not show how much KV there will be.
    """
    for size in promising_sequences(job, args):
        run = run_llama_cpp(job, args, job.rows, size, args.peer_limit)
        if run.get("generation_s"):
            return run
        print(f"  llama.cpp at {size}: out of memory", flush=True)
    raise SystemExit("llama.cpp does not fit")


def bound(job: Job, run: dict[str, Any], disk_bytes_per_s: float) -> dict[str, Any]:
    """The least time of batchgen's run, by its reads, the job's FLOPs or the traffic of states.

    Products count at the best rate of the tokens of its sweeps or of the part of them that an expert gets, of torch's
    in bfloat16 and of those of the format that the weights are in.
    """
    policy, config = run["report"]["policy"], job.config
    counts = {
        min(policy["max_num_seqs"], job.rows),
        min(policy["max_num_batched_tokens"], job.rows * job.prompt_tokens),
    }
    counts |= {max(1, count * config.experts_per_token // config.num_experts) for count in counts}
    rates = gemm_rates(config, sorted(counts))
    if (stored := policy["weight_format"]) in BLOCK_FORMATS:
        packed = gemm_rates(config, sorted(counts), stored)
        rates = {count: max(rates[count], packed[count]) for count in rates}
    disk_s = run["report"]["bytes_moved"]["disk_read"] / disk_bytes_per_s
    compute_s = job.flops / max(rates.values())
    memory_bytes_per_s = dram_read_rate(FULL)
    states = work(Workload([(ids, job.output_tokens) for ids in job.prompts]), config)["decode_state_bytes"]
    state_s = states / memory_bytes_per_s
    bound_s = max(disk_s, compute_s, state_s)
    return {
        "disk_read_bytes_per_s": disk_bytes_per_s,
        "gemm_flops_per_s": rates,
        "disk_s": disk_s,
        "compute_s": compute_s,
        "dram_read_bytes_per_s": memory_bytes_per_s,
        "state_s": state_s,
        "bound_s": bound_s,
        "share_of_bound": bound_s / run["generation_s"],
        "predicted_over_measured": run["report"]["predicted_wall_s"] / run["report"]["wall_s"],
    }


def summary(runs: list[dict[str, Any]], job: Job) -> dict[str, Any]:
    """Generated tokens per second of each engine, and batchgen's ratio."""
    rates = {run["engine"]: job.generated_tokens / run["generation_s"] for run in runs}
    result: dict[str, Any] = {"generated_tokens_per_s": rates}
    if rates.keys() >= set(ENGINES):
        result["batchgen_over_llama.cpp"] = rates["batchgen"] / rates["llama.cpp"]
    return result


def _limited(command: list[str], job: Job, args: argparse.Namespace, name: str, timeout_s: float) -> LimitedRun:
    empty_page_cache([*job.model.glob("*.safetensors"), *([job.gguf] if job.gguf.exists() else [])])
    return run_limited(command, args.memory, job.work_dir / f"{name}.log", timeout_s=timeout_s)


def _require_success(limited: LimitedRun, job: Job, name: str) -> None:
    if limited.exit_code or limited.oom_kills:
        log = (job.work_dir / f"{name}.log").read_text(errors="replace")[-2000:]
        raise SystemExit(f"{name} failed ({limited}):\n{log}")


def _kept(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Runs of the file, of the same job on the same machine, by engines that are left out this time."""
    if not args.output.exists():
        return []
    before = json.loads(args.output.read_text())
    same = before["machine"] == machine() and all(
        before["arguments"][name] == getattr(args, name) for name in _SAME_JOB
    )
    return [run for run in before["runs"] if same and run["engine"] not in args.engines]


def _parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=MEMORY, default="gpt-oss-20b")
    parser.add_argument("--engines", type=lambda text: text.split(","), default=ENGINES)
    parser.add_argument("--memory", type=parse_bytes, help="the limit, page cache included [default: by shape]")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--layers", type=int, help="the first layers alone [default: all]")
    parser.add_argument(
        "--sequences", type=lambda text: [int(part) for part in text.split(",")], default="1,16,64,256",
        help="numbers tried with llama.cpp",
    )  # fmt: skip
    parser.add_argument("--llama-batch-tokens", type=int, default=1024, help="most tokens in one pass of llama.cpp")
    parser.add_argument("--threads", type=int, default=available_cores(), help="threads of llama.cpp")
    parser.add_argument("--probe-s", type=float, default=60, help="time for each number of sequences tried")
    parser.add_argument("--peer-limit", type=float, default=600, help="seconds after which llama.cpp is projected")
    parser.add_argument("--batchgen-option", action="append", default=[], help="more for `batchgen run`")
    parser.add_argument("--no-first-run", action="store_true", help="the machine has been measured already")
    parser.add_argument("--work-dir", type=Path, required=True, help="for the model and llama.cpp's environment")
    parser.add_argument("--output", type=Path, help="[default: results/larger_than_memory-SHAPE-MEMORY-CPU.json]")
    args = parser.parse_args(argv)
    if unknown := set(args.engines) - set(ENGINES):
        parser.error(f"no engine {sorted(unknown)[0]!r}: there are {', '.join(ENGINES)}")
    args.memory = args.memory or parse_bytes(MEMORY[args.shape])
    name = f"larger_than_memory-{args.shape}-{args.memory / 2**30:g}GiB"
    args.output = args.output or result_path(name, by_cpu=True)
    return args


def main() -> None:
    args = _parse()
    job = Job(args)
    print(f"{job.rows} rows, {job.flops / 1e12:.1f} TFLOP, within {format_bytes(args.memory)}", flush=True)
    kept, runs = _kept(args), []
    for engine in args.engines:
        run = run_batchgen(job, args) if engine == "batchgen" else run_best(job, args)
        runs.append({"engine": engine} | run)
        print(
            f"{engine:10} {job.generated_tokens / run['generation_s']:6.1f} generated tokens/s,"
            f" {run['generation_s']:5.0f} s"
            + ("" if run["complete"] else f" projected from {run['measured_s']:.0f} s")
            + f", peak {format_bytes(run['limited']['peak_bytes'])}",
            flush=True,
        )
        in_order = sorted(runs + kept, key=lambda run: ENGINES.index(run["engine"]))
        result = {
            "arguments": {k: v for k, v in vars(args).items() if k not in ("work_dir", "output")},
            "flops": job.flops,
            "weight_bytes": sum(file.stat().st_size for file in job.model.glob("*.safetensors")),
            "summary": summary(in_order, job),
            "runs": in_order,
        }
        write(args.output, result)  # at once: another engine may not get through
    print(json.dumps(result["summary"], indent=2))


if __name__ == "__main__":
    main()
