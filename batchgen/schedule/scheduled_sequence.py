"""A sequence's tokens in one sweep. No tensors."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat
from typing import NamedTuple

from batchgen.core.kv_placement import KVPlacement
from batchgen.schedule.sequence import Sequence


class ScheduledSequence(NamedTuple):  # one for each sequence in flight, in every sweep
    """The tokens of a sequence that are in a sweep, from `num_computed` on; its drafts come after the last one.

    Attributes:
        sequence: The sequence.
        num_tokens: Number of the tokens.
    """

    sequence: Sequence
    num_tokens: int

    @property
    def num_keys(self) -> int:
        """Tokens whose KV the sequence has once the sweep has run; until `commit`."""
        return self.sequence.num_computed + self.num_tokens

    @property
    def prefill_keys(self) -> int:
        """Tokens that its tokens in the sweep attend to, all together."""
        return self.num_tokens * (self.num_keys - (self.num_tokens - 1) // 2)

    @property
    def num_drafts(self) -> int:
        """Drafts among its tokens in the sweep; until `commit`."""
        return max(0, self.num_keys - len(self.sequence.tokens))

    @property
    def decodes(self) -> bool:
        """Tell whether it has one token in the sweep, after its prompt."""
        return self.num_tokens == 1 and self.sequence.num_computed >= self.sequence.num_prompt

    @property
    def defers(self) -> bool:
        """Tell whether the token only begins in this sweep: the last one there is, since those after it need its KV.

        A snapshot that the sequence has taken over might be gone when the CPU comes to it, so one sweep goes first.
        """
        sequence = self.sequence
        return (
            sequence.kv_placement is KVPlacement.DEFERRED
            and self.decodes
            and self.num_keys == len(sequence.tokens)
            and (sequence.state is None or sequence.state.source == sequence.state.target)
        )

    @property
    def samples(self) -> bool:
        """Tell whether its tokens reach the last one there is, so that the next one is sampled in this sweep."""
        return self.num_keys >= len(self.sequence.tokens) and not self.defers

    @property
    def logits_positions(self) -> range:
        """The positions, among its tokens in the sweep, whose logits are made."""
        if self.defers:
            return range(0)
        return range(max(self.sequence.num_computed, self.sequence.next_logits_position), self.num_keys)

    @property
    def num_logits(self) -> int:
        """The number of `logits_positions`."""
        sequence = self.sequence
        if sequence.targets or sequence.kv_placement is KVPlacement.DEFERRED:
            return len(self.logits_positions)
        return max(0, sequence.num_computed + self.num_tokens - len(sequence.tokens) + 1)  # from the last one on


def next_tokens(sequences: Iterable[Sequence]) -> Iterable[ScheduledSequence]:
    """One token of each sequence, made without a call of a Python function for each."""
    return map(tuple.__new__, repeat(ScheduledSequence), zip(sequences, repeat(1)))
