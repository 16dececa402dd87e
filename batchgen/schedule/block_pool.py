"""Blocks with users: which are free, which are in use, and which nobody uses but may be found again. No tensors.

A block is what a sequence holds in a pool: KV of some tokens, or a slot with its states.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol, TypeVar

# The node of a trie before any token, which has no block.
ROOT = 0
Value = TypeVar("Value")


class FreeBlocks(Protocol):
    """The interface of a store of free blocks."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[int]: ...

    def pop(self) -> int:
        """Take a block."""

    def append(self, block: int, /) -> None:
        """Give a block back."""


class BlockPool:
    """Blocks with reference counts.

    Invariant: every block is free, or evictable (may be found, no user), or used (reference count > 0).

    Attributes:
        num_blocks: Blocks of the pool.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free: FreeBlocks = list(range(num_blocks - 1, -1, -1))
        self._users = [0] * num_blocks
        self._evictable: OrderedDict[int, None] = OrderedDict()

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can hand out now."""
        return len(self._free) + len(self._evictable)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_available

    @property
    def num_to_last(self) -> int:
        """Blocks from the first one to the last one that is not free."""
        free = set(self._free)
        return next((block + 1 for block in range(self.num_blocks - 1, -1, -1) if block not in free), 0)

    def num_users(self, block: int) -> int:
        return self._users[block]

    def num_evictable_in(self, blocks: Sequence[int]) -> int:
        """The number of these blocks that `num_available` counts as well."""
        return sum(block in self._evictable for block in blocks)

    def take(self, blocks: Sequence[int]) -> None:
        """Count one more user for each of these blocks, which have been found."""
        for block in blocks:
            self._evictable.pop(block, None)
            self._users[block] += 1

    def allocate(self, after: int | None = None) -> int:
        """Allocate a block, for one user. The caller has made sure that `num_available` > 0.

        Args:
            after: Last block of the table. Any block will do here, as pages in memory need not be neighbours.
        """
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._evictable.popitem(last=False)
            self._evict(block)
        self._users[block] = 1
        return block

    def release(self, blocks: Sequence[int]) -> None:
        """Count one user less for each block. The tail goes first, so that prefixes outlive what hangs on them."""
        for block in reversed(blocks):
            self._users[block] -= 1
            assert self._users[block] >= 0, f"KV block {block} released twice"
            if self._users[block] == 0:
                if self._may_be_found(block):
                    self._evictable[block] = None
                else:
                    self._free.append(block)

    def resize(self, num_blocks: int) -> dict[int, int]:
        """Give the pool another number of blocks, which those in use must fit; of others the oldest go first.

        Returns:
            The new numbers of blocks that get another one, by number.
        """
        assert self.num_used <= num_blocks, f"{self.num_used} KV blocks in use do not fit {num_blocks}"
        while self.num_used + len(self._evictable) > num_blocks:
            block, _ = self._evictable.popitem(last=False)
            self._evict(block)
            self._free.append(block)
        free = set(self._free)
        places = sorted(block for block in free if block < num_blocks)
        outside = (block for block in range(num_blocks, self.num_blocks) if block not in free)
        moved = dict(zip(outside, places, strict=False))
        self._renumber(num_blocks, moved)
        self.num_blocks = num_blocks
        return moved

    def _renumber(self, num_blocks: int, moved: Mapping[int, int]) -> None:
        """Note that the pool has so many blocks, and some have new numbers."""
        self._users = renumbered(self._users, num_blocks, moved, 0)
        self._evictable = OrderedDict.fromkeys(moved.get(block, block) for block in self._evictable)
        self._free = [
            block for block in range(num_blocks - 1, -1, -1) if not self._users[block] and block not in self._evictable
        ]

    def invalidate(self, blocks: Sequence[int]) -> None:
        """Have blocks in use found no more, as their KV was never written: the sweep failed."""
        for block in blocks:
            if self._may_be_found(block):  # an equal block may have been there before
                self._evict(block)

    def _may_be_found(self, block: int) -> bool:
        raise NotImplementedError

    def _evict(self, block: int) -> None:
        """Have a block found no more."""
        raise NotImplementedError


def renumbered(values: Sequence[Value], num_blocks: int, moved: Mapping[int, int], none: Value) -> list[Value]:
    """The value of each block, after some have got new numbers."""
    of_blocks = [*values[:num_blocks], *[none] * (num_blocks - len(values))]
    for old, new in moved.items():
        of_blocks[new] = values[old]
    return of_blocks


class NodePool(BlockPool):
    """Blocks that are found under the node that a block of the same tokens has in a trie (`block_manager`)."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._node_of = [ROOT] * num_blocks
        self._block_of: dict[int, int] = {}  # node -> block

    def insert(self, node: int, block: int) -> None:
        """Make a block findable. If the node has a block, that one stays."""
        if node != ROOT and node not in self._block_of:
            self._block_of[node], self._node_of[block] = block, node

    def evict_node(self, node: int) -> None:
        """Have the block of a node that is no more found no more."""
        block = self._block_of.get(node)
        if block is None:
            return
        self._evict(block)
        if block in self._evictable:
            del self._evictable[block]
            self._free.append(block)

    def _may_be_found(self, block: int) -> bool:
        return self._node_of[block] != ROOT

    def _evict(self, block: int) -> None:
        del self._block_of[self._node_of[block]]
        self._node_of[block] = ROOT
