"""The C++ kernels beside what the machine does: plain reads, torch's own attention and matrix products.

Each rate is measured in turn with the other in the same run, and block-quantized weights beside bf16 ones. Decode and
the dequantization of weights are measured on the machine's best instruction set, the others on each that it has.

    python benchmarks/kernel_rates.py
    python benchmarks/kernel_rates.py --only decode --rounds 1
    python benchmarks/kernel_rates.py --only linear --rounds 1 --seconds 0.02 --tokens 1,64,1024 --keep
    python benchmarks/kernel_rates.py --only packed --rounds 3 --seconds 0.1 --keep

The result goes to benchmarks/results/kernels-CPU.json, named after the kind of CPU, so that those of other machines
stay. With --keep what is not measured now stays in it.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from recording import machine, result_path, write

from batchgen.core import dtypes as formats
from batchgen.core.machine import keep_freed_memory
from batchgen.ops import cpp as kernels
from batchgen.ops import dispatch, quant
from batchgen.ops.attention_plan import SequenceSlice, SweepTables, plan_attention
from batchgen.runtime.memory.transfers import untouched

BLOCK = 16
DECODE_KV_BYTES = 768 << 20  # attended to by one call: far more than caches hold
DECODE_TARGETS = {1: 0.80, 4: 0.65, 8: 0.55}
PACKED_KV_TARGET, PREFILL_TARGET = 1.5, 3.0
LINEAR_TARGET, LINEAR_WORST = 1.15, 0.95
LINEAR_SHAPES = ((576, 1536), (1536, 576), (2048, 8192), (8192, 2048), (3072, 3072), (4096, 14336))  # columns, depth
LINEAR_TOKENS = [4**i for i in range(7)]
PACKED_TARGET, PACKED_SHAPE, PACKED_TOKENS = 2.5, (3072, 8192), (1, 4, 8, 16)
# Instruction sets that have a row, measured or not.
SETS = {"x86_64": ("amx", "avx512_bf16", "avx512", "avx2")}


def seconds(run: Callable[[], object], at_least_s: float) -> float:
    """Median time of a call."""
    run()
    taken: list[float] = []
    deadline = time.perf_counter() + at_least_s
    while len(taken) < 3 or time.perf_counter() < deadline:
        started = clock()
        run()
        taken.append(clock() - started)
    return statistics.median(taken)


class Measured:
    """Figures of each round, and targets of their ratios."""

    def __init__(self) -> None:
        self.rounds: dict[str, list[dict]] = {}
        self.targets: dict[str, float] = {}

    def add(self, name: str, target: float | None = None, **figures: float) -> None:
        """Adds a round's figures, of which "ratio" is held to the target."""
        self.rounds.setdefault(name, []).append(figures)
        if target is not None:
            self.targets[name] = target

    def summary(self) -> dict[str, dict]:
        found = {}
        for name, rounds in self.rounds.items():
            found[name] = {key: round(statistics.median(r[key] for r in rounds), 3) for key in rounds[0]}
            if name in self.targets:
                found[name] |= {"target": self.targets[name], "met": found[name]["ratio"] >= self.targets[name]}
        return found


class Decode:
    """Decode attention: one query a sequence, sequences of equal length, all KV from memory."""

    def __init__(self, pool: torch.Tensor, group: int, head_dim: int, context: int, kv_format: str) -> None:
        kv_heads = 8
        shape = (2, kv_heads, BLOCK, head_dim)
        kv = pool[: pool.numel() // (2 * kv_heads * BLOCK * head_dim) * 2 * kv_heads * BLOCK * head_dim].view(
            -1, *shape
        )
        self.sequences = len(kv) // (context // BLOCK)
        used = self.sequences * (context // BLOCK)
        self.kv = kv[:used]
        self.bits = formats.KVFormat.of(kv_format).bits
        if self.bits:
            packed = quant.quantize(kv[:used], self.bits)
            self.kv = untouched(packed.shape, packed.dtype).copy_(packed)
        self.bytes = self.kv.nbytes
        order = np.random.default_rng(0).permutation(used).astype(np.int32)
        slices = [SequenceSlice(1, context - 1, b) for b in order.reshape(self.sequences, -1)]
        plan = plan_attention(SweepTables.of(slices), [], kv_block_size=BLOCK, key_bytes=kv_heads * head_dim * 2)
        row_bytes = self.kv.shape[-1] * self.kv.element_size()
        self.plan = kernels.attention_plan(plan, kv_heads, group, BLOCK, row_bytes)
        self.q = (torch.randn(self.sequences, kv_heads * group, head_dim) * head_dim**-0.5).bfloat16()

    def run(self) -> None:
        kernels.attention(self.q, self.kv, self.plan, bits=self.bits)


def decode(measured: Measured, pool: torch.Tensor, at_least_s: float) -> None:
    plain = untouched((1 << 27,), torch.int64).fill_(1)

    def read_rate() -> float:
        rate = plain.nbytes / seconds(plain.sum, at_least_s)
        time.sleep(0.02)  # torch's threads go on looking for work for a while
        return rate

    for head_dim in (64, 128):
        for group in DECODE_TARGETS:
            for context in (512, 2048, 8192):
                case = Decode(pool, group, head_dim, context, "bfloat16")
                before = read_rate()
                rate = case.bytes / seconds(case.run, at_least_s)
                read = (before + read_rate()) / 2
                measured.add(
                    f"decode bf16, head_dim {head_dim}, group {group}, context {context}",
                    DECODE_TARGETS[group],
                    ratio=rate / read,
                    kv_gb_per_s=rate / 1e9,
                    read_gb_per_s=read / 1e9,
                )
                if group != 4:
                    continue
                bf16_s = seconds(case.run, at_least_s) / case.sequences
                for kv_format in formats.KV_CODE_BITS:
                    packed = Decode(pool, group, head_dim, context, kv_format)
                    packed_s = seconds(packed.run, at_least_s) / packed.sequences
                    measured.add(
                        f"decode {kv_format} to bf16, head_dim {head_dim}, group 4, context {context}",
                        PACKED_KV_TARGET,
                        ratio=bf16_s / packed_s,
                        packed_kv_gb_per_s=packed.bytes / packed.sequences / packed_s / 1e9,
                    )


def prefill(measured: Measured, name: str, at_least_s: float) -> None:
    for heads, kv_heads, head_dim in ((9, 3, 64), (32, 8, 128)):
        for dtype in (torch.bfloat16, torch.float32):
            for n in (512, 1024, 2048):
                q = torch.randn(n, heads, head_dim).to(dtype) * head_dim**-0.5
                kv = torch.randn(n // BLOCK, 2, kv_heads, BLOCK, head_dim).to(dtype)
                slices = [SequenceSlice(n, 0, np.arange(n // BLOCK, dtype=np.int32))]
                plan = plan_attention(
                    SweepTables.of(slices), [], kv_block_size=BLOCK, key_bytes=kv_heads * head_dim * 2
                )
                row_bytes = head_dim * dtype.itemsize
                made = kernels.attention_plan(plan, kv_heads, heads // kv_heads, BLOCK, row_bytes)
                k, v = (kv[:, i].transpose(0, 1).reshape(1, kv_heads, n, head_dim) for i in range(2))
                rows = q.transpose(0, 1)[None].contiguous()

                def sdpa(rows=rows, k=k, v=v):
                    return F.scaled_dot_product_attention(rows, k, v, is_causal=True, scale=1.0, enable_gqa=True)

                torch.set_num_threads(kernels.num_threads())
                theirs = seconds(sdpa, at_least_s)
                time.sleep(0.02)
                ours = seconds(lambda q=q, kv=kv, made=made: kernels.attention(q, kv, made), at_least_s)
                flops = 4 * heads * head_dim * n * (n + 1) // 2
                kind = str(dtype).removeprefix("torch.")
                measured.add(
                    f"{name}: prefill {kind}, {heads}/{kv_heads} heads of {head_dim}, {n} tokens",
                    PREFILL_TARGET,
                    ratio=theirs / ours,
                    gflop_per_s=flops / ours / 1e9,
                    torch_sdpa_gflop_per_s=flops / theirs / 1e9,
                )


def linear(measured: Measured, name: str, at_least_s: float, tokens: list[int]) -> None:
    """Measures our linear beside F.linear, with weights from beyond the nearest caches."""
    for columns, depth in LINEAR_SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            kind = str(dtype).removeprefix("torch.")
            for rows in tokens:
                ours_s, theirs_s = linear_seconds(name, rows, columns, depth, dtype, at_least_s)
                flops = 2 * rows * columns * depth
                measured.add(
                    f"{name}: linear {kind}, {columns}x{depth}, {rows} tokens",
                    ratio=theirs_s / ours_s,
                    gflop_per_s=flops / ours_s / 1e9,
                    torch_gflop_per_s=flops / theirs_s / 1e9,
                )


def linear_seconds(
    name: str, rows: int, columns: int, depth: int, dtype: torch.dtype, at_least_s: float
) -> list[float]:
    """Seconds of our linear on the instruction set, and of F.linear."""
    copies = max(1, min(30, (24 << 20) // (columns * depth * dtype.itemsize)))
    weights = [torch.randn(columns, depth).to(dtype) for _ in range(copies)]
    bound = [dispatch.pack_weight(weight, isa=name) for weight in weights]
    x = torch.randn(rows, depth).to(dtype)
    torch.set_num_threads(kernels.num_threads())
    return best_seconds(
        [lambda i: kernels.linear(x, bound[i % copies]), lambda i: F.linear(x, weights[i % copies])], at_least_s
    )


def packed(measured: Measured, name: str, at_least_s: float) -> None:
    """Measures block-quantized weights beside bf16 ones, all of them from beyond the nearest caches."""
    columns, depth = PACKED_SHAPE
    draw = torch.Generator().manual_seed(0)
    numbers = torch.randn(columns, depth, generator=draw).bfloat16()
    bf16 = [dispatch.pack_weight(numbers.clone(), isa=name) for _ in range(2)]
    for weight_format, (values, block_bytes) in formats.BLOCK_FORMATS.items():
        blocks = [small_blocks(columns, depth // values * block_bytes, draw) for _ in range(4)]
        kept = [kernels.pack_blocks(kernels.BlockWeight(b, weight_format, name), torch.bfloat16) for b in blocks]
        for rows in PACKED_TOKENS:
            x = torch.randn(rows, depth, generator=draw).bfloat16()
            kept_s, bf16_s = best_seconds(
                [
                    lambda i, x=x, kept=kept: kernels.linear(x, kept[i % 4]),
                    lambda i, x=x: kernels.linear(x, bf16[i % 2]),
                ],
                at_least_s,
            )
            measured.add(
                f"{name}: {weight_format} to bf16 weights, {columns}x{depth}, {rows} tokens",
                PACKED_TARGET,
                ratio=bf16_s / kept_s,
                gb_per_s=blocks[0].nbytes / kept_s / 1e9,
                bf16_gb_per_s=numbers.nbytes / bf16_s / 1e9,
            )


def small_blocks(rows: int, row_bytes: int, draw: torch.Generator) -> torch.Tensor:
    """Random blocks of any format: bytes are 60 to 63, so scales are numbers below 2, whichever their type.

    With any byte some scales would be below the smallest normal number, with which Intel's CPUs compute slowly.
    """
    return torch.randint(60, 64, (rows, row_bytes), dtype=torch.uint8, generator=draw)


def clock() -> float:
    """Seconds, with one thread of its own time, in which others on the machine have no part."""
    return time.thread_time() if kernels.num_threads() == 1 else time.perf_counter()


def best_seconds(runs: list[Callable[[int], object]], at_least_s: float) -> list[float]:
    """Seconds of a call of each: the best of samples of some milliseconds taken in turn, the first ones left out."""
    turns = []
    for run in runs:
        run(0)
        started = clock()
        run(1)
        turns.append(max(1, int(0.005 / max(clock() - started, 1e-6))))
    best = [float("inf")] * len(runs)
    deadline, rounds = time.perf_counter() + at_least_s * len(runs), 0
    while rounds < 2 or time.perf_counter() < deadline:
        for n, (run, turn) in enumerate(zip(runs, turns, strict=True)):
            started = clock()
            for i in range(turn):
                run(i)
            best[n] = min(best[n], (clock() - started) / turn)
            if kernels.num_threads() > 1:
                time.sleep(0.005)  # torch's threads go on looking for work for a while
        rounds += 1
    return best


def linear_summary(summary: dict[str, dict]) -> dict[str, dict]:
    """The geometric mean and the worst of the ratios to F.linear, of each set and dtype."""
    found: dict[str, list[float]] = {}
    for name, figures in summary.items():
        if ": linear " in name and name.endswith(" tokens"):
            found.setdefault(name.split(",")[0], []).append(figures["ratio"])
    return {
        f"{name}, all": {
            "geometric_mean": round(float(np.exp(np.mean(np.log(ratios)))), 3),
            "worst": min(ratios),
            "target": LINEAR_TARGET,
            "met": bool(np.exp(np.mean(np.log(ratios))) >= LINEAR_TARGET and min(ratios) >= LINEAR_WORST),
        }
        for name, ratios in found.items()
    }


def expansion(measured: Measured, at_least_s: float) -> None:
    """Measures the dequantization of 4-bit weights to bf16 beside a plain copy, by bytes read and written."""
    packed = torch.randint(0, 255, (8192, formats.weight_row_bytes(8192, formats.INT4)), dtype=torch.uint8)
    out = torch.empty(8192, 8192, dtype=torch.bfloat16)
    moved = packed.nbytes + out.nbytes
    source = torch.empty(moved // 2, dtype=torch.uint8)
    target = torch.empty_like(source)
    copy = 2 * source.nbytes / seconds(lambda: target.copy_(source), at_least_s)
    time.sleep(0.02)
    ours = moved / seconds(lambda: kernels.dequantize(packed, 8192, out), at_least_s)
    measured.add("int4 to bf16 weights", ratio=ours / copy, gb_per_s=ours / 1e9, copy_gb_per_s=copy / 1e9)


def measure(args: argparse.Namespace, sets: list[str]) -> dict[str, dict]:
    measured = Measured()
    pool = None
    if args.only in (None, "decode"):  # huge pages, as the engine's pools have
        pool = untouched((DECODE_KV_BYTES // 2,), torch.bfloat16)
        pool.view(4, -1).copy_(torch.randn(DECODE_KV_BYTES // 8))
    for _ in range(args.rounds):
        if pool is not None:
            decode(measured, pool, args.seconds)
        for name in sets:
            with kernels.using(name):
                if args.only in (None, "prefill"):
                    prefill(measured, name, args.seconds)
                if args.only in (None, "linear"):
                    linear(measured, name, args.seconds, args.tokens)
                if args.only in (None, "packed"):
                    packed(measured, name, args.seconds)
        if args.only in (None, "expansion"):
            expansion(measured, args.seconds)
    return measured.summary()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=["decode", "prefill", "linear", "packed", "expansion"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.25, help="of each measurement, at least")
    parser.add_argument("--tokens", type=lambda text: [int(n) for n in text.split(",")], default=LINEAR_TOKENS)
    parser.add_argument("--keep", action="store_true", help="keep what the file has and is not measured now")
    parser.add_argument("--sets", type=lambda text: text.split(","), help="instruction sets [default: all but scalar]")
    parser.add_argument("--output", type=Path, help="[default: benchmarks/results/kernels-CPU.json]")
    args = parser.parse_args()
    keep_freed_memory()  # as the engine does: results do not go to fresh pages
    on = machine()
    usable = [name for name in on["instruction_sets"] if name != "scalar"] or ["scalar"]
    sets = [name for name in args.sets or usable if name in usable]
    output = args.output or result_path("kernels", by_cpu=True)
    before = json.loads(output.read_text()) if args.keep and output.exists() else {}
    summary = before.get("medians", {}) | measure(args, sets)
    summary |= linear_summary(summary)
    for name in SETS.get(platform.machine(), ()):
        if name not in sets:
            reason = on["unavailable"].get(name, "not asked for" if name in usable else "the CPU does not have it")
            summary[name] = {"not measured": reason}
    for name, figures in summary.items():
        print(f"{name:62}", "  ".join(f"{key} {value}" for key, value in figures.items()))
    write(output, {"rounds": args.rounds, "medians": summary})


if __name__ == "__main__":
    main()
