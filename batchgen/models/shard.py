"""The part of a model's layers that each tensor-parallel rank has.

All ranks compute every layer together (Megatron-LM: Shoeybi et al., 2019, section 3). The rows of the query, key and
value projections are split by heads, and the rows of gate and up by columns of the MLP's hidden state. So each rank has
the attention of its own heads, and its own part of that hidden state. The matrices "out" and "down" are split by
columns. Each rank computes one summand of their output, and an all-reduce adds the summands. Every expert is split in
this way. Only the first rank has the biases of "out" and "down". Gated DeltaNet layers are split by key heads with
their value heads. All other tensors are whole on every rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from batchgen.core.dtypes import (
    BLOCK_FORMATS,
    CODE_GROUP,
    EXPERT_FORMATS,
    INT4,
    MIXED,
    WEIGHT_CODE_BITS,
    block_format,
    code_bytes,
)
from batchgen.core.errors import InputError
from batchgen.models.config import ModelConfig
from batchgen.models.state_layers import DeltaNet, ShortConv

if TYPE_CHECKING:
    from torch import Tensor

_BY_ROWS = ("qkv", "gate_up", "up", "shared_gate_up", "sinks", "ba", "conv", "a_log", "dt_bias")
_QK_NORMS = ("q_norm", "k_norm")  # which are of all heads together, or of each head
_BY_COLUMNS = ("out", "down", "shared_down")


@dataclass(frozen=True)
class Shard:
    """The part of every layer of a model that one tensor-parallel rank has.

    Attributes:
        rank: Number of the rank, from 0 on.
        size: Number of ranks.
        whole: Configuration of the whole model.
    """

    rank: int
    size: int
    whole: ModelConfig

    @property
    def config(self) -> ModelConfig:
        """Configuration of the rank's part: the model with fewer heads and a narrower MLP. The vocabulary is whole."""
        whole, size, state = self.whole, self.size, self.whole.state
        if isinstance(state, DeltaNet):
            state = replace(state, key_heads=state.key_heads // size, value_heads=state.value_heads // size)
        if isinstance(state, ShortConv):
            state = replace(state, channels=state.channels // size)
        return replace(
            whole,
            state=state,
            num_heads=whole.num_heads // size,
            num_kv_heads=whole.num_kv_heads // size,
            global_kv_heads=whole.global_kv_heads // size,
            intermediate_size=whole.intermediate_size // size,
            shared_expert_size=whole.shared_expert_size // size,
            dense_size=whole.dense_size // size,
        )

    def divides(self, weight_format: str) -> bool:
        """True if packed matrices of a format can be split by columns without splitting a group or block.

        Args:
            weight_format: int4, or one of `NATIVE_FORMATS`. For `MIXED` the result is False.
        """
        if weight_format == MIXED:
            return False
        share = self.config
        values = CODE_GROUP if weight_format == INT4 else BLOCK_FORMATS[block_format(weight_format)][0]
        columns = [share.intermediate_size]
        if weight_format not in EXPERT_FORMATS:
            columns += [share.attention_of(layer).q_size for layer in share.attention_layers]
            columns += [share.shared_expert_size, share.dense_size]
            if share.state is not None:
                columns.append(share.state.out_size // share.column_sections)
        return all(count % values == 0 for count in columns)

    def cut(self, name: str, part: str) -> Cut:
        """The rank's share of a stored part.

        Args:
            name: Name of the tensor in a layout (`layouts.py`).
            part: Name of the part.
        """
        stem = name.removesuffix(".weight").removesuffix(".bias")
        if stem in _BY_ROWS or (stem in _QK_NORMS and self.whole.projection_norms):
            return Cut(self.rank, self.size, sections=self._sections(part))
        if stem not in _BY_COLUMNS:
            return Cut(self.rank, self.size)
        if name.endswith(".bias"):
            return Cut(self.rank, self.size, zero=self.rank > 0)
        sections = self.whole.column_sections if part.startswith("state_out.") else 1
        return Cut(self.rank, self.size, by_columns=True, column_sections=sections)

    def _sections(self, part: str) -> tuple[int, ...]:
        """Number of rows of each section of a part; each section is split by itself. (0,): the part is one section."""
        whole, stem = self.whole, part.rsplit(".", 1)[0]
        if isinstance(state := whole.state, DeltaNet):
            sizes = state.key_size, state.key_size, state.out_size, state.out_size
            of_states = {"in_qkv": sizes[:3], "conv": sizes[:3], "in_qkvz": sizes, "ba": (state.value_heads,) * 2}
            if stem in of_states:
                return of_states[stem]
        if isinstance(state, ShortConv) and stem == "in_bcx":
            return (state.channels,) * 3
        if stem == "q" and whole.output_gate:
            return whole.q_size, whole.q_size
        if stem == "qkv":
            heads = whole.num_heads, whole.num_kv_heads, whole.num_kv_heads
            return tuple(count * whole.head_dim for count in heads)
        if stem == "gate_up":
            return (whole.intermediate_size,) * 2
        if stem == "shared.gate_up":
            return (whole.shared_expert_size,) * 2
        if part in ("experts.gate_up_proj", "experts.gate_up_proj_bias"):
            return (whole.intermediate_size,) * (2 * whole.num_experts)
        return (0,)


@dataclass(frozen=True)
class Cut:
    """The share of a stored part that one tensor-parallel rank has.

    Attributes:
        rank: Number of the rank.
        size: Number of ranks.
        sections: Number of rows of each section; the rows of each section are split among the ranks. (0,): all rows are
            one section. Empty: rows are not split.
        by_columns: Whether columns are split.
        column_sections: Number of equal sections of the columns; the columns of each section are split among the ranks.
        zero: Whether the rank's share is zeros, as for a bias that only the first rank has.
    """

    rank: int
    size: int
    sections: tuple[int, ...] = ()
    by_columns: bool = False
    column_sections: int = 1
    zero: bool = False

    @property
    def whole(self) -> bool:
        """True if the rank's share is the whole part."""
        return not (self.sections or self.by_columns or self.zero)

    @property
    def is_stretch(self) -> bool:
        """True if the rank's share is one range of contiguous rows of the part."""
        return self.sections == (0,)

    def of_int4(self, packed: Tensor, n: int) -> Tensor:
        """The rank's share of packed rows in int4 (`ops/quant.py`).

        A packed row has the codes of all groups, then their scales and minimums. The share has whole groups of each
        row.

        Args:
            packed: Packed rows of the whole part, uint8 [rows, bytes of a row].
            n: Number of weights in a row.
        """
        if not self.by_columns:
            return self.of(packed)
        import torch

        codes = code_bytes(n, WEIGHT_CODE_BITS)
        return torch.cat([self.of(packed[:, :codes]), self.of(packed[:, codes:])], dim=1)

    def of(self, tensor: Tensor) -> Tensor:
        """The rank's share of a whole part: its rows, joined, or its columns.

        Of block-quantized rows it has whole blocks.
        """
        if self.by_columns and self.column_sections == 1:
            return tensor.chunk(self.size, dim=1)[self.rank]
        if self.is_stretch:
            return tensor.chunk(self.size)[self.rank]
        import torch

        if self.by_columns:
            of_sections = tensor.chunk(self.column_sections, dim=1)
            return torch.cat([section.chunk(self.size, dim=1)[self.rank] for section in of_sections], dim=1)
        sections = tensor.split(self.sections)
        return torch.cat([section.chunk(self.size)[self.rank] for section in sections])


def shard_of(config: ModelConfig, rank: int, size: int) -> Shard:
    """The part of a model that one of `size` tensor-parallel ranks has.

    Args:
        config: Configuration of the whole model.
        rank: Number of the rank, from 0 on.
        size: Number of ranks.

    Raises:
        InputError: Heads or MLPs cannot be divided by `size`; the message has numbers of ranks that divide them.
    """
    counts = {
        "key/value heads": config.num_kv_heads,
        "key/value heads of layers without a window": config.global_kv_heads,
        "values of an MLP": config.intermediate_size,
        "values of a shared expert": config.shared_expert_size,
        "values of an MLP in some layers": config.dense_size,
        "key heads of linear attention": config.state.key_heads if isinstance(config.state, DeltaNet) else 0,
        "channels of a convolution": config.state.channels if isinstance(config.state, ShortConv) else 0,
    }
    for what, count in counts.items():
        if count % size:
            common = math.gcd(*counts.values())
            works = [str(n) for n in range(2, common + 1) if common % n == 0]
            use = f"use {' or '.join(works)}" if works else "leave it out"
            raise InputError(f"--tensor-parallel {size} does not divide the model's {count:,} {what}: {use}")
    return Shard(rank, size, config)
