"""Drafts of tokens that a grammar forces. No tensors."""

from __future__ import annotations

from collections.abc import Iterable

from batchgen.schedule.draft_proposer import Proposal
from batchgen.schedule.sequence import Sequence


class GrammarProposer:
    """Proposes the text that a grammar leaves no choice about, as the tokenizer would write it.

    The model may write the same bytes with other tokens, so it is asked.
    """

    def begin(self, sequences: Iterable[Sequence]) -> None:
        """Do nothing: each sequence is looked at by itself."""

    def propose(self, sequence: Sequence, most: int) -> Proposal | None:
        """The tokens of the forced text, at most so many; None: the next byte is free."""
        tokens = sequence.constraint.forced() if sequence.constraint is not None else []
        return Proposal(tokens[:most], 0) if tokens else None

    def ended(self, sequence: Sequence) -> None:
        """Do nothing: the grammar is all there is to know."""
