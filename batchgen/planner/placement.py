"""Placements of weights, KV and activations: as counts of layers, sequences and micro-batches, and as fractions.

Both a placement of numbers and the unknowns of the MIP (mip.py) become fractions and buffers by `placement_of`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import singledispatch
from typing import Generic, Protocol, TypeVar

from batchgen.core.kv_placement import KVPlacement
from batchgen.planner.linear import Linear, number, total
from batchgen.planner.problem import CostInputs
from batchgen.planner.sizes import Batches, Sizes

# A micro-batch with shorter prompts of sequences that the CPU attends to may be cut, for their states to be staged.
_PROMPT_TOKENS = 64

Value = TypeVar("Value", bound=Linear)


@dataclass(frozen=True)
class Placement:
    """A placement as fractions: each group adds up to 1.

    FlexGen's wg wc wd, cg cc cd, hg hc (section 4.2) with the KV placements of docs/tiers.md, section KV, of the
    sequences that are not deferred, whose number is fixed (`CostInputs.deferral`). Members are numbers, or linear
    expressions. Those below are no fractions: they size buffers.

    Attributes:
        streamed_peak, disk_peak: the largest fraction of any one layer that is not on the GPU, or is on disk.
        staged_blocks: KV blocks of one buffer on the compute device, for sequences that live elsewhere.
        disk_blocks: KV blocks of one buffer in host memory, for KV from and to disk.
        staged_states, disk_states: state rows of the same buffers, of a model with state layers.
        delegates: 1 if the CPU attends to any sequence for a GPU.
        acts_wait: 1 if the activations of any micro-batch wait in host memory.
        stages: 1 if KV of any sequence comes to the GPU for its attention.
        embed_gpu: 1 if the input embeddings are on the GPU; only memory depends on it, as few rows come over otherwise.
        head_disk: 1 if the output matrix is on disk, which is for a model without a GPU.
        embed_disk: 1 if the table of the input embeddings is on disk, where it is not the output matrix too.
        experts_disk: fraction of the bytes of all experts that are on disk.
        needs_store: 1 if weights need a weight store that is written first.
    """

    w_gpu: Linear
    w_cpu: Linear
    w_disk: Linear
    kv_gpu: Linear
    kv_cpu: Linear
    kv_streamed: Linear
    kv_disk: Linear
    act_gpu: Linear
    act_cpu: Linear
    head_gpu: Linear
    head_cpu: Linear
    streamed_peak: Linear
    disk_peak: Linear
    staged_blocks: Linear = 0
    disk_blocks: Linear = 0
    staged_states: Linear = 0
    disk_states: Linear = 0
    delegates: Linear = 0
    acts_wait: Linear = 0
    stages: Linear = 0
    embed_gpu: Linear = 0
    head_disk: Linear = 0
    embed_disk: Linear = 0
    experts_disk: Linear = 0
    needs_store: Linear = 0

    @property
    def w_streamed(self) -> Linear:
        """Fraction of the weights that come over the bus in every sweep."""
        return self.w_cpu + self.w_disk

    def reads_table(self, s: Sizes) -> Linear:
        """1 if the rows of a sweep's tokens are read from an embedding table on disk."""
        return self.head_disk if s.model.tied_embeddings else self.embed_disk


@dataclass(frozen=True)
class Amounts(Generic[Value]):
    """A placement as counts of layers, sequences and micro-batches, which are numbers or unknowns.

    Attributes:
        weight_layers: group of tensors -> layers on (GPU, CPU, disk).
        kv_seqs: KV placement -> sequences.
        activation_batches: micro-batches whose activations wait on (GPU, CPU) between layers.
        head_on_gpu: 1 if the output matrix is on the GPU.
        head_on_disk: 1 if the output matrix is on disk.
        embeddings_on_gpu: 1 if the input embeddings are on the GPU.
        embeddings_on_disk: 1 if their table is on disk, and is not the output matrix too.
        kv_layers: layers in which KV of placement "streamed" stays on the GPU.
    """

    weight_layers: Mapping[str, tuple[Value, Value, Value]]
    kv_seqs: Mapping[str, Value]
    activation_batches: tuple[Value, Value]
    head_on_gpu: Value
    head_on_disk: Linear = 0
    embeddings_on_gpu: float = 0
    embeddings_on_disk: Linear = 0
    kv_layers: Linear = 0


@dataclass(frozen=True)
class Counts(Amounts[float]):
    """A placement as numbers of layers, sequences and micro-batches, which become fields of `core.plan.Policy`."""

    head_on_disk: float = 0
    embeddings_on_disk: float = 0
    kv_layers: float = 0

    def placement(self, s: CostInputs) -> Placement:
        """The placement as fractions, and the buffers that it needs."""
        return placement_of(s, self, WHOLE_NUMBERS)


class Rounding(Protocol):
    """Sizes that follow from amounts, but are not linear in them."""

    def any(self, amounts: Sequence[Linear], most: int) -> Linear:
        """1 if any of the amounts, which add up to at most `most`, is above 0; else 0."""

    def least(self, most: int, *shares: tuple[Linear, float]) -> Linear:
        """The least whole number, at most `most`, that no share exceeds; a share is an amount over a number."""

    def if_any(self, amounts: Sequence[Linear], most: int, value: Linear, highest: float, lowest: Linear) -> Linear:
        """The size `value` where any of the amounts is above 0, else 0.

        For a MIP the result is a variable that is at least as large as this, and as `lowest`.

        Args:
            amounts: Numbers or linear expressions, none of them below 0.
            most: The most that the amounts add up to.
            value: The size where any amount is above 0.
            highest: The most that `value` can be.
            lowest: A lower bound of the result, whatever the amounts are.
        """


class _WholeNumbers:
    """Sizes of buffers of a placement that is known."""

    def any(self, amounts: Sequence[Linear], most: int) -> int:
        return int(any(number(amount) > 0 for amount in amounts))

    def least(self, most: int, *shares: tuple[Linear, float]) -> int:
        return max(math.ceil(number(amount) / parts) for amount, parts in shares)

    def if_any(self, amounts: Sequence[Linear], most: int, value: Linear, highest: float, lowest: Linear) -> Linear:
        return value if self.any(amounts, most) else 0


WHOLE_NUMBERS = _WholeNumbers()


@singledispatch  # benchmarks/flexgen_check.py has another one, for FlexGen's runtime
def placement_of(s: CostInputs, amounts: Amounts[Value], rounding: Rounding) -> Placement:
    """The fractions of a placement, and the sizes of its buffers."""
    layers, batches = s.model.num_layers, s.num_gpu_batches
    groups, kv = amounts.weight_layers, {p.value: amounts.kv_seqs.get(p, 0) for p in KVPlacement}
    staying = amounts.kv_layers / layers  # of the KV of placement "streamed"

    def fraction(sizes: Mapping[str, int], tier: int) -> Linear:
        held = total(groups[group][tier] * size for group, size in sizes.items())
        return held / (layers * sum(sizes.values())) if sizes else 0

    def fullest(sizes: Mapping[str, int], tiers: Sequence[int]) -> Linear:
        """Fraction of a buffer that holds what any layer has in the tiers."""
        used = [rounding.any([groups[group][tier] for tier in tiers], layers) * size for group, size in sizes.items()]
        return total(used) * (1 / sum(sizes.values()))

    return Placement(
        w_gpu=fraction(s.group_bytes, 0),
        w_cpu=fraction(s.group_bytes, 1),
        w_disk=fraction(s.group_bytes, 2),
        experts_disk=fraction(s.expert_bytes, 2),
        kv_gpu=kv["gpu"] / s.swept_seqs + staying,
        kv_cpu=kv["cpu"] / s.swept_seqs,
        kv_streamed=kv["streamed"] / s.swept_seqs - staying,
        kv_disk=kv["disk"] / s.swept_seqs,
        act_gpu=amounts.activation_batches[0] / batches,
        act_cpu=amounts.activation_batches[1] / batches,
        head_gpu=amounts.head_on_gpu,
        head_cpu=1 - amounts.head_on_gpu - amounts.head_on_disk,
        head_disk=amounts.head_on_disk,
        embed_disk=amounts.embeddings_on_disk,
        embed_gpu=amounts.embeddings_on_gpu,
        streamed_peak=fullest(s.slot_group_bytes, (1, 2)),
        disk_peak=fullest(s.disk_group_bytes, (2,)),
        needs_store=_needs_store(s, amounts, rounding),
        **_buffers(s, kv, amounts.activation_batches[1], rounding),
    )


def _needs_store(s: CostInputs, amounts: Amounts[Value], rounding: Rounding) -> Linear:
    """1 if a weight store must be written: there is none, and weights stay on disk or are in 4 bits; else 0."""
    if not s.loading.store_bytes:
        return 0
    if s.must_write_store:
        return 1
    layers = [(on_disk, s.model.num_layers) for _, _, on_disk in amounts.weight_layers.values()]
    return rounding.least(1, *layers, (amounts.head_on_disk, 1), (amounts.embeddings_on_disk, 1))


def _buffers(s: CostInputs, kv: Mapping[str, Linear], batches_on_host: Linear, rounding: Rounding) -> dict[str, Linear]:
    """Members of `Placement` that size buffers of KV and activations."""
    staged_seqs = [kv["streamed"], kv["disk"]] if s.on_gpu else [kv["disk"]]
    delegates = rounding.any([kv["cpu"]], s.max_num_seqs) if s.on_gpu else 0
    attended = 1 if s.deferred_seqs else delegates
    passing = passing_seqs(s, staged_seqs, attended, rounding)
    staged = staging_blocks(s, s, s.longest_blocks, passing, attended)
    states = staging_states(s, s, passing, attended)
    if not s.on_gpu:
        disk, disk_states = staged, states
    else:
        lowest = kv["disk"] * (1 / s.equal_parts)

        def on_disk(size: Linear, highest: float, of_seq: int) -> Linear:
            return rounding.if_any([kv["disk"]], s.max_num_seqs, size, highest, lowest * of_seq)

        disk = on_disk(staged, s.batch_seqs * s.longest_blocks + _prompt_blocks(s, s), s.longest_blocks)
        disk_states = on_disk(states, s.batch_seqs + _prompt_states(s), 1) if s.model.state else 0
    return {
        "staged_blocks": staged,
        "disk_blocks": disk,
        "staged_states": states,
        "disk_states": disk_states,
        "delegates": delegates,
        "acts_wait": rounding.any([batches_on_host], s.num_gpu_batches) if s.on_gpu else 0,
        "stages": rounding.any(staged_seqs, s.max_num_seqs) if s.on_gpu and s.num_gpu_batches > 1 else 0,
    }


def passing_seqs(batches: Batches, staged_seqs: Sequence[Linear], attended: Linear, rounding: Rounding) -> Linear:
    """Sequences that pass through one staging buffer: a micro-batch's part, and one where the CPU attends to any.

    Args:
        batches: numbers of sequences and tokens in flight.
        staged_seqs: sequences in flight, by KV placement, whose KV passes through in every sweep.
        attended: 1 if the CPU attends to any sequence for the GPU.
        rounding: operations of numbers or of unknowns.
    """
    return rounding.least(batches.batch_seqs, (total(staged_seqs), batches.equal_parts), (attended, 1))


def staging_blocks(s: Sizes, batches: Batches, longest_blocks: int, passing: Linear, attended: Linear) -> Linear:
    """KV blocks of one staging buffer.

    Args:
        s: sizes of the model.
        batches: numbers of sequences and tokens in flight.
        longest_blocks: KV blocks of the longest sequence.
        passing: result of `passing_seqs`.
        attended: 1 if the CPU attends to any sequence for the GPU: its prompt passes through once.
    """
    return passing * longest_blocks + attended * _prompt_blocks(s, batches)


def staging_states(s: Sizes, batches: Batches, passing: Linear, attended: Linear) -> Linear:
    """State rows of one staging buffer; 0 where the model has no state layers.

    Args:
        s: sizes of the model.
        batches: numbers of sequences and tokens in flight.
        passing: result of `passing_seqs`.
        attended: 1 if the CPU attends to any sequence for the GPU: the state of its prompt passes through.
    """
    return passing + attended * _prompt_states(batches) if s.model.state else 0


def _prompt_blocks(s: Sizes, batches: Batches) -> int:
    """KV blocks of a staging buffer for the prompts of sequences that the CPU attends to."""
    return s.kv_blocks(batches.batch_tokens) + min(batches.batch_seqs, batches.batch_tokens)


def _prompt_states(batches: Batches) -> int:
    """State rows of a staging buffer for the prompts of sequences that the CPU attends to."""
    return min(batches.batch_seqs, -(-batches.batch_tokens // _PROMPT_TOKENS))
