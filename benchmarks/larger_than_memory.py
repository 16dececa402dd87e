"""A model larger than memory: batchgen against Accelerate's disk offload and llama.cpp, all inside one memory limit.

The model has Llama-3.2-3B's shape and random weights in bfloat16 (6.4 GB); the limit is a cgroup in which page cache
counts. Engines take turns on the same job: rows of 32 random tokens in and 32 out. Each peer is first tried for a short
time with several batch sizes, and then runs the job with the best one; a run that takes longer than --peer-limit is
stopped, and its time projected from the passes it made. batchgen is also held against what the machine could do at
best: the bytes it read at the disk's rate, or the job's FLOPs at the rate of plain matrix products. Needs root.

    python benchmarks/larger_than_memory.py
    python benchmarks/larger_than_memory.py --engines llama.cpp --peer-limit 60 --output trial.json
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import random_model
from peers.environments import python_of
from peers.machine_rates import disk_read_rate, gemm_rates
from peers.memory_limit import LimitedRun, empty_page_cache, run_limited

from batchgen.core.dtypes import BLOCK_FORMATS
from batchgen.core.machine import available_cores, cpu_name
from batchgen.core.units import format_bytes, parse_bytes
from batchgen.job.report import versions
from batchgen.models.hf.config import config_of_hf

HERE = Path(__file__).parent
BATCHGEN = Path(sys.executable).with_name("batchgen")
ENGINES = ("batchgen", "accelerate", "llama.cpp")
# Python with its libraries, and what each row of a pass works with.
_ACCELERATE_BASE_BYTES, _ACCELERATE_ROW_BYTES = 600 << 20, 3 << 19
# Left out of the results: names of this machine's files, and of the report what is told elsewhere.
_PLACES = ("work_dir", "model", "output")
_REPORT_LEFT_OUT = {"output", "errors_output", "hardware", "predicted", "versions", "first_error"}


class Job:
    """The work, and the files that hold it."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.rows, self.prompt_tokens, self.output_tokens = args.rows, args.prompt_tokens, args.output_tokens
        self.work_dir: Path = args.work_dir
        self.work_dir.mkdir(parents=True, exist_ok=True)
        self.model: Path = args.model or self.work_dir / "llama-3b-random"
        self.gguf = self.model.with_name(self.model.name + ".gguf")
        random_model.make_model(self.model, num_hidden_layers=args.layers)
        if "llama.cpp" in args.engines:
            random_model.write_gguf(self.model, self.gguf)
        self.config = config_of_hf(json.loads((self.model / "config.json").read_text()))
        self.prompts = random_model.prompt_ids(self.rows, self.prompt_tokens, self.config.vocab_size)

    def write_json(self, rows: int) -> Path:
        """The first rows' token ids, for a peer."""
        path = self.work_dir / "prompts.json"
        path.write_text(json.dumps(self.prompts[:rows]))
        return path

    def write_parquet(self) -> Path:
        import pyarrow as pa
        import pyarrow.parquet as pq

        path = self.work_dir / "prompts.parquet"
        pq.write_table(pa.table({"prompt": [random_model.prompt_text(ids) for ids in self.prompts]}), path)
        return path

    @property
    def generated_tokens(self) -> int:
        return self.rows * self.output_tokens

    @property
    def flops(self) -> int:
        """Of the whole job: logits only where a token is drawn, and the last token drawn goes through no layer."""
        fed = range(1, self.prompt_tokens + self.output_tokens)
        unused_logits = (self.prompt_tokens - 1) * 2 * self.config.vocab_size * self.config.embed_size
        return self.rows * (sum(map(self.config.flops_per_token, fed)) - unused_logits)


def run_batchgen(job: Job, args: argparse.Namespace) -> dict[str, Any]:
    """The job by the command line. A row or two go first, so that converting and measuring are done once."""
    output, report_file = job.work_dir / "output.parquet", job.work_dir / "report.json"
    command = [
        str(BATCHGEN), "run", "--model", str(job.model), "--input", str(job.write_parquet()), "--output", str(output),
        "--max-tokens", str(job.output_tokens), "--ignore-eos", "--cpu-memory", str(args.cpu_memory),
        "--report", str(report_file), "--progress", "none", "--overwrite", *args.batchgen_option,
    ]  # fmt: skip
    if not args.no_first_run:
        first = _limited([*command, "--limit", "2"], job, args, "batchgen-first", timeout_s=3600)
        _require_success(first, job, "batchgen-first")
    limited = _limited(command, job, args, "batchgen", timeout_s=3600)
    _require_success(limited, job, "batchgen")
    report = json.loads(report_file.read_text())
    if report["rows_ok"] != job.rows or report["generated_tokens"] != job.generated_tokens:
        raise SystemExit(f"batchgen did {report['rows_ok']} rows and {report['generated_tokens']} tokens: not the job")
    return {
        "complete": True,
        "load_s": report["load_s"],
        "generation_s": report["wall_s"] - report["load_s"],
        "wall_s": limited.wall_s,
        "limited": asdict(limited),
        "report": {key: value for key, value in report.items() if key not in _REPORT_LEFT_OUT},
        "first_tokens": _first_tokens(output),
    }


def run_accelerate(job: Job, args: argparse.Namespace, rows: int, batch_size: int, limit_s: float) -> dict[str, Any]:
    """generate() in batches of batch_size, with as many layers in memory as the limit allows: where it is exceeded, with
    fewer again."""
    config = job.config
    kv_bytes = batch_size * (job.prompt_tokens + job.output_tokens) * config.kv_bytes_per_token(2)
    layer_bytes = 2 * config.params_per_layer
    taken = _ACCELERATE_BASE_BYTES + batch_size * _ACCELERATE_ROW_BYTES + kv_bytes
    taken += 2 * (config.embedding_params + config.head_params) + layer_bytes
    resident = min(config.num_layers, max(0, args.memory - taken) // layer_bytes)
    while True:
        run = _run_peer(
            "accelerate", "accelerate_offload.py", job, args, rows, limit_s,
            ["--model", str(job.model), "--batch-size", str(batch_size), "--resident-layers", str(resident),
             "--offload-dir", str(job.work_dir / "accelerate-offload")],
        )  # fmt: skip
        run["settings"] = {"batch_size": batch_size, "resident_layers": resident}
        if not run.get("killed") or resident == 0:
            return run
        resident //= 2


def run_llama_cpp(job: Job, args: argparse.Namespace, rows: int, sequences: int, limit_s: float) -> dict[str, Any]:
    """`sequences` rows in parallel, prompts in passes of at most --llama-batch-tokens."""
    options = ["--model", str(job.gguf), "--sequences", str(sequences), "--batch-tokens", str(args.llama_batch_tokens)]
    run = _run_peer("llama.cpp", "llama_cpp_sequences.py", job, args, rows, limit_s, options)
    return run | {"settings": {"sequences": sequences, "batch_tokens": args.llama_batch_tokens}}


PEERS = {"accelerate": run_accelerate, "llama.cpp": run_llama_cpp}


def _run_peer(
    peer: str, script: str, job: Job, args: argparse.Namespace, rows: int, limit_s: float, options: list[str]
) -> dict[str, Any]:
    """One run of a peer's script, with its projection to the whole job; {"killed": True} where memory did not do."""
    output = job.work_dir / "peer.json"
    output.unlink(missing_ok=True)
    command = [
        str(python_of(peer, job.work_dir)), str(HERE / "peers" / script), *options,
        "--prompts", str(job.write_json(rows)), "--max-new-tokens", str(job.output_tokens),
        "--threads", str(args.threads), "--limit-s", str(limit_s), "--output", str(output),
    ]  # fmt: skip
    limited = _limited(command, job, args, peer, timeout_s=2 * limit_s + 600)
    if limited.oom_kills:
        return {"killed": True, "limited": asdict(limited)}
    _require_success(limited, job, peer)
    found = json.loads(output.read_text())
    passes = found.pop("passes")
    complete = found["complete"] and rows == job.rows
    projected_s = found["generation_s"] if complete else projection(passes, job)
    return {
        "complete": complete,
        "load_s": found["load_s"],
        "measured_s": found["generation_s"],
        "generation_s": projected_s,
        "wall_s": limited.wall_s if complete else projected_s and projected_s + found["load_s"],
        "passes": len(passes),
        "prompt_pass_s": [round(p["seconds"], 2) for p in passes if p["prompt_tokens"]],
        "decode_pass_s": [round(p["seconds"], 2) for p in passes if not p["prompt_tokens"]],
        "limited": asdict(limited),
        "versions": found["versions"],
        "first_tokens": [ids[:1] for ids in found["generated"]],
    }


def projection(passes: list[dict], job: Job) -> float | None:
    """Seconds for the whole job, from the passes made: what is left takes as long per token as what was done, prompts
    and single tokens apart. None where there was no pass of either kind."""
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


def probe(engine: str, job: Job, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A short run at each batch size; most promising first."""
    sizes = [size for size in (args.batch_sizes if engine == "accelerate" else args.sequences) if size <= job.rows]
    trials = []
    for size in sizes if len(sizes) > 1 else []:
        trial = PEERS[engine](job, args, size, size, args.probe_s)
        if trial.get("killed"):
            said = "out of memory"
        else:
            said = f"whole job in {trial['generation_s']:.0f} s" if trial["generation_s"] else "no token in time"
        print(f"  {engine} at {size}: {said}", flush=True)
        trials.append(trial | {"size": size})
    usable = [trial for trial in trials if trial.get("generation_s")]
    if trials and not usable:
        raise SystemExit(f"{engine} does not fit: none of {sizes} sequences")
    return sorted(usable, key=lambda trial: trial["generation_s"]) or [{"size": size} for size in sizes]


def run_best(engine: str, job: Job, args: argparse.Namespace, sizes: list[int]) -> dict[str, Any]:
    """The job at the first of these sizes that memory lasts for: a short trial does not show how much KV there will be."""
    for size in sizes:
        run = PEERS[engine](job, args, job.rows, size, args.peer_limit)
        if run.get("generation_s"):
            return run
        print(f"  {engine} at {size}: out of memory", flush=True)
    raise SystemExit(f"{engine} does not fit with any of {sizes} sequences")


def sweep_tokens(job: Job, run: dict[str, Any]) -> set[int]:
    """Tokens of the sweeps that batchgen's run had: of decoding, and the most."""
    policy = run["report"]["policy"]
    most = min(policy["max_num_batched_tokens"], job.rows * job.prompt_tokens)
    return {min(policy["max_num_seqs"], job.rows), most}


def bound(job: Job, run: dict[str, Any], disk_bytes_per_s: float, counts: set[int]) -> dict[str, Any]:
    """The least time for batchgen's run: its reads at the disk's rate or the job's FLOPs at the rate of matrix products,
    the best of these numbers of rows, of torch's in bfloat16 and of those that the run had weights for."""
    rates = gemm_rates(job.config, sorted(counts))
    if (stored := run["report"]["policy"]["weight_format"]) in BLOCK_FORMATS:
        packed = gemm_rates(job.config, sorted(counts), stored)
        rates = {count: max(rates[count], packed[count]) for count in rates}
    disk_s = run["report"]["bytes_moved"]["disk_read"] / disk_bytes_per_s
    compute_s = job.flops / max(rates.values())
    return {
        "disk_read_bytes_per_s": disk_bytes_per_s,
        "gemm_flops_per_s": rates,
        "disk_s": disk_s,
        "compute_s": compute_s,
        "bound_s": max(disk_s, compute_s),
        "share_of_bound": max(disk_s, compute_s) / run["generation_s"],
    }


def summary(runs: list[dict[str, Any]], job: Job) -> dict[str, Any]:
    """Per engine the best round's tokens per second, and batchgen's ratios; those of each round where all took part."""
    rates = {
        engine: [job.generated_tokens / run["generation_s"] for run in runs if run["engine"] == engine]
        for engine in dict.fromkeys(run["engine"] for run in runs)
    }
    result: dict[str, Any] = {
        "generated_tokens_per_s": {engine: max(values) for engine, values in rates.items()},
        "generated_tokens_per_s_with_start": {
            engine: max(job.generated_tokens / run["wall_s"] for run in runs if run["engine"] == engine)
            for engine in rates
        },
    }
    if "batchgen" in rates:
        result["share_of_bound"] = [run["bound"]["share_of_bound"] for run in runs if "bound" in run]
        for peer in rates.keys() - {"batchgen"}:
            result[f"batchgen_over_{peer}"] = max(rates["batchgen"]) / max(rates[peer])
            result[f"batchgen_over_{peer}_per_round"] = [
                b / p for b, p in zip(rates["batchgen"], rates[peer], strict=True)
            ]
    return result


def same_first_token(runs: list[dict[str, Any]]) -> dict[str, float]:
    """Share of rows that begin with the same token, for each pair of engines: bfloat16 rounds differently in each, yet
    they must be running the same model."""
    last = {run["engine"]: run["first_tokens"] for run in runs}
    shares = {}
    for a, b in ((a, b) for a in last for b in last if a < b):
        pairs = [(x, y) for x, y in zip(last[a], last[b], strict=False) if x and y]
        if pairs:
            shares[f"{a}, {b}"] = sum(x == y for x, y in pairs) / len(pairs)
    return shares


def _limited(command: list[str], job: Job, args: argparse.Namespace, name: str, *, timeout_s: float) -> LimitedRun:
    empty_page_cache([*job.model.glob("*.safetensors"), *([job.gguf] if job.gguf.exists() else [])])
    return run_limited(command, args.memory, job.work_dir / f"{name}.log", timeout_s=timeout_s)


def _require_success(limited: LimitedRun, job: Job, name: str) -> None:
    if limited.exit_code or limited.oom_kills:
        raise SystemExit(f"{name} failed ({limited}):\n{_end_of_log(job, name)}")


def _end_of_log(job: Job, name: str) -> str:
    return (job.work_dir / f"{name}.log").read_text(errors="replace")[-2000:]


def _first_tokens(output: Path) -> list[list[int]]:
    import pyarrow.parquet as pq

    return [[int(word[1:]) for word in text.split()[:1]] for text in pq.read_table(output)["text"].to_pylist()]


def _parse(argv: list[str] | None = None) -> argparse.Namespace:
    def sizes(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "batchgen-benchmarks"
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--engines", type=lambda text: text.split(","), default=list(ENGINES), help="separated by commas"
    )
    parser.add_argument("--rounds", type=int, default=1, help="the engines take turns this many times")
    parser.add_argument("--memory", type=parse_bytes, default="3GiB", help="the limit, page cache included")
    parser.add_argument("--cpu-memory", type=parse_bytes, help="batchgen's budget [default: the limit less 0.2 GiB]")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--batch-sizes", type=sizes, default="32,64,128,192", help="those tried with Accelerate")
    parser.add_argument("--sequences", type=sizes, default="64,96,128,256", help="those tried with llama.cpp")
    parser.add_argument("--llama-batch-tokens", type=int, default=1024, help="most tokens in one pass of llama.cpp")
    parser.add_argument("--threads", type=int, default=available_cores(), help="of the peers")
    parser.add_argument("--probe-s", type=float, default=30, help="time for each batch size tried")
    parser.add_argument("--peer-limit", type=float, default=600, help="seconds after which a peer's run is projected")
    parser.add_argument(
        "--batchgen-option", action="append", default=[], help="more for `batchgen run`; may be repeated"
    )
    parser.add_argument("--no-first-run", action="store_true", help="batchgen has converted this model already")
    parser.add_argument("--work-dir", type=Path, default=cache, help="for the model and the peers' environments")
    parser.add_argument("--model", type=Path, help="where the random model is, or is made [default: in the work dir]")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "larger_than_memory.json")
    args = parser.parse_args(argv)
    if unknown := set(args.engines) - set(ENGINES):
        parser.error(f"no engine {sorted(unknown)[0]!r}: there are {', '.join(ENGINES)}")
    args.cpu_memory = args.cpu_memory or args.memory - (205 << 20)
    return args


def main() -> None:
    args = _parse()
    job = Job(args)
    peers = [engine for engine in args.engines if engine in PEERS]
    for peer in peers:
        python_of(peer, job.work_dir)
    print(f"{job.rows} rows, {job.flops / 1e12:.0f} TFLOP, within {format_bytes(args.memory)}", flush=True)
    probes = {peer: probe(peer, job, args) for peer in peers}
    runs: list[dict[str, Any]] = []
    for turn in range(args.rounds):
        for engine in args.engines:
            if engine == "batchgen":
                disk = disk_read_rate(sorted(job.model.glob("*.safetensors")))
                run = run_batchgen(job, args)
                run["bound"] = bound(job, run, disk, sweep_tokens(job, run))
            else:
                run = run_best(engine, job, args, [trial["size"] for trial in probes[engine]])
            runs.append({"engine": engine, "round": turn + 1} | run)
            rate, limited = job.generated_tokens / run["generation_s"], run["limited"]
            print(
                f"round {turn + 1}: {engine:10} {rate:6.1f} generated tokens/s, {run['generation_s']:5.0f} s"
                + ("" if run["complete"] else f" projected from {run['measured_s']:.0f} s")
                + f", peak {format_bytes(limited['peak_bytes'])} ({format_bytes(limited['peak_resident_bytes'])} resident)"
                + (f", {run['bound']['share_of_bound']:.0%} of the bound" if "bound" in run else ""),
                flush=True,
            )
    result = {
        "benchmark": "larger_than_memory",
        "command": "python benchmarks/larger_than_memory.py",
        "arguments": {k: v for k, v in vars(args).items() if k not in _PLACES},
        "machine": {"cores": available_cores(), "cpu": cpu_name()},
        "flops": job.flops,
        "weight_bytes": job.config.weight_bytes(2),
        "summary": summary(runs, job) | {"same_first_token": same_first_token(runs)},
        "runs": [{k: v for k, v in run.items() if k != "first_tokens"} for run in runs],
        "probes": {k: [{n: v for n, v in t.items() if n != "first_tokens"} for t in p] for k, p in probes.items()},
        "versions": versions(),
    }
    args.output.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result["summary"], indent=2))


if __name__ == "__main__":
    main()
