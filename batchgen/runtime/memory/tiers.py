"""The memories that a model lives in, what computes on them, and what carries data between them.

Weights, KV and the executor of one engine share a `Tiers`: they draw on the same budgets and the same links.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from batchgen.ops.dispatch import CPU
from batchgen.runtime.dedicated_core import DedicatedCore
from batchgen.runtime.memory.transfers import Arena, Link

if TYPE_CHECKING:
    from batchgen.runtime.streams import Driver


@dataclass(frozen=True)
class Tiers:
    """The memory of each tier, and how to reach it. Without arguments: the host alone, without a budget.

    compute_tier: the tier that is the compute device's own memory. arenas: tier -> its memory; none for "disk". links:
    (to, from) an accelerator. device: what computes, as torch names it. driver: a CUDA card's streams. dedicated_core:
    of an emulated accelerator that has one.
    """

    compute_tier: str = "cpu"
    arenas: Mapping[str, Arena] = field(default_factory=lambda: {tier: Arena(tier) for tier in ("gpu", "cpu")})
    links: tuple[Link, Link] | None = None
    device: torch.device = CPU
    driver: Driver | None = None
    dedicated_core: DedicatedCore | None = None

    def close(self) -> None:
        """Gives back what the host's memory has registered with a driver, and cores. Tensors stay."""
        for arena in self.arenas.values():
            arena.memory.close()
        if self.dedicated_core is not None:
            self.dedicated_core.close()
