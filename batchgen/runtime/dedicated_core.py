"""An emulated accelerator with a dedicated core: the cores that lanes run on, and the throttle of their work.

Computation runs on the accelerator's core, CPU attention and the disk's lanes on the others, and copies of its links
on whichever sleeps: an accelerator copies beside what it computes. A Step takes a given number of times as long as a
core is busy with it: the rest is slept. So a device that is slower than a core, or than the CPU beside it, needs no
more of the machine than it would have.
Steps are still carried out by their lanes, one after the other, and nothing has its result before its time.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator

from batchgen.core.cores import dedicated_core, on_cores
from batchgen.ops import cpp as kernels
from batchgen.runtime.sleeps import Sleeps
from batchgen.schedule.step_graph import Step

# Of compute's Steps, those that are copies, which the links slow down.
_COPIES = ("embed", "load_attention", "join_deferred")
_LINKS = ("h2d", "d2h")
# A thread this nice gives up its core at once to one that wants to compute, and has a tenth of it where that one never
# sleeps.
_LINKS_NICE = 10


class Throttle:
    """Throttle of one lane's work, which takes longer within. Not for several threads at once."""

    def __init__(self, slowdown: float) -> None:
        """Throttle nothing yet.

        Args:
            slowdown: Factor by which work takes longer than its thread is busy with it, 1 or more.
        """
        self._slowdown = slowdown
        self._hosts_s = 0.0
        self._sleeps = Sleeps()

    @contextlib.contextmanager
    def held(self, overhead_s: float = 0.0) -> Iterator[None]:
        """Have the work inside take its time, and `overhead_s` more. Time that the work waits is not slowed down."""
        started, busy = time.perf_counter(), time.thread_time()
        self._hosts_s = 0.0
        yield
        if self._slowdown == 1 and not overhead_s:
            return
        busy_s = time.thread_time() - busy - self._hosts_s
        self._sleeps.until(started + self._slowdown * busy_s + self._hosts_s + overhead_s)

    @contextlib.contextmanager
    def hosts(self) -> Iterator[None]:
        """Within `held`, mark work that is the host's, and takes as long as it does."""
        busy = time.thread_time()
        yield
        self._hosts_s += time.thread_time() - busy


class DedicatedCore:
    """The cores of a process, shared out between an emulated accelerator and the CPU."""

    def __init__(self, slowdown: float, cpu_slowdown: float = 1.0, step_overhead_s: float = 0.0) -> None:
        """Take the last of the cores for the accelerator.

        Args:
            slowdown: Slowdown of what the accelerator computes.
            cpu_slowdown: Slowdown of CPU attention.
            step_overhead_s: Seconds that one layer of one micro-batch takes besides.

        Raises:
            InputError: There are not two cores.
        """
        self._core, self._others = dedicated_core()
        self._throttles = {"compute": Throttle(slowdown), "cpu_attention": Throttle(cpu_slowdown)}
        self._step_overhead_s = step_overhead_s
        self._threads = kernels.num_threads()
        kernels.set_num_threads(min(self._threads, len(self._others)))

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Have the calling thread be the accelerator's within the block."""
        with on_cores(self._core), kernels.alone():
            yield

    def keep_lane(self, lane: str) -> None:
        """Keep the calling thread, which is a lane's, to the lane's cores. A link's lets all others go first."""
        os.sched_setaffinity(0, self._core | self._others if lane in _LINKS else self._others)
        if lane in _LINKS:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LINKS_NICE)

    def throttled(self, step: Step) -> contextlib.AbstractContextManager[None]:
        """Have a Step's work take its time within the block."""
        throttle = self._throttles.get(step.lane)
        if throttle is None or step.kind in _COPIES:
            return contextlib.nullcontext()
        return throttle.held(
            self._step_overhead_s if step.kind == "pre" else 0.0
        )  # each micro-batch has one of these in each layer

    def hosts(self) -> contextlib.AbstractContextManager[None]:
        """Mark work of the host within a Step of `compute`, such as sampling from the logits that are handed over."""
        return self._throttles["compute"].hosts()

    def close(self) -> None:
        """Give the kernels their threads back."""
        kernels.set_num_threads(self._threads)
