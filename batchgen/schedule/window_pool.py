"""The KV blocks of layers with a sliding window, which are freed once no later token sees them. No tensors.

A sequence's table of these blocks is as long as its other one, with null blocks in place of freed ones. A block of a
prompt is found under the trie node of the block of the other layers with the same tokens (`block_manager`), also after
it has been freed, until its memory is needed. So a prefix can be taken over as far as the last window before its end is
there.
"""

from __future__ import annotations

from collections.abc import Sequence

from batchgen.core.plan import window_blocks
from batchgen.schedule.block_pool import NodePool

# In a block table: a block that was freed.
NULL_BLOCK = -1


class WindowPool(NodePool):
    """The blocks of one tier, for layers whose queries see the last `window` tokens at most, themselves included."""

    def __init__(self, num_blocks: int, kv_block_size: int, window: int) -> None:
        super().__init__(num_blocks)
        self.kv_block_size = kv_block_size
        self.window = window
        self.blocks_of_window = window_blocks(window, kv_block_size)

    @property
    def longest_tokens(self) -> int | None:
        """Most tokens of a sequence that has the pool to itself; None: it may have any length."""
        return None if self.num_blocks >= self.blocks_of_window else self.num_blocks * self.kv_block_size

    def first_block(self, position: int) -> int:
        """The first block, in a sequence's table, that a token at `position` sees."""
        return max(0, position - self.window + 1) // self.kv_block_size

    def num_sole(self, blocks: Sequence[int]) -> int:
        """The number of these blocks that have one user."""
        return sum(self._users[block] == 1 for block in blocks)

    def longest_prefix(self, nodes: Sequence[int]) -> int:
        """The number of a prefix's blocks that can be taken over: as many as have the last window before them here."""
        longest = found = 0  # found: neighbouring blocks that are there, up to here
        for count, node in enumerate(nodes, 1):
            found = found + 1 if node in self._block_of else 0
            if found >= count - self.first_block(count * self.kv_block_size):
                longest = count
        return longest

    def prefix_table(self, nodes: Sequence[int]) -> list[int]:
        """The table of a sequence that takes over these blocks, as many as `longest_prefix` says."""
        first = self.first_block(len(nodes) * self.kv_block_size)
        return [NULL_BLOCK] * first + [self._block_of[node] for node in nodes[first:]]
