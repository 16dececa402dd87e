"""Carries out Steps on a device with streams: work is launched ahead, on a stream for each of the device's lanes.

A launch returns long before its work is done. The caller's thread launches all Steps of `compute`, `h2d` and `d2h` in
their order. The device itself waits, stream for stream; for the host's lanes it waits at host semaphores: counters in
host memory of how many Steps a lane has ended. Disk and CPU attention have threads of their own (`lanes`), which wait
for the device by its events. So the launching thread waits only where it is too far ahead: a few layers at most, as
what is launched holds memory, and a few Steps, as streams hold a limited number of operations.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from batchgen.runtime.lanes import Lanes, OnStep
from batchgen.schedule.step_graph import Lane, Step

if TYPE_CHECKING:
    from torch import Tensor

STREAMS = ("compute", "h2d", "d2h")
# Layers before the one that is being launched whose computation may not be done.
LAYERS_AHEAD = 2
# Operations that a stream may hold when a Step is launched. A CUDA stream takes about 1,024; a launch beyond these
# blocks, perhaps with the interpreter's lock, so that no host lane signals the semaphore that the stream waits at. This
# leaves a Step as many again.
MOST_QUEUED = 512
# Kernels and events of a Step, at most, as far as they are not counted one by one: the router of Phi-3.5-MoE, with an
# MLP's experts, has the most.
STEP_OPERATIONS = 48
LAUNCH = "launch"  # what compute waits for where the host is late

Event = Any


class Driver(Protocol):
    """A device with streams, one for each lane that it has. An Event is a position in a stream."""

    def launch(self, lane: str, work: Callable[[], None]) -> int:
        """Call work(), whose operations go to the stream.

        Returns:
            Number of operations beside those that every Step may have: copies (`note_copy`), and what was noted
                (`ops.long_steps`).
        """
        ...

    def note_copy(self) -> None:
        """Count a copy that a link has launched: of large tensors it makes many."""
        ...

    def record(self, lane: str) -> Event:
        """Mark what has been launched there so far."""
        ...

    def wait(self, lane: str, event: Event) -> None:
        """Have what is launched there from now on wait for the event."""
        ...

    def wait_for_host(self, lane: str, host_lane: str, count: int) -> None:
        """Have what is launched there from now on wait until the host lane's semaphore has reached `count`."""
        ...

    def signal(self, host_lane: str, count: int) -> None:
        """Raise the host lane's semaphore to `count`, which is never less than before."""
        ...

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Record what work() launches, instead of running it, as a CUDA graph.

        The result replays it on the current stream as often as it is called, always on the same memory. The streams may
        be at work meanwhile, but none of them waits at a semaphore: sweeps that are captured move nothing, so no Step
        of theirs is a host lane's.
        """
        ...

    def reserve(self, lane: str, num_bytes: int) -> None:
        """Allocate so much of the device's memory for what a lane's stream makes.

        The stream then needs no more: a later allocation may wait for all that the device has to do.
        """
        ...

    def upload(self, tensor: Tensor) -> Tensor:
        """Copy a tensor of the host to the device, on the stream that computes; the source may change at once.

        Needs no new memory of the host; where much is on its way, waits for some of it.
        """
        ...

    def borrow(self, tensor: Tensor) -> None:
        """Keep the tensor's memory until the work launched so far on the current stream is done.

        For a stream other than the tensor's own.
        """
        ...

    def synchronize(self, event: Event) -> None:
        """Wait until the event has come. Other threads run meanwhile."""
        ...

    def is_done(self, event: Event) -> bool: ...

    def seconds(self, start: Event, stop: Event) -> float:
        """Seconds between two events that have come."""
        ...

    def finish(self) -> None:
        """Wait until nothing is under way."""
        ...

    def close(self) -> None:
        """Let go of the driver's own memory of the host: nothing is under way, and nothing will be launched."""
        ...


class _Timed(NamedTuple):
    """Events of a Step in its stream.

    Attributes:
        step: The Step.
        before: End of the Step before it in the stream, in the same sweep; None: there is none.
        reached: Event when the stream comes to the Step's waits.
        waited_for: Lane of the Step that is waited for last; None: there is none.
        started: Event when there is nothing more to wait for.
        ended: End of the Step.
    """

    step: Step
    before: Event | None
    reached: Event
    waited_for: str | None
    started: Event
    ended: Event


class StreamLanes(Lanes):
    """Lanes of a device with streams.

    Invariant: a Step's work starts on the device, or in its lane's thread, after all that it waits for has ended.

    Attributes:
        busy_s: Seconds on the device from where a Step has nothing more to wait for until it has ended, by lane.
        stalled_s: Seconds in which compute stood still, by the lane it waited for. LAUNCH is among them: compute had
            ended one Step, and the host had not launched the next one of the sweep.
    """

    def __init__(
        self,
        perform: Callable[[Step], None],
        driver: Driver,
        *,
        serial: bool = False,
        on_step: OnStep | None = None,
        on_thread: Callable[[str], None] = lambda lane: None,
    ) -> None:
        """Start no thread before its lane has work.

        Args:
            perform: Does a Step's work, or launches it.
            driver: The device.
            serial: Whether each Step is done before the next one is launched.
            on_step: Called after each Step, with its times.
            on_thread: Called with the lane in each thread that is started.
        """
        super().__init__(perform, serial=serial, on_step=on_step, on_thread=on_thread)
        self.stalled_s[LAUNCH] = 0.0
        self._driver = driver
        self._events: dict[int, tuple[str, Event]] = {}  # launched Step -> its stream, its end
        self._numbers: dict[int, tuple[str, int]] = {}  # Step of the host that has not ended -> its lane's count then
        self._issued: dict[str, int] = {}  # Steps of each host lane so far
        self._semaphores: dict[str, int] = {}  # what each host lane's has been raised to
        self._layers: deque[tuple[tuple[int, int], Event]] = deque()  # ((sweep, layer), its last end so far)
        # Launched Steps of each stream that may not be done: end, operations.
        self._queued: dict[str, deque[tuple[Event, int]]] = {lane: deque() for lane in STREAMS}
        self._timed: list[_Timed] = []
        self._last: dict[str, tuple[int, Event]] = {}  # stream -> sweep and end of the last Step there
        self._clock: tuple[Event, float] | None = None  # an event, and the host's time when it came

    def execute(self, steps) -> Callable[[], None]:
        if self._clock is None or self._on_step:  # again for a trace: times far from it are coarse
            event = self._driver.record("compute")
            self._driver.synchronize(event)
            self._clock = event, time.perf_counter()
        super().execute(steps)
        _, last = self._last.get("compute", (None, None))

        def wait() -> None:
            if last is not None:
                self._driver.synchronize(last)
            self._failure_raised = self._failure is not None
            self._check()
            self._account()

        return wait

    def reserve(self, lane: str, num_bytes: int) -> None:
        if num_bytes:
            self._driver.reserve(lane, num_bytes)

    def prepare(self, work: Callable[[], None]) -> None:
        self._driver.launch("compute", work)
        ready = self._driver.record("compute")
        for lane in STREAMS[1:]:
            self._driver.wait(lane, ready)

    def drain(self) -> None:
        super().drain()
        self._driver.finish()
        self._account()

    def close(self) -> None:
        self._signal_ended()
        super().close()
        self._driver.finish()

    def _begin(self, step: Step) -> None:
        if step.lane in STREAMS:
            self._launch(step)
        else:
            with self._lock:
                number = self._issued[step.lane] = self._issued.get(step.lane, 0) + 1
                self._numbers[step.id] = step.lane, number
                self._pending[step.id] = step.lane
            self._issue(step)
        if self._serial:
            self._finish(step)

    def _launch(self, step: Step) -> None:
        lane = step.lane
        self._await_headroom(step)
        sweep, before = self._last.get(lane, (None, None))
        waits = [(host, wait) for earlier in step.after for host, wait in self._waits(lane, earlier)]
        reached = started = self._driver.record(lane)
        for _, wait in waits:
            wait()
        if waits:
            started = self._driver.record(lane)
        num_more = self._driver.launch(lane, lambda: self._perform(step))
        ended = self._driver.record(lane)
        self._events[step.id] = lane, ended
        self._last[lane] = step.sweep, ended
        self._queued[lane].append((ended, STEP_OPERATIONS + len(waits) + num_more))
        waited_for = waits[-1][0] if waits else None
        self._timed.append(_Timed(step, before if sweep == step.sweep else None, reached, waited_for, started, ended))
        if lane == "compute":
            self._layers[-1] = self._layers[-1][0], ended

    def _waits(self, lane: str, earlier: int) -> Iterator[tuple[str, Callable[[], None]]]:
        """Yield the lane of a Step to wait for, and a function that has the stream wait; nothing if it need not."""
        with self._lock:
            number = self._numbers.get(earlier)
        if number is not None:
            yield number[0], lambda: self._driver.wait_for_host(lane, *number)
        elif earlier in self._events and self._events[earlier][0] != lane:
            other, event = self._events[earlier]
            yield other, lambda: self._driver.wait(lane, event)

    def _await_headroom(self, step: Step) -> None:
        """Wait until the Step may be queued.

        That is, until no more than LAYERS_AHEAD layers before its own are to be done, and until no more than
        MOST_QUEUED operations are in the stream's queue.
        """
        queued = self._queued[step.lane]
        while sum(operations for _, operations in queued) > MOST_QUEUED:
            ended, _ = queued.popleft()
            self._driver.synchronize(ended)
        layer = step.sweep, step.layer
        if step.lane != "compute" or (self._layers and layer <= self._layers[-1][0]):
            return
        self._layers.append((layer, None))
        while len(self._layers) > LAYERS_AHEAD + 1:
            _, ended = self._layers.popleft()
            self._driver.synchronize(ended)

    def _await(self, step: Step, thread: Lane) -> None:
        for earlier in step.after:
            found = self._events.get(earlier)
            if found is not None:
                self._driver.synchronize(found[1])
        super()._await(step, thread)

    def _ended(self, step: Step) -> None:
        self._signal(*self._numbers.pop(step.id))

    def _finish(self, step: Step) -> None:
        if step.lane in STREAMS:
            self._driver.synchronize(self._events[step.id][1])
        else:
            super().drain()

    def _fail(self, error: BaseException) -> None:
        super()._fail(error)
        self._signal_ended()

    def _signal_ended(self) -> None:
        """Signal all Steps of the host's lanes, so that on a failure the device waits for none that will not come."""
        with self._lock:
            for lane, count in self._issued.items():
                self._signal(lane, count)

    def _signal(self, lane: str, count: int) -> None:
        """Raise a host lane's semaphore, never lower it; with the lock held.

        A Step may end when its lane's semaphore has been raised for later Steps, which will not come. A stream that
        waits for them would wait forever if the count went down again.
        """
        if count > self._semaphores.get(lane, 0):
            self._semaphores[lane] = count
            self._driver.signal(lane, count)

    def _account(self) -> None:
        """Account for the times of Steps that have ended."""
        assert self._clock is not None, "no Step was launched"
        event, at_s = self._clock
        left = []
        between = self._driver.seconds
        for timed in self._timed:
            step, before, reached, waited_for, started, ended = timed
            if not self._driver.is_done(ended):
                left.append(timed)
                continue
            seconds = between(started, ended)
            self.busy_s[step.lane] += seconds
            if step.lane == "compute":
                if before is not None:
                    self.stalled_s[LAUNCH] += between(before, reached)
                if waited_for is not None:
                    self.stalled_s[waited_for] += between(reached, started)
            if self._on_step:
                start_s = at_s + between(event, started)
                with self._lock:
                    self._on_step(step, start_s, start_s + seconds)
        self._timed = left
        under_way = {timed.step.id for timed in left}
        self._events = {i: found for i, found in self._events.items() if i in under_way}
