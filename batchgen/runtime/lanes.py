"""Carries out Steps: one thread for each lane that moves data or attends on the CPU, the caller's for `compute`.

Each lane takes its Steps in order and starts one when all it waits for have ended. As every Step waits for earlier ones
only, the earliest that has not ended can always run: there is no deadlock. `serial` runs the Steps one after the other
in the caller's thread, and is the specification.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from batchgen.core.errors import BatchgenError, one_line
from batchgen.schedule.step_graph import LANES, Lane, Step

# (step, start, end) in seconds of time.perf_counter; called from any lane's thread, one at a time.
OnStep = Callable[[Step, float, float], None]


class Lanes:
    """Lanes, and the threads that carry out their Steps.

    Invariant: a Step is pending from when it is issued until it has ended; nothing runs after a failure.

    Attributes:
        busy_s: Seconds in which each lane was busy.
        stalled_s: Seconds in which compute stood still, by the lane it waited for.
    """

    def __init__(
        self,
        perform: Callable[[Step], None],
        *,
        serial: bool = False,
        shared_cores: bool = False,
        on_step: OnStep | None = None,
        on_thread: Callable[[str], None] = lambda lane: None,
    ) -> None:
        """Start no thread before its lane has work.

        Args:
            perform: Does a Step's work.
            serial: Whether all Steps run in the caller's thread.
            shared_cores: Whether compute and CPU attention have the same cores, and take turns.
            on_step: Called after each Step, with its times.
            on_thread: Called with the lane in each thread that is started.
        """
        self.busy_s: dict[str, float] = dict.fromkeys(LANES, 0.0)
        # Seconds in which compute stood still, by the lane it waited for; CPU attention also where it had the cores.
        self.stalled_s: dict[str, float] = dict.fromkeys(LANES, 0.0)
        self._perform, self._serial, self._on_step, self._on_thread = perform, serial, on_step, on_thread
        self._cores = threading.Lock() if shared_cores and not serial else None
        self._lock = threading.Lock()
        # A lane is woken only by what it waits for: every thread that wakes takes the interpreter from the computing
        # one.
        self._wakes = {lane: threading.Condition(self._lock) for lane in LANES}
        self._waits_for: dict[Lane, int] = {}  # lane -> id of the Step it waits for
        self._drained = threading.Condition(self._lock)
        self._pending: dict[int, Lane] = {}  # id -> lane
        self._queues: dict[Lane, deque[Step]] = {lane: deque() for lane in LANES if lane != "compute"}
        self._threads: dict[Lane, threading.Thread] = {}
        self._failure: BaseException | None = None
        self._failure_raised = False
        self._closed = False

    def execute(self, steps: Iterable[Step]) -> Callable[[], None] | None:
        """Carry out Steps; return when all of `compute` have ended, while the last of other lanes may still run.

        Returns:
            None, or where Steps are only launched a function that waits for them and raises what one of them raised.

        Raises:
            BaseException: An error that a Step raised, in whichever lane.
        """
        if self._closed:
            raise RuntimeError("the lanes are closed")
        if self._failure_raised:
            reason = one_line(self._failure) or type(self._failure).__name__
            raise BatchgenError(
                f"this engine has failed and cannot go on ({reason}): make a new one"
            ) from self._failure
        try:
            for step in steps:
                self._check()
                self._begin(step)
        except BaseException as error:
            self._fail(error)
            self._failure_raised = True
            raise
        return None

    @contextlib.contextmanager
    def one_by_one(self) -> Iterator[None]:
        """Within the block, do each Step before the next one begins, so that nothing waits; time and report none."""
        before = self._serial, self._on_step
        self._serial, self._on_step = True, None
        try:
            yield
            self.drain()
        finally:
            self._serial, self._on_step = before
            for seconds in (self.busy_s, self.stalled_s):
                seconds.update(dict.fromkeys(seconds, 0.0))

    def reserve(self, lane: str, num_bytes: int) -> None:
        """Have so much memory ready for a lane, where a later allocation would have to be waited for."""

    def prepare(self, work: Callable[[], None]) -> None:
        """Do work that all Steps of the next sweep need."""
        work()

    def has_ended(self, step_id: int) -> bool:
        """Tell whether a Step that was issued has ended."""
        with self._lock:
            return step_id not in self._pending

    def drain(self) -> None:
        """Wait until every Step has ended. Raises what one of them raised."""
        with self._lock:
            self._drained.wait_for(lambda: self._closed or self._failure is not None or not self._pending)
            self._check()

    def close(self) -> None:
        """End the threads, once the Steps they are at have ended; Steps that wait are dropped."""
        with self._lock:
            self._closed = True
            for queue in self._queues.values():
                queue.clear()
            self._wake_all()
        for thread in self._threads.values():
            # Not alive where an interrupt came while it was being started. Itself where it was the last to have the
            # engine.
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join()
        self._threads.clear()

    def _begin(self, step: Step) -> None:
        """Run the Step, or hand it to its lane."""
        if step.lane == "compute" and not self._threads:  # nobody else: all that it waits for has ended
            self._run_alone(step)
            return
        with self._lock:
            self._pending[step.id] = step.lane
        if self._serial or step.lane == "compute":
            self._await_and_run(step, "compute")
        else:
            self._issue(step)

    def _run_alone(self, step: Step) -> None:
        started = time.perf_counter()
        self._perform(step)
        ended = time.perf_counter()
        self.busy_s["compute"] += ended - started
        if self._on_step:
            self._on_step(step, started, ended)

    def _ended(self, step: Step) -> None:
        """Note the end of a Step; called with the lock held."""

    def _issue(self, step: Step) -> None:
        if step.lane not in self._threads:
            thread = threading.Thread(target=self._work, args=(step.lane,), name=f"batchgen-{step.lane}", daemon=True)
            self._threads[step.lane] = thread
            thread.start()
        with self._lock:
            self._queues[step.lane].append(step)
            if step.lane not in self._waits_for:  # else it is waiting for a Step before this one
                self._wakes[step.lane].notify()

    def _work(self, lane: Lane) -> None:
        queue = self._queues[lane]
        self._on_thread(lane)
        while True:
            with self._lock:
                self._wakes[lane].wait_for(lambda: self._closed or self._failure is not None or queue)
                if self._closed or self._failure is not None:
                    return
                step = queue.popleft()
            try:
                self._await_and_run(step, lane)
            except BaseException as error:
                self._fail(error)
                return

    def _await_and_run(self, step: Step, thread: Lane) -> None:
        """Run a Step once all that it waits for has ended.

        Args:
            step: The Step.
            thread: Lane whose thread this is; with `serial`, compute's for all Steps.
        """
        self._await(step, thread)
        cores = self._cores if step.lane in ("compute", "cpu_attention") else None
        if cores is not None:
            self._take_cores(cores, step.lane)
        try:
            self._check()
            if self._closed:
                return
            started = time.perf_counter()
            self._perform(step)
            ended = time.perf_counter()
        finally:
            if cores is not None:
                cores.release()
        with self._lock:
            self.busy_s[step.lane] += ended - started
            del self._pending[step.id]
            self._ended(step)
            if self._on_step:
                self._on_step(step, started, ended)
            for lane, awaited in self._waits_for.items():
                if awaited == step.id:
                    self._wakes[lane].notify()
            if not self._pending:
                self._drained.notify_all()

    def _take_cores(self, cores: threading.Lock, lane: Lane) -> None:
        began = time.perf_counter()
        cores.acquire()
        if lane == "compute":
            self.stalled_s["cpu_attention"] += time.perf_counter() - began

    def _await(self, step: Step, thread: Lane) -> None:
        with self._lock:
            self._check()
            for earlier in step.after:
                lane = self._pending.get(earlier)
                if lane is None:
                    continue
                started = time.perf_counter()
                self._waits_for[thread] = earlier
                try:
                    self._wakes[thread].wait_for(partial(self._need_not_wait, earlier))
                finally:
                    del self._waits_for[thread]
                if step.lane == "compute":
                    self.stalled_s[lane] += time.perf_counter() - started
                self._check()

    def _need_not_wait(self, earlier: int) -> bool:
        return self._closed or self._failure is not None or earlier not in self._pending

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._failure = self._failure or error
            self._wake_all()

    def _wake_all(self) -> None:
        for wake in (*self._wakes.values(), self._drained):
            wake.notify_all()
