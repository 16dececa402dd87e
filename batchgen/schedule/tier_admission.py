"""Admission to the pools of one tier: blocks of all layers, and of those with a sliding window. No tensors."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as List
from typing import NamedTuple

from batchgen.schedule.admission import Growth, Projection
from batchgen.schedule.block_manager import Allocation, BlockManager
from batchgen.schedule.sequence import Sequence
from batchgen.schedule.window_pool import NULL_BLOCK


class Expected(NamedTuple):  # one for each sequence in flight, in sweeps that look at them
    """A sequence, the sweeps it is expected to stay for, and whether it needs more than this one for its prompt."""

    sequence: Sequence
    num_sweeps: int
    delayed: bool


class Growing(NamedTuple):  # one for each sequence that comes to a tier
    """A sequence that may be admitted.

    Attributes:
        sequence: The sequence.
        num_sweeps: Sweeps that it is expected to stay for.
        chunk: Tokens of it that the sweep may have.
        num_blocks: Blocks that it is expected to have in all.
        most_blocks: Blocks that it has in all if it is as long as it may be.
    """

    sequence: Sequence
    num_sweeps: int
    chunk: int
    num_blocks: int
    most_blocks: int


# Sequences in flight in a tier, and the most sweeps that an admissible sequence stays for.
InFlight = tuple[List[Expected], int]


class TierAdmission:
    """The admission to one tier.

    Where all sequences fit however long they become, nobody's future is looked at.

    Attributes:
        reserves: Whether a sequence's last block is reserved when it is admitted: in static blocks, on disk, beside
            placement DEFERRED.
    """

    def __init__(self, pool: BlockManager, in_flight: Callable[[], InFlight], spare: int, *, reserves: bool) -> None:
        """Look at nobody yet.

        Args:
            pool: Pool of the tier.
            in_flight: Function that gives what is in flight in the tier by then.
            spare: Blocks of the pool that stay when all that is in flight is as long as it may be; below 0: there are
                not enough for that.
            reserves: Whether a sequence's last block is reserved when it is admitted.
        """
        self._pool, self._in_flight, self._spare, self.reserves = pool, in_flight, spare, reserves
        self._projected: _Projected | None = None

    def admit(self, growing: Growing, num_reserved: int) -> Allocation | None:
        """The blocks of a sequence that is admitted, or None where there are not enough, now or at a later sweep.

        Args:
            growing: The sequence.
            num_reserved: Blocks that are promised to others.
        """
        pool = self._pool
        if self.reserves and pool.windowed is None:
            return pool.admit(growing.sequence.shareable, growing.num_blocks, num_reserved)
        if self.counts_in(growing.most_blocks):
            return pool.admit_if(growing.sequence.shareable)
        self._projected = self._projected or _Projected(pool, *self._in_flight(), reserves=self.reserves)
        return self._projected.admit(growing, num_reserved)

    def counts_in(self, most_blocks: int) -> bool:
        """Count a sequence if it fits however long it becomes, so that no later sweep need be looked at.

        Args:
            most_blocks: Blocks that the sequence has in all if it is as long as it may be.

        Returns:
            True where it fits, and is counted.
        """
        plain = self._projected is None and self._pool.windowed is None and not self.reserves
        fits = plain and most_blocks <= self._spare
        self._spare -= most_blocks if fits else 0
        return fits


class _Projected:
    """The KV of what is in flight in a tier, projected to later sweeps."""

    def __init__(self, pool: BlockManager, running: List[Expected], longest_sweeps: int, *, reserves: bool) -> None:
        """Project the KV of what is in flight.

        Args:
            pool: Pool of the tier.
            running: Sequences in flight in the tier.
            longest_sweeps: Most sweeps that an admissible sequence stays for.
            reserves: Whether a sequence's last block is reserved when it is admitted.
        """
        self._pool, self._reserves = pool, reserves
        self._blocks: Projection | None = None
        self._windows: Projection | None = None
        if not reserves:
            growths = [_growth(e, e.sequence.block_table, pool.num_sole(e.sequence.block_table)) for e in running]
            self._blocks = Projection(growths, pool.num_available, pool.kv_block_size, longest_sweeps)
        if (windowed := pool.windowed) is not None:
            growths = []
            for e in running:
                table = e.sequence.table(windowed=True)
                growth = _growth(e, table, windowed.num_sole(table[e.sequence.num_freed :]))
                growths.append(growth._replace(delayed=e.delayed or reserves))
            sole = windowed.blocks_of_window
            self._windows = Projection(growths, windowed.num_available, pool.kv_block_size, longest_sweeps, sole)

    def admit(self, growing: Growing, num_reserved: int) -> Allocation | None:
        """The blocks of a sequence that fits at every later sweep too, which counts from now on; None: it does not."""
        pool, count, chunk = self._pool, len(growing.sequence.tokens), growing.chunk
        tokens = growing.sequence.shareable
        added: list[tuple[Projection, Growth]] = []  # where the sequence is counted if it is admitted
        windowed = pool.windowed
        if windowed is not None:
            # Perhaps its prefix takes up to a window of what is there.
            chunk = min(chunk, max(0, windowed.num_available - windowed.blocks_of_window) * pool.kv_block_size)

        def growth(num_matched: int) -> Growth:
            delayed = count - num_matched * pool.kv_block_size > chunk
            return Growth(count, growing.num_sweeps, num_matched, delayed=delayed)

        def counted_if_fits(projection: Projection, growth: Growth) -> bool:
            added.append((projection, growth))
            return projection.fits(growth)

        def window_fits(table: List[int]) -> bool:
            if self._windows is None or windowed is None:
                return True
            found = [block for block in table if block != NULL_BLOCK]
            if windowed.num_available <= windowed.num_evictable_in(found):
                return False  # its first token has no block
            # Those that only one has, or none, count as new: they would have been freed.
            new = sum(windowed.num_users(block) <= 1 for block in found)
            own = growth(len(table))._replace(num_held=len(table) - new)
            return counted_if_fits(self._windows, own._replace(delayed=own.delayed or self._reserves))

        if (blocks := self._blocks) is None:
            allocation = pool.admit(tokens, growing.num_blocks, num_reserved, window_fits)
        else:
            allocation = pool.admit_if(tokens, lambda shared: counted_if_fits(blocks, growth(shared)), window_fits)
        for projection, own in added if allocation is not None else ():
            projection.add(own)
        return allocation


def _growth(expected: Expected, table: List[int], num_sole: int) -> Growth:
    count = len(expected.sequence.tokens)
    return Growth(count, expected.num_sweeps, len(table), num_sole, delayed=expected.delayed)
