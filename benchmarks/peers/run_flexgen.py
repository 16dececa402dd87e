"""FlexGen 0.1.8 by its Python interface: an OPT of dummy weights, one block of prompts, under one policy. Runs in an
environment that has flexgen; nothing of batchgen is needed. Writes JSON, see `main`."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import tempfile
import time

_GROUPS = {"num_bits": 4, "group_size": 64, "symmetric": False}


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="facebook/opt-30b")
    parser.add_argument("--gpu-memory-bytes", type=int, required=True, help="what torch may take of the card")
    parser.add_argument("--host-memory-bytes", type=int, required=True, help="what the policy was made for")
    parser.add_argument("--gpu-batch-size", type=int, required=True)
    parser.add_argument("--num-gpu-batches", type=int, required=True)
    parser.add_argument(
        "--percent", type=int, nargs=6, required=True, help="of weights, cache, activations on GPU and CPU"
    )
    parser.add_argument("--cpu-cache-compute", action="store_true")
    parser.add_argument("--prompt-len", type=int, required=True)
    parser.add_argument("--gen-len", type=int, required=True)
    parser.add_argument("--output", required=True)
    return parser.parse_args(argv)


def main() -> None:
    import torch
    from flexgen.compression import CompressionConfig
    from flexgen.flex_opt import OptLM, Policy
    from flexgen.opt_config import get_opt_config
    from flexgen.pytorch_backend import TorchDevice, TorchDisk, TorchMixedDevice
    from flexgen.timer import timers
    from flexgen.utils import ExecutionEnv

    args = arguments()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, args.gpu_memory_bytes / total))
    limits = {
        "gpu_bytes": min(total, args.gpu_memory_bytes), "host_bytes": args.host_memory_bytes, "dtype": "float16",
    }  # fmt: skip
    gpu, cpu = TorchDevice("cuda:0"), TorchDevice("cpu")
    with tempfile.TemporaryDirectory() as folder:
        disk = TorchDisk(folder)
        env = ExecutionEnv(gpu=gpu, cpu=cpu, disk=disk, mixed=TorchMixedDevice([gpu, cpu, disk]))
        policy = Policy(
            args.gpu_batch_size, args.num_gpu_batches, *args.percent, True, True, True, args.cpu_cache_compute, 1.0,
            False, CompressionConfig(group_dim=0, **_GROUPS), False, CompressionConfig(group_dim=2, **_GROUPS),
        )  # fmt: skip
        rows = args.gpu_batch_size * args.num_gpu_batches
        started = time.perf_counter()
        model = OptLM(get_opt_config(args.model), env, "_DUMMY_", policy)
        loaded = time.perf_counter()
        try:
            model.generate([[2] + [100 + i % 1000] * 31 for i in range(rows)], max_new_tokens=1)
            timers("generate").reset()
            begun = time.perf_counter()
            prompts = [[2] + [100 + (i + j) % 1000 for j in range(args.prompt_len - 1)] for i in range(rows)]
            model.generate(prompts, max_new_tokens=args.gen_len)
            wall_s = time.perf_counter() - begun
        finally:
            env.close_copy_threads()
        costs = timers("generate").costs
    result = {
        "limits": limits,  # its weights and KV are fp16 whatever the model's own
        "block": rows,
        "load_s": loaded - started,
        "generation_s": wall_s,
        "prefill_s": costs[0],
        "decode_s": sum(costs[1:]),
        "generated_tokens": rows * args.gen_len,
        "generated_tokens_per_s": rows * args.gen_len / wall_s,
        "peak_gpu_bytes": torch.cuda.max_memory_allocated(),
        "policy": {name: value for name, value in vars(args).items() if name != "output"},
        "versions": {name: importlib.metadata.version(name) for name in ("flexgen", "torch", "transformers")},
    }
    with open(args.output, "w") as file:
        json.dump(result, file)


if __name__ == "__main__":
    main()
