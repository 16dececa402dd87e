"""The C++ kernels of Gated DeltaNet beside what the machine does: memory's read and write rate, and matrix products.

Decode, one token of each sequence, is held to the rate at which torch scales as many bytes in place: each state is read
and written once. Prefill is held to the rate of fp32 matrix products of the same instruction set, by the FLOPs of the
chunks' products (`DeltaNet.prefill_flops`). The kernels and what they are held to are measured in turn.

    python benchmarks/state_kernels.py
    python benchmarks/state_kernels.py --only decode --sequences 1,64 --rounds 1
    BATCHGEN_NUM_THREADS=1 python benchmarks/state_kernels.py --only prefill --sets avx2

The result goes to benchmarks/results/state_kernels-CPU.json, named after the kind of CPU.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
from kernel_rates import Measured, best_seconds
from recording import machine, result_path, write

from batchgen.core.machine import keep_freed_memory
from batchgen.models.state_layers import DeltaNet
from batchgen.ops import cpp as kernels
from batchgen.ops import dispatch as ops
from batchgen.ops import state_dispatch as state_ops
from batchgen.ops.state_slots import StateSlots
from batchgen.runtime.memory.transfers import untouched

DIM = 128  # of queries, keys and values
KEY_HEADS = 16
POOL_BYTES = 1 << 30  # states that calls of decode go through by turns: far more than caches hold
DECODE_TARGET, PREFILL_TARGET = 0.80, 0.60
PRODUCT = (4096, 2048)  # columns and depth of the matrix that prefill is held to
PRODUCT_TOKENS = 512


def operands(tokens: int, value_heads: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """qkv, g and beta of some tokens."""
    qkv = torch.randn(tokens, 2 * KEY_HEADS * DIM + value_heads * DIM).to(dtype)
    return qkv, -torch.rand(tokens, value_heads), torch.rand(tokens, value_heads)


def decode_trials(
    pool: torch.Tensor, value_heads: int, sequences: int
) -> tuple[Callable[[int], object], Callable[[int], object], int]:
    """A step of so many sequences, a scaling of as many bytes in place, and the bytes that either reads and writes.

    Args:
        pool: Memory of the states, in their dtype.
    """
    state = value_heads * DIM * DIM
    states = pool[: pool.numel() // state * state].view(-1, value_heads, DIM, DIM)
    turns = max(1, len(states) // sequences)
    qkv, g, beta = operands(sequences, value_heads, torch.bfloat16)
    slots = [torch.arange(sequences) + turn * sequences for turn in range(turns)]
    starts = torch.arange(sequences + 1)
    words = pool.view(torch.float32)
    pieces = words[: words.numel() // turns * turns].view(turns, -1)
    moved = 2 * sequences * state * pool.element_size()
    pieces = pieces[:, : moved // 2 // words.element_size()]

    def step(i: int) -> None:
        which = slots[i % turns]
        state_ops.delta_rule(qkv, g, beta, states, StateSlots(which, which, starts), key_heads=KEY_HEADS)

    def scale(i: int) -> None:
        pieces[i % turns].mul_(1.0)

    return step, scale, moved


def decode(measured: Measured, args: argparse.Namespace) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        pool = untouched((POOL_BYTES // dtype.itemsize,), dtype).zero_()
        for value_heads in args.heads:
            for sequences in args.sequences:
                if sequences * value_heads * DIM * DIM * dtype.itemsize > POOL_BYTES:
                    continue
                step, scale, moved = decode_trials(pool, value_heads, sequences)
                ours, plain = (moved / taken for taken in best_seconds([step, scale], args.seconds))
                name = f"decode, {str(dtype)[6:]} states, {value_heads} value heads, {sequences} sequences"
                measured.add(name, DECODE_TARGET, ratio=ours / plain, gb_per_s=ours / 1e9, scaling_gb_per_s=plain / 1e9)


def prompt_update(tokens: int, value_heads: int) -> Callable[[int], object]:
    """The update of a state by a prompt of so many tokens."""
    qkv, g, beta = operands(tokens, value_heads, torch.bfloat16)
    states = torch.zeros(1, value_heads, DIM, DIM)
    slot, starts = torch.tensor([0]), torch.tensor([0, tokens])
    return lambda i: state_ops.delta_rule(qkv, g, beta, states, StateSlots(slot, slot, starts), key_heads=KEY_HEADS)


def prefill(measured: Measured, name: str, args: argparse.Namespace) -> None:
    columns, depth = PRODUCT
    weight = ops.pack_weight(torch.randn(columns, depth), isa=name)
    x, product = torch.randn(PRODUCT_TOKENS, depth), torch.empty(PRODUCT_TOKENS, columns)
    for value_heads in args.heads:
        for tokens in args.tokens:
            chunks, matrix = best_seconds(
                [
                    prompt_update(tokens, value_heads),
                    lambda i: ops.linear(x, weight, out=product),
                ],
                args.seconds,
            )
            flops = tokens * DeltaNet(KEY_HEADS, value_heads, DIM, DIM, kernel=4).prefill_flops
            ours, rate = flops / chunks, 2 * x.shape[0] * columns * depth / matrix
            measured.add(
                f"{name}: prefill, {value_heads} value heads, {tokens} tokens",
                PREFILL_TARGET,
                ratio=ours / rate,
                gflop_per_s=ours / 1e9,
                product_gflop_per_s=rate / 1e9,
            )


def numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=["decode", "prefill"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.25, help="of each measurement, at least")
    parser.add_argument("--heads", type=numbers, default=[16, 32, 64], help="value heads [default: 16,32,64]")
    parser.add_argument("--sequences", type=numbers, default=[1, 4, 16, 64, 256], help="[default: 1,4,16,64,256]")
    parser.add_argument("--tokens", type=numbers, default=[64, 512, 2048], help="[default: 64,512,2048]")
    parser.add_argument("--sets", type=lambda text: text.split(","), help="instruction sets [default: all but scalar]")
    parser.add_argument("--keep", action="store_true", help="keep what the file has and is not measured now")
    parser.add_argument("--output", type=Path, help="[default: benchmarks/results/state_kernels-CPU.json]")
    args = parser.parse_args()
    torch.set_num_threads(kernels.num_threads())
    keep_freed_memory()  # as the engine does: results do not go to fresh pages
    usable = [name for name in machine()["instruction_sets"] if name != "scalar"] or ["scalar"]
    measured = Measured()
    for _ in range(args.rounds):
        if args.only in (None, "decode"):
            decode(measured, args)
        for name in args.sets or usable:
            with kernels.using(name):
                if args.only in (None, "prefill"):
                    prefill(measured, name, args)
    output = args.output or result_path("state_kernels", by_cpu=True)
    before = json.loads(output.read_text())["medians"] if args.keep and output.exists() else {}
    summary = before | measured.summary()
    for name, figures in summary.items():
        print(f"{name:62}", "  ".join(f"{key} {value}" for key, value in figures.items()))
    write(output, {"rounds": args.rounds, "medians": summary})


if __name__ == "__main__":
    main()
