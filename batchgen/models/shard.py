"""A part of a model for each of several ranks that run every layer together.

This is tensor parallelism (Megatron-LM: Shoeybi et al., 2019, section 3). Queries, keys and values are split by heads,
gate and up by rows of their matrix; so what a rank attends to and activates is its own. The matrices behind these,
`out` and `down`, are split by columns: each rank has a summand of the layer's result. Each expert is split in this way.
All else every rank has whole. Biases of what is added up are in the first rank's summand.
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

if TYPE_CHECKING:
    from torch import Tensor

_BY_ROWS = ("qkv", "gate_up", "up", "shared_gate_up", "sinks")
_BY_COLUMNS = ("out", "down", "shared_down")


@dataclass(frozen=True)
class Shard:
    """One rank's part of every layer of a model.

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
        """Shape of the part: that of a model with fewer heads and narrower MLPs. The vocabulary is whole."""
        whole, size = self.whole, self.size
        return replace(
            whole,
            num_heads=whole.num_heads // size,
            num_kv_heads=whole.num_kv_heads // size,
            intermediate_size=whole.intermediate_size // size,
            shared_expert_size=whole.shared_expert_size // size,
            dense_size=whole.dense_size // size,
        )

    def divides(self, weight_format: str) -> bool:
        """True where packed matrices can be split by columns: groups and blocks of a row stay whole.

        Args:
            weight_format: int4, or one of `NATIVE_FORMATS`. Those where each matrix has its own format are not split.
        """
        if weight_format == MIXED:
            return False
        share = self.config
        values = CODE_GROUP if weight_format == INT4 else BLOCK_FORMATS[block_format(weight_format)][0]
        columns = [share.intermediate_size]
        if weight_format not in EXPERT_FORMATS:
            columns += [share.num_heads * share.head_dim, share.shared_expert_size, share.dense_size]
        return all(count % values == 0 for count in columns)

    def cut(self, name: str, part: str) -> Cut:
        """The share of a part that this rank has.

        Args:
            name: Name of the tensor, as `layouts.py` has it.
            part: Name of the part.
        """
        stem, kind = name.rsplit(".", 1)
        if stem in _BY_ROWS:
            return Cut(self.rank, self.size, sections=self._sections(part))
        if stem not in _BY_COLUMNS:
            return Cut(self.rank, self.size)
        if kind == "bias":
            return Cut(self.rank, self.size, zero=self.rank > 0)
        return Cut(self.rank, self.size, by_columns=True)

    def _sections(self, part: str) -> tuple[int, ...]:
        """Rows of each section of a part; sections are split one by one. (0,): the part is one section."""
        whole, stem = self.whole, part.rsplit(".", 1)[0]
        if stem == "qkv":
            heads = whole.num_heads, whole.num_kv_heads, whole.num_kv_heads
            return tuple(count * whole.head_dim for count in heads)
        if stem == "gate_up":
            return (whole.intermediate_size,) * 2
        if part in ("experts.gate_up_proj", "experts.gate_up_proj_bias"):
            return (whole.intermediate_size,) * (2 * whole.num_experts)
        return (0,)


@dataclass(frozen=True)
class Cut:
    """The share of a tensor's part that a rank has.

    Attributes:
        rank: Number of the rank.
        size: Number of ranks.
        sections: Rows of each section, whose rows are split; (0,): all rows are one section; empty: rows are not split.
        by_columns: Whether columns are split.
        zero: Whether the share is zeros.
    """

    rank: int
    size: int
    sections: tuple[int, ...] = ()
    by_columns: bool = False
    zero: bool = False

    @property
    def whole(self) -> bool:
        """True where the rank has all of it."""
        return not (self.sections or self.by_columns or self.zero)

    @property
    def is_stretch(self) -> bool:
        """True where the share is rows that are neighbours in the whole."""
        return self.sections == (0,)

    def of_int4(self, packed: Tensor, n: int) -> Tensor:
        """The rank's share of rows of `n` weights in int4 (`ops/quant.py`).

        A row has codes, then scales and minimums, each of whole groups.
        """
        if not self.by_columns:
            return self.of(packed)
        import torch

        codes = code_bytes(n, WEIGHT_CODE_BITS)
        return torch.cat([self.of(packed[:, :codes]), self.of(packed[:, codes:])], dim=1)

    def of(self, tensor: Tensor) -> Tensor:
        """The rank's rows, one after the other, or its columns, of the whole part; of packed rows its blocks."""
        if self.by_columns:
            return tensor.chunk(self.size, dim=1)[self.rank]
        if self.is_stretch:
            return tensor.chunk(self.size)[self.rank]
        import torch

        sections = tensor.split(self.sections)
        return torch.cat([section.chunk(self.size)[self.rank] for section in sections])


def shard_of(config: ModelConfig, rank: int, size: int) -> Shard:
    """A rank's part of a model.

    Raises:
        InputError: Heads or MLPs cannot be divided by so many; it says which numbers do.
    """
    counts = {
        "key/value heads": config.num_kv_heads,
        "values of an MLP": config.intermediate_size,
        "values of a shared expert": config.shared_expert_size,
        "values of an MLP in some layers": config.dense_size,
    }
    for what, count in counts.items():
        if count % size:
            common = math.gcd(*counts.values())
            works = [str(n) for n in range(2, common + 1) if common % n == 0]
            use = f"use {' or '.join(works)}" if works else "leave it out"
            raise InputError(f"--tensor-parallel {size} does not divide the model's {count:,} {what}: {use}")
    return Shard(rank, size, config)
