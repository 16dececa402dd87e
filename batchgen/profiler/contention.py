"""Detection of contention: other work on the machine, while it is measured and when a job begins."""

from __future__ import annotations

import math
import time

from batchgen.core.machine import CpuTime, available_cores, load_average

# The most of all cores' time that may go to other processes and to the host; and the most that the longest of equal
# runs may take in terms of the shortest.
_MOST_OTHERS_FRAC, _MOST_STOLEN_FRAC, _MOST_SPREAD = 0.15, 0.05, 1.5


def contention_reason(before: CpuTime | None, after: CpuTime | None, spread: float) -> str | None:
    """The reason why a measurement cannot be trusted, as part of a log line; None: no other work disturbed it.

    Args:
        before, after: CPU times when the measurement began and ended; None where the system does not give them.
        spread: The longest time of equal runs divided by the shortest.
    """
    if before is not None and after is not None and after.total_s > before.total_s:
        cores_s = after.total_s - before.total_s
        others, stolen = (after.others_s - before.others_s) / cores_s, (after.stolen_s - before.stolen_s) / cores_s
        if stolen > _MOST_STOLEN_FRAC:
            return f"the host took {stolen:.0%} of its cores' time for others"
        if others > _MOST_OTHERS_FRAC:
            return f"other processes took {others:.0%} of its cores' time"
    if spread > _MOST_SPREAD:
        return f"the same work took up to {spread:.1f} times as long as at other moments"
    return None


# A shorter time says nothing of what runs beside, and no job is expected to be slowed down more.
_LEAST_S, _MOST_SLOWDOWN = 0.2, 5.0
# Cores that are idle for a smaller part of the time have more work than they can do.
_IDLE_FRAC = 0.1


class Beside:
    """A watcher of other work on the cores, from the moment it is made."""

    def __init__(self) -> None:
        self._before, self._began_s, self._own_s = CpuTime.now(), time.monotonic(), time.process_time()

    def taken_frac(self) -> float:
        """The part of the cores' time that other processes, or the host of a virtual machine, have taken since then."""
        now = CpuTime.now()
        if self._before is None or now is None or now.total_s <= self._before.total_s:
            return 0.0
        taken_s = now.others_s - self._before.others_s + now.stolen_s - self._before.stolen_s
        return min(1.0, max(0.0, taken_s / (now.total_s - self._before.total_s)))

    def slowdown(self, for_s: float = 0.0) -> float:
        """The factor by which work on all cores will take longer, if others go on as they did beside one thread.

        Others that began a moment ago are not expected to run beside all of a long job: how long a process will still
        run grows with how long it has run (Harchol-Balter and Downey, 1997). So over some minutes there are no more of
        them than over as many minutes before.

        Args:
            for_s: Seconds that the work is expected to take; 0: a moment.
        """
        elapsed_s = time.monotonic() - self._began_s
        if elapsed_s < _LEAST_S:
            return 1.0
        cores, taken = available_cores(), self.taken_frac()
        own = max(1e-3, (time.process_time() - self._own_s) / (elapsed_s * cores))
        others = taken * cores  # threads that ran beside this one
        if 1 - taken - own < _IDLE_FRAC:  # more of them waited, and each had as much time as this one
            others = max(others, 1 / own - 1)
        others = min(others, load_average(for_s))
        return min(_MOST_SLOWDOWN, 1 + others / cores)


def slowed_by(taken_frac: float) -> float:
    """The logarithm of the factor by which work on all cores took longer where others took a part of their time."""
    return -math.log(max(1 / _MOST_SLOWDOWN, 1 - taken_frac))
