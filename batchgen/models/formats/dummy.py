"""Dummy weights for a model of any shape, for benchmarks."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from batchgen.models.config import ModelConfig
from batchgen.models.formats.base import StoredPart
from batchgen.models.layouts import Shape, all_parts

_ONES = ("norm.weight", ".layer_scalar", ".scale", ".per_expert_scale")
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
    return {(part.name, part.layer): _DummyPart(part.name, part.layer, part.shape, pool) for part in all_parts(config)}


@dataclass(frozen=True)
class _DummyPart(StoredPart):
    name: str
    layer: int
    shape: Shape
    pool: Tensor

    def fill(self, out: Tensor) -> None:
        if self.name.endswith(_ONES):
            out.fill_(1.0)
            return
        self.fill_from(out, 0)

    def table_rows(self) -> _DummyRows:
        return _DummyRows(self)

    def fill_from(self, out: Tensor, first: int) -> None:
        """Fill a tensor with the numbers of the part from number `first` on."""
        flat = out.view(-1)
        digest = hashlib.sha256(f"{self.name} {self.layer}".encode()).digest()
        start = (int.from_bytes(digest[:8], "little") + first) % len(self.pool)
        done = 0
        while done < len(flat):
            stretch = self.pool[start : start + len(flat) - done]
            flat[done : done + len(stretch)].copy_(stretch)
            done, start = done + len(stretch), 0


@dataclass(frozen=True)
class _DummyRows:
    """A table of dummy weights."""

    part: _DummyPart

    def rows(self, indices: np.ndarray, dtype: torch.dtype) -> Tensor:
        columns = self.part.shape[1]
        numbers = torch.empty(len(indices), columns, dtype=dtype)
        for row, index in zip(numbers, indices, strict=True):
            self.part.fill_from(row, int(index) * columns)
        return numbers

    def stored_rows(self, first: int, count: int) -> Tensor:
        return self.rows(np.arange(first, first + count), torch.float32).view(torch.uint8)

    def close(self) -> None:
        """Do nothing: there is no file."""
