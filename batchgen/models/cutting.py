"""From the parts of a whole model to those of a rank (`shard.py`), as they are loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

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
            whole = torch.empty(shape, dtype=out.dtype)
            fill(part, layer, whole)
            out.copy_(cut.of(whole))

    return fill_own


def cut_tensors(shard: Shard, layout: Mapping[str, _Parts], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The rank's part of whole tensors, each made of the parts that the layout says."""
    return {name: _cut_tensor(shard, name, layout[name], tensor) for name, tensor in tensors.items()}


def _cut_tensor(shard: Shard, name: str, parts: _Parts, tensor: Tensor) -> Tensor:
    cuts = [shard.cut(name, part) for part, _ in parts]
    if cuts[0].whole:
        return tensor
    if cuts[0].zero:
        return torch.zeros_like(tensor)
    pieces = tensor.split([shape[0] for _, shape in parts])
    return torch.cat([cut.of(piece) for cut, piece in zip(cuts, pieces, strict=True)])
