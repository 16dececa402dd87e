"""The KV blocks of a tier: allocation, reference counts, and a cache of prompt prefixes. No tensors.

A block holds the KV of `kv_block_size` consecutive tokens. Full prompt blocks are inserted in a trie keyed by their
tokens, so that a later sequence whose prompt starts the same takes the same blocks: the prefix is prefilled once. A
block without users stays in the trie until the memory is needed; the one without users for the longest time is evicted
first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from batchgen.core.kv_expansion import KVExpansion
from batchgen.schedule.block_pool import ROOT, BlockPool, renumbered
from batchgen.schedule.state_slots import StateSlot, StateSlots
from batchgen.schedule.window_pool import NULL_BLOCK, WindowPool


class Allocation(NamedTuple):  # one for each sequence that is admitted
    """The blocks that a sequence starts with in a pool.

    Attributes:
        blocks: its block table.
        num_matched: leading blocks that hold KV which it takes over.
        window_table: block table of layers whose blocks are in a `WindowPool`; None: there are none.
        state: its slots in state layers; None: there are none.
        num_known: leading blocks of its prompt that are known, `num_matched` or more: as many as others have computed,
            whether or not all is there that the sequence would have to take over.
    """

    blocks: list[int]
    num_matched: int
    window_table: list[int] | None = None
    state: StateSlot | None = None
    num_known: int = 0


class BlockManager(BlockPool):
    """The blocks of one tier. Full prompt blocks are in a trie, and are found there.

    Attributes:
        share_prefixes: Whether sequences take over prompt prefixes that others have computed.
        windowed: Pool of layers with a sliding window, where these free blocks; None: all layers share one table. Where
            all layers have a window or a state, the blocks here hold nothing: they are the trie's.
        states: Slots of the state layers; None: the model has none.
        expansion: Division of the layers between device and host, which may be changed; None: there is none.
    """

    def __init__(
        self,
        num_blocks: int,
        kv_block_size: int,
        share_prefixes: bool = True,
        windowed: WindowPool | None = None,
        states: StateSlots | None = None,
        expansion: KVExpansion | None = None,
    ) -> None:
        super().__init__(num_blocks)
        self.expansion = expansion
        self.kv_block_size = kv_block_size
        self.share_prefixes = share_prefixes
        self.windowed, self.states = windowed, states
        self._key_of: list[tuple[int, tuple[int, ...]] | None] = [None] * num_blocks
        self._node_of = [ROOT] * num_blocks
        self._trie: dict[tuple[int, tuple[int, ...]], int] = {}  # (parent node, tokens) -> block
        self._last_node = ROOT

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
        known = self.known(tokens)
        matched = known[: self._longest_prefix(known)]
        headroom = self.num_available - self.num_evictable_in(matched) - num_reserved
        if num_blocks - len(matched) > headroom:
            return None
        return self._allocation(matched, len(known), window_fits)

    def admit_if(
        self,
        tokens: Sequence[int],
        fits: Callable[[int], bool] | None = None,
        window_fits: Callable[[Sequence[int]], bool] = lambda table: True,
    ) -> Allocation | None:
        """The blocks of a sequence, or None where the caller decides that there are not enough.

        Args:
            tokens: Tokens of its prompt.
            fits: Function of the number of blocks of a known prefix that several sequences have already. Blocks that
                only one has, or none, count as new: they would have been freed. None: there are enough in any case.
            window_fits: Function of the table of the known prefix in layers with a sliding window.
        """
        known = self.known(tokens)
        matched = known[: self._longest_prefix(known)]
        if fits is not None and not fits(sum(self._users[block] > 1 for block in matched)):
            return None
        return self._allocation(matched, len(known), window_fits)

    def _allocation(
        self, matched: list[int], num_known: int, window_fits: Callable[[Sequence[int]], bool]
    ) -> Allocation | None:
        if self.windowed is None and self.states is None:
            self.take(matched)
            return Allocation(matched, len(matched), num_known=num_known)
        table, state = None, None
        nodes = [self._node_of[block] for block in matched]
        if self.windowed is not None:
            table = self.windowed.prefix_table(nodes)
            if not window_fits(table):
                return None
        if self.states is not None:
            state = self.states.open(nodes[-1] if nodes else ROOT)
            if state is None:
                return None
        if self.windowed is not None and table is not None:
            self.windowed.take([block for block in table if block != NULL_BLOCK])
        self.take(matched)
        return Allocation(matched, len(matched), table, state, num_known)

    def num_sole(self, blocks: Sequence[int]) -> int:
        """The number of a sequence's blocks without another user: the end of its table, as only prefixes are shared."""
        if not self.share_prefixes or not blocks or self._users[blocks[0]] == 1:
            return len(blocks)
        low, high = 0, len(blocks)
        while low < high:
            middle = (low + high) // 2
            if self._users[blocks[middle]] > 1:
                low = middle + 1
            else:
                high = middle
        return len(blocks) - low

    def num_shareable(self, tokens: Sequence[int]) -> int:
        """The number of leading tokens that a sequence could take over now."""
        return self._longest_prefix(self.known(tokens)) * self.kv_block_size

    def known(self, tokens: Sequence[int]) -> list[int]:
        """Blocks in the trie of a prefix of `tokens`; layers with a window or a state may lack what belongs to them.

        They never hold all of the tokens: the last one has yet to be run for its logits. Takes no reference.
        """
        blocks: list[int] = []
        if not self.share_prefixes:
            return blocks
        node, size = ROOT, self.kv_block_size
        for end in range(size, len(tokens), size):
            block = self._trie.get((node, tuple(tokens[end - size : end])))
            if block is None:
                break
            blocks.append(block)
            node = self._node_of[block]
        return blocks

    def _longest_prefix(self, known: Sequence[int]) -> int:
        """The number of known blocks that can be taken over: all is there in layers with a window or a state too."""
        count = len(known)
        if not count:
            return 0
        kinds = [of_kind for of_kind in (self.windowed, self.states) if of_kind is not None]
        nodes = [self._node_of[block] for block in known] if kinds else []
        while True:
            longest = count
            for of_kind in kinds:
                longest = of_kind.longest_prefix(nodes[:longest])
            if longest == count:
                return count
            count = longest

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
            return ROOT
        key = (parent, tuple(tokens))
        found = self._trie.get(key)
        if found is not None:
            return self._node_of[found]
        self._last_node += 1
        self._trie[key], self._key_of[block], self._node_of[block] = block, key, self._last_node
        return self._last_node

    def node(self, block: int) -> int:
        return self._node_of[block]

    def _renumber(self, num_blocks: int, moved: Mapping[int, int]) -> None:
        super()._renumber(num_blocks, moved)
        self._key_of = renumbered(self._key_of, num_blocks, moved, None)
        self._node_of = renumbered(self._node_of, num_blocks, moved, ROOT)
        self._trie = {key: moved.get(block, block) for key, block in self._trie.items()}

    def _may_be_found(self, block: int) -> bool:
        return self._key_of[block] is not None

    def _evict(self, block: int) -> None:
        for of_nodes in (self.windowed, self.states):
            if of_nodes is not None:
                of_nodes.evict_node(self._node_of[block])
        key = self._key_of[block]
        assert key is not None, f"block {block} is not in the trie"
        del self._trie[key]
        self._key_of[block], self._node_of[block] = None, ROOT
