"""Placements of the KV of a sequence: one vocabulary for plans, the scheduler and the sweep."""

from __future__ import annotations

from enum import Enum


class KVPlacement(str, Enum):
    """The place of a sequence's KV and of its decode attention (docs/tiers.md), in order of preference.

    A member equals, hashes and prints as its value, which is what plans and options have.

    Attributes:
        DEVICE: GPU memory; the GPU attends.
        CPU: Host memory; the CPU attends, and the sweep waits for it.
        STREAMED: Host memory; the KV passes through a staging buffer on the compute device in every sweep.
        DISK: The disk; the KV passes through the staging buffer too.
        DEFERRED: Host memory; the CPU attends, and the sweep goes on without the sequence (APEX section 3.3).
    """

    DEVICE = "gpu"
    CPU = "cpu"
    STREAMED = "streamed"
    DISK = "disk"
    DEFERRED = "deferred"

    __hash__ = str.__hash__
    __str__ = str.__str__

    def __format__(self, spec: str) -> str:
        return str.__format__(self, spec)

    @property
    def tier(self) -> str:
        """The tier that the KV lies in: "gpu", "cpu" or "disk"."""
        return _TIERS[self]

    def in_sweep(self, compute_tier: str, decodes: bool) -> KVPlacement:
        """The placement that one sweep's attention sees: DEVICE, CPU, STREAMED or DEFERRED.

        What lies in the compute device's own memory is DEVICE there, whichever device computes. What passes through the
        staging buffer is STREAMED there, wherever it lies.

        Args:
            compute_tier: Tier of the compute device's own memory.
            decodes: Whether the sequence decodes a token in the sweep; the compute device itself attends for prompts.
        """
        if self.tier == compute_tier:
            return KVPlacement.DEVICE
        attended_on_cpu = self is KVPlacement.CPU or self is KVPlacement.DEFERRED
        return self if attended_on_cpu and decodes else KVPlacement.STREAMED


_TIERS = {
    KVPlacement.DEVICE: "gpu",
    KVPlacement.CPU: "cpu",
    KVPlacement.STREAMED: "cpu",
    KVPlacement.DISK: "disk",
    KVPlacement.DEFERRED: "cpu",
}
