"""Ranks that share every layer of a model on one machine: what a rank has of the machine, and what their sums take."""

from __future__ import annotations

from dataclasses import replace

from batchgen.core.hardware import HardwareProfile

# Of gloo between two processes over the loopback of a busy two-core Zen 5: sums of 8 KiB took 0.36 ms, of 4 MiB 5.4 ms.
_SUM_BYTES_PER_S, _SUM_OVERHEAD_S = 8e8, 3.5e-4
_SHARED = (
    "gemm", "prefill_attention", "shared_attention", "decode_attention", "elementwise", "dram_bytes_per_s", "sampling_logits_per_s",
)  # fmt: skip
_SHARED_BY_CARDS = ("cpu_decode_attention", "dram_bytes_per_s")
_DISK = ("disk_read_bytes_per_s", "disk_write_bytes_per_s")  # all ranks read and write at the same time


def rank_profile(hardware: HardwareProfile, size: int, *, whole: bool) -> HardwareProfile:
    """What one of several ranks has.

    A ring moves 2 (N - 1) / N of a tensor over every rank's link (Patarasuk and Yuan, 2009): as much as there is for two ranks.

    Args:
        hardware: The machine, or a rank's cores of it.
        size: Ranks.
        whole: Whether the profile is the machine's, of which each rank has an equal part; otherwise it was measured on the rank's cores.
    """
    hardware = hardware.scaled(**dict.fromkeys(_DISK, 1 / size))
    link = _SUM_BYTES_PER_S
    if (
        hardware.gpu is not None
    ):  # each has a card of its own; what goes between them is taken to be as fast as from the host
        link = hardware.h2d_bytes_per_s or link
    if whole:
        shared = _SHARED if hardware.gpu is None else _SHARED_BY_CARDS
        hardware = hardware.scaled(**dict.fromkeys(shared, 1 / size))
    rate = link * size / (2 * (size - 1))
    return replace(hardware, sum_bytes_per_s=rate, sum_overhead_s=_SUM_OVERHEAD_S)
