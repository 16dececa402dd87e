"""An actor's share of its machine: the CPU cores and the memory that Ray has given to it."""

from __future__ import annotations

import os
from collections.abc import Mapping

from batchgen.core.cores import take_cores
from batchgen.core.machine import available_memory_bytes


def take_share() -> tuple[int, int] | None:
    """Limit this process to its actor's share of the machine; to be called before kernels are loaded.

    The process is pinned to as many cores as Ray has given to the actor, cores of no other actor of this machine. If
    not enough cores are free, it gets that number of threads without pinning.

    Returns:
        Number of cores, and bytes of memory; None outside of an actor.
    """
    try:
        import ray
    except ImportError:
        return None
    if not ray.is_initialized() or (context := ray.get_runtime_context()).get_actor_id() is None:
        return None
    node = next(node["Resources"] for node in ray.nodes() if node["NodeID"] == context.get_node_id())
    cores, memory = share_of(context.get_assigned_resources(), node, available_memory_bytes())
    use_cores(cores)
    return cores, memory


def share_of(granted: Mapping[str, float], node: Mapping[str, float], free_bytes: int) -> tuple[int, int]:
    """An actor's share of its machine: a number of cores, at least one, and bytes of memory.

    If Ray was not told the actor's memory, the actor gets the same part of Ray's memory as of Ray's cores. It never
    gets more than is free.

    Args:
        granted: Resources that Ray has given to the actor, by Ray's names.
        node: Resources that Ray has on the machine, by Ray's names.
        free_bytes: Free memory of the machine.
    """
    cores = granted.get("CPU", 0.0) or 1.0
    part = min(1.0, cores / max(1.0, node.get("CPU", 0.0)))
    memory = granted.get("memory") or part * node.get("memory", free_bytes)
    return max(1, int(cores)), int(min(memory, free_bytes))


def use_cores(count: int) -> None:
    """Pin this process to `count` cores, with as many threads unless the environment sets the number of threads."""
    take_cores(count)
    os.environ.setdefault("BATCHGEN_NUM_THREADS", str(count))
