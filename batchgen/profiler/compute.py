"""Measuring of a compute device's rates: GEMMs, attention and element-wise work.

The measured functions are those that jobs run (`ops`). Their operands rotate through a pool larger than the caches, as
weights and KV do in a sweep.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from batchgen.core.dtypes import (
    BLOCK_FORMATS,
    INT4,
    INT8,
    STATE_DTYPES,
    KVFormat,
    dtype_name,
    matmul_key,
    packed_matmul_key,
    weight_row_bytes,
)
from batchgen.core.hardware import ComputeRates, Rates
from batchgen.core.plan import DEFAULT_KV_BLOCK_SIZE
from batchgen.models.config import ModelConfig
from batchgen.models.rope import RopeConfig
from batchgen.models.state_layers import DeltaNet
from batchgen.ops import dispatch as ops
from batchgen.ops import int8
from batchgen.ops.attention_operands import AttentionOperands
from batchgen.ops.attention_plan import SequenceSlice, SweepTables, plan_attention
from batchgen.ops.cpp import BlockWeight
from batchgen.profiler import state_rates
from batchgen.profiler.timing import Device, Effort, Trial, pieces

# Function that runs a measurement under a name for people, and returns its result.
Timed = Callable[[str, Callable[[], Any]], Any]

# Contexts decoded together differ by up to this much from their mean, as in a real block.
_CONTEXT_SPREAD_FRAC = 0.25
# Rows that are quantized to 8 bits and repeated: quantizing all weights would take longer than all that is timed.
_QUANTIZED_ROWS = 64


@dataclass(frozen=True)
class Subjects:
    """The models whose layers are measured.

    Attributes:
        products: Models whose GEMMs are measured, one for each hidden size.
        attention: Models whose decode attention is measured, one for each number of query heads per KV head.
        main: Model for all other rates.
        state: Shape of the state layers whose rates are measured; None: the model has none.
        layers: Number of layers whose weights a sweep multiplies with; None: more than caches hold.
    """

    products: tuple[ModelConfig, ...]
    attention: tuple[ModelConfig, ...]
    main: ModelConfig
    state: DeltaNet | None
    layers: int | None = None


def subjects_of(device: str, effort: Effort, model: ModelConfig | None) -> Subjects:
    """The models to measure: the given one, or else Llama models of sizes that are usual on the device.

    Args:
        device: "cpu" or "cuda".
        effort: Grid points of the measurement.
        model: Model whose rates are wanted; None: models of several usual sizes.
    """
    if model is not None:
        state = model.state if isinstance(model.state, DeltaNet) else None
        return Subjects((model,), (model,), model, state, model.num_layers)
    width, kv_heads, head_dim = _GENERIC[device]
    groups = tuple(_llama(width, kv_heads * group, kv_heads, head_dim) for group in effort.groups)
    widths = tuple(_llama(w, max(1, w // head_dim), kv_heads, head_dim) for w in effort.widths)
    return Subjects(widths, groups, groups[len(groups) // 2], state_rates.USUAL)


# Width, KV heads, head_dim.
_GENERIC = {"cpu": (1024, 4, 64), "cuda": (4096, 8, 128)}


@torch.inference_mode()
def measure_compute(device: Device, dtype_name: str, subjects: Subjects, effort: Effort, timed: Timed) -> ComputeRates:
    """Measure all rates of the device that runs the GEMMs, for one compute dtype.

    Args:
        device: The compute device.
        dtype_name: Compute dtype.
        subjects: Models whose layers are measured.
        effort: Grid points and time limits.
        timed: Function that runs a measurement under a name.
    """
    dtype = getattr(torch, dtype_name)
    where = f"in {dtype_name} on {device.kind}"
    pool = device.pool(dtype, effort)
    gemm = timed(
        f"matrix products {where}", lambda: gemm_rates(device, pool, subjects.products, effort, layers=subjects.layers)
    )
    decode = timed(f"decode attention {where}", lambda: decode_rates(device, pool, subjects.attention, effort))
    prefill = timed(f"prefill attention {where}", lambda: prefill_rates(device, pool, subjects.main, effort))
    elementwise = timed(f"element-wise work {where}", lambda: elementwise_rates(device, pool, subjects.main, effort))
    rates = measure_states(device, dtype_name, subjects, effort, timed)
    return replace(
        rates,
        gemm_flops_per_s={dtype_name: gemm},
        prefill_attention_flops_per_s={dtype_name: prefill},
        decode_attention_bytes_per_s={dtype_name: decode},
        elementwise_bytes_per_s={dtype_name: elementwise},
    )


@torch.inference_mode()
def measure_states(
    device: Device, dtype_name: str, subjects: Subjects, effort: Effort, timed: Timed, *, prefill: bool = True
) -> ComputeRates:
    """Measure the rates of updates of states, in each format of states; no rates for a model without state layers.

    Args:
        device: The device that updates the states.
        dtype_name: Compute dtype.
        subjects: Models whose layers are measured.
        effort: Grid points and time limits.
        timed: Function that runs a measurement under a name.
        prefill: Whether the updates by whole prompts are measured too.
    """
    shape, dtype = subjects.state, getattr(torch, dtype_name)
    if shape is None:
        return ComputeRates()

    def updates() -> dict[str, Rates]:
        return {name: state_rates.update_rates(device, shape, name, dtype, effort) for name in STATE_DTYPES}

    def prompts() -> dict[str, Rates]:
        return {dtype_name: state_rates.prefill_rates(device, shape, dtype, effort)}

    where = f"in {dtype_name} on {device.kind}"
    return ComputeRates(
        state_update_bytes_per_s=timed(f"updates of states {where}", updates),
        state_prefill_flops_per_s=timed(f"states of prompts {where}", prompts) if prefill else {},
    )


@torch.inference_mode()
def measure_decode_attention(
    device: Device,
    dtype_name: str,
    subjects: Subjects,
    effort: Effort,
    timed: Timed,
    kv_format: str | None = None,
) -> ComputeRates:
    """Measure a CPU's rate of decode attention and of states' updates, for machines whose GPU runs everything else.

    Args:
        device: The CPU.
        dtype_name: Compute dtype.
        subjects: Models whose layers are measured.
        effort: Grid points and time limits.
        timed: Function that runs a measurement under a name.
        kv_format: Format of the KV, a key of `KV_CODE_BITS`; None: the compute dtype.
    """
    pool = device.pool(getattr(torch, dtype_name), effort)
    kind = kv_format or dtype_name
    name = f"decode attention in {kind} on {device.kind}"
    rates = timed(name, lambda: decode_rates(device, pool, subjects.attention, effort, kv_format))
    states = ComputeRates() if kv_format else measure_states(device, dtype_name, subjects, effort, timed, prefill=False)
    return replace(states, decode_attention_bytes_per_s={kind: rates})


@torch.inference_mode()
def measure_packed_kv(  # what is measured, how, and for how long
    device: Device, dtype_name: str, kv_format: str, subjects: Subjects, effort: Effort, timed: Timed
) -> ComputeRates:
    """Measure the rates of attention over quantized KV, and of writing such KV.

    Args:
        device: The compute device.
        dtype_name: Compute dtype, which queries have.
        kv_format: Format of the KV, a key of `KV_CODE_BITS`.
        subjects: Models whose layers are measured.
        effort: Grid points and time limits.
        timed: Function that runs a measurement under a name.
    """
    pool = device.pool(getattr(torch, dtype_name), effort)
    where = f"with {kv_format} and {dtype_name} on {device.kind}"
    decode = timed(
        f"decode attention {where}", lambda: decode_rates(device, pool, subjects.attention, effort, kv_format)
    )
    prefill = timed(f"prefill attention {where}", lambda: prefill_rates(device, pool, subjects.main, effort, kv_format))
    elementwise = timed(
        f"element-wise work {where}", lambda: elementwise_rates(device, pool, subjects.main, effort, kv_format)
    )
    return ComputeRates(
        prefill_attention_flops_per_s={kv_format: prefill},
        decode_attention_bytes_per_s={kv_format: decode},
        elementwise_bytes_per_s={kv_format: elementwise},
    )


@torch.inference_mode()
def measure_dequantizing(
    device: Device, dtype_name: str, subjects: Subjects, effort: Effort, timed: Timed
) -> ComputeRates:
    """Measure the rate of dequantizing 4-bit weights to the compute dtype, and of GEMMs with them where kernels can.

    Args:
        device: The compute device.
        dtype_name: Compute dtype.
        subjects: Models whose layers are measured.
        effort: Grid points and time limits.
        timed: Function that runs a measurement under a name.
    """
    pool = device.pool(getattr(torch, dtype_name), effort)
    name = f"expanding weights with {INT4} and {dtype_name} on {device.kind}"
    rate = timed(name, lambda: dequantize_rate(device, pool, subjects.main, effort))
    gemm = {}
    if ops.multiplies_packed(pool.device):
        name = f"matrix products with {INT4} weights and {dtype_name} on {device.kind}"
        rates = timed(name, lambda: gemm_rates(device, pool, subjects.products, effort, INT4, layers=subjects.layers))
        gemm = {packed_matmul_key(dtype_name): rates}
    return ComputeRates(expand_bytes_per_s=rate, gemm_flops_per_s=gemm)


@torch.inference_mode()
def measure_products(  # what is measured, how, and for how long
    device: Device,
    dtype_name: str,
    weight_format: str,
    subjects: Subjects,
    effort: Effort,
    timed: Timed,
    *,
    as_stored: bool = False,
) -> ComputeRates:
    """Measure the rates of GEMMs whose weights are quantized, or in the compute dtype as they are stored.

    Args:
        device: The compute device.
        dtype_name: Compute dtype.
        weight_format: "int8", one of `BLOCK_FORMATS`, or the compute dtype.
        subjects: Models whose layers are measured.
        effort: Grid points and time limits.
        timed: Function that runs a measurement under a name.
        as_stored: Whether weights are in the layout in which they stream from disk, not prepacked.
    """
    pool = device.pool(getattr(torch, dtype_name), effort)
    name = f"matrix products with {weight_format} weights{' in rows' * as_stored} and {dtype_name} on {device.kind}"

    def gemm() -> Rates:
        how: dict[str, Any] = {"as_stored": as_stored, "layers": subjects.layers}
        return gemm_rates(device, pool, subjects.products, effort, weight_format, **how)

    return ComputeRates(
        gemm_flops_per_s={matmul_key(weight_format, dtype_name, as_stored=as_stored): timed(name, gemm)}
    )


def dequantize_rate(device: Device, pool: Tensor, model: ModelConfig, effort: Effort) -> float:
    """Bytes per second that dequantizing a layer's 4-bit matrices writes.

    Args:
        device: The compute device.
        pool: Numbers that the matrices are made of; matrices are cut to the rows that fit the pool.
        model: Model whose layer is measured.
        effort: Time limits.
    """
    packed, targets = [], []
    for rows, columns in itertools.chain(*model.layer_matrices.values()):
        rows = min(rows, pool.numel() // columns)
        packed.append(ops.quantize(pool[: rows * columns].view(rows, columns)))
        targets.append(torch.empty(rows, columns, dtype=pool.dtype, device=pool.device))

    def run(i: int) -> None:
        for source, target in zip(packed, targets, strict=True):
            ops.dequantize(source, target)

    return device.rate(Trial(sum(target.nbytes for target in targets), run), effort)


def gemm_rates(
    device: Device,
    pool: Tensor,
    models: Sequence[ModelConfig],
    effort: Effort,
    weight_format: str | None = None,
    *,
    as_stored: bool = False,
    layers: int | None = None,
) -> Rates:
    """FLOP/s of a layer's GEMMs, by hidden size and number of tokens; activation and residual adds are included.

    The weights of a model that fits the caches are in them sweep after sweep. Those that stream never are.

    Args:
        device: The compute device.
        pool: Numbers that weights are made of.
        models: Models whose GEMMs are measured, one for each hidden size.
        effort: Grid points and time limits.
        weight_format: "int8", "int4" (on a GPU), one of `BLOCK_FORMATS`, or the pool's dtype; None: the pool's dtype.
        as_stored: Whether weights are in the layout in which they stream from disk, not prepacked.
        layers: Number of layers whose weights a sweep multiplies with; None: more than caches hold.
    """
    stored_in = weight_format or dtype_name(pool.dtype)

    def rates(model: ModelConfig) -> tuple:
        width, attention, inner = model.hidden_size, model.q_size, model.intermediate_size
        up = (2 if model.gated_mlp else 1) * inner
        shapes = [(model.qkv_size, width), (width, attention), (up, width), (width, inner)]  # rows, columns
        sizes = [rows * columns for rows, columns in shapes]
        # A layer larger than the pool is larger than any cache.
        large = pool if sum(sizes) <= pool.numel() else pool.repeat(-(-sum(sizes) // pool.numel()))
        weights = [
            [
                _weight(part.view(shape), stored_in, gated=model.gated_mlp and i == 2, as_stored=as_stored)
                for i, (part, shape) in enumerate(zip(layer.split(sizes), shapes, strict=True))
            ]
            for layer in pieces(large, sum(sizes))[: None if as_stored else layers]
        ]

        # K is rounded up to whole blocks: a model with such a K has another format there.
        block = BLOCK_FORMATS[stored_in][0] if stored_in in BLOCK_FORMATS else 1
        depths = {n: -(-n // block) * block for n in (width, attention, inner)}
        multiplied = sum(rows * depths[columns] for rows, columns in shapes)

        def trial(tokens: int) -> Trial:
            numbers = {n: torch.randn(tokens, n, device=pool.device) for n in {width, *depths.values()}}
            inputs = {n: values.to(pool.dtype) for n, values in numbers.items()}

            def run(i: int) -> None:
                qkv, out, up, down = weights[i % len(weights)]
                ops.linear(inputs[depths[width]], qkv)
                ops.linear(inputs[depths[attention]], out, residual=inputs[width])
                activation = model.mlp_activation if model.gated_mlp else "relu"
                ops.linear(inputs[depths[width]], up, activation=activation)
                ops.linear(inputs[depths[inner]], down, residual=inputs[width])

            return Trial(2 * tokens * multiplied, run)

        return device.rising_rates(effort.tokens, trial, effort)

    return Rates(("width", "tokens"), tuple((model.hidden_size, rates(model)) for model in models))


def _weight(numbers: Tensor, weight_format: str, *, gated: bool, as_stored: bool = False) -> ops.Weight:
    """A prepacked matrix for GEMMs.

    Where quantizing takes long, the matrix has other numbers than the given ones, which does not change the timing.
    """
    rows, columns = numbers.shape
    if weight_format in BLOCK_FORMATS:
        shape = rows, weight_row_bytes(columns, weight_format)
        data = torch.full(shape, 0x2A, dtype=torch.uint8, device=numbers.device)  # scales are numbers
        weight = BlockWeight(data, weight_format)
        return weight if as_stored else ops.pack_blocks(weight, numbers.dtype, gated=gated)
    stored = numbers
    if weight_format == INT4:
        return ops.quantize(numbers)
    if weight_format == INT8:
        some = int8.quantize(numbers[:_QUANTIZED_ROWS])
        stored = some.repeat(-(-len(numbers) // len(some)), 1)[: len(numbers)]
    return ops.bind_weight(stored, "") if as_stored else ops.pack_weight(stored, gated=gated)


def decode_rates(
    device: Device,
    pool: Tensor,
    models: Sequence[ModelConfig],
    effort: Effort,
    kv_format: str | None = None,
) -> Rates:
    """Bytes of KV that decode attention reads per second, by query heads per KV head, batch size and context length.

    Args:
        device: The compute device.
        pool: Numbers that KV is made of.
        models: Models whose attention is measured, one for each number of query heads per KV head.
        effort: Grid points and time limits.
        kv_format: Format of the KV, a key of `KV_CODE_BITS`; None: the pool's dtype.
    """
    stored_as = _stored_as(kv_format, pool)
    kvs = [paged_kv(pool, model, stored_as) for model in models]

    def trial(model: ModelConfig, kv: Tensor, batch: int, context: int) -> Trial:
        spread = np.linspace(1 - _CONTEXT_SPREAD_FRAC, 1 + _CONTEXT_SPREAD_FRAC, batch) if batch > 1 else np.ones(1)
        contexts = np.rint(context * spread).astype(int).tolist()
        run = paged_attention(kv, stored_as, model, [(1, n - 1) for n in contexts], pool.dtype)
        return Trial(sum(contexts) * (kv[0].nbytes // DEFAULT_KV_BLOCK_SIZE), run)

    def over_context(model: ModelConfig, kv: Tensor, batch: int) -> tuple:
        return device.rising_rates(effort.contexts, lambda context: trial(model, kv, batch, context), effort)

    points = tuple(
        (m.num_heads // m.num_kv_heads, tuple((batch, over_context(m, kv, batch)) for batch in effort.batches))
        for m, kv in zip(models, kvs, strict=True)
    )
    return Rates(("group", "batch", "context"), points)


def prefill_rates(
    device: Device,
    pool: Tensor,
    model: ModelConfig,
    effort: Effort,
    kv_format: str | None = None,
) -> Rates:
    """FLOP/s of the causal attention of a whole prompt to itself, by prompt length; masked keys are not counted.

    Args:
        device: The compute device.
        pool: Numbers that KV is made of.
        model: Model whose attention is measured.
        effort: Grid points and time limits.
        kv_format: Format of the KV, a key of `KV_CODE_BITS`; None: the pool's dtype.
    """
    stored_as = _stored_as(kv_format, pool)
    kv = paged_kv(pool, model, stored_as)

    def trial(context: int) -> Trial:
        flops = 4 * model.q_size * (context * (context + 1) // 2)
        return Trial(flops, paged_attention(kv, stored_as, model, [(context, 0)], pool.dtype))

    return Rates(("context",), device.rising_rates(effort.prefill_contexts, trial, effort))


def paged_attention(
    kv: Tensor,
    kv_format: KVFormat,
    model: ModelConfig,
    sequences: Sequence[tuple[int, int]],
    dtype: torch.dtype,
) -> Callable[[int], Tensor]:
    """A function that runs the attention of one layer on another part of the KV at each call.

    Call number i attends to the i-th window of the KV blocks; after the last window comes the first again, when its KV
    has left the caches. A window has as many blocks as the sequences need, or all blocks. One attention plan serves all
    calls, as in a sweep, where it serves all layers: it counts blocks from the start of the window.

    Args:
        kv: KV blocks, made by `paged_kv`.
        kv_format: Format of the KV.
        model: The model whose heads attend.
        sequences: (new tokens, cached tokens) of each sequence.
        dtype: Dtype of the queries.
    """
    heads, size = model.num_kv_heads, DEFAULT_KV_BLOCK_SIZE
    used = [-(-(new + cached) // size) for new, cached in sequences]
    ends = np.cumsum(used).tolist()
    window = min(ends[-1], len(kv))  # a pool too small for all sequences serves them by turns
    slices = [
        SequenceSlice(new, cached, np.arange(end - n, end, dtype=np.int32) % window)
        for (new, cached), n, end in zip(sequences, used, ends, strict=True)
    ]
    plan = plan_attention(
        SweepTables.of(slices), [], kv_block_size=size, key_bytes=heads * model.head_dim * dtype.itemsize
    )
    operands = AttentionOperands(model.num_heads, heads, model.head_dim, size, dtype, kv_format)
    prepared = ops.prepare_attention(plan, operands, kv.device)
    windows = kv[: len(kv) // window * window].split(window)
    tokens = sum(new for new, _ in sequences)
    q = torch.randn(tokens, model.num_heads, model.head_dim, device=kv.device).to(dtype) * model.head_dim**-0.5
    softcap = model.attention_softcap
    return lambda i: ops.paged_attention(q, windows[i % len(windows)], prepared, bits=kv_format.bits, softcap=softcap)


def _stored_as(kv_format: str | None, pool: Tensor) -> KVFormat:
    """The KV format of a name; for None, the format of the pool's dtype."""
    return KVFormat.of(kv_format or dtype_name(pool.dtype))


def paged_kv(pool: Tensor, model: ModelConfig, kv_format: KVFormat) -> Tensor:
    """KV blocks made of the numbers of a pool.

    Args:
        pool: Numbers, in the compute dtype.
        model: Model whose heads the KV is for.
        kv_format: Format of the KV.

    Returns:
        Blocks [blocks, 2, kv_heads, tokens of a block, head_dim]; the last dimension is a quantized row in a quantized
            format.
    """
    block = (2, model.num_kv_heads, DEFAULT_KV_BLOCK_SIZE, model.head_dim)
    size = math.prod(block)
    kv = pool[: pool.numel() // size * size].view(-1, *block)
    return ops.quantize(kv, kv_format.bits) if kv_format.bits else kv


def elementwise_rates(
    device: Device, pool: Tensor, model: ModelConfig, effort: Effort, kv_format: str | None = None
) -> Rates:
    """Rates of a decoder layer's work outside of GEMMs and attention, by number of tokens.

    A rate is in bytes of activations per second. It depends on the number of tokens: the activations of many tokens do
    not stay in the caches between two operations. Work that is fused into GEMMs counts in the bytes
    (`ModelConfig.elementwise_bytes_per_token`), but its time is measured with the GEMMs.

    Args:
        device: The compute device.
        pool: Numbers that activations and KV are made of.
        model: Model whose layer is measured.
        effort: Grid points and time limits.
        kv_format: Format of the KV that is written, a key of `KV_CODE_BITS`; None: the pool's dtype.
    """
    most = max(1, pool.numel() // (8 * model.intermediate_size))
    counts = sorted({min(tokens, most) for tokens in effort.elementwise_tokens})
    stored_as = _stored_as(kv_format, pool)
    kv = paged_kv(pool, model, stored_as)

    def trial(tokens: int) -> Trial:
        return _elementwise(pool, kv, stored_as, model, tokens)

    return Rates(("tokens",), device.rising_rates(counts, trial, effort))


def _elementwise(pool: Tensor, kv: Tensor, kv_format: KVFormat, model: ModelConfig, tokens: int) -> Trial:
    """Element-wise work of one Llama layer with the hidden size of `model`, on inputs from the pool."""
    heads, kv_heads, width = model.num_heads, model.num_kv_heads, model.hidden_size
    config = _llama(width, heads, kv_heads, model.head_dim, model.intermediate_size)
    qkvs = pieces(pool, tokens, config.qkv_size)
    hiddens = pieces(pool, tokens, width)
    turns = max(1, len(kv) * DEFAULT_KV_BLOCK_SIZE // tokens)
    slots = torch.arange(turns * tokens, device=pool.device) % (len(kv) * DEFAULT_KV_BLOCK_SIZE)
    angles = torch.rand(tokens, config.head_dim // 2, device=pool.device)
    rope, positions = (angles.cos(), angles.sin()), torch.arange(tokens, device=pool.device)
    weight = torch.ones(width, dtype=pool.dtype, device=pool.device)

    def layer(i: int) -> Tensor:
        ops.norm(hiddens[2 * i % len(hiddens)], weight, None, config.norm_eps)
        part = slots[i % turns * tokens :][:tokens]
        ops.rotary_store(qkvs[i % len(qkvs)], heads, kv, part, kv_format, scale=1.0, rope=rope, positions=positions)
        return ops.norm(hiddens[(2 * i + 1) % len(hiddens)], weight, None, config.norm_eps)

    return Trial(tokens * config.elementwise_bytes_per_token(pool.dtype.itemsize), layer)


def _llama(width: int, heads: int, kv_heads: int, head_dim: int, inner: int | None = None) -> ModelConfig:
    """Configuration of a Llama model of one layer."""
    return ModelConfig(
        architecture="LlamaForCausalLM",
        family="llama",
        num_layers=1,
        hidden_size=width,
        intermediate_size=inner or -(-width * 8 // 3 // 256) * 256,  # whole blocks of any quantized format
        num_heads=heads,
        num_kv_heads=kv_heads if heads % kv_heads == 0 else heads,
        head_dim=head_dim,
        vocab_size=1,
        max_position=1,
        norm="rms",
        norm_eps=1e-5,
        activation="silu",
        gated_mlp=True,
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        qk_norm=False,
        tied_embeddings=True,
        rope=RopeConfig(theta=10000.0),
        windows=(None,),
        embed_size=width,
    )
