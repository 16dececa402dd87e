"""The blocks of the KV file: runs of neighbouring blocks, so that reading a sequence's KV is one long read.

No tensors, no files. A sequence takes over the blocks of a prefix that another one has computed, and has a run of its
own behind it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence

from batchgen.schedule.block_manager import Allocation, BlockManager
from batchgen.schedule.block_pool import ROOT
from batchgen.schedule.state_slots import StateSlots


class FreeRuns:
    """Free blocks in runs.

    Invariant: the runs are disjoint, in ascending order, and no two of them touch.
    """

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = self._num_free = num_blocks
        # By position: first block, and number of blocks.
        self._starts = [0] if num_blocks else []
        self._lengths = [num_blocks] if num_blocks else []

    def __len__(self) -> int:
        return self._num_free

    def __iter__(self) -> Iterator[int]:
        """Yield the blocks in ascending order."""
        return (block for start, length in self.runs() for block in range(start, start + length))

    def runs(self) -> Iterator[tuple[int, int]]:
        """Yield (first block, number of blocks) of each run, in ascending order."""
        return zip(self._starts, self._lengths, strict=True)

    def take(self, num_blocks: int) -> list[int] | None:
        """Take the start of the first run that is long enough; None: none is."""
        run = next((run for run, length in enumerate(self._lengths) if length >= num_blocks), None)
        if run is None:
            return None
        start = self._take(run, num_blocks)
        return list(range(start, start + num_blocks))

    def take_after(self, block: int) -> int | None:
        """Take the block after this one; None: it is not free."""
        run = bisect_left(self._starts, block + 1)
        if run == len(self._starts) or self._starts[run] != block + 1:
            return None
        return self._take(run, 1)

    def pop(self) -> int:
        """Take the first block of the longest run, where a new extent can grow longest."""
        return self._take(max(range(len(self._lengths)), key=self._lengths.__getitem__), 1)

    def append(self, block: int) -> None:
        """Give a block back; it joins the runs that it touches."""
        after = bisect_left(self._starts, block)
        before = after - 1
        end_before = self._starts[before] + self._lengths[before] if before >= 0 else 0
        start_after = self._starts[after] if after < len(self._starts) else self._num_blocks
        assert end_before <= block < start_after, f"KV block {block} released twice"
        self._num_free += 1
        joins_before = before >= 0 and end_before == block
        joins_after = after < len(self._starts) and start_after == block + 1
        if joins_before:
            self._lengths[before] += 1
            if joins_after:
                self._lengths[before] += self._lengths.pop(after)
                del self._starts[after]
        elif joins_after:
            self._starts[after] -= 1
            self._lengths[after] += 1
        else:
            self._starts.insert(after, block)
            self._lengths.insert(after, 1)

    def _take(self, run: int, num_blocks: int) -> int:
        start = self._starts[run]
        self._num_free -= num_blocks
        if self._lengths[run] == num_blocks:
            del self._starts[run], self._lengths[run]
        else:
            self._starts[run] += num_blocks
            self._lengths[run] -= num_blocks
        return start


class ExtentManager(BlockManager):
    """The blocks of the KV file, allocated in runs. Full prompt blocks are in a trie, as in memory.

    A file's runs keep the blocks of all layers: those with a sliding window have no pool of their own.
    """

    _free: FreeRuns

    def __init__(
        self, num_blocks: int, kv_block_size: int, share_prefixes: bool = True, states: StateSlots | None = None
    ) -> None:
        super().__init__(num_blocks, kv_block_size, share_prefixes, states=states)
        self._free = FreeRuns(num_blocks)

    def admit(
        self,
        tokens: Sequence[int],
        num_blocks: int,
        num_reserved: int,
        window_fits: Callable[[Sequence[int]], bool] = lambda table: True,
    ) -> Allocation | None:
        """Allocate neighbouring blocks behind those of a known prefix.

        Where no free run is long enough, prefixes without users are evicted, the least recently used first. A prefix
        that lies between free blocks, so that no run behind it is long enough, is computed again.

        Args:
            tokens: Tokens of the prompt.
            num_blocks: Blocks that the sequence has in all, at least 1.
            num_reserved: Available blocks that are promised to others.
            window_fits: Not asked.

        Returns:
            The blocks; None: no run is long enough, fewer than `num_reserved` blocks would stay, or no state slot is
            left.
        """
        known = self.known(tokens)
        prefixes = [known[: self._longest_prefix(known)]]
        if prefixes[0]:
            prefixes.append([])
        found = (self._behind(matched, num_blocks, num_reserved, len(known)) for matched in prefixes)
        return next((allocation for allocation in found if allocation is not None), None)

    def _behind(self, matched: list[int], num_blocks: int, num_reserved: int, num_known: int) -> Allocation | None:
        """Blocks behind those of a prefix, as `admit` gives them.

        Args:
            matched: Blocks of the prefix.
            num_blocks: Blocks that the sequence has in all.
            num_reserved: Available blocks that are promised to others.
            num_known: Blocks of the prompt that are known.
        """
        num_new = num_blocks - len(matched)
        if num_new > self.num_available - self.num_evictable_in(matched) - num_reserved:
            return None
        node = self.node(matched[-1]) if matched else ROOT
        self.take(matched)
        state = None if self.states is None else self.states.open(node)
        new = None if self.states is not None and state is None else self._run_of(num_new)
        if new is None:
            self.release(matched)
            if self.states is not None and state is not None:
                self.states.release([slot for slot in {*state} if slot >= 0])
            return None
        return Allocation(matched + new, len(matched), state=state, num_known=num_known)

    def allocate(self, after: int | None = None) -> int:
        """Allocate one block more for a sequence that outgrew its extent.

        The caller has made sure that `num_available` > 0.

        Args:
            after: Last block of the sequence; the next one is taken if it is free. Otherwise a new extent begins where
                it can grow longest.
        """
        block = None if after is None else self._free.take_after(after)
        if block is None:
            return super().allocate()
        self._users[block] = 1
        return block

    def _run_of(self, num_blocks: int) -> list[int] | None:
        """Neighbouring blocks for one user, for which others may be evicted; None: no run becomes long enough."""
        while (blocks := self._free.take(num_blocks)) is None:
            if not self._evictable:
                return None
            evicted, _ = self._evictable.popitem(last=False)
            self._evict(evicted)
            self._free.append(evicted)
        for block in blocks:
            self._users[block] = 1
        return blocks


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
