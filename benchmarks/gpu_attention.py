"""Attention of one layer of Llama-3-8B's shape: batchgen's kernels beside torch's SDPA and FlashInfer. Writes JSON.

    python benchmarks/gpu_attention.py --rates rates.json --output attention.json
    python benchmarks/gpu_attention.py --compile --output compiled.json     # FlashInfer's kernels alone, by nvcc

Decode: one token each of sequences with equal contexts, in bytes of KV per second. Prefill: prompts of 1,024 tokens, in
FLOP/s. FlashInfer reads the same paged KV as batchgen: its layout "HND" is that of 16-bit KV here. SDPA gets keys and
values of equal lengths without pages, which is less work. Each result is compared with batchgen's. --rates (what
gpu_rates.py wrote) adds the shares of the best rates that the card has.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from batchgen.core.dtypes import KVFormat
from batchgen.ops import dispatch as ops
from batchgen.ops.attention_operands import AttentionOperands
from batchgen.ops.attention_plan import SequenceSlice, SweepTables, plan_attention
from batchgen.profiler.timing import FULL, Device, Trial

HEADS, KV_HEADS, HEAD_DIM, BLOCK = 32, 8, 128, 16
DTYPE = torch.bfloat16
KV_FORMATS = ("bfloat16", "int8", "int4")
_FLASHINFER_WORKSPACE = 128 << 20


@dataclass(frozen=True)
class Case:
    """Equal sequences: tokens of each that are queries, and all tokens that these attend to."""

    name: str
    sequences: int
    queries: int
    keys: int

    @property
    def kv_bytes(self) -> int:
        """Bytes of 16-bit KV that the queries attend to."""
        return 2 * self.sequences * self.keys * KV_HEADS * HEAD_DIM * DTYPE.itemsize

    @property
    def flops(self) -> int:
        """FLOPs of both products, of the pairs that causal attention has."""
        pairs = self.queries * self.keys - self.queries * (self.queries - 1) // 2
        return 4 * self.sequences * pairs * HEADS * HEAD_DIM

    @property
    def blocks(self) -> int:
        return -(-self.keys // BLOCK)

    @property
    def work(self) -> int:
        return self.kv_bytes if self.queries == 1 else self.flops


CASES = (
    Case("decode, 64 x 1,024", 64, 1, 1024),
    Case("decode, 256 x 512", 256, 1, 512),
    Case("decode, 8 x 8,192", 8, 1, 8192),
    Case("prefill, 8 x 1,024", 8, 1024, 1024),
)


@dataclass(frozen=True)
class Operands:
    """Queries [tokens, heads, head_dim], paged KV, and the block table [sequences, blocks] on the host."""

    q: Tensor
    kv: Tensor
    table: np.ndarray


def operands(case: Case, device: torch.device) -> Operands:
    """Random numbers. Blocks of a sequence are not neighbours."""
    draw = torch.Generator().manual_seed(0)
    num_blocks = case.sequences * case.blocks
    kv = torch.randn(num_blocks, 2, KV_HEADS, BLOCK, HEAD_DIM, device=device).to(DTYPE)
    q = torch.randn(case.sequences * case.queries, HEADS, HEAD_DIM, device=device).to(DTYPE)
    table = torch.randperm(num_blocks, generator=draw).view(case.sequences, case.blocks).int().numpy()
    return Operands(q * HEAD_DIM**-0.5, kv, table)


def batchgen_attention(case: Case, given: Operands, kv_format: str) -> Callable[[], Tensor]:
    """Attention by the kernels of a device, over KV in a format. Queries are scaled already."""
    bits = KVFormat.of(kv_format).bits
    slices = [SequenceSlice(case.queries, case.keys - case.queries, blocks) for blocks in given.table]
    plan = ops.prepare_attention(
        plan_attention(SweepTables.of(slices), [], kv_block_size=BLOCK, key_bytes=KV_HEADS * HEAD_DIM * DTYPE.itemsize),
        AttentionOperands(HEADS, KV_HEADS, HEAD_DIM, BLOCK, DTYPE, KVFormat.of(kv_format)),
        given.q.device,
    )
    kv = ops.quantize(given.kv.flatten(0, 3), bits).view(*given.kv.shape[:4], -1) if bits else given.kv
    out = torch.empty_like(given.q)
    return lambda: ops.paged_attention(given.q, kv, plan, out, bits=bits)


def sdpa(case: Case, given: Operands) -> Callable[[], Tensor]:
    """torch's attention over keys and values without pages, [sequences, heads, tokens, head_dim]."""
    pages = given.kv[torch.from_numpy(given.table).long().to(given.kv.device)]  # [sequences, blocks, 2, kv_heads, ...]
    k, v = (
        pages[:, :, i].transpose(1, 2).reshape(case.sequences, KV_HEADS, -1, HEAD_DIM)[:, :, : case.keys].contiguous()
        for i in range(2)
    )
    q = given.q.view(case.sequences, case.queries, HEADS, HEAD_DIM).transpose(1, 2).contiguous()
    causal = case.queries > 1
    assert not causal or case.queries == case.keys
    return lambda: (
        F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=1.0, enable_gqa=True)
        .transpose(1, 2).reshape(given.q.shape)
    )  # fmt: skip


def flashinfer_attention(case: Case, given: Operands) -> Callable[[], Tensor]:
    """FlashInfer's attention over the same paged KV."""
    import flashinfer

    device = given.q.device
    workspace = torch.empty(_FLASHINFER_WORKSPACE, dtype=torch.uint8, device=device)
    pages = torch.arange(case.sequences + 1, dtype=torch.int32) * case.blocks
    last = torch.full((case.sequences,), (case.keys - 1) % BLOCK + 1, dtype=torch.int32)
    table = torch.from_numpy(given.table.reshape(-1)).to(device)
    dtypes = {"q_data_type": DTYPE, "kv_data_type": DTYPE}
    if case.queries == 1:
        decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
        decode.plan(pages, table, last, HEADS, KV_HEADS, HEAD_DIM, BLOCK, sm_scale=1.0, **dtypes)
        return lambda: decode.run(given.q, given.kv)
    prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
    starts = torch.arange(case.sequences + 1, dtype=torch.int32) * case.queries
    prefill.plan(starts, pages, table, last, HEADS, KV_HEADS, HEAD_DIM, BLOCK, causal=True, sm_scale=1.0, **dtypes)
    return lambda: prefill.run(given.q, given.kv)


def measure(case: Case, device: Device, best: dict[str, float]) -> dict:
    """Rates of all implementations on a case, and how far their results are from batchgen's."""
    given = operands(case, torch.device(device.kind))
    ways: dict[str, Callable[[], Callable[[], Tensor]]] = {
        f"batchgen, {name} KV": lambda name=name: batchgen_attention(case, given, name) for name in KV_FORMATS
    }
    ways["SDPA"] = lambda: sdpa(case, given)
    if device.kind == "cuda" and find_spec("flashinfer"):
        ways["FlashInfer"] = lambda: flashinfer_attention(case, given)
    expected, rates = None, {}
    for name, prepare in ways.items():
        try:
            attend = prepare()
            result = attend().view(given.q.shape).float()
            expected = result.clone() if expected is None else expected
            error = float((result - expected).norm() / expected.norm())
            seconds = 1 / device.rate(Trial(1, lambda i, attend=attend: attend()), FULL)
        except Exception as problem:  # another engine's: the others are measured all the same
            rates[name] = {"failed": f"{type(problem).__name__}: {problem}"[-500:]}
            continue
        rates[name] = {"seconds": seconds, "per_s": case.work / seconds, "relative_error": error}
        if best:
            top = best["gpu_read_bytes_per_s" if case.queries == 1 else "gpu_flops_per_s"]
            rates[name]["of_best"] = case.work / seconds / top
    return {"case": case.name, "unit": "bytes/s of 16-bit KV" if case.queries == 1 else "FLOP/s", "rates": rates}


def said(result: dict) -> str:
    scale, unit = (1e9, "GB/s") if result["unit"] != "FLOP/s" else (1e12, "TFLOP/s")
    rates = [
        f"{name} {rate['per_s'] / scale:,.0f}" if "per_s" in rate else f"{name} failed"
        for name, rate in result["rates"].items()
    ]
    return f"{result['case']}: {', '.join(rates)} {unit}"


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--rates", type=Path, help="what gpu_rates.py wrote")
    parser.add_argument("--compile", action="store_true", help="only have FlashInfer compile its kernels")
    parser.add_argument("--output", type=Path, required=True)
    return parser.parse_args(argv)


def main() -> None:
    args = arguments()
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("gpu_attention: torch finds no CUDA device here")
    device = Device(args.device)
    results: list[dict] | dict
    if args.compile:
        for case in (CASES[0], CASES[-1]):
            flashinfer_attention(case, operands(case, torch.device("cuda")))()
        torch.cuda.synchronize()
        results, summary = {"compiled": True}, "FlashInfer's kernels are compiled"
    else:
        best = json.loads(args.rates.read_text())["rates"] if args.rates else {}
        results = [measure(case, device, best) for case in CASES]
        summary = "; ".join(map(said, results))
    args.output.write_text(json.dumps(results, indent=1) + "\n")
    print(f"summary: {summary}")


if __name__ == "__main__":
    main()
