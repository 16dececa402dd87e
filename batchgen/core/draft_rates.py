"""Rates of drafts: how often something can be proposed for a sequence, and how much of it is accepted. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from batchgen.core.errors import InputError

MOST_DRAFTS = 16  # of a sequence in a sweep


def check_drafts(name: str, drafts: int) -> None:
    """Raise InputError for a number of drafts that a sequence cannot have in a sweep.

    Args:
        name: Name of the option.
        drafts: Its value.
    """
    if not 0 <= drafts <= MOST_DRAFTS:
        raise InputError(f"{name} must be 0 to {MOST_DRAFTS}, not {drafts}")


@dataclass(frozen=True)
class DraftRates:
    """Drafts that the rows of a job are expected to have and to accept.

    Attributes:
        proposed: Part of the decoding steps in which anything is proposed.
        accepted: Chance that a draft is accepted if those before it are.
        most: Most drafts of a sequence in a sweep; 0: there are tokens that grammars force alone.
        forced: Tokens that a decoding step has beside its sampled one, as the grammar allows no others: the mean.
        only_while_streaming: Whether there are drafts only where weights or KV come from another tier in each sweep,
            and in memory that is free anyway: nobody has asked for them.
    """

    proposed: float
    accepted: float
    most: int = MOST_DRAFTS
    forced: float = 0.0
    only_while_streaming: bool = False

    def drafts_of(self, most: int) -> float:
        """Mean number of drafts of a sequence in a sweep that allows so many."""
        return self.proposed * most

    def accepted_of(self, most: int) -> float:
        """Mean number of accepted drafts of a sequence in a sweep that allows so many."""
        return self.proposed * expected_accepted(self.accepted, most)


# Rates of a job of which nothing is known yet, where somebody asks for drafts: half of what is typical where answers
# copy nothing from their prompts.
UNKNOWN_RATES = DraftRates(0.2, 0.6)
# Those where nobody asks for drafts: none, so that no job takes longer than its plan says.
NO_RATES = DraftRates(0.0, 0.0, only_while_streaming=True)


# Sequences that have a state slot for drafts of their own. Where many more are in flight, computation binds anyway.
_MOST_DRAFT_STATES = 64


def draft_state_share(max_num_seqs: int) -> float:
    """State slots for drafts, as a part of the sequences in flight.

    Args:
        max_num_seqs: The most sequences in flight.
    """
    return min(1.0, _MOST_DRAFT_STATES / max_num_seqs)


@lru_cache(4096)
def expected_accepted(chance: float, num_drafts: int) -> float:
    """Accepted drafts that are expected of so many in a row.

    Args:
        chance: Chance of each draft if those before it are accepted.
        num_drafts: Number of drafts.
    """
    return float(num_drafts) if chance == 1 else chance * (1 - chance**num_drafts) / (1 - chance)
