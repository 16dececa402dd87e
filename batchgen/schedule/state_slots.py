"""The slots of a tier that hold the states of sequences, and snapshots of states at forks of prompts. No tensors.

A slot holds all that a sequence keeps of the model's state layers. A sequence in flight has one, which its tokens
update in place. A state cannot be cut at any token, so a prefix can be taken over only as far as a snapshot is there: a
slot that has been left as it was after the prefix, and is found under the trie node of the prefix's last block
(`block_manager`). A sequence that takes it over reads it once, and writes to a slot of its own. Snapshots that nobody
reads go when a slot is needed, least recently used first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from batchgen.schedule.block_pool import ROOT, NodePool

# In place of a slot: the state before the first token, which is zero.
NO_STATE = -1


class StateSlot(NamedTuple):
    """The slots of a sequence: `source` has its state before the next token, `target` takes that after it."""

    source: int
    target: int


class StateSlots(NodePool):
    """The state slots of one tier. A slot with a node is a snapshot."""

    def longest_prefix(self, nodes: Sequence[int]) -> int:
        """The number of a prefix's leading blocks up to the last one that has a snapshot at its end."""
        return next((count for count in range(len(nodes), 0, -1) if nodes[count - 1] in self._block_of), 0)

    def open(self, node: int) -> StateSlot | None:
        """Give a sequence a slot; None: there is none left.

        Args:
            node: Trie node of the last block of the prefix that it takes over, whose snapshot is its source until
                `release`; ROOT: it begins with its first token.
        """
        source = NO_STATE if node == ROOT else self._block_of[node]
        if source == NO_STATE:
            return StateSlot(source, self.allocate()) if self.num_available else None
        self.take([source])
        if self.num_available:
            return StateSlot(source, self.allocate())
        if self.num_users(source) == 1:  # the snapshot itself is the only slot that is left
            self._evict(source)
            return StateSlot(source, source)
        self.release([source])
        return None

    def leave_snapshot(self, node: int, slot: int) -> int:
        """Make a sequence's slot a snapshot, which it reads next; return the slot that it writes to from now on.

        It is the same slot, and there is no snapshot, where the node has one or no slot is left.

        Args:
            node: Trie node of the block that ends with the state's last token.
            slot: Slot with the state.
        """
        if node == ROOT or node in self._block_of or not self.num_available:
            return slot
        self.insert(node, slot)
        return self.allocate()
