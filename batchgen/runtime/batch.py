"""One sweep's packed input: token ids, positions, KV slots and the attention plans, as arrays. No torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from batchgen.attention_plan import (
    AttentionPlan,
    SequenceSlice,
    SharedGroup,
    find_shared_groups,
    order_sequences,
    plan_attention,
)
from batchgen.runtime.scheduler import ScheduledSequence
from batchgen.runtime.sequence import Sequence


@dataclass(frozen=True)
class PackedBatch:
    """Tokens of all scheduled sequences, one after the other, without padding.

    token_ids, positions, slots: int64 [tokens]; a slot is block * block_size + offset.
    plans: the attention plan for each sliding window in the model (None: full attention).
    sampled: sequences whose next token this sweep yields; sampled_rows: int64, the row of each one's last token.
    """

    token_ids: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    plans: dict[int | None, AttentionPlan]
    sampled: list[Sequence]
    sampled_rows: np.ndarray

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


def pack(
    sweep: list[ScheduledSequence],
    *,
    block_size: int,
    key_bytes: int,
    windows: frozenset[int | None],
) -> PackedBatch:
    """Packs a sweep. key_bytes: bytes of one token's K in one layer."""
    slices = [
        SequenceSlice(s.num_tokens, s.sequence.num_computed, np.array(s.sequence.block_table, dtype=np.int32))
        for s in sweep
    ]
    groups = find_shared_groups(slices, [s.sequence.num_matched_blocks for s in sweep], block_size)
    order = order_sequences(slices, groups)
    place = {i: position for position, i in enumerate(order)}
    sweep, slices = [sweep[i] for i in order], [slices[i] for i in order]
    groups = [SharedGroup(tuple(sorted(place[i] for i in g.members)), g.num_blocks) for g in groups]

    token_ids, positions, slots, sampled, sampled_rows = [], [], [], [], []
    row = 0
    for scheduled, part in zip(sweep, slices, strict=True):
        sequence = scheduled.sequence
        start, stop = part.num_cached, part.num_keys
        token_ids.extend(sequence.tokens[start:stop])
        if part.num_queries == 1:  # most sequences decode: no small arrays for them
            positions.append(start)
            slots.append(sequence.block_table[start // block_size] * block_size + start % block_size)
        else:
            span = np.arange(start, stop)
            positions.extend(span.tolist())
            slots.extend((part.blocks[span // block_size] * block_size + span % block_size).tolist())
        row += part.num_queries
        if scheduled.samples:
            sampled.append(sequence)
            sampled_rows.append(row - 1)
    return PackedBatch(
        token_ids=np.array(token_ids, dtype=np.int64),
        positions=np.array(positions, dtype=np.int64),
        slots=np.array(slots, dtype=np.int64),
        plans={
            window: plan_attention(slices, groups, block_size=block_size, key_bytes=key_bytes, window=window)
            for window in windows
        },
        sampled=sampled,
        sampled_rows=np.array(sampled_rows, dtype=np.int64),
    )
