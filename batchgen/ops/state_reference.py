"""The operations of state layers in torch, on any device: Gated DeltaNet and the short convolution.

It is the reference for the kernels, and used without kernels. A state layer keeps one state for each sequence, however
long it is, in a slot of a pool. `state_dispatch` describes the arguments of each operation. All sums are in fp32.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from batchgen.ops.state_chunks import CHUNK
from batchgen.ops.state_slots import StateSlots

_NORM_EPS = 1e-6


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    states: Tensor,
    slots: StateSlots,
    *,
    silu: bool,
    out: Tensor | None = None,
) -> Tensor:
    """Compute the causal convolution of each channel over the tokens of each sequence, as `state_dispatch` has it."""
    out = x.new_empty(x.shape) if out is None else out
    before = _gathered(states, slots.source)
    bounds = slots.starts.tolist()
    for i, (start, stop) in enumerate(itertools.pairwise(bounds)):
        inputs = torch.cat((before[i].t(), x[start:stop]))  # [kernel - 1 + tokens, channels]
        if stop > start:
            windows = inputs.float().unfold(0, weight.shape[1], 1)  # [tokens, channels, kernel]
            y = torch.einsum("tck,ck->tc", windows, weight.float())
            y = y if bias is None else y + bias.float()
            out[start:stop] = F.silu(y) if silu else y
        states[slots.target[i]] = inputs[len(inputs) - weight.shape[1] + 1 :].t()
    return out


def delta_gates(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the log decay and the strength of each update (`state_dispatch.delta_gates`), both in fp32."""
    g = -a_log.float().exp() * F.softplus(a.float() + dt_bias.float())
    return g, b.float().sigmoid()


def delta_rule(  # the operands of one kernel
    qkv: Tensor,
    g: Tensor,
    beta: Tensor,
    states: Tensor,
    slots: StateSlots,
    *,
    key_heads: int,
    out: Tensor | None = None,
) -> Tensor:
    """Update the states of Gated DeltaNet and read from them (`state_dispatch.delta_rule`).

    Sequences with one token are computed together, the others one by one in chunks.
    """
    _, value_heads, key_dim, value_dim = states.shape
    out = qkv.new_empty(len(qkv), value_heads, value_dim) if out is None else out
    q, k, v = qkv.float().split((key_heads * key_dim, key_heads * key_dim, value_heads * value_dim), dim=1)
    group = value_heads // key_heads
    q, k = (_normed(x.unflatten(1, (key_heads, key_dim))).repeat_interleave(group, 1) for x in (q, k))
    q = q * key_dim**-0.5
    # By head: [value_heads, tokens, dim], and [value_heads, tokens].
    q, k, v = (x.transpose(0, 1) for x in (q, k, v.unflatten(1, (value_heads, value_dim))))
    g, beta = g.t(), beta.t()

    after = _gathered(states, slots.source).float()
    bounds = slots.starts.tolist()
    lengths = [stop - start for start, stop in itertools.pairwise(bounds)]
    single = [i for i, length in enumerate(lengths) if length == 1]
    if single:
        tokens, rows = slots.starts[single].long(), torch.tensor(single, device=qkv.device)
        each = (x[:, tokens].transpose(0, 1).flatten(0, 1).unsqueeze(1) for x in (q, k, v, g, beta))
        result, state = _chunk(each, after[rows].flatten(0, 1))
        out[tokens] = result.view(len(single), value_heads, value_dim).to(out.dtype)
        after[rows] = state.view(len(single), *after.shape[1:])
    for i, (start, length) in enumerate(zip(bounds[:-1], lengths, strict=True)):
        if length == 1:
            continue
        for first in range(start, start + length, CHUNK):
            some = slice(first, min(first + CHUNK, start + length))
            result, after[i] = _chunk((x[:, some] for x in (q, k, v, g, beta)), after[i])
            out[some] = result.transpose(0, 1).to(out.dtype)
    states[slots.target.long()] = after.to(states.dtype)
    return out


def _normed(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _NORM_EPS)


def _chunk(operands: Iterable[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
    """Update states by some tokens each, as matrix products (Gated Delta Networks, Yang et al., 2024, section 3.3).

    Args:
        operands: Queries and keys [heads, tokens, key_dim], values [heads, tokens, value_dim], log decay and strength
            of each update [heads, tokens].
        state: States before the first token, [heads, key_dim, value_dim].

    Returns:
        Results [heads, tokens, value_dim], and the states after the last token.
    """
    q, k, v, g, beta = operands
    since_start = g.cumsum(1)
    # decay[i, j]: of what token j adds, the part that is left at token i.
    later = torch.ones(g.shape[1], g.shape[1], dtype=torch.bool, device=g.device).triu(1)
    decay = (since_start[:, :, None] - since_start[:, None, :]).masked_fill(later, -torch.inf).exp()
    from_start = since_start.exp()[..., None]
    # Each token adds beta (v - what the state holds for k); that includes what the tokens before it add.
    system = (k @ k.transpose(1, 2)) * decay * beta[..., None]
    missing = beta[..., None] * (v - from_start * (k @ state))
    added = torch.linalg.solve_triangular(system, missing, upper=False, unitriangular=True)
    result = from_start * (q @ state) + ((q @ k.transpose(1, 2)) * decay) @ added
    to_end = (since_start[:, -1:] - since_start).exp()[..., None]
    return result, from_start[:, -1:] * state + (k * to_end).transpose(1, 2) @ added


def _gathered(states: Tensor, source: Tensor) -> Tensor:
    """States of sequences before their first token, [sequences, ...]; zeros for those whose source is -1."""
    before = states[source.long().clamp(min=0)]
    return before.masked_fill_((source < 0).view(-1, *[1] * (states.ndim - 1)), 0)


def gated_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """Compute RMSNorm(x) * weight * silu(z) of each head (`state_dispatch.gated_norm`)."""
    y = F.rms_norm(x.float(), (x.shape[-1],), weight.float(), eps) * F.silu(z.reshape(x.shape).float())
    return y.to(x.dtype) if out is None else out.copy_(y)


def gated(x: Tensor, gate: Tensor, out: Tensor | None = None) -> Tensor:
    """Compute x * sigmoid(gate) (`state_dispatch.gated`)."""
    y = x.float() * torch.sigmoid(gate.reshape(x.shape).float())
    return y.to(x.dtype) if out is None else out.copy_(y)
