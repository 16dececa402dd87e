"""Decode attention beside the machine's plain read rate: KV bytes a second over bytes a second of a plain sum, by query heads of
a KV head, head size, context and type.

    python benchmarks/decode_rates.py
    python benchmarks/decode_rates.py --dtypes bfloat16 --head-dims 128 --groups 1 --contexts 2048

Both read the same memory, far more than caches hold, on as many threads, in turn; a share is the median of the pairs' ratios.
The result goes to benchmarks/results/decode-CPU.json, named after the kind of CPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import numpy as np
import torch
from cpu_kind import machine, slug

from batchgen.core.machine import keep_freed_memory
from batchgen.job.report import versions
from batchgen.ops import cpp as kernels
from batchgen.ops.attention_plan import SequenceSlice, plan_attention
from batchgen.runtime.memory.transfers import untouched

HERE = Path(__file__).parent
BLOCK = 16
KV_HEADS = 8
TARGET = 0.8
PAUSE_S = 0.02  # torch's threads, and ours, go on looking for work for a while


class Case:
    """One query a sequence, sequences of equal length whose blocks lie in random order, KV in all of the pool."""

    def __init__(self, pool: torch.Tensor, group: int, head_dim: int, context: int) -> None:
        block = 2 * KV_HEADS * BLOCK * head_dim
        blocks = context // BLOCK
        sequences = pool.numel() // block // blocks
        used = sequences * blocks
        self.kv = pool[: used * block].view(used, 2, KV_HEADS, BLOCK, head_dim)
        order = np.random.default_rng(0).permutation(used).astype(np.int32)
        slices = [SequenceSlice(1, context - 1, own) for own in order.reshape(sequences, -1)]
        row_bytes = head_dim * pool.element_size()
        plan = plan_attention(slices, [], kv_block_size=BLOCK, key_bytes=KV_HEADS * row_bytes)
        self.plan = kernels.attention_plan(plan, KV_HEADS, group, BLOCK, row_bytes)
        self.q = (torch.randn(sequences, KV_HEADS * group, head_dim) * head_dim**-0.5).to(pool.dtype)
        self.out = torch.empty_like(self.q)

    def attend(self) -> None:
        kernels.attention(self.q, self.kv, self.plan, self.out)


def rate(run, num_bytes: int) -> float:
    """Bytes a second of a call."""
    time.sleep(PAUSE_S)
    started = time.perf_counter()
    run()
    return num_bytes / (time.perf_counter() - started)


def measure(pool: torch.Tensor, group: int, head_dim: int, context: int, pairs: int) -> dict[str, float | bool]:
    """Rates of one case, in bytes a second, and their ratio."""
    case = Case(pool, group, head_dim, context)
    plain = case.kv.view(-1).view(torch.int64)
    case.attend()
    reads, decodes, shares = [], [], []
    for _ in range(pairs):
        reads.append(rate(plain.sum, plain.nbytes))
        decodes.append(rate(case.attend, plain.nbytes))
        shares.append(decodes[-1] / reads[-1])
    share = statistics.median(shares)
    return {
        "share": round(share, 3),
        "kv_gb_per_s": round(statistics.median(decodes) / 1e9, 2),
        "read_gb_per_s": round(statistics.median(reads) / 1e9, 2),
        "target": TARGET,
        "met": share >= TARGET,
    }


def main() -> None:
    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--groups", type=numbers, default=[1, 4, 8], help="query heads of a KV head [default: 1,4,8]")
    parser.add_argument("--head-dims", type=numbers, default=[64, 128])
    parser.add_argument("--contexts", type=numbers, default=[512, 2048, 8192])
    parser.add_argument("--dtypes", type=lambda text: text.split(","), default=["bfloat16", "float32"])
    parser.add_argument("--pairs", type=int, default=5, help="of a plain read and a decode step, for each case")
    parser.add_argument("--mib", type=int, default=512, help="of KV")
    parser.add_argument("--output", type=Path, help="[default: benchmarks/results/decode-CPU.json]")
    args = parser.parse_args()
    keep_freed_memory()  # as the engine does
    torch.manual_seed(0)
    torch.set_num_threads(kernels._kernels.num_threads())
    memory = untouched((args.mib << 20,), torch.uint8)  # huge pages, as the engine's pools have
    found: dict[str, dict] = {}
    for name in args.dtypes:
        dtype = getattr(torch, name)
        pool = memory.view(dtype)
        pool.view(64, -1).copy_(torch.randn(pool.numel() // 64))
        for head_dim in args.head_dims:
            for group in args.groups:
                for context in args.contexts:
                    case = f"{name}, head_dim {head_dim}, group {group}, context {context}"
                    found[case] = figures = measure(pool, group, head_dim, context, args.pairs)
                    print(f"{case:55}", "  ".join(f"{key} {value}" for key, value in figures.items()), flush=True)
    on = machine()
    result = {"machine": on, "instruction_set": kernels._kernels.active(), "decode": found, "versions": versions()}
    output = args.output or HERE / "results" / f"decode-{slug(on)}.json"
    output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
