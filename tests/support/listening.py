"""Which sockets of a process and its children listen, as `ss -ltn` has it."""

import contextlib
import ipaddress
import os
import threading
from collections.abc import Iterator
from pathlib import Path

_LISTEN = "0A"


def with_children(pid: int) -> set[int]:
    """A process and all that it has started, directly or not."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def listening(pids: set[int]) -> set[tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]]:
    """Addresses and ports on which these processes listen."""
    inodes = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    inodes.add(os.readlink(descriptor))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTEN and f"socket:[{fields[9]}]" in inodes:
                host, port = fields[1].split(":")
                words = [bytes.fromhex(host[i : i + 8])[::-1] for i in range(0, len(host), 8)]
                found.add((ipaddress.ip_address(b"".join(words)), int(port, 16)))
    return found


@contextlib.contextmanager
def watched() -> Iterator[set]:
    """The addresses on which this process and its children begin to listen meanwhile."""
    found, before, has_ended = set(), listening({os.getpid()}), threading.Event()

    def watch() -> None:
        while not has_ended.wait(0.01):
            found.update(listening(with_children(os.getpid())) - before)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        has_ended.set()
        thread.join()
