"""The pages that decoding tokens attend to, where they do not attend to all of them. No torch here.

A page is a KV block of a sequence. For each page and KV head the smallest and the largest number of each key channel
are kept: the page's summary. With them a query has an upper bound of its product with any key of the page (Quest, arXiv
2406.10774, section 3.3). The softmax of a head's bounds says which share of its attention each page may have, and a
page's score is the sum of these shares over all heads. All heads of a layer attend to the same pages. The first page
and the newest ones are always among them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from batchgen.core.attention_budget import AttentionBudget
from batchgen.ops.attention_items import numbers_within
from batchgen.ops.attention_plan import (
    MIN_SHARED_SEQUENCES,
    AttentionPlan,
    DecodeGroup,
    PageChoice,
    SharedGroup,
    SweepTables,
    plan_attention,
)


@dataclass(frozen=True)
class PageTables:
    """The sequences of a sweep as the choice of pages sees them, in packing order.

    Attributes:
        budget: Pages that a token attends to.
        decodes: For each sequence, whether its token comes after its prompt, bool [n].
        summaries: For each block of the sweep's block tables, the number of its summary, int32.
    """

    budget: AttentionBudget
    decodes: np.ndarray
    summaries: np.ndarray


def chosen_groups(choice: PageChoice, table: np.ndarray) -> list[DecodeGroup]:
    """The sequences that choose as decode groups, with blocks from a table of chosen ones, int32 [n, most_pages]."""
    breaks = np.flatnonzero(np.diff(choice.tokens) != 1) + 1
    ranges = np.split(np.arange(len(choice.tokens)), breaks) if len(choice.tokens) else []
    return [
        DecodeGroup(
            int(choice.tokens[part[0]]),
            int(choice.tokens[part[-1]]) + 1,
            table[part[0] : part[-1] + 1],
            choice.num_keys[part],
            np.zeros(len(part), np.int64),
        )
        for part in ranges
    ]


def plan_chosen(
    tables: SweepTables,
    pages: PageTables,
    groups: Sequence[SharedGroup],
    *,
    kv_block_size: int,
    key_bytes: int | None,
) -> AttentionPlan:
    """The attention plan of layers in which decoding tokens choose pages. Other tokens attend to all keys.

    Args:
        tables: Sequences of the sweep, in packing order.
        pages: Budget, and what the choice needs to know of the same sequences.
        groups: Shared groups, with indices in packing order.
        kv_block_size: Number of tokens in a KV block.
        key_bytes: Bytes of one token's keys in one layer; None: a GPU attends.
    """
    num_blocks = -(-tables.num_keys // kv_block_size)
    num_pages = np.array([pages.budget.pages(count, kv_block_size) for count in num_blocks.tolist()], np.int64)
    chooses = pages.decodes & (tables.num_queries == 1) & (num_pages < num_blocks)
    kept = [part for group in groups for part in without_members(group, chooses)]
    plan = plan_attention(tables, kept, kv_block_size=kv_block_size, key_bytes=key_bytes, left_out=chooses)
    members = np.flatnonzero(chooses)
    places = _places(tables.tables[members], num_blocks[members])
    last_keys = tables.num_keys[members] - (num_blocks[members] - 1) * kv_block_size
    before, after = tables.num_cached // kv_block_size, tables.num_keys // kv_block_size
    complete = _places(tables.tables[:-1] + before, after - before)
    choice = PageChoice(
        tokens=tables.starts[members],
        starts=np.concatenate([[0], np.cumsum(num_blocks[members])]).astype(np.int64),
        blocks=np.ascontiguousarray(tables.blocks[places], np.int32),
        summaries=np.ascontiguousarray(pages.summaries[places], np.int32),
        num_pages=num_pages[members],
        num_keys=(num_pages[members] - 1) * kv_block_size + last_keys,
        complete_blocks=tables.blocks[complete].astype(np.int64),
        complete_summaries=pages.summaries[complete].astype(np.int64),
    )
    return replace(plan, pages=choice)


def _places(first: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The places first[i] to first[i] + counts[i] - 1, one range after the other."""
    return numbers_within(counts) + np.repeat(first, counts)


def choice_in_pool(
    budget: AttentionBudget,
    tokens: np.ndarray,
    num_keys: np.ndarray,
    blocks: np.ndarray,
    summaries: np.ndarray,
    kv_block_size: int,
) -> PageChoice:
    """The choice of sequences whose chosen pages are brought from elsewhere, which happens before attention.

    Args:
        budget: Pages that a token attends to.
        tokens: Packed token of each sequence, int64 [n].
        num_keys: Number of tokens of each sequence after the sweep, int64 [n].
        blocks: All KV blocks of each sequence where they lie, one table after the other, int32.
        summaries: The number of each block's summary, int32.
        kv_block_size: Number of tokens in a KV block.
    """
    num_blocks = -(-num_keys // kv_block_size)
    num_pages = np.array([budget.pages(count, kv_block_size) for count in num_blocks.tolist()], np.int64)
    nothing = np.zeros(0, np.int64)
    return PageChoice(
        tokens=tokens,
        starts=np.concatenate([[0], np.cumsum(num_blocks)]).astype(np.int64),
        blocks=np.ascontiguousarray(blocks, np.int32),
        summaries=np.ascontiguousarray(summaries, np.int32),
        num_pages=num_pages,
        num_keys=num_keys - (num_blocks - num_pages) * kv_block_size,
        complete_blocks=nothing,
        complete_summaries=nothing,
    )


def without_members(group: SharedGroup, left_out: np.ndarray) -> list[SharedGroup]:
    """The parts of a shared group, of neighbours each, that have none of some sequences and are worth an item."""
    members = np.array(group.members)
    members = members[~left_out[members]]
    parts = np.split(members, np.flatnonzero(np.diff(members) != 1) + 1)
    return [SharedGroup(tuple(p.tolist()), group.num_blocks) for p in parts if len(p) >= MIN_SHARED_SEQUENCES]
