"""The blocks of the KV file: runs of neighbouring blocks, so that reading a sequence's KV is one long read.

No tensors, no files. Prefixes are not shared here: a read that is long matters more than one that is saved.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from batchgen.schedule.block_manager import Allocation
from batchgen.schedule.block_pool import ROOT
from batchgen.schedule.state_slots import StateSlots


class ExtentManager:
    """The blocks of the KV file, allocated in runs.

    Invariant: the free runs are disjoint, in ascending order, and no two of them touch.

    Attributes:
        num_blocks: Blocks of the file.
        kv_block_size: Tokens of a block.
        num_available: Free blocks.
        states: Slots of the state layers in the file; None: the model has none.
    """

    share_prefixes = False
    windowed = None  # a file's runs keep the blocks of all layers

    def __init__(self, num_blocks: int, kv_block_size: int, states: StateSlots | None = None) -> None:
        self.num_blocks = num_blocks
        self.kv_block_size = kv_block_size
        self.states = states
        self.num_available = num_blocks
        # Free runs, by position: first block, and number of blocks.
        self._starts = [0] if num_blocks else []
        self._lengths = [num_blocks] if num_blocks else []

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_available

    @property
    def longest_tokens(self) -> int:
        """Most tokens of a sequence that has the pool to itself."""
        return self.num_blocks * self.kv_block_size

    def admit(self, tokens: Sequence[int], num_blocks: int, num_reserved: int) -> Allocation | None:
        """Allocate neighbouring blocks: the start of the first free run that is long enough.

        Args:
            tokens: Tokens of the prompt, which are not looked at.
            num_blocks: Blocks to allocate, at least 1.
            num_reserved: Available blocks that are promised to others.

        Returns:
            The blocks; None: no run is long enough, fewer than `num_reserved` blocks would stay, or no state slot is
            left.
        """
        if num_blocks > self.num_available - num_reserved:
            return None
        run = next((run for run, length in enumerate(self._lengths) if length >= num_blocks), None)
        state = None if run is None or self.states is None else self.states.open(ROOT)
        if run is None or (self.states is not None and state is None):
            return None
        start = self._take(run, num_blocks)
        return Allocation(list(range(start, start + num_blocks)), 0, state=state)

    def allocate(self, after: int | None = None) -> int:
        """Allocate one block more for a sequence that outgrew its extent.

        The caller has made sure that `num_available` > 0.

        Args:
            after: Last block of the sequence; the next one is taken if it is free. Otherwise a new extent begins where
                it can grow longest.
        """
        next_block = -1 if after is None else after + 1
        run = bisect_left(self._starts, next_block)
        if run == len(self._starts) or self._starts[run] != next_block:
            run = max(range(len(self._lengths)), key=self._lengths.__getitem__)
        return self._take(run, 1)

    def release(self, blocks: Sequence[int]) -> None:
        """Free blocks, in any number of runs; they join the free runs that they touch."""
        for start, length in runs_of(blocks):
            self._give(start, length)

    def _take(self, run: int, num_blocks: int) -> int:
        start = self._starts[run]
        self.num_available -= num_blocks
        if self._lengths[run] == num_blocks:
            del self._starts[run], self._lengths[run]
        else:
            self._starts[run] += num_blocks
            self._lengths[run] -= num_blocks
        return start

    def _give(self, start: int, length: int) -> None:
        end = start + length
        after = bisect_left(self._starts, start)
        before = after - 1
        end_before = self._starts[before] + self._lengths[before] if before >= 0 else 0
        start_after = self._starts[after] if after < len(self._starts) else self.num_blocks
        assert end_before <= start and end <= start_after, f"KV blocks {start} to {end - 1} released twice"
        self.num_available += length
        joins_before = before >= 0 and end_before == start
        joins_after = after < len(self._starts) and start_after == end
        if joins_after:
            length += self._lengths[after]
            del self._starts[after], self._lengths[after]
        if joins_before:
            self._lengths[before] += length
        else:
            self._starts.insert(after, start)
            self._lengths.insert(after, length)


def runs_of(blocks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(first block, number of blocks) of each run of neighbouring blocks in a block table, in its order."""
    start = length = 0
    for block in blocks:
        if length and block == start + length:
            length += 1
        else:
            if length:
                yield start, length
            start, length = block, 1
    if length:
        yield start, length
