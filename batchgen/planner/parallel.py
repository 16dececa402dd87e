"""Processes that run one model together: shares of a host, links, all-reduce, and the layers of each stage."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from batchgen.core.errors import InputError
from batchgen.core.hardware import COMPUTE_RATES, HardwareProfile, known
from batchgen.core.plan import Policy, spread_layers
from batchgen.models.config import ModelConfig

_DISK = ("disk_read_bytes_per_s", "disk_write_bytes_per_s")  # all processes read and write at the same time


@dataclass(frozen=True)
class Link:
    """A link between two processes that run one model.

    Attributes:
        bytes_per_s: Bytes per second in one direction.
        overhead_s: Seconds of a message beside those of its bytes.
    """

    bytes_per_s: float
    overhead_s: float

    def send_s(self, size: float) -> float:
        """Seconds for a message of so many bytes."""
        return self.overhead_s + size / self.bytes_per_s


# Between two processes over the loopback of a busy two-core Zen 5: an all-reduce of 8 KiB took 0.36 ms, of 4 MiB 5.4
# ms. Between two ranks it is two messages. Between hosts it stands for 10 Gbit/s.
PROCESSES = Link(8e8, 1.75e-4)
# Between GPUs of a host: a kernel is launched and a transfer begins.
_GPU_OVERHEAD_S = 2e-5


def link_of(hardware: HardwareProfile, given_bytes_per_s: float | None, *, gpus_of_a_host: bool) -> Link:
    """The link between the processes of a job.

    Args:
        hardware: The hardware of each process.
        given_bytes_per_s: The link's rate as the user states it; None: that between processes, and between GPUs of a
            host that of their bus, through host memory.
        gpus_of_a_host: Whether all processes are on one host, each with a GPU.
    """
    link = PROCESSES
    if gpus_of_a_host:
        link = Link(min(known(hardware.h2d_bytes_per_s), known(hardware.d2h_bytes_per_s)), _GPU_OVERHEAD_S)
    return link if given_bytes_per_s is None else replace(link, bytes_per_s=given_bytes_per_s)


def part_of_host(hardware: HardwareProfile, processes: int, *, whole: bool) -> HardwareProfile:
    """The profile of one of several processes that share a host. Sizes stay: budgets are shared out elsewhere.

    A GPU is a process's own; cores, the host's memory bus and the disk are shared.

    Args:
        hardware: The profile of the host, or of a process's cores of it.
        processes: Number of processes that share the host evenly.
        whole: Whether the profile is the host's; otherwise it was measured on the process's cores, and the disk alone
            is shared.
    """
    shared: tuple[str, ...] = _DISK
    if whole:
        cores = ("cpu_decode_attention",) if hardware.gpu is not None else COMPUTE_RATES
        shared = (*_DISK, "dram_bytes_per_s", *cores)
    return hardware.scaled(**dict.fromkeys(shared, 1 / processes)) if processes > 1 else hardware


def with_all_reduce(hardware: HardwareProfile, ranks: int, link: Link) -> HardwareProfile:
    """The profile of one of several ranks that share every layer.

    A ring moves 2 (N - 1) / N of a tensor over every rank's link (Patarasuk and Yuan, 2009), in 2 (N - 1) messages one
    after the other.
    """
    messages = 2 * (ranks - 1)
    return replace(
        hardware,
        all_reduce_bytes_per_s=link.bytes_per_s * ranks / messages,
        all_reduce_overhead_s=messages * link.overhead_s,
    )


def check_stages(config: ModelConfig, count: int) -> None:
    """Refuse more stages than layers, and models that cannot be cut. Raises InputError."""
    if count > 1 and (config.shared_kv_layers or config.per_layer_size):
        shares = "reuse the KV of earlier ones" if config.shared_kv_layers else "have embeddings of their own"
        raise InputError(f"--pipeline cannot cut a model whose layers {shares}: use --tensor-parallel, or leave it out")
    if count > config.num_layers:
        raise InputError(f"--pipeline {count} is more than the model's {config.num_layers} layers: give fewer stages")


def split_layers(config: ModelConfig, stages: int) -> list[tuple[int, int]]:
    """Layers [first, stop) of each stage, so that the one with most to multiply has as little as can be.

    Weights that a token is multiplied with are counted; the last stage has the output matrix besides.

    Args:
        config: The whole model's configuration.
        stages: Number of stages, no more than there are layers.
    """
    head = config.output_size * config.embed_size / max(1, config.matmul_params_per_layer)  # in layers
    if stages == 1:
        return [(0, config.num_layers)]

    def unevenness(last: int) -> tuple[float, float, int]:
        fewest, rest = divmod(config.num_layers - last, stages - 1)
        return max(last + head, fewest + bool(rest)), -min(last + head, fewest), last

    last = min(range(1, config.num_layers - stages + 2), key=unevenness)
    others, rest = divmod(config.num_layers - last, stages - 1)
    counts = [*(others + (i < rest) for i in range(stages - 1)), last]
    stops = list(itertools.accumulate(counts))
    return list(zip([0, *stops], stops, strict=False))


def largest_stage(config: ModelConfig, count: int) -> ModelConfig:
    """The shape that the largest stage is planned as: with as many layers, and both ends of the model."""
    return config.first_layers(max(stop - first for first, stop in split_layers(config, count)))


def stage_policy(policy: Policy, layers: int) -> Policy:
    """The policy of a stage with so many layers, from that of the largest stage: as evenly mixed over the tiers."""
    counts: dict[str, tuple[int, int, int]] = {}
    for group, placed in policy.weight_layers.items():
        tiers: Sequence[str] = list(spread_layers(placed))[:layers]
        counts[group] = (tiers.count("gpu"), tiers.count("cpu"), tiers.count("disk"))
    return replace(policy, weight_layers=counts)
