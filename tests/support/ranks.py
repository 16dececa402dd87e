"""What ranks are told to do in tests of groups: functions that their processes can import."""

import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from batchgen.core.errors import InputError
from batchgen.distributed.group import Group, lead


def start(size: int, work: Callable[..., Any], *arguments: Any) -> Group:
    """A group whose other ranks are processes that call a function of this module, and hear what else it takes."""
    group = lead(size, work=f"ranks:{work.__name__}")
    say(group, arguments)
    return group


def say(group: Group, message: Any) -> None:
    group.broadcast(json.dumps(message).encode())


def heard(group: Group) -> Any:
    """The next message of rank 0."""
    return json.loads(group.receive_broadcast())


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def check_memory_of_two(report: Path, log: Path) -> None:
    """A job of two processes tells the peak memory of each, in its report and on the screen."""
    found = json.loads(report.read_text())
    assert [process["rank"] for process in found["processes"]] == [0, 1]
    assert found["processes"][0]["peak_bytes"] == found["peak_bytes"]
    assert found["processes"][1]["peak_bytes"]["cpu"] > 100e6, "torch alone takes more"
    assert "peak memory of the 2 processes, rank 0 first: " in log.read_text()


def add_up(group: Group) -> None:
    """Sums of all ranks' numbers, a ring of messages, and what rank 0 says meanwhile."""
    (rounds,) = heard(group)
    for _ in range(rounds):
        values = torch.arange(4, dtype=torch.float32) * 10**group.rank
        group.all_reduce(values)
        assert values.tolist() == [k * sum(10**r for r in range(group.size)) for k in range(4)]
    passed = torch.zeros(2)
    group.receive(passed, group.rank - 1)
    group.send(passed + group.rank, (group.rank + 1) % group.size)
    assert heard(group) == {"more": [1, 2]}
    group.ready()
    with contextlib.suppress(EOFError):  # one that ends before the others are ready has failed
        group.receive_broadcast()


def add_up_on_cards(group: Group) -> None:
    """Sums of tensors on the ranks' own CUDA devices, of each of several dtypes, each of what the sum before gave."""
    names, rounds = heard(group)
    for name in names:
        check_sums_on_cards(group, name, rounds)
    group.ready()
    with contextlib.suppress(EOFError):
        group.receive_broadcast()


def check_sums_on_cards(group: Group, dtype: str, rounds: int) -> None:
    values = torch.arange(24, dtype=getattr(torch, dtype), device="cuda").view(3, 8) * (group.rank + 1)
    for _ in range(rounds):
        group.all_reduce(values)
    factor = sum(range(1, group.size + 1)) * group.size ** (rounds - 1)
    assert values.flatten().tolist() == [factor * k for k in range(24)]


def die_on_cards(group: Group) -> None:
    """The rank `first` is killed before the sum of that number on CUDA devices; others add up twice."""
    number, first, dies_before = heard(group)
    for step in range(2):
        if group.rank == first and step == dies_before:
            os.kill(os.getpid(), number)
        group.all_reduce(torch.ones(3, device="cuda"))
        torch.cuda.synchronize()


def say_ready(group: Group) -> None:
    heard(group)
    group.ready()
    with contextlib.suppress(EOFError):
        group.receive_broadcast()


def hold(group: Group) -> dict[str, int]:
    """Says how much it held, once rank 0 says that all is done."""
    (peaks,) = heard(group)
    with contextlib.suppress(EOFError):
        group.receive_broadcast()
    return {"cpu": peaks[group.rank - 1]}


def refuse(group: Group) -> None:
    heard(group)
    raise InputError("no such model\nhere")


def die(group: Group) -> None:
    """The rank `first` is killed between two sums."""
    number, first = heard(group)
    for step in range(2):
        if group.rank == first and step:
            os.kill(os.getpid(), number)
        group.all_reduce(torch.ones(3))


def wait_for_ever(group: Group) -> None:
    """Notes the process's number in a file, and hangs."""
    (path,) = heard(group)
    Path(f"{path}.{group.rank}").write_text(str(os.getpid()))
    group.ready()
    time.sleep(600)


def be_killed_as_leader(path: str) -> None:
    """As a program: leads two others that hang, and is killed."""
    group = start(3, wait_for_ever, path)
    group.ready()
    os.kill(os.getpid(), signal.SIGKILL)


def be_killed_as_leader_at_the_start(path: str) -> None:
    """As a program: starts two others and is killed before they have found it."""
    from batchgen.distributed.listener import Listener

    def wait_for(listener: Listener, channel: int, others: Any, timeout_s: float, gone: Any) -> None:
        for rank, process in gone.__self__._running.items():
            Path(f"{path}.{rank}").write_text(str(process.pid))
        os.kill(os.getpid(), signal.SIGKILL)

    Listener.wait_for = wait_for  # type: ignore[method-assign]
    lead(3, work="ranks:say_ready")


def note_device(group: Group) -> None:
    """Notes in a file which CUDA device the process sees."""
    (path,) = heard(group)
    Path(f"{path}.{group.rank}").write_text(os.environ["CUDA_VISIBLE_DEVICES"])
    group.ready()
