"""Kernels that a job is the first to launch on a card, though its engine has warmed up.

A first launch loads a kernel. That may wait for all that the card has to do, also for what waits for the host; and
Triton compiles the kernel before.
"""

import ctypes
import sys
import threading
from contextlib import contextmanager

from triton.compiler import CompiledKernel
from triton.runtime import JITFunction

from batchgen.ops.triton import launch as launches
from batchgen.runtime.streams import StreamLanes

_library = ctypes.CDLL("libcuda.so.1")
_is_played = hasattr(_library, "played_watch_launches")
if _is_played:
    _library.played_first_launch.restype = ctypes.c_char_p
    _library.played_first_launch.argtypes = [ctypes.c_long]


def noted_in_jobs(monkeypatch) -> list[str]:
    """Have all kernels forgotten, and note those that jobs launch for the first time.

    But for Steps of all layers: they are those of engines in which nothing waits for the host.

    Returns:
        List to which they are added, each with the kind of Step that launches it: those of Triton, and on a played card
            those of torch.
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
        _watch(True)
        try:
            yield
        finally:
            noted.extend(f"{name} in {kind}" for name in _of_torch())
            thread.kind = None
            _watch(False)

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


def _watch(is_on: bool) -> None:
    if _is_played:
        _library.played_watch_launches(int(is_on))


def _of_torch() -> list[str]:
    """The kernels of torch that this thread has launched for the first time since it is watched."""
    count = _library.played_num_first_launches() if _is_played else 0
    return [_library.played_first_launch(number).decode() for number in range(count)]


def _forget() -> None:
    launches._compiled.clear()
    modules = [module for name, module in sys.modules.items() if name.startswith("batchgen.ops.triton.")]
    for function in (value for module in modules for value in vars(module).values()):
        if isinstance(function, JITFunction):
            function.device_caches.clear()
    if _is_played:
        _library.played_forget_launches()
