"""Tiers and KV placements: where the KV of a sequence lies, and which device computes its decode attention."""

from __future__ import annotations

from enum import Enum
from typing import Literal, get_args

Tier = Literal["gpu", "cpu", "disk"]
TIERS: tuple[Tier, ...] = get_args(Tier)
_TIERS: dict[str, Tier] = {"gpu": "gpu", "cpu": "cpu", "streamed": "cpu", "disk": "disk", "deferred": "cpu"}


class KVPlacement(str, Enum):
    """The tier where a sequence's KV lies, and the device that computes its decode attention (docs/tiers.md).

    The members are in order of preference. Each equals, hashes and prints as its value, the text that plans and options
    have.

    Attributes:
        DEVICE: KV lies in GPU memory. The GPU computes attention.
        CPU: KV lies in host memory. The CPU computes attention, and the sweep waits for it.
        STREAMED: KV lies in host memory. It is copied through a staging buffer of the compute device in every sweep.
        DISK: KV lies on disk. It is copied through the staging buffer too.
        DEFERRED: KV lies in host memory. The CPU computes attention, and the sweep goes on without the sequence (APEX
            section 3.3).
        tier: The tier where the KV lies: "gpu", "cpu" or "disk".
    """

    tier: Tier

    DEVICE = "gpu"
    CPU = "cpu"
    STREAMED = "streamed"
    DISK = "disk"
    DEFERRED = "deferred"

    __hash__ = str.__hash__
    __str__ = str.__str__

    def __format__(self, spec: str) -> str:
        return str.__format__(self, spec)

    def __init__(self, value: str) -> None:
        self.tier = _TIERS[value]  # no property: it is asked for each sequence of each sweep

    def in_sweep(self, compute_tier: str, decodes: bool) -> KVPlacement:
        """The placement as the attention of one sweep sees it: DEVICE, CPU, STREAMED or DEFERRED.

        KV in the compute device's own memory is DEVICE, also where that device is the CPU. KV that passes through the
        staging buffer is STREAMED, whether it lies in host memory or on disk.

        Args:
            compute_tier: The tier of the compute device's own memory.
            decodes: True where the sequence decodes a token in the sweep. False for a prompt, whose attention the
                compute device always computes itself.
        """
        if self.tier == compute_tier:
            return KVPlacement.DEVICE
        attended_on_cpu = self is KVPlacement.CPU or self is KVPlacement.DEFERRED
        return self if attended_on_cpu and decodes else KVPlacement.STREAMED
