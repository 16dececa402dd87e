"""The simulation of Steps by the rules of the runtime's lanes, in seconds that are given. No torch.

A Step of another lane is issued when the computation before it in order has ended, as `Lanes.execute` does; it starts
when its lane is free and all it waits for have ended.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from batchgen.schedule.step_graph import LANES, Step

Seconds = Callable[[Step], float]
OnStep = Callable[[Step, float, float], None]  # (step, start, end)


@dataclass(frozen=True)
class Timeline:
    """The times of simulated Steps.

    busy_s["compute"], all of stalled_s and between_s add up to the end of the last computation.

    Attributes:
        total_s: Seconds until the last Step has ended.
        busy_s: Seconds in which each lane was busy.
        stalled_s: Seconds in which compute stood still, by the lane it waited for (cpu_attention also where it had the
            cores).
        between_s: Seconds between sweeps, and in which Steps were handed to other lanes.
    """

    total_s: float
    busy_s: dict[str, float]
    stalled_s: dict[str, float]
    between_s: float


class Simulator:
    """The lanes of one machine, as they stand.

    Invariant: a Step has a start and an end as soon as nothing that follows can change them, so only CPU attention that
    may have to let compute go first, and what waits for it, are still open.
    """

    def __init__(self, *, shared_cores: bool = False, issue_s: float = 0.0, on_step: OnStep | None = None) -> None:
        """Start with idle lanes.

        Args:
            shared_cores: Whether compute and CPU attention take turns: who has waited longer goes first.
            issue_s: Seconds in which the compute lane hands a Step to another one.
            on_step: Called for every Step, with its start and end in seconds.
        """
        self._shared_cores, self._issue_s, self._on_step = shared_cores, issue_s, on_step
        self._now_s = 0.0  # of the compute lane, which issues all Steps
        self._free_s: dict[str, float] = dict.fromkeys(LANES, 0.0)
        self._open: set[int] = set()
        self._queues: dict[str, deque[tuple[Step, float, float]]] = {lane: deque() for lane in LANES}
        self._ended: dict[int, tuple[float, str]] = {}  # of Steps that others may have to wait for: end and lane
        self._busy_s: dict[str, float] = dict.fromkeys(LANES, 0.0)
        self._stalled_s: dict[str, float] = dict.fromkeys(LANES, 0.0)
        self._between_s = self._total_s = 0.0

    def run(self, steps: Iterable[Step], seconds: Seconds) -> None:
        """Run a sweep until its last computation ends; Steps of other lanes may go on after it."""
        for step in steps:
            if step.lane == "compute":
                self._compute(step, seconds(step))
                continue
            self._now_s += self._issue_s
            self._between_s += self._issue_s
            self._issue(step, seconds(step))
        if not self._open:  # what has ended by now holds up nothing that is yet to be issued
            self._ended = {i: (end, lane) for i, (end, lane) in self._ended.items() if end > self._now_s}

    def spend(self, seconds: float) -> None:
        """Let time pass between sweeps: nothing is computed, and the other lanes go on."""
        self._now_s += seconds
        self._between_s += seconds
        self._total_s = max(self._total_s, self._now_s)

    def drain(self) -> None:
        """Let time pass until all Steps that were issued have ended."""
        while self._attend(before_s=math.inf):
            self._settle()
        self.spend(self._total_s - self._now_s)

    def has_ended(self, step_id: int) -> bool:
        """True if a Step of a lane beside compute's has ended by now, as `Lanes.has_ended` would say."""
        self._settle()
        while self._shared_cores and self._attend(before_s=self._now_s):
            self._settle()
        return step_id not in self._open and self._ended.get(step_id, (0.0, ""))[0] <= self._now_s

    @property
    def now_s(self) -> float:
        """The end of the last computation, in seconds."""
        return self._now_s

    def lanes_s(self) -> tuple[dict[str, float], dict[str, float]]:
        """Seconds that each lane was busy so far, and seconds that compute waited for each lane so far."""
        return dict(self._busy_s), dict(self._stalled_s)

    def timeline(self) -> Timeline:
        """The timeline of all Steps that were issued so far, to their end."""
        while self._attend(before_s=math.inf):
            self._settle()
        return Timeline(self._total_s, dict(self._busy_s), dict(self._stalled_s), self._between_s)

    def _issue(self, step: Step, seconds: float) -> None:
        """Issue a Step of another lane than compute's, and start it if no other Step can get ahead of it."""
        queue, takes_turns = self._queues[step.lane], self._shared_cores and step.lane == "cpu_attention"
        ready = None if queue or takes_turns else self._ready_s(step)
        if ready is not None:
            self._end(step, max(self._now_s, self._free_s[step.lane], ready), seconds)
            return
        self._open.add(step.id)
        queue.append((step, self._now_s, seconds))

    def _compute(self, step: Step, seconds: float) -> None:
        while self._open:
            ready = self._ready_s(step)
            if not self._attend(before_s=math.inf if ready is None else max(ready, self._now_s)):
                break
            self._settle()
        for i in step.after:
            if (ended := self._ended.get(i)) is not None:
                self._wait(ended[1], ended[0])
        if self._shared_cores:
            self._wait("cpu_attention", self._free_s["cpu_attention"])
        self._end(step, self._now_s, seconds)
        self._now_s += seconds
        if self._open:
            self._settle()

    def _wait(self, lane: str, until_s: float) -> None:
        if until_s > self._now_s:
            self._stalled_s[lane] += until_s - self._now_s
            self._now_s = until_s

    def _settle(self) -> None:
        """Start the Steps that no other Step can get ahead of."""
        progress = True
        while progress:
            progress = False
            for lane, queue in self._queues.items():
                if self._shared_cores and lane == "cpu_attention":
                    continue
                while queue:
                    step, issued_s, seconds = queue[0]
                    ready = self._ready_s(step)
                    if ready is None:
                        break
                    queue.popleft()
                    self._end(step, max(issued_s, self._free_s[lane], ready), seconds)
                    progress = True

    def _attend(self, before_s: float) -> bool:
        """Start the next CPU attention on shared cores, if one can start and asks no later than `before_s`."""
        queue = self._queues["cpu_attention"]
        ready = self._ready_s(queue[0][0]) if queue else None
        if ready is None:
            return False
        step, issued_s, seconds = queue[0]
        asks_s = max(issued_s, self._free_s["cpu_attention"], ready)
        if asks_s > before_s:
            return False
        queue.popleft()
        self._end(step, max(asks_s, self._free_s["compute"]), seconds)
        return True

    def _ready_s(self, step: Step) -> float | None:
        """The time when all Steps that the Step waits for have ended; None if that is open."""
        ready_s = 0.0
        for i in step.after:
            if i in self._open:
                return None
            end = self._ended.get(i)
            if end is not None and end[0] > ready_s:
                ready_s = end[0]
        return ready_s

    def _end(self, step: Step, start_s: float, seconds: float) -> None:
        end_s = start_s + seconds
        self._open.discard(step.id)
        self._ended[step.id] = (end_s, step.lane)
        self._free_s[step.lane] = end_s
        self._busy_s[step.lane] += seconds
        self._total_s = max(self._total_s, end_s)
        if self._on_step:
            self._on_step(step, start_s, end_s)


def simulate(
    steps: Iterable[Step], seconds: Seconds, *, shared_cores: bool = False, on_step: OnStep | None = None
) -> Timeline:
    """The timeline of Steps that are issued in one go.

    Args:
        steps: The Steps.
        seconds: Gives the seconds of a Step.
        shared_cores: Whether compute and CPU attention take turns.
        on_step: Called for every Step, with its start and end in seconds.
    """
    simulator = Simulator(shared_cores=shared_cores, on_step=on_step)
    simulator.run(steps, seconds)
    return simulator.timeline()
