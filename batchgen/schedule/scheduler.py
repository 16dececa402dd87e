"""The next sweep: who is in it, with how many tokens, and who is admitted or preempted. No tensors, no torch.

`continuous` admission lets finished sequences leave and new ones in at every sweep; `static` fills a block and
runs it to its end before the next (FlexGen's zig-zag block schedule). Admission is on projected peak KV: a
sequence is admitted only if the blocks it and all sequences in flight are still expected to need are there at every
later sweep (`admission`); in static blocks, on disk and beside sequences of placement `deferred`, if they are there
now. Where outputs grow beyond what was expected, the youngest sequence is preempted and run again later.

A sweep may be scheduled before the results of the one before it have reached the host (`commit` comes when a sweep is
launched): sequences that have nothing left to run leave when their last sweep is launched.

A token of a sequence of placement `deferred` takes several sweeps. It is in the sweep that begins it, and in none until
its successor has been chosen; meanwhile the sequence is not preempted, as the CPU may be at its KV.

KV lives in one pool per tier. A sequence is admitted into a KV placement, which says its pool; it stays there until
it leaves, and is preempted only for sequences of the same pool. Where the CPU is late, a `SweepChoice` leaves decodes
that it attends to out of a sweep; such a sequence may move to the compute device: its KV comes there, or is computed
again. Where the device's pool has not enough blocks for the sequences in it, the youngest that decodes moves to the
host's pool if that has (NEO section 3.2).
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from itertools import chain, islice
from typing import NamedTuple

from batchgen.core.kv_expansion import KVExpansion, Recut
from batchgen.core.kv_placement import KVPlacement
from batchgen.schedule.block_manager import Allocation, BlockManager
from batchgen.schedule.block_tables import BlockTables
from batchgen.schedule.deferral_choice import DeferralChoice
from batchgen.schedule.drafting import Drafting
from batchgen.schedule.extents import ExtentManager
from batchgen.schedule.scheduled_sequence import ScheduledSequence, next_tokens
from batchgen.schedule.scheduler_limits import SchedulerLimits
from batchgen.schedule.sequence import PENDING, Sequence
from batchgen.schedule.sweep_choice import SweepChoice
from batchgen.schedule.tier_admission import Expected, Growing, TierAdmission
from batchgen.schedule.token_slots import TokenSlots
from batchgen.schedule.window_pool import NULL_BLOCK

# KV blocks that may change their pool in a sweep. Each may be a copy of its own, and a stream holds so many at most.
_MOST_SWAPPED_BLOCKS = 256
# Placements whose attention the compute device computes.
_COMPUTE_ATTENDS = (KVPlacement.DEVICE, KVPlacement.STREAMED, KVPlacement.DISK)
# Placements that a sequence of the device's pool may move to, in order of preference.
_ON_HOST = (KVPlacement.CPU, KVPlacement.DEFERRED)


class SweepTokens(NamedTuple):
    """The tokens of a sweep that has been launched.

    Attributes:
        num_decoded: Sequences in it after their prompt.
        decode_keys: Tokens that the first token of each of these attends to, all together.
        num_prefilled: Tokens of prompts, or what else goes through in chunks.
        prefill_keys: Tokens that these attend to, all together.
    """

    num_decoded: int
    decode_keys: int
    num_prefilled: int
    prefill_keys: int


class _BeforeDrafts(NamedTuple):
    """A sequence with a state, before a sweep in which it has drafts.

    Attributes:
        num_computed: Tokens that were computed.
        num_tokens: Tokens of it in the sweep, drafts included.
    """

    num_computed: int
    num_tokens: int


class _Room(NamedTuple):
    """The place that waiting sequences come to first in a sweep.

    Attributes:
        placement: Their placement.
        pool: The pool of its tier.
        admission: The admission to it.
        most_running: Sequences in flight with which nobody else has a place there.
    """

    placement: KVPlacement
    pool: BlockManager
    admission: TierAdmission
    most_running: int


class Scheduler:
    """The sequences that wait and those in flight, and the sweeps that are made of them.

    Attributes:
        pools: pool of KV blocks by tier.
        limits: limits of what is in flight; they may be replaced between sweeps.
        tables: block tables of the sequences in flight.
        waiting: sequences to be admitted, the next one first.
        running: sequences in flight, in order of admission, as the keys of a mapping.
        num_preempted: preemptions so far.
        num_moved: sequences so far that the CPU attended to, and that moved to the compute device.
        num_swapped_out: sequences so far that moved from the device's pool to the host's.
        expected_output_len: tokens that a sequence is expected to generate.
        sweep_choice: chooses the sequences of a sweep that the CPU attends to; None: all of them.
        deferral_choice: chooses how sequences whose attention is deferred go through a sweep; None: all sweeps overlap.
        pipelines: Whether the sweep that was scheduled last is pipelined: deferred tokens go through all of its layers.
        adapts: Whether sequences whose attention is deferred move to the compute device where nobody waits, and others
            to the host where the device has no blocks for them.
        brings_kv: Whether KV of a sequence that moves comes to the device faster than it is computed again there.
        drafting: drafts tokens of sequences that decode; None: nothing is drafted.
    """

    def __init__(
        self,
        pools: Mapping[str, BlockManager],
        limits: SchedulerLimits,
        expected_output_len: Callable[[Sequence], int] | None = None,
        token_slots: TokenSlots | None = None,
        exchange_slots: TokenSlots | None = None,
    ) -> None:
        """Have nothing waiting and nothing in flight.

        Args:
            pools: Empty pools of KV blocks, by tier.
            limits: Limits of what is in flight.
            expected_output_len: Tokens that a sequence is expected to generate, for admission; None: its max_tokens,
                with which none is preempted unless long prompts hold others up.
            token_slots: Slots of sampled tokens, shared by all that run on the same device at a time; None: there is
                no other.
            exchange_slots: Slots of sequences of placement DEFERRED, shared as these; None: there is no other.
        """
        self.pools = pools
        self.limits = limits
        self.tables = BlockTables(pools)
        self.waiting: deque[Sequence] = deque()
        # By prefix source, which comes to this scheduler first and has the same sampling. Followers queue when they can
        # take over its blocks.
        self._followers: dict[Sequence, list[Sequence]] = {}
        self.running: dict[Sequence, None] = {}
        self._in_placement: Counter[KVPlacement] = Counter()  # of `running`
        # Blocks that `running` will hold, by tier, if each is as long as it may be.
        self._most_blocks = dict.fromkeys(pools, 0)
        # Those there are pools for, in order of preference.
        self._placements = [placement for placement in KVPlacement if placement.tier in pools]
        self.num_preempted = self.num_moved = self.num_swapped_out = 0
        self.sweep_choice: SweepChoice | None = None
        self.deferral_choice: DeferralChoice | None = None
        self.adapts = self.brings_kv = self.pipelines = False
        self.drafting: Drafting | None = None
        self._before_drafts: dict[Sequence, _BeforeDrafts] = {}
        self.expected_output_len = expected_output_len or (lambda s: s.sampling.max_tokens)
        self._filling = True  # static admission: the current block still takes sequences
        self._token_slots = token_slots or TokenSlots()
        # Only where the first limits have a quota for them: their pool is then one where blocks are reserved
        # beforehand, as nobody knows how long a token takes.
        num_deferred = (limits.kv_seqs or {}).get(KVPlacement.DEFERRED, 0)
        self._reserving = {KVPlacement.DEFERRED.tier} if num_deferred else set()
        self._exchange_slots = (num_deferred and exchange_slots) or TokenSlots(num_deferred)
        self._admitted_deferred = 0
        self._spare_logit_rows = 0  # that the sweep being scheduled may have beside one for each sequence
        # Sequences whose KV comes to the device or goes to the host in the sweep, and the blocks that they still hold.
        self._swapped: list[tuple[Sequence, array[int]]] = []

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence, whose prompt and output must fit `longest_tokens`."""
        if (source := sequence.prefix_source) is not None and self.tables.share_prefixes:
            source.forks |= {sequence.num_source_tokens}
        if source is not None and self._waits_for_prefix(sequence):
            self._followers.setdefault(source, []).append(sequence)
        else:
            self.waiting.append(sequence)

    @property
    def num_waiting(self) -> int:
        """Sequences that have not been admitted, or were preempted."""
        followers = sum(map(len, self._followers.values())) if self._followers else 0
        return len(self.waiting) + followers

    @property
    def queued(self) -> Iterator[Sequence]:
        """The sequences that have not been admitted, or were preempted; those that wait for a prefix come last."""
        return chain(self.waiting, *self._followers.values())

    @property
    def num_left_out(self) -> int:
        """Tokens so far that a sweep left for a later one, as the CPU was late with attention."""
        return sum(choice.num_left_out for choice in (self.sweep_choice, self.deferral_choice) if choice)

    @property
    def cut(self) -> dict[str, bool]:
        """The way in which the sweep scheduled last is cut into micro-batches, as arguments of `split_batches`."""
        mixes = self.sweep_choice is not None and self.sweep_choice.num_late > 0
        return {"pipelines": self.pipelines, "mixes": mixes}

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def longest_tokens(self) -> int:
        """Tokens whose KV fits in the largest pool that sequences may be admitted to.

        The most of prompt and output together, less the last token generated, which is never run.
        """
        lengths = (self.pools[c.tier].longest_tokens for c in self._placements if self.limits.quota(c))
        return max(lengths, default=0)

    def schedule(self) -> list[ScheduledSequence]:
        """The next sweep, its blocks allocated. Empty only if there is no work, or all of it is on its way."""
        self._release_swapped()  # of a sweep that was never launched
        self._settle_states()
        self._free_before_windows()
        sweep: list[ScheduledSequence] = []
        self._spare_logit_rows = (self.limits.max_logit_rows or 0) - self.limits.max_num_seqs
        most, max_tokens = self._most_in_sweep(), self.limits.max_num_batched_tokens
        # Decodes go first, all of them unless `sweep_choice` leaves some out; prefills share the rest of the budget.
        self._decode(sweep, most)
        budget = self._prefill(sweep, max_tokens - len(sweep), most)
        while not sweep and self.running and not any(map(_on_its_way, self.running)):
            # Prompts that wait for each other's blocks: only where outputs grew beyond what was expected.
            self._preempt(next(reversed(self.running)))
            budget = self._prefill(sweep, max_tokens, most)
        budget = self._move_to_device(sweep, budget)
        self._admit(sweep, budget, most)
        if self.sweep_choice is not None:
            sweep = self.sweep_choice.choose(sweep)
        if self.deferral_choice is not None:
            sweep, self.pipelines = self.deferral_choice.choose(sweep)
        return sweep if self.drafting is None else self._with_drafts(sweep, self.drafting)

    def _with_drafts(self, sweep: list[ScheduledSequence], drafting: Drafting) -> list[ScheduledSequence]:
        """The sweep with drafts of sequences that decode. Nobody is preempted for them."""
        num_tokens = sum([scheduled.num_tokens for scheduled in sweep])
        if not drafting.begin(num_tokens, len(sweep)):
            return sweep
        rooms = {s.sequence: self._room_for_drafts(s) for s in sweep if self._takes_drafts(s)}
        budget = self.limits.max_num_batched_tokens - num_tokens
        if self.limits.max_logit_rows is not None:
            budget = min(budget, self._spare_logit_rows + self.limits.max_num_seqs - len(self.running))
        chosen = drafting.choose(rooms, max(0, budget))
        for sequence, drafts in chosen.items():
            keeps_state = self.tables.can_keep_state(sequence)
            if keeps_state and self.tables.grow(sequence, sequence.num_remaining + len(drafts)):
                sequence.drafts = drafts
                if sequence.state is not None:
                    self.tables.keep_state(sequence)
                    self._before_drafts[sequence] = _BeforeDrafts(
                        sequence.num_computed, sequence.num_remaining + len(drafts)
                    )
            else:
                drafting.withdraw(sequence)
        return [ScheduledSequence(s, count + len(s.drafts)) for s, count in sweep] if chosen else sweep

    def _takes_drafts(self, scheduled: ScheduledSequence) -> bool:
        """Tell whether tokens may be drafted for a sequence in a sweep.

        The CPU beside an accelerator has buffers for one token of each sequence.
        """
        sequence, placement = scheduled.sequence, scheduled.sequence.kv_placement
        return (
            scheduled.samples
            and sequence.num_computed >= sequence.num_prompt
            and sequence.tokens[-1] != PENDING
            and not sequence.targets
            and (placement in _COMPUTE_ATTENDS or placement.tier == self.limits.compute_tier)
            and (sequence.constraint is None or sequence.constraint.takes_drafts)
        )

    def _room_for_drafts(self, scheduled: ScheduledSequence) -> int:
        """Drafts that a sequence may have without being longer than it may be, or taking what others need next."""
        sequence, num_tokens = scheduled
        most = sequence.sampling.max_tokens - sequence.num_generated - 1
        if self.limits.max_chunk_tokens is not None:
            most = min(most, self.limits.max_chunk_tokens - num_tokens)
        tier, pool = sequence.kv_placement.tier, self.tables.pool(sequence)
        blocks = len(sequence.block_table)
        windows = len(sequence.window_table) if sequence.window_table is not None else blocks
        spare = pool.num_available - self.tables.num_reserved[tier]
        if sequence.window_table is not None and pool.windowed is not None:
            spare = min(spare, pool.windowed.num_available)
        if spare > 2 * len(self.running):
            return most
        return max(0, min(most, min(blocks, windows) * pool.kv_block_size - scheduled.num_keys))

    def _settle_states(self) -> None:
        """Give sequences whose drafts have been judged the state after the last accepted one.

        A state cannot go back by some tokens. Where a draft was refused, the state is that before the sweep, and the
        tokens that came with it are run once more.
        """
        for sequence in [s for s in self._before_drafts if not s.drafts]:
            before = self._before_drafts.pop(sequence)
            if sequence.state is None or sequence not in self.running:
                continue
            is_right = sequence.num_computed == before.num_computed + before.num_tokens
            self.tables.settle_state(sequence, is_right=is_right)
            if not is_right:
                sequence.num_computed = before.num_computed

    def _free_before_windows(self) -> None:
        """Free the blocks of layers with a sliding window that no later token sees."""
        for sequence in self.running if self.tables.have_windows else ():
            # What is launched later comes after all that reads these blocks, but for tokens that take several sweeps.
            if sequence.kv_placement is not KVPlacement.DEFERRED or not _on_its_way(sequence):
                self.tables.free_before_window(sequence, sequence.num_computed)

    def _decode(self, sweep: list[ScheduledSequence], most: int) -> None:
        """Schedule the next token of sequences that decode, as far as there are blocks."""
        decoding = [s for s in self.running if len(s.tokens) - s.num_computed == 1]
        if self._in_placement[KVPlacement.DEFERRED]:
            decoding = [s for s in decoding if s.kv_placement is not KVPlacement.DEFERRED or not _on_its_way(s)]
        decoding, num_preempted = decoding[:most], self.num_preempted
        for sequence in self.tables.without_block(decoding):
            if self.num_preempted == num_preempted or sequence in self.running:
                self._grow(sequence, 1)
        if self.num_preempted > num_preempted:
            decoding = [s for s in decoding if s in self.running]
        sweep += next_tokens(decoding)

    def _most_in_sweep(self) -> int:
        """Sequences that the next sweep may have: with several sweeps under way its part of those there are."""
        there_are = min(len(self.running) + self.num_waiting, self.limits.max_num_seqs)
        return -(-max(there_are, len(self.running)) // self.limits.sweeps_in_flight)

    def _prefill(self, sweep: list[ScheduledSequence], budget: int, most: int) -> int:
        """Schedule more of the prompts under way, as far as there are blocks; return what is left of the budget."""
        if len(sweep) == len(self.running):  # all decode, as in most sweeps
            return budget
        for sequence in [s for s in self.running if len(s.tokens) - s.num_computed > 1]:
            if len(sweep) >= most:
                break
            capacity = min(self.tables.capacity(sequence), self.tables.window_capacity(sequence))
            count = min(self._chunk(sequence, budget), capacity)
            if count > 0:
                self._put(sequence, count, sweep)
                budget -= count
        return budget

    def commit(self, sweep: list[ScheduledSequence]) -> SweepTokens:
        """The sweep has been launched: its tokens' KV is there for all that is launched after it.

        Returns:
            The tokens of the sweep.
        """
        shares, has_states = self.tables.share_prefixes, self.tables.have_states
        num_decoded = decode_keys = num_prefilled = prefill_keys = 0
        for scheduled in sweep:  # each sequence of every sweep
            sequence, num_tokens = scheduled
            before = sequence.num_computed
            if num_tokens == 1 and before >= sequence.num_prompt:
                num_decoded += 1
                decode_keys += before + 1
                sequence.num_computed = before + 1
            else:
                if before >= sequence.num_prompt and scheduled.samples:  # it has drafts
                    num_decoded += 1
                    decode_keys += before + 1
                else:
                    num_prefilled += num_tokens
                    prefill_keys += scheduled.prefill_keys
                # KV of drafts counts when they are accepted; until then a later token overwrites it.
                sequence.num_computed = min(before + num_tokens, len(sequence.tokens))
                if shares and before < sequence.num_prompt:
                    self.tables.insert_prompt(sequence, sequence.num_computed)
            if has_states and sequence not in self._before_drafts:
                self.tables.commit_state(sequence)
        self._release_swapped()
        return SweepTokens(num_decoded, decode_keys, num_prefilled, prefill_keys)

    def advance(self, num_tokens: int) -> int:
        """Let all sequences gain tokens as if they had been scheduled and sampled; 0: there are no blocks."""
        if not self.tables.can_grow(self.running, num_tokens):
            return 0
        for sequence in self.running:
            self.tables.free_before_window(sequence, sequence.num_computed + num_tokens - 1)
        for sequence in self.running:
            self._grow(sequence, num_tokens)
            sequence.num_computed += num_tokens
            sequence.tokens += [0] * num_tokens
        return num_tokens

    @property
    def expansion(self) -> KVExpansion | None:
        """The division of the layers of a pool between device and host; None: it cannot be changed."""
        pool = self.pools.get(KVPlacement.STREAMED.tier)
        return None if pool is None else pool.expansion

    @property
    def has_layers_on_device(self) -> bool:
        """True where KV that streams in other layers is on the device in some."""
        return self.expansion is not None and self.expansion.num_on_device > 0

    def recut(self, num_on_device: int) -> Recut | None:
        """Between sweeps, with none under way: put so many layers' KV on the device, in a pool of another size.

        The youngest sequences that do not fit are preempted.

        Returns:
            The change, which the executor must carry out at once; None: there is none, as another call of the engine
            has KV in the pool.
        """
        tier = KVPlacement.STREAMED.tier
        pool = self.pools[tier]
        assert pool.expansion is not None, "no layer can be moved"
        if pool.num_used != len({block for sequence in self.running for block in sequence.block_table}):
            return None
        before, after = pool.expansion, replace(pool.expansion, num_on_device=num_on_device)
        while pool.num_used + self.tables.num_reserved[tier] > after.num_blocks:
            self._preempt_youngest(tier)
        moved = pool.resize(after.num_blocks)
        self.tables.renumber((s for s in self.running if s.kv_placement.tier == tier), moved)
        pool.expansion = after
        return Recut(before, after, moved, pool.num_to_last)

    def finish(self, sequence: Sequence) -> None:
        """The sequence leaves for good, and its blocks are released; nothing happens if it has left.

        Sweeps that are under way may still use them: what is launched later comes after.
        """
        if sequence.token_slot is None:
            return
        try:
            self._leave(sequence)
        except KeyError:  # it has been preempted, and waits to be run again
            self.waiting.remove(sequence)
        self._token_slots.free(sequence.token_slot)
        sequence.token_slot = None
        if sequence in self._followers:
            self._queue_followers(sequence)

    def invalidate_prefix(self, sequence: Sequence) -> None:
        """Have no other sequence take over the KV of this one's prompt, or of a part of it, from now on."""
        self.tables.invalidate_prompt(sequence)

    def run_alone(self, sequence: Sequence) -> None:
        """Run a sequence again from its beginning, perhaps after it has left, with KV that it computes itself."""
        if sequence.token_slot is not None:
            try:
                self._leave(sequence)
            except KeyError:  # it has been preempted
                self.waiting.remove(sequence)
        sequence.takes_prefix, sequence.prefix_source = False, None
        self._start_over(sequence)

    def _enter(self, sequence: Sequence) -> None:
        """Count a sequence that has been admitted among those in flight."""
        self.running[sequence] = None
        self._in_placement[sequence.kv_placement] += 1
        self._most_blocks[sequence.kv_placement.tier] += self._most_blocks_of(sequence)

    def _leave_running(self, sequence: Sequence) -> None:
        """Count a sequence no more among those in flight. Raises KeyError if it is not among them."""
        del self.running[sequence]
        self._in_placement[sequence.kv_placement] -= 1
        self._most_blocks[sequence.kv_placement.tier] -= self._most_blocks_of(sequence)
        if self.sweep_choice:
            self.sweep_choice.forget(sequence)

    def _leave(self, sequence: Sequence) -> None:
        """Take a sequence from those in flight, and release its blocks. Raises KeyError if it is not among them."""
        self._leave_running(sequence)
        self.tables.release(sequence)
        self._free_exchange_slot(sequence)

    def _free_exchange_slot(self, sequence: Sequence) -> None:
        if sequence.exchange_slot is not None:
            self._exchange_slots.free(sequence.exchange_slot)
            sequence.exchange_slot = None

    def set_placement(self, sequence: Sequence, kv_placement: KVPlacement) -> None:
        """Between sweeps: another placement of the same tier, for a sequence in flight. Its KV stays where it is."""
        assert kv_placement.tier == sequence.kv_placement.tier, (
            f"KV does not move: {sequence.kv_placement} to {kv_placement}"
        )
        self._in_placement[sequence.kv_placement] -= 1
        self._in_placement[kv_placement] += 1
        sequence.kv_placement = kv_placement

    def _most_blocks_of(self, sequence: Sequence) -> int:
        """The blocks that a sequence in flight will hold at most. Its last token is never run, and needs none."""
        return -(-longest_run(sequence) // self.pools[sequence.kv_placement.tier].kv_block_size)

    def _chunk(self, sequence: Sequence, budget: int) -> int:
        """The tokens of a prompt that the next sweep may have."""
        chunk = min(len(sequence.tokens) - sequence.num_computed, budget, self.limits.max_chunk_tokens or budget)
        if sequence.targets and self.limits.max_logit_rows is not None:
            chunk = min(chunk, self._spare_logit_rows)
        if sequence.is_whole:
            return chunk if chunk == sequence.num_remaining else 0
        fork = self.tables.next_fork(sequence) if sequence.forks else None
        return chunk if fork is None else min(chunk, fork - sequence.num_computed)

    def _admit(self, sweep: list[ScheduledSequence], budget: int, most: int) -> None:
        """Admit waiting sequences to a sweep, where the kind of admission allows it."""
        if self.limits.admission == "static":
            self._filling = self._filling or not self.running
            if not self._filling:
                return
        for source in [s for s, (first, *_) in self._followers.items() if not self._waits_for_prefix(first)][::-1]:
            self._queue_followers(source)
        self._admit_waiting(sweep, budget, most)

    def _move_to_device(self, sweep: list[ScheduledSequence], budget: int) -> int:
        """Give sequences that the CPU attends to places on the compute device, where it has some.

        They are those that late CPU attention leaves out of sweeps, and of those that would begin a deferred token, all
        where nobody waits (the GPU comes first: APEX section 3.4), and those beyond the quota. Their KV comes there,
        layer by layer, or is computed again, whichever is faster. Where nobody waits others move too whose KV can come
        there (NEO section 3.2, step 2).

        Args:
            sweep: The sweep, in which they decode by now.
            budget: Tokens that the sweep may still have.

        Returns:
            The rest of the budget.
        """
        movable = self.sweep_choice.movable if self.sweep_choice else []
        excess = self._in_placement[KVPlacement.DEFERRED] - self.limits.quota(KVPlacement.DEFERRED)
        if self.adapts and self._in_placement[KVPlacement.DEFERRED] and (excess > 0 or not self.num_waiting):
            deferring = [one.sequence for one in sweep if one.defers and one.sequence.swap_table is None]
            movable += deferring[: excess if self.num_waiting else None]
        others: dict[Sequence, None] = {}
        if self.adapts and self.brings_kv and not self.num_waiting and self._has_place(KVPlacement.DEVICE):
            attended = (one.sequence for one in sweep if one.sequence.kv_placement is KVPlacement.CPU and one.decodes)
            late = set(movable)
            others = dict.fromkeys(s for s in attended if s.swap_table is None and s not in late)
        admission: TierAdmission | None = None
        for sequence in (*movable, *others):
            decode = ScheduledSequence(sequence, 1)
            if not self._has_place(KVPlacement.DEVICE):
                break
            if decode not in sweep or not self._fits_in(sequence, KVPlacement.DEVICE):
                continue
            brings_kv = self._can_bring_kv(sequence)
            if not brings_kv and (budget <= 0 or sequence in others):
                break
            admission = admission or self._admission(KVPlacement.DEVICE.tier, sweep)
            chunk = len(sequence.tokens)
            if not brings_kv:
                chunk = min(chunk, budget, self.limits.max_chunk_tokens or budget)
            allocation = self._allocate(sequence, KVPlacement.DEVICE, admission, chunk)
            if allocation is None:
                break
            self.num_moved += 1
            if brings_kv:
                self._swap(sequence, KVPlacement.DEVICE, allocation)
                continue
            sweep.remove(decode)
            self._leave(sequence)
            self._forget_computed(sequence)
            self._open(sequence, KVPlacement.DEVICE, allocation)
            budget -= self._begin(sequence, sweep, budget)
        return budget

    def _can_bring_kv(self, sequence: Sequence) -> bool:
        """Tell whether a sequence's KV may come to the device now, and should."""
        return self.brings_kv and self._can_swap(sequence, KVPlacement.DEVICE)

    def _can_swap(self, sequence: Sequence, placement: KVPlacement) -> bool:
        """Tell whether a sequence's KV may go to the pool of a placement in this sweep.

        One that has a state, or blocks of its own for sliding windows, is computed again.
        """
        pool, has_one_table = self.pools[placement.tier], sequence.window_table is None and not sequence.state
        blocks = len(sequence.block_table)
        fits = blocks < pool.num_available - self.tables.num_reserved[placement.tier]
        under_way = sum(len(swapped.swap_table or ()) for swapped, _ in self._swapped)
        is_alone = self.limits.sweeps_in_flight == 1
        return has_one_table and fits and is_alone and blocks + under_way <= _MOST_SWAPPED_BLOCKS

    def _swap_out(self, sequence: Sequence) -> bool:
        """Move a sequence that decodes to the host's pool; False if it has to be computed again instead.

        Its KV goes there in the sweep, in which it decodes, before anything is written to the blocks that it leaves.
        """
        decodes = sequence.num_remaining == 1 and sequence.num_computed >= sequence.num_prompt
        decodes &= sequence.swap_table is None  # its KV is there
        if not (self.adapts and decodes and sequence.kv_placement is KVPlacement.DEVICE) or self.has_layers_on_device:
            return False
        for placement in _ON_HOST:
            if placement.tier not in self.pools or not self._has_place(placement):
                continue
            if placement is KVPlacement.DEFERRED and not (sequence.tokens[-1] != PENDING and self._may_defer):
                continue
            if not self._fits_in(sequence, placement) or not self._can_swap(sequence, placement):
                continue
            admission = self._admission(placement.tier, [])
            allocation = self._allocate(sequence, placement, admission, len(sequence.tokens))
            if allocation is not None:
                self._swap(sequence, placement, allocation)
                self.num_swapped_out += 1
                return True
        return False

    def _swap(self, sequence: Sequence, placement: KVPlacement, allocation: Allocation) -> None:
        """Give a sequence that decodes in the sweep a place in another pool, to which its KV goes in the sweep.

        What it leaves in the device's pool is free at once: the sweep writes there only when it has gone. What it
        leaves in the host's pool is free after the sweep.
        """
        num_computed, num_cached = sequence.num_computed, sequence.num_cached
        source = self.tables.pool(sequence)
        self._leave_running(sequence)
        self._free_exchange_slot(sequence)
        table = self.tables.detach(sequence)
        self._open(sequence, placement, allocation)
        matched = len(allocation.blocks)
        size = self.tables.pool(sequence).kv_block_size
        sequence.num_computed, sequence.num_cached = num_computed, num_cached
        sequence.num_inserted_blocks = max(matched, sequence.num_prompt // size)
        sequence.swap_table = array("i", [NULL_BLOCK] * matched) + table[matched : -(-num_computed // size)]
        if placement is not KVPlacement.DEVICE:
            source.release(table)
            table = array("i")
        self._swapped.append((sequence, table))
        self._enter(sequence)
        self._grow(sequence, 1)

    def _release_swapped(self) -> None:
        """Release the blocks of sequences whose KV comes to the device: what is launched later comes after that."""
        for sequence, table in self._swapped:
            sequence.swap_table = None
            if table:
                self.pools[KVPlacement.CPU.tier].release(table)
        self._swapped = []

    def _admit_waiting(self, sweep: list[ScheduledSequence], budget: int, most: int) -> None:
        """Admit waiting sequences, in their order, until one has to wait for blocks, a quota or tokens of a sweep."""

        @cache
        def admission(tier: str) -> TierAdmission:
            """The admission to a tier, made where a sequence comes to it."""
            return self._admission(tier, sweep)

        room = self._room(admission)
        while self.waiting and budget > 0 and len(sweep) < most:
            sequence = self.waiting[0]
            if self._follows_one_in_flight(sequence):
                self.waiting.popleft()
                continue
            if (sequence.is_whole or sequence.targets) and not self._chunk(sequence, budget):
                return
            is_full = len(self.running) >= self.limits.max_num_seqs
            if room is not None and (allocation := self._allocate_at_once(sequence, room)) is not None:
                self._open(sequence, room.placement, allocation)
            elif is_full or not self._admit_to_placement(sequence, admission, self._chunk(sequence, budget)):
                assert self.running, f"a sequence of {len(sequence.tokens)} tokens fits no KV pool"
                self._filling = False
                return
            self.waiting.popleft()
            budget -= self._begin(sequence, sweep, budget)
            if sequence in self._followers and not self._waits_for_prefix(self._followers[sequence][0]):
                self._queue_followers(sequence)

    def _room(self, admission_to: Callable[[str], TierAdmission]) -> _Room | None:
        """The place that waiting sequences come to first, if nothing but its blocks and a quota holds them back.

        Args:
            admission_to: Admission by tier.
        """
        placement = next(filter(self._has_place, self._placements), None)
        if placement is None or placement.tier != self.limits.compute_tier or placement is KVPlacement.DEFERRED:
            return None
        chooses = placement is KVPlacement.CPU and self.sweep_choice is not None
        pool = self.pools[placement.tier]
        if chooses or pool.states is not None or self._reserves(placement.tier):
            return None
        left = self.limits.quota(placement) - self._in_placement[placement]
        most = min(left, self.limits.max_num_seqs - len(self.running))
        return _Room(placement, pool, admission_to(placement.tier), len(self.running) + most)

    def _allocate_at_once(self, sequence: Sequence, room: _Room) -> Allocation | None:
        """The first blocks of a sequence that fits however long it becomes, as most do in most jobs.

        Returns:
            The blocks; None: it has to be looked at.
        """
        if len(self.running) >= room.most_running:
            return None
        most_blocks = -(-longest_run(sequence) // room.pool.kv_block_size)
        return room.pool.admit_if(sequence.shareable) if room.admission.counts_in(most_blocks) else None

    def _begin(self, sequence: Sequence, sweep: list[ScheduledSequence], budget: int) -> int:
        """Put the first tokens of a sequence that has been admitted in a sweep; returns their number."""
        self._enter(sequence)
        if self.waiting and self.tables.have_states:
            self.tables.fork_before(sequence, self.waiting[0])
        count = self._chunk(sequence, budget)
        if sequence.window_table is not None:
            count = min(count, self.tables.window_capacity(sequence))
        self._put(sequence, count, sweep)
        return count

    def _put(self, sequence: Sequence, count: int, sweep: list[ScheduledSequence]) -> None:
        """Put tokens of a prompt in a sweep."""
        self._grow(sequence, count)
        sweep.append(ScheduledSequence(sequence, count))
        if sequence.targets:  # perhaps a row of logits for each
            self._spare_logit_rows -= count

    def _follows_one_in_flight(self, sequence: Sequence) -> bool:
        """Put a sequence aside if one in flight is computing a prefix of its prompt; False: none is.

        A snapshot of a state may be left by any of them. KV alone is looked for where prompts are in order, at the last
        one: in the tier that computes, all that is in a sweep can be taken over in that sweep.
        """
        if not self.tables.share_prefixes or sequence.token_slot is not None or self.limits.admission == "static":
            return False
        sources = self.running if self.tables.have_states else islice(reversed(self.running), 1)
        ends = [(end, s) for s in sources if (end := self.tables.prefix_ahead(s, sequence))]
        if not ends:  # as for most sequences
            return False
        tiers = {kv_placement.tier for kv_placement in islice(self._open_placements(sequence), 1)}
        ends = [pair for pair in ends if pair[1].kv_placement.tier in tiers]
        end, source = max(ends, key=lambda pair: pair[0], default=(0, sequence))
        if end:
            sequence.prefix_source, sequence.num_source_tokens = source, end
            self._followers.setdefault(source, []).append(sequence)
        return end > 0

    def _admissible(self) -> Iterator[Sequence]:
        """The first waiting sequences, as many as may be admitted. Followers count as no longer than their source."""
        return islice(self.waiting, max(1, self.limits.max_num_seqs - len(self.running)))

    def _waits_for_prefix(self, sequence: Sequence) -> bool:
        """Tell whether a sequence's prefix source, not gone for good, has yet to insert blocks for it."""
        source = sequence.prefix_source
        if source is None or not self.tables.share_prefixes:
            return False
        if source.block_table:
            pool = self.tables.pool(source)
            blocks = sequence.num_source_tokens // pool.kv_block_size
            if source.state is not None and source.num_computed < blocks * pool.kv_block_size:
                return pool.share_prefixes  # the snapshot of its state comes with the end of a sweep
            return pool.share_prefixes and source.num_inserted_blocks < blocks
        return source.num_computed == 0

    def _queue_followers(self, source: Sequence) -> None:
        """Queue the followers of a prefix source at the front, behind those only that were preempted."""
        preempted = []
        while self.waiting and self.waiting[0].token_slot is not None:
            preempted.append(self.waiting.popleft())
        self.waiting.extendleft(reversed(self._followers.pop(source)))
        self.waiting.extendleft(reversed(preempted))

    def _admit_to_placement(
        self,
        sequence: Sequence,
        admission_to: Callable[[str], TierAdmission],
        chunk: int,
    ) -> bool:
        """Admit a sequence to the first placement whose quota and pool allow it; False if none does.

        Args:
            sequence: The sequence.
            admission_to: Admission by tier.
            chunk: Tokens of it that the sweep may have.
        """
        for kv_placement in self._open_placements(sequence):
            allocation = self._allocate(sequence, kv_placement, admission_to(kv_placement.tier), chunk)
            if allocation is not None:
                self._open(sequence, kv_placement, allocation)
                return True
        return False

    def _expected_blocks(self, sequence: Sequence, tier: str) -> int:
        """The blocks that a sequence is expected to have in all in a tier."""
        # The last token generated is never run, so its KV needs no block.
        num_tokens = max(sequence.num_prompt + self._expected_len(sequence) - 1, len(sequence.tokens))
        return -(-num_tokens // self.pools[tier].kv_block_size)

    def _allocate(
        self, sequence: Sequence, kv_placement: KVPlacement, admission: TierAdmission, chunk: int
    ) -> Allocation | None:
        """The first blocks of a sequence that is admitted to a placement; None where it has to wait for blocks."""
        num_blocks = self._expected_blocks(sequence, kv_placement.tier)
        most_blocks = -(-longest_run(sequence) // self.pools[kv_placement.tier].kv_block_size)
        num_sweeps = self._expected_len(sequence) - sequence.num_generated
        growing = Growing(sequence, num_sweeps, chunk, num_blocks, most_blocks)
        return admission.admit(growing, self.tables.num_reserved[kv_placement.tier])

    def _open(self, sequence: Sequence, kv_placement: KVPlacement, allocation: Allocation) -> None:
        """Give a sequence its placement, slots and first blocks."""
        sequence.kv_placement = kv_placement
        self._take_slots(sequence)
        num_reserved = 0
        if self._reserves(kv_placement.tier):
            num_reserved = self._expected_blocks(sequence, kv_placement.tier) - len(allocation.blocks)
        self.tables.open(sequence, allocation, num_reserved)

    def _take_slots(self, sequence: Sequence) -> None:
        if sequence.token_slot is None:
            sequence.token_slot = self._token_slots.take()
        if sequence.kv_placement is KVPlacement.DEFERRED:
            sequence.exchange_slot = self._exchange_slots.take()
            self._admitted_deferred += 1

    def _open_placements(self, sequence: Sequence) -> Iterator[KVPlacement]:
        """Yield the placements that have capacity for one more sequence, in order of preference, but for its KV blocks.

        Where nobody is in flight the others follow: a row let in under earlier limits may fit only a placement that has
        no quota any more, and another call of the engine may have all exchange slots. It runs all the same.
        """
        tried: list[KVPlacement] = []
        for placement in self._placements:
            is_open = self._has_place(placement) and self._is_open(placement, sequence)
            if is_open and self._is_staged_whole(placement, sequence):
                tried.append(placement)
                yield placement
        if not self.running:
            rest = [p for p in self._placements if p not in tried and p is not KVPlacement.DEFERRED]
            rest = [p for p in rest if self._is_staged_whole(p, sequence)]
            rest = [p for p in rest if p is not KVPlacement.CPU or not self.has_layers_on_device]
            yield from sorted(rest, key=lambda p: p is not KVPlacement.STREAMED) if self._lacks_slots else rest

    def _has_place(self, placement: KVPlacement) -> bool:
        if placement is KVPlacement.CPU and self.has_layers_on_device:
            return False  # where an earlier call of the engine has put them
        return self._in_placement[placement] < self.limits.quota(placement)

    def _is_staged_whole(self, placement: KVPlacement, sequence: Sequence) -> bool:
        """Tell whether a staging buffer holds a sequence of a placement however long it becomes."""
        most = self.limits.most_tokens(placement)
        return most is None or longest_run(sequence) <= most

    def _fits_in(self, sequence: Sequence, placement: KVPlacement) -> bool:
        """Tell whether a placement has a quota, and memory for a sequence however long it becomes."""
        pool = self.pools.get(placement.tier)
        has_pool = pool is not None and longest_run(sequence) <= pool.longest_tokens
        return bool(self.limits.quota(placement)) and has_pool and self._is_staged_whole(placement, sequence)

    def _is_open(self, placement: KVPlacement, sequence: Sequence) -> bool:
        """Tell whether a placement takes one more sequence, beside its quota and its KV blocks.

        Where the CPU is late already, it takes only a sequence that fits nowhere else.
        """
        if placement is KVPlacement.CPU and self.sweep_choice and self.sweep_choice.most_on_cpu is not None:
            is_late = self._in_placement[placement] >= self.sweep_choice.most_on_cpu
            return not is_late or not any(self._fits_in(sequence, p) for p in _COMPUTE_ATTENDS)
        return placement is not KVPlacement.DEFERRED or self._may_defer

    @property
    def _may_defer(self) -> bool:
        """Tell whether placement DEFERRED takes one more sequence, beside its quota and its KV blocks."""
        most = self.limits.deferred_rows
        return (most is None or self._admitted_deferred < most) and not self._exchange_slots.is_full

    @property
    def _lacks_slots(self) -> bool:
        """Tell whether placement DEFERRED has quota, and another call of the engine has all its exchange slots."""
        deferred = KVPlacement.DEFERRED
        return self._exchange_slots.is_full and self._in_placement[deferred] < self.limits.quota(deferred)

    def _admission(self, tier: str, sweep: list[ScheduledSequence]) -> TierAdmission:
        """The admission to a tier beside what is in flight there.

        Args:
            tier: The tier.
            sweep: Sequences that are in the sweep so far. More may join it.
        """
        pool = self.pools[tier]

        def in_flight() -> tuple[list[Expected], int]:
            there = {scheduled.sequence: scheduled.num_keys for scheduled in sweep}
            expected = [
                Expected(s, self._expected_len(s) - s.num_generated, delayed=there.get(s, 0) < len(s.tokens))
                for s in self.running
                if s.kv_placement.tier == tier
            ]
            longest = max(map(self._expected_len, self._admissible()), default=0)
            return expected, longest or max(map(self._expected_len, self.running))  # nobody waits where one moves

        missing = self._most_blocks[tier] - self.tables.num_held[tier]
        return TierAdmission(pool, in_flight, pool.num_available - missing, reserves=self._reserves(tier))

    def _reserves(self, tier: str) -> bool:
        """Tell whether a sequence's last block is reserved when it is admitted to a tier."""
        is_on_disk = isinstance(self.pools[tier], ExtentManager)
        return self.limits.admission == "static" or tier in self._reserving or is_on_disk

    def _expected_len(self, sequence: Sequence) -> int:
        """Tokens that a sequence is expected to generate in all, at least one more than it has."""
        expected, most = self.expected_output_len(sequence), sequence.sampling.max_tokens
        return max(expected if expected < most else most, sequence.num_generated + 1)

    def _grow(self, sequence: Sequence, count: int) -> bool:
        """Allocate blocks for `count` more tokens; False if the sequence itself had to be preempted."""
        while not self.tables.grow(sequence, count):
            if self._make_room(sequence.kv_placement.tier) is sequence:
                return False
        has_prompt, tier = sequence.num_computed < sequence.num_prompt, sequence.kv_placement.tier
        if has_prompt and self.tables.share_prefixes and tier == self.limits.compute_tier:
            # All KV of a batch is written, layer by layer, before attention reads it, and batches run in the order of
            # the sweep: even a sequence of the same sweep may take these blocks. KV of other tiers is stored behind,
            # so there `commit` inserts them.
            self.tables.insert_prompt(sequence, sequence.num_computed + count)
        return True

    def _make_room(self, tier: str) -> Sequence | None:
        """Move the youngest sequence of a tier to the host, or preempt it.

        Returns:
            The sequence that was preempted; None: it has moved.
        """
        youngest = self._youngest(tier)
        if self._swap_out(youngest):
            return None
        self._preempt(youngest)
        return youngest

    def _preempt_youngest(self, tier: str) -> None:
        self._preempt(self._youngest(tier))

    def _youngest(self, tier: str) -> Sequence:
        """The youngest sequence of a tier whose token is not on its way: the CPU may be reading its KV."""
        return next(s for s in reversed(self.running) if s.kv_placement.tier == tier and s.num_remaining > 0)

    def _preempt(self, sequence: Sequence) -> None:
        self._leave(sequence)
        self.num_preempted += 1
        self._start_over(sequence)

    def _start_over(self, sequence: Sequence) -> None:
        self._forget_computed(sequence)
        self.waiting.appendleft(sequence)

    def _forget_computed(self, sequence: Sequence) -> None:
        """Count nothing of a sequence as computed."""
        sequence.num_computed = sequence.num_matched_blocks = sequence.num_inserted_blocks = sequence.node = 0
        sequence.swap_table = None


def longest_run(sequence: Sequence) -> int:
    """Tokens of a sequence that are run if it is as long as it may be: its last generated token is not."""
    return sequence.num_prompt + (0 if sequence.targets else sequence.sampling.max_tokens - 1)


def _on_its_way(sequence: Sequence) -> bool:
    """Tell whether a sequence's last token goes through the layers, or is one that the host does not know yet.

    Its last token may be under way with placement DEFERRED, and in a pipeline. A token that the host does not know
    counts with placement DEFERRED only, whose tokens last for sweeps anyway; none is begun for a sequence that may have
    ended.
    """
    return sequence.num_remaining == 0 or (
        sequence.kv_placement is KVPlacement.DEFERRED and sequence.tokens[-1] == PENDING
    )
