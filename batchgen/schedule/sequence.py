"""One sample of one request while it is in flight. No tensors."""

from __future__ import annotations

import copy
from array import array
from collections.abc import Iterable
from collections.abc import Sequence as List
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import numpy as np

from batchgen.core.kv_placement import KVPlacement
from batchgen.core.request import SamplingParams
from batchgen.schedule.state_slots import StateSlot

# Stands for a token that has been sampled on the device and has not reached the host yet.
PENDING = -1
# Stands for a token that cannot be chosen, as the logits hold NaN or infinity.
NOT_FINITE = -2


class Constraint(Protocol):
    """The tokens that a sample's grammar allows next; `batchgen.runtime.grammar` makes it.

    Attributes:
        error: The reason why the sample cannot go on, or None.
        takes_drafts: Whether `after` and `forced` may be called.
    """

    error: str | None
    takes_drafts: bool

    def mask(self) -> np.ndarray:
        """Bits of the tokens that may come next, int32 [words of 32 tokens], lowest bit first."""
        ...

    def after(self, num_drafts: int) -> Constraint:
        """The state after the first drafts of the sequence, as far as sampling needs it."""
        ...

    def forced(self) -> list[int]:
        """The tokens that the grammar probably leaves no choice about."""
        ...


@dataclass(frozen=True)
class ScoredPosition:
    """A scored position: what follows one token.

    Attributes:
        logprobs: Log-probabilities of the tokens asked for; meaningless where the logits hold NaN or infinity.
        argmax: Most likely token, the first of equal ones; NOT_FINITE where the logits hold NaN or infinity.
        top: The top-k as (token, log-probability), best first.
    """

    logprobs: tuple[float, ...]
    argmax: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(eq=False, slots=True)
class Sequence:
    """One sample of one request while it is in flight: its tokens so far, and how far their KV has been computed.

    Logits are asked for of the last token; where tokens are scored, of every token from `scored_from` on.

    Invariant: num_computed < len(tokens) while the sequence is scheduled; the tokens from num_computed on are what the
    next sweeps run. While exactly one of them is left the sequence decodes, while more are left it prefills. None is
    left while a token of placement DEFERRED goes through the layers, for more than one sweep.

    Attributes:
        request_index: Index of the request.
        row_id: Id of its row.
        sample_index: Number of the sample among those of the request.
        tokens: Tokens of the prompt and those generated. The last one may be PENDING: the device has it, at
            `token_slot` of its table of tokens.
        sampling: Sampling parameters.
        kv_placement: Placement of the KV of a sequence in flight; admission sets it.
        num_prompt: Tokens of the prompt.
        num_restored: Generated tokens that come from an earlier run.
        num_computed: Leading tokens whose KV has been computed.
        num_cached: Tokens of the prompt whose KV came from another sequence.
        block_table: KV blocks, in the order of the tokens.
        window_table: KV blocks in layers with a sliding window; None: they share the other table.
        num_freed: Leading null blocks of `window_table`.
        state: Slots in state layers of a sequence in flight; None: there are no such layers.
        forks: Numbers of leading tokens of its prompt that others share. Where state layers are, it leaves a snapshot
            after the whole blocks of these tokens.
        num_matched_blocks: Leading blocks taken from the prefix cache.
        num_inserted_blocks: Leading blocks inserted in the prefix cache.
        node: Trie node of the last of these.
        logprobs: A `SampledToken` for each token generated, if log-probabilities are asked for.
        reserved_blocks: Blocks promised at admission and not yet allocated.
        targets: For each of the last tokens, where these are scored, the tokens whose log-probabilities are wanted.
        scores: Scores so far, in order.
        prefix_source: Sequence that computes the first tokens for this one too; None: there is none.
        num_source_tokens: Number of these tokens.
        computes_prompt: Whether it is the sample, of several, that computes their prompt.
        takes_prefix: Whether it may take over KV that others have computed.
        is_whole: Whether all of its tokens go through the layers in one sweep, as they attend to each other.
        constraint: State of its grammar, as far as `tokens` go, which outlives a preemption; None: it has none.
        drafts: Tokens that a proposer expects after `tokens`, in the sweep that is under way. They are judged one by
            one when the sweep has run, and gone then.
        drafted: For a sequence made by `after_drafts`, the sequence that it stands for; None: it is one itself.
        token_slot: Slot of its last token in the device's table, from its first admission to its end.
        exchange_slot: Slot of its queries for the CPU, of placement DEFERRED while it is in flight.
        swap_table: Blocks of the pool where its KV was that the first blocks of `block_table` are filled from in the
            sweep, null blocks for those that are filled already; None: it stays in its pool.
    """

    request_index: int
    row_id: str | int
    sample_index: int
    tokens: list[int]
    sampling: SamplingParams
    kv_placement: KVPlacement = KVPlacement.DEVICE
    num_prompt: int = 0
    num_restored: int = 0
    num_computed: int = 0
    num_cached: int = 0
    block_table: array[int] = field(default_factory=lambda: array("i"))
    window_table: array[int] | None = None
    num_freed: int = 0
    state: StateSlot | None = None
    forks: frozenset[int] = frozenset()
    num_matched_blocks: int = 0
    num_inserted_blocks: int = 0
    node: int = 0
    logprobs: list[Any] = field(default_factory=list)
    reserved_blocks: int = 0
    targets: tuple[tuple[int, ...], ...] = ()
    scores: list[ScoredPosition] = field(default_factory=list)
    prefix_source: Sequence | None = None
    num_source_tokens: int = 0
    computes_prompt: bool = True
    takes_prefix: bool = True
    is_whole: bool = False
    constraint: Constraint | None = None
    drafts: List[int] = ()
    drafted: Sequence | None = None
    token_slot: int | None = None
    exchange_slot: int | None = None
    swap_table: array[int] | None = None

    def __post_init__(self) -> None:
        self.num_prompt = len(self.tokens)

    def table(self, windowed: bool) -> array[int]:
        """Its blocks in layers with a sliding window, or in the others."""
        return self.window_table if windowed and self.window_table is not None else self.block_table

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def num_remaining(self) -> int:
        """Tokens that have yet to be run: one where the sequence decodes."""
        return len(self.tokens) - self.num_computed

    @property
    def is_complete(self) -> bool:
        """Tell whether there is nothing left to run: all its results are there, or on their way."""
        return bool(complete((self,)))

    @property
    def scored_from(self) -> int:
        """The first position that is scored."""
        return self.num_prompt - len(self.targets)

    @property
    def next_logits_position(self) -> int:
        """The first position whose logits are still asked for."""
        return self.scored_from + len(self.scores) if self.targets else len(self.tokens) - 1

    @property
    def shareable(self) -> list[int]:
        """Tokens whose KV may be taken over, and the one after them, which has to be run for what is asked for."""
        if not self.takes_prefix:
            return []
        return self.tokens[: self.next_logits_position + 1] if self.targets else self.tokens

    @property
    def generated(self) -> list[int]:
        return self.tokens[self.num_prompt :]


def after_drafts(sequence: Sequence, num_drafts: int) -> Sequence:
    """A sequence as it will be if its first drafts are accepted, to sample the token after them from.

    Args:
        sequence: A sequence with drafts.
        num_drafts: Number of the drafts; 0: the sequence itself.
    """
    if num_drafts == 0:
        return sequence
    after = copy.copy(sequence)
    after.tokens = [*sequence.tokens, *sequence.drafts[:num_drafts]]
    after.drafts, after.drafted = (), sequence
    if sequence.constraint is not None:
        after.constraint = sequence.constraint.after(num_drafts)
    return after


def complete(sequences: Iterable[Sequence]) -> list[Sequence]:
    """The sequences that have nothing left to run: all their results are there, or on their way."""
    return [  # looks at each sequence of every sweep
        s
        for s in sequences
        if (len(s.tokens) == s.num_computed if s.targets else len(s.tokens) - s.num_prompt >= s.sampling.max_tokens)
    ]


def in_flight(slot: int | None) -> int:
    """The slot of a sequence in flight, which has one."""
    assert slot is not None, "the sequence is not in flight"
    return slot


# A row of logits: a sequence, and the position of its token that the logits follow.
LogitsRow: TypeAlias = tuple[Sequence, int]
