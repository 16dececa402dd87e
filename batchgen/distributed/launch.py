"""Start of a group's ranks, by a launcher such as `torchrun` or by rank 0 on its own host."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchgen.core.errors import InputError
from batchgen.core.python_command import python_command
from batchgen.ops.instruction_set import follow_affinity

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# What all ranks of a job know, and nobody else: itself, or a file that has it.
SECRET, SECRET_FILE = "BATCHGEN_SECRET", "BATCHGEN_SECRET_FILE"
LOOPBACK = "127.0.0.1"
_NODES = Path("/sys/devices/system/node")
_END_S = 5.0  # for a process that was told to end


@dataclass(frozen=True)
class Rank:
    """The place of a process in a group of ranks.

    Attributes:
        rank: Number of the process.
        size: Number of ranks.
        host: MASTER_ADDR: the host of rank 0, or of the launcher's store, where rank 0's address is found.
        port: MASTER_PORT: the port on that host.
        has_store: True where the launcher runs a key-value store, as `torchrun` does.
        of_host: Number of the process among the ranks of its host, and number of these ranks.
        on_one_host: True where all ranks are on this host.
        run: The launcher's name for this launch.
    """

    rank: int
    size: int
    host: str
    port: int
    has_store: bool
    of_host: tuple[int, int]
    on_one_host: bool = True
    run: str = ""


def rank_of_environment(environment: Mapping[str, str] | None = None) -> Rank | None:
    """The place that a launcher has set in RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; None without a launcher.

    Raises:
        InputError: Some of the variables are missing or invalid.
    """
    environment = os.environ if environment is None else environment
    if "RANK" not in environment or environment.get("WORLD_SIZE", "1") == "1":
        return None
    missing = [name for name in _VARIABLES if not environment.get(name)]
    if missing:
        raise InputError(f"RANK is set, {missing[0]} is not: start all ranks by torchrun, or unset RANK")
    try:
        rank, size, port = (int(environment[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    except ValueError as error:
        raise InputError(f"RANK, WORLD_SIZE and MASTER_PORT must be whole numbers: {error}") from error
    if not 0 <= rank < size:
        raise InputError(f"RANK {rank} is not one of the {size} that WORLD_SIZE says: 0 to {size - 1}")
    try:
        of_host = int(environment.get("LOCAL_RANK", rank)), int(environment.get("LOCAL_WORLD_SIZE", size))
    except ValueError as error:
        raise InputError(f"LOCAL_RANK and LOCAL_WORLD_SIZE must be whole numbers: {error}") from error
    host = environment["MASTER_ADDR"]
    return Rank(
        rank,
        size,
        host,
        port,
        has_store=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        of_host=of_host,
        on_one_host=of_host[1] == size if "LOCAL_WORLD_SIZE" in environment else is_loopback(host),
        run=environment.get("TORCHELASTIC_RUN_ID", ""),
    )


def is_loopback(host: str) -> bool:
    """True where a host's first address is a loopback address; False where the host is not known."""
    with suppress(OSError, ValueError):
        address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]
        return ipaddress.ip_address(str(address).partition("%")[0]).is_loopback
    return False


def own_device(index: int, environment: Mapping[str, str] | None = None) -> str:
    """The value of CUDA_VISIBLE_DEVICES that leaves a process its one CUDA device.

    Args:
        index: Number of the process among the ranks of its host.
        environment: Environment of the process that starts it. A value with a single device, which a launcher has set,
            is kept.
    """
    environment = os.environ if environment is None else environment
    if not (visible := environment.get("CUDA_VISIBLE_DEVICES", "").strip()):
        return str(index)
    names = visible.split(",")
    return names[min(index, len(names) - 1)]


def core_shares(size: int, cores: set[int], nodes: list[set[int]]) -> list[set[int]]:
    """Divide the CPU cores of a host among processes, by whole NUMA nodes where possible, else in equal numbers.

    Args:
        size: Number of processes.
        cores: The cores to divide.
        nodes: Cores of each NUMA node.

    Returns:
        A set of cores for each process. Where there are fewer cores than processes, each gets all cores.
    """
    if len(cores) < size:
        return [set(cores)] * size
    own = [node & cores for node in nodes if node & cores]
    if len(own) >= size and len(own) % size == 0 and len({len(node) for node in own}) == 1:
        each = len(own) // size
        return [set().union(*own[i * each : (i + 1) * each]) for i in range(size)]
    ordered, each = sorted(cores), len(cores) // size
    return [set(ordered[i * each : (i + 1) * each]) for i in range(size)]


def shares_here(size: int) -> list[set[int]]:
    """Divide the CPU cores that this thread may use among processes; empty sets where cores are not reported.

    Args:
        size: Number of processes.
    """
    if not hasattr(os, "sched_getaffinity"):
        return [set()] * size
    return core_shares(size, os.sched_getaffinity(0), _numa_nodes())


def keep_to(cores: set[int]) -> set[int]:
    """Pin this thread, threads that it starts later, and compute kernels to these cores; gives the earlier cores.

    An empty set changes nothing and gives an empty set.
    """
    if not cores or not hasattr(os, "sched_setaffinity"):
        return set()
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    follow_affinity()
    return before


def ranks_of_host(size: int) -> int:
    """The number of ranks on this host: `size`, unless a launcher says otherwise. Raises InputError."""
    place = rank_of_environment() if size > 1 else None
    return place.of_host[1] if place else size


@contextlib.contextmanager
def own_share(size: int) -> Iterator[list[set[int]]]:
    """Pin this thread, and threads that it starts, to rank 0's share of the CPU cores while the block runs.

    The value is the shares of all ranks of the host. With one rank, nothing is pinned.

    Args:
        size: Number of ranks.
    """
    place = rank_of_environment() if size > 1 else None
    shares = shares_here(place.of_host[1] if place else max(1, size))
    before = keep_to(shares[0]) if size > 1 else set()
    try:
        yield shares
    finally:
        keep_to(before)


def _numa_nodes() -> list[set[int]]:
    found = []
    with suppress(OSError, ValueError):
        for node in sorted(_NODES.glob("node[0-9]*"), key=lambda path: int(path.name[4:])):
            found.append(_cores_in((node / "cpulist").read_text().strip()))
    return found


def _cores_in(text: str) -> set[int]:
    """Parse a list of cores such as "0-3,8" into {0, 1, 2, 3, 8}."""
    cores: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        cores |= set(range(int(first), int(last or first) + 1))
    return cores


class Processes:
    """The processes of the other ranks of a host, which rank 0 has started; they end when rank 0 ends."""

    def __init__(self, size: int, port: int, secret: bytes, work: str, cores: list[set[int]]) -> None:
        """Start ranks 1 to size - 1.

        Args:
            size: Number of ranks, this one included.
            port: Port at which rank 0 accepts connections.
            secret: The secret of the job, which is passed in the environment, since only this user can read that.
            work: The function that each rank calls, as "module:name".
            cores: CPU cores of each rank, this one included.
        """
        self._size = size
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        for rank in range(1, size):
            place = {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": LOOPBACK, "MASTER_PORT": port}
            place |= {"LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
            variables = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
            variables |= {name: str(value) for name, value in place.items()}
            variables |= {SECRET: secret.decode(), SECRET_FILE: ""}
            variables["CUDA_VISIBLE_DEVICES"] = own_device(rank)
            variables.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # what goes wrong is said in a line, by rank 0
            arguments = work, json.dumps(sorted(cores[rank])), str(os.getpid())
            self._running[rank] = subprocess.Popen(
                python_command("batchgen.distributed.serve", *arguments),
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr.fileno() if _has_file(sys.stderr) else subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is rank 0's, which ends them
            )

    def gone(self) -> dict[int, str]:
        """The ranks whose processes have ended, each with a description of its end."""
        fates = {rank: self.fate_of(rank, within_s=0.0) for rank in self._running}
        return {rank: fate for rank, fate in fates.items() if fate is not None}

    def fate_of(self, rank: int, within_s: float = _END_S) -> str | None:
        """A description of how a rank's process has ended; None where it has not ended.

        Args:
            rank: Number of the rank.
            within_s: Seconds to wait for the process to end.
        """
        try:
            code = self._running[rank].wait(within_s)
        except subprocess.TimeoutExpired:
            return None
        return f"rank {rank} of {self._size} {_fate(code)}"

    def end(self) -> None:
        """Wait until all processes have ended; those that do not end in time are killed."""
        deadline_s = time.monotonic() + _END_S
        for process in self._running.values():
            try:
                process.wait(max(0.0, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _fate(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was killed by {name}" + (" (perhaps for want of memory)" if name == "SIGKILL" else "")


def _has_file(stream: Any) -> bool:
    try:
        return bool(stream.fileno() >= 0)
    except (AttributeError, OSError, ValueError):
        return False
