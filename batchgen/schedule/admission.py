"""Projection of the KV that sequences in flight will hold: admission on its peak. No tensors.

A decoding sequence gains a token in every sweep and frees its blocks when it ends, so what is held at any later
sweep can be summed up; a new sequence fits if with its own curve added the sum never exceeds the pool. With lengths
that are known this packs a pool as the diagonal block schedule does (FlexGen appendix A.2), where reserving every
sequence's last block from the start would leave half of what the outputs take empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

# Later sweeps are looked at in at most this many equal steps.
_MOST_STEPS = 2048
_ENDLESS = 1 << 40  # blocks
Blocks = npt.NDArray[np.int64]


class Growth(NamedTuple):  # one for each sequence in flight, in every sweep
    """The growth of one sequence in a pool: one token with each sweep.

    Attributes:
        num_tokens: tokens of KV after this sweep.
        num_sweeps: sweeps that it stays for, this one included.
        num_held: blocks in its table now.
        num_sole: blocks that it holds alone, which are free when it ends.
        delayed: Whether its prompt takes more than this sweep, nobody knows how many; it counts at its longest, for
            good.
    """

    num_tokens: int
    num_sweeps: int
    num_held: int = 0
    num_sole: int = 0
    delayed: bool = False

    @property
    def most_tokens(self) -> int:
        return self.num_tokens + self.num_sweeps - 1


class Projection:
    """Blocks that sequences will take beyond what they hold now, less what those that end free, by sweep."""

    def __init__(
        self,
        growths: Sequence[Growth],
        num_available: int,
        kv_block_size: int,
        longest_sweeps: int,
        most_sole: int | None = None,
    ) -> None:
        """Sum up the growth of the sequences in flight.

        Args:
            growths: Growth of each of them.
            num_available: Blocks that the pool can hand out now.
            kv_block_size: Tokens of a KV block.
            longest_sweeps: Most sweeps that a sequence stays for which is added later.
            most_sole: Blocks that a sequence ever holds alone, as those before a sliding window are freed; None: all it
                has.
        """
        self._num_available = num_available
        self._most_sole = most_sole
        longest = max([longest_sweeps, *(g.num_sweeps for g in growths)])
        self._block_size = kv_block_size
        self._step = -(-longest // _MOST_STEPS)
        self._steps = -(-longest // self._step)
        # At the end of each step, when most is held of it.
        self._sweeps = (np.arange(self._steps, dtype=np.int64) + 1) * self._step - 1
        self._net = np.zeros(self._steps, dtype=np.int64)
        self._latest: tuple[Growth | None, Blocks] = None, self._net
        decoding = [g for g in growths if not g.delayed]
        if decoding:
            self._net += self._summed(decoding)
        self._net += sum(self._grown(-(-g.most_tokens // kv_block_size), g) for g in growths if g.delayed)

    def fits(self, growth: Growth) -> bool:
        """Tell whether the pool lasts with this sequence too."""
        last = self._last(growth)
        return bool((self._net[:last] + self._allocated(growth, last)).max() <= self._num_available)

    def add(self, growth: Growth) -> None:
        """Count a sequence that has been admitted."""
        last = self._last(growth)
        self._net[:last] += self._allocated(growth, last)

    def _last(self, growth: Growth) -> int:
        return self._steps if growth.delayed else min(self._steps, -(-growth.num_sweeps // self._step))

    def _allocated(self, growth: Growth, last: int) -> Blocks:
        if growth != self._latest[0]:  # many that are admitted together are alike
            self._latest = growth, self._blocks_of(growth, last)
        return self._latest[1]

    def _blocks_of(self, growth: Growth, last: int) -> Blocks:
        tokens = np.minimum(growth.num_tokens + self._sweeps[:last], growth.most_tokens)
        blocks: Blocks = self._grown(-(-tokens // self._block_size), growth)
        return blocks

    def _grown(self, blocks: Any, growth: Growth) -> Any:
        """Blocks that a sequence holds beyond those it holds now, when its table has so many."""
        return np.minimum(blocks, self._most_in_table(growth)) - growth.num_held

    def _most_in_table(self, growth: Growth) -> int:
        """The most blocks of a sequence's table that count: with a longer one it frees as many as it gains."""
        return _ENDLESS if self._most_sole is None else growth.num_held - growth.num_sole + self._most_sole

    def _summed(self, growths: Sequence[Growth]) -> Blocks:
        size, steps = self._block_size, self._steps
        tokens, sweeps, held, sole, _ = np.array(growths, dtype=np.int64).T
        last = np.minimum(steps, -(-sweeps // self._step)) - 1  # the last step in which each is there
        # The last one in which it grows; -1: there is none.
        most = np.full_like(held, _ENDLESS) if self._most_sole is None else held - sole + self._most_sole
        growing = np.minimum(last, np.maximum(0, (most * size - tokens + 1) // self._step) - 1)

        def until(step: Blocks, values: Blocks) -> Blocks:
            """Values summed over the sequences that are there in each step. step: the last step of each sequence."""
            ending = np.bincount(step + 1, weights=values, minlength=steps + 1)
            return np.rint(np.cumsum(ending[::-1])[::-1]).astype(np.int64)[1:]

        # ceil((whole * size + rest + t) / size), by rest: sequences of equal rest take their next blocks together.
        whole, rest = np.divmod(tokens, size)
        there = np.bincount(rest * (steps + 1) + growing + 1, minlength=size * (steps + 1)).reshape(size, steps + 1)
        there = np.cumsum(there[:, ::-1], axis=1)[:, ::-1][:, 1:]
        grown = -(-(np.arange(size)[:, None] + self._sweeps) // size)
        total = until(growing, whole) + (there * grown).sum(0)
        if self._most_sole is not None:
            total += until(last, most) - until(growing, most)
        freed = sole.sum() - until(last, sole)
        net: Blocks = total - until(last, held) - freed
        return net
