"""Dummy weights for a model of any shape, for benchmarks."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from batchgen.models.config import ModelConfig
from batchgen.models.formats.base import StoredPart
from batchgen.models.layouts import all_parts

_VALUES = (1 << 22) + 3  # odd, so that rows of a power-of-two width all differ


def dummy_parts(config: ModelConfig, seed: int) -> dict[tuple[str, int], StoredPart]:
    """Every part of a model, by name and layer: normal with standard deviation 0.02, and 1 for norms.

    A part is a range of one pool of random numbers, so that weights are produced at the speed of memory. Seed, layer
    and name determine the range.

    Args:
        config: Configuration of the model.
        seed: Seed of the weights.
    """
    pool = torch.randn(_VALUES, generator=torch.Generator().manual_seed(seed)) * 0.02
    return {(part.name, part.layer): _DummyPart(part.name, part.layer, pool) for part in all_parts(config)}


@dataclass(frozen=True)
class _DummyPart(StoredPart):
    name: str
    layer: int
    pool: Tensor

    def fill(self, out: Tensor) -> None:
        if self.name.endswith("norm.weight"):
            out.fill_(1.0)
            return
        flat = out.view(-1)
        digest = hashlib.sha256(f"{self.name} {self.layer}".encode()).digest()
        start = int.from_bytes(digest[:8], "little") % len(self.pool)
        done = 0
        while done < len(flat):
            stretch = self.pool[start : start + len(flat) - done]
            flat[done : done + len(stretch)].copy_(stretch)
            done, start = done + len(stretch), 0
