"""The C++ kernels (csrc/) as functions of torch tensors on the CPU.

`dispatch` calls these functions, or the torch operations of `reference`. Rows of tensors must be contiguous. A function
without `out` returns a new tensor. A linear layer or an attention runs on the instruction set that its weight or plan
names. All other kernels run on the process's instruction set: the one that the environment variable BATCHGEN_ISA names,
or else the fastest that the machine has.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from batchgen.core.cores import on_cores as keep_to_cores
from batchgen.core.dtypes import BLOCK_FORMATS, WEIGHT_CODE_BITS, weight_row_bytes
from batchgen.core.kernel_choice import TORCH
from batchgen.ops import attention_plan as plans
from batchgen.ops import instruction_set as _process
from batchgen.ops import quant
from batchgen.ops.instruction_set import instruction_set
from batchgen.ops.kernel_library import library as _kernels
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
GATED = ("silu_mul", "gelu_tanh_mul", "swiglu_oai_mul", "gelu_mul")
# Activations in the order of their numbers in csrc/kernels.h.
ACTIVATIONS = {name: i for i, name in enumerate((None, "relu", "gelu", "gelu_tanh", *GATED))}
MAX_HEAD_DIM = 512


def instruction_sets() -> list[str]:
    """Names of the instruction sets that this machine can run, the fastest first."""
    return _kernels.instruction_sets()


def built() -> list[str]:
    """Names of all instruction sets that the library was built for, including those that this machine lacks."""
    return _kernels.built()


def plain_twins() -> list[str]:
    """Names of instruction sets that plain C++ emulates, for tests. batchgen never chooses one unless it is named."""
    return _kernels.plain_twins()


@contextmanager
def using(name: str) -> Iterator[None]:
    """Run kernels on another instruction set within a `with` block, for tests.

    No kernel may be running when the block begins or ends.

    Args:
        name: Name of the instruction set.
    """
    before = instruction_set()
    _kernels.use(name)
    try:
        yield
    finally:
        _kernels.use(before)


_of_thread = threading.local()


def run_alone() -> None:
    """From now on, run the kernels that this thread calls on this thread alone."""
    _of_thread.alone = True
    _kernels.set_alone(True)


@contextmanager
def alone() -> Iterator[None]:
    """Within a `with` block, run the kernels that this thread calls on this thread alone."""
    run_alone()
    try:
        yield
    finally:
        _of_thread.alone = False
        _kernels.set_alone(False)


def num_threads() -> int:
    """Number of threads that execute a kernel called by this thread, itself included."""
    return 1 if getattr(_of_thread, "alone", False) else _process.num_threads()


def set_num_threads(count: int) -> None:
    """Set the number of threads that execute a kernel, for all callers but the threads that called `run_alone`."""
    _kernels.set_num_threads(count)


@contextmanager
def on_cores(cores: Collection[int]) -> Iterator[None]:
    """Within a `with` block, keep this thread, the kernels' threads and torch's to these cores, at most one on each.

    No kernel of another thread may be running when the block begins or ends.

    Args:
        cores: Numbers of cores.
    """
    threads, of_torch = _process.num_threads(), torch.get_num_threads()
    try:
        with keep_to_cores(cores):
            _process.follow_affinity()
            set_num_threads(min(threads, len(cores)))
            torch.set_num_threads(min(of_torch, len(cores)))
            yield
    finally:
        _process.follow_affinity()
        set_num_threads(threads)
        torch.set_num_threads(of_torch)


def supports_head_dim(head_dim: int) -> bool:
    """Tell whether the C++ kernels support attention heads of `head_dim` values."""
    return head_dim % 8 == 0 and head_dim <= MAX_HEAD_DIM


def supports_attention(head_dim: int, group: int) -> bool:
    """Tell whether the C++ kernels support attention of these shapes.

    Args:
        head_dim: Number of values in one head.
        group: Number of query heads that share a KV head.
    """
    return supports_head_dim(head_dim) and group <= _kernels.MAX_GROUP


# Attention.


def attention_plan(
    plan: plans.AttentionPlan,
    kv_heads: int,
    group: int,
    kv_block_size: int,
    row_bytes: int,
    isa: str = "",
    chosen: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None,
) -> AttentionPlan:
    """The attention plan of a sweep as the work items of the C++ kernels.

    Args:
        plan: Attention plan of the sweep.
        kv_heads: Number of key and value heads.
        group: Number of query heads that share a KV head.
        kv_block_size: Number of tokens in a KV block.
        row_bytes: Bytes of the key of one token and one KV head, as the KV stores it.
        isa: Instruction set that computes the attention. "": the process's instruction set.
        chosen: Sequences that attend to chosen pages: their tokens, int64 [n]; the table of their blocks, int32 [n,
            pages], in which other blocks may be before each call; their keys, int64 [n]. None: there are none.
    """
    items = AttentionPlan(kv_heads, group, kv_block_size, row_bytes)
    items.isa = isa
    for group_of_rows in plan.decode:
        items.add_decode(group_of_rows.start, group_of_rows.blocks, group_of_rows.num_keys, group_of_rows.first_key)
    if (several := plan.sequences) is not None:
        columns = several.start, several.num_tokens, several.query_offset, several.places
        items.add_sequences(*columns, several.blocks, several.window or 0, several.ahead)
    for shared in plan.shared:
        items.add_shared(shared.start, shared.stop, shared.blocks.astype(np.int32, copy=False))
    if chosen is not None:
        items.add_chosen(*chosen)
    items.finish()
    return items


def summarise_pages(kv: Tensor, blocks: Tensor, targets: Tensor, summaries: Tensor, bits: int) -> None:
    """Write the summaries of complete KV blocks (`chosen_attention.summarise`)."""
    _, _, kv_heads, kv_block_size, _ = kv.shape
    assert kv.is_contiguous() and summaries.is_contiguous()
    shape = _kv_type(kv, bits), kv_block_size, kv_heads, summaries.shape[-1]
    numbers = blocks.numpy(), targets.numpy()
    _kernels.summarise_pages(kv.data_ptr(), *shape, *numbers, summaries.data_ptr(), TYPES[summaries.dtype], "")


def choose_pages(q: Tensor, summaries: Tensor, choice: plans.PageChoice, table: np.ndarray, isa: str) -> None:
    """Choose pages by the queries of a layer.

    Args:
        q: Queries [tokens, heads, head_dim]; the heads of a token are contiguous.
        summaries: Summaries of the layer's pages, [blocks, kv_heads, 2, head_dim].
        choice: Sequences that choose.
        table: Table for the chosen blocks, int32 [n, pages].
        isa: Instruction set. "": the process's.
    """
    if not len(choice.tokens):
        return
    _, heads, head_dim = q.shape
    assert q.stride()[1:] == (head_dim, 1) and summaries.is_contiguous() and table.flags.c_contiguous
    _kernels.choose_pages(
        q.data_ptr(),
        q.stride(0),
        TYPES[q.dtype],
        heads,
        summaries.shape[1],
        head_dim,
        summaries.data_ptr(),
        TYPES[summaries.dtype],
        choice.tokens,
        choice.summaries,
        choice.blocks,
        choice.starts,
        choice.num_pages,
        table,
        isa,
    )


def _kv_type(kv: Tensor, bits: int) -> int:
    """Number by which the kernels know the type of stored KV."""
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
    """Causal attention of a sweep's queries to paged KV (`dispatch.paged_attention`) by the C++ kernels.

    Args:
        q: Queries [tokens, heads, head_dim]; the heads of a token are contiguous.
        kv: KV of the layer, [num_blocks, 2, kv_heads, kv_block_size, width].
        plan: Work items of the sweep, from `attention_plan`.
        out: Tensor for the result, of q's shape. None: a new tensor.
        bits: Bits of each quantized value of packed KV. 0: KV is stored as numbers.
        softcap: Bound of the scores. 0: no bound.
        sinks: One further score for each head, fp32 [heads]; or None.

    Returns:
        Attention output [tokens, heads, head_dim].
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
    """Description of a weight matrix for the matmul kernel: all arguments but its address.

    Attributes:
        stride: Distance between rows, in numbers, or in bytes for rows of bytes.
        coded: Whether the weight is int8 rows (`int8`).
        packed: Whether the weight is prepacked.
        block_type: One of the values of `BLOCK_TYPES`; 0: the weight is not block-quantized.
        isa: Instruction set that multiplies the weight. "": the process's instruction set.
    """

    stride: int
    coded: bool
    packed: bool
    block_type: int
    isa: str


@dataclass(frozen=True)
class PackedWeight:
    """A weight [N, K] prepacked into panels, in the order in which the kernels of one instruction set read it.

    Attributes:
        data: The panels, uint8 [bytes].
        columns: N.
        depth: K; for int8 rows, K rounded up to a multiple of four.
        dtype: int8 for int8 rows (`int8`). For block-quantized weights, the dtype of the activations that they are
            multiplied with. Otherwise the dtype of the weights.
        gated: Whether the weight is for a gated activation.
        isa: Instruction set that multiplies the weight.
        weight_format: One of `BLOCK_FORMATS`; "": the weight is not block-quantized.
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
        """N (rows) and K (columns) of the weight."""
        return self.columns, self.depth

    @cached_property
    def operand(self) -> _Operand:
        """Description of this weight for the matmul kernel."""
        stride, block_type = self.depth, 0
        if self.weight_format:
            stride, block_type = _block_operand(self.weight_format, self.depth)
        return _Operand(stride, self.dtype == torch.int8, True, block_type, self.isa)


@dataclass(frozen=True)
class BoundWeight:
    """A weight in its original memory, bound to the instruction set that multiplies it.

    Attributes:
        data: The weight [N, K] of numbers, or int8 rows [N, int8.row_bytes(K)].
        isa: Instruction set that multiplies the weight; or TORCH, torch's own linear.
    """

    data: Tensor
    isa: str

    @property
    def shape(self) -> tuple[int, int]:
        """N (rows), and K (columns) or the bytes of one int8 row."""
        n, k = self.data.shape
        return n, k

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weight's tensor."""
        return self.data.dtype

    @cached_property
    def operand(self) -> _Operand:
        """Description of this weight for the matmul kernel."""
        assert self.isa != TORCH, "torch's own linear is not here: dispatch.linear"
        return _Operand(self.data.stride(0), self.dtype == torch.int8, False, 0, self.isa)


@dataclass(frozen=True)
class BlockWeight:
    """A block-quantized weight [N, K]. The matmul kernel dequantizes it while it multiplies.

    Attributes:
        data: Rows, uint8 [N, bytes of a row], contiguous. While a model loads it may be a `RowsInFile`, which has a
            shape but no bytes in memory.
        weight_format: One of `BLOCK_FORMATS`.
        isa: Instruction set that multiplies the weight. "": the process's instruction set.
    """

    data: Tensor
    weight_format: str
    isa: str = ""

    @property
    def shape(self) -> tuple[int, int]:
        """N (rows) and K (columns) of the weight."""
        values, num_bytes = BLOCK_FORMATS[self.weight_format]
        return len(self.data), self.data.shape[1] // num_bytes * values

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the stored rows, uint8."""
        return self.data.dtype

    @cached_property
    def operand(self) -> _Operand:
        """Description of this weight for the matmul kernel."""
        assert self.data.is_contiguous() and self.isa != TORCH
        return _Operand(self.data.shape[1], False, False, BLOCK_TYPES[self.weight_format.upper()], self.isa)


def _block_operand(weight_format: str, k: int) -> tuple[int, int]:
    """Bytes of a row of k block-quantized weights, and the number by which the kernels know the format."""
    return weight_row_bytes(k, weight_format), BLOCK_TYPES[weight_format.upper()]


def packed_bytes(columns: int, depth: int, dtype: torch.dtype, *, gated: bool = False, isa: str = "") -> int:
    """Number of bytes that a weight takes when it is prepacked.

    This is the size of the weight, rounded up. It is twice the size for 16-bit weights if the instruction set
    multiplies them as 32-bit numbers.

    Args:
        columns: N, the rows of the weight.
        depth: K, the columns of the weight.
        dtype: Dtype of the weight; int8 for int8 rows.
        gated: Whether the weight is for a gated activation.
        isa: Instruction set that multiplies the weight. "": the process's instruction set.
    """
    return _kernels.packed_bytes(columns, depth, *_kind(dtype), _gate(gated), isa)


def packed_grows(dtype: torch.dtype, isa: str = "") -> bool:
    """Tell whether a weight of this dtype takes twice as many bytes when it is prepacked for an instruction set."""
    return dtype == torch.float16 or (dtype == torch.bfloat16 and not _kernels.fast_bf16(isa))


def pack(weight: Tensor, *, gated: bool = False, isa: str = "") -> PackedWeight:
    """Prepack a weight into panels for `linear`.

    Args:
        weight: Weight [N, K] of numbers, or int8 rows [N, int8.row_bytes(K)].
        gated: Whether the weight is for a gated activation.
        isa: Instruction set that will multiply it. "": the process's instruction set.
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
    """Prepack a block-quantized weight into panels for `linear`, of as many bytes, rounded up to whole panels.

    Args:
        weight: The weight. Its `isa` is the instruction set that will multiply it.
        dtype: Dtype of the activations that it will be multiplied with.
        gated: Whether the weight is for a gated activation.
    """
    assert weight.data.is_contiguous()
    memory = torch.empty(block_panels_bytes(weight, gated=gated), dtype=torch.uint8)
    panels = block_panels(weight, dtype, memory, gated=gated)
    fill_panels(panels, 0, weight.data.numpy())
    return panels


def block_panels_bytes(weight: BlockWeight, *, gated: bool = False) -> int:
    """Number of bytes that a block-quantized weight takes when it is prepacked. Its rows need not be in memory."""
    columns, row_bytes = weight.data.shape
    return _kernels.arranged_bytes(row_bytes, columns, _gate(gated), weight.isa or instruction_set())


def block_panels(weight: BlockWeight, dtype: torch.dtype, memory: Tensor, *, gated: bool = False) -> PackedWeight:
    """A prepacked weight with empty panels in given memory, for `fill_panels` to fill.

    Args:
        weight: The block-quantized weight. Its rows need not be in memory.
        dtype: Dtype of the activations that it will be multiplied with.
        memory: Memory for the panels, uint8 [block_panels_bytes(weight)].
        gated: Whether the weight is for a gated activation.
    """
    (columns, depth), isa = weight.shape, weight.isa or instruction_set()
    return PackedWeight(memory, columns, depth, dtype, gated, isa, weight.weight_format)


def rows_of_panel(isa: str) -> int:
    """Number of rows of a block-quantized weight in one panel. For a gated activation half of them are the gate's."""
    return _kernels.arranged_bytes(1, 1, _gate(False), isa)


def fill_panels(panels: PackedWeight, first: int, rows: np.ndarray) -> None:
    """Fill consecutive panels of a prepacked weight from `block_panels`. Several threads may fill different panels.

    Args:
        panels: The prepacked weight.
        first: Number of the first panel to fill.
        rows: Rows of these panels, uint8 [rows, bytes of a row], contiguous. The last panel of the weight may have
            fewer rows than the others. For a gated activation the gate's rows come first.
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
    """Selected rows of a prepacked weight as numbers. Block-quantized rows equal those of `unpack_blocks`, bit for bit.

    Args:
        weight: A prepacked weight [N, K], not for a gated activation and not of int8 rows.
        rows: Numbers of the rows, int64 [count].

    Returns:
        The rows [count, K], in the weight's dtype.

    Raises:
        IndexError: A row number is negative, or N or more.
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
    """Description of a weight for the matmul kernel."""
    if isinstance(weight, Tensor):
        return _Operand(weight.stride(0), weight.dtype == torch.int8, False, 0, "")
    return weight.operand


def _check_operand(weight: KernelWeight, operand: _Operand, depth: int, dtype: torch.dtype, gated: bool) -> None:
    """Assert that activations can be multiplied with a weight.

    Args:
        weight: The weight.
        operand: Description of the weight.
        depth: K of the activations [M, K].
        dtype: Dtype of the activations.
        gated: Whether the activation function is gated.
    """
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
    """Compute activation(x weightᵀ + bias) + residual by the C++ kernels.

    Sums are in fp32. Their order does not depend on M. `int8` describes the sums for int8 rows.

    A block-quantized weight is dequantized to x's dtype before it is multiplied, with one exception: x is bf16 and the
    CPU has products of bytes (for FP8 weights, products of bf16). Then the quantized values are multiplied, and the
    scales are applied to the fp32 sums. In this case weights are not rounded, but x is rounded to 2^-15 of the largest
    absolute value of its 16 or 32 neighbours.

    Args:
        x: Activations [M, K].
        weight: Weight [N, K]. For a gated activation rows [0, N / 2) are the gate's.
        bias: Bias [N], or None.
        activation: Name of an activation of `dispatch.linear`, or None.
        residual: Tensor of the result's shape, which is added last; or None.
        out: Tensor for the result. None: a new tensor.
        out_dtype: Dtype of a new result. None: x's dtype.

    Returns:
        The result [M, N]; with a gated activation [M, N / 2].
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
    """Multiply groups of rows of x with one weight for each group, in one loop that the threads share.

    Args:
        x: Activations [M, K]: the rows of the first weight, then the rows of the second, and so on.
        weights: One or more weights [N, K] for which `lie_alike` is true.
        counts: Number of rows of x for each weight.
        biases: Bias [N] or None, for each weight.
        activation: Name of an activation of `dispatch.linear`, or None.
        out: Tensor for the result, [M, N]; with a gated activation [M, N / 2].
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
    """Tell whether `grouped_linear` supports weights: all have one class, shape, dtype, format and instruction set."""
    kinds = {(weight.shape, weight.dtype, getattr(weight, "gated", None), _operand_of(weight)) for weight in weights}
    return len(kinds) == 1


# Around them.


def norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, out: Tensor | None = None) -> Tensor:
    """Normalise rows of x [..., columns] by the C++ kernels: RMSNorm without a bias, LayerNorm with one.

    Args:
        x: Tensor [..., columns].
        weight: Factor of each column, [columns].
        bias: Summand of each column, [columns], or None.
        eps: Number added to the mean square (or variance) before the square root.
        out: Tensor for the result, which may be x. Rows of a tensor of two dimensions may have any stride. None: a new
            tensor.
    """
    if out is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    rows = x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
    count, columns = rows.shape
    assert out.stride(-1) == 1 and (out.ndim == 2 or out.is_contiguous())
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
        out.stride(0) if out.ndim == 2 else columns,
    )
    return out


def sort_by_expert(chosen: Tensor, num_experts: int) -> tuple[Tensor, Tensor, list[int]]:
    """Sort the pairs of token and chosen expert by expert. Pairs of one expert stay in the order of tokens.

    Args:
        chosen: Numbers of each token's experts, int64 [tokens, choices].
        num_experts: Number of experts of the layer.

    Returns:
        Token of each sorted pair, int64 [tokens * choices]; place of each pair in the sorted order, int64 [tokens,
            choices]; number of pairs of each expert.

    Raises:
        IndexError: An expert's number is negative, or `num_experts` or more.
    """
    assert chosen.dtype == torch.int64 and chosen.is_contiguous()
    token_of_row, row_of_choice = torch.empty(chosen.numel(), dtype=torch.int64), torch.empty_like(chosen)
    counts = _kernels.sort_by_expert(
        chosen.data_ptr(), *chosen.shape, num_experts, token_of_row.data_ptr(), row_of_choice.data_ptr()
    )
    return token_of_row, row_of_choice, counts


def gather_rows(x: Tensor, rows: Tensor, out: Tensor) -> Tensor:
    """Copy rows of x to `out`: out[i] = x[rows[i]].

    Args:
        x: Tensor [count, columns].
        rows: Row numbers in x, int64; they are not checked.
        out: Tensor for the copies, [len(rows), columns].
    """
    assert rows.dtype == torch.int64 and rows.is_contiguous() and x.stride(1) == 1
    assert out.is_contiguous() and out.shape == (len(rows), x.shape[1]) and out.dtype == x.dtype
    size = x.element_size()
    _kernels.gather_rows(
        x.data_ptr(), x.stride(0) * size, x.shape[1] * size, rows.data_ptr(), len(rows), out.data_ptr()
    )
    return out


def weighted_sums(made: Tensor, rows: Tensor, shares: Tensor, out_dtype: torch.dtype) -> Tensor:
    """For each token, the weighted sum of its experts' results, in fp32 and in the order of the choices.

    Args:
        made: Results of experts, [rows, columns].
        rows: Row number in `made` for each token and choice, int64 [tokens, choices]; they are not checked.
        shares: Weights of these rows, fp32 [tokens, choices].
        out_dtype: Dtype of the returned sums: `made`'s dtype or fp32.

    Returns:
        Sums [tokens, columns].
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
    """Split fused QKV; norm and rotate queries and keys; scale queries; store keys and values, or return them.

    Args:
        qkv: Output of the QKV projection, [tokens, (heads + 2 kv_heads) * head_dim].
        heads: Number of query heads.
        kv_heads: Number of key and value heads.
        head_dim: Number of values in one head.
        scale: Factor of queries.
        rope: Tables of cos and sin, each fp32 [positions, head_dim / 2]. None: the model has no rotary positions.
        positions: Position of each token, int64 [tokens].
        norms: RMSNorm weights for each head's queries and keys, each [head_dim]. None: they are not normed.
        eps: Epsilon of these norms.
        rotation: Matrix by which queries and keys are also multiplied, fp32 [head_dim, head_dim]; or None.
        kv: KV of the layer in which keys and values are stored. None: they are returned.
        slots: Place of each token in the KV, int64 [tokens]: block number * kv_block_size + offset in the block.
        bits: Bits of each quantized value of packed KV. 0: KV is stored as numbers.

    Returns:
        Queries [tokens, heads, head_dim]; keys and values [tokens, kv_heads, head_dim] if `kv` is None.
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


def quantize(x: Tensor, bits: int = WEIGHT_CODE_BITS, *, importance: Tensor | None = None) -> Tensor:
    """Quantize rows of numbers in groups, with the result of `quant.quantize`.

    Args:
        x: Numbers [..., n].
        bits: Bits of each quantized value.
        importance: Importance of each column, [n], with 4 bits alone; None: scales and minimums are not fitted.

    Returns:
        Packed rows, uint8 [..., quant.row_bytes(n, bits)].
    """
    x = x.contiguous()
    columns = x.shape[-1]
    packed = torch.empty(*x.shape[:-1], quant.row_bytes(columns, bits), dtype=torch.uint8)
    rows = packed.numel() // packed.shape[-1]
    if importance is None:
        _kernels.quantize(x.data_ptr(), rows, columns, TYPES[x.dtype], packed.data_ptr(), bits)
        return packed
    assert bits == WEIGHT_CODE_BITS and importance.shape == (columns,)
    shares = quant.error_shares(importance)
    _kernels.quantize_fitted(x.data_ptr(), rows, columns, TYPES[x.dtype], shares.data_ptr(), packed.data_ptr())
    return packed


def dequantize(packed: Tensor, n: int, out: Tensor) -> Tensor:
    """Dequantize packed rows of 4-bit values.

    Args:
        packed: Packed rows, uint8 [..., quant.row_bytes(n)], contiguous.
        n: Number of values in a row.
        out: Tensor for the numbers, [..., n], contiguous.
    """
    rows = packed.numel() // packed.shape[-1]
    _kernels.dequantize(packed.data_ptr(), packed.shape[-1], rows, n, TYPES[out.dtype], out.data_ptr())
    return out


def unpack_blocks(packing: str, packed: Tensor, out: Tensor, interleaved: int = 0) -> Tensor:
    """Dequantize block-quantized rows, of a GGUF file or another format.

    Args:
        packing: Name of the block type, a key of `BLOCK_TYPES`.
        packed: Rows as the file has them, uint8 [rows, bytes of a row].
        out: Tensor for the numbers, [rows, columns], contiguous.
        interleaved: Number n of rows in each head, if the file has a head's rows in the order 0, n/2, 1, n/2 + 1, ...;
            `out` gets them in the order 0, 1, 2, .... 0: the rows of the file are in order.
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
    """Find the largest logit of each row, the first one of equals, and compute the log-sum-exp if wanted.

    Args:
        logits: fp32 [rows, columns].
        want_lse: Whether the log-sum-exp is computed.

    Returns:
        Index of the largest logit, int64 [rows]; its value, NaN where a logit of the row is not finite, fp32 [rows];
        the log-sum-exp, fp32 [rows], or None.
    """
    rows, columns = logits.shape
    index, maximum = torch.empty(rows, dtype=torch.int64), torch.empty(rows)
    lse = torch.empty(rows) if want_lse else None
    _kernels.argmax(
        logits.data_ptr(), logits.stride(0), rows, columns, index.data_ptr(), maximum.data_ptr(), _address(lse)
    )
    return index, maximum, lse


def argmax_if_finite(logits: Tensor, otherwise: int) -> tuple[Tensor, Tensor]:
    """Find the largest logit of each row, in one pass. `ops.argmax_if_finite` describes arguments and result."""
    index, maximum, _ = argmax(logits)
    return index, index.where(maximum.isfinite(), otherwise)


def draw(logits: Tensor, rows: np.ndarray, draws: Draws, out: Tensor) -> None:
    """Draw a random token from each of some rows of logits.

    Args:
        logits: Logits, fp32 [.., columns].
        rows: Numbers of the rows to draw from, int64 [draws].
        draws: Sampling parameters for each of these rows.
        out: Tensor for token ids, int64 [..]; the token drawn from row r is stored in element r.
    """
    if len(rows) < len(logits):
        logits = logits.index_select(0, torch.from_numpy(rows))
    index = torch.empty(len(rows), dtype=torch.int64)
    _kernels.draw(logits.data_ptr(), logits.stride(0), logits.shape[1], *draws, index.data_ptr())
    out[torch.from_numpy(rows)] = index


def forbid(logits: Tensor, rows: np.ndarray, allowed: np.ndarray) -> None:
    """Set the logits of forbidden tokens to minus infinity, in place.

    Args:
        logits: Logits, fp32 [.., columns].
        rows: Numbers of the rows that have a mask, int64 [masks].
        allowed: Masks, int32 [masks, words]: one bit for each token, 1 where the token is allowed.
    """
    assert allowed.shape[1] * 32 >= logits.shape[1] and len(allowed) == len(rows)
    _kernels.forbid(logits.data_ptr(), logits.stride(0), logits.shape[1], rows, allowed)


def _address(tensor: Tensor | None) -> int:
    """Address of a tensor's data; 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


def _kind(dtype: torch.dtype) -> tuple[int, bool]:
    """Number by which the kernels know a dtype, and whether the weight is int8 rows."""
    return (0, True) if dtype == torch.int8 else (TYPES[dtype], False)


def _depth(weight: Tensor | PackedWeight | BoundWeight | BlockWeight) -> int:
    """K of a weight. For int8 rows it is the number of values, without the bytes of the scale."""
    if isinstance(weight, PackedWeight):
        return weight.depth
    if isinstance(weight, BlockWeight):
        return weight.shape[1]
    return weight.shape[1] - 4 if weight.dtype == torch.int8 else weight.shape[1]


def _gate(gated: bool) -> int:
    """Number by which the kernels know a gated activation, or none."""
    return ACTIVATIONS["silu_mul" if gated else None]
