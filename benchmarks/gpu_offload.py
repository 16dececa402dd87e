"""A model larger than the GPU: batchgen against FlexGen and Accelerate's offload, in turns on one card held to 16 GiB.

    python benchmarks/gpu_offload.py --python-flexgen env/bin/python --python-accelerate env/bin/python

The model has OPT-30B's shape (60 GB in fp16) and made-up weights; prompts have 512 tokens, outputs 32. FlexGen runs one block
under each of a few policies around the one it was published with, as many sequences as host memory holds, and Accelerate
several batch sizes; the best of each counts. Writes benchmarks/results/gpu_offload.json.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from batchgen.machine import available_memory_bytes
from batchgen.model_files import read_config, without_weights
from batchgen.runtime.cuda import usable_memory
from batchgen.units import size_bytes

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
ENGINES = ("batchgen", "flexgen", "accelerate")


def run(command: list, output: Path, limit_s: float) -> dict:
    """What the process wrote, or what went wrong with it."""
    output.unlink(missing_ok=True)
    try:
        done = subprocess.run(
            [*map(str, command), "--output", str(output)], capture_output=True, text=True, timeout=limit_s
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"took longer than {limit_s:.0f} s"}
    if not output.exists():
        return {"failed": (done.stdout + done.stderr).strip()[-600:]}
    return json.loads(output.read_text())


def flexgen_policies(seq_bytes: float, weight_bytes: float) -> list[list[str]]:
    """The published one for OPT-30B on 16 GB (20 % of weights on the GPU, KV and attention on the CPU, three GPU batches),
    in blocks that host memory holds, and neighbours of it."""
    block = max(3, int((0.85 * available_memory_bytes() - weight_bytes) / seq_bytes))
    policies = []
    for batches, percent, on_cpu in ((3, (20, 80, 0, 100, 0, 100), True), (3, (10, 90, 0, 100, 0, 100), True),
                                     (3, (10, 90, 0, 100, 0, 100), False)):  # fmt: skip
        size = max(1, min(48, block // batches))
        flags = ["--gpu-batch-size", size, "--num-gpu-batches", batches, "--percent", *percent]
        policies.append([str(x) for x in flags] + ["--cpu-cache-compute"] * on_cpu)
    return policies


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=ENGINES)
    parser.add_argument("--shape", default="opt-30b")
    parser.add_argument("--gpu-memory", default="16GiB")
    parser.add_argument("--num-prompts", type=int, default=288)
    parser.add_argument("--prompt-len", type=int, default=512)
    parser.add_argument("--gen-len", type=int, default=32)
    parser.add_argument("--limit-s", type=float, default=400, help="for each run")
    parser.add_argument("--policies", type=int, default=3, help="of FlexGen, how many are tried")
    parser.add_argument("--python-flexgen", default=sys.executable)
    parser.add_argument("--python-accelerate", default=sys.executable)
    parser.add_argument("--output", type=Path, default=HERE / "results" / "gpu_offload.json")
    args = parser.parse_args()
    shape = ROOT / "recipes" / "throughput" / "shapes" / args.shape
    config = read_config(without_weights(str(shape)))
    tensors = usable_memory(size_bytes(args.gpu_memory))
    lengths = ["--prompt-len", args.prompt_len, "--gen-len", args.gen_len]
    seq_bytes = config.num_layers * (args.prompt_len + args.gen_len) * 4 * config.num_kv_heads * config.head_dim
    result: dict = {
        "job": {name: str(value) for name, value in vars(args).items() if "python" not in name and name != "output"}
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.json"
        for engine in args.engines:
            print(f"== {engine}", flush=True)
            if engine == "batchgen":
                command = [
                    sys.executable,
                    HERE / "gpu_case.py",
                    shape,
                    "--gpu-memory",
                    args.gpu_memory,
                    "--num-prompts",
                ]
                command += [args.num_prompts, "--input-len", args.prompt_len, "--output-len", args.gen_len]
                runs = [run(command, path, args.limit_s)]
            elif engine == "flexgen":
                command = [
                    args.python_flexgen,
                    HERE / "peers" / "run_flexgen.py",
                    "--gpu-memory-bytes",
                    tensors,
                    *lengths,
                ]
                command += ["--model", f"facebook/{args.shape}"]
                policies = flexgen_policies(seq_bytes, 2 * config.num_params)[: args.policies]
                runs = [run([*command, *policy], path, args.limit_s) for policy in policies]
            else:
                script = HERE / "peers" / "accelerate_gpu_offload.py"
                runs = []
                for size in (8, 4, 2):  # the largest that its memory holds
                    weights = int(0.85 * tensors - 2 * size * seq_bytes - 4 * config.num_layers)
                    command = [
                        args.python_accelerate,
                        script,
                        "--shape",
                        shape,
                        "--gpu-memory-bytes",
                        tensors,
                        *lengths,
                    ]
                    command += ["--weights-bytes", max(1 << 30, weights), "--batch-size", size, "--limit-s", 60]
                    runs.append(run(command, path, args.limit_s))
                    if "failed" not in runs[-1]:
                        break
            for found in runs:
                print(
                    json.dumps({k: found.get(k) for k in ("generated_tokens_per_s", "generation_s", "failed")}),
                    flush=True,
                )
            result[engine] = {"runs": runs, "best": max(r.get("generated_tokens_per_s", 0.0) for r in runs)}
            args.output.write_text(json.dumps(result, indent=1) + "\n")
    ours = result.get("batchgen", {}).get("best", 0.0)
    result["times"] = {e: ours / result[e]["best"] for e in args.engines if e != "batchgen" and result[e]["best"]}
    args.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["times"]))


if __name__ == "__main__":
    main()
