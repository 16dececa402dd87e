"""batchgen on a CPU against OpenVINO GenAI, vLLM, llama.cpp and transformers: the same token ids in, as many out.

All engines run the same weights in bfloat16, each in an environment of its own. For every measurement an engine's
process is started anew: it loads the model, warms up and generates, and only generating counts; so no engine computes
beside another, and none finds the prompts of a former round in its cache. Free memory is written before, so that none
waits for the host of a virtual machine to provide it. The engines take turns. Workloads: `fixed`
(512 random tokens in, 32 out), `azure` (lengths of the Azure LLM inference trace) and `match` (the entity matching
recipe, whose prompts begin alike). batchgen is also held against what the machine could do at best: the job's FLOPs at
the rate of plain matrix products, and the KV that decoding reads at the rate of memory.

    python benchmarks/cpu_engines.py
    python benchmarks/cpu_engines.py --engines batchgen,vllm --workloads fixed --rows 8 --output trial.json
    python benchmarks/cpu_engines.py --shape qwen3.5-2b --workloads fixed    layers with states, random weights
    python benchmarks/cpu_engines.py --bits 8    batchgen's int8 weights and KV against OpenVINO's defaults
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import random_states
from peers.environments import python_of
from peers.machine_rates import gemm_rates, provide_memory
from peers.model_files import write_bfloat16_gguf, write_directory
from peers.workloads import WORKLOADS, Workload, random_rows, work
from recording import machine, result_path, write

from batchgen.core.machine import available_cores, available_memory_bytes
from batchgen.core.units import parse_bytes
from batchgen.job.report import versions
from batchgen.models.config import ModelConfig
from batchgen.models.files import read_config, resolve_model
from batchgen.profiler.timing import FULL
from batchgen.profiler.transfer import dram_read_rate

HERE = Path(__file__).parent
BATCHGEN = "batchgen"
_GEMM_TOKENS = [64, 128, 256, 512, 1024, 2048]
_WARM_UP = [(64, 8), (128, 8), (256, 8), (512, 8)]  # prompt and output tokens
_RUN_LIMIT_S = 3600
_PLACES = ("work_dir", "output")  # names of this machine's files stay out of the results


class EngineFailed(Exception):
    """An engine is not there, or did not do the job; the message says why in a line."""


@dataclass(frozen=True)
class Setup:
    """How an engine is run. model: the file it reads, made in the work directory where it is not there."""

    script: str
    model: Callable[[Path, Path], Path]  # (the demo's GGUF, work directory) -> what it reads
    settings: dict[str, Any]


def setups(args: argparse.Namespace) -> dict[str, Setup]:
    """The engines, in the order of their turns."""
    seqs, in_8_bits = args.max_num_seqs or 256, args.bits == 8
    own = {
        "max_num_seqs": args.max_num_seqs,
        "max_num_batched_tokens": args.max_num_batched_tokens,
        "cpu_memory": args.cpu_memory,
    }
    both = {
        BATCHGEN: Setup(
            "run_batchgen.py",
            lambda source, folder: source,
            own | ({"weights": "int8", "kv_cache_dtype": "int8"} if in_8_bits else {}),
        ),
        "openvino": Setup(
            "run_openvino.py",
            lambda source, folder: (
                write_bfloat16_gguf(source, folder / "demo-q8_0.gguf", "Q8_0")
                if in_8_bits
                else write_bfloat16_gguf(source, folder / "demo-float16.gguf", "F16")
            ),
            {
                "max_num_seqs": seqs,
                "max_num_batched_tokens": args.openvino_batched_tokens,
                "cache_gb": args.cache_gb,
                "bits": args.bits,
            },
        ),
    }
    if in_8_bits:
        return both
    if args.shape:  # files that these engines read
        vllm = {"max_num_seqs": seqs, "max_num_batched_tokens": args.vllm_batched_tokens, "cache_gb": args.cache_gb}
        batch = {"batch_size": args.transformers_batch}
        return {
            BATCHGEN: both[BATCHGEN],
            "vllm": Setup("run_vllm.py", lambda source, folder: source, vllm),
            "transformers": Setup("run_transformers.py", lambda source, folder: source, batch),
        }
    return both | {
        "vllm": Setup(
            "run_vllm.py",
            lambda source, folder: write_directory(source, folder / "demo-bfloat16"),
            {"max_num_seqs": seqs, "max_num_batched_tokens": args.vllm_batched_tokens, "cache_gb": args.cache_gb},
        ),
        "llama.cpp": Setup(
            "run_llama_cpp.py",
            lambda source, folder: write_bfloat16_gguf(source, folder / "demo-bfloat16.gguf"),
            {"sequences": args.llama_sequences, "batch_tokens": args.llama_batch_tokens},
        ),
        "transformers": Setup(
            "run_transformers.py",
            lambda source, folder: write_directory(source, folder / "demo-bfloat16"),
            {"batch_size": args.transformers_batch},
        ),
    }


class Engine:
    """An engine with its environment and its model's file. Raises EngineFailed where it cannot be installed."""

    def __init__(self, name: str, setup: Setup, args: argparse.Namespace, source: Path) -> None:
        self.name, self._setup, self._args = name, setup, args
        try:
            self._python = sys.executable if name == BATCHGEN else str(python_of(name, args.work_dir))
        except (subprocess.CalledProcessError, OSError) as error:
            raise EngineFailed("its packages cannot be installed") from error
        self._model = setup.model(source, args.work_dir)

    def run(self, workload: Workload, warm_up: list) -> dict[str, Any]:
        """The runner's result for one start of the engine, checked to be the whole job."""
        folder = self._args.work_dir
        job, result, log = (folder / f"{self.name}.{end}" for end in ("job.json", "result.json", "log"))
        result.unlink(missing_ok=True)
        job.write_text(
            json.dumps(
                {
                    "model": str(self._model),
                    "rows": workload.rows,
                    "warm_up": warm_up,
                    "share_prefixes": workload.share_prefixes,
                    "threads": self._args.threads,
                    "settings": self._setup.settings,
                }
            )
        )
        command = [self._python, str(HERE / "peers" / self._setup.script), str(job), str(result)]
        with log.open("wb") as output:
            try:
                code = subprocess.run(
                    command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, timeout=_RUN_LIMIT_S
                ).returncode
            except subprocess.TimeoutExpired:
                raise EngineFailed(f"took longer than {_RUN_LIMIT_S} s") from None
        if code or not result.exists():
            raise EngineFailed(f"ended with {code}: {_last_line(log)}")
        found = json.loads(result.read_text())
        if [len(ids) for ids in found["generated"]] != [count for _, count in workload.rows]:
            raise EngineFailed("did not generate as many tokens as it was asked for")
        return found


def machine_rates(config: ModelConfig) -> dict[str, Any]:
    """What the machine can do at best, measured now."""
    return {"gemm_flops_per_s": gemm_rates(config, _GEMM_TOKENS), "dram_read_bytes_per_s": dram_read_rate(FULL)}


def bound(workload: Workload, config: ModelConfig, rates: list[dict[str, Any]], wall_s: float) -> dict[str, Any]:
    """The least time for the job and its share of batchgen's. Linear layers, logits and prompts' attention count at the
    rate of matrix products at the best number of tokens, single tokens' attention as the KV it reads, and what single
    tokens read and write of states as it is."""
    todo = work(workload, config)
    flops_per_s = max(rate for measured in rates for rate in measured["gemm_flops_per_s"].values())
    bytes_per_s = max(measured["dram_read_bytes_per_s"] for measured in rates)
    seconds = {
        name.replace("flops", "s"): flops / flops_per_s
        for name, flops in todo.items()
        if name in ("linear_flops", "logits_flops", "prefill_attention_flops")
    }
    for name in ("decode_kv", "decode_state"):
        seconds[f"{name}_s"] = todo[f"{name}_bytes"] / bytes_per_s
    least_s = sum(seconds.values())
    return todo | seconds | {"bound_s": least_s, "share_of_wall": least_s / wall_s}


def compare(workload: Workload, runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Per engine the wall times of generation, tokens per second, and how many times as long as batchgen it took."""
    walls = {name: [run["wall_s"] for run in found] for name, found in runs.items()}
    medians = {name: statistics.median(times) for name, times in walls.items()}
    tokens = workload.prompt_tokens + workload.output_tokens
    result: dict[str, Any] = {
        "rows": len(workload.rows),
        "prompt_tokens": workload.prompt_tokens,
        "output_tokens": workload.output_tokens,
        "wall_s": walls,
        "load_s": {name: [run["load_s"] for run in found] for name, found in runs.items()},
        "warm_up_s": {name: [run["warm_up_s"] for run in found] for name, found in runs.items()},
        "peak_resident_bytes": {name: max(r["peak_resident_bytes"] for r in found) for name, found in runs.items()},
        "total_tokens_per_s": {name: tokens / wall for name, wall in medians.items()},
    }
    if BATCHGEN in runs:
        peers = [name for name in runs if name != BATCHGEN]
        result["batchgen_over"] = {name: medians[name] / medians[BATCHGEN] for name in peers}
        result["batchgen_over_per_round"] = {
            name: [theirs / ours for theirs, ours in zip(walls[name], walls[BATCHGEN], strict=False)] for name in peers
        }
        # bfloat16 rounds differently in each engine, yet they must be running the same model.
        result["same_first_token"] = {name: _same_first_token(runs[name][-1], runs[BATCHGEN][-1]) for name in peers}
    return result


def _same_first_token(a: dict[str, Any], b: dict[str, Any]) -> float:
    pairs = list(zip(a["generated"], b["generated"], strict=True))
    return sum(x[0] == y[0] for x, y in pairs) / len(pairs)


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it said nothing"


def _parse(argv: list[str] | None = None) -> argparse.Namespace:
    def names(text: str) -> list[str]:
        return text.split(",")

    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "batchgen-benchmarks"
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engines", type=names, help="separated by commas [default: all]")
    parser.add_argument("--workloads", type=names, default=list(WORKLOADS), help="separated by commas [default: all]")
    parser.add_argument("--shape", choices=random_states.SHAPES, help="of random weights [default: the demo model]")
    parser.add_argument("--bits", type=int, default=16, choices=(16, 8), help="of weights and KV [default: 16]")
    parser.add_argument("--rows", type=int, help="only the first rows [default: 64, and all of `match`]")
    parser.add_argument("--repeats", type=int, default=2, help="the engines take turns this many times")
    parser.add_argument("--threads", type=int, default=available_cores(), help="of the peers")
    parser.add_argument("--max-num-seqs", type=int, help="of all that have such a limit [default: batchgen's own; 256]")
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048, help="of batchgen")
    parser.add_argument("--cpu-memory", type=parse_bytes, help="batchgen's budget [default: its own]")
    parser.add_argument("--openvino-batched-tokens", type=int, default=1024)
    parser.add_argument("--vllm-batched-tokens", type=int, default=2048)
    parser.add_argument("--cache-gb", type=int, default=4, help="KV cache of OpenVINO and vLLM")
    parser.add_argument("--llama-sequences", type=int, default=64, help="rows that llama.cpp has in flight")
    parser.add_argument("--llama-batch-tokens", type=int, default=512)
    parser.add_argument("--transformers-batch", type=int, default=16)
    parser.add_argument("--work-dir", type=Path, default=cache, help="for the peers' environments and models")
    parser.add_argument("--output", type=Path, help="[default: benchmarks/results/cpu_engines-CPU.json]")
    args = parser.parse_args(argv)
    known = list(setups(args))
    args.engines = args.engines or known
    for what, given, there in (("engine", args.engines, known), ("workload", args.workloads, list(WORKLOADS))):
        if unknown := set(given) - set(there):
            parser.error(f"no {what} {sorted(unknown)[0]!r}: there are {', '.join(there)}")
    return args


def main() -> None:
    args = _parse()
    args.work_dir.mkdir(parents=True, exist_ok=True)
    model = str(random_states.make_model(args.work_dir / args.shape, args.shape)) if args.shape else "demo"
    files = resolve_model(model)
    config = read_config(files)
    engines: dict[str, Engine] = {}
    skipped: dict[str, str] = {}

    def skip(name: str, problem: EngineFailed) -> None:
        skipped[name] = str(problem)
        engines.pop(name, None)
        print(f"{name} is left out: {problem}", flush=True)

    for name in args.engines:
        try:
            engines[name] = Engine(name, setups(args)[name], args, files.path)
        except EngineFailed as problem:
            skip(name, problem)
    jobs = {name: WORKLOADS[name](model, config.vocab_size, args.rows) for name in args.workloads}
    warm_up = random_rows(_WARM_UP, config.vocab_size, seed=1)

    rates: list[dict[str, Any]] = []
    runs: dict[str, dict[str, list]] = {name: {} for name in jobs}
    for turn in range(args.repeats):
        rates.append(machine_rates(config))
        for job_name, job in jobs.items():
            for name, engine in list(engines.items()):
                provide_memory(args.cache_gb << 30)
                try:
                    run = engine.run(job, warm_up)
                except EngineFailed as problem:
                    skip(name, problem)
                    continue
                runs[job_name].setdefault(name, []).append(run)
                rate = (job.prompt_tokens + job.output_tokens) / run["wall_s"]
                print(
                    f"round {turn + 1}: {job_name:6} {name:13} {run['wall_s']:7.2f} s, {rate:7,.0f} tokens/s,"
                    f" loaded in {run['load_s']:.0f} s",
                    flush=True,
                )
    found = {name: compare(jobs[name], by_engine) for name, by_engine in runs.items() if by_engine}
    for name, summary in found.items():
        if args.bits == 16 and (ours := summary["wall_s"].get(BATCHGEN)):
            summary["bound"] = bound(jobs[name], config, rates, statistics.median(ours))
    last = {name: done[-1] for by_engine in runs.values() for name, done in by_engine.items()}
    result = {
        "arguments": {k: v for k, v in vars(args).items() if k not in _PLACES},
        "machine": machine() | {"available_memory_bytes": available_memory_bytes(), "rates": rates},
        "workloads": found,
        "settings": {
            job: {name: done[-1]["settings"] for name, done in by_engine.items()} for job, by_engine in runs.items()
        },
        "skipped": skipped,
        "versions": versions() | {"engines": {name: run["versions"] for name, run in last.items()}},
    }
    kind = "cpu_engines" if args.bits == 16 else "cpu_engines_int8"
    if args.shape:
        kind += f"-{args.shape}"
    write(args.output or result_path(kind, by_cpu=True), result)
    for name, summary in found.items():
        ratios = ", ".join(f"{peer} {ratio:.2f}" for peer, ratio in summary.get("batchgen_over", {}).items())
        share = f"; {summary['bound']['share_of_wall']:.0%} of the bound" if "bound" in summary else ""
        print(f"{name}: times as long as batchgen: {ratios or 'no peer'}{share}")


if __name__ == "__main__":
    main()
