"""The operations of the model's forward pass and sampler, each sent to the kernels of the tensor's device.

The operations are linear layers, norms, rotary embedding, attention over paged KV, group quantization and sampling
(`state_dispatch` has those of state layers).
Tensors of the CPU go to the C++ kernels (`cpp`). Tensors of a CUDA GPU go to the Triton kernels (`triton`) if Triton is
installed. All else goes to torch (`reference`): other devices, and shapes or GPUs that the kernels do not support.

The KV of one layer is one tensor [num_blocks, 2, kv_heads, kv_block_size, width]. Index 0 of the second dimension is K,
index 1 is V. A block is contiguous, so it moves between tiers as one piece. Within a block, the K of one head is a
contiguous page, and so is its V. `width` is head_dim where KV is stored as numbers. For quantized KV it is the bytes of
a packed row (`quant`). Keys of int5 and int4 KV are stored rotated (`rotation`).
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
from batchgen.ops import quant, reference, torch_attention
from batchgen.ops.attention_operands import AttentionOperands
from batchgen.ops.attention_plan import AttentionPlan
from batchgen.ops.cpp import BlockWeight, BoundWeight, KernelWeight, PackedWeight
from batchgen.ops.sampling import Draws

if TYPE_CHECKING:
    from batchgen.ops.triton import Capacity as Capacity
    from batchgen.ops.triton import CutPlan as CutPlan
    from batchgen.ops.triton import DevicePlan as DevicePlan


@dataclass(frozen=True)
class SplitWeight:
    """A weight matrix [N, K] stored as several row ranges, each in its own weight format.

    Attributes:
        parts: The row ranges from top to bottom, each a weight [rows, K]; their rows add up to N.
    """

    parts: tuple[KernelWeight, ...]

    @property
    def shape(self) -> tuple[int, int]:
        """N (rows) and K (columns) of the whole matrix."""
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]


Weight: TypeAlias = KernelWeight | SplitWeight
PreparedAttention: TypeAlias = "torch_attention.TorchAttentionPlan | kernels.AttentionPlan | DevicePlan"
CPU = torch.device("cpu")
# The largest M that torch's own linear is given on the CPU. Beyond it torch may block rows in another way, and the
# profiler checks up to here that a row's result does not depend on M.
TORCH_ROWS = 512
_GATED_ROWS = 512  # rows of a gate in several parts that are in fp32 at once


@lru_cache
def _triton() -> ModuleType | None:
    """The package of Triton kernels; None if Triton is not installed.

    The first call imports the package, which takes a second.
    """
    if find_spec("triton") is None:
        return None
    from batchgen.ops import triton as triton_kernels

    return triton_kernels


def _card_kernels() -> ModuleType:
    """The package of Triton kernels, for operations whose operands only this package can have prepared."""
    triton_kernels = _triton()
    assert triton_kernels is not None
    return triton_kernels


def device_kernels(device: torch.device) -> ModuleType | None:
    """The package of Triton kernels for tensors of a GPU; None where torch computes. Not for tensors of the CPU."""
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
        weight: Weight matrix [N, K]. It may be prepacked for an instruction set of the CPU (`pack_weight`), bound to
            one (`bind_weight`), or int8 rows [N, int8.row_bytes(K)], with which x is multiplied as integers (`int8`).
            On the CPU it may be block-quantized. On a GPU that `multiplies_packed` it may be int4 rows, uint8 [N,
            quant.row_bytes(K)], or block-quantized. The parts of a `SplitWeight` are multiplied one by one.
        bias: Bias [N], or None.
        activation: None, "relu", "gelu" or "gelu_tanh"; or a gated activation, where rows [0, N / 2) of the weight are
            the gate and rows [N / 2, N) are the up projection. "silu_mul" is silu(gate) * up, and so on for
            "gelu_mul" and "gelu_tanh_mul". "swiglu_oai_mul", of gpt-oss, is g * sigmoid(1.702 g) * (u + 1), where g is
            the gate limited to at most 7, and u is up limited to [-7, 7].
        residual: Tensor of the result's shape, which is added last; or None.
        out: Tensor for the result, in x's dtype or fp32. It may be the residual itself. None: a new tensor.
        out_dtype: Dtype of a new result. None: x's dtype.

    Returns:
        The result [M, N]; with a gated activation [M, N / 2].
    """
    options = {"activation": activation, "residual": residual, "out": out, "out_dtype": out_dtype}
    if isinstance(weight, SplitWeight):
        return _split_linear(x, weight, bias, **options)
    if x.is_cpu:
        if isinstance(weight, BoundWeight) and weight.isa == TORCH:
            return _torch_linear(x, weight.data, bias, **options)
        compute: ModuleType | None = kernels
    else:
        compute = _product_kernels(x.device) if _is_packed(weight) else device_kernels(x.device)
        if compute is not None and _is_packed(weight):
            return compute.packed_linear(x, weight, bias, **options)
    return (compute or reference).linear(x, weight, bias, **options)


def multiplies_packed(device: torch.device) -> bool:
    """Tell whether `linear` and `grouped_experts` take int4 rows and blocks on a GPU, as they are stored."""
    return _product_kernels(device) is not None


def _product_kernels(device: torch.device) -> ModuleType | None:
    """The package of Triton kernels for a GPU on which those for matrix products are fast; None for other devices."""
    triton_kernels = device_kernels(device)
    return triton_kernels if triton_kernels and triton_kernels.card(device).has_products else None


def _is_packed(weight: Weight) -> bool:
    """Tell whether a weight on a GPU is int8 rows, int4 rows or blocks."""
    return isinstance(weight, BlockWeight) or (isinstance(weight, Tensor) and weight.dtype in (torch.int8, torch.uint8))


def grouped_linear(
    x: Tensor,
    weights: Sequence[Weight],
    counts: Sequence[int],
    biases: Sequence[Tensor | None],
    *,
    activation: str | None = None,
    out: Tensor,
) -> Tensor:
    """Multiply groups of rows of x with one weight for each group. Results equal those of `linear` bit for bit.

    On the CPU the products of all groups are one loop that the threads share.

    Args:
        x: Activations, [M, K]: the rows of the first weight, then the rows of the second, and so on.
        weights: One weight [N, K] for each group.
        counts: Number of rows of x for each weight.
        biases: Bias [N] or None, for each weight.
        activation: Name of an activation, one that `linear` supports; or None.
        out: Tensor for the result, [M, N]; with a gated activation [M, N / 2].
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
    """The result of `linear` for a weight in several parts.

    With a gated activation the products are first in fp32, for at most `_GATED_ROWS` rows of x at a time.
    """
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
    """Look up the embeddings of tokens.

    Args:
        token_ids: Token ids, int64 [tokens].
        rows: Embedding table [vocab, embed], which may be prepacked or block-quantized.
        dtype: Dtype of the result if the table is block-quantized. Otherwise the result has the table's dtype.

    Returns:
        Embeddings [tokens, embed].
    """
    if isinstance(rows, PackedWeight):
        return kernels.packed_rows(rows, token_ids)
    if not isinstance(rows, BlockWeight):
        return F.embedding(token_ids, rows.data if isinstance(rows, BoundWeight) else rows)
    if not token_ids.is_cpu:
        return _card_kernels().block_rows(rows, token_ids, dtype)
    embeddings = torch.empty(len(token_ids), rows.shape[1], dtype=dtype)
    if len(token_ids):
        kernels.unpack_blocks(rows.weight_format.upper(), rows.data.index_select(0, token_ids), embeddings)
    return embeddings


def _torch_linear(x: Tensor, weight: Tensor, bias: Tensor | None, **options) -> Tensor:
    """Torch's linear on the CPU, with as many threads as the C++ kernels use.

    During a sweep torch's own operations have one thread.
    """
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
    """Torch's linear on the CPU for more than `TORCH_ROWS` rows of x, in parts of `TORCH_ROWS` rows."""
    n = len(weight) // 2 if activation in kernels.GATED else len(weight)
    if out is None:
        out = x.new_empty(len(x), n, dtype=out_dtype)
    for start in range(0, len(x), TORCH_ROWS):
        rows = slice(start, start + TORCH_ROWS)
        rows_residual = None if residual is None else residual[rows]
        reference.linear(x[rows], weight, bias, activation=activation, residual=rows_residual, out=out[rows])
    return out


def pack_weight(weight: Tensor, *, gated: bool = False, isa: str = "") -> Weight:
    """Prepack a weight matrix in the order in which `linear` reads it fastest.

    The prepacked weight takes about as many bytes as the weight. It is not prepacked on a GPU, for torch's own linear,
    or where it would take twice as many bytes.

    Args:
        weight: Weight matrix [N, K] of numbers, or int8 rows [N, int8.row_bytes(K)].
        gated: Whether the weight is for a gated activation. Then its first N / 2 rows are the gate's.
        isa: Instruction set of the CPU that will multiply the weight, or TORCH. "": the process's instruction set.

    Returns:
        The prepacked weight; or the weight as it is, bound to `isa` if that is not "".
    """
    if weight.device.type != "cpu" or isa == TORCH or kernels.packed_grows(weight.dtype, isa):
        return bind_weight(weight, isa)
    return kernels.pack(weight, gated=gated, isa=isa)


def pack_blocks(weight: BlockWeight, dtype: torch.dtype, *, gated: bool = False) -> PackedWeight | BlockWeight:
    """Prepack a block-quantized weight into panels of about as many bytes, for activations of dtype `dtype`.

    On a GPU the weight comes back as it is.
    """
    if weight.data.device.type != "cpu":
        return weight
    return kernels.pack_blocks(weight, dtype, gated=gated)


def bind_weight(weight: Tensor, isa: str) -> Weight:
    """The weight, in unchanged memory, bound to an instruction set or to torch's own linear.

    Args:
        weight: Weight [N, K] of numbers, or int8 rows.
        isa: Instruction set, or TORCH. "": the weight is not bound.

    Returns:
        The bound weight; on a GPU the weight itself.
    """
    return BoundWeight(weight, isa) if isa and weight.device.type == "cpu" else weight


def weight_bytes(weight: Weight) -> int:
    """Number of bytes that a weight takes in memory."""
    if isinstance(weight, SplitWeight):
        return sum(weight_bytes(part) for part in weight.parts)
    return (weight if isinstance(weight, Tensor) else weight.data).nbytes


# Mixtures of experts.


def groups_experts(x: Tensor, *weights: Weight) -> bool:
    """Tell whether `grouped_experts` supports activations x and these weight matrices.

    The matrices must be numbers of x's dtype, int8 or int4 rows, or blocks. The GPU must have units for matrix
    products.

    Args:
        x: Activations of one layer, on the device that computes.
        weights: Matrices of a layer, each with the rows of all experts.
    """
    known = all(_is_packed(w) or (isinstance(w, Tensor) and w.dtype == x.dtype) for w in weights)
    return known and _product_kernels(x.device) is not None


def grouped_experts(  # the operands of two products
    x: Tensor,
    shares: Tensor,
    chosen: Tensor,
    gate_up: Tensor | BlockWeight,
    gate_up_bias: Tensor | None,
    down: Tensor | BlockWeight,
    down_bias: Tensor | None,
    activation: str,
) -> Tensor:
    """Compute the MLP of a mixture of experts on a GPU: for each token, the weighted sum of its experts' results.

    A token's results are added in the order of `chosen`, so they do not depend on the other tokens. The host does not
    wait for the GPU. The launched kernels are the same for any choice of experts. `groups_experts` must be true for the
    operands.

    Args:
        x: Activations, [tokens, hidden].
        shares: Weight of each expert's result, fp32 [tokens, experts of a token].
        chosen: Number of each expert in the layer, int64 [tokens, experts of a token].
        gate_up: Matrix [experts * 2 * intermediate, hidden], one expert after the other; an expert's gate is before its
            up projection. It may be int8 or int4 rows or blocks, of which only those of experts with tokens are read.
        gate_up_bias: Bias [experts * 2 * intermediate], or None.
        down: Matrix [experts * hidden, intermediate], one expert after the other, stored in any of these ways.
        down_bias: Bias [experts * hidden], or None.
        activation: Name of a gated activation, one that `linear` supports.

    Returns:
        Sums, fp32 [tokens, hidden].
    """
    triton_kernels = _card_kernels()
    if triton_kernels.takes_many(x, chosen, gate_up, gate_up_bias, down, down_bias):
        return triton_kernels.many_through_experts(x, shares, chosen, gate_up, down, activation)
    return triton_kernels.grouped_experts(x, shares, chosen, gate_up, gate_up_bias, down, down_bias, activation)


def norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, out: Tensor | None = None) -> Tensor:
    """Normalise the last dimension of x: RMSNorm, x / rms(x) * weight, without a bias; LayerNorm with one.

    Sums are in fp32.

    Args:
        x: Tensor [..., columns].
        weight: Factor of each column, [columns].
        bias: Summand of each column, [columns], for LayerNorm; None for RMSNorm.
        eps: Number added to the mean square (or variance) before the square root.
        out: Tensor for the result, which may be x. None: a new tensor.

    Returns:
        The normalised tensor, of x's shape.
    """
    if x.is_cpu:
        return kernels.norm(x, weight, bias, eps, out)
    triton_kernels = device_kernels(x.device)
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
    value_norm: bool = False,
    keys_are_values: bool = False,
    rotate_keys: bool = False,
    growth: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Split fused QKV into queries, keys and values; norm and rotate queries and keys; scale queries.

    The rotation is rotary position embedding (RoPE: Su et al., 2021).

    Args:
        qkv: Output of the QKV projection, [tokens, (heads + 2 kv_heads) * head_dim].
        heads: Number of query heads.
        kv_heads: Number of key and value heads. 0: there are queries alone.
        scale: Factor of queries, usually head_dim ** -0.5, so that attention need not scale scores.
        rope: Tables of cos and sin, each fp32 [positions, head_dim / 2]. None: the model has no rotary positions.
        positions: Position of each token, int64 [tokens].
        norms: RMSNorm weights for each head's queries and keys, each [head_dim]. None: they are not normed.
        eps: Epsilon of these norms.
        value_norm: Whether each head's values are normed, without a weight.
        keys_are_values: Whether the values are the keys before their norm and rotation. Then the rows of qkv end with
            the keys.
        rotate_keys: Whether queries and keys are also multiplied by the matrix of `rotation`, for int5 and int4 KV.
        growth: Further factor of the queries at each position, fp32 [positions]; None: 1.

    Returns:
        Queries [tokens, heads, head_dim]; keys and values, each [tokens, kv_heads, head_dim].
    """
    qkv = _with_values(qkv, heads, kv_heads, eps, value_norm=value_norm, keys_are_values=keys_are_values)
    head_dim = qkv.shape[1] // (heads + 2 * kv_heads)
    options: dict[str, Any] = {
        "scale": scale,
        "rope": rope,
        "positions": positions,
        "norms": norms,
        "eps": eps,
        "rotation": rotation(head_dim, qkv.device) if rotate_keys else None,
    }
    triton_kernels = device_kernels(qkv.device)
    if _has_kernels(qkv, head_dim):
        q, k, v = kernels.rotary_store(qkv, heads, kv_heads, head_dim, **options)
    elif triton_kernels and triton_kernels.supports_rotary(head_dim, rotate_keys, qkv.device):
        q, k, v = triton_kernels.rotary_store(qkv, heads, kv_heads, **options)
    else:
        q, k, v = reference.rotary(qkv, heads, kv_heads, **options)
    return _grown(q, positions, growth), k, v


def _grown(q: Tensor, positions: Tensor | None, growth: Tensor | None) -> Tensor:
    """Queries [tokens, heads, head_dim], multiplied in place by the factors of their positions."""
    return q if growth is None or positions is None else q.mul_(growth[positions].view(-1, 1, 1))


def _with_values(
    qkv: Tensor, heads: int, kv_heads: int, eps: float, *, value_norm: bool, keys_are_values: bool
) -> Tensor:
    """QKV whose rows have values as they are stored. `rotary` describes the arguments."""
    if not kv_heads or not (value_norm or keys_are_values):
        return qkv
    kv_size = qkv.shape[1] // (heads + (2 - keys_are_values) * kv_heads) * kv_heads
    values = qkv[:, -kv_size:].reshape(len(qkv), kv_heads, -1)
    if value_norm:
        values = norm(values, torch.ones(values.shape[-1], dtype=qkv.dtype, device=qkv.device), None, eps)
    rest = qkv if keys_are_values else qkv[:, :-kv_size]
    return torch.cat((rest, values.flatten(1)), dim=1)


def rotary_store(  # what `rotary` takes, and where keys and values go
    qkv: Tensor,
    heads: int,
    kv: Tensor,
    slots: Tensor,
    kv_format: KVFormat,
    *,
    value_norm: bool = False,
    keys_are_values: bool = False,
    **options: Any,
) -> Tensor:
    """Compute `rotary` of fused QKV, store the new keys and values in a layer's KV, and return the queries.

    Args:
        qkv: Output of the QKV projection, [tokens, (heads + 2 kv_heads) * head_dim].
        heads: Number of query heads.
        kv: KV of the layer, [num_blocks, 2, kv_heads, kv_block_size, width].
        slots: Place of each token in the KV, int64 [tokens]: block number * kv_block_size + offset in the block. Where
            `can_capture` is true, a token with a slot below 0 is not stored.
        kv_format: Format in which the KV is stored.
        value_norm, keys_are_values, options: Further arguments of `rotary`, except `rotate_keys`.

    Returns:
        Queries [tokens, heads, head_dim].
    """
    growth, eps = options.pop("growth", None), options.get("eps", 0.0)
    qkv = _with_values(qkv, heads, kv.shape[2], eps, value_norm=value_norm, keys_are_values=keys_are_values)
    q = _rotary_store(qkv, heads, kv, slots, kv_format, **options)
    return _grown(q, options.get("positions"), growth)


def _rotary_store(qkv: Tensor, heads: int, kv: Tensor, slots: Tensor, kv_format: KVFormat, **options: Any) -> Tensor:
    kv_heads, bits, rotate_keys = kv.shape[2], kv_format.bits, kv_format.rotates_keys
    head_dim = qkv.shape[1] // (heads + 2 * kv_heads)
    matrix = rotation(head_dim, qkv.device) if rotate_keys else None
    stored = {"kv": kv, "slots": slots, "bits": bits, "rotation": matrix}
    if _has_kernels(qkv, head_dim):
        return kernels.rotary_store(qkv, heads, kv_heads, head_dim, **stored, **options)[0]
    triton_kernels = device_kernels(qkv.device)
    if triton_kernels and triton_kernels.supports_rotary(head_dim, rotate_keys, qkv.device):
        return triton_kernels.rotary_store(qkv, heads, kv_heads, **stored, **options)[0]
    q, k, v = rotary(qkv, heads, kv_heads, rotate_keys=rotate_keys, **options)
    if bits:
        k, v = quantize(k, bits), quantize(v, bits)
    write_kv(kv, kv_rows(slots, kv_heads, kv.shape[3]), k, v)
    return q


def prepare_attention(
    plan: AttentionPlan,
    operands: AttentionOperands,
    device: torch.device = CPU,
    isa: str = "",
    chosen: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None,
    every_kernel: bool = False,
) -> PreparedAttention:
    """Turn the attention plan of a sweep into the form that `paged_attention` takes, once for all layers.

    Args:
        plan: Attention plan of the sweep.
        operands: Shapes and dtypes of queries and KV.
        device: Device that has queries and KV.
        isa: Instruction set that computes attention on the CPU. "": the process's instruction set.
        chosen: Sequences that attend to chosen pages, as `cpp.attention_plan` takes them, where `has_cpu_attention` is
            true; None: there are none.
        every_kernel: Whether each kernel is launched that some plan of these operands needs on a GPU, so that none
            remains for a later sweep to be the first that uses it.

    Returns:
        A plan for the kernels of this device and these shapes, or for torch.
    """
    if has_cpu_attention(operands, device):
        row_bytes = operands.kv_format.row_bytes(operands.head_dim)
        shape = operands.kv_heads, operands.group, operands.kv_block_size, row_bytes
        return kernels.attention_plan(plan, *shape, isa, chosen)
    assert chosen is None
    triton_kernels = None if device.type == "cpu" else device_kernels(device)
    if triton_kernels and triton_kernels.supports_attention(operands, device):
        return triton_kernels.prepare_attention(plan, operands, device, every_kernel)
    return torch_attention.prepare_attention(plan, operands, device)


def has_cpu_attention(operands: AttentionOperands, device: torch.device) -> bool:
    """Tell whether the C++ kernels attend on a device to operands of these shapes."""
    return device.type == "cpu" and kernels.supports_attention(operands.head_dim, operands.group)


def cut_attention(
    plan: AttentionPlan,
    operands: AttentionOperands,
    device: torch.device,
) -> CutPlan:
    """Cut a sweep's attention plan into work items for a GPU, in the host's memory, where `can_capture` is true.

    A CUDA graph is replayed for several sweeps, so their plans are later copied to the same memory on the GPU.

    Args:
        plan: Attention plan of the sweep.
        operands: Shapes and dtypes of queries and KV.
        device: GPU that has queries and KV.
    """
    return _card_kernels().cut_attention(plan, operands, device)


def can_capture(operands: AttentionOperands, device: torch.device) -> bool:
    """Tell whether decode sweeps on a device can be captured in CUDA graphs.

    A graph needs kernels whose launches do not depend on the sweep, and which do not store tokens with a slot below 0.
    Only the Triton kernels fulfil this.

    Args:
        operands: Shapes and dtypes of queries and KV.
        device: Device that computes.
    """
    triton_kernels = device_kernels(device)
    return bool(
        triton_kernels
        and triton_kernels.supports_attention(operands, device)
        and triton_kernels.supports_rotary(operands.head_dim, True, device)
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
    """Compute causal attention of a sweep's query tokens to paged KV, for prefill and decode in one call.

    Args:
        q: Queries [tokens, heads, head_dim], as `rotary` returns them. `heads` is a multiple of kv_heads (grouped-query
            attention).
        kv: KV of the layer, [num_blocks, 2, kv_heads, kv_block_size, width]. It already contains K and V of the query
            tokens.
        plan: Result of `prepare_attention`: KV blocks of each sequence (PagedAttention: Kwon et al., 2023) and shared
            prefixes.
        out: Tensor for the result, of q's shape. None: a new tensor.
        bits: Bits of each quantized value of packed KV. 0: KV is stored as numbers.
        softcap: Bound of the scores: they become softcap * tanh(score / softcap) before the softmax (Gemma 2, Gemma
            Team, 2024, section 2). 0: no bound.
        sinks: One further score for each head, fp32 [heads] on q's device. It is part of the softmax's sum, but has no
            value (gpt-oss, 2025; attention sinks: Xiao et al., 2023).

    Returns:
        Attention output [tokens, heads * head_dim].
    """
    if isinstance(plan, kernels.AttentionPlan):
        compute = kernels.attention
    elif isinstance(plan, torch_attention.TorchAttentionPlan):
        compute = torch_attention.paged_attention
    else:
        compute = _card_kernels().paged_attention
    return compute(q, kv, plan, out, bits, softcap, sinks).flatten(1)


@lru_cache
def rotation(n: int, device: torch.device = CPU) -> Tensor:
    """The orthogonal matrix, fp32 [n, n], that queries and keys are multiplied by if KV is stored as int5 or int4.

    It is the Hadamard matrix if n is a power of two, otherwise the matrix of the cosine transform. Some channels of
    keys are far larger than the rest, and would determine the scale of their whole group. The rotation spreads them
    over all channels. Products of queries and keys do not change.

    Args:
        n: Number of values in one head.
        device: Device of the matrix.
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
    """Tell whether x is on the CPU and the C++ kernels support heads of `head_dim` values."""
    return x.is_cpu and kernels.supports_head_dim(head_dim)


# KV.


def kv_rows(slots: np.ndarray | Tensor, kv_heads: int, kv_block_size: int) -> Tensor:
    """Row numbers of tokens' keys in a layer's KV, seen as [num_blocks * 2 * kv_heads * kv_block_size, width].

    The row of a token's value is kv_heads * kv_block_size after the row of its key.

    Args:
        slots: Place of each token in the KV, [tokens]: block number * kv_block_size + offset in the block.
        kv_heads: Number of key and value heads.
        kv_block_size: Number of tokens in a KV block.

    Returns:
        Row numbers, int64 [tokens * kv_heads], on the device of `slots`.
    """
    slots = (slots if isinstance(slots, Tensor) else torch.from_numpy(slots)).long()[:, None]
    heads = torch.arange(kv_heads, device=slots.device)
    rows = (slots // kv_block_size * (2 * kv_heads) + heads) * kv_block_size + slots % kv_block_size
    return rows.view(-1)


def write_kv(kv: Tensor, rows: Tensor, k: Tensor, v: Tensor) -> None:
    """Store keys and values of new tokens in a layer's KV.

    Args:
        kv: KV of the layer, [num_blocks, 2, kv_heads, kv_block_size, width].
        rows: Row numbers of the keys, from `kv_rows`.
        k: Keys [tokens, kv_heads, width], already in the format of the KV.
        v: Values [tokens, kv_heads, width], already in the format of the KV.
    """
    _, _, kv_heads, kv_block_size, width = kv.shape
    flat = kv.view(-1, width)
    flat.index_copy_(0, rows, k.reshape(-1, width))
    flat.index_copy_(0, rows + kv_heads * kv_block_size, v.reshape(-1, width))


def gather_rows(target: Tensor, source: Tensor, index: Tensor) -> None:
    """Compute target[i] = source[index[i]] along the first dimension.

    Args:
        target: Tensor to fill, [len(index), ...].
        source: Tensor with the rows, of target's dtype.
        index: Row numbers in `source`, int64. If it is on a GPU, this GPU must be able to access all three tensors.
    """
    triton_kernels = device_kernels(index.device)
    if triton_kernels:
        triton_kernels.gather_rows(target, source, index)
    else:
        target.copy_(source.index_select(0, index.to(source.device)))


def scatter_rows(target: Tensor, index: Tensor, source: Tensor) -> None:
    """Compute target[index[i]] = source[i] along the first dimension.

    Args:
        target: Tensor whose rows are overwritten.
        index: Row numbers in `target`, int64. If it is on a GPU, this GPU must be able to access all three tensors.
        source: Tensor with the new rows, [len(index), ...].
    """
    triton_kernels = device_kernels(index.device)
    if triton_kernels:
        triton_kernels.scatter_rows(target, index, source)
    else:
        target.index_copy_(0, index.to(target.device), source.to(target.device))


# Logits.


def all_finite(logits: Tensor) -> Tensor:
    """Tell for each row of logits [rows, columns] whether all its logits are finite: bool [rows].

    The host does not wait for a GPU.
    """
    return logits.amax(-1).isfinite() & logits.amin(-1).isfinite()  # both keep a NaN; a sum could overflow


def argmax(logits: Tensor) -> Tensor:
    """Index of the largest logit of each row, the first one of equals.

    Args:
        logits: fp32 [rows, columns].

    Returns:
        Indices, int64 [rows].
    """
    return _of_logits(logits).argmax(logits)[0]


def argmax_if_finite(logits: Tensor, otherwise: int) -> tuple[Tensor, Tensor]:
    """The index of the largest logit of each row, the first one of equals. The host does not wait for a GPU.

    Args:
        logits: fp32 [rows, columns].
        otherwise: Number that stands for a row with a logit that is not finite.

    Returns:
        Indices, int64 [rows], of any column where a row is not finite; the same with `otherwise` in their place.
    """
    return _of_logits(logits).argmax_if_finite(logits, otherwise)


def lse(logits: Tensor) -> Tensor:
    """The log-sum-exp of each row of logits: fp32 [rows], for fp32 logits [rows, columns]."""
    return argmax_with_lse(logits)[2]


def argmax_with_lse(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute argmax, maximum and log-sum-exp of each row of logits. The kernels need only one pass.

    Args:
        logits: fp32 [rows, columns].

    Returns:
        Index of the largest logit, int64 [rows]; its value, fp32 [rows]; the log-sum-exp, fp32 [rows].
    """
    return _of_logits(logits).argmax(logits, want_lse=True)


def draw(logits: Tensor, rows: np.ndarray, draws: Draws, out: Tensor) -> None:
    """Draw a random token from each of some rows of logits. The host does not wait for a GPU.

    Args:
        logits: Logits, fp32 [.., columns].
        rows: Numbers of the rows to draw from, int64 [draws].
        draws: Sampling parameters for each of these rows.
        out: Tensor for token ids, int64 [..]; the token drawn from row r is stored in element r.
    """
    _of_logits(logits).draw(logits, rows, draws, out)


def forbid(logits: Tensor, rows: np.ndarray, allowed: np.ndarray) -> None:
    """Set the logits of forbidden tokens to minus infinity, in place. The host does not wait for a GPU.

    Args:
        logits: Logits, fp32 [.., columns].
        rows: Numbers of the rows that have a mask, int64 [masks].
        allowed: Masks, int32 [masks, words]: one bit for each token, 1 where the token is allowed. The lowest bit of a
            word is first. There are at least as many bits as columns.
    """
    _of_logits(logits).forbid(logits, rows, allowed)


def _of_logits(logits: Tensor) -> ModuleType:
    """The module with the kernels, or torch operations, for the device of these logits."""
    return kernels if logits.is_cpu else device_kernels(logits.device) or reference


# Packed rows.


def quantize(x: Tensor, bits: int = WEIGHT_CODE_BITS, *, importance: Tensor | None = None) -> Tensor:
    """Quantize rows of numbers in groups (`quant`).

    Args:
        x: Numbers [..., n] of any float dtype.
        bits: Bits of each quantized value.
        importance: Importance of each column, [n] and above zero, for weights in 4 bits on a CPU: each group's scale
            and minimum are fitted with errors weighted by it. None: no fit.

    Returns:
        Packed rows, uint8 [..., quant.row_bytes(n, bits)].
    """
    if x.device.type == "cpu":
        return kernels.quantize(x, bits, importance=importance)
    assert importance is None
    return (device_kernels(x.device) or quant).quantize(x, bits)


def dequantize(packed: Tensor, out: Tensor) -> Tensor:
    """Dequantize packed rows of 4-bit values.

    Args:
        packed: Packed rows, uint8 [..., quant.row_bytes(n)].
        out: Tensor for the numbers, [..., n], of any float dtype.

    Returns:
        `out`.
    """
    compute = kernels if packed.device.type == "cpu" else device_kernels(packed.device)
    if compute and packed.is_contiguous() and out.is_contiguous():
        return compute.dequantize(packed, out.shape[-1], out)
    return quant.dequantize(packed, out.shape[-1], out=out)
