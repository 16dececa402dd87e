"""Loading of a tensor-parallel rank's share (`shard.py`) of a model's stored parts."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from batchgen.core.dtypes import INT4
from batchgen.models.formats.base import StoredPart
from batchgen.models.shard import Cut, Shard

_Parts = tuple[tuple[str, tuple[int, ...]], ...]


def fill_share(cut: Cut, part: StoredPart, rows: int, out: Tensor) -> None:
    """Fill a tensor with a rank's share of a stored part. Only the share is read, if the format supports this.

    Args:
        cut: The rank's share.
        part: The whole part.
        rows: Number of rows of the whole part.
        out: Tensor of the share's shape.
    """
    if cut.whole:
        part.fill(out)
    elif cut.zero:
        out.zero_()
    elif not part.fill_cut(out, cut):
        # Columns of packed rows are bytes.
        columns = [out.shape[1] * (cut.size if cut.by_columns else 1)] if out.ndim == 2 else []
        whole = torch.empty((rows, *columns), dtype=out.dtype)
        part.fill(whole)
        out.copy_(cut.of(whole))


def cut_tensors(
    shard: Shard, layout: Mapping[str, _Parts], tensors: Mapping[str, Tensor], weight_format: str | None = None
) -> dict[str, Tensor]:
    """The rank's share of each of several loaded tensors.

    Args:
        shard: The rank's part of the model.
        layout: Parts of each tensor.
        tensors: Whole tensors by name.
        weight_format: Format of packed matrices, for which `Shard.divides` is true; None: no matrix is packed.
    """
    is_int4 = weight_format == INT4
    return {name: _cut_tensor(shard, name, layout[name], tensor, is_int4) for name, tensor in tensors.items()}


def _cut_tensor(shard: Shard, name: str, parts: _Parts, tensor: Tensor, is_int4: bool) -> Tensor:
    cuts = [shard.cut(name, part) for part, _ in parts]
    if cuts[0].whole:
        return tensor
    if cuts[0].zero:
        return torch.zeros_like(tensor)
    pieces = tensor.split([shape[0] for _, shape in parts])
    if is_int4 and tensor.dtype == torch.uint8:
        shares = [c.of_int4(piece, shape[1]) for c, piece, (_, shape) in zip(cuts, pieces, parts, strict=True)]
    else:
        shares = [cut.of(piece) for cut, piece in zip(cuts, pieces, strict=True)]
    return torch.cat(shares)
