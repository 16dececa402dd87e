"""Sequences that choose which of their KV pages pass through the staging buffer. No torch.

The queries of a layer choose the pages where KV lies, by their summaries; then only these pages are brought. So the
staging buffer has a place for as many pages as a sequence attends to, and attention there is to all of them.
"""

from __future__ import annotations

from collections.abc import Sequence as List
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from batchgen.core.attention_budget import AttentionBudget
from batchgen.core.kv_placement import KVPlacement
from batchgen.ops.attention_plan import AttentionPlan, PageChoice, SharedGroup, SweepTables
from batchgen.ops.page_choice import PageTables, choice_in_pool, plan_chosen, without_members
from batchgen.schedule.scheduled_sequence import ScheduledSequence
from batchgen.schedule.sequence import Sequence
from batchgen.schedule.staging import Choosers


def choosers_of(members: List[ScheduledSequence], budget: AttentionBudget | None, kv_block_size: int) -> Choosers:
    """The pages of each staged sequence that chooses: it decodes, and has more pages than it attends to.

    Args:
        members: Staged sequences.
        budget: Pages that a token attends to; None: all.
        kv_block_size: Tokens of a page.
    """
    choosers: dict[Sequence, int] = {}
    if budget is None:
        return choosers
    for s in members:
        if s.num_tokens == 1 and s.sequence.num_computed >= s.sequence.num_prompt:
            count = -(-s.num_keys // kv_block_size)
            if (pages := budget.pages(count, kv_block_size)) < count:
                choosers[s.sequence] = pages
    return choosers


def summary_numbers(sequence: Sequence, host_blocks: int) -> np.ndarray:
    """The numbers of the summaries of a sequence's pages, int32.

    Args:
        sequence: The sequence.
        host_blocks: Blocks of the host's pool, whose summaries come before those of blocks on disk.
    """
    first = host_blocks if sequence.kv_placement is KVPlacement.DISK else 0
    numbers: np.ndarray = np.frombuffer(sequence.block_table, np.int32) + np.int32(first)
    return numbers


@dataclass(frozen=True)
class ChosenStaging:
    """The staged sequences of a batch in layers that choose pages.

    Attributes:
        sequences: The sequences, in packing order.
        whole: Their tables with all pages.
        staged: Their blocks in the staging buffer: of those that choose, the chosen pages alone.
        choosers: Sequences that choose, with their numbers of pages.
        budget: Pages that a token attends to.
        kv_block_size: Tokens of a page.
        host_blocks: Blocks of the host's pool.
    """

    sequences: List[Sequence]
    whole: SweepTables
    staged: dict[Sequence, np.ndarray]
    choosers: Choosers
    budget: AttentionBudget
    kv_block_size: int
    host_blocks: int

    @cached_property
    def _left_out(self) -> np.ndarray:
        """Pages of each sequence that are not brought, int64 [n]; all of them lie before the newest ones."""
        counts = [len(self.staged[sequence]) for sequence in self.sequences]
        return self.whole.num_blocks - np.array(counts, np.int64)

    @cached_property
    def tables(self) -> SweepTables:
        """Tables in the staging buffer: those that choose have a context of their chosen pages alone."""
        left_out = self._left_out
        return SweepTables(
            self.whole.num_queries,
            self.whole.num_cached - left_out * self.kv_block_size,
            self.whole.num_blocks - left_out,
            np.concatenate([self.staged[sequence] for sequence in self.sequences]),
        )

    def plan(self, groups: List[SharedGroup], key_bytes: int | None) -> AttentionPlan:
        """The attention plan. Pages are chosen before it is carried out; those that become complete are summarised.

        Args:
            groups: Sequences with a shared prefix.
            key_bytes: Bytes of one token's keys in one layer; None: a GPU attends.
        """
        chooses = np.array([sequence in self.choosers for sequence in self.sequences], bool)
        kept = [part for group in groups for part in without_members(group, chooses)]
        # The place of a page in a table says which summary it has: of those that choose, that of the newest one.
        numbers = [
            summary_numbers(sequence, self.host_blocks)[left_out : left_out + len(self.staged[sequence])]
            for sequence, left_out in zip(self.sequences, self._left_out.tolist(), strict=True)
        ]
        pages = PageTables(self.budget, np.zeros(len(self.sequences), bool), np.concatenate(numbers))
        return plan_chosen(self.tables, pages, kept, kv_block_size=self.kv_block_size, key_bytes=key_bytes)

    def choice(self, start: int) -> PageChoice:
        """The choice of pages, with tokens counted in the batch. start: first token of these sequences."""
        row_of = {sequence: i for i, sequence in enumerate(self.sequences)}
        rows = np.array([row_of[sequence] for sequence in self.choosers], np.int64)
        used = self.whole.num_blocks[rows].tolist()
        blocks = [np.frombuffer(s.block_table, np.int32)[:n] for s, n in zip(self.choosers, used, strict=True)]
        numbers = [summary_numbers(s, self.host_blocks)[:n] for s, n in zip(self.choosers, used, strict=True)]
        return choice_in_pool(
            self.budget,
            start + self.whole.starts[rows],
            self.whole.num_keys[rows],
            np.concatenate(blocks),
            np.concatenate(numbers),
            self.kv_block_size,
        )
