"""The threads of lanes, and the cores that torch and the kernels share."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch

from batchgen.ops import cpp as kernels
from batchgen.runtime.dedicated_core import DedicatedCore

_of_thread = threading.local()


def prepare_thread(lane: str, dedicated_core: DedicatedCore | None = None) -> None:
    """Have the calling thread, which is a lane's, make copies alone.

    A team of threads would wait for the cores that compute has.

    Args:
        lane: Lane of the thread.
        dedicated_core: Cores of an emulated accelerator; None: all lanes have the same.
    """
    if dedicated_core is not None:
        dedicated_core.keep_lane(lane)
    _of_thread.inference = torch.inference_mode()  # until the thread ends
    _of_thread.inference.__enter__()
    torch.set_num_threads(1)
    if lane not in ("compute", "cpu_attention"):
        kernels.run_alone()


@contextlib.contextmanager
def kernels_alone() -> Iterator[None]:
    """Leave the cores to the kernels' threads: torch's operations are done by the caller alone.

    A team of torch's would go on looking for work, on the same cores, for milliseconds after each of its operations.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
