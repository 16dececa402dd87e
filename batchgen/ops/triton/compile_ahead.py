"""Compilation of every Triton kernel for a type of GPU that the machine need not have.

    python -m batchgen.ops.triton.compile_ahead --capability 90

The launches are those of the engine for representative models. For each kernel, its use of the GPU's resources is
printed. The command fails if a block uses more shared memory than the GPU has.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from batchgen.core.dtypes import BLOCK_FORMATS, KV_CODE_BITS, KVFormat
from batchgen.core.plan import DEFAULT_KV_BLOCK_SIZE
from batchgen.ops import quant
from batchgen.ops.attention_plan import AttentionPlan, DecodeGroup, SequenceItems, SharedItem
from batchgen.ops.cpp import GATED, BlockWeight
from batchgen.ops.state_slots import StateSlots
from batchgen.ops.triton import attention, conv, delta, grouped, packed, plan, rotary, sampling, weights
from batchgen.ops.triton.block_rows import block_rows_launch
from batchgen.ops.triton.blocks import BLOCK_CODINGS
from batchgen.ops.triton.launch import SHARED_MEMORY, Card, Launch, attention_tiles
from batchgen.ops.triton.norm import gate_launch, gated_launch, gated_norm_launch, norm_launch
from batchgen.ops.triton.product import Storage
from batchgen.ops.triton.rows import gather_launch, scatter_launch

_STATE_DTYPES = (torch.float32, torch.bfloat16)
_KV_HEADS = 2
# Experts, experts of a token, hidden and intermediate size, activation, biases: of Qwen3-30B-A3B and gpt-oss-20b.
_MIXTURES = ((128, 8, 2048, 768, "silu_mul", False), (32, 4, 2880, 2880, "swiglu_oai_mul", True))
# Key heads, value heads, key and value size: of Qwen3-Next-80B-A3B (and Qwen3.5), and those of a wide state.
_DELTA_NETS = ((16, 32, 128, 128), (2, 6, 256, 256))
# Ways in which weights are stored, of which block formats are compiled for fewer shapes, rarer ones for a single one.
_STORED = (Storage("numbers"), Storage("int8"), Storage("int4"))
_FREQUENT = ("fp8_g128", "w4_g128", "mxfp4", "q8_0", "q4_0", "q4_k", "q6_k")
_BLOCKS = tuple(Storage(BLOCK_CODINGS[name], name) for name in _FREQUENT)
_RARE_BLOCKS = tuple(Storage(BLOCK_CODINGS[name], name) for name in BLOCK_FORMATS if name not in _FREQUENT)
# Rows of x, N, K, activation, with a residual: products of Llama-3-8B with few, some and many rows.
_PRODUCTS = (
    *((16, n, 4096, activation, residual) for n, activation, residual in ((6144, None, False), (4096, None, True))),
    *((rows, 28672, 4096, "silu_mul", False) for rows in (16, 64, 256)),
    *((rows, 4096, 14336, None, True) for rows in (64, 256)),
    (64, 4096, 4096, "gelu", False),
)
# (queries, KV)
_FORMATS = (
    *((dtype, KVFormat(str(dtype).removeprefix("torch."))) for dtype in (torch.bfloat16, torch.float16, torch.float32)),
    *((torch.bfloat16, KVFormat.of(name)) for name in KV_CODE_BITS),
)


@dataclass(frozen=True)
class Compiled:
    """A compiled kernel and its use of resources.

    Attributes:
        name: Name of the kernel and its variant.
        shared_memory: Shared memory of a block, in bytes.
        registers: Number of registers of a thread; None: unknown.
        stack: Stack of a thread, for spilled registers, in bytes; None: unknown.
    """

    name: str
    shared_memory: int
    registers: int | None
    stack: int | None


def compile_all(
    capability: int, head_dims: tuple[int, ...] = (64, 128), groups: tuple[int, ...] = (1, 4, 8)
) -> Iterator[Compiled]:
    """Compile all kernels for a type of GPU.

    Args:
        capability: Compute capability, major * 10 + minor.
        head_dims: Numbers of values in one head.
        groups: Numbers of query heads that share a KV head.

    Raises:
        Exception: Triton cannot compile a kernel.
    """
    for name, launch in all_launches(Card(capability, 132, SHARED_MEMORY[capability]), head_dims, groups):
        yield compile_launch(name, launch, capability)


def compile_launch(name: str, launch: Launch, capability: int) -> Compiled:
    """Compile a kernel in the variant that a launch would use.

    Triton binds the arguments and chooses the variant by them, as at a launch, and only the launch itself is left out.

    Args:
        name: Name for the result.
        launch: The launch, whose tensors may be on the CPU.
        capability: Compute capability, major * 10 + minor.
    """
    driver.set_active(AbsentCard(capability))
    options = {"num_warps": launch.warps, "num_stages": launch.stages}
    made = launch.kernel.warmup(grid=launch.grid, **launch.args, **launch.constants, **options)
    registers, stack = _resources(made.asm["cubin"])
    return Compiled(name, made.metadata.shared, registers, stack)


@dataclass(frozen=True)
class AbsentCard:
    """A driver of Triton for a GPU that the machine need not have: it compiles, and launches nothing.

    Attributes:
        capability: Compute capability, major * 10 + minor. It is also the device's number, by which Triton keeps what
            it has compiled.
    """

    capability: int

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)


def _resources(binary: bytes) -> tuple[int | None, int | None]:
    """Registers and bytes of stack of a compiled kernel, by cuobjdump; None if Triton's package lacks it."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not tool.exists():
        return None, None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        told = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True).stdout
    counts = dict(word.split(":", 1) for word in told.split() if word.startswith(("REG:", "STACK:")))
    return (int(counts["REG"]), int(counts["STACK"])) if len(counts) == 2 else (None, None)


# The launches.


def all_launches(card: Card, head_dims: tuple[int, ...], groups: tuple[int, ...]) -> Iterator[tuple[str, Launch]]:
    """Names and launches of all kernels, for models with these head sizes and numbers of query heads of a KV head."""
    has_bf16 = card.capability >= 80
    for head_dim, (dtype, kv_format) in itertools.product(head_dims, _FORMATS):
        if dtype == torch.bfloat16 and not has_bf16:
            continue
        what = f"head_dim {head_dim}, {_short(dtype)} over {kv_format.name}"
        for group in groups if card.has_products else ():
            for launch in _attention_launches(head_dim, group, dtype, kv_format, card.shared_memory):
                if group == groups[0] or launch.kernel is not attention._merge:
                    rows = launch.constants.get("ROWS")
                    yield (
                        f"{launch.kernel.__name__}, {what}, group {group}" + (f", {rows} rows" if rows else ""),
                        launch,
                    )
        if card.has_products or not kv_format.rotates_keys:
            for name, launch in _rotary_launches(head_dim, dtype, kv_format):
                yield f"{launch.kernel.__name__}, {what}, {name}", launch
    for dtype in (torch.bfloat16, torch.float16, torch.float32) if has_bf16 else (torch.float16, torch.float32):
        yield from _row_launches(dtype)
        yield from _state_launches(dtype, card)
        if card.has_products:
            yield from _packed_launches(dtype, card)
            for storage in (*_STORED, *(_BLOCKS if dtype == torch.bfloat16 else ())):
                yield from _expert_launches(storage, dtype, card)
    for columns in (68, 65536):
        pool, rows = torch.empty(64, columns, dtype=torch.uint8), torch.empty(2, columns, dtype=torch.uint8)
        index = torch.zeros(2, dtype=torch.int64)
        yield f"_copy_rows, {columns} bytes, gathered", gather_launch(rows, pool, index)
        yield f"_copy_rows, {columns} bytes, scattered", scatter_launch(pool, index, rows)
    yield from _logits_launches()


def _row_launches(dtype: torch.dtype) -> Iterator[tuple[str, Launch]]:
    for columns in (896, 4096, 16384):
        x, weight = torch.empty(2, columns, dtype=dtype), torch.empty(columns, dtype=dtype)
        for bias in (None, weight):
            name = f"_norm, {_short(dtype)}, {columns} columns" + ("" if bias is None else ", bias")
            yield name, norm_launch(x, weight, bias, 1e-5, x)
    gated, out = torch.empty(2, 8192, dtype=dtype), torch.empty(2, 4096, dtype=dtype)
    for activation in GATED:
        yield f"_gate, {activation}, {_short(dtype)}", gate_launch(gated, activation, out)
    yield f"_sigmoid_gate, {_short(dtype)}", gated_launch(out, gated[:, 4096:], out)
    for n in (100, 128, 4096):
        x, packed = torch.empty(2, n, dtype=dtype), torch.empty(2, quant.row_bytes(n), dtype=torch.uint8)
        yield f"_dequantize, {_short(dtype)}, {n} columns", weights.dequantize_launch(packed, n, x)
        yield f"_quantize, {_short(dtype)}, {n} columns", weights.quantize_launch(x, packed)
    x, packed = torch.empty(2, 128, dtype=dtype), torch.empty(2, quant.row_bytes(128, 8), dtype=torch.uint8)
    yield f"_quantize_heads, {_short(dtype)}, 128 columns", weights.quantize_heads_launch(x, packed)


def _state_launches(dtype: torch.dtype, card: Card) -> Iterator[tuple[str, Launch]]:
    sequences, tokens = 3, 300
    where = {"dtype": dtype, "device": "meta"}
    first, starts = (torch.zeros(sequences + i, dtype=torch.int64) for i in (0, 1))
    slots = StateSlots(first, first, starts)
    for count in (sequences, tokens):
        for kernel, channels in ((4, 8192), (3, 2048)):
            x, inputs = torch.empty(count, channels, **where), torch.empty(8, channels, kernel - 1, **where)
            weight = torch.empty(channels, kernel, **where)
            for launch in conv.conv_launches(x, weight, None, inputs, slots, True, x):
                yield f"{launch.kernel.__name__}, {_short(dtype)}, {count} tokens, kernel {kernel}", launch
        for (key_heads, value_heads, key_dim, value_dim), states in itertools.product(_DELTA_NETS, _STATE_DTYPES):
            if states == torch.bfloat16 and card.capability < 80:
                continue
            qkv = torch.empty(count, 2 * key_heads * key_dim + value_heads * value_dim, **where)
            gates = torch.empty(count, value_heads, device="meta")
            matrices = torch.empty(8, value_heads, key_dim, value_dim, dtype=states, device="meta")
            out = torch.empty(count, value_heads, value_dim, **where)
            for launch in delta.delta_launches(qkv, gates, gates, matrices, slots, key_heads, out, card):
                name = f"{_short(dtype)}, states in {_short(states)}, {key_dim} by {value_dim}, {count} tokens"
                yield f"{launch.kernel.__name__}, {name}", launch
    a, rates, gates = torch.empty(tokens, 64, **where), torch.empty(32), torch.empty(tokens, 32)
    yield f"_compute_gates, {_short(dtype)}", delta.gates_launch(a[:, :32], a[:, 32:], rates, rates, gates, gates)
    heads, z = torch.empty(tokens, 32, 128, **where), torch.empty(tokens, 8192, **where)[:, :4096]
    yield f"_gated_norm, {_short(dtype)}", gated_norm_launch(heads, z, heads[0, 0], 1e-6, heads)


def _packed_launches(dtype: torch.dtype, card: Card) -> Iterator[tuple[str, Launch]]:
    shapes = _PRODUCTS if dtype == torch.bfloat16 else _PRODUCTS[1:4]
    products = [*itertools.product(_STORED[1:], shapes)]
    products += itertools.product(_BLOCKS, _PRODUCTS[1:5] if dtype == torch.bfloat16 else ())
    products += itertools.product(_RARE_BLOCKS, _PRODUCTS[3:4] if dtype == torch.bfloat16 else ())
    for storage, (rows, columns, depth, activation, adds) in products:
        where = {"dtype": dtype, "device": "meta"}
        x, bias = torch.empty(rows, depth, **where), torch.empty(columns, **where)
        out = torch.empty(rows, columns // 2 if activation == "silu_mul" else columns, **where)
        weight = _rows(storage, columns, depth, dtype)
        residual = out if adds else None
        for launch in packed.packed_launches(x, weight, None if adds else bias, activation, residual, out, card):
            shape = f"{rows} by {columns} by {depth}, {_short(dtype)}" + (f", {activation}" if activation else "")
            yield f"{launch.kernel.__name__}, {storage.weight_format or storage.kind}, {shape}", launch
    for storage in (*_BLOCKS, *_RARE_BLOCKS) if dtype == torch.bfloat16 else ():
        table, index = _rows(storage, 32, 4096, dtype), torch.zeros(2, dtype=torch.int64)
        assert isinstance(table, BlockWeight), "blocks are in a table"
        yield (
            f"_block_rows, {storage.weight_format}",
            block_rows_launch(table, index, torch.empty(2, 4096, dtype=dtype)),
        )


def _rows(storage: Storage, rows: int, depth: int, dtype: torch.dtype) -> Tensor | BlockWeight:
    """A matrix without memory, stored in one of the ways that products know."""
    stored_as = {"numbers": dtype, "int8": torch.int8}.get(storage.kind, torch.uint8)
    matrix = torch.empty(rows, storage.row_width(depth), dtype=stored_as, device="meta")
    return BlockWeight(matrix, storage.weight_format) if storage.weight_format else matrix


def _expert_launches(storage: Storage, dtype: torch.dtype, card: Card) -> Iterator[tuple[str, Launch]]:
    kind = storage.kind
    for num_experts, k, hidden, inner, activation, biased in _MIXTURES:
        where = {"dtype": dtype, "device": "meta"}
        x = torch.empty(2, hidden, **where)
        shares, chosen = torch.empty(2, k, device="meta"), torch.empty(2, k, dtype=torch.int64, device="meta")
        gate_up = _rows(storage, num_experts * 2 * inner, hidden, dtype)
        down = _rows(storage, num_experts * hidden, inner, dtype)
        biases = [torch.empty(w.shape[0], **where) if biased else None for w in (gate_up, down)]
        operands = x, shares, chosen, gate_up, biases[0], down, biases[1], activation, torch.empty_like(x)
        for launch in grouped.launches(*operands, card):
            if kind != "numbers" and launch.kernel in (grouped._sort, grouped._add):  # which do not know the weights
                continue
            product = launch.kernel is grouped._multiply
            which = f", {launch.constants['ACTIVATION'] or 'down'}" if product else ""
            yield f"{launch.kernel.__name__}, {num_experts} experts, {kind}, {_short(dtype)}{which}", launch
        if kind == "numbers":
            order, starts = (torch.empty(n, dtype=torch.int32, device="meta") for n in (2 * k, num_experts + 1))
            yield f"_sort, {num_experts} experts, places", grouped.sort_launch(chosen, order, starts, order)
            made = torch.empty(2 * k, hidden, **where)
            name = f"_add, {num_experts} experts, {_short(dtype)}, places"
            yield name, grouped.add_launch(made, shares, torch.empty(2, hidden, device="meta"), order)


def _logits_launches() -> Iterator[tuple[str, Launch]]:
    rows, columns = 4, 152_064
    logits, tokens = torch.empty(rows, columns), torch.zeros(rows, dtype=torch.int64)
    values, allowed = torch.empty(rows), torch.empty(rows, columns // 32, dtype=torch.int32)
    yield "_argmax", sampling.argmax_launch(logits, tokens, values, None)
    yield "_argmax, if finite", sampling.argmax_launch(logits, tokens, values, None, tokens, -2)
    yield "_argmax, lse", sampling.argmax_launch(logits, tokens, values, values)
    yield "_forbid", sampling.forbid_launch(logits, tokens, allowed)
    yield "_draw", sampling.draw_launch(logits, torch.empty(6, rows, dtype=torch.float64), tokens)


def _attention_launches(
    head_dim: int, group: int, dtype: torch.dtype, kv_format: KVFormat, shared_memory: int
) -> list[Launch]:
    blocks = np.zeros(64, np.int32)
    tail = np.array([20])
    sweep = AttentionPlan(
        (SharedItem(0, 1, blocks),),
        (DecodeGroup(0, 1, blocks[None], tail, np.zeros(1, np.int64)),),
        sequences=SequenceItems.of_one(1, 256, blocks),
    )
    tiles = attention_tiles(group, head_dim, dtype, kv_format.bits, shared_memory)
    shape = plan.Geometry(_KV_HEADS * group, _KV_HEADS, head_dim, DEFAULT_KV_BLOCK_SIZE, *tiles, num_sms=132)
    q = torch.empty(257, _KV_HEADS * group, head_dim, dtype=dtype)
    kv = _kv(head_dim, dtype, kv_format.bits)
    return attention.launches(
        q, kv, plan.cut(sweep, shape).prepare(torch.device("cpu")), torch.empty_like(q), kv_format.bits
    )


def _rotary_launches(head_dim: int, dtype: torch.dtype, kv_format: KVFormat) -> Iterator[tuple[str, Launch]]:
    heads, tokens = 4 * _KV_HEADS, 16
    qkv = torch.empty(tokens, (heads + 2 * _KV_HEADS) * head_dim, dtype=dtype)
    q = torch.empty(tokens, heads, head_dim, dtype=dtype)
    k = torch.empty(tokens, _KV_HEADS, head_dim, dtype=dtype)
    table, weight = torch.empty(64, head_dim // 2), torch.empty(head_dim, dtype=dtype)
    slots = torch.zeros(tokens, dtype=torch.int64)
    rotation = torch.empty(head_dim, head_dim) if kv_format.rotates_keys else None
    for name, rope, norms in (
        ("rope", (table, table), None),
        ("rope and norms", (table, table), (weight, weight)),
        ("learned", None, None),
    ):
        inputs = qkv, heads, _KV_HEADS, 0.1, rope, slots, norms, 1e-6, rotation
        yield (
            f"{name}, stored",
            rotary.rotary_launch(*inputs, _kv(head_dim, dtype, kv_format.bits), slots, kv_format.bits, q, None, None),
        )
        if name == "rope":
            yield f"{name}, apart", rotary.rotary_launch(*inputs, None, None, 0, q, k, k)


def _kv(head_dim: int, dtype: torch.dtype, bits: int) -> Tensor:
    width = quant.row_bytes(head_dim, bits) if bits else head_dim
    return torch.empty(64, 2, _KV_HEADS, DEFAULT_KV_BLOCK_SIZE, width, dtype=torch.uint8 if bits else dtype)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def main() -> int:
    parser = argparse.ArgumentParser(description="Compiles every Triton kernel without a card.")
    parser.add_argument("--capability", type=int, default=90, choices=sorted(SHARED_MEMORY), help="major * 10 + minor")
    parser.add_argument("--head-dim", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--group", type=int, nargs="+", default=[1, 4, 8], help="query heads of a KV head")
    given = parser.parse_args()
    limit, too_large = SHARED_MEMORY[given.capability], 0
    print("registers  stack  shared memory  kernel")
    for made in compile_all(given.capability, tuple(given.head_dim), tuple(given.group)):
        over = made.shared_memory > limit
        too_large += over
        registers, stack = ("?" if n is None else n for n in (made.registers, made.stack))
        print(f"{registers:>9}  {stack:>5}  {made.shared_memory:>13}  {made.name}{'  TOO LARGE' * over}", flush=True)
    return 1 if too_large else 0


if __name__ == "__main__":
    sys.exit(main())
