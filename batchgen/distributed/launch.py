"""The ranks of a group: started by a launcher such as `torchrun`, or by rank 0 on its own host."""

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
    """A process's place in a group.

    Attributes:
        rank: Its number.
        size: Number of ranks.
        host: MASTER_ADDR, the host of rank 0, or of the launcher's store, which knows that of rank 0.
        port: MASTER_PORT, the port there.
        has_store: True where the launcher has such a store, as `torchrun` does.
        of_host: Its number among the ranks of its host, and how many these are.
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
    """This process's place as a launcher has set it in RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; None: nobody has.

    Raises:
        InputError: Some are missing, or are no numbers.
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
    """Tell whether a host's first address is one that only the host itself reaches; False where it is not known."""
    with suppress(OSError, ValueError):
        address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]
        return ipaddress.ip_address(str(address).partition("%")[0]).is_loopback
    return False


def own_device(index: int, environment: Mapping[str, str] | None = None) -> str:
    """The one CUDA device of a process, in the form of CUDA_VISIBLE_DEVICES.

    Args:
        index: The process's number among the ranks of its host.
        environment: Environment of the process that has started it. What a launcher has narrowed to a single device
            stays.
    """
    environment = os.environ if environment is None else environment
    if not (visible := environment.get("CUDA_VISIBLE_DEVICES", "").strip()):
        return str(index)
    names = visible.split(",")
    return names[min(index, len(names) - 1)]


def core_shares(size: int, cores: set[int], nodes: list[set[int]]) -> list[set[int]]:
    """The cores of each process of a host: whole NUMA nodes where these divide evenly, else equal numbers of cores.

    Args:
        size: Processes.
        cores: Cores that there are.
        nodes: Cores of each NUMA node.

    Returns:
        A set for each process; all cores for each where there are fewer cores than processes.
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
    """`core_shares` of those that this thread may run on; empty sets where the system does not say."""
    if not hasattr(os, "sched_getaffinity"):
        return [set()] * size
    return core_shares(size, os.sched_getaffinity(0), _numa_nodes())


def keep_to(cores: set[int]) -> set[int]:
    """From now on this thread, those that it starts and the kernels run on these cores only; returns those of before.

    Nothing happens where there are none.
    """
    if not cores or not hasattr(os, "sched_setaffinity"):
        return set()
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    follow_affinity()
    return before


def ranks_of_host(size: int) -> int:
    """The number of ranks, of so many, on this host: all, unless a launcher says otherwise. Raises InputError."""
    place = rank_of_environment() if size > 1 else None
    return place.of_host[1] if place else size


@contextlib.contextmanager
def own_share(size: int) -> Iterator[list[set[int]]]:
    """Keep this thread, and those that it starts, to rank 0's share of the cores within the block.

    The value is the shares of all ranks of the host. Nothing happens where there is one rank.
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
    """The cores that a text such as "0-3,8" names: {0, 1, 2, 3, 8}."""
    cores: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        cores |= set(range(int(first), int(last or first) + 1))
    return cores


class Processes:
    """The other ranks of a host, started by rank 0. They end with it, as their connection to it does."""

    def __init__(self, size: int, port: int, secret: bytes, work: str, cores: list[set[int]]) -> None:
        """Start ranks 1 to size - 1.

        Args:
            size: Ranks, this one included.
            port: Port at which this one listens.
            secret: Secret that the ranks share. Environments are their user's alone to read.
            work: Function of each rank, as "module:name".
            cores: Cores of each rank, this one included.
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
        """The fates of the ranks that have ended, by rank."""
        fates = {rank: self.fate_of(rank, within_s=0.0) for rank in self._running}
        return {rank: fate for rank, fate in fates.items() if fate is not None}

    def fate_of(self, rank: int, within_s: float = _END_S) -> str | None:
        """The way in which a rank has ended; None: it has not ended, nor does within so many seconds."""
        try:
            code = self._running[rank].wait(within_s)
        except subprocess.TimeoutExpired:
            return None
        return f"rank {rank} of {self._size} {_fate(code)}"

    def end(self) -> None:
        """Return when all have ended; those that do not are killed."""
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
