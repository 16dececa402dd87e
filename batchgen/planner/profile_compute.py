"""What a compute device does: matrix products, attention and element-wise work, measured.

Everything is measured with the functions that jobs run (`ops`), on operands that rotate through a pool larger than
the caches, as weights and KV do in a sweep.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from batchgen import ops
from batchgen.attention_plan import SequenceSlice, plan_attention
from batchgen.hardware import ComputeRates, Rates
from batchgen.model_config import ModelConfig
from batchgen.planner.profile_timing import Device, Effort, Trial, pieces
from batchgen.rope import RopeConfig

# Calls a measurement under the name it has for people, and returns its result.
Timed = Callable[[str, Callable[[], Any]], Any]

_KV_BLOCK_TOKENS = 16
# Contexts decoded together differ by up to this much from their mean, as in a real block.
_CONTEXT_SPREAD_FRAC = 0.25
_PREFILL_GROUP = 4


@dataclass(frozen=True)
class _Shape:
    """The model measured with, of a size that one runs on such a device, and the tokens of its sweeps."""

    width: int
    kv_heads: int
    head_dim: int
    tokens: int


_SHAPES = {"cpu": _Shape(1024, 4, 64, 512), "cuda": _Shape(4096, 8, 128, 8192)}


@torch.inference_mode()
def measure_compute(device: Device, dtype_name: str, effort: Effort, timed: Timed) -> ComputeRates:
    """All rates of the device that runs the matrix products, for one dtype."""
    dtype = getattr(torch, dtype_name)
    where = f"in {dtype_name} on {device.kind}"
    pool = device.pool(dtype, effort)
    gemm = timed(f"matrix products {where}", lambda: gemm_rates(device, pool, effort))
    decode = timed(f"decode attention {where}", lambda: decode_rates(device, pool, effort))
    prefill = timed(f"prefill attention {where}", lambda: prefill_rates(device, pool, effort))
    elementwise = timed(f"element-wise work {where}", lambda: elementwise_rate(device, pool, effort))
    return ComputeRates(
        gemm_flops_per_s={dtype_name: gemm},
        prefill_attention_flops_per_s={dtype_name: prefill},
        decode_attention_bytes_per_s={dtype_name: decode},
        elementwise_bytes_per_s=elementwise,
        expand_bytes_per_s=None,  # 4-bit groups cannot be expanded yet
    )


@torch.inference_mode()
def measure_decode_attention(device: Device, dtype_name: str, effort: Effort, timed: Timed) -> ComputeRates:
    """What a CPU does beside a GPU: decode attention, for one dtype."""
    pool = device.pool(getattr(torch, dtype_name), effort)
    name = f"decode attention in {dtype_name} on {device.kind}"
    rates = timed(name, lambda: decode_rates(device, pool, effort))
    return ComputeRates(decode_attention_bytes_per_s={dtype_name: rates})


def gemm_rates(device: Device, pool: Tensor, effort: Effort) -> Rates:
    """FLOP/s of x [tokens, width] times weights [4 * width, width] transposed, over width and tokens.

    Where the pool would not hold eight such weights they have fewer rows, which changes the rate little.
    """

    def trial(width: int, tokens: int) -> Trial:
        rows = max(1, min(4 * width, pool.numel() // 8 // width))
        weights = pieces(pool, rows, width)
        x = torch.randn(tokens, width, device=pool.device).to(pool.dtype)
        return Trial(2 * tokens * rows * width, lambda i: F.linear(x, weights[i % len(weights)]))

    points = tuple(
        (width, device.rising_rates(effort.tokens, lambda tokens, w=width: trial(w, tokens), effort))
        for width in effort.widths
    )
    return Rates(("width", "tokens"), points)


def decode_rates(device: Device, pool: Tensor, effort: Effort) -> Rates:
    """Bytes of KV attended to per second by one query token per sequence, over group, batch and context."""
    shape = _SHAPES[device.kind]
    token_bytes = 2 * shape.kv_heads * shape.head_dim * pool.dtype.itemsize

    def trial(group: int, batch: int, context: int) -> Trial:
        if device.kind == "cuda":
            return _contiguous_decode(pool, shape, group, batch, context)
        spread = np.linspace(1 - _CONTEXT_SPREAD_FRAC, 1 + _CONTEXT_SPREAD_FRAC, batch) if batch > 1 else np.ones(1)
        contexts = np.rint(context * spread).astype(int).tolist()
        run = _paged_attention(pool, shape, group, [(1, n - 1) for n in contexts])
        return Trial(sum(contexts) * token_bytes, run)

    def over_context(group: int, batch: int) -> tuple:
        return device.rising_rates(effort.contexts, lambda context: trial(group, batch, context), effort)

    points = tuple(
        (group, tuple((batch, over_context(group, batch)) for batch in effort.batches)) for group in effort.groups
    )
    return Rates(("group", "batch", "context"), points)


def prefill_rates(device: Device, pool: Tensor, effort: Effort) -> Rates:
    """FLOP/s of causal attention of a whole prompt to itself, over its length; hidden keys are not counted."""
    shape = _SHAPES[device.kind]

    def trial(context: int) -> Trial:
        visible_keys = context * (context + 1) // 2
        flops = 4 * _PREFILL_GROUP * shape.kv_heads * shape.head_dim * visible_keys
        if device.kind == "cuda":
            return Trial(flops, _contiguous_prefill(pool, shape, context))
        return Trial(flops, _paged_attention(pool, shape, _PREFILL_GROUP, [(context, 0)]))

    return Rates(("context",), device.rising_rates(effort.prefill_contexts, trial, effort))


def _paged_attention(
    pool: Tensor, shape: _Shape, group: int, sequences: Sequence[tuple[int, int]]
) -> Callable[[int], Tensor]:
    """Attention of one layer for sequences of (new, cached) tokens, by the engine's own plans.

    Plan after plan goes through all KV blocks that the pool holds. Plans are made beforehand: a sweep makes one
    for all its layers.
    """
    heads, size = shape.kv_heads, _KV_BLOCK_TOKENS
    k_cache, v_cache = _paged_kv(pool, shape)
    used = [-(-(new + cached) // size) for new, cached in sequences]
    ends = np.cumsum(used).tolist()
    plans = []
    for turn in range(max(2, len(k_cache) // ends[-1])):
        slices = [
            SequenceSlice(new, cached, (np.arange(end - n, end) + turn * ends[-1]).astype(np.int32) % len(k_cache))
            for (new, cached), n, end in zip(sequences, used, ends, strict=True)
        ]
        key_bytes = heads * shape.head_dim * pool.dtype.itemsize
        plan = plan_attention(slices, [], block_size=size, key_bytes=key_bytes)
        plans.append(ops.prepare_attention(plan, heads, size, pool.dtype))
    tokens = sum(new for new, _ in sequences)
    q = torch.randn(tokens, group * heads, shape.head_dim).to(pool.dtype) * shape.head_dim**-0.5
    return lambda i: ops.paged_attention(q, k_cache, v_cache, plans[i % len(plans)])


def _paged_kv(pool: Tensor, shape: _Shape) -> tuple[Tensor, Tensor]:
    """One half of the pool as K, the other as V: [blocks, kv_heads, block tokens, head_dim]."""
    page = (shape.kv_heads, _KV_BLOCK_TOKENS, shape.head_dim)
    half = pool.numel() // 2
    blocks = half // (page[0] * page[1] * page[2])
    used = blocks * page[0] * page[1] * page[2]
    return pool[:used].view(blocks, *page), pool[half : half + used].view(blocks, *page)


# Until `ops` has CUDA kernels, a GPU's attention is measured on contiguous KV with torch's own function: the two
# functions below are to be replaced by `_paged_attention` then.


def _contiguous_decode(pool: Tensor, shape: _Shape, group: int, batch: int, context: int) -> Trial:
    """As many of the sequences as the pool holds K and V for."""
    half = pool.numel() // 2
    batch = max(1, min(batch, half // (shape.kv_heads * context * shape.head_dim)))
    keys = pieces(pool[:half], batch, shape.kv_heads, context, shape.head_dim)
    values = pieces(pool[half:], batch, shape.kv_heads, context, shape.head_dim)
    q = torch.randn(batch, group * shape.kv_heads, 1, shape.head_dim, device=pool.device).to(pool.dtype)

    def run(i: int) -> Tensor:
        return F.scaled_dot_product_attention(q, keys[i % len(keys)], values[i % len(keys)], enable_gqa=True)

    return Trial(batch * context * 2 * shape.kv_heads * shape.head_dim * pool.dtype.itemsize, run)


def _contiguous_prefill(pool: Tensor, shape: _Shape, context: int) -> Callable[[int], Tensor]:
    half = pool.numel() // 2
    keys = pieces(pool[:half], 1, shape.kv_heads, context, shape.head_dim)
    values = pieces(pool[half:], 1, shape.kv_heads, context, shape.head_dim)
    q = torch.randn(1, _PREFILL_GROUP * shape.kv_heads, context, shape.head_dim, device=pool.device).to(pool.dtype)

    def run(i: int) -> Tensor:
        k, v = keys[i % len(keys)], values[i % len(keys)]
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    return run


def elementwise_rate(device: Device, pool: Tensor, effort: Effort) -> float:
    """Activation bytes per second (`ModelConfig.elementwise_bytes_per_token`) of what a decoder layer does outside of
    matrix products and attention, the results of which are taken from the pool."""
    shape = _SHAPES[device.kind]
    config = _model(shape)
    tokens = max(1, min(shape.tokens, pool.numel() // (8 * config.intermediate_size)))
    heads, kv_heads, width = config.num_heads, config.num_kv_heads, config.hidden_size
    qkvs = pieces(pool, tokens, heads + 2 * kv_heads, config.head_dim)
    mlps = pieces(pool, tokens, 2 * config.intermediate_size)
    hiddens = pieces(pool, tokens, width)
    k_cache, v_cache = _paged_kv(pool, shape)
    turns = max(1, len(k_cache) * _KV_BLOCK_TOKENS // tokens)
    slots = np.arange(turns * tokens) % (len(k_cache) * _KV_BLOCK_TOKENS)
    rows = [ops.kv_rows(part, kv_heads, _KV_BLOCK_TOKENS).to(pool.device) for part in np.split(slots, turns)]
    angles = torch.rand(tokens, 1, config.head_dim // 2, device=pool.device)
    cos, sin = angles.cos(), angles.sin()
    weight = torch.ones(width, dtype=pool.dtype, device=pool.device)

    def layer(i: int) -> Tensor:
        hidden = hiddens[3 * i % len(hiddens)]
        ops.rms_norm(hidden, weight, config.norm_eps)
        q, k, v = qkvs[i % len(qkvs)].split((heads, kv_heads, kv_heads), dim=1)
        ops.apply_rope(q, cos, sin)
        ops.write_kv(k_cache, v_cache, rows[i % turns], ops.apply_rope(k, cos, sin), v)
        hidden = hidden + hiddens[(3 * i + 1) % len(hiddens)]
        ops.rms_norm(hidden, weight, config.norm_eps)
        ops.silu_and_mul(mlps[i % len(mlps)])
        return hidden + hiddens[(3 * i + 2) % len(hiddens)]

    work = tokens * config.elementwise_bytes_per_token(pool.dtype.itemsize)
    return device.rate(Trial(work, layer), effort)


def _model(shape: _Shape) -> ModelConfig:
    """A llama of one layer."""
    return ModelConfig(
        architecture="LlamaForCausalLM",
        family="llama",
        num_layers=1,
        hidden_size=shape.width,
        intermediate_size=3 * shape.width,
        num_heads=shape.width // shape.head_dim,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
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
        embed_size=shape.width,
    )
