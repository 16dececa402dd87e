"""Feasibility pruning: the entries of the search space that fit are known without a MIP for each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import TypeVar

from batchgen.planner.problem import CostInputs

T = TypeVar("T")
# Sequences in flight, and tokens of a sweep.
Size = tuple[int, int]


class Feasibility:
    """The entries of the search space that fit.

    More sequences and more tokens take more memory in every tier, all else being equal. So among sizes that differ in
    nothing else, a bisection finds which of them fit. It is made when one of them is asked for first.
    """

    def __init__(self, entries: Iterable[CostInputs], fits: Callable[[CostInputs], bool]) -> None:
        """Prepare to look at entries.

        Args:
            entries: The inputs of the cost model that there are.
            fits: Predicate, true if the budgets allow any placement of the inputs; it solves a MIP.
        """
        self._fits = fits
        self._sizes: defaultdict[Hashable, dict[Size, CostInputs]] = defaultdict(dict)
        for s in entries:
            self._sizes[_kind(s)][_size(s)] = s
        self._known: dict[Hashable, dict[Size, bool]] = {}

    def __contains__(self, s: CostInputs) -> bool:
        """True if an entry fits."""
        kind = _kind(s)
        if kind not in self._known:
            self._known[kind] = _known(self._sizes[kind], self._fits)
        return self._known[kind][_size(s)]


def _kind(s: CostInputs) -> Hashable:
    """Everything but the size that memory depends on."""
    return s.weight_format, s.kv_format, s.num_gpu_batches, s.deferral


def _size(s: CostInputs) -> Size:
    return s.max_num_seqs, s.max_num_batched_tokens


def _known(sizes: dict[Size, CostInputs], fits: Callable[[CostInputs], bool]) -> dict[Size, bool]:
    """Size -> true if it fits."""
    known: dict[Size, bool] = {}
    largest_fitting: list[Size] = []
    smallest_failing: list[Size] = []
    for size in halving(sorted(sizes)):
        if any(_within(size, other) for other in largest_fitting):
            known[size] = True
        elif any(_within(other, size) for other in smallest_failing):
            known[size] = False
        else:
            known[size] = fits(sizes[size])
            (largest_fitting if known[size] else smallest_failing).append(size)
    return known


def _within(size: Size, other: Size) -> bool:
    return size[0] <= other[0] and size[1] <= other[1]


def halving(items: Sequence[T]) -> Iterator[T]:
    """All items in an order of bisection: the last, the middle one, the middle ones of both halves, and so on."""
    if not items:
        return
    yield items[-1]
    parts = [items[:-1]]
    while parts:
        halves = []
        for part in parts:
            middle = len(part) // 2
            if part:
                yield part[middle]
                halves += [part[:middle], part[middle + 1 :]]
        parts = halves
