"""Triton's kernels in torch, for a played card: each does to its operands what all programs of a launch do.

They take a kernel's arguments and constants by name. Triton's interpreter and cards hold kernels and these to the same
checks (tests/ops/triton_checks.py).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

_LOG2_E = math.log2(math.e)


# Norms and gates.


def _norm(x, weight, bias, out, eps, N, **_):
    value = x.float()
    if bias is not None:
        value = value - value.mean(1, keepdim=True)
    value = value * torch.rsqrt(value.square().mean(1, keepdim=True) + eps) * weight.float()
    (out if out.dim() == 2 else out.view(-1, N)).copy_(value if bias is None else value + bias.float())


def _gate(x, out, ACTIVATION, **_):
    out.copy_(_activated(*x.float().chunk(2, 1), ACTIVATION))


def _activated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    if activation == "gelu_tanh_mul":
        return F.gelu(gate, approximate="tanh") * up
    if activation == "gelu_mul":
        return F.gelu(gate) * up
    if activation == "swiglu_oai_mul":
        gate = gate.clamp(max=7)
        return gate * torch.sigmoid(1.702 * gate) * (up.clamp(-7, 7) + 1)
    return F.silu(gate) * up


def _sigmoid_gate(x, gates, out, **_):
    out.copy_(x.float() * torch.sigmoid(gates.float()))


def _gated_norm(x, z, weight, out, eps, HEADS, DIM, **_):
    value = F.rms_norm(x.float(), (DIM,), weight.float(), eps)
    out.copy_(value * F.silu(z.float().unflatten(1, (HEADS, DIM))))


# Packed weights.


def _code_rows(x, codes, scales, sign, **_):
    from batchgen.ops import int8

    values, scale = int8.to_codes(int8.rotate(x) if sign[0] < 0 else x)
    codes.copy_(values)
    scales.copy_(scale[:, 0])


def _multiply_packed(x, x_scales, weight, bias, residual, out, KIND, VALUES, ACTIVATION, IS_GATED, **_):
    from batchgen.ops import reference

    y = _products(x, x_scales, weight, KIND, VALUES)
    y = y if bias is None else y + bias.float()
    if IS_GATED:
        y = _activated(*y.chunk(2, 1), ACTIVATION)
    elif ACTIVATION is not None:
        y = reference._ACTIVATIONS[ACTIVATION](y)
    out.copy_(y if residual is None else y + residual.float())


def _products(x: Tensor, x_scales: Tensor | None, weight: Tensor, kind: str, values: int) -> Tensor:
    """Products of rows of x, which are codes if the weight's rows are, with the rows of a weight: fp32."""
    from batchgen.ops import cpp, int8, quant

    if kind == "int8":
        codes, scales = int8.split(weight, x.shape[1])
        return (x.double() @ codes.double().T).float() * scales.abs().view(-1) * x_scales[:, None]
    numbers = quant.dequantize(weight, x.shape[1], dtype=x.dtype) if kind == "int4" else weight
    if values:
        numbers = torch.empty(len(weight), x.shape[1], dtype=x.dtype)
        cpp.unpack_blocks(_packing(kind, values), weight.contiguous(), numbers)
    return F.linear(x.float(), numbers.float())


def _packing(kind: str, values: int) -> str:
    """The name by which C++ kernels know a coding of blocks."""
    return f"{kind.upper()}_G{values}" if kind in ("fp8", "w4") else kind.upper()


def _block_rows(table, index, out, WIDTH, KIND, VALUES, **_):
    from batchgen.ops import cpp

    cpp.unpack_blocks(_packing(KIND, VALUES), table.view(-1, WIDTH)[index], out)


# Rows of logits.


def _argmax(logits, index, maximum, lse, if_finite, otherwise, **_):
    value = logits.masked_fill(logits.isnan(), -torch.inf)
    maximum.copy_(value.amax(1))
    index.copy_((value == maximum[:, None]).byte().argmax(1))
    if lse is not None:
        lse.copy_(value.logsumexp(1))
    if if_finite is not None:
        if_finite.copy_(index.where(logits.isfinite().all(1), otherwise))


def _forbid(logits, columns, rows, allowed, **_):
    column = torch.arange(columns)
    allows = (allowed[:, column // 32] >> (column % 32)) & 1
    for row, allow in zip(rows.tolist(), allows, strict=True):
        logits[row].masked_fill_(allow == 0, -torch.inf)


def _draw(logits, parameters, out, **_):
    from batchgen.ops import cpp
    from batchgen.ops.sampling import Draws

    rows, temperature, top_k, *rest = parameters.numpy()
    cpp.draw(logits, rows.astype("int64"), Draws(temperature.astype("float32"), top_k.astype("int64"), *rest), out)


# Rows by an index.


def _copy_rows(target, source, index, words, GATHERS, **_):
    target, source = target.view(-1, words), source.view(-1, words)
    if GATHERS:
        target[: len(index)] = source[index]
    else:
        target[index] = source[: len(index)]


# Packed rows.


def _dequantize(packed, out, N, WIDTH, BITS, **_):
    from batchgen.ops import quant

    quant.dequantize(packed.view(-1, WIDTH), N, out.view(-1, N), bits=BITS)


def _quantize(x, packed, N, WIDTH, BITS=8, **_):
    from batchgen.ops import quant

    packed.view(-1, WIDTH).copy_(quant.quantize(x.view(-1, N), BITS))


# Rotary embeddings and attention.


def _rotary_store(
    qkv, q, k, v, slots, positions, cos, sin, q_norm, k_norm, rotation, scale, eps,
    HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, BITS, **_,
):  # fmt: skip
    queries, keys, values = qkv.unflatten(1, (-1, HEAD_DIM)).split((HEADS, KV_HEADS, KV_HEADS), 1)
    queries, keys = (
        _turned(x.float(), norm, eps, None if cos is None else (cos[positions], sin[positions]))
        for x, norm in ((queries, q_norm), (keys, k_norm))
    )
    queries = queries * scale
    if rotation is not None:
        queries, keys = queries @ rotation, keys @ rotation
    q.copy_(queries)
    if slots is None:
        k.copy_(keys)
        v.copy_(values)
        return
    kept = slots >= 0
    block, offset = slots[kept] // BLOCK_SIZE, slots[kept] % BLOCK_SIZE
    for i, x in enumerate((keys, values)):
        k[block, i, :, offset] = _packed(x[kept].float(), BITS) if BITS else x[kept].to(k.dtype)


def _turned(x: Tensor, norm: Tensor | None, eps: float, rope: tuple[Tensor, Tensor] | None) -> Tensor:
    """Heads [tokens, heads, head_dim], normed and rotated."""
    if norm is not None:
        x = F.rms_norm(x, (x.shape[-1],), norm.float(), eps)
    if rope is None:
        return x
    (first, second), (cos, sin) = x.chunk(2, -1), (table[:, None] for table in rope)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def _packed(x: Tensor, bits: int) -> Tensor:
    from batchgen.ops import quant

    return quant.quantize(x, bits)


def _attend(
    q, kv, out, partial, stats, items, table, sinks, KV_HEADS, GROUP, HEAD_DIM, BLOCK_SIZE, BITS, SOFTCAP, **_
):  # fmt: skip
    from batchgen.ops import quant

    for first, count, first_key, last_key, causal, window, table_at, partial_row in items.tolist():
        if not count:
            continue
        key = torch.arange(first_key, last_key)
        rows = kv[table[table_at + key // BLOCK_SIZE], :, :, key % BLOCK_SIZE]  # [keys, 2, kv_heads, width]
        rows = quant.dequantize(rows, HEAD_DIM, bits=BITS) if BITS else rows.float()
        k, v = rows.unbind(1)
        queries = q[first : first + count].float().unflatten(1, (KV_HEADS, GROUP))
        scores = torch.einsum("tkgd,nkd->tkgn", queries, k)
        scores = (SOFTCAP * torch.tanh(scores / SOFTCAP) if SOFTCAP > 0 else scores) * _LOG2_E
        position = (causal + torch.arange(count))[:, None]
        seen = (key <= position) & (key > position - window)
        scores = scores.masked_fill(~seen[:, None, None], -torch.inf).flatten(1, 2)  # [tokens, heads, keys]
        most = scores.amax(-1) if len(key) else torch.full(scores.shape[:2], -torch.inf)
        weight = torch.exp2(scores - _base(most)[..., None])
        weights = weight.sum(-1)
        sums = torch.einsum("tkgn,nkd->tkgd", weight.unflatten(1, (KV_HEADS, GROUP)), v).flatten(1, 2)
        if partial_row >= 0:
            partial[partial_row : partial_row + count] = sums
            stats[partial_row : partial_row + count] = torch.stack((most, weights), -1)
        else:
            out[first : first + count] = _divided(sums, weights, most, sinks).to(out.dtype)


def _base(most: Tensor) -> Tensor:
    return most.masked_fill(most == -torch.inf, 0.0)


def _divided(sums: Tensor, weights: Tensor, most: Tensor, sinks: Tensor | None) -> Tensor:
    if sinks is not None:
        weights = weights + torch.exp2(sinks.float() * _LOG2_E - most)
    return sums / weights.masked_fill(weights <= 0, 1.0)[..., None]


def _merge(out, partial, stats, tokens, starts, rows, sinks, **_):
    bounds = starts.tolist()
    for token, (start, stop) in zip(tokens.tolist(), itertools.pairwise(bounds), strict=False):
        if token < 0:
            continue
        parts = rows[start:stop].long()
        most = stats[parts, :, 0].amax(0)
        weight = torch.exp2(stats[parts, :, 0] - _base(most))
        sums, weights = (partial[parts] * weight[..., None]).sum(0), (stats[parts, :, 1] * weight).sum(0)
        out[token] = _divided(sums, weights, most, sinks).to(out.dtype)


# Experts.


def _sort(chosen, order, starts, places, **_):
    experts = chosen.flatten()
    order.copy_(experts.argsort(stable=True))
    if places is not None:
        places[order.long()] = torch.arange(len(order), dtype=places.dtype)
    starts.copy_(torch.searchsorted(experts.sort().values, torch.arange(len(starts))))


def _multiply(x, x_scales, weight, bias, out, order, starts, CHOICES, COLUMNS, KIND, VALUES, ACTIVATION, **_):
    matrices = 1 if ACTIVATION is None else 2
    for expert, (start, stop) in enumerate(itertools.pairwise(starts.tolist())):
        assigned = order[start:stop].long()
        columns = slice(expert * matrices * COLUMNS, (expert + 1) * matrices * COLUMNS)
        rows = torch.arange(start, stop) if ACTIVATION is None else assigned // CHOICES
        product = _products(x[rows], None if x_scales is None else x_scales[rows], weight[columns], KIND, VALUES)
        if bias is not None:
            product += bias.flatten()[columns].float()
        if ACTIVATION is None:
            out[assigned] = product.to(out.dtype)
        else:
            out[start:stop] = _activated(*product.chunk(2, 1), ACTIVATION).to(out.dtype)


def _add(made, shares, total, places, CHOICES, **_):
    made = made if places is None else made[places.long()]
    total.copy_((made.float().unflatten(0, (-1, CHOICES)) * shares.view(-1, CHOICES, 1)).sum(1))


# State layers. A slot below 0 has no state, or keeps none.


def _state(states: Tensor, slot: int) -> Tensor:
    return states[slot].clone() if slot >= 0 else torch.zeros_like(states[0])


def _convolve_tiles(x, weight, bias, states, source, starts, out, SILU, **_):
    bounds = starts.tolist()
    for slot, (start, stop) in zip(source.tolist(), itertools.pairwise(bounds), strict=True):
        inputs = torch.cat((_state(states, slot).t().float(), x[start:stop].float()))
        if stop > start:
            y = torch.einsum("tck,ck->tc", inputs.unfold(0, weight.shape[1], 1), weight.float())
            y = y if bias is None else y + bias.float()
            out[start:stop] = (F.silu(y) if SILU else y).to(out.dtype)


def _convolve_sequences(x, states, source, target, starts, COMPUTES, **others):
    if COMPUTES:
        _convolve_tiles(x=x, states=states, source=source, starts=starts, **others)
    bounds = starts.tolist()
    after = [
        torch.cat((_state(states, slot).t(), x[start:stop].to(states.dtype)))[stop - start :].t()
        for slot, (start, stop) in zip(source.tolist(), itertools.pairwise(bounds), strict=True)
    ]
    _keep(states, target, after)


def _keep(states: Tensor, target: Tensor, after: list[Tensor]) -> None:
    for slot, state in zip(target.tolist(), after, strict=True):
        if slot >= 0:
            states[slot] = state


def _update_tokens(qkv, g, beta, states, source, target, starts, out, few_tokens, KEY_HEADS, **_):
    _update(lambda tokens: tokens <= few_tokens, qkv, g, beta, states, source, target, starts, out, KEY_HEADS)


def _prepare_chunks(g, beta, factors, **_):
    factors[0], factors[1] = g, beta  # all that `_update_chunks` lacks


def _update_chunks(qkv, states, source, target, starts, out, factors, few_tokens, KEY_HEADS, **_):
    g, beta = factors[:2]
    _update(lambda tokens: tokens > few_tokens, qkv, g, beta, states, source, target, starts, out, KEY_HEADS)


def _update(is_meant, qkv, g, beta, states, source, target, starts, out, key_heads):
    """The delta rule, for the sequences whose number of tokens a kernel is meant for."""
    from batchgen.ops import state_reference
    from batchgen.ops.state_slots import StateSlots

    bounds, first = starts.tolist(), torch.zeros(1, dtype=torch.int64)
    for slot, to, (start, stop) in zip(source.tolist(), target.tolist(), itertools.pairwise(bounds), strict=True):
        if is_meant(stop - start):
            state, tokens = _state(states, slot)[None], slice(start, stop)
            if stop > start:
                slots = StateSlots(first, first, torch.tensor([0, stop - start]))
                state_reference.delta_rule(
                    qkv[tokens], g[tokens], beta[tokens], state, slots, key_heads=key_heads, out=out[tokens]
                )
            if to >= 0:
                states[to] = state[0]


def _compute_gates(a, b, a_log, dt_bias, g, beta, **_):
    from batchgen.ops import state_reference

    for target, value in zip((g, beta), state_reference.delta_gates(a, b, a_log, dt_bias), strict=True):
        target.copy_(value)


# What a kernel is called, and its counterpart.
COUNTERPARTS: dict[str, Callable[..., None]] = {
    function.__name__: function
    for function in (
        _norm, _gate, _sigmoid_gate, _gated_norm, _argmax, _forbid, _draw, _copy_rows, _dequantize, _quantize,
        _rotary_store, _attend, _merge, _sort, _multiply, _add, _convolve_tiles, _convolve_sequences, _update_tokens,
        _prepare_chunks, _update_chunks, _compute_gates, _code_rows, _multiply_packed, _block_rows,
    )
} | {"_quantize_heads": _quantize}  # fmt: skip
