"""Triton's kernels that a job is the first to launch on a card, though its engine has warmed up.

A first launch loads a kernel. That may wait for all that the card has to do, also for what waits for the host; and
Triton compiles the kernel before.
"""

import sys
import threading
from contextlib import contextmanager

from triton.compiler import CompiledKernel
from triton.runtime import JITFunction

from batchgen.ops.triton import launch as launches
from batchgen.runtime.streams import StreamLanes


def noted_in_jobs(monkeypatch) -> list[str]:
    """Have all kernels forgotten, and note those that jobs launch for the first time.

    But for Steps of all layers: they are those of engines in which nothing waits for the host.

    Returns:
        List to which they are added, each with the kind of Step that launches it.
    """
    _forget()
    noted, thread = [], threading.local()
    load, launch, prepare = CompiledKernel._init_handles, StreamLanes._launch, StreamLanes.prepare

    def loading(kernel) -> None:
        is_first = kernel.module is None
        load(kernel)
        if is_first and getattr(thread, "kind", None):
            noted.append(f"{kernel.name} in {thread.kind}")

    @contextmanager
    def noting(lanes, kind):
        if lanes._serial or kind == "layers":  # engines warm up with one Step after the other
            yield
            return
        thread.kind = kind
        try:
            yield
        finally:
            thread.kind = None

    def launching(lanes, step) -> None:
        with noting(lanes, step.kind):
            launch(lanes, step)

    def preparing(lanes, work) -> None:
        with noting(lanes, "what comes before the Steps"):
            prepare(lanes, work)

    monkeypatch.setattr(CompiledKernel, "_init_handles", loading)
    monkeypatch.setattr(StreamLanes, "_launch", launching)
    monkeypatch.setattr(StreamLanes, "prepare", preparing)
    return noted


def _forget() -> None:
    launches._compiled.clear()
    modules = [module for name, module in sys.modules.items() if name.startswith("batchgen.ops.triton.")]
    for function in (value for module in modules for value in vars(module).values()):
        if isinstance(function, JITFunction):
            function.device_caches.clear()
