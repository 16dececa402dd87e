"""The C++ kernels against what the machine does: each rate beside the rate of plain reads, of torch's own attention or of
torch's own matrix products, measured in turn in the same run. Decode and the expansion of weights on the machine's best instruction
set, the others on each that it has.

    python benchmarks/kernel_rates.py
    python benchmarks/kernel_rates.py --only decode --rounds 1

The result goes to benchmarks/results/kernels-CPU.json, named after the kind of CPU, so that those of other machines stay.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from batchgen.core import dtypes as formats
from batchgen.core.machine import keep_freed_memory
from batchgen.job.report import versions
from batchgen.ops import cpp as kernels
from batchgen.ops import quant
from batchgen.ops.attention_plan import SequenceSlice, plan_attention
from batchgen.ops.instruction_set import unavailable
from batchgen.runtime.memory.transfers import untouched

HERE = Path(__file__).parent
BLOCK = 16
DECODE_KV_BYTES = 768 << 20  # attended to by one call: far more than caches hold
DECODE_TARGETS = {1: 0.80, 4: 0.65, 8: 0.55}
INT4_TARGET, PREFILL_TARGET = 1.5, 3.0
# Instruction sets that have a row, measured or not.
SETS = {"x86_64": ("amx", "avx512_bf16", "avx512", "avx2")}


def seconds(run: Callable[[], object], at_least_s: float) -> float:
    """Median time of a call."""
    run()
    taken: list[float] = []
    deadline = time.perf_counter() + at_least_s
    while len(taken) < 3 or time.perf_counter() < deadline:
        started = time.perf_counter()
        run()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


class Measured:
    """Ratios of the rounds, and what they are held to."""

    def __init__(self) -> None:
        self.rounds: dict[str, list[dict]] = {}
        self.targets: dict[str, float] = {}

    def add(self, name: str, target: float | None = None, **figures: float) -> None:
        """figures: "ratio" is what the target is for."""
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
    """One query a sequence, sequences of equal length, all KV from memory."""

    def __init__(self, pool: torch.Tensor, group: int, head_dim: int, context: int, kv_format: str) -> None:
        kv_heads = 8
        shape = (2, kv_heads, BLOCK, head_dim)
        kv = pool[: pool.numel() // (2 * kv_heads * BLOCK * head_dim) * 2 * kv_heads * BLOCK * head_dim].view(
            -1, *shape
        )
        self.sequences = len(kv) // (context // BLOCK)
        used = self.sequences * (context // BLOCK)
        self.kv = kv[:used]
        if kv_format == formats.INT4:
            packed = quant.quantize(kv[:used], formats.KV_CODE_BITS[formats.INT4])
            self.kv = untouched(packed.shape, packed.dtype).copy_(packed)
        self.bytes = self.kv.nbytes
        order = np.random.default_rng(0).permutation(used).astype(np.int32)
        slices = [SequenceSlice(1, context - 1, b) for b in order.reshape(self.sequences, -1)]
        plan = plan_attention(slices, [], block_size=BLOCK, key_bytes=kv_heads * head_dim * 2)
        row_bytes = self.kv.shape[-1] * self.kv.element_size()
        self.plan = kernels.attention_plan(plan, kv_heads, group, BLOCK, row_bytes)
        self.q = (torch.randn(self.sequences, kv_heads * group, head_dim) * head_dim**-0.5).bfloat16()

    def run(self) -> None:
        kernels.attention(self.q, self.kv, self.plan)


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
                packed = Decode(pool, group, head_dim, context, formats.INT4)
                bf16_s = seconds(case.run, at_least_s) / case.sequences
                int4_s = seconds(packed.run, at_least_s) / packed.sequences
                measured.add(
                    f"decode int4 to bf16, head_dim {head_dim}, group 4, context {context}",
                    INT4_TARGET,
                    ratio=bf16_s / int4_s,
                    int4_kv_gb_per_s=packed.bytes / packed.sequences / int4_s / 1e9,
                )


def prefill(measured: Measured, name: str, at_least_s: float) -> None:
    for heads, kv_heads, head_dim in ((9, 3, 64), (32, 8, 128)):
        for dtype in (torch.bfloat16, torch.float32):
            for n in (512, 1024, 2048):
                q = torch.randn(n, heads, head_dim).to(dtype) * head_dim**-0.5
                kv = torch.randn(n // BLOCK, 2, kv_heads, BLOCK, head_dim).to(dtype)
                slices = [SequenceSlice(n, 0, np.arange(n // BLOCK, dtype=np.int32))]
                plan = plan_attention(slices, [], block_size=BLOCK, key_bytes=kv_heads * head_dim * 2)
                row_bytes = head_dim * dtype.itemsize
                made = kernels.attention_plan(plan, kv_heads, heads // kv_heads, BLOCK, row_bytes)
                k, v = (kv[:, i].transpose(0, 1).reshape(1, kv_heads, n, head_dim) for i in range(2))
                rows = q.transpose(0, 1)[None].contiguous()

                def sdpa(rows=rows, k=k, v=v):
                    return F.scaled_dot_product_attention(rows, k, v, is_causal=True, scale=1.0, enable_gqa=True)

                theirs = seconds(sdpa, at_least_s)
                time.sleep(0.02)
                ours = seconds(lambda q=q, kv=kv, made=made: kernels.attention(q, kv, made), at_least_s)
                flops = 4 * heads * head_dim * n * (n + 1) // 2
                measured.add(
                    f"{name}: prefill {str(dtype).removeprefix('torch.')}, {heads}/{kv_heads} heads of {head_dim}, {n} tokens",
                    PREFILL_TARGET,
                    ratio=theirs / ours,
                    gflop_per_s=flops / ours / 1e9,
                    torch_sdpa_gflop_per_s=flops / theirs / 1e9,
                )


def linear(measured: Measured, name: str, at_least_s: float) -> None:
    shapes = {"demo qkv": (960, 576), "demo gate_up": (3072, 576), "demo down": (576, 1536), "8B down": (4096, 14336)}
    for shape, (columns, depth) in shapes.items():
        copies = max(2, min(30, (64 << 20) // (2 * columns * depth)))
        weights = [torch.randn(columns, depth).bfloat16() for _ in range(copies)]
        packed = [kernels.pack(w) for w in weights]
        for rows in (1, 16, 64, 256, 1024):
            x = torch.randn(rows, depth).bfloat16()
            flops, turn = 2 * rows * columns * depth, max(1, int(2e9 / (2 * rows * columns * depth)))

            def ours(x=x, turn=turn, weights=packed):
                for i in range(turn):
                    kernels.linear(x, weights[i % len(weights)])

            def theirs(x=x, turn=turn, weights=weights):
                for i in range(turn):
                    F.linear(x, weights[i % len(weights)])

            torch_s = seconds(theirs, at_least_s) / turn
            time.sleep(0.02)
            ours_s = seconds(ours, at_least_s) / turn
            plain_s = seconds(lambda run=ours, weights=weights: run(weights=weights), at_least_s) / turn
            measured.add(
                f"{name}: linear bf16, {shape}, {rows} tokens",
                ratio=torch_s / ours_s,
                gflop_per_s=flops / ours_s / 1e9,
                unpacked_gflop_per_s=flops / plain_s / 1e9,
                torch_gflop_per_s=flops / torch_s / 1e9,
            )


def expansion(measured: Measured, at_least_s: float) -> None:
    """4-bit weights to bf16: bytes read and written, beside a plain copy's."""
    packed = torch.randint(0, 255, (8192, formats.row_bytes(8192, formats.INT4)), dtype=torch.uint8)
    out = torch.empty(8192, 8192, dtype=torch.bfloat16)
    moved = packed.nbytes + out.nbytes
    source = torch.empty(moved // 2, dtype=torch.uint8)
    target = torch.empty_like(source)
    copy = 2 * source.nbytes / seconds(lambda: target.copy_(source), at_least_s)
    time.sleep(0.02)
    ours = moved / seconds(lambda: kernels.dequantize(packed, 8192, out), at_least_s)
    measured.add("int4 to bf16 weights", ratio=ours / copy, gb_per_s=ours / 1e9, copy_gb_per_s=copy / 1e9)


def machine() -> dict:
    """What was measured on."""
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""

    def field(name: str) -> str:
        found = re.search(rf"^{name}\s*: (.*)$", text, re.MULTILINE)
        return found[1].strip() if found else "unknown"

    return {
        "cpu": field("model name") if "model name" in text else platform.machine(),
        "family": field("cpu family"),
        "model": field("model"),
        "threads": kernels._kernels.num_threads(),
        "instruction_sets": kernels.instruction_sets(),
        "unavailable": unavailable(),
    }


def slug(machine: dict) -> str:
    """A kind of CPU as part of a file's name: what it is called and its best instruction set."""
    name = re.sub(r"\(.*?\)|@.*", " ", f"{machine['cpu']}").lower() + " " + machine["instruction_sets"][0]
    return re.sub(r"[^a-z0-9]+", "-", name).strip("-")


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
                for part, run in (("prefill", prefill), ("linear", linear)):
                    if args.only in (None, part):
                        run(measured, name, args.seconds)
        if args.only in (None, "expansion"):
            expansion(measured, args.seconds)
    return measured.summary()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=["decode", "prefill", "linear", "expansion"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.25, help="of each measurement, at least")
    parser.add_argument("--sets", type=lambda text: text.split(","), help="instruction sets [default: all but scalar]")
    parser.add_argument("--output", type=Path, help="[default: benchmarks/results/kernels-CPU.json]")
    args = parser.parse_args()
    keep_freed_memory()  # as the engine does: results do not go to fresh pages
    on = machine()
    usable = [name for name in on["instruction_sets"] if name != "scalar"] or ["scalar"]
    sets = [name for name in args.sets or usable if name in usable]
    summary = measure(args, sets)
    for name in SETS.get(platform.machine(), ()):
        if name not in sets:
            reason = on["unavailable"].get(name, "not asked for" if name in usable else "the CPU does not have it")
            summary[name] = {"not measured": reason}
    for name, figures in summary.items():
        print(f"{name:62}", "  ".join(f"{key} {value}" for key, value in figures.items()))
    result = {"machine": on, "rounds": args.rounds, "medians": summary, "versions": versions()}
    output = args.output or HERE / "results" / f"kernels-{slug(on)}.json"
    output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
