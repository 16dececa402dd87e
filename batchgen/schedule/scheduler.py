"""The next sweep: admission, chunked prefill, KV accounting. No tensors, no torch.

`continuous` admission lets finished sequences leave and new ones in at every sweep; `static` fills a block and
runs it to its end before the next (FlexGen's zig-zag block schedule). Admission is on projected peak KV: a
sequence enters only if the blocks it and all sequences in flight are still expected to need are there at every
later sweep (`admission`); in static blocks, on disk and beside sequences of placement `deferred`, if they are there
now. Where outputs grow beyond what was expected, the youngest sequence is preempted and run again later.

A sweep may be scheduled before the results of the one before it have reached the host (`commit` comes when a sweep is
launched): sequences that have nothing left to run leave when their last sweep is launched.

A token of a sequence of placement `deferred` takes several sweeps. It is in the sweep that begins it, and in none until
its successor has been chosen; meanwhile the sequence is not preempted, as the CPU may be at its KV.

KV lives in one pool per tier. A sequence is admitted into a KV placement, which says its pool; it stays there until
it leaves, and is preempted only for sequences of the same pool.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as List
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import NamedTuple

from batchgen.core.kv_placement import KVPlacement
from batchgen.schedule.block_manager import BlockManager
from batchgen.schedule.extents import ExtentManager
from batchgen.schedule.sequence import PENDING, Sequence
from batchgen.schedule.tier_admission import Expected, TierAdmission
from batchgen.schedule.window_pool import NULL_BLOCK, WindowPool


@dataclass(frozen=True)
class SchedulerLimits:
    """Limits of what is in flight; they may be replaced between sweeps.

    Attributes:
        max_num_seqs: most sequences in flight.
        max_num_batched_tokens: most tokens of one sweep; longer prompts are chunked.
        admission: "continuous" or "static".
        kv_seqs: most sequences of each KV placement in flight, none where it is missing; None: no limit per placement.
        max_chunk_tokens: most tokens of one prompt in one sweep; None: no limit.
        compute_tier: tier of the compute device's own memory.
        deferred_rows: most sequences that enter placement DEFERRED in all; None: no limit. Those that enter it near the
            end of a job would be in flight long after all others.
        sweeps_in_flight: most sweeps under way at once, each in another stage of a pipeline; each has its part of the
            sequences.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    admission: str = "continuous"
    kv_seqs: Mapping[KVPlacement, int] | None = None
    max_chunk_tokens: int | None = None
    compute_tier: str = "cpu"
    deferred_rows: int | None = None
    sweeps_in_flight: int = 1

    def __post_init__(self) -> None:
        counts = (self.max_num_seqs, self.max_num_batched_tokens, self.max_chunk_tokens)
        assert all(count is None or count >= 1 for count in counts), f"nothing could ever run: {self}"

    @property
    def quotas(self) -> Mapping[KVPlacement, int]:
        """The most sequences of each KV placement, of limits that have quotas."""
        assert self.kv_seqs is not None, "placements have no quotas"
        return self.kv_seqs

    def quota(self, kv_placement: KVPlacement) -> int:
        return self.max_num_seqs if self.kv_seqs is None else self.kv_seqs.get(kv_placement, 0)


class ScheduledSequence(NamedTuple):  # one for each sequence in flight, in every sweep
    """`num_tokens` tokens of a sequence, from `num_computed` on; `samples` if they reach its last one in this sweep.

    logits_positions: those among them whose logits are made.
    """

    sequence: Sequence
    num_tokens: int

    @property
    def num_keys(self) -> int:
        """Tokens whose KV the sequence has once the sweep has run; until `commit`."""
        return self.sequence.num_computed + self.num_tokens

    @property
    def decodes(self) -> bool:
        return self.num_tokens == 1 and self.sequence.num_computed >= self.sequence.num_prompt

    @property
    def defers(self) -> bool:
        """Tell whether the token only begins in this sweep: the last one there is, since those after it need its KV."""
        return (
            self.sequence.kv_placement is KVPlacement.DEFERRED
            and self.decodes
            and self.num_keys == len(self.sequence.tokens)
        )

    @property
    def samples(self) -> bool:
        return self.num_keys == len(self.sequence.tokens) and not self.defers

    @property
    def logits_positions(self) -> range:
        if self.defers:
            return range(0)
        return range(max(self.sequence.num_computed, self.sequence.next_logits_position), self.num_keys)

    @property
    def num_logits(self) -> int:
        """The number of `logits_positions`."""
        sequence = self.sequence
        if sequence.targets or sequence.kv_placement is KVPlacement.DEFERRED:
            return len(self.logits_positions)
        return int(sequence.num_computed + self.num_tokens == len(sequence.tokens))  # the last one's


class TokenSlots:
    """Slots of an engine's table: those in flight are distinct, whichever call of the engine they are of."""

    def __init__(self, most: int | None = None) -> None:
        """most: slots that there are; None: as many as are asked for."""
        self._free: list[int] = []
        self._count = 0
        self._most = most

    @property
    def is_full(self) -> bool:
        return not self._free and self._count == self._most

    def take(self) -> int:
        if self._free:
            return self._free.pop()
        self._count += 1
        return self._count - 1

    def free(self, slot: int) -> None:
        self._free.append(slot)


class Scheduler:
    """Invariant: in each pool, blocks reserved for sequences in flight never exceed the blocks available."""

    def __init__(
        self,
        pools: Mapping[str, BlockManager | ExtentManager],
        limits: SchedulerLimits,
        expected_output_len: Callable[[Sequence], int] | None = None,
        token_slots: TokenSlots | None = None,
        exchange_slots: TokenSlots | None = None,
    ) -> None:
        """pools: by tier.

        expected_output_len: tokens a sequence is expected to generate, for admission; by default max_tokens, with which
        none is preempted unless long prompts hold others up. token_slots: shared by all that run on the same device at
        a time; None: there is no other. exchange_slots: the same for sequences of placement "deferred".
        """
        self.pools = pools
        self.limits = limits
        self.waiting: deque[Sequence] = deque()
        # By prefix source, which comes to this scheduler first and has the same sampling. Followers queue when they can
        # take over its blocks.
        self._followers: dict[Sequence, list[Sequence]] = {}
        self.running: list[Sequence] = []  # in order of admission
        self.num_preempted = 0
        self.expected_output_len = expected_output_len or (lambda s: s.sampling.max_tokens)
        self._reserved = dict.fromkeys(pools, 0)  # blocks, by tier
        self._share_prefixes = any(pool.share_prefixes for pool in pools.values())
        self._windowed = any(pool.windowed is not None for pool in pools.values())
        self._filling = True  # static admission: the current block still takes sequences
        self._token_slots = token_slots or TokenSlots()
        # Only where the first limits have a quota for them: their pool is then one where blocks are reserved
        # beforehand, as nobody knows how long a token takes.
        num_deferred = (limits.kv_seqs or {}).get(KVPlacement.DEFERRED, 0)
        self._reserving = {KVPlacement.DEFERRED.tier} if num_deferred else set()
        self._exchange_slots = (num_deferred and exchange_slots) or TokenSlots(num_deferred)
        self._entered_deferred = 0

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence, whose prompt and output must fit `longest_tokens`."""
        if (source := sequence.prefix_source) is not None and self._waits_for_prefix(sequence):
            self._followers.setdefault(source, []).append(sequence)
        else:
            self.waiting.append(sequence)

    @property
    def num_waiting(self) -> int:
        """Sequences that have not been admitted, or were preempted."""
        return len(self.waiting) + sum(map(len, self._followers.values()))

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def longest_tokens(self) -> int:
        """Tokens whose KV fits in the largest pool that sequences may enter.

        The most of prompt and output together, less the last token generated, which is never run.
        """
        lengths = (self.pools[c.tier].longest_tokens for c in self._placements() if self.limits.quota(c))
        return max(lengths, default=0)

    def schedule(self) -> list[ScheduledSequence]:
        """The next sweep, its blocks allocated. Empty only if there is no work, or all of it is on its way."""
        sweep: list[ScheduledSequence] = []
        for sequence in self.running if self._windowed else ():
            # What is launched later comes after all that reads these blocks, but for tokens that take several sweeps.
            if sequence.kv_placement is not KVPlacement.DEFERRED or not _on_its_way(sequence):
                self._free_before_window(sequence, sequence.num_computed)
        # Decodes always ride along; prefills share what the token budget leaves.
        most = self._most_in_sweep()
        i = 0
        while i < len(self.running) and len(sweep) < most:  # preemption takes from behind, where the younger ones are
            sequence = self.running[i]
            if sequence.num_remaining == 1 and not _on_its_way(sequence):
                if not self._grow(sequence, 1):
                    continue  # it was preempted itself; the next one has moved up
                sweep.append(ScheduledSequence(sequence, 1))
            i += 1
        budget = self._prefill(sweep, self.limits.max_num_batched_tokens - len(sweep), most)
        while not sweep and self.running and not any(map(_on_its_way, self.running)):
            # Prompts that wait for each other's blocks: only where outputs grew beyond what was expected.
            self._preempt(self.running[-1])
            budget = self._prefill(sweep, self.limits.max_num_batched_tokens, most)
        self._admit(sweep, budget, most)
        return sweep

    def _most_in_sweep(self) -> int:
        """Sequences that the next sweep may have: with several sweeps under way its part of those there are."""
        there_are = min(len(self.running) + self.num_waiting, self.limits.max_num_seqs)
        return -(-max(there_are, len(self.running)) // self.limits.sweeps_in_flight)

    def _prefill(self, sweep: list[ScheduledSequence], budget: int, most: int) -> int:
        """More of the prompts that are under way, as far as there are blocks; returns what is left of the budget."""
        for sequence in self.running:
            if len(sweep) >= most:
                break
            if sequence.num_remaining <= 1:
                continue
            pool = self._pool(sequence)
            blocks = pool.num_available - self._reserved[sequence.kv_placement.tier] + sequence.reserved_blocks
            headroom = (len(sequence.block_table) + blocks) * pool.kv_block_size - sequence.num_computed
            count = min(self._chunk(sequence, budget), headroom, self._window_headroom(sequence))
            if count > 0:
                self._grow(sequence, count)
                budget -= count
                sweep.append(ScheduledSequence(sequence, count))
        return budget

    def commit(self, sweep: list[ScheduledSequence]) -> None:
        """The sweep has been launched: its tokens' KV is there for all that is launched after it."""
        for sequence, num_tokens in sweep:
            sequence.num_computed += num_tokens
            if self._share_prefixes:
                self._insert_prompt_blocks(sequence, sequence.num_computed)

    def advance(self, num_tokens: int) -> int:
        """Let all sequences gain tokens as if they had been scheduled and sampled; 0: there are no blocks."""
        needed = Counter[str]()
        of_windows = Counter[str]()
        for sequence in self.running:
            tier, pool = sequence.kv_placement.tier, self._pool(sequence)
            blocks = -(-(sequence.num_computed + num_tokens) // pool.kv_block_size)
            needed[tier] += max(0, blocks - len(sequence.block_table) - sequence.reserved_blocks)
            if sequence.window_table is not None:
                table, windows = sequence.window_table, self._windows(tier)
                first = windows.first_block(sequence.num_computed + num_tokens - 1)
                of_windows[tier] += blocks - max(first, len(table))
                of_windows[tier] -= windows.num_sole(table[sequence.num_freed : first])
        if any(count > self.pools[tier].num_available - self._reserved[tier] for tier, count in needed.items()):
            return 0
        if any(count > self._windows(tier).num_available for tier, count in of_windows.items()):
            return 0
        for sequence in self.running:
            self._free_before_window(sequence, sequence.num_computed + num_tokens - 1)
        for sequence in self.running:
            self._grow(sequence, num_tokens)
            sequence.num_computed += num_tokens
            sequence.tokens += [0] * num_tokens
        return num_tokens

    def finish(self, sequence: Sequence) -> None:
        """The sequence leaves for good, and its blocks are released; nothing happens if it has left.

        Sweeps that are under way may still use them: what is launched later comes after.
        """
        if sequence.token_slot is None:
            return
        try:
            self._leave(sequence)
        except ValueError:  # it has been preempted, and waits to be run again
            self.waiting.remove(sequence)
        self._token_slots.free(sequence.token_slot)
        sequence.token_slot = None
        if sequence in self._followers:
            self._queue_followers(sequence)

    def invalidate_prefix(self, sequence: Sequence) -> None:
        """No other sequence takes over the KV of this one's prompt, or of a part of it, from now on."""
        for pool in self.pools.values():
            if isinstance(pool, BlockManager) and pool.share_prefixes:
                pool.invalidate(pool.match([*sequence.tokens[: sequence.num_prompt], 0]))

    def run_alone(self, sequence: Sequence) -> None:
        """A sequence runs again from its beginning, perhaps after it has left, with KV that it computes itself."""
        if sequence.token_slot is not None:
            try:
                self._leave(sequence)
            except ValueError:  # it has been preempted
                self.waiting.remove(sequence)
        sequence.takes_prefix, sequence.prefix_source = False, None
        self._start_over(sequence)

    def _leave(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._release(sequence)
        if sequence.exchange_slot is not None:
            self._exchange_slots.free(sequence.exchange_slot)
            sequence.exchange_slot = None

    def set_placement(self, sequence: Sequence, kv_placement: KVPlacement) -> None:
        """Between sweeps: another placement of the same tier, for a sequence in flight. Its KV stays where it is."""
        assert kv_placement.tier == sequence.kv_placement.tier, (
            f"KV does not move: {sequence.kv_placement} to {kv_placement}"
        )
        sequence.kv_placement = kv_placement

    def _placements(self) -> list[KVPlacement]:
        """The KV placements there are pools for, in order of preference."""
        return [c for c in KVPlacement if c.tier in self.pools]

    def _pool(self, sequence: Sequence) -> BlockManager | ExtentManager:
        return self.pools[sequence.kv_placement.tier]

    def _windows(self, tier: str) -> WindowPool:
        """The pool of layers with a sliding window, of a tier that has one."""
        windowed = self.pools[tier].windowed
        assert windowed is not None, f"no layer has a pool of its own in tier {tier}"
        return windowed

    def _chunk(self, sequence: Sequence, budget: int) -> int:
        return min(sequence.num_remaining, budget, self.limits.max_chunk_tokens or budget)

    def _admit(self, sweep: list[ScheduledSequence], budget: int, most: int) -> None:
        if self.limits.admission == "static":
            if not self.running:
                self._filling = True
            if not self._filling:
                return
        for source in [s for s, (first, *_) in self._followers.items() if not self._waits_for_prefix(first)][::-1]:
            self._queue_followers(source)
        self._admit_waiting(sweep, budget, most)

    def _admit_waiting(self, sweep: list[ScheduledSequence], budget: int, most: int) -> None:
        in_placement = Counter(s.kv_placement for s in self.running)

        @cache
        def longest() -> int:
            return max(map(self._expected_len, self._may_enter()))

        @cache
        def admission(tier: str) -> TierAdmission:
            """Made where a sequence comes to the tier: it looks at all that are in it."""
            return self._admission(tier, sweep, longest())

        while self.waiting and budget > 0 and len(sweep) < most:
            sequence = self.waiting[0]
            full = len(self.running) >= self.limits.max_num_seqs
            if full or not self._enter(sequence, in_placement, admission, self._chunk(sequence, budget)):
                assert self.running, f"a sequence of {len(sequence.tokens)} tokens fits no KV pool"
                self._filling = False
                return
            self.waiting.popleft()
            self.running.append(sequence)
            if sequence.token_slot is None:
                sequence.token_slot = self._token_slots.take()
            in_placement[sequence.kv_placement] += 1
            count = min(self._chunk(sequence, budget), self._window_headroom(sequence))
            self._grow(sequence, count)
            budget -= count
            sweep.append(ScheduledSequence(sequence, count))
            if sequence in self._followers and not self._waits_for_prefix(self._followers[sequence][0]):
                self._queue_followers(sequence)

    def _may_enter(self) -> Iterator[Sequence]:
        """The first waiting sequences, as many as may be admitted. Followers count as no longer than their source."""
        return islice(self.waiting, max(1, self.limits.max_num_seqs - len(self.running)))

    def _waits_for_prefix(self, sequence: Sequence) -> bool:
        """Tell whether its prefix source, not gone for good, has yet to enter blocks that it could take over."""
        source = sequence.prefix_source
        if source is None or not self._share_prefixes:
            return False
        if source.block_table:
            pool = self._pool(source)
            return pool.share_prefixes and source.num_inserted_blocks < sequence.num_source_tokens // pool.kv_block_size
        return source.num_computed == 0

    def _queue_followers(self, source: Sequence) -> None:
        """Its followers come next, behind those only that were preempted."""
        preempted = []
        while self.waiting and self.waiting[0].token_slot is not None:
            preempted.append(self.waiting.popleft())
        self.waiting.extendleft(reversed(self._followers.pop(source)))
        self.waiting.extendleft(reversed(preempted))

    def _enter(
        self,
        sequence: Sequence,
        in_placement: Mapping[KVPlacement, int],
        admission_to: Callable[[str], TierAdmission],
        chunk: int,
    ) -> bool:
        """Admits the sequence to the first placement whose quota and pool allow it; False if none does."""
        expected = Expected(sequence, self._expected_len(sequence) - sequence.num_generated, delayed=False)
        length = sequence.num_prompt + self._expected_len(sequence)
        # The last token generated is never run, so its KV needs no block.
        num_tokens = max(length - 1, len(sequence.tokens))
        for kv_placement in self._open_placements(in_placement):
            tier = kv_placement.tier
            pool, admission = self.pools[tier], admission_to(tier)
            num_blocks = -(-num_tokens // pool.kv_block_size)
            allocation = admission.admit(expected, chunk, num_blocks, self._reserved[tier])
            if allocation is not None:
                sequence.kv_placement = kv_placement
                sequence.exchange_slot = self._exchange_slots.take() if kv_placement is KVPlacement.DEFERRED else None
                self._entered_deferred += kv_placement is KVPlacement.DEFERRED
                sequence.block_table.extend(allocation.blocks)
                if allocation.window_table is not None:
                    sequence.window_table = array("i", allocation.window_table)
                    sequence.num_freed = allocation.window_table.count(NULL_BLOCK)
                if admission.reserves:
                    sequence.reserved_blocks = num_blocks - len(allocation.blocks)
                    self._reserved[tier] += sequence.reserved_blocks
                matched = allocation.blocks[: allocation.num_matched]
                sequence.num_computed = len(matched) * pool.kv_block_size
                sequence.num_cached = min(sequence.num_computed, sequence.num_prompt)
                sequence.num_matched_blocks = sequence.num_inserted_blocks = len(matched)
                sequence.node = pool.node(matched[-1]) if matched and isinstance(pool, BlockManager) else 0
                return True
        return False

    def _open_placements(self, in_placement: Mapping[KVPlacement, int]) -> List[KVPlacement]:
        """The placements that a sequence may enter, in order of preference, if their pools have blocks for it."""
        placements = [c for c in self._placements() if in_placement[c] < self.limits.quota(c)]
        deferred_rows, deferred = self.limits.deferred_rows, KVPlacement.DEFERRED
        if deferred_rows is not None and self._entered_deferred >= deferred_rows and deferred in placements:
            placements.remove(deferred)
        if self._exchange_slots.is_full and deferred in placements:
            # Another call of the engine has them: where nobody is in flight here, the row runs all the same.
            placements.remove(deferred)
            placements += [] if self.running else [KVPlacement.STREAMED]
        if not self.running:
            # A row let in under earlier limits may fit only a placement that has no quota any more: it runs all the
            # same.
            placements += [c for c in self._placements() if c not in placements and c is not deferred]
        return placements

    def _admission(self, tier: str, sweep: list[ScheduledSequence], longest: int) -> TierAdmission:
        """longest: tokens that any sequence that may enter is expected to generate."""
        pool = self.pools[tier]
        reserves = self.limits.admission == "static" or tier in self._reserving or isinstance(pool, ExtentManager)
        if reserves and pool.windowed is None:  # which asks for nobody's future
            return TierAdmission(pool, [], longest, reserves=True)
        there = {scheduled.sequence: scheduled.num_keys for scheduled in sweep}
        running = [
            Expected(s, self._expected_len(s) - s.num_generated, delayed=there.get(s, 0) < len(s.tokens))
            for s in self.running
            if s.kv_placement.tier == tier
        ]
        return TierAdmission(pool, running, longest, reserves=reserves)

    def _expected_len(self, sequence: Sequence) -> int:
        """Tokens it is expected to generate in all, at least one more."""
        expected, most = self.expected_output_len(sequence), sequence.sampling.max_tokens
        return max(expected if expected < most else most, sequence.num_generated + 1)

    def _grow(self, sequence: Sequence, count: int) -> bool:
        """Blocks for `count` more tokens; False if the sequence itself had to be preempted."""
        tier, pool = sequence.kv_placement.tier, self._pool(sequence)
        needed = -(-(sequence.num_computed + count) // pool.kv_block_size)
        while len(sequence.block_table) < needed:
            if sequence.reserved_blocks:
                sequence.reserved_blocks -= 1
                self._reserved[tier] -= 1
            while pool.num_available <= self._reserved[tier]:
                if self._preempt_youngest(tier) is sequence:
                    return False
            sequence.block_table.append(pool.allocate(sequence.block_table[-1] if sequence.block_table else None))
        while sequence.window_table is not None and len(sequence.window_table) < needed:
            windows = self._windows(tier)
            while not windows.num_available:
                if self._preempt_youngest(tier) is sequence:
                    return False
            sequence.window_table.append(windows.allocate())
        if self._share_prefixes and tier == self.limits.compute_tier:
            # All KV of a batch is written, layer by layer, before attention reads it, and batches run in the order of
            # the sweep: even a sequence of the same sweep may take these blocks. KV of other tiers is stored behind,
            # so there `commit` enters them.
            self._insert_prompt_blocks(sequence, sequence.num_computed + count)
        return True

    def _free_before_window(self, sequence: Sequence, position: int) -> None:
        """Blocks of layers with a sliding window that no token from `position` on sees."""
        table = sequence.window_table
        if table is None:
            return
        windowed = self._windows(sequence.kv_placement.tier)
        held, first = sequence.num_freed, windowed.first_block(position)
        if first > held:
            windowed.release(table[held:first])
            table[held:first] = array("i", [NULL_BLOCK]) * (first - held)  # of a longer table than there is, too
            sequence.num_freed = first

    def _window_headroom(self, sequence: Sequence) -> int:
        """Tokens of its prompt for which there are blocks in layers with a sliding window, in this sweep."""
        if sequence.window_table is None:
            return sequence.num_remaining
        windowed = self._windows(sequence.kv_placement.tier)
        blocks = len(sequence.window_table) + windowed.num_available
        return blocks * windowed.kv_block_size - sequence.num_computed

    def _insert_prompt_blocks(self, sequence: Sequence, num_tokens: int) -> None:
        """Blocks filled with prompt tokens, up to token `num_tokens`, become findable."""
        pool = self._pool(sequence)
        if not isinstance(pool, BlockManager) or not pool.share_prefixes:
            return
        size = pool.kv_block_size
        for b in range(sequence.num_inserted_blocks, min(num_tokens, sequence.num_prompt) // size):
            tokens = sequence.tokens[b * size : (b + 1) * size]
            sequence.node = pool.insert(sequence.node, tokens, sequence.block_table[b])
            if sequence.window_table is not None:
                self._windows(sequence.kv_placement.tier).insert(sequence.node, sequence.window_table[b])
            sequence.num_inserted_blocks = b + 1

    def _preempt_youngest(self, tier: str) -> Sequence:
        """Preempt the youngest sequence of a tier whose token is not on its way: the CPU may be reading its KV."""
        youngest = next(s for s in reversed(self.running) if s.kv_placement.tier == tier and s.num_remaining > 0)
        self._preempt(youngest)
        return youngest

    def _preempt(self, sequence: Sequence) -> None:
        self._leave(sequence)
        self.num_preempted += 1
        self._start_over(sequence)

    def _start_over(self, sequence: Sequence) -> None:
        sequence.num_computed = sequence.num_matched_blocks = sequence.num_inserted_blocks = sequence.node = 0
        self.waiting.appendleft(sequence)

    def _release(self, sequence: Sequence) -> None:
        tier, pool = sequence.kv_placement.tier, self._pool(sequence)
        self._reserved[tier] -= sequence.reserved_blocks
        sequence.reserved_blocks = 0
        if isinstance(pool, BlockManager) and pool.share_prefixes:
            # After a sweep that failed: what it was to write is not there to be found.
            pool.invalidate(
                sequence.block_table[sequence.num_computed // pool.kv_block_size : sequence.num_inserted_blocks]
            )
        pool.release(sequence.block_table)
        sequence.block_table = array("i")
        if sequence.window_table is not None:
            held, unwritten = sequence.num_freed, sequence.num_computed // pool.kv_block_size
            windows = self._windows(tier)
            windows.invalidate(sequence.window_table[max(held, unwritten) :])
            windows.release(sequence.window_table[held:])
            sequence.window_table, sequence.num_freed = None, 0


def _on_its_way(sequence: Sequence) -> bool:
    """Tell whether a sequence's last token goes through the layers, or is one that the host does not know yet.

    Its last token may be under way with placement DEFERRED, and in a pipeline. A token that the host does not know
    counts with placement DEFERRED only, whose tokens last for sweeps anyway; none is begun for a sequence that may have
    ended.
    """
    return sequence.num_remaining == 0 or (
        sequence.kv_placement is KVPlacement.DEFERRED and sequence.tokens[-1] == PENDING
    )
