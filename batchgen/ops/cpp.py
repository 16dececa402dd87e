"""The C++ kernels (csrc/) on torch tensors of the CPU. `ops` chooses between these and the reference in torch.

Rows of tensors are contiguous; results are new tensors where none is given. Linear layers and attention run on the
instruction set that their weight or plan names. Everything else runs on the process's: the set that the environment's
BATCHGEN_ISA names, or the machine's first.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from batchgen.core.dtypes import BLOCK_FORMATS, WEIGHT_CODE_BITS, weight_row_bytes
from batchgen.core.kernel_choice import TORCH
from batchgen.ops import _kernels, quant
from batchgen.ops import attention_plan as plans
from batchgen.ops import instruction_set as _process
from batchgen.ops.instruction_set import instruction_set
from batchgen.ops.sampling import Draws

AttentionPlan: TypeAlias = _kernels.AttentionPlan

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
PACKED_KV_TYPES = {5: 3, 8: 4, 4: 5}  # by bits of a quantized value
# Types that `unpack_blocks` knows: with their numbers in files, and from 1000 on for blocks that are in no GGUF.
GGUF_TYPES = {
    "F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q2_K": 10, "Q3_K": 11, "Q4_K": 12,
    "Q5_K": 13, "Q6_K": 14, "IQ4_NL": 20, "IQ4_XS": 23, "BF16": 30, "MXFP4": 39,
}  # fmt: skip
BLOCK_TYPES = GGUF_TYPES | {"W4_G32": 1032, "W4_G64": 1064, "W4_G128": 1128, "FP8_G32": 2032, "FP8_G128": 2128}
ACTIVATIONS = {None: 0, "relu": 1, "gelu": 2, "gelu_tanh": 3, "silu_mul": 4, "gelu_tanh_mul": 5, "swiglu_oai_mul": 6}
GATED = ("silu_mul", "gelu_tanh_mul", "swiglu_oai_mul")
MAX_HEAD_DIM = 256


def instruction_sets() -> list[str]:
    """Instruction sets that this machine can run, the fastest first."""
    return _kernels.instruction_sets()


def built() -> list[str]:
    """Instruction sets that the library was built with, also ones that this machine lacks."""
    return _kernels.built()


def plain_twins() -> list[str]:
    """Instruction sets emulated in plain C++, for tests on machines that lack them. None is chosen by itself."""
    return _kernels.plain_twins()


@contextmanager
def using(name: str) -> Iterator[None]:
    """Run the process's kernels on another instruction set meanwhile, for tests. No kernel may run as it changes."""
    before = instruction_set()
    _kernels.use(name)
    try:
        yield
    finally:
        _kernels.use(before)


_of_thread = threading.local()


def run_alone() -> None:
    """Run loops of the calling thread by that thread alone from now on."""
    _of_thread.alone = True
    _kernels.set_alone(True)


@contextmanager
def alone() -> Iterator[None]:
    """Run loops of the calling thread by that thread alone meanwhile."""
    run_alone()
    try:
        yield
    finally:
        _of_thread.alone = False
        _kernels.set_alone(False)


def num_threads() -> int:
    """Threads that share a loop of the calling thread, itself included."""
    return 1 if getattr(_of_thread, "alone", False) else _process.num_threads()


def set_num_threads(count: int) -> None:
    """Have `count` threads share a loop from now on, of any thread that does not run its loops alone."""
    _kernels.set_num_threads(count)


def supports_head_dim(head_dim: int) -> bool:
    """Tell whether the kernels know heads of this size."""
    return head_dim % 8 == 0 and head_dim <= MAX_HEAD_DIM


def supports_attention(head_dim: int, group: int) -> bool:
    """Tell whether the kernels know these shapes. group: query heads of a KV head."""
    return supports_head_dim(head_dim) and group <= _kernels.MAX_GROUP


# Attention.


def attention_plan(
    plan: plans.AttentionPlan, kv_heads: int, group: int, kv_block_size: int, row_bytes: int, isa: str = ""
) -> AttentionPlan:
    """A sweep's attention in items, as the kernels take it.

    Args:
        plan: Attention of the sweep.
        kv_heads: Key and value heads.
        group: Query heads of a KV head.
        kv_block_size: Tokens of a KV block.
        row_bytes: Bytes of the K of a token and KV head.
        isa: Instruction set that attends; "": the process's.
    """
    items = AttentionPlan(kv_heads, group, kv_block_size, row_bytes)
    items.isa = isa
    for group_of_rows in plan.decode:
        items.add_decode(group_of_rows.start, group_of_rows.blocks, group_of_rows.num_keys, group_of_rows.first_key)
    for prefill in plan.prefill:
        blocks = prefill.blocks.astype(np.int32, copy=False)
        items.add_prefill(prefill.start, prefill.stop, blocks, prefill.query_offset, prefill.window or 0)
    for shared in plan.shared:
        items.add_shared(shared.start, shared.stop, shared.blocks.astype(np.int32, copy=False))
    items.finish()
    return items


def _kv_type(kv: Tensor, bits: int) -> int:
    """Number of the type that KV is stored in."""
    assert (kv.dtype == torch.uint8) == bool(bits)
    return PACKED_KV_TYPES[bits] if bits else TYPES[kv.dtype]


def attention(
    q: Tensor,
    kv: Tensor,
    plan: AttentionPlan,
    out: Tensor | None = None,
    bits: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of queries [tokens, heads, head_dim] to paged KV, as `dispatch.paged_attention` describes it.

    Args:
        q: Queries, with heads one after the other.
        kv: [num_blocks, 2, kv_heads, kv_block_size, width].
        plan: Items of the sweep, with an instruction set.
        out: Memory of the result, of q's shape.
        bits: Bits of a quantized value of packed KV; 0: KV is numbers.
        softcap: Bound of the scores; 0: none.
        sinks: fp32 [heads].
    """
    out = torch.empty_like(q) if out is None else out
    (_, _, head_dim), (stride, head_stride, unit) = q.shape, q.stride()
    assert unit == 1 and head_stride == head_dim and kv.is_contiguous()
    assert sinks is None or (sinks.dtype == torch.float32 and sinks.shape == q.shape[1:2] and sinks.is_contiguous())
    _kernels.attention(
        plan,
        q.data_ptr(),
        stride,
        out.data_ptr(),
        out.stride()[0],
        TYPES[q.dtype],
        kv.data_ptr(),
        _kv_type(kv, bits),
        head_dim,
        softcap,
        _address(sinks),
    )
    return out


# Linear layers.


class _Operand(NamedTuple):
    """A weight as the matmul kernel is told of it, but for its address.

    Attributes:
        stride: Distance of rows, in numbers or bytes.
        coded: Whether it has rows of 8 bits.
        packed: Whether it is prepacked.
        block_type: One of `BLOCK_TYPES`; 0: it is not block-quantized.
        isa: Instruction set that multiplies it; "": the process's.
    """

    stride: int
    coded: bool
    packed: bool
    block_type: int
    isa: str


@dataclass(frozen=True)
class PackedWeight:
    """A weight [N, K] prepacked in the order in which the kernels of one instruction set read it.

    Attributes:
        data: Panels, uint8.
        columns: N.
        depth: K; of int8 rounded up to a multiple of four.
        dtype: int8 of rows of 8 bits (ops/int8.py); of block-quantized weights the dtype of activations; else the
            numbers' dtype.
        gated: Whether it is for a gated activation.
        isa: Instruction set that multiplies it.
        weight_format: One of `BLOCK_FORMATS`; "": numbers, or rows of 8 bits.
    """

    data: Tensor
    columns: int
    depth: int
    dtype: torch.dtype
    gated: bool
    isa: str
    weight_format: str = ""

    @property
    def shape(self) -> tuple[int, int]:
        """N and K."""
        return self.columns, self.depth

    @cached_property
    def operand(self) -> _Operand:
        """The weight as the matmul kernel is told of it."""
        stride, block_type = self.depth, 0
        if self.weight_format:
            stride, block_type = _block_operand(self.weight_format, self.depth)
        return _Operand(stride, self.dtype == torch.int8, True, block_type, self.isa)


@dataclass(frozen=True)
class BoundWeight:
    """A weight [N, K] as it lies.

    Attributes:
        data: The weight.
        isa: Instruction set that multiplies it, or TORCH.
    """

    data: Tensor
    isa: str

    @property
    def shape(self) -> tuple[int, int]:
        """N and K, or bytes of a row of 8 bits."""
        n, k = self.data.shape
        return n, k

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weight."""
        return self.data.dtype

    @cached_property
    def operand(self) -> _Operand:
        """The weight as the matmul kernel is told of it."""
        assert self.isa != TORCH, "torch's own linear is not here: dispatch.linear"
        return _Operand(self.data.stride(0), self.dtype == torch.int8, False, 0, self.isa)


@dataclass(frozen=True)
class BlockWeight:
    """A block-quantized weight [N, K], which matmul dequantizes as it needs it.

    Attributes:
        data: uint8 [N, bytes of a row], contiguous. While a model loads it may have a shape alone (`RowsInFile`).
        weight_format: One of `BLOCK_FORMATS`.
        isa: Instruction set that multiplies it; "": the process's.
    """

    data: Tensor
    weight_format: str
    isa: str = ""

    @property
    def shape(self) -> tuple[int, int]:
        """N and K."""
        values, num_bytes = BLOCK_FORMATS[self.weight_format]
        return len(self.data), self.data.shape[1] // num_bytes * values

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the stored rows, uint8."""
        return self.data.dtype

    @cached_property
    def operand(self) -> _Operand:
        """The weight as the matmul kernel is told of it."""
        assert self.data.is_contiguous() and self.isa != TORCH
        return _Operand(self.data.shape[1], False, False, BLOCK_TYPES[self.weight_format.upper()], self.isa)


def _block_operand(weight_format: str, k: int) -> tuple[int, int]:
    """Bytes of a row of K block-quantized weights, and the number of their type."""
    return weight_row_bytes(k, weight_format), BLOCK_TYPES[weight_format.upper()]


def packed_bytes(columns: int, depth: int, dtype: torch.dtype, *, gated: bool = False, isa: str = "") -> int:
    """Bytes of a prepacked weight [columns, depth]: those of the weight itself, rounded up.

    16-bit numbers take twice as many where the instruction set multiplies them as 32-bit ones.
    """
    return _kernels.packed_bytes(columns, depth, *_kind(dtype), _gate(gated), isa)


def packed_grows(dtype: torch.dtype, isa: str = "") -> bool:
    """Tell whether prepacked weights take twice as much memory."""
    return dtype == torch.float16 or (dtype == torch.bfloat16 and not _kernels.fast_bf16(isa))


def pack(weight: Tensor, *, gated: bool = False, isa: str = "") -> PackedWeight:
    """Prepack a weight [N, K] for `linear`.

    Args:
        weight: Numbers, or rows of 8 bits.
        gated: Whether it is for a gated activation.
        isa: Instruction set that reads it; "": the process's.
    """
    columns, depth = len(weight), _depth(weight)
    assert weight.stride(1) == 1
    isa = isa or instruction_set()
    out = torch.empty(packed_bytes(columns, depth, weight.dtype, gated=gated, isa=isa), dtype=torch.uint8)
    _kernels.pack(
        weight.data_ptr(),
        weight.stride(0),
        columns,
        depth,
        *_kind(weight.dtype),
        _gate(gated),
        out.data_ptr(),
        isa,
    )
    return PackedWeight(out, columns, depth, weight.dtype, gated, isa)


def pack_blocks(weight: BlockWeight, dtype: torch.dtype, *, gated: bool = False) -> PackedWeight:
    """Prepack a block-quantized weight for `linear`, in as many bytes, rounded up.

    Args:
        weight: The weight, for the instruction set that it names, or else the process's.
        dtype: Dtype of activations.
        gated: Whether it is for a gated activation.
    """
    assert weight.data.is_contiguous()
    memory = torch.empty(block_panels_bytes(weight, gated=gated), dtype=torch.uint8)
    panels = block_panels(weight, dtype, memory, gated=gated)
    fill_panels(panels, 0, weight.data.numpy())
    return panels


def block_panels_bytes(weight: BlockWeight, *, gated: bool = False) -> int:
    """Bytes of the panels of a block-quantized weight, whose data may have a shape alone."""
    columns, row_bytes = weight.data.shape
    return _kernels.arranged_bytes(row_bytes, columns, _gate(gated), weight.isa or instruction_set())


def block_panels(weight: BlockWeight, dtype: torch.dtype, memory: Tensor, *, gated: bool = False) -> PackedWeight:
    """Panels of a block-quantized weight, not filled yet.

    Args:
        weight: The weight, whose data may have a shape alone.
        dtype: Dtype of activations.
        memory: uint8, of `block_panels_bytes`.
        gated: Whether it is for a gated activation.
    """
    (columns, depth), isa = weight.shape, weight.isa or instruction_set()
    return PackedWeight(memory, columns, depth, dtype, gated, isa, weight.weight_format)


def rows_of_panel(isa: str) -> int:
    """Rows of a block-quantized weight in one panel. Half of a gated weight's are the gate's."""
    return _kernels.arranged_bytes(1, 1, _gate(False), isa)


def fill_panels(panels: PackedWeight, first: int, rows: np.ndarray) -> None:
    """Fill some panels of `block_panels`. Threads may each fill some.

    Args:
        panels: The prepacked weight.
        first: Number of the first panel to fill.
        rows: uint8, contiguous: rows of whole panels, or the last ones; of a gated weight the gate's before the others.
    """
    row_bytes = weight_row_bytes(panels.depth, panels.weight_format)
    skipped = first * rows_of_panel(panels.isa) * row_bytes
    _kernels.arrange(
        rows.ctypes.data,
        row_bytes,
        rows.size // row_bytes,
        panels.depth,
        TYPES[panels.dtype],
        BLOCK_TYPES[panels.weight_format.upper()],
        _gate(panels.gated),
        panels.data.data_ptr() + skipped,
        panels.isa,
    )


def packed_rows(weight: PackedWeight, rows: Tensor) -> Tensor:
    """Some rows of a prepacked weight [N, K] as numbers again. Blocks give those of `unpack_blocks`, bit for bit.

    Args:
        weight: A weight that is neither gated nor of rows of 8 bits.
        rows: Numbers of the rows, int64 [count].

    Returns:
        [count, K], of the weight's dtype.

    Raises:
        IndexError: There is no such row.
    """
    assert not weight.gated and weight.dtype != torch.int8 and rows.dtype == torch.int64
    columns, depth = weight.shape
    rows = rows.contiguous()
    out = torch.empty(len(rows), depth, dtype=weight.dtype)
    stride, block_type = _block_operand(weight.weight_format, depth) if weight.weight_format else (0, 0)
    _kernels.packed_rows(
        weight.data.data_ptr(),
        stride,
        columns,
        depth,
        TYPES[weight.dtype],
        block_type,
        rows.data_ptr(),
        len(rows),
        out.data_ptr(),
        weight.isa,
    )
    return out


KernelWeight: TypeAlias = Tensor | PackedWeight | BoundWeight | BlockWeight


def _operand_of(weight: KernelWeight) -> _Operand:
    """The weight as the matmul kernel is told of it."""
    if isinstance(weight, Tensor):
        return _Operand(weight.stride(0), weight.dtype == torch.int8, False, 0, "")
    return weight.operand


def _check_operand(weight: KernelWeight, operand: _Operand, depth: int, dtype: torch.dtype, gated: bool) -> None:
    """Assert that x [M, depth] of this dtype can be multiplied with a weight, with a gated activation or not."""
    if operand.coded:
        assert (weight.shape[1] if operand.packed else _depth(weight)) == -(-depth // 4) * 4
    else:
        assert weight.shape[1] == depth
        assert (operand.block_type and not operand.packed) or weight.dtype == dtype
    assert not isinstance(weight, PackedWeight) or weight.gated == gated


def linear(
    x: Tensor,
    weight: KernelWeight,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute activation(x weightᵀ + bias) + residual, for x [M, K] and weight [N, K].

    With a gated activation the weight has the gate's rows before those it is multiplied with, and the result has N / 2
    columns. Sums are in fp32, each in the same order whatever M is; those of a weight in rows of 8 bits are described
    in ops/int8.py.

    Block-quantized weights are dequantized to x's dtype first: sums are those of the dequantized weight. Where x is
    bf16 and the CPU has products of bytes (for FP8, of bf16), their quantized values are multiplied and scales applied
    to sums in fp32: there weights are not rounded, and x is rounded to 2^-15 of the largest number of its run of 16 or
    32.
    """
    operand = _operand_of(weight)
    (rows, depth), (x_stride, x_unit), dtype = x.shape, x.stride(), x.dtype
    columns, gated = weight.shape[0], activation in GATED
    if out is None:
        out = x.new_empty(rows, columns // 2 if gated else columns, dtype=out_dtype)
    out_stride, out_unit = out.stride()
    assert x_unit == 1 and out_unit == 1
    _check_operand(weight, operand, depth, dtype, gated)
    _kernels.linear(
        x.data_ptr(),
        x_stride,
        rows,
        (weight if isinstance(weight, Tensor) else weight.data).data_ptr(),
        operand.stride,
        columns,
        depth,
        TYPES[dtype],
        operand.coded,
        operand.packed,
        operand.block_type,
        ACTIVATIONS[activation],
        0 if bias is None else bias.data_ptr(),
        0 if residual is None else residual.data_ptr(),
        0 if residual is None else residual.stride(0),
        out.data_ptr(),
        out_stride,
        TYPES[out.dtype],
        operand.isa,
    )
    return out


def grouped_linear(
    x: Tensor,
    weights: Sequence[KernelWeight],
    counts: Sequence[int],
    biases: Sequence[Tensor | None],
    *,
    activation: str | None = None,
    out: Tensor,
) -> Tensor:
    """Multiply `counts[i]` rows of x with weight i, add bias i and apply the activation, for all weights in one loop.

    Args:
        x: [M, K]: the rows of the first weight, then those of the second, and so on.
        weights: One or more weights, which `lie_alike`.
        counts: Rows of x for each weight.
        biases: [N] or None, for each weight.
        activation: An activation that `linear` knows.
        out: Memory of the result, [M, N], or half of N with a gated activation.
    """
    operand, (columns, _) = _operand_of(weights[0]), weights[0].shape
    (rows, depth), (x_stride, x_unit), (out_stride, out_unit) = x.shape, x.stride(), out.stride()
    gated = activation in GATED
    assert x_unit == 1 and out_unit == 1 and out.shape == (rows, columns // 2 if gated else columns)
    assert len(weights) == len(counts) == len(biases) and sum(counts) == rows
    _check_operand(weights[0], operand, depth, x.dtype, gated)
    _kernels.grouped_linear(
        x.data_ptr(),
        x_stride,
        np.array(counts, dtype=np.int64),
        np.array([(w if isinstance(w, Tensor) else w.data).data_ptr() for w in weights], dtype=np.int64),
        operand.stride,
        columns,
        depth,
        TYPES[x.dtype],
        operand.coded,
        operand.packed,
        operand.block_type,
        ACTIVATIONS[activation],
        np.array([_address(bias) for bias in biases], dtype=np.int64),
        out.data_ptr(),
        out_stride,
        TYPES[out.dtype],
        operand.isa,
    )
    return out


def lie_alike(weights: Sequence[KernelWeight]) -> bool:
    """Tell whether `grouped_linear` takes weights: they are of one kind, shape and dtype, for one instruction set."""
    kinds = {(weight.shape, weight.dtype, getattr(weight, "gated", None), _operand_of(weight)) for weight in weights}
    return len(kinds) == 1


# Around them.


def norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, out: Tensor | None = None) -> Tensor:
    """RMSNorm of the rows of x [..., columns], or with a bias LayerNorm."""
    if out is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    rows = x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
    count, columns = rows.shape
    assert out.is_contiguous()
    _kernels.norm(
        rows.data_ptr(),
        rows.stride()[0],
        count,
        columns,
        weight.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        eps,
        TYPES[x.dtype],
        out.data_ptr(),
        columns,
    )
    return out


def sort_by_expert(chosen: Tensor, num_experts: int) -> tuple[Tensor, Tensor, list[int]]:
    """Sort tokens by the experts that they go through, those of one expert in their own order.

    Args:
        chosen: The experts of each token, int64 [tokens, choices].
        num_experts: Experts of the layer.

    Returns:
        The token of each row, int64 [tokens * choices]; the row of each token and choice, int64 [tokens, choices]; and
        the number of rows of each expert.

    Raises:
        IndexError: There is no such expert.
    """
    assert chosen.dtype == torch.int64 and chosen.is_contiguous()
    token_of_row, row_of_choice = torch.empty(chosen.numel(), dtype=torch.int64), torch.empty_like(chosen)
    counts = _kernels.sort_by_expert(
        chosen.data_ptr(), *chosen.shape, num_experts, token_of_row.data_ptr(), row_of_choice.data_ptr()
    )
    return token_of_row, row_of_choice, counts


def gather_rows(x: Tensor, rows: Tensor, out: Tensor) -> Tensor:
    """Copy rows of x [count, columns], by their numbers, int64, to out [rows, columns]. They must exist."""
    assert rows.dtype == torch.int64 and rows.is_contiguous() and x.stride(1) == 1
    assert out.is_contiguous() and out.shape == (len(rows), x.shape[1]) and out.dtype == x.dtype
    size = x.element_size()
    _kernels.gather_rows(
        x.data_ptr(), x.stride(0) * size, x.shape[1] * size, rows.data_ptr(), len(rows), out.data_ptr()
    )
    return out


def weighted_sums(made: Tensor, rows: Tensor, shares: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Weighted sums of some rows for each token, in their order, in fp32.

    Args:
        made: Results of experts, [rows, columns].
        rows: Numbers of the rows of each token, int64 [tokens, choices]. They must exist.
        shares: Weights of the rows, fp32 [tokens, choices].
        out_dtype: Dtype of the sums, `made`'s or fp32.

    Returns:
        [tokens, columns].
    """
    assert made.is_contiguous() and rows.is_contiguous() and shares.is_contiguous() and rows.shape == shares.shape
    assert rows.dtype == torch.int64 and shares.dtype == torch.float32 and out_dtype in (made.dtype, torch.float32)
    tokens, choices = rows.shape
    out = made.new_empty(tokens, made.shape[1], dtype=out_dtype)
    _kernels.weighted_sums(
        made.data_ptr(),
        rows.data_ptr(),
        shares.data_ptr(),
        tokens,
        choices,
        made.shape[1],
        TYPES[made.dtype],
        out.data_ptr(),
        out_dtype == torch.float32,
    )
    return out


def rotary_store(  # the operands of one kernel
    qkv: Tensor,
    heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    scale: float,
    rope: tuple[Tensor, Tensor] | None = None,
    positions: Tensor | None = None,
    norms: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0,
    rotation: Tensor | None = None,
    kv: Tensor | None = None,
    slots: Tensor | None = None,
    bits: int = 0,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Norm, rotate and scale queries and keys of fused QKV, and store or return keys and values.

    Args:
        qkv: [tokens, (heads + 2 kv_heads) * head_dim].
        heads: Query heads.
        kv_heads: Key and value heads.
        head_dim: Numbers of a head.
        scale: Factor of queries.
        rope: cos and sin, fp32 [positions, head_dim / 2].
        positions: int64 [tokens].
        norms: RMSNorm weights of the heads of q and k, [head_dim] each.
        eps: Epsilon of the norms.
        rotation: Matrix that queries and keys are rotated with, fp32 [head_dim, head_dim].
        kv: KV of a layer; None: keys and values are returned.
        slots: int64 [tokens].
        bits: Bits of a quantized value of packed KV; 0: KV is numbers.
    """
    tokens, (stride, unit) = qkv.shape[0], qkv.stride()
    q = qkv.new_empty(tokens, heads, head_dim)
    k = v = None
    if kv is None:
        k, v = (qkv.new_empty(tokens, kv_heads, head_dim) for _ in range(2))
    assert unit == 1 and (kv is None or (kv.is_contiguous() and kv.shape[2] == kv_heads))
    cos, sin = rope if rope else (None, None)
    q_norm, k_norm = norms if norms else (None, None)
    _kernels.rotary_store(
        qkv.data_ptr(),
        stride,
        tokens,
        TYPES[qkv.dtype],
        heads,
        kv_heads,
        head_dim,
        _address(cos),
        _address(sin),
        _address(positions),
        scale,
        _address(q_norm),
        _address(k_norm),
        eps,
        _address(rotation),
        q.data_ptr(),
        _address(kv),
        _kv_type(kv, bits) if kv is not None else 0,
        kv.shape[3] if kv is not None else 1,
        _address(slots),
        _address(k),
        _address(v),
    )
    return q, k, v


def quantize(x: Tensor, bits: int = WEIGHT_CODE_BITS) -> Tensor:
    """Quantize rows [..., n] to groups of values with `bits` each, as `quant.quantize` does without importance."""
    x = x.contiguous()
    columns = x.shape[-1]
    packed = torch.empty(*x.shape[:-1], quant.row_bytes(columns, bits), dtype=torch.uint8)
    rows = packed.numel() // packed.shape[-1]
    _kernels.quantize(x.data_ptr(), rows, columns, TYPES[x.dtype], packed.data_ptr(), bits)
    return packed


def dequantize(packed: Tensor, n: int, out: Tensor) -> Tensor:
    """Dequantize rows of 4-bit values into `out` [..., n]. Both are contiguous."""
    rows = packed.numel() // packed.shape[-1]
    _kernels.dequantize(packed.data_ptr(), packed.shape[-1], rows, n, TYPES[out.dtype], out.data_ptr())
    return out


def unpack_blocks(packing: str, packed: Tensor, out: Tensor, interleaved: int = 0) -> Tensor:
    """Dequantize block-quantized rows, of a GGUF or others.

    Args:
        packing: One of `BLOCK_TYPES`.
        packed: uint8 [rows, bytes of a row], as in the file.
        out: [rows, columns], contiguous.
        interleaved: Rows that are interleaved halves, in turn 0, n/2, 1, n/2 + 1, ..., and are put into order; 0: all
            are in order.
    """
    rows, columns = out.shape
    assert packed.is_contiguous() and out.is_contiguous() and len(packed) == rows
    assert interleaved == 0 or (interleaved % 2 == 0 and rows % interleaved == 0)
    _kernels.unpack_blocks(
        packed.data_ptr(),
        packed.shape[1],
        rows,
        columns,
        BLOCK_TYPES[packing],
        interleaved,
        TYPES[out.dtype],
        out.data_ptr(),
    )
    return out


def argmax(logits: Tensor, *, want_lse: bool = False) -> tuple[Tensor, Tensor, Tensor | None]:
    """The first of the largest of each row, its value, and the log of the sum of exponentials.

    logits: fp32 [rows, columns]. Returns int64, fp32 and fp32 [rows]; None for the last unless want_lse.
    """
    rows, columns = logits.shape
    index, maximum = torch.empty(rows, dtype=torch.int64), torch.empty(rows)
    lse = torch.empty(rows) if want_lse else None
    _kernels.argmax(
        logits.data_ptr(), logits.stride(0), rows, columns, index.data_ptr(), maximum.data_ptr(), _address(lse)
    )
    return index, maximum, lse


def draw(logits: Tensor, rows: np.ndarray, draws: Draws, out: Tensor) -> None:
    """Draw a token at random from each of some rows of fp32 logits, into int64 `out` at these rows."""
    if len(rows) < len(logits):
        logits = logits.index_select(0, torch.from_numpy(rows))
    index = torch.empty(len(rows), dtype=torch.int64)
    _kernels.draw(logits.data_ptr(), logits.stride(0), logits.shape[1], *draws, index.data_ptr())
    out[torch.from_numpy(rows)] = index


def forbid(logits: Tensor, rows: np.ndarray, allowed: np.ndarray) -> None:
    """Set fp32 logits of tokens that are not allowed to minus infinity, in place, in the rows that have a mask."""
    assert allowed.shape[1] * 32 >= logits.shape[1] and len(allowed) == len(rows)
    _kernels.forbid(logits.data_ptr(), logits.stride(0), logits.shape[1], rows, allowed)


def _address(tensor: Tensor | None) -> int:
    """Address of a tensor; 0 of None."""
    return 0 if tensor is None else tensor.data_ptr()


def _kind(dtype: torch.dtype) -> tuple[int, bool]:
    """Type number of a weight, and whether it has rows of 8 bits, whose matmul does not depend on the type."""
    return (0, True) if dtype == torch.int8 else (TYPES[dtype], False)


def _depth(weight: Tensor | PackedWeight | BoundWeight | BlockWeight) -> int:
    """K of a weight. A row of 8 bits has so many values before its scale."""
    if isinstance(weight, PackedWeight):
        return weight.depth
    if isinstance(weight, BlockWeight):
        return weight.shape[1]
    return weight.shape[1] - 4 if weight.dtype == torch.int8 else weight.shape[1]


def _gate(gated: bool) -> int:
    """Number of an activation that is gated, or not."""
    return ACTIVATIONS["silu_mul" if gated else None]
