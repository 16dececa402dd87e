"""The order of rows of a model's tensors where it differs from that of the files.

Queries and keys of which only some values are rotated are put in an order in which kernels can rotate whole heads. Rows
that files interleave by head, such as queries and the output gate of attention, are put one after the other.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from batchgen.models.config import ModelConfig
from batchgen.models.formats.base import StoredPart
from batchgen.models.rope import rotates_part
from batchgen.models.shard import Cut
from batchgen.models.state_layers import DeltaNet
from batchgen.models.tensor_files.rows_in_file import FilePart

# Bytes of a tensor that are put in order at once.
_STRIPE_BYTES = 4 << 20


def in_head_order(config: ModelConfig, name: str, part: StoredPart) -> StoredPart:
    """The part in the order of `RopeConfig.row_order` if its heads are rotated in part; otherwise the part itself.

    Args:
        config: Configuration of the model.
        name: Name of the part in a layout.
        part: The stored part, in the order of `in_sections`.
    """
    if config.rope is None or not rotates_part(config.rope, name):
        return part
    dim, stem = config.head_dim, name.split(".")[0]
    order = config.rope.row_order(dim)
    if stem in ("q_norm", "k_norm"):
        return _InHeadOrder(part, order, 0, dim)
    first = config.q_size if config.output_gate and stem == "q" else 0
    return _InHeadOrder(part, order, first, first + (config.num_heads + config.num_kv_heads) * dim)


@dataclass(frozen=True)
class _InHeadOrder(StoredPart):
    """A stored part whose rows are reordered within each head. Attention scores do not depend on this order.

    Attributes:
        part: The part in the order of the file.
        order: For each row of a head, its place in the file's rows of that head.
        first, stop: Range of the rows of queries and keys. Rows before it, of an output gate, and after it, of values,
            are not reordered.
    """

    part: StoredPart
    order: tuple[int, ...]
    first: int
    stop: int

    def fill(self, out: Tensor) -> None:
        self.part.fill(out)
        self._reorder(out)

    def fill_cut(self, out: Tensor, cut: Cut) -> bool:
        if self.first or not self.part.fill_cut(out, cut):
            return False
        self._reorder(out)
        return True

    def in_file(self) -> FilePart:
        return replace(self.part.in_file(), head_order=self.order, in_order_before=self.first)

    def _reorder(self, rows: Tensor) -> None:
        order = torch.tensor(self.order)
        for head in rows[self.first : min(len(rows), self.stop)].split(len(self.order)):
            head.copy_(head[order])


# A range of consecutive rows of a file: its first row, and their number.
Run = tuple[int, int]


def in_sections(config: ModelConfig, name: str, part: StoredPart) -> StoredPart:
    """The part with its sections one after the other, if the file interleaves them by head; otherwise the part itself.

    Args:
        config: Configuration of the model.
        name: Name of the part in a layout.
        part: The stored part, in the order of the file.
    """
    stem, state = name.split(".")[0], config.state
    if (config.family, name) == ("gte", "gate_up.weight"):  # the up projection comes first
        size = config.intermediate_size
        return _InRuns(part, ((size, size), (0, size)))
    if stem == "q" and config.output_gate:  # of each head the queries, then the gate
        queries, gates = _sections((config.head_dim,) * 2, config.num_heads)
        return _InRuns(part, (*gates, *queries))
    if isinstance(state, DeltaNet) and stem in ("in_qkvz", "ba"):
        group = state.value_heads // state.key_heads
        values = group * state.value_dim
        sizes = (state.key_dim, state.key_dim, values, values) if stem == "in_qkvz" else (group, group)
        return _InRuns(part, tuple(run for section in _sections(sizes, state.key_heads) for run in section))
    return part


def _sections(sizes: tuple[int, ...], heads: int) -> list[tuple[Run, ...]]:
    """The rows of each section, if a file has all sections of a head together.

    Args:
        sizes: Number of rows that a head has of each section.
        heads: Number of heads.
    """
    *starts, total = itertools.accumulate(sizes, initial=0)
    return [
        tuple((head * total + start, size) for head in range(heads)) for start, size in zip(starts, sizes, strict=True)
    ]


def by_group(state: DeltaNet, name: str, part: StoredPart) -> StoredPart:
    """The part with value heads of a group one after the other, if the file orders them by member of their groups.

    llama.cpp's converter does so for Qwen3.5: first the first value head of each key head, then the second ones.

    Args:
        state: Shape of the state layers.
        name: Name of the part in a layout.
        part: The stored part, in the order of the file.
    """
    stem = name.split(".")[-1] if name.startswith("linear_attn.") else name.split(".")[0]
    size = 1 if stem in ("a", "b", "A_log", "dt_bias") else state.value_dim
    if stem not in ("in_qkv", "in_z", "conv", "a", "b", "A_log", "dt_bias") or state.value_heads == state.key_heads:
        return part
    before = 2 * state.key_size if stem in ("in_qkv", "conv") else 0
    members = range(state.value_heads // state.key_heads)
    places = (member * state.key_heads + head for head in range(state.key_heads) for member in members)
    runs = ((0, before),) if before else ()
    return _InRuns(part, (*runs, *((before + place * size, size) for place in places)))


@dataclass(frozen=True)
class _InRuns(StoredPart):
    """A stored part whose rows are in another order than in the file.

    Attributes:
        part: The part in the order of the file.
        runs: Ranges of the file's rows, in the order of the part's rows.
    """

    part: StoredPart
    runs: tuple[Run, ...]

    def fill(self, out: Tensor) -> None:
        self.part.fill(out)
        order = torch.cat([torch.arange(first, first + count) for first, count in self.runs])
        columns = out.view(len(out), -1)
        width = max(1, _STRIPE_BYTES // (len(out) * out.element_size()))
        for stripe in columns.split(width, dim=1):
            stripe.copy_(stripe[order])

    def in_file(self) -> FilePart:
        return replace(self.part.in_file(), runs=self.runs)
