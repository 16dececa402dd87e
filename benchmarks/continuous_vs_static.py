"""Continuous admission against FlexGen's zig-zag schedule: the same KV budget, outputs of 1 to 128 tokens, weights streamed.

The zig-zag schedule runs a block to its end: with all rows at the longest output, which is what it must reserve memory for,
the block is KV / (prompt + 128) rows. Continuous admission refills places as rows end and admits on projected KV.

    python benchmarks/continuous_vs_static.py --work-dir DIR
"""

from __future__ import annotations

import argparse
import random
import statistics
from pathlib import Path

from tier_runs import SHAPE, model_in, prompts, run, write

from batchgen.core.device import Device
from batchgen.core.plan import Policy

GIB = 1 << 30
PROMPT, MOST_OUTPUT = 32, 128


def policy(admission: str, max_num_seqs: int) -> Policy:
    """All weights in host memory, streamed to an emulated accelerator that holds the KV."""
    layers = SHAPE["num_hidden_layers"]
    return Policy(
        admission=admission,
        gpu_batch_size=max_num_seqs,
        num_gpu_batches=1,
        max_num_batched_tokens=1024,
        max_model_len=PROMPT + MOST_OUTPUT,
        kv_block_size=16,
        kv_blocks={},
        share_prefixes=False,
        weight_format="bfloat16",
        kv_format="bfloat16",
        weight_layers={group: (0, layers, 0) for group in ("qkv", "out", "up", "down")},
        head_tier="gpu",
        kv_seqs={"gpu": max_num_seqs},
        activation_batches=(1, 0),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work-dir", type=Path, required=True, help="for the model")
    parser.add_argument("--rows", type=int, default=160)
    parser.add_argument("--block", type=int, default=16, help="rows of a static block, which set the KV budget")
    parser.add_argument("--h2d", type=float, default=4.0, help="GB/s of the emulated link")
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    model = model_in(args.work_dir)
    draw = random.Random(1)
    lens = [draw.randint(1, MOST_OUTPUT) for _ in range(args.rows)]
    rows = prompts(args.rows, PROMPT)
    # Just the KV of a static block: what the accelerator has beside it is the same for both.
    kv_tokens = args.block * (PROMPT + MOST_OUTPUT)
    device = Device("emulated", 2 * GIB, args.h2d * 1e9, args.h2d * 1e9)
    results: dict[str, list[dict]] = {"static": [], "continuous": []}
    for _ in range(args.rounds):
        for admission in results:
            places = args.block if admission == "static" else 8 * args.block
            results[admission].append(
                run(model, device, policy(admission, places), rows, lens, work_dir=args.work_dir, kv_tokens=kv_tokens)
            )
            print(admission, f"{results[admission][-1]['generated_tokens_per_s']:.1f} generated tokens/s")
    pairs = zip(results["continuous"], results["static"], strict=True)
    ratios = [c["generated_tokens_per_s"] / s["generated_tokens_per_s"] for c, s in pairs]
    mean, square = statistics.mean(lens), statistics.mean(n * n for n in lens)
    in_theory = (PROMPT + MOST_OUTPUT) / (PROMPT + square / (2 * mean)) * MOST_OUTPUT / mean
    print(
        f"continuous is {statistics.median(ratios):.2f} times as fast; tokens per weight load in theory {in_theory:.2f}"
    )
    write(
        "continuous_vs_static",
        {"rows": args.rows, "kv_tokens": kv_tokens, "h2d_bytes_per_s": args.h2d * 1e9, "ratios": ratios,
         "tokens_per_load_in_theory": in_theory, "runs": results},
    )  # fmt: skip


if __name__ == "__main__":
    main()
