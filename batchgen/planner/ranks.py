"""Processes that run one model together: what each has of its host, the link between them, and what sums over ranks take."""

from __future__ import annotations

from dataclasses import dataclass, replace

from batchgen.core.hardware import COMPUTE_RATES, HardwareProfile, known

_DISK = ("disk_read_bytes_per_s", "disk_write_bytes_per_s")  # all processes read and write at the same time


@dataclass(frozen=True)
class Link:
    """Between two processes that run one model.

    Attributes:
        bytes_per_s: one way.
        overhead_s: of a message, beside its bytes.
    """

    bytes_per_s: float
    overhead_s: float

    def send_s(self, size: float) -> float:
        """Seconds for a message of so many bytes."""
        return self.overhead_s + size / self.bytes_per_s


# Between two processes over the loopback of a busy two-core Zen 5: sums of 8 KiB took 0.36 ms, of 4 MiB 5.4 ms. Between
# two ranks a sum is two messages. Between hosts it stands for 10 Gbit/s.
PROCESSES = Link(8e8, 1.75e-4)
# Between GPUs of a host: a kernel is launched and a transfer begins.
_GPU_OVERHEAD_S = 2e-5


def link_of(hardware: HardwareProfile, given_bytes_per_s: float | None, *, gpus_of_a_host: bool) -> Link:
    """The link between the processes of a job.

    Args:
        hardware: What each has.
        given_bytes_per_s: Its rate as the user says it; None: that between processes, and between GPUs of a host of
            their bus, through host memory.
        gpus_of_a_host: Whether all processes are on one host, each with a GPU.
    """
    link = PROCESSES
    if gpus_of_a_host:
        link = Link(min(known(hardware.h2d_bytes_per_s), known(hardware.d2h_bytes_per_s)), _GPU_OVERHEAD_S)
    return link if given_bytes_per_s is None else replace(link, bytes_per_s=given_bytes_per_s)


def part_of_host(hardware: HardwareProfile, processes: int, *, whole: bool) -> HardwareProfile:
    """What one of several processes that share a host has of its rates. Sizes stay: budgets are shared out elsewhere.

    A GPU is a process's own; cores, the host's memory bus and the disk are shared.

    Args:
        hardware: The host, or a process's cores of it.
        processes: How many share it evenly.
        whole: Whether the profile is the host's; otherwise it was measured on the process's cores, and the disk alone is shared.
    """
    shared: tuple[str, ...] = _DISK
    if whole:
        cores = ("cpu_decode_attention",) if hardware.gpu is not None else COMPUTE_RATES
        shared = (*_DISK, "dram_bytes_per_s", *cores)
    return hardware.scaled(**dict.fromkeys(shared, 1 / processes)) if processes > 1 else hardware


def with_sums(hardware: HardwareProfile, size: int, link: Link) -> HardwareProfile:
    """The profile of one of several ranks that share every layer.

    A ring moves 2 (N - 1) / N of a tensor over every rank's link (Patarasuk and Yuan, 2009), in 2 (N - 1) messages one after the other.
    """
    messages = 2 * (size - 1)
    return replace(
        hardware, sum_bytes_per_s=link.bytes_per_s * size / messages, sum_overhead_s=messages * link.overhead_s
    )
