"""Carries out Steps on a device with streams: what it computes and copies is launched ahead, on a stream for each of its lanes.

A launch returns long before its work is done. The caller's thread launches all Steps of `compute`, `h2d` and `d2h` in their
order; the device itself waits, stream for stream, and for the host's lanes at gates: counters in host memory of how many Steps a
lane has ended. Disk and CPU attention have threads of their own, as in `lanes`, which wait for the device by its events. So the
launching thread waits for nothing but room: it stays a few layers ahead at most, as what is launched holds memory.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from batchgen.runtime.lanes import Lanes, OnStep
from batchgen.runtime.schedule import Step

STREAMS = ("compute", "h2d", "d2h")
# Layers whose computation may be launched and not done.
LAYERS_AHEAD = 2

Event = Any


class Driver(Protocol):
    """A device. Streams are known by their lane; an Event is a place in one of them."""

    def launch(self, lane: str, work: Callable[[], None]) -> None:
        """Calls work(), whose operations go to the stream."""
        ...

    def record(self, lane: str) -> Event:
        """What has been launched there so far."""
        ...

    def wait(self, lane: str, event: Event) -> None:
        """What is launched there from now on waits for the event."""
        ...

    def wait_for_host(self, lane: str, host_lane: str, count: int) -> None:
        """What is launched there from now on waits until the host lane's gate is at `count`."""
        ...

    def open_gate(self, host_lane: str, count: int) -> None: ...

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """What work() launches, without its being done: to be run on the current stream as often as called, always on the same
        memory. Called while nothing is under way."""
        ...

    def synchronize(self, event: Event) -> None:
        """Returns when the event has come. Other threads run meanwhile."""
        ...

    def is_done(self, event: Event) -> bool: ...

    def seconds(self, start: Event, stop: Event) -> float:
        """Between two events that have come."""
        ...

    def finish(self) -> None:
        """Returns when nothing is under way."""
        ...


class StreamLanes(Lanes):
    """Invariant: a Step's work starts on the device, or in its lane's thread, after all that it waits for has ended."""

    def __init__(
        self,
        perform: Callable[[Step], None],
        driver: Driver,
        *,
        serial: bool = False,
        on_step: OnStep | None = None,
        on_thread: Callable[[str], None] = lambda lane: None,
    ) -> None:
        """serial: each Step is done before the next one is launched."""
        super().__init__(perform, serial=serial, on_step=on_step, on_thread=on_thread)
        self._driver = driver
        self._events: dict[int, tuple[str, Event]] = {}  # launched Step -> its stream, its end
        self._numbers: dict[int, tuple[str, int]] = {}  # Step of the host that has not ended -> its lane's gate then
        self._issued: dict[str, int] = {}  # Steps of each host lane so far
        self._layers: deque[tuple[tuple[int, int], Event]] = deque()  # ((sweep, layer), its last end so far)
        self._timed: list[tuple[Step, Event, Event, str | None, Event | None]] = []
        self._last: dict[str, Event] = {}  # stream -> end of the last Step there
        self._clock: tuple[Event, float] | None = None  # an event, and the host's time when it came

    def execute(self, steps) -> Callable[[], None]:
        if self._clock is None or self._on_step:  # again for a trace: times far from it are coarse
            event = self._driver.record("compute")
            self._driver.synchronize(event)
            self._clock = event, time.perf_counter()
        super().execute(steps)
        last = self._last.get("compute")

        def wait() -> None:
            if last is not None:
                self._driver.synchronize(last)
            self._check()
            self._account()

        return wait

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
        self._open_gates()
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
        if step.lane == "compute":
            self._await_room(step)
        before, waited_for = self._last.get(step.lane), None
        for earlier in step.after:
            with self._lock:
                number = self._numbers.get(earlier)
            if number is not None:
                self._driver.wait_for_host(step.lane, *number)
                waited_for = number[0]
            elif earlier in self._events and self._events[earlier][0] != step.lane:
                waited_for, event = self._events[earlier]
                self._driver.wait(step.lane, event)
        started = before
        if before is None or waited_for is not None:
            started = self._driver.record(step.lane)
        self._driver.launch(step.lane, lambda: self._perform(step))
        ended = self._driver.record(step.lane)
        self._events[step.id] = step.lane, ended
        self._last[step.lane] = ended
        self._timed.append((step, started, ended, waited_for, before))
        if step.lane == "compute":
            self._layers[-1] = self._layers[-1][0], ended

    def _await_room(self, step: Step) -> None:
        """Waits until the device is no more than LAYERS_AHEAD layers behind."""
        layer = step.sweep, step.layer
        if self._layers and layer <= self._layers[-1][0]:
            return
        self._layers.append((layer, None))
        while len(self._layers) > LAYERS_AHEAD + 1:
            _, ended = self._layers.popleft()
            self._driver.synchronize(ended)

    def _await(self, step: Step, thread: str) -> None:
        for earlier in step.after:
            found = self._events.get(earlier)
            if found is not None:
                self._driver.synchronize(found[1])
        super()._await(step, thread)

    def _ended(self, step: Step) -> None:
        lane, number = self._numbers.pop(step.id)
        self._driver.open_gate(lane, number)

    def _finish(self, step: Step) -> None:
        if step.lane in STREAMS:
            self._driver.synchronize(self._events[step.id][1])
        else:
            super().drain()

    def _fail(self, error: BaseException) -> None:
        super()._fail(error)
        self._open_gates()

    def _open_gates(self) -> None:
        """Nothing on the device waits for Steps that will not come; what it computes then is not looked at."""
        for lane, count in list(self._issued.items()):
            self._driver.open_gate(lane, count)

    def _account(self) -> None:
        """Times of the Steps that have ended."""
        event, at_s = self._clock
        left = []
        for entry in self._timed:
            step, started, ended, waited_for, before = entry
            if not self._driver.is_done(ended):
                left.append(entry)
                continue
            seconds = self._driver.seconds(started, ended)
            self.busy_s[step.lane] += seconds
            if step.lane == "compute" and waited_for is not None and before is not None:
                self.stalled_s[waited_for] += self._driver.seconds(before, started)
            if self._on_step:
                start_s = at_s + self._driver.seconds(event, started)
                with self._lock:
                    self._on_step(step, start_s, start_s + seconds)
        self._timed = left
        under_way = {entry[0].id for entry in left}
        self._events = {i: found for i, found in self._events.items() if i in under_way}
