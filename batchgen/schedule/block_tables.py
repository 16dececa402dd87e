"""The block tables of sequences in flight: filled token by token, found by others, and released. No tensors."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from batchgen.schedule.block_manager import Allocation, BlockManager
from batchgen.schedule.sequence import Sequence
from batchgen.schedule.state_slots import NO_STATE, StateSlot
from batchgen.schedule.window_pool import NULL_BLOCK, WindowPool

# Tokens of a prefix for which a snapshot of its state is left, and waited for. Fewer are computed again.
_LEAST_TOKENS = 64


class BlockTables:
    """The block tables of sequences in flight.

    Invariant: in each pool, blocks reserved for sequences in flight never exceed the blocks available.

    Attributes:
        num_reserved: blocks promised to sequences in flight and not yet allocated, by tier.
        num_held: entries of the block tables of sequences in flight, by tier.
        share_prefixes: Whether sequences take over KV of others in any tier.
        have_windows: Whether layers with a sliding window have pools of their own in any tier.
        have_states: Whether sequences have state slots.
    """

    def __init__(self, pools: Mapping[str, BlockManager]) -> None:
        """Keep the tables of sequences whose blocks are in these pools, by tier."""
        self._pools = pools
        self.num_reserved = dict.fromkeys(pools, 0)
        self.num_held = dict.fromkeys(pools, 0)
        self._least_block_size = min(pool.kv_block_size for pool in pools.values())
        self.share_prefixes = any(pool.share_prefixes for pool in pools.values())
        self.have_windows = any(pool.windowed is not None for pool in pools.values())
        self.have_states = any(pool.states is not None for pool in pools.values())

    def pool(self, sequence: Sequence) -> BlockManager:
        """The pool that a sequence in flight has its blocks from."""
        return self._pools[sequence.kv_placement.tier]

    def open(self, sequence: Sequence, allocation: Allocation, num_reserved: int) -> None:
        """Begin the tables of a sequence that has been admitted to its placement.

        Args:
            sequence: The sequence.
            allocation: Blocks that it starts with.
            num_reserved: Blocks that are promised to it beyond these.
        """
        tier, blocks, num_matched = sequence.kv_placement.tier, allocation.blocks, allocation.num_matched
        pool = self._pools[tier]
        num_computed = num_matched * pool.kv_block_size
        sequence.block_table.extend(blocks)
        self.num_held[tier] += len(blocks)
        sequence.reserved_blocks = num_reserved
        self.num_reserved[tier] += num_reserved
        sequence.num_computed = num_computed
        sequence.num_cached = min(num_computed, sequence.num_prompt)
        sequence.num_matched_blocks = sequence.num_inserted_blocks = num_matched
        sequence.node = pool.node(blocks[num_matched - 1]) if num_matched else 0
        if allocation.window_table is not None:
            sequence.window_table = array("i", allocation.window_table)
            sequence.num_freed = allocation.window_table.count(NULL_BLOCK)
        sequence.state = allocation.state
        if allocation.state is not None:
            self._add_fork(sequence, allocation.num_known * pool.kv_block_size, num_computed)

    def without_block(self, sequences: Iterable[Sequence]) -> list[Sequence]:
        """The sequences for which something may change when they grow by one token.

        For the others there is a block, and their prompt is behind.
        """
        size = self._least_block_size
        return [  # looks at each sequence of every sweep, so most go without a call
            s
            for s in sequences
            if s.num_computed >= len(s.block_table) * size
            or s.num_computed < s.num_prompt
            or s.window_table is not None
        ]

    def grow(self, sequence: Sequence, count: int) -> bool:
        """Allocate blocks for `count` more tokens; False if the pool has not enough, after all it has."""
        tier, table = sequence.kv_placement.tier, sequence.block_table
        pool = self._pools[tier]
        needed = -(-(sequence.num_computed + count) // pool.kv_block_size)
        while len(table) < needed:
            if sequence.reserved_blocks:
                sequence.reserved_blocks -= 1
                self.num_reserved[tier] -= 1
            elif pool.num_available <= self.num_reserved[tier]:
                return False
            table.append(pool.allocate(table[-1] if table else None))
            self.num_held[tier] += 1
        while sequence.window_table is not None and len(sequence.window_table) < needed:
            windows = self._windows(tier)
            if not windows.num_available:
                return False
            sequence.window_table.append(windows.allocate())
        return True

    def fork_before(self, sequence: Sequence, following: Sequence) -> None:
        """Have a sequence that has been admitted leave a snapshot for the one that is admitted next, if that helps."""
        if sequence.state is not None and self.pool(sequence).share_prefixes:
            self._add_fork(sequence, self._common_tokens(sequence, following), sequence.num_computed)

    def _add_fork(self, sequence: Sequence, num_tokens: int, num_known: int) -> None:
        """Note a fork, if there are so many tokens from a state that is known that a snapshot is worth its slot."""
        if num_tokens - num_known >= _LEAST_TOKENS:
            sequence.forks |= {num_tokens}

    def prefix_ahead(self, sequence: Sequence, following: Sequence) -> int:
        """Tokens of a prefix that a sequence in flight is computing, and that can be taken over later; 0: none can.

        Args:
            sequence: The sequence in flight.
            following: A sequence that could take over the KV, and the snapshot of a state, with many tokens less to
                compute than now.
        """
        pool = self.pool(sequence)
        if not pool.share_prefixes or len(following.tokens) < _LEAST_TOKENS:
            return 0
        known = sequence.num_inserted_blocks * pool.kv_block_size
        if sequence.state is None and known >= sequence.num_prompt // pool.kv_block_size * pool.kv_block_size:
            return 0
        if sequence.state is not None and self.next_fork(sequence) is None:
            return 0
        end = self._common_tokens(sequence, following)
        if sequence.state is not None:
            end = max((fork for fork in self._fork_ends(sequence) if sequence.num_computed < fork <= end), default=0)
        elif end <= known:
            return 0
        return end if end - pool.num_shareable(following.shareable) >= _LEAST_TOKENS else 0

    def _common_tokens(self, sequence: Sequence, following: Sequence) -> int:
        """Tokens of whole blocks at the start of a prompt that another sequence, which has more tokens, can share."""
        size, tokens, others = self.pool(sequence).kv_block_size, sequence.tokens, following.shareable
        most = min(sequence.num_prompt, len(others) - 1) // size * size
        ends = range(size, most + 1, size)
        return next((end - size for end in ends if tokens[end - size : end] != others[end - size : end]), max(0, most))

    def next_fork(self, sequence: Sequence) -> int | None:
        """The token of a prompt at which its next chunk must end, so that a snapshot of its state can be left there.

        None: it may end anywhere.
        """
        if not sequence.forks or sequence.state is None or not self.pool(sequence).share_prefixes:
            return None
        return min((end for end in self._fork_ends(sequence) if end > sequence.num_computed), default=None)

    def commit_state(self, sequence: Sequence) -> None:
        """The tokens up to `num_computed` have been launched: the sequence's state is in its slot from now on.

        At a fork it leaves a snapshot, where there is a slot for it. To be called after `insert_prompt`.
        """
        states = self.pool(sequence).states
        if sequence.state is None or states is None:
            return
        source, slot = sequence.state
        self._leave_source(sequence)
        target = slot
        if sequence.forks and sequence.num_computed in self._fork_ends(sequence):
            blocks, inserted = sequence.num_computed // self.pool(sequence).kv_block_size, sequence.num_inserted_blocks
            target = states.leave_snapshot(sequence.node, slot) if blocks == inserted else slot
        if (source, slot) != (slot, target):
            sequence.state = StateSlot(slot, target)

    def can_keep_state(self, sequence: Sequence) -> bool:
        """Tell whether a sequence's state can stay as it is while its next tokens make another; it may have none."""
        states, state = self.pool(sequence).states, sequence.state
        if states is None or state is None:
            return True
        return state.source == state.target and states.num_available > 0

    def keep_state(self, sequence: Sequence) -> None:
        """Have the next tokens of a sequence write its state to a slot of its own, until `settle_state`."""
        states = self.pool(sequence).states
        assert states is not None and sequence.state is not None, "the sequence has no state"
        sequence.state = StateSlot(sequence.state.source, states.allocate())

    def settle_state(self, sequence: Sequence, *, is_right: bool) -> None:
        """Choose one of the two states of a sequence since `keep_state`; the other one's slot is free.

        Args:
            sequence: The sequence.
            is_right: Whether the state after the tokens is right, so that the one before them goes.
        """
        states, state = self.pool(sequence).states, sequence.state
        assert states is not None and state is not None, "the sequence has no state"
        right, wrong = (state.target, state.source) if is_right else (state.source, state.target)
        states.release([wrong])
        sequence.state = StateSlot(right, right)

    def _fork_ends(self, sequence: Sequence) -> Iterator[int]:
        """Tokens of the whole blocks before each fork of a prompt."""
        size = self.pool(sequence).kv_block_size
        return (fork // size * size for fork in sequence.forks)

    def _leave_source(self, sequence: Sequence) -> None:
        """Let go of the snapshot that a sequence has taken over, once nothing launched later reads it."""
        states, state = self.pool(sequence).states, sequence.state
        if states is not None and state is not None and state.source not in (NO_STATE, state.target):
            states.release([state.source])

    def can_grow(self, sequences: Iterable[Sequence], num_tokens: int) -> bool:
        """Tell whether there are blocks for `num_tokens` more tokens of each of these sequences."""
        needed = Counter[str]()
        of_windows = Counter[str]()
        for sequence in sequences:
            tier, pool = sequence.kv_placement.tier, self.pool(sequence)
            blocks = -(-(sequence.num_computed + num_tokens) // pool.kv_block_size)
            needed[tier] += max(0, blocks - len(sequence.block_table) - sequence.reserved_blocks)
            if sequence.window_table is not None:
                table, windows = sequence.window_table, self._windows(tier)
                first = windows.first_block(sequence.num_computed + num_tokens - 1)
                of_windows[tier] += blocks - max(first, len(table))
                of_windows[tier] -= windows.num_sole(table[sequence.num_freed : first])
        return all(
            count <= self._pools[tier].num_available - self.num_reserved[tier] for tier, count in needed.items()
        ) and all(count <= self._windows(tier).num_available for tier, count in of_windows.items())

    def capacity(self, sequence: Sequence) -> int:
        """Tokens beyond those computed for which a sequence has blocks, or can have them, in layers without window."""
        pool = self.pool(sequence)
        blocks = pool.num_available - self.num_reserved[sequence.kv_placement.tier] + sequence.reserved_blocks
        return (len(sequence.block_table) + blocks) * pool.kv_block_size - sequence.num_computed

    def window_capacity(self, sequence: Sequence) -> int:
        """Tokens of a prompt for which there are blocks in layers with a sliding window, in this sweep."""
        if sequence.window_table is None:
            return sequence.num_remaining
        windows = self._windows(sequence.kv_placement.tier)
        blocks = len(sequence.window_table) + windows.num_available
        return blocks * windows.kv_block_size - sequence.num_computed

    def free_before_window(self, sequence: Sequence, position: int) -> None:
        """Free blocks of layers with a sliding window that no token from `position` on sees."""
        table = sequence.window_table
        if table is None:
            return
        windows = self._windows(sequence.kv_placement.tier)
        held, first = sequence.num_freed, windows.first_block(position)
        if first > held:
            windows.release(table[held:first])
            table[held:first] = array("i", [NULL_BLOCK]) * (first - held)  # of a longer table than there is, too
            sequence.num_freed = first

    def insert_prompt(self, sequence: Sequence, num_tokens: int) -> None:
        """Make blocks findable that are filled with prompt tokens, up to token `num_tokens`."""
        pool = self.pool(sequence)
        if not pool.share_prefixes:
            return
        size = pool.kv_block_size
        for b in range(sequence.num_inserted_blocks, min(num_tokens, sequence.num_prompt) // size):
            tokens = sequence.tokens[b * size : (b + 1) * size]
            sequence.node = pool.insert(sequence.node, tokens, sequence.block_table[b])
            if sequence.window_table is not None:
                self._windows(sequence.kv_placement.tier).insert(sequence.node, sequence.window_table[b])
            sequence.num_inserted_blocks = b + 1

    def invalidate_prompt(self, sequence: Sequence) -> None:
        """Have no other sequence find the KV of this one's prompt, or of a part of it, from now on."""
        for pool in self._pools.values():
            if pool.share_prefixes:
                pool.invalidate(pool.known([*sequence.tokens[: sequence.num_prompt], 0]))

    def detach(self, sequence: Sequence) -> array[int]:
        """Take a sequence's blocks from it, which stay allocated: the caller releases them to the pool."""
        tier, table = sequence.kv_placement.tier, sequence.block_table
        assert sequence.window_table is None and sequence.state is None, "it has more than one table"
        self.num_reserved[tier] -= sequence.reserved_blocks
        self.num_held[tier] -= len(table)
        sequence.reserved_blocks, sequence.block_table = 0, array("i")
        return table

    def release(self, sequence: Sequence) -> None:
        """Release all blocks of a sequence, and those reserved for it."""
        tier, pool = sequence.kv_placement.tier, self.pool(sequence)
        self.num_reserved[tier] -= sequence.reserved_blocks
        sequence.reserved_blocks = 0
        written = sequence.num_computed // pool.kv_block_size
        if pool.share_prefixes and sequence.num_inserted_blocks > written:
            # After a sweep that failed: what it was to write is not there to be found.
            pool.invalidate(sequence.block_table[written : sequence.num_inserted_blocks])
        pool.release(sequence.block_table)
        self.num_held[tier] -= len(sequence.block_table)
        sequence.block_table = array("i")
        if sequence.window_table is not None:
            windows, held = self._windows(tier), sequence.num_freed
            windows.invalidate(sequence.window_table[max(held, written) :])
            windows.release(sequence.window_table[held:])
            sequence.window_table, sequence.num_freed = None, 0
        if sequence.state is not None and pool.states is not None:
            self._leave_source(sequence)
            pool.states.release([sequence.state.target])
            sequence.state = None

    def renumber(self, sequences: Iterable[Sequence], moved: Mapping[int, int]) -> None:
        """Give blocks in the tables of sequences their new numbers.

        Args:
            sequences: Sequences in flight whose blocks are in the pool.
            moved: New numbers of blocks that get another one, by number.
        """
        for sequence in sequences if moved else ():
            assert sequence.window_table is None, "blocks of windows have numbers of their own"
            sequence.block_table = array("i", [moved.get(block, block) for block in sequence.block_table])

    def _windows(self, tier: str) -> WindowPool:
        """The pool of layers with a sliding window, of a tier that has one."""
        windows = self._pools[tier].windowed
        assert windows is not None, f"no layer has a pool of its own in tier {tier}"
        return windows
