"""The one API to compute: linear layers, norms, rotary embedding, attention over paged KV, 4-bit groups.

On the CPU these are the C++ kernels (`cpp`), on a CUDA card Triton's (`triton`) where Triton is installed; elsewhere,
and for shapes and cards that the kernels do not know, torch (`reference`).

KV of one layer is one tensor [num_blocks, 2, kv_heads, kv_block_size, width], K before V: a block is contiguous, so
that it moves between tiers in one piece, and within it each head's K and V are pages. width is head_dim, or, with
packed KV, the bytes of a packed row (`quant`). Keys of int5 and int4 KV are kept rotated (`rotation`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from batchgen.core.dtypes import WEIGHT_CODE_BITS, KVFormat
from batchgen.core.kernel_choice import TORCH
from batchgen.ops import cpp as kernels
from batchgen.ops import quant, reference
from batchgen.ops.attention_plan import AttentionPlan
from batchgen.ops.cpp import BlockWeight, BoundWeight, KernelWeight, PackedWeight
from batchgen.ops.sampling import Draws

if TYPE_CHECKING:
    from batchgen.ops.triton import Capacity as Capacity
    from batchgen.ops.triton import CutPlan as CutPlan
    from batchgen.ops.triton import DevicePlan as DevicePlan


@dataclass(frozen=True)
class SplitWeight:
    """A weight [N, K] whose N rows are in several parts, each in a format of its own.

    Attributes:
        parts: Parts one after the other, [N of the part, K] each.
    """

    parts: tuple[KernelWeight, ...]

    @property
    def shape(self) -> tuple[int, int]:
        """N and K of the whole weight."""
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]


Weight: TypeAlias = KernelWeight | SplitWeight
PreparedAttention: TypeAlias = "reference.DeviceAttentionPlan | kernels.AttentionPlan | DevicePlan"
CPU = torch.device("cpu")
# The largest M that torch's own linear is given on the CPU. Beyond it torch may block rows in another way, and the
# profiler checks up to here that a row's result does not depend on M.
TORCH_ROWS = 512
_GATED_ROWS = 512  # rows of a gate in several parts that are in fp32 at once


@lru_cache
def _triton() -> ModuleType | None:
    """Triton's kernels, if Triton is installed. They are imported when first asked for, which takes a second."""
    if find_spec("triton") is None:
        return None
    from batchgen.ops import triton as triton_kernels

    return triton_kernels


def _card_kernels() -> ModuleType:
    """Triton's kernels, where something was prepared by them before."""
    triton_kernels = _triton()
    assert triton_kernels is not None
    return triton_kernels


def _device_kernels(device: torch.device) -> ModuleType | None:
    """The kernels for tensors of a device other than the CPU, or None where torch computes."""
    triton_kernels = _triton() if device.type == "cuda" else None
    return triton_kernels if triton_kernels and triton_kernels.card(device).has_kernels else None


# Linear layers and norms.


def linear(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute activation(x weightᵀ + bias) + residual. On the CPU a row's result does not depend on M.

    Args:
        x: Activations, [M, K].
        weight: [N, K], perhaps prepacked for an instruction set of the CPU (`pack_weight`, `bind_weight`); or rows of 8
            bits, int8 [N, int8.row_bytes(K)], which x is multiplied with as integers (`int8`); or, on the CPU alone,
            block-quantized rows. Each part of a `SplitWeight` is multiplied by itself.
        bias: [N].
        activation: None, "relu", "gelu", "gelu_tanh", or gated: "silu_mul", silu of the first half of N times the
            second one, "gelu_tanh_mul", or "swiglu_oai_mul" of gpt-oss: with both halves within 7, x sigmoid(1.702 x)
            of the first times one more than the second.
        residual: Added at the end, of the result's shape.
        out: Memory of the result, of x's dtype or fp32. It may be the residual itself.
        out_dtype: Dtype of a new result; None: x's.

    Returns:
        [M, N], or half of N with a gated activation.
    """
    options = {"activation": activation, "residual": residual, "out": out, "out_dtype": out_dtype}
    if isinstance(weight, SplitWeight):
        return _split_linear(x, weight, bias, **options)
    if x.is_cpu:
        if isinstance(weight, BoundWeight) and weight.isa == TORCH:
            return _torch_linear(x, weight.data, bias, **options)
        compute: ModuleType = kernels
    elif weight.dtype == torch.int8:
        compute = reference
    else:
        compute = _device_kernels(x.device) or reference
    return compute.linear(x, weight, bias, **options)


def grouped_linear(
    x: Tensor,
    weights: Sequence[Weight],
    counts: Sequence[int],
    biases: Sequence[Tensor | None],
    *,
    activation: str | None = None,
    out: Tensor,
) -> Tensor:
    """Multiply each row of x with one of several weights, in one loop on the CPU. Bit for bit the result is `linear`'s.

    Args:
        x: Activations, [M, K]: the rows of the first weight, then those of the second, and so on.
        weights: [N, K] each.
        counts: Rows of x for each weight.
        biases: [N] or None, for each weight.
        activation: An activation that `linear` knows.
        out: Memory of the result, [M, N], or half of N with a gated activation.
    """
    if not weights:
        return out
    first = weights[0]
    by_kernels = x.is_cpu and not isinstance(first, SplitWeight) and getattr(first, "isa", "") != TORCH
    if by_kernels and kernels.lie_alike(weights):
        return kernels.grouped_linear(x, weights, counts, biases, activation=activation, out=out)
    start = 0
    for weight, count, bias in zip(weights, counts, biases, strict=True):
        stop = start + count
        linear(x[start:stop], weight, bias, activation=activation, out=out[start:stop])
        start = stop
    return out


def _split_linear(
    x: Tensor,
    weight: SplitWeight,
    bias: Tensor | None,
    *,
    activation: str | None,
    residual: Tensor | None,
    out: Tensor | None,
    out_dtype: torch.dtype | None,
) -> Tensor:
    """The product with a weight in parts. With a gated activation it is in fp32 first, for some rows at a time."""
    n = weight.shape[0]
    gated = activation in kernels.GATED
    if gated and len(x) > _GATED_ROWS:
        out = x.new_empty(len(x), n // 2, dtype=out_dtype) if out is None else out
        for rows in (slice(start, start + _GATED_ROWS) for start in range(0, len(x), _GATED_ROWS)):
            _split_linear(
                x[rows],
                weight,
                bias,
                activation=activation,
                residual=None if residual is None else residual[rows],
                out=out[rows],
                out_dtype=out_dtype,
            )
        return out
    if gated:
        product = x.new_empty(len(x), n, dtype=torch.float32)
    else:
        product = x.new_empty(len(x), n, dtype=out_dtype) if out is None else out
    start = 0
    for part in weight.parts:
        columns = slice(start, start + part.shape[0])
        part_bias = None if bias is None else bias[columns]
        if gated:
            linear(x, part, part_bias, out=product[:, columns])
        else:
            part_residual = None if residual is None else residual[:, columns]
            linear(x, part, part_bias, activation=activation, residual=part_residual, out=product[:, columns])
        start = columns.stop
    if not gated or activation is None:
        return product
    return reference.gate(product, activation, residual=residual, out=out, out_dtype=out_dtype or x.dtype)


def embedding(token_ids: Tensor, rows: Weight, dtype: torch.dtype) -> Tensor:
    """Look up embeddings.

    Args:
        token_ids: int64 [tokens].
        rows: The table [vocab, embed], perhaps prepacked.
        dtype: Dtype of the result where the table is block-quantized; otherwise the result has the table's.

    Returns:
        [tokens, embed].
    """
    if isinstance(rows, PackedWeight):
        return kernels.packed_rows(rows, token_ids)
    if not isinstance(rows, BlockWeight):
        return F.embedding(token_ids, rows.data if isinstance(rows, BoundWeight) else rows)
    embeddings = torch.empty(len(token_ids), rows.shape[1], dtype=dtype)
    if len(token_ids):
        kernels.unpack_blocks(rows.weight_format.upper(), rows.data.index_select(0, token_ids), embeddings)
    return embeddings


def _torch_linear(x: Tensor, weight: Tensor, bias: Tensor | None, **options) -> Tensor:
    """Torch's linear on the CPU, with as many threads as the kernels have: in a sweep torch itself has one."""
    before = torch.get_num_threads()
    torch.set_num_threads(kernels.num_threads())
    try:
        if len(x) <= TORCH_ROWS:
            return reference.linear(x, weight, bias, **options)
        return _in_parts(x, weight, bias, **options)
    finally:
        torch.set_num_threads(before)


def _in_parts(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    activation: str | None,
    residual: Tensor | None,
    out: Tensor | None,
    out_dtype: torch.dtype | None,
) -> Tensor:
    """Torch's linear, TORCH_ROWS rows at a time."""
    n = len(weight) // 2 if activation in kernels.GATED else len(weight)
    if out is None:
        out = x.new_empty(len(x), n, dtype=out_dtype)
    for start in range(0, len(x), TORCH_ROWS):
        rows = slice(start, start + TORCH_ROWS)
        rows_residual = None if residual is None else residual[rows]
        reference.linear(x[rows], weight, bias, activation=activation, residual=rows_residual, out=out[rows])
    return out


def pack_weight(weight: Tensor, *, gated: bool = False, isa: str = "") -> Weight:
    """Prepack a weight as `linear` reads it fastest, in about as many bytes.

    Args:
        weight: [N, K], or rows of 8 bits.
        gated: Whether it is for a gated activation: the gate's rows stand before those it is multiplied with.
        isa: Instruction set of the CPU that is to multiply it, or TORCH; "": the process's set.

    Returns:
        The prepacked weight; or the weight bound to the set, where it is read fastest as it is.
    """
    if weight.device.type != "cpu" or isa == TORCH or kernels.packed_grows(weight.dtype, isa):
        return bind_weight(weight, isa)
    return kernels.pack(weight, gated=gated, isa=isa)


def pack_blocks(weight: BlockWeight, dtype: torch.dtype, *, gated: bool = False) -> PackedWeight:
    """Prepack a block-quantized weight into panels of as many bytes, to be multiplied with activations of `dtype`."""
    return kernels.pack_blocks(weight, dtype, gated=gated)


def bind_weight(weight: Tensor, isa: str) -> Weight:
    """The weight as it lies, bound to an instruction set or TORCH. On a card, or where `isa` is "", it is not bound."""
    return BoundWeight(weight, isa) if isa and weight.device.type == "cpu" else weight


def weight_bytes(weight: Weight) -> int:
    """Bytes of a weight in memory."""
    if isinstance(weight, SplitWeight):
        return sum(weight_bytes(part) for part in weight.parts)
    return (weight if isinstance(weight, Tensor) else weight.data).nbytes


# Mixtures of experts.


def groups_experts(x: Tensor, *weights: Weight) -> bool:
    """Tell whether `grouped_experts` has kernels for x and these matrices of all experts.

    They need numbers of x's dtype, on a card with matrix products.
    """
    triton_kernels = _device_kernels(x.device)
    known = all(isinstance(weight, Tensor) and weight.dtype == x.dtype for weight in weights)
    return bool(triton_kernels and known and triton_kernels.supports_grouped(x.device))


def grouped_experts(  # the operands of two products
    x: Tensor,
    shares: Tensor,
    chosen: Tensor,
    gate_up: Tensor,
    gate_up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    activation: str,
) -> Tensor:
    """Multiply each token with its experts and add their results, weighted, in the order of `chosen`.

    It needs operands that `groups_experts` accepts.

    The host waits for nothing, and launches are the same for any routes. A row's result does not depend on its batch.

    Args:
        x: [tokens, hidden].
        shares: Weight of each expert's result, fp32 [tokens, experts of a token].
        chosen: Number of each expert, int64 [tokens, experts of a token].
        gate_up: [experts * 2 * intermediate, hidden], one expert after the other, of each the gate first.
        gate_up_bias: [experts * 2 * intermediate].
        down: [experts * hidden, intermediate].
        down_bias: [experts * hidden].
        activation: A gated activation.

    Returns:
        fp32 [tokens, hidden].
    """
    return _card_kernels().grouped_experts(x, shares, chosen, gate_up, gate_up_bias, down, down_bias, activation)


def norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, out: Tensor | None = None) -> Tensor:
    """Normalise the last dimension: x / rms(x) * weight (RMSNorm), or with a bias LayerNorm. Sums are in fp32.

    Args:
        x: [..., columns].
        weight: [columns].
        bias: [columns], or None for RMSNorm.
        eps: Epsilon below the root.
        out: Memory of the result, perhaps x.

    Returns:
        The result, of x's shape.
    """
    if x.is_cpu:
        return kernels.norm(x, weight, bias, eps, out)
    triton_kernels = _device_kernels(x.device)
    compute = triton_kernels if triton_kernels and x.shape[-1] <= triton_kernels.MAX_COLUMNS else reference
    return compute.norm(x, weight, bias, eps, out)


# Attention.


def rotary(  # the operands of one kernel
    qkv: Tensor,
    heads: int,
    kv_heads: int,
    *,
    scale: float,
    rope: tuple[Tensor, Tensor] | None = None,
    positions: Tensor | None = None,
    norms: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0,
    rotate_keys: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Norm, rotate and scale queries and keys of fused QKV (RoPE: Su et al., 2021).

    Args:
        qkv: [tokens, (heads + 2 kv_heads) * head_dim].
        heads: Query heads.
        kv_heads: Key and value heads.
        scale: Scale of queries, that of the softmax.
        rope: cos and sin, fp32 [positions, head_dim / 2]; None: positions are not rotary.
        positions: int64 [tokens].
        norms: RMSNorm weights of the heads of q and k, [head_dim] each.
        eps: Epsilon of the norms.
        rotate_keys: Whether queries and keys are multiplied with `rotation`, as int5 and int4 KV have it.

    Returns:
        q [tokens, heads, head_dim]; k and v [tokens, kv_heads, head_dim].
    """
    head_dim = qkv.shape[1] // (heads + 2 * kv_heads)
    options: dict[str, Any] = {
        "scale": scale,
        "rope": rope,
        "positions": positions,
        "norms": norms,
        "eps": eps,
        "rotation": rotation(head_dim, qkv.device) if rotate_keys else None,
    }
    if _has_kernels(qkv, head_dim):
        return kernels.rotary_store(qkv, heads, kv_heads, head_dim, **options)
    triton_kernels = _device_kernels(qkv.device)
    if triton_kernels and triton_kernels.supports_rotary(head_dim, rotate_keys, qkv.device):
        return triton_kernels.rotary_store(qkv, heads, kv_heads, **options)
    return reference.rotary(qkv, heads, kv_heads, **options)


def rotary_store(qkv: Tensor, heads: int, kv: Tensor, slots: Tensor, kv_format: KVFormat, **options: Any) -> Tensor:
    """Norm, rotate and scale queries and keys of fused QKV, and store keys and values in a layer's KV.

    Args:
        qkv: [tokens, (heads + 2 kv_heads) * head_dim].
        heads: Query heads.
        kv: KV of the layer.
        slots: int64 [tokens], block * kv_block_size + offset. Where `can_capture`, tokens with a slot below 0 are not
            stored.
        kv_format: Format of the KV.
        options: Further arguments of `rotary`, but for `rotate_keys`.

    Returns:
        q [tokens, heads, head_dim].
    """
    kv_heads, bits, rotate_keys = kv.shape[2], kv_format.bits, kv_format.rotates_keys
    head_dim = qkv.shape[1] // (heads + 2 * kv_heads)
    matrix = rotation(head_dim, qkv.device) if rotate_keys else None
    stored = {"kv": kv, "slots": slots, "bits": bits, "rotation": matrix}
    if _has_kernels(qkv, head_dim):
        return kernels.rotary_store(qkv, heads, kv_heads, head_dim, **stored, **options)[0]
    triton_kernels = _device_kernels(qkv.device)
    if triton_kernels and triton_kernels.supports_rotary(head_dim, rotate_keys, qkv.device):
        return triton_kernels.rotary_store(qkv, heads, kv_heads, **stored, **options)[0]
    q, k, v = rotary(qkv, heads, kv_heads, rotate_keys=rotate_keys, **options)
    if bits:
        k, v = quantize(k, bits), quantize(v, bits)
    write_kv(kv, kv_rows(slots, kv_heads, kv.shape[3]), k, v)
    return q


def prepare_attention(  # shapes of one launch
    plan: AttentionPlan,
    heads: int,
    kv_heads: int,
    head_dim: int,
    kv_block_size: int,
    dtype: torch.dtype,
    kv_format: KVFormat,
    device: torch.device = CPU,
    isa: str = "",
) -> PreparedAttention:
    """The plan as `paged_attention` takes it, made once per sweep and used by every layer.

    Args:
        plan: Attention of the sweep.
        heads: Query heads.
        kv_heads: Key and value heads.
        head_dim: Numbers of a head.
        kv_block_size: Tokens of a KV block.
        dtype: Dtype of queries.
        kv_format: Format of the KV.
        device: Device of queries and KV.
        isa: Instruction set that attends on the CPU; "": the process's.
    """
    group = heads // kv_heads
    if device.type != "cpu":
        triton_kernels = _device_kernels(device)
        if triton_kernels and triton_kernels.supports_attention(head_dim, group, kv_block_size, device):
            return triton_kernels.prepare_attention(
                plan, heads, kv_heads, head_dim, kv_block_size, dtype, kv_format, device
            )
        return reference.prepare_attention(plan, kv_heads, kv_block_size, dtype, device)
    if not kernels.supports_attention(head_dim, group):
        return reference.prepare_attention(plan, kv_heads, kv_block_size, dtype)
    return kernels.attention_plan(plan, kv_heads, group, kv_block_size, kv_format.row_bytes(head_dim), isa)


def cut_attention(
    plan: AttentionPlan,
    heads: int,
    kv_heads: int,
    head_dim: int,
    kv_block_size: int,
    dtype: torch.dtype,
    kv_format: KVFormat,
    device: torch.device,
) -> CutPlan:
    """The plan cut for a card, but not on it yet, where `can_capture`.

    So plans of several sweeps can be written into the same memory, for CUDA graphs. Arguments are those of
    `prepare_attention`.
    """
    return _card_kernels().cut_attention(plan, heads, kv_heads, head_dim, kv_block_size, dtype, kv_format, device)


def can_capture(device: torch.device, head_dim: int, group: int, kv_block_size: int) -> bool:
    """Tell whether decode sweeps can be CUDA graphs.

    All that layers do must be launches whose shapes do not depend on the sweep, and tokens with a slot below 0 must not
    be stored.

    Args:
        device: Device that computes.
        head_dim: Numbers of a head.
        group: Query heads of a KV head.
        kv_block_size: Tokens of a KV block.
    """
    triton_kernels = _device_kernels(device)
    return bool(
        triton_kernels
        and triton_kernels.supports_attention(head_dim, group, kv_block_size, device)
        and triton_kernels.supports_rotary(head_dim, True, device)
    )


def paged_attention(
    q: Tensor,
    kv: Tensor,
    plan: PreparedAttention,
    out: Tensor | None = None,
    *,
    bits: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend causally from packed query tokens to paged KV, prefill and decode in one call.

    Args:
        q: [tokens, heads, head_dim], as `rotary` gives it; heads is a multiple of kv_heads (grouped-query attention).
        kv: [num_blocks, 2, kv_heads, kv_block_size, width]; the tokens' own K and V are already there.
        plan: A plan of `prepare_attention`, with KV blocks (PagedAttention: Kwon et al., 2023) and shared prefixes.
        out: Memory of the result, of q's shape.
        bits: Bits of a quantized value of packed KV; 0: KV is numbers.
        softcap: Bound of the scores, which become softcap * tanh(score / softcap) before the softmax (Gemma 2, Gemma
            Team, 2024, section 2); 0: none.
        sinks: fp32 [heads] on q's device, a score of each head that takes its part of the softmax and has no value
            (gpt-oss, 2025; attention sinks: Xiao et al., 2023).

    Returns:
        [tokens, heads * head_dim].
    """
    if isinstance(plan, kernels.AttentionPlan):
        compute = kernels.attention
    elif isinstance(plan, reference.DeviceAttentionPlan):
        compute = reference.paged_attention
    else:
        compute = _card_kernels().paged_attention
    return compute(q, kv, plan, out, bits, softcap, sinks).flatten(1)


@lru_cache
def rotation(n: int, device: torch.device = CPU) -> Tensor:
    """An orthogonal matrix [n, n], fp32, that keys of int5 and int4 KV are rotated with, and queries alike.

    Hadamard's where n is a power of two, else the cosine transform's. Some channels of keys are far larger than the
    rest, and would take all quantized values for themselves; rotated, what is in one channel spreads over all. The
    products stay the same.
    """
    if n & (n - 1) == 0:
        matrix = torch.ones(1, 1)
        while len(matrix) < n:
            matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
        return (matrix / n**0.5).to(device)
    angles = torch.outer(torch.arange(n).double() + 0.5, torch.arange(n)) * (torch.pi / n)
    matrix = angles.cos() * (2 / n) ** 0.5
    matrix[:, 0] = n**-0.5
    return matrix.float().to(device)


def _has_kernels(x: Tensor, head_dim: int) -> bool:
    """Tell whether the C++ kernels take heads of this size where x lies."""
    return x.is_cpu and kernels.supports_head_dim(head_dim)


# KV.


def kv_rows(slots: np.ndarray | Tensor, kv_heads: int, kv_block_size: int) -> Tensor:
    """Rows of a [num_blocks * 2 * kv_heads * kv_block_size, width] view of the KV that hold each token's K.

    V lies kv_heads * kv_block_size rows behind.

    Args:
        slots: Slot of each token, block * kv_block_size + offset.
        kv_heads: Key and value heads.
        kv_block_size: Tokens of a block.

    Returns:
        int64 [tokens * kv_heads], on the device of `slots`.
    """
    slots = torch.as_tensor(slots).long()[:, None]
    heads = torch.arange(kv_heads, device=slots.device)
    rows = (slots // kv_block_size * (2 * kv_heads) + heads) * kv_block_size + slots % kv_block_size
    return rows.view(-1)


def write_kv(kv: Tensor, rows: Tensor, k: Tensor, v: Tensor) -> None:
    """Store new tokens' K and V [tokens, kv_heads, width], in the format of the KV, at `kv_rows` of a layer's KV."""
    _, _, kv_heads, kv_block_size, width = kv.shape
    flat = kv.view(-1, width)
    flat.index_copy_(0, rows, k.reshape(-1, width))
    flat.index_copy_(0, rows + kv_heads * kv_block_size, v.reshape(-1, width))


def gather_rows(target: Tensor, source: Tensor, index: Tensor) -> None:
    """Compute target[i] = source[index[i]] along the first dimension. The device of `index` reaches all."""
    triton_kernels = _device_kernels(index.device)
    if triton_kernels:
        triton_kernels.gather_rows(target, source, index)
    else:
        target.copy_(source.index_select(0, index.to(source.device)))


def scatter_rows(target: Tensor, index: Tensor, source: Tensor) -> None:
    """Compute target[index[i]] = source[i] along the first dimension. The device of `index` reaches all."""
    triton_kernels = _device_kernels(index.device)
    if triton_kernels:
        triton_kernels.scatter_rows(target, index, source)
    else:
        target.index_copy_(0, index.to(target.device), source.to(target.device))


# Logits.


def all_finite(logits: Tensor) -> Tensor:
    """Tell rows whose logits [rows, columns] are all finite, bool [rows]. The host waits for nothing."""
    return logits.amax(-1).isfinite() & logits.amin(-1).isfinite()  # both keep a NaN; a sum could overflow


def argmax(logits: Tensor) -> Tensor:
    """The first of the largest of each row, int64 [rows], of fp32 logits [rows, columns]."""
    return _of_logits(logits).argmax(logits)[0]


def lse(logits: Tensor) -> Tensor:
    """The log of the sum of exponentials of each row, fp32 [rows], of fp32 logits [rows, columns]."""
    return argmax_with_lse(logits)[2]


def argmax_with_lse(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `argmax`, the largest values, fp32 [rows], and `lse`, in one pass where there are kernels."""
    return _of_logits(logits).argmax(logits, want_lse=True)


def draw(logits: Tensor, rows: np.ndarray, draws: Draws, out: Tensor) -> None:
    """Draw a token at random from each of some rows of logits. The host waits for nothing.

    Args:
        logits: fp32 [.., columns].
        rows: int64, the row of each draw.
        draws: Sampling parameters of each row.
        out: int64 [..]; tokens go to its elements `rows`.
    """
    _of_logits(logits).draw(logits, rows, draws, out)


def forbid(logits: Tensor, rows: np.ndarray, allowed: np.ndarray) -> None:
    """Set logits of tokens that are not allowed to minus infinity, in place. The host waits for nothing.

    Args:
        logits: fp32 [.., columns].
        rows: int64, the row of each mask.
        allowed: int32 [rows, words], a bit for each token, lowest first; at least as many bits as there are columns.
    """
    _of_logits(logits).forbid(logits, rows, allowed)


def _of_logits(logits: Tensor) -> ModuleType:
    """The module that computes with these logits."""
    return kernels if logits.is_cpu else _device_kernels(logits.device) or reference


# Packed rows.


def quantize(x: Tensor, bits: int = WEIGHT_CODE_BITS) -> Tensor:
    """Quantize rows [..., n] to [..., quant.row_bytes(n, bits)], with `bits` for each value."""
    return (kernels if x.device.type == "cpu" else _device_kernels(x.device) or quant).quantize(x, bits)


def dequantize(packed: Tensor, out: Tensor) -> Tensor:
    """Dequantize rows of 4-bit codes into `out` [..., n]."""
    compute = kernels if packed.device.type == "cpu" else _device_kernels(packed.device)
    if compute and packed.is_contiguous() and out.is_contiguous():
        return compute.dequantize(packed, out.shape[-1], out)
    return quant.dequantize(packed, out.shape[-1], out=out)
