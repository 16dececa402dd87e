"""Rows of queries and keys of which a part is rotated, in the order in which kernels rotate whole heads."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from batchgen.models.config import ModelConfig
from batchgen.models.formats.base import StoredPart
from batchgen.models.rope import rotates_part
from batchgen.models.shard import Cut
from batchgen.models.tensor_files.rows_in_file import FilePart


def in_head_order(config: ModelConfig, name: str, part: StoredPart) -> StoredPart:
    """The part itself, or, where its heads are rotated in part, one whose rows come in `RopeConfig.row_order`.

    name: of the part, as `layouts.py` has it.
    """
    if config.rope is None or not rotates_part(config.rope, name):
        return part
    heads = config.num_heads + config.num_kv_heads
    return _InHeadOrder(part, config.rope.row_order(config.head_dim), heads * config.head_dim)


@dataclass(frozen=True)
class _InHeadOrder(StoredPart):
    """Rows of heads in another order than the file's. Scores are sums over a head's values, whose order is free.

    Attributes:
        part: The rows as the file has them.
        order: Place in the file of each row of a head.
        num_rows: Rows of queries and keys; those behind them, of values, stay.
    """

    part: StoredPart
    order: tuple[int, ...]
    num_rows: int

    def fill(self, out: Tensor) -> None:
        self.part.fill(out)
        self._reorder(out)

    def fill_cut(self, out: Tensor, cut: Cut) -> bool:
        if not self.part.fill_cut(out, cut):
            return False
        self._reorder(out)
        return True

    def in_file(self) -> FilePart:
        return replace(self.part.in_file(), head_order=self.order)

    def _reorder(self, rows: Tensor) -> None:
        order = torch.tensor(self.order)
        for head in rows[: min(len(rows), self.num_rows)].split(len(self.order)):
            head.copy_(head[order])
