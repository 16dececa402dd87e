"""Who owns which KV block: allocation, reference counts, and prompt prefixes found and shared. No tensors.

A block holds the KV of `block_size` consecutive tokens. Full prompt blocks are entered in a trie keyed by
their tokens, so that a later sequence whose prompt starts the same takes the same blocks: the prefix is
prefilled once. A block nobody uses any more stays in the trie until the space is needed; the
longest unused goes first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_ROOT = 0


@dataclass(frozen=True)
class Allocation:
    """What a sequence starts with in a pool: `blocks`, the first `num_matched` of which hold KV that it takes over."""

    blocks: list[int]
    num_matched: int


class BlockManager:
    """Invariant: every block is free, or evictable (in the trie, no user), or used (reference count > 0)."""

    def __init__(self, num_blocks: int, block_size: int, share_prefixes: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.share_prefixes = share_prefixes
        self._free = list(range(num_blocks - 1, -1, -1))
        self._users = [0] * num_blocks
        self._key_of: list[tuple[int, tuple[int, ...]] | None] = [None] * num_blocks
        self._node_of = [_ROOT] * num_blocks
        self._trie: dict[tuple[int, tuple[int, ...]], int] = {}  # (parent node, tokens) -> block
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._last_node = _ROOT

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can hand out now."""
        return len(self._free) + len(self._evictable)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_available

    def admit(self, tokens: Sequence[int], num_blocks: int, num_reserved: int) -> Allocation | None:
        """The blocks of a sequence that is to have `num_blocks` blocks in all, or None where there are not enough.

        num_reserved: available blocks that are promised to others. The blocks of a known prefix are allocated now, the
        others are the caller's to reserve.
        """
        matched = self.match(tokens)
        headroom = self.num_available - self.num_evictable_in(matched) - num_reserved
        if num_blocks - len(matched) > headroom:
            return None
        self.take(matched)
        return Allocation(matched, len(matched))

    def admit_if(self, tokens: Sequence[int], fits: Callable[[int], bool]) -> Allocation | None:
        """The same, where the caller decides: fits(blocks of a known prefix that several sequences have already).

        Those that only one has, or none, count as new: they would have been given back.
        """
        matched = self.match(tokens)
        if not fits(sum(self._users[block] > 1 for block in matched)):
            return None
        self.take(matched)
        return Allocation(matched, len(matched))

    def num_sole(self, blocks: Sequence[int]) -> int:
        """How many blocks of a sequence have no other user: the end of its table, as only prefixes are shared."""
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
        """Blocks that already hold the KV of a prefix of `tokens`. Takes no reference.

        Never of all of it: the last token has yet to be run for its logits.
        """
        blocks: list[int] = []
        if not self.share_prefixes:
            return blocks
        node, size = _ROOT, self.block_size
        for end in range(size, len(tokens), size):
            block = self._trie.get((node, tuple(tokens[end - size : end])))
            if block is None:
                break
            blocks.append(block)
            node = self._node_of[block]
        return blocks

    def num_evictable_in(self, blocks: Sequence[int]) -> int:
        """How many of these blocks `num_available` counts as well."""
        return sum(block in self._evictable for block in blocks)

    def take(self, blocks: Sequence[int]) -> None:
        """One more user for each of these (matched) blocks."""
        for block in blocks:
            self._evictable.pop(block, None)
            self._users[block] += 1

    def allocate(self, after: int | None = None) -> int:
        """A block with one user. The caller has made sure that `num_available` > 0.

        after: the table's last block. Any block will do here, as pages in memory need not be neighbours.
        """
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._evictable.popitem(last=False)
            self._forget(block)
        self._users[block] = 1
        return block

    def release(self, blocks: Sequence[int]) -> None:
        """One user less for each. The table's tail goes first, so that prefixes outlive what hangs on them."""
        for block in reversed(blocks):
            self._users[block] -= 1
            assert self._users[block] >= 0, f"KV block {block} released twice"
            if self._users[block] == 0:
                if self._key_of[block] is None:
                    self._free.append(block)
                else:
                    self._evictable[block] = None

    def enter(self, parent: int, tokens: Sequence[int], block: int) -> int:
        """Makes a full block, whose KV is or is about to be written this sweep, findable. Returns its trie node.

        parent: the node of the block before it, 0 for the first. If an equal block is there already, that one stays.
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

    def withdraw(self, blocks: Sequence[int]) -> None:
        """Takes blocks that are in use out of the trie again: their KV was never written, as the sweep failed."""
        for block in blocks:
            if self._key_of[block] is not None:  # an equal block may have been there before
                self._forget(block)

    def node(self, block: int) -> int:
        return self._node_of[block]

    def _forget(self, block: int) -> None:
        del self._trie[self._key_of[block]]
        self._key_of[block], self._node_of[block] = None, _ROOT
