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

    Attributes:
        compute_tier: tier that is the compute device's own memory.
        arenas: memory by tier; none for "disk".
        links: links to an accelerator and back; None: the host computes.
        device: device that computes, as torch names it.
        driver: streams of a CUDA card; None: there is none.
        dedicated_core: core of an emulated accelerator; None: it has none of its own.
    """

    compute_tier: str = "cpu"
    arenas: Mapping[str, Arena] = field(default_factory=lambda: {tier: Arena(tier) for tier in ("gpu", "cpu")})
    links: tuple[Link, Link] | None = None
    device: torch.device = CPU
    driver: Driver | None = None
    dedicated_core: DedicatedCore | None = None

    @property
    def h2d(self) -> Link:
        """The link from host memory to the accelerator, which there is."""
        assert self.links is not None, "the host computes"
        return self.links[0]

    @property
    def d2h(self) -> Link:
        """The link from the accelerator to host memory, where there is an accelerator."""
        assert self.links is not None, "the host computes"
        return self.links[1]

    def close(self) -> None:
        """Unregister host memory from a driver, and release cores. Tensors stay."""
        for arena in self.arenas.values():
            arena.memory.close()
        if self.dedicated_core is not None:
            self.dedicated_core.close()
