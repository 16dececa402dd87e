"""The program of every rank but 0: it joins the group and carries out what rank 0 sends."""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
import time

from batchgen.core.errors import BatchgenError
from batchgen.core.imports import import_torch, importing
from batchgen.core.screen import say
from batchgen.distributed.group import OthersLost, follow
from batchgen.distributed.launch import SECRET, Rank, keep_to, own_device, rank_of_environment, shares_here

# For rank 0 to end, and this process with it: it is to find out who has ended, and not to hear of this one first.
_LOST_S = 15.0
_PARENT_S = 0.5  # how often a process looks whether the one that started it has ended


def serve(place: Rank, work: str, *, cores: set[int] | None = None) -> int:
    """Run a rank other than 0 until rank 0 has ended; gives the process's exit code.

    The process ends at once where rank 0 ends without a final message. It shows the user only why it could not join
    and, under a launcher, that rank 0 has ended. Later errors are sent to rank 0, which reports them.

    Args:
        place: This process's place in the group.
        work: The function to call with the group, as "module:function". It returns the most bytes that the process has
            held in each tier, or None. The name comes from whoever starts the process, never from a connection.
        cores: CPU cores to pin the process to, chosen by the rank 0 that has started it. None: a launcher has started
            the process, which takes its share of the host's cores.
    """
    started_here = cores is not None
    keep_to(shares_here(place.of_host[1])[place.of_host[0]] if cores is None else cores)
    if not started_here:
        os.environ["CUDA_VISIBLE_DEVICES"] = own_device(place.of_host[0])
    module, _, name = work.partition(":")
    with importing():  # which takes seconds: rank 0 waits for it as for the start
        import_torch()
        function = getattr(importlib.import_module(module), name)
    try:
        group = follow(place, lambda: _lost(place, started_here))
    except BatchgenError as error:
        say(f"batchgen: {error}")
        return error.exit_code
    os.environ.pop(SECRET, None)  # processes that this one starts need not know it
    try:
        group.end(function(group) or {})
    except EOFError:
        group.end({})
        return 0
    except OthersLost as error:
        time.sleep(_LOST_S)
        return error.exit_code
    except Exception as error:
        group.fail(error)
        return error.exit_code if isinstance(error, BatchgenError) else 1
    finally:
        group.close()
    return 0


def _lost(place: Rank, started_here: bool) -> None:
    """End the process at once, whatever it is doing, since rank 0 was lost.

    Args:
        place: This process's place in the group.
        started_here: True where rank 0 has started this process; False where a launcher has.
    """
    if not started_here:  # rank 0 says why, where it can: on its own host perhaps
        say(f"batchgen: rank {place.rank} of {place.size} ends: rank 0 has ended before it was done")
    os._exit(1)


def main() -> None:
    """Run a rank that rank 0 has started.

    Command-line arguments: the work as "module:function", a JSON list of cores, and the process id of rank 0.
    """
    place = rank_of_environment()
    assert place is not None, "rank 0 has set it"
    work, cores, parent = sys.argv[1:4]
    threading.Thread(target=_end_after, args=(int(parent),), name="parent", daemon=True).start()
    sys.exit(serve(place, work, cores=set(json.loads(cores))))


def _end_after(parent: int) -> None:
    """End this process when its parent has ended; before they are connected, nothing else would tell."""
    while os.getppid() == parent:
        time.sleep(_PARENT_S)
    os._exit(1)
