"""Measuring of what a device does for the states of sequences: updates by one token, and by the chunks of prompts.

The measured functions are those that jobs run (`ops`). States rotate through a pool larger than the caches, as they do
in a sweep.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from batchgen.core.dtypes import dtype_name
from batchgen.core.hardware import Rates
from batchgen.models.state_layers import DeltaNet, StateRow
from batchgen.ops import state_dispatch as ops
from batchgen.ops.state_slots import StateSlots
from batchgen.profiler.timing import Device, Effort, Trial
from batchgen.runtime.memory.transfers import untouched

# A usual shape, of Qwen3-Next and the mixtures of Qwen3.5, for profiles of no model.
USUAL = DeltaNet(key_heads=16, value_heads=32, key_dim=128, value_dim=128, kernel=4)


def update_rates(device: Device, shape: DeltaNet, state_dtype: str, dtype: torch.dtype, effort: Effort) -> Rates:
    """Bytes of states that are read and written per second where each sequence has one token, by their number.

    Args:
        device: The device that updates the states.
        shape: Shape of a state layer.
        state_dtype: Format of the matrix of a state.
        dtype: Dtype of activations.
        effort: Grid points and time limits.
    """
    layer = _Layer(device, shape, state_dtype, dtype, effort)

    def trial(sequences: int) -> Trial:
        count = min(sequences, len(layer.states))
        return Trial(2 * count * layer.row.num_bytes, layer.run([1] * count))

    return Rates(("batch",), device.rising_rates(effort.batches, trial, effort))


def prefill_rates(device: Device, shape: DeltaNet, dtype: torch.dtype, effort: Effort) -> Rates:
    """FLOP/s of a state's update by a whole prompt (`DeltaNet.prefill_flops`), by the prompt's length.

    Args:
        device: The compute device.
        shape: Shape of a state layer.
        dtype: Dtype of activations.
        effort: Grid points and time limits.
    """
    layer = _Layer(device, shape, "float32", dtype, effort)

    def trial(tokens: int) -> Trial:
        return Trial(tokens * shape.prefill_flops, layer.run([tokens]))

    return Rates(("context",), device.rising_rates(effort.prefill_contexts, trial, effort))


class _Layer:
    """A layer of Gated DeltaNet between its projections, with states that are spread over a pool."""

    def __init__(self, device: Device, shape: DeltaNet, state_dtype: str, dtype: torch.dtype, effort: Effort) -> None:
        self.shape, self.device, self.dtype = shape, device.kind, dtype
        self.row = StateRow(shape, state_dtype, dtype_name(dtype))
        pool, size = device.pool(getattr(torch, state_dtype), effort), math.prod(shape.matrix_shape)
        pool = pool.repeat(-(-size // pool.numel())) if pool.numel() < size else pool
        states = pool[: pool.numel() // size * size].view(-1, *shape.matrix_shape)
        # Huge pages, as the engine's pools have: a state is on many small ones.
        self.states = untouched(tuple(states.shape), states.dtype).copy_(states) if device.kind == "cpu" else states
        self.inputs = torch.zeros(len(self.states), *self.row.inputs_shape, dtype=dtype, device=device.kind)

    def run(self, lengths: Sequence[int]) -> Callable[[int], Tensor]:
        """A function that runs the layer on other slots at each call, for sequences with so many tokens."""
        shape, tokens, count = self.shape, sum(lengths), len(lengths)
        starts = torch.tensor([0, *itertools.accumulate(lengths)], device=self.device)
        slots = torch.arange(len(self.states), device=self.device).split(count)
        turns = len(self.states) // count
        x = torch.randn(tokens, shape.channels, device=self.device).to(self.dtype)
        weight = torch.randn(shape.channels, shape.kernel, device=self.device).to(self.dtype)
        g, beta = (torch.rand(tokens, shape.value_heads, device=self.device) for _ in range(2))
        g.neg_()

        def layer(i: int) -> Tensor:
            at = StateSlots(slots[i % turns], slots[i % turns], starts)
            qkv = ops.causal_conv(x, weight, None, self.inputs, at, silu=True)
            return ops.delta_rule(qkv, g, beta, self.states, at, key_heads=shape.key_heads)

        return layer
