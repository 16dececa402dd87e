"""The KV blocks of a tier: allocation, reference counts, and a cache of prompt prefixes. No tensors.

A block holds the KV of `kv_block_size` consecutive tokens. Full prompt blocks are inserted in a trie keyed by their
tokens, so that a later sequence whose prompt starts the same takes the same blocks: the prefix is prefilled once. A
block without users stays in the trie until the memory is needed; the one without users for the longest time is evicted
first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from batchgen.schedule.block_pool import BlockPool
from batchgen.schedule.window_pool import NULL_BLOCK, WindowPool

_ROOT = 0


@dataclass(frozen=True)
class Allocation:
    """The blocks that a sequence starts with in a pool.

    Attributes:
        blocks: its block table.
        num_matched: leading blocks that hold KV which it takes over.
        window_table: block table of layers whose blocks are in a `WindowPool`; None: there are none.
    """

    blocks: list[int]
    num_matched: int
    window_table: list[int] | None = None


class BlockManager(BlockPool):
    """The blocks of one tier. Full prompt blocks are in a trie, and are found there.

    Attributes:
        share_prefixes: Whether sequences take over prompt prefixes that others have computed.
        windowed: Pool of layers with a sliding window, where these free blocks; None: all layers share one table. Where
            all layers have a window, the blocks here hold nothing: they are the trie's.
    """

    def __init__(
        self, num_blocks: int, kv_block_size: int, share_prefixes: bool = True, windowed: WindowPool | None = None
    ) -> None:
        super().__init__(num_blocks, kv_block_size)
        self.share_prefixes = share_prefixes
        self.windowed = windowed
        self._key_of: list[tuple[int, tuple[int, ...]] | None] = [None] * num_blocks
        self._node_of = [_ROOT] * num_blocks
        self._trie: dict[tuple[int, tuple[int, ...]], int] = {}  # (parent node, tokens) -> block
        self._last_node = _ROOT

    @property
    def longest_tokens(self) -> int:
        """Most tokens of a sequence that has the pool to itself."""
        longest = self.num_blocks * self.kv_block_size
        of_window = self.windowed.longest_tokens if self.windowed else None
        return longest if of_window is None else min(longest, of_window)

    def admit(
        self,
        tokens: Sequence[int],
        num_blocks: int,
        num_reserved: int,
        window_fits: Callable[[Sequence[int]], bool] = lambda table: True,
    ) -> Allocation | None:
        """The blocks of a sequence that is to have `num_blocks` blocks in all, or None where there are not enough.

        The blocks of a known prefix are allocated now; the others are the caller's to reserve.

        Args:
            tokens: Tokens of its prompt.
            num_blocks: Blocks that it is to have in all.
            num_reserved: Available blocks that are promised to others.
            window_fits: Function of the table of the known prefix in layers with a sliding window.
        """
        matched = self.match(tokens)
        headroom = self.num_available - self.num_evictable_in(matched) - num_reserved
        if num_blocks - len(matched) > headroom:
            return None
        return self._allocation(matched, window_fits)

    def admit_if(
        self,
        tokens: Sequence[int],
        fits: Callable[[int], bool],
        window_fits: Callable[[Sequence[int]], bool] = lambda table: True,
    ) -> Allocation | None:
        """The blocks of a sequence, or None where the caller decides that there are not enough.

        Args:
            tokens: Tokens of its prompt.
            fits: Function of the number of blocks of a known prefix that several sequences have already. Blocks that
                only one has, or none, count as new: they would have been freed.
            window_fits: Function of the table of the known prefix in layers with a sliding window.
        """
        matched = self.match(tokens)
        if not fits(sum(self._users[block] > 1 for block in matched)):
            return None
        return self._allocation(matched, window_fits)

    def _allocation(self, matched: list[int], window_fits: Callable[[Sequence[int]], bool]) -> Allocation | None:
        table = None
        if self.windowed is not None:
            table = self.windowed.prefix_table([self._node_of[block] for block in matched])
            if not window_fits(table):
                return None
            self.windowed.take([block for block in table if block != NULL_BLOCK])
        self.take(matched)
        return Allocation(matched, len(matched), table)

    def num_sole(self, blocks: Sequence[int]) -> int:
        """The number of a sequence's blocks without another user: the end of its table, as only prefixes are shared."""
        if not self.share_prefixes:
            return len(blocks)
        low, high = 0, len(blocks)
        while low < high:
            middle = (low + high) // 2
            if self._users[blocks[middle]] > 1:
                low = middle + 1
            else:
                high = middle
        return len(blocks) - low

    def match(self, tokens: Sequence[int]) -> list[int]:
        """Blocks that already hold the KV of a prefix of `tokens`, in all layers. Takes no reference.

        They never hold all of the tokens: the last one has yet to be run for its logits.
        """
        blocks: list[int] = []
        if not self.share_prefixes:
            return blocks
        node, size = _ROOT, self.kv_block_size
        for end in range(size, len(tokens), size):
            block = self._trie.get((node, tuple(tokens[end - size : end])))
            if block is None:
                break
            blocks.append(block)
            node = self._node_of[block]
        if self.windowed is not None:
            del blocks[self.windowed.longest_prefix([self._node_of[block] for block in blocks]) :]
        return blocks

    def insert(self, parent: int, tokens: Sequence[int], block: int) -> int:
        """Make a full block findable, whose KV is written by the end of this sweep.

        If an equal block is there, that one stays.

        Args:
            parent: Trie node of the block before it, 0 for the first.
            tokens: Tokens of the block.
            block: The block.

        Returns:
            The trie node of the block with these tokens.
        """
        if not self.share_prefixes:
            return _ROOT
        key = (parent, tuple(tokens))
        found = self._trie.get(key)
        if found is not None:
            return self._node_of[found]
        self._last_node += 1
        self._trie[key], self._key_of[block], self._node_of[block] = block, key, self._last_node
        return self._last_node

    def node(self, block: int) -> int:
        return self._node_of[block]

    def _may_be_found(self, block: int) -> bool:
        return self._key_of[block] is not None

    def _evict(self, block: int) -> None:
        if self.windowed is not None:
            self.windowed.evict_node(self._node_of[block])
        key = self._key_of[block]
        assert key is not None, f"block {block} is not in the trie"
        del self._trie[key]
        self._key_of[block], self._node_of[block] = None, _ROOT
