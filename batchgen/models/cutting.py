"""From the parts of a whole model to those of a rank (`shard.py`), as they are loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from batchgen.core.dtypes import INT4
from batchgen.models.shard import Cut, Shard

Fill = Callable[[str, int, Tensor], None]  # (part, layer, tensor to fill)
FillCut = Callable[[str, int, Tensor, Cut], bool]  # the same, of what a rank has; whether it could
_Parts = tuple[tuple[str, tuple[int, ...]], ...]


def cut_while_filling(
    shard: Shard, places: Callable[[int], Mapping[str, tuple[str, tuple[int, ...]]]], fill: Fill, fill_cut: FillCut
) -> Fill:
    """A function that fills parts of the rank's size.

    Args:
        shard: The rank's.
        places: Of a layer, each part's tensor and whole shape.
        fill: Fills a part, whole.
        fill_cut: Fills what the rank has of a part without the rest of it, if it can.
    """

    def fill_own(part: str, layer: int, out: Tensor) -> None:
        name, shape = places(layer)[part]
        cut = shard.cut(name, part)
        if cut.whole:
            fill(part, layer, out)
        elif cut.zero:
            out.zero_()
        elif not fill_cut(part, layer, out, cut):
            # Of packed rows columns are bytes.
            columns = [out.shape[1] * (cut.size if cut.by_columns else 1)] if out.ndim == 2 else []
            whole = torch.empty((shape[0], *columns), dtype=out.dtype)
            fill(part, layer, whole)
            out.copy_(cut.of(whole))

    return fill_own


def cut_tensors(
    shard: Shard, layout: Mapping[str, _Parts], tensors: Mapping[str, Tensor], weight_format: str | None = None
) -> dict[str, Tensor]:
    """The rank's part of whole tensors, each made of the parts that the layout says.

    weight_format: of matrices that are packed, one that `Shard.divides`.
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
        own = [c.of_int4(piece, shape[1]) for c, piece, (_, shape) in zip(cuts, pieces, parts, strict=True)]
    else:
        own = [cut.of(piece) for cut, piece in zip(cuts, pieces, strict=True)]
    return torch.cat(own)
