"""Whether a machine was busy with something else while it was measured."""

from __future__ import annotations

from batchgen.core.machine import CpuTime

# Parts of the time of all cores that may go elsewhere; the longest of like runs against the shortest.
_MOST_OTHERS_FRAC, _MOST_STOLEN_FRAC, _MOST_SPREAD = 0.15, 0.05, 1.5


def contention_reason(before: CpuTime | None, after: CpuTime | None, spread: float) -> str | None:
    """Say why a measurement cannot be trusted.

    Args:
        before, after: When it began and ended; None where the system does not say.
        spread: Of runs of the same work, the longest time by the shortest.

    Returns:
        The reason, as a part of a line; None: the machine was left alone.
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
