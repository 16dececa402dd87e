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
    """The memory of each tier, the device that computes, and the links between the host and an accelerator.

    Without arguments: the host alone, without a budget.

    Attributes:
        compute_tier: The tier that is the compute device's own memory, "gpu" or "cpu".
        arenas: The memory of each tier, by the tier's name; "disk" has none.
        links: (link from the host to the accelerator, link back); None: there is no accelerator.
        device: The device that computes, as torch names it.
        driver: The streams of a CUDA card; None: there is no card.
        dedicated_core: The CPU core that an emulated accelerator computes on; None: it has no core of its own.
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
        """Unregister host memory from a driver, its own too, and release cores. Tensors stay."""
        for arena in self.arenas.values():
            arena.memory.close()
        if self.driver is not None:
            self.driver.close()
        if self.dedicated_core is not None:
            self.dedicated_core.close()
