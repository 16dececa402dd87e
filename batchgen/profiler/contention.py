"""Detection of contention: other work on the machine while it was measured."""

from __future__ import annotations

from batchgen.core.machine import CpuTime

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
