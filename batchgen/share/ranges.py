"""The division of rows into ranges that are claimed one by one, large ones first and small ones at the end."""

from __future__ import annotations

_AT_LEAST = 16  # rows: what a claim and a part cost is little beside them
_OF_THE_REST = 32  # a range is this part of the rows that are left


def row_ranges(rows: int) -> list[range]:
    """The ranges of `rows` rows, in order, equal for every worker.

    Sizes fall with what is left, as in guided self-scheduling (Polychronopoulos and Kuck, 1987), with a fixed number in
    place of that of the workers, which nobody knows beforehand.
    """
    ranges, first = [], 0
    while first < rows:
        stop = min(rows, first + max(_AT_LEAST, (rows - first) // _OF_THE_REST))
        ranges.append(range(first, stop))
        first = stop
    return ranges


def may_claim(*, outstanding: int, unclaimed: int, workers: int, ahead: int) -> bool:
    """Tell whether a worker takes one more range now.

    Args:
        outstanding: Rows that it has claimed and not finished.
        unclaimed: Rows that nobody has.
        workers: Workers that are alive, itself included.
        ahead: Rows that it needs to keep its engine busy.
    """
    fair = (unclaimed + outstanding) / workers
    return outstanding == 0 or outstanding < min(ahead, fair)
