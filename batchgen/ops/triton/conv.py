"""The causal convolution of state layers by Triton kernels, over packed tokens and states in slots.

Where sequences have few tokens each, one kernel computes the results of a sequence and then replaces its state. Where
they have many, tiles of tokens are computed at the same time, and a second kernel replaces the states.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchgen.ops.state_slots import StateSlots
from batchgen.ops.triton.launch import Launch, power_of_two
from batchgen.ops.triton.sequences import sequence_of_tile

# Tokens of a sequence, on average, up to which one program computes all of them, one by one.
_FEW_TOKENS = 4
_TILE_TOKENS, _TILE_CHANNELS = 32, 64
_CHANNELS = 256  # of a program that computes one token at a time


def causal_conv(  # the operands of one kernel
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    states: Tensor,
    slots: StateSlots,
    *,
    silu: bool,
    out: Tensor | None = None,
) -> Tensor:
    """Compute the causal convolution of each channel over the tokens of each sequence, and keep the last inputs.

    `state_dispatch.causal_conv` describes the arguments. The host does not wait for the GPU.
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    for launch in conv_launches(x, weight, bias, states, slots, silu, out):
        launch()
    return out


def conv_launches(  # the operands of one kernel
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    states: Tensor,
    slots: StateSlots,
    silu: bool,
    out: Tensor,
) -> list[Launch]:
    """The kernel launches of a convolution. They depend on the numbers of tokens and of sequences alone."""
    (tokens, channels), sequences, kernel = x.shape, len(slots.source), weight.shape[1]
    assert x.stride(1) == 1 and out.is_contiguous() and weight.is_contiguous()
    assert states.shape[1:] == (channels, kernel - 1) and states[0].is_contiguous()
    assert len(slots.target) == sequences and len(slots.starts) == sequences + 1
    args = {
        "x": x,
        "weight": weight,
        "bias": bias,
        "states": states,
        **slots._asdict(),
        "out": out,
        "num_sequences": sequences,
        "x_stride": x.stride(0),
        "state_stride": states.stride(0),
    }
    constants = {"CHANNELS": channels, "KERNEL": kernel, "LATER": power_of_two(kernel - 1), "SILU": silu}
    few_tokens = tokens <= _FEW_TOKENS * sequences
    by_sequence = Launch(
        _convolve_sequences,
        (sequences, triton.cdiv(channels, _CHANNELS)),
        args,
        constants | {"COMPUTES": few_tokens, "BLOCK": min(_CHANNELS, power_of_two(channels, 16))},
    )
    if few_tokens:
        return [by_sequence]
    tiles = tokens // _TILE_TOKENS + sequences
    by_tile = Launch(
        _convolve_tiles,
        (tiles, triton.cdiv(channels, _TILE_CHANNELS)),
        {name: args[name] for name in args if name != "target"},
        {name: constants[name] for name in constants if name != "LATER"}
        | {"TOKENS": _TILE_TOKENS, "BLOCK": _TILE_CHANNELS},
    )
    return [by_tile, by_sequence]


# Vectors of a batch's sequences may begin anywhere in a longer one.
@triton.jit(do_not_specialize=["num_sequences"], do_not_specialize_on_alignment=["source", "target", "starts"])
def _convolve_sequences(  # a kernel takes pointers and scalars only
    x,
    weight,
    bias,
    states,
    source,
    target,
    starts,
    out,
    num_sequences,
    x_stride,
    state_stride,
    CHANNELS: tl.constexpr,
    KERNEL: tl.constexpr,
    LATER: tl.constexpr,
    SILU: tl.constexpr,
    COMPUTES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Kernel: some channels of one sequence. With COMPUTES, the results of its tokens, one by one; then its state."""
    sequence = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < CHANNELS
    start, stop = tl.load(starts + sequence).to(tl.int64), tl.load(starts + sequence + 1).to(tl.int64)
    slot = tl.load(source + sequence).to(tl.int64)
    before = states + slot * state_stride
    if COMPUTES:
        for token in range(start, stop):
            _convolve(
                x, weight, bias, before, slot, out, start, token + tl.arange(0, 1), stop, channel, x_stride,
                CHANNELS, KERNEL, SILU,
            )  # fmt: skip
    # Place of each of the last inputs among those that the state had and the sequence's tokens.
    place = (stop - start + tl.arange(0, LATER))[:, None]
    is_kept = (tl.arange(0, LATER) < KERNEL - 1)[:, None]
    is_old = place < KERNEL - 1
    columns = channel[None, :]
    has_old = is_kept & is_old & (channel < tl.where(slot >= 0, CHANNELS, 0))[None, :]
    old = tl.load(before + columns * (KERNEL - 1) + place, mask=has_old, other=0.0)
    has_new = is_kept & (place >= KERNEL - 1) & inside[None, :]
    new = tl.load(x + (start + place - (KERNEL - 1)) * x_stride + columns, mask=has_new, other=0.0)
    after = tl.load(target + sequence).to(tl.int64)
    inputs = tl.where(is_old, old, new.to(states.dtype.element_ty))
    tl.debug_barrier()  # all that is read of a state that is replaced in its slot
    at = states + after * state_stride + columns * (KERNEL - 1) + tl.arange(0, LATER)[:, None]
    tl.store(at, inputs, mask=is_kept & (channel < tl.where(after >= 0, CHANNELS, 0))[None, :])


@triton.jit(do_not_specialize=["num_sequences"], do_not_specialize_on_alignment=["source", "starts"])
def _convolve_tiles(  # a kernel takes pointers and scalars only
    x,
    weight,
    bias,
    states,
    source,
    starts,
    out,
    num_sequences,
    x_stride,
    state_stride,
    CHANNELS: tl.constexpr,
    KERNEL: tl.constexpr,
    SILU: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Kernel: the results of a tile of tokens of one sequence and of some channels."""
    tile = tl.program_id(0)
    sequence = sequence_of_tile(starts, num_sequences, tile, TOKENS)
    start, stop = tl.load(starts + sequence).to(tl.int64), tl.load(starts + sequence + 1).to(tl.int64)
    token = start + (tile - start // TOKENS - sequence) * TOKENS + tl.arange(0, TOKENS)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(source + sequence).to(tl.int64)
    before = states + slot * state_stride
    _convolve(
        x, weight, bias, before, slot, out, start, token, stop, channel, x_stride, CHANNELS, KERNEL, SILU
    )  # fmt: skip


@triton.jit
def _convolve(  # a kernel takes pointers and scalars only
    x,
    weight,
    bias,
    before,
    slot,
    out,
    start,
    token,
    stop,
    channel,
    x_stride,
    CHANNELS: tl.constexpr,
    KERNEL: tl.constexpr,
    SILU: tl.constexpr,
):
    """Store the results of some tokens and channels. `before` is the state before the token `start`."""
    inside = channel < CHANNELS
    there = (token < stop)[:, None] & inside[None, :]
    has_state = (token < stop)[:, None] & (channel < tl.where(slot >= 0, CHANNELS, 0))[None, :]
    columns = channel[None, :]
    total = tl.zeros((token.shape[0], channel.shape[0]), tl.float32)
    if bias is not None:
        total += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)[None, :]
    for tap in tl.static_range(KERNEL):
        place = (token - start - (KERNEL - 1) + tap)[:, None]  # of the input, from the sequence's first token here
        is_old = place < 0
        new = tl.load(x + (start + place) * x_stride + columns, mask=there & (place >= 0), other=0.0)
        old = tl.load(before + columns * (KERNEL - 1) + KERNEL - 1 + place, mask=has_state & is_old, other=0.0)
        factor = tl.load(weight + channel * KERNEL + tap, mask=inside, other=0.0).to(tl.float32)
        total += tl.where(is_old, old.to(tl.float32), new.to(tl.float32)) * factor[None, :]
    if SILU:
        total = total / (1.0 + tl.exp(-total))
    tl.store(out + token[:, None] * CHANNELS + columns, total.to(out.dtype.element_ty), mask=there)
