"""The interface of proposers: what drafts the next tokens of a sequence. No tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

from batchgen.schedule.sequence import Sequence


class Proposal(NamedTuple):  # some for each sequence of every sweep with drafts
    """Tokens that a sequence may go on with.

    Attributes:
        tokens: The tokens, at least one.
        strength: Number that says how much speaks for them: acceptance is measured for each by itself.
    """

    tokens: list[int]
    strength: int


class Proposer(Protocol):
    """An object that drafts tokens. Wrong drafts cost time and change no text."""

    def begin(self, sequences: Iterable[Sequence]) -> None:
        """Prepare for the sequences of a sweep that may have drafts."""

    def propose(self, sequence: Sequence, most: int) -> Proposal | None:
        """The next tokens of a sequence, at most so many; None: there is nothing to go by."""

    def ended(self, sequence: Sequence) -> None:
        """Note that a sequence has ended, whose tokens are all there."""
