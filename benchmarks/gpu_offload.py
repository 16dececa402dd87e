"""A model larger than the GPU: batchgen, FlexGen and Accelerate's offload in turns, each held to the same memory.

    python benchmarks/gpu_offload.py --python-flexgen env/bin/python --python-accelerate env/bin/python

The model has OPT-30B's shape (60 GB in fp16) and dummy weights; prompts have 512 tokens, outputs 32. FlexGen runs one
block under each of a few policies around the one it was published with, as many sequences as host memory holds, and
Accelerate several batch sizes; in the first round all are tried, in the others the best of each engine. Ratios are
those of a round.

All engines compute in fp16 and have the same two limits: torch may take --gpu-memory less a CUDA context (enforced by
torch), and a process, with all it pins, --host-memory (watched: one that takes more is killed, and does not count).
Every run tells its limits; runs whose limits differ are refused. batchgen's job is planned, or, with --policy cpu or
streamed, under a plain policy with the largest block that host memory holds; which of them it was is in the result.
"of_bound": see `gpu_bound`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from gpu_bound import Job, Rates, bound
from gpu_parts import PLANNER

from batchgen.core.device import parse_device
from batchgen.core.machine import available_memory_bytes
from batchgen.core.units import size_bytes
from batchgen.models.config import ModelConfig
from batchgen.models.files import read_config, without_weights
from batchgen.runtime.cuda import _CONTEXT_BYTES

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
ENGINES = ("batchgen", "flexgen", "accelerate")
DTYPE = "float16"
_LOOK_S = 0.1
_LIMITS_ALIKE_FRAC = 1e-3  # limits are whole bytes of fractions of a card


def run(
    command: list, output: Path, limit_s: float, host_bytes: int, available: Callable[[], int] = available_memory_bytes
) -> dict:
    """What the process wrote, with the most host memory that was taken meanwhile; or what went wrong with it.

    available: the machine's free memory in bytes: what is pinned or shared shows there, and not in a process's own
    size."""
    output.unlink(missing_ok=True)
    at_first = least = available()
    ends, failed = time.monotonic() + limit_s, None
    with tempfile.TemporaryFile("w+") as told:
        # In this process's group: whoever ends that ends the engine as well, and the card is free.
        process = subprocess.Popen([*map(str, command), "--output", str(output)], stdout=told, stderr=told)
        while process.poll() is None and failed is None:
            time.sleep(_LOOK_S)
            least = min(least, available())
            if at_first - least > host_bytes:
                failed = f"took more host memory than {host_bytes:,} bytes"
            elif time.monotonic() > ends:
                failed = f"took longer than {limit_s:.0f} s"
        process.kill()
        process.wait()
        if failed is None and not output.exists():
            told.seek(0)
            failed = told.read().strip()[-600:] or f"exit status {process.returncode}"
    if failed is not None:
        return {"failed": failed}
    return json.loads(output.read_text()) | {"host_taken_bytes": at_first - least}


def flexgen_policies(seq_bytes: int, weight_bytes: int, host_bytes: int) -> list[list[str]]:
    """FlexGen's published policy for OPT-30B on 16 GB, in blocks that host memory holds, and neighbours of it.

    It has 20 % of the weights on the GPU, KV and attention on the CPU, and three GPU batches.
    """
    block = max(3, int((0.85 * host_bytes - weight_bytes) / seq_bytes))
    policies = []
    for batches, percent, on_cpu in ((3, (20, 80, 0, 100, 0, 100), True), (3, (10, 90, 0, 100, 0, 100), True),
                                     (3, (10, 90, 0, 100, 0, 100), False)):  # fmt: skip
        size = max(1, min(48, block // batches))
        flags = ["--gpu-batch-size", size, "--num-gpu-batches", batches, "--percent", *percent]
        policies.append([str(x) for x in flags] + ["--cpu-cache-compute"] * on_cpu)
    return policies


def commands(engine: str, args: argparse.Namespace, config: ModelConfig, shape: Path) -> list[list]:
    """An engine's variants, the first ones first."""
    lengths = ["--prompt-len", args.prompt_len, "--gen-len", args.gen_len]
    limits = ["--gpu-memory-bytes", torch_bytes(args), "--host-memory-bytes", size_bytes(args.host_memory)]
    seq_bytes = config.kv_bytes_per_token(2) * (args.prompt_len + args.gen_len)
    if engine == "batchgen":
        job = ["--num-prompts", args.num_prompts, "--input-len", args.prompt_len, "--output-len", args.gen_len]
        own = ["--policy", args.policy, "--device", args.device, "--gpu-memory", args.gpu_memory]
        own += ["--num-gpu-batches", 1 if args.policy == "planned" else 2, "--dtype", DTYPE]
        own += ["--host-memory", args.host_memory, *(["--hardware", args.hardware] if args.hardware else [])]
        return [[sys.executable, HERE / "gpu_case.py", shape, *job, *own]]
    if engine == "flexgen":
        script = [args.python_flexgen, HERE / "peers" / "run_flexgen.py", "--model", f"facebook/{args.shape.name}"]
        policies = flexgen_policies(seq_bytes, config.weight_bytes(2), size_bytes(args.host_memory))
        return [[*script, *limits, *lengths, *policy] for policy in policies[: args.variants]]
    found = []
    for size in (8, 4, 2)[: args.variants]:
        weights = max(1 << 30, int(0.85 * torch_bytes(args) - 2 * size * seq_bytes - 4 * config.num_layers))
        script = [
            args.python_accelerate,
            HERE / "peers" / "accelerate_gpu_offload.py",
            "--shape",
            shape,
            "--dtype",
            DTYPE,
        ]
        found.append([*script, *limits, *lengths, "--weights-bytes", weights, "--batch-size", size, "--limit-s", 60])
    return found


def torch_bytes(args: argparse.Namespace) -> int:
    """What torch may take of a card of --gpu-memory: for batchgen, `cap_memory` sees to it."""
    whole = size_bytes(args.gpu_memory)
    return whole - _CONTEXT_BYTES if parse_device(args.device).kind == "cuda" else whole


def against_bound(found: dict, args: argparse.Namespace, config: ModelConfig, rates: Rates) -> dict:
    """The run, with how near it came to what any schedule must take for its rows under its limits."""
    if "failed" in found:
        return found
    rows, limits = round(found["generated_tokens_per_s"] * found["generation_s"] / args.gen_len), found["limits"]
    job = Job(rows, args.prompt_len, args.gen_len, limits["gpu_bytes"], limits["host_bytes"], DTYPE, DTYPE, DTYPE)
    return found | {"rows": rows, "of_bound": bound(config, job, rates).seconds / found["generation_s"]}


def check_alike(result: dict) -> None:
    """Raises SystemExit where two runs had different limits."""
    runs = [(e, r["limits"]) for e in ENGINES if e in result for r in result[e]["runs"] if "failed" not in r]
    for engine, limits in runs[1:]:
        first_engine, first = runs[0]
        sizes = [abs(limits[n] - first[n]) <= _LIMITS_ALIKE_FRAC * first[n] for n in ("gpu_bytes", "host_bytes")]
        if not all(sizes) or limits["dtype"] != first["dtype"]:
            sys.exit(f"gpu_offload: {first_engine} had {first}, {engine} {limits}: that is no comparison")


def ratios(result: dict) -> dict[str, list[float]]:
    """batchgen's rate over each other engine's, round by round."""
    ours = result.get("batchgen", {}).get("rounds", [])
    return {
        engine: [a / b for a, b in zip(ours, result[engine]["rounds"], strict=False) if a and b]
        for engine in ENGINES
        if engine != "batchgen" and engine in result
    }


def one_round(engine: str, number: int, variants: list[list], try_one: Callable[[list], dict], so_far: dict) -> None:
    """Adds an engine's runs of a round: of all variants in the first one, then of the best."""
    best, best_before = 0.0, so_far["best_variant"]
    for i in range(len(variants)):
        if number and i != best_before:
            continue
        found = try_one(variants[i]) | {"round": number, "variant": i}
        so_far["runs"].append(found)
        rate = found.get("generated_tokens_per_s", 0.0)
        if rate > best:
            best, so_far["best_variant"] = rate, i
        if engine == "accelerate" and rate:  # the largest batch that its memory holds
            break
    so_far["rounds"].append(best)


def said(engine: str, results: dict) -> str:
    """An engine's best rate, or why its last run failed, in a line."""
    if best := max(results["rounds"]):
        return f"{engine} {best:,.1f} generated tokens/s"
    return f"{engine} failed: {results['runs'][-1]['failed'].splitlines()[-1]}"


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=ENGINES)
    parser.add_argument("--shape", type=Path, default=ROOT / "recipes" / "throughput" / "shapes" / "opt-30b")
    parser.add_argument("--policy", choices=("planned", "cpu", "streamed"), default="planned", help="of batchgen")
    parser.add_argument("--hardware", help="profile that batchgen plans with")
    parser.add_argument("--device", default="cuda", help="of batchgen")
    parser.add_argument("--gpu-memory", default="16GiB")
    parser.add_argument("--host-memory", default="96GiB")
    parser.add_argument("--num-prompts", type=int, default=288)
    parser.add_argument("--prompt-len", type=int, default=512)
    parser.add_argument("--gen-len", type=int, default=32)
    parser.add_argument("--limit-s", type=float, default=400, help="for each run")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--variants", type=int, default=3, help="of FlexGen's policies and Accelerate's batch sizes")
    parser.add_argument("--python-flexgen", default=sys.executable)
    parser.add_argument("--python-accelerate", default=sys.executable)
    parser.add_argument("--output", type=Path, default=HERE / "results" / "gpu_offload.json")
    args = parser.parse_args(argv)
    missing = [name for name in PLANNER if find_spec(name) is None]
    if "batchgen" in args.engines and args.policy == "planned" and missing:
        parser.error(
            f"{' and '.join(missing)} not installed, so nothing can be planned: --policy cpu or streamed is plain"
        )
    return args


def main() -> None:
    args = arguments()
    config = read_config(without_weights(str(args.shape)))
    job = {n: str(v) for n, v in vars(args).items() if not n.startswith("python") and n != "output"}
    result: dict = {"job": job, "batchgen_policy": args.policy if args.policy == "planned" else f"plain: {args.policy}"}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.json"
        kind = "cuda" if args.device == "cuda" else "cpu"
        measuring = [sys.executable, HERE / "gpu_rates.py", "--device", kind, "--dtype", DTYPE]
        measured = run(measuring, path, args.limit_s, size_bytes(args.host_memory))
        if "failed" in measured:
            sys.exit(f"gpu_offload: {measured['failed']}")
        result |= {name: measured[name] for name in ("machine", "rates")}
        rates = Rates(**result["rates"])

        def try_one(command: list) -> dict:
            found = run(command, path, args.limit_s, size_bytes(args.host_memory))
            told = {k: found.get(k) for k in ("generated_tokens_per_s", "generation_s", "failed")}
            print(json.dumps(told), flush=True)
            return against_bound(found, args, config, rates)

        for number in range(args.rounds):
            for engine in args.engines:
                print(f"== {engine}, round {number + 1}", flush=True)
                so_far = result.setdefault(engine, {"runs": [], "rounds": [], "best_variant": None})
                one_round(engine, number, commands(engine, args, config, args.shape), try_one, so_far)
                args.output.write_text(json.dumps(result, indent=1) + "\n")
                check_alike(result)
    result["times"] = ratios(result)
    args.output.write_text(json.dumps(result, indent=1) + "\n")
    summary = ", ".join(said(engine, result[engine]) for engine in ENGINES if engine in result)
    if not any(max(result[engine]["rounds"]) for engine in args.engines):
        sys.exit(f"gpu_offload: {summary}")
    print(f"summary: {summary}")


if __name__ == "__main__":
    main()
