"""What runs in the next sweep: admission, chunked prefill, KV accounting. No tensors, no torch.

`continuous` admission lets finished sequences leave and new ones in at every sweep; `static` fills a block and
runs it to its end before the next (FlexGen's zig-zag block schedule). Admission is on projected peak KV: a
sequence enters only if the blocks it and all sequences in flight are still expected to need are there. Where
outputs grow beyond what was expected, the youngest sequence gives way and is run again later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from batchgen.runtime.block_manager import BlockManager
from batchgen.runtime.sequence import Sequence


@dataclass(frozen=True)
class SchedulerLimits:
    """max_num_seqs: sequences in flight. max_num_batched_tokens: tokens in one sweep; longer prompts are chunked."""

    max_num_seqs: int
    max_num_batched_tokens: int
    admission: str = "continuous"  # or "static"


@dataclass(frozen=True)
class ScheduledSequence:
    """`num_tokens` tokens of a sequence, from `num_computed` on; `samples` if they reach its last one."""

    sequence: Sequence
    num_tokens: int

    @property
    def samples(self) -> bool:
        return self.sequence.num_computed + self.num_tokens == len(self.sequence.tokens)


class Scheduler:
    """Invariant: blocks reserved for sequences in flight never exceed the blocks available."""

    def __init__(
        self,
        blocks: BlockManager,
        limits: SchedulerLimits,
        expected_output_len: Callable[[Sequence], int] | None = None,
    ) -> None:
        """expected_output_len: tokens a sequence is expected to generate, for admission; by default max_tokens,
        with which no sequence ever has to give way."""
        self.blocks = blocks
        self.limits = limits
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in order of admission
        self.num_preempted = 0
        self._expected = expected_output_len or (lambda s: s.sampling.max_tokens)
        self._reserved = 0
        self._filling = True  # static admission: the current block still takes sequences

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def schedule(self) -> list[ScheduledSequence]:
        """The next sweep. Allocates its blocks; empty only if there is no work."""
        budget = self.limits.max_num_batched_tokens
        sweep: list[ScheduledSequence] = []
        i = 0
        while i < len(self.running):  # giving way takes from the end, where the youngest are
            sequence = self.running[i]
            i += 1
            remaining = len(sequence.tokens) - sequence.num_computed
            # Decodes always ride along; prefills share what the token budget leaves.
            count = 1 if remaining == 1 else min(remaining, budget)
            if count > 0 and self._grow(sequence, count):
                budget -= count
                sweep.append(ScheduledSequence(sequence, count))
        self._admit(sweep, budget)
        return sweep

    def commit(self, sweep: list[ScheduledSequence]) -> None:
        """The sweep has run: its tokens' KV is there."""
        for scheduled in sweep:
            scheduled.sequence.num_computed += scheduled.num_tokens

    def finish(self, sequence: Sequence) -> None:
        """The sequence leaves and its blocks are released."""
        self.running.remove(sequence)
        self._release(sequence)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.blocks.block_size)

    def _admit(self, sweep: list[ScheduledSequence], budget: int) -> None:
        if self.limits.admission == "static":
            if not self.running:
                self._filling = True
            if not self._filling:
                return
        while self.waiting and budget > 0:
            sequence = self.waiting[0]
            matched = self.blocks.match(sequence.tokens)
            expected = max(self._expected(sequence), sequence.num_generated + 1)
            length = sequence.num_prompt + min(expected, sequence.sampling.max_tokens)
            # The last token generated is never run, so its KV needs no place.
            new = max(self._blocks_for(length - 1), self._blocks_for(len(sequence.tokens))) - len(matched)
            room = self.blocks.num_available - self.blocks.num_evictable_in(matched) - self._reserved
            if len(self.running) >= self.limits.max_num_seqs or new > room:
                self._filling = False
                return
            self.waiting.popleft()
            self.running.append(sequence)
            self.blocks.take(matched)
            sequence.block_table.extend(matched)
            sequence.num_computed = len(matched) * self.blocks.block_size
            sequence.num_cached = min(sequence.num_computed, sequence.num_prompt)
            sequence.num_matched_blocks = sequence.num_entered_blocks = len(matched)
            sequence.node = self.blocks.node(matched[-1]) if matched else 0
            sequence.reserved_blocks = new
            self._reserved += new
            count = min(len(sequence.tokens) - sequence.num_computed, budget)
            self._grow(sequence, count)
            budget -= count
            sweep.append(ScheduledSequence(sequence, count))

    def _grow(self, sequence: Sequence, count: int) -> bool:
        """Blocks for `count` more tokens; False if the sequence itself had to give way."""
        needed = self._blocks_for(sequence.num_computed + count)
        while len(sequence.block_table) < needed:
            if sequence.reserved_blocks:
                sequence.reserved_blocks -= 1
                self._reserved -= 1
            else:
                while self.blocks.num_available <= self._reserved:
                    youngest = self.running[-1]
                    self._preempt(youngest)
                    if youngest is sequence:
                        return False
            sequence.block_table.append(self.blocks.allocate())
        self._enter_prompt_blocks(sequence, sequence.num_computed + count)
        return True

    def _enter_prompt_blocks(self, sequence: Sequence, num_tokens: int) -> None:
        """Blocks filled with prompt tokens by this sweep become findable: all KV of a sweep is written, layer by
        layer, before attention reads it, so even a sequence of the same sweep may take them."""
        size = self.blocks.block_size
        for b in range(sequence.num_entered_blocks, min(num_tokens, sequence.num_prompt) // size):
            tokens = sequence.tokens[b * size : (b + 1) * size]
            sequence.node = self.blocks.enter(sequence.node, tokens, sequence.block_table[b])
            sequence.num_entered_blocks = b + 1

    def _preempt(self, sequence: Sequence) -> None:
        self.finish(sequence)
        self.num_preempted += 1
        sequence.num_computed = sequence.num_matched_blocks = sequence.num_entered_blocks = sequence.node = 0
        self.waiting.appendleft(sequence)

    def _release(self, sequence: Sequence) -> None:
        self._reserved -= sequence.reserved_blocks
        sequence.reserved_blocks = 0
        self.blocks.release(sequence.block_table)
        sequence.block_table = type(sequence.block_table)("i")
