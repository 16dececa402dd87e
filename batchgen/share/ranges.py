"""Division of a job's rows into ranges that workers claim one by one; the ranges become smaller toward the end."""

from __future__ import annotations

_AT_LEAST = 16  # rows: what a claim and a part cost is little beside them
_OF_THE_REST = 32  # a range is this part of the rows that are left
_AT_MOST = 1 << 16  # rows: a worker holds those of its ranges in memory


def row_ranges(rows: int) -> list[range]:
    """Divide rows into ranges, in order; every worker computes the same ranges.

    Each range is a fixed fraction of the remaining rows, but has 16 to 65,536 rows. This follows guided self-scheduling
    (Polychronopoulos and Kuck, 1987), where the fraction depends on the number of workers, which is not known here.

    Args:
        rows: Number of rows of the job.
    """
    ranges, first = [], 0
    while first < rows:
        stop = min(rows, first + min(_AT_MOST, max(_AT_LEAST, (rows - first) // _OF_THE_REST)))
        ranges.append(range(first, stop))
        first = stop
    return ranges


def may_claim(*, outstanding: int, unclaimed: int, workers: int, ahead: int) -> bool:
    """True where a worker should claim one more range now.

    Args:
        outstanding: Number of rows that the worker has claimed and not finished.
        unclaimed: Number of rows that no worker has claimed.
        workers: Number of live workers, this one included.
        ahead: Number of rows that keep the worker's engine busy.
    """
    fair = (unclaimed + outstanding) / workers
    return outstanding == 0 or outstanding < min(ahead, fair)
