"""A new order of rows of queries and keys for models that rotate only some values of a head.

In the new order, kernels can rotate whole heads.
"""

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
    """The part in the order of `RopeConfig.row_order` if its heads are rotated in part; otherwise the part itself.

    Args:
        config: Configuration of the model.
        name: Name of the part in a layout.
        part: The stored part.
    """
    if config.rope is None or not rotates_part(config.rope, name):
        return part
    heads = config.num_heads + config.num_kv_heads
    return _InHeadOrder(part, config.rope.row_order(config.head_dim), heads * config.head_dim)


@dataclass(frozen=True)
class _InHeadOrder(StoredPart):
    """A stored part whose rows are reordered within each head. Attention scores do not depend on this order.

    Attributes:
        part: The part in the order of the file.
        order: For each row of a head, its place in the file's rows of that head.
        num_rows: Number of rows of queries and keys. Later rows, of values, are not reordered.
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
